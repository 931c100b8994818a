"""How far the clocks of two hosts are apart, from requests and their answers.

Of a request that left at t1, arrived at t2, and whose answer left at t3 and arrived at t4, the offset is ((t2 - t1) + (t3 - t4)) / 2,
wrong by at most half the round trip without the time in between (RFC 5905, section 8). The exchange with the shortest round trip counts.
"""

from __future__ import annotations

from typing import NamedTuple

WINDOW_NS = 600 * 10**9  # an older exchange no longer counts
DRIFT = 50e-6  # that two quartz clocks are apart after a second, at most
MOST_NS = 1 << 61  # of a clock: no host runs for 73 years


class Estimate(NamedTuple):
    """The other clock minus ours, and by how much that may be wrong."""

    offset_ns: int
    uncertainty_ns: int


class Offset:
    """Estimates the offset; `applied` changes only if it must, so that equal times stay equal after they were moved."""

    def __init__(self) -> None:
        self.applied: Estimate | None = None
        self._best: tuple[int, Estimate] | None = None  # when it was measured, what

    def add(self, t1_ns: int, t2_ns: int, t3_ns: int, t4_ns: int) -> None:
        """Add one exchange; t1 and t4 by our clock, t2 and t3 by the other."""
        if not (0 <= t1_ns <= t4_ns < MOST_NS and 0 <= t2_ns <= t3_ns < MOST_NS and t3_ns - t2_ns <= t4_ns - t1_ns):
            return
        half_ns = ((t4_ns - t1_ns) - (t3_ns - t2_ns) + 1) // 2
        new = Estimate(((t2_ns - t1_ns) + (t3_ns - t4_ns)) // 2, half_ns)
        best = self._best
        if best is None or t4_ns - best[0] > WINDOW_NS or new.uncertainty_ns <= self._now(best, t4_ns):
            self._best = best = (t4_ns, new)
        now = Estimate(best[1].offset_ns, self._now(best, t4_ns))
        used = self.applied
        if (
            used is None
            or now.uncertainty_ns < used.uncertainty_ns // 2
            or abs(now.offset_ns - used.offset_ns) > now.uncertainty_ns + used.uncertainty_ns
        ):
            self.applied = now

    @staticmethod
    def _now(best: tuple[int, Estimate], now_ns: int) -> int:
        return best[1].uncertainty_ns + int((now_ns - best[0]) * DRIFT)
