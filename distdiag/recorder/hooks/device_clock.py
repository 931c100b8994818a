"""Measures the device time of a step's phases on CUDA: pooled events that are queried, never synchronised.

The host runs ahead of the device, so a phase's host time is the time to launch it, and the host's time of a step is short until
the script waits for the device, in which step it is long. Events are recorded on the current stream where a phase begins and ends.
A step ends with its last event. Its record waits in a queue until that event is seen to be done.

While a CUDA graph is captured, no event is recorded or queried: either would become part of the graph or abort its capture.
Events are recorded with the model's device as the current one: if a script never sets the current device, every rank would
otherwise get a context on GPU 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from distdiag.page.layout import Phase

PENDING = 64  # most steps with outstanding events; beyond that, the device times of a step are dropped

Pairs = list[tuple[Phase, Any, Any]]
# takes the device times of phases, and the time from the end of the previous step to the end of this one, ns
Write = Callable[[dict[Phase, int], int | None], None]


class DeviceClock:
    """Pairs of events by phase, read when the device has passed them.

    Args:
        make_event: `torch.cuda.Event(enable_timing=True)`, or an object with `record`, `query` and `elapsed_time` (ms).
        capturing: True while a CUDA graph is captured on the current stream.
    """

    def __init__(
        self,
        make_event: Callable[[], Any],
        on_device: Callable[[], AbstractContextManager[Any]] = nullcontext,
        capturing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._make, self._on_device, self._capturing = make_event, on_device, capturing
        self._free: list[Any] = []
        self._pairs: Pairs = []
        self._open: dict[Phase, Any] = {}
        self._pending: deque[tuple[Pairs, Write]] = deque()
        self._end: Any = None  # the last event of the step that was written last

    def _event(self) -> Any:
        event = self._free.pop() if self._free else self._make()
        with self._on_device():
            event.record()
        return event

    def begin(self, phase: Phase) -> None:
        if not self._capturing():
            self._open[phase] = self._event()

    def end(self, phase: Phase) -> None:
        begun = self._open.pop(phase, None)
        if begun is None:
            return
        if self._capturing():
            self._free.append(begun)
        else:
            self._pairs.append((phase, begun, self._event()))

    def close(self, write: Write) -> None:
        """End the step: `write` is called, in order, once its times are known; without any if they will not be."""
        self._pending.append((self._pairs, write))
        self._pairs = []
        self.poll()
        if len(self._pending) > PENDING:
            pairs, late = self._pending.popleft()
            self._ended(pairs)
            late({}, None)

    def poll(self) -> None:
        """Pass on every step whose last event is done; never waits."""
        while self._pending and not self._capturing():
            pairs, write = self._pending[0]
            if pairs and not pairs[-1][2].query():
                return
            self._pending.popleft()
            times: dict[Phase, int] = {}
            for phase, a, b in pairs:
                times[phase] = times.get(phase, 0) + int(a.elapsed_time(b) * 1e6)
            step_ns = None
            if pairs and self._end is not None and self._end.query():
                step_ns = int(self._end.elapsed_time(pairs[-1][2]) * 1e6)
            self._ended(pairs)
            write(times, step_ns)

    def _ended(self, pairs: Pairs) -> None:
        """Free the events of a step that is written, except the last: the next step begins there."""
        if self._end is not None:
            self._free.append(self._end)
        self._free += [e for _, a, b in pairs for e in (a, b)]
        self._end = self._free.pop() if pairs else None


def cuda_clock(device: int) -> DeviceClock:
    return DeviceClock(
        lambda: torch.cuda.Event(enable_timing=True),
        lambda: torch.cuda.device(device),
        torch.cuda.is_current_stream_capturing,
    )


def cuda_index(tensors: Iterable[Any]) -> int | None:
    """Return the CUDA device index of the first tensor that is on CUDA; None if none is."""
    return next((t.device.index for t in tensors if t.device.type == "cuda"), None)
