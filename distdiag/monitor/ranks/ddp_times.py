"""Read DDP's communication times from the page's ring and assign them to steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from distdiag.diagnosis.model.snapshot import DdpTime, Step
from distdiag.monitor.ranks.decode import PageDecoder, Ring

MOST_NS = 24 * 3600 * 10**9  # longer times are invalid
UNMATCHED = 64  # steps kept for which not all DDP modules were measured


class DdpTimes:
    """The measurements of one rank. A step is complete once every training DDP module was measured in it."""

    def __init__(self, decoder: PageDecoder, ring: Ring) -> None:
        self.kept: deque[DdpTime] = deque(maxlen=32)
        self._new: list[DdpTime] = []
        self._decoder, self._ring = decoder, ring
        self._parts: dict[int, dict[int, tuple[float, float]]] = {}  # step -> model -> communication and exposed, ms

    def read(self, steps: Iterable[Step]) -> None:
        """Read the new measurements in the ring; `steps` are the rank's last ones, newest first."""
        header, models = self._decoder.header, self._decoder.page.models
        if self._ring.read == header.n_ddp_times:
            return
        known = list(steps)
        trained = {i for i, model in enumerate(models) if model.synced_backwards}
        for record in self._ring.new():
            if record.model >= len(models) or record.comm_ns > MOST_NS:
                continue
            began_s = (record.began_ns - self._decoder.start_ns) / 1e9
            step = next((x for x in known if x.end_s - x.step_ms / 1e3 <= began_s <= x.end_s), None)
            if step is None or not record.per_step:
                continue
            comm_ms = record.comm_ns / 1e6
            exposed_ms = max(0.0, comm_ms - record.overlap_ns / 1e6)
            parts = self._parts.setdefault(step.step, {})
            parts[record.model] = (comm_ms * record.per_step, exposed_ms * record.per_step)
            if trained <= parts.keys():
                del self._parts[step.step]
                self._add(step, [*parts.values()])
        while len(self._parts) > UNMATCHED:
            del self._parts[next(iter(self._parts))]

    def _add(self, step: Step, parts: list[tuple[float, float]]) -> None:
        comm_ms, exposed_ms = (min(sum(values), step.step_ms) for values in zip(*parts, strict=True))
        found = DdpTime(step.step, step.step_ms, comm_ms, exposed_ms)
        self.kept.append(found)
        self._new.append(found)

    def taken(self) -> list[DdpTime]:
        taken, self._new = self._new, []
        return taken
