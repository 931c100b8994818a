"""When the monitor polls: a poll of thousands of ranks takes a second, so polls are stretched, unless a rank begins to wait or to differ."""

from __future__ import annotations

from collections.abc import Callable

TICK_S = 0.25
MOST_OF_A_CORE, LONGEST_TICK_S = 0.15, 6.0  # of the monitor while nothing is suspected that is not yet reported
SHORTEST_TICK_S = 0.05  # while a rank's native frames are awaited
# When a rank begins to wait long, or to differ, polls are not stretched for the first time; at most once in the second,
# each: a hang may follow another long wait, that of the start, within seconds.
HASTE_S, HASTE_EVERY_S = 4.0, (15.0, 60.0)


def stretched_s(poll_cpu_s: float) -> float:
    """Return the time from the begin of a poll to the next, so that polls take a bounded share of a core, up to a longest tick."""
    return min(max(TICK_S, poll_cpu_s / MOST_OF_A_CORE), LONGEST_TICK_S)


class Pace:
    """Remembers when the next poll is due; times by the monotonic clock."""

    def __init__(self) -> None:
        self.poll_at = 0.0
        self._hasty_from: dict[int, float] = {}  # by what was new

    def pause_s(self, began: float) -> float:
        """Return the time from the begin of a poll to the next look at the ranks: short, even if polls are far apart."""
        return max(SHORTEST_TICK_S, min(TICK_S, self.poll_at - began))

    def rests(self, now: float, *news: Callable[[], bool]) -> bool:
        """True if no poll is due and no news is fresh. Each kind of news has its own haste: a straggler does not use up that of a hang."""
        if now + SHORTEST_TICK_S / 2 >= self.poll_at:
            return False
        for i, (begun, every_s) in enumerate(zip(news, HASTE_EVERY_S, strict=False)):
            if now - self._hasty_from.get(i, -every_s) >= every_s and begun():
                self._hasty_from[i] = now
        return all(now - since >= HASTE_S for since in self._hasty_from.values())
