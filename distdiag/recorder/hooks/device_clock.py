"""Device time of a step's phases on CUDA: pooled events that are queried, never synchronised.

The host runs ahead of the device, so a phase's host time is the time to launch it. Events are recorded on the current
stream where a phase begins and ends; the step's record waits in a queue until its last event is seen to be done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from distdiag.page.layout import Phase

PENDING = 64  # steps whose events are outstanding; beyond it the device times of a step are given up


class DeviceClock:
    """Pairs of events by phase, read when they are done.

    Args:
        make_event: `torch.cuda.Event(enable_timing=True)`, or one like it (`record`, `query`, `elapsed_time` in ms).
    """

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._make = make_event
        self._free: list[Any] = []
        self._pairs: list[tuple[Phase, Any, Any]] = []
        self._open: dict[Phase, Any] = {}
        self._pending: deque[tuple[list[tuple[Phase, Any, Any]], Callable[[dict[Phase, int]], None]]] = deque()
        self.given_up = 0

    def _event(self) -> Any:
        event = self._free.pop() if self._free else self._make()
        event.record()
        return event

    def begin(self, phase: Phase) -> None:
        self._open[phase] = self._event()

    def end(self, phase: Phase) -> None:
        begun = self._open.pop(phase, None)
        if begun is not None:
            self._pairs.append((phase, begun, self._event()))

    def drop(self, phase: Phase) -> None:
        """What was begun is no part of the phase after all."""
        begun = self._open.pop(phase, None)
        if begun is not None:
            self._free.append(begun)

    def close(self, write: Callable[[dict[Phase, int]], None]) -> None:
        """The step ended: `write` is called with the phases' device times (ns), in order, once they are known."""
        self._pending.append((self._pairs, write))
        self._pairs = []
        self.poll()
        if len(self._pending) > PENDING:
            pairs, late = self._pending.popleft()
            self._free += [e for _, a, b in pairs for e in (a, b)]
            self.given_up += 1
            late({})

    def poll(self) -> None:
        """Hand over every step whose last event has been seen to be done; never waits."""
        while self._pending:
            pairs, write = self._pending[0]
            if pairs and not pairs[-1][2].query():
                return
            self._pending.popleft()
            times: dict[Phase, int] = {}
            for phase, a, b in pairs:
                times[phase] = times.get(phase, 0) + int(a.elapsed_time(b) * 1e6)
                self._free += (a, b)
            write(times)
