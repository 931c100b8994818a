"""Sample the node's GPUs once a second with NVML. A node without an NVIDIA driver is normal.

A separate thread asks the driver: with a faulty card one NVML call can take minutes, and the monitor must keep judging the
ranks meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distdiag import nvml
from distdiag.diagnosis.model.snapshot import GpuState
from distdiag.monitor.fields import shared
from distdiag.store.rows import GpuRow

KEPT = 60  # samples, one a second
_ENOUGH = 20  # samples before a share is reported
_FAULTY_CLOCKS = ("thermal", "hardware", "brake")  # a power cap is a setting, not a fault
_MOST_XIDS = 16  # kept per card


@dataclass
class _Card:
    """One row of table `gpu`: a card, or one MIG instance of it."""

    index: int  # of its row; NVML's index unless a card is split by MIG
    parent_index: int  # NVML's index of the card
    handle: Any
    parent: Any  # handle of the card: clocks, power and errors belong to it
    mig: bool = False
    lost: bool = False
    events: Any = None  # NVML's event set; None if the driver has none
    others: int | None = None  # processes on it that are not ranks of this job
    throttled: deque[bool] = field(default_factory=lambda: deque(maxlen=KEPT))
    utilization_pct: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    ecc_first: int | None = None
    links_first: int | None = None
    recoveries: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    xids: list[int] = field(default_factory=list)


class Users(NamedTuple):
    """The rank of each GPU."""

    by_index: Mapping[int, int]  # by NVML's index of a card, as the rank itself reports it
    by_pid: Mapping[int, int] = {}  # finds the rank on a MIG instance


class Gpus:
    """Samples of this node's GPUs from NVML; `absent` is the reason if there is none, once known."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.absent: str | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="nvml")
        self._driver: _Driver | None = None
        self._asked: tuple[float, Future[list[GpuRow]]] | None = None  # monotonic time; a request without an answer
        self._states: tuple[GpuState, ...] = ()

    def rows(self, t_s: float, users: Users) -> list[GpuRow]:
        """Request a new sample and return the rows of the newest answer; [] if there is none since the last call."""
        fresh = self._take()
        if self._asked is None and self.absent is None:
            self._asked = time.monotonic(), self._pool.submit(self._sample, t_s, users)
        return fresh

    def states(self) -> tuple[GpuState, ...]:
        """Return the newest sample with the shares of the last minute, for the diagnosis."""
        return self._states

    def silent_s(self) -> float | None:
        """Return the age of a request without an answer; None if there is none."""
        return None if self._asked is None else time.monotonic() - self._asked[0]

    def close(self) -> None:
        """End the thread once it is free; does not wait for the driver."""
        self._pool.shutdown(wait=False)

    def _take(self) -> list[GpuRow]:
        if self._asked is None or not self._asked[1].done():
            return []
        answer, self._asked = self._asked[1], None
        try:
            return answer.result()
        except nvml.Unavailable as e:
            self.absent = str(e)
        except Exception as e:
            self.absent = f"reading them failed: {type(e).__name__}: {e}"
        return []

    def _sample(self, t_s: float, users: Users) -> list[GpuRow]:
        """Take one sample, in the thread, which also loads NVML."""
        if self._driver is None:
            self._driver = _Driver(self.node)
        rows, self._states = self._driver.sample(t_s, users)
        return rows


class _Driver:
    """NVML and the cards, as the thread uses them."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.n = nvml.load()
        self.cards: list[_Card] = []
        for index in range(self.n.nvmlDeviceGetCount()):
            parent = nvml.ask(self.n, self.n.nvmlDeviceGetHandleByIndex, index)
            split = nvml.instances(self.n, parent) if parent is not None else None
            events = self._listen(parent) if parent is not None else None
            for handle in [parent] if split is None else split:
                self.cards.append(
                    _Card(len(self.cards), index, handle, parent, split is not None, parent is None, events)
                )
                events = None  # one listener per card

    def sample(self, t_s: float, users: Users) -> tuple[list[GpuRow], tuple[GpuState, ...]]:
        rows = [self._row(t_s, card, users) for card in self.cards]
        return rows, tuple(self._state(card, row) for card, row in zip(self.cards, rows, strict=True))

    def _row(self, t_s: float, card: _Card, users: Users) -> GpuRow:
        n = self.n
        if not card.lost:
            card.lost = self._is_lost(card)
        if card.lost:
            rank = None if card.mig else users.by_index.get(card.parent_index)
            return GpuRow(t_s=t_s, node=self.node, gpu=card.index, rank=rank)

        use = None if card.mig else nvml.ask(n, n.nvmlDeviceGetUtilizationRates, card.parent)
        throttle = nvml.throttle_reasons(n, card.parent)
        links = nvml.links(n, card.parent)
        pids = nvml.process_ids(n, card.handle)
        ours = [users.by_pid[p] for p in pids or () if p in users.by_pid]
        card.others = len(pids) - len(ours) if pids is not None and ours else None
        rank = ours[0] if len(ours) == 1 else None if card.mig else users.by_index.get(card.parent_index)
        self._hear(card)
        if throttle is not None:
            card.throttled.append(any(w in reason for w in _FAULTY_CLOCKS for reason in throttle))
        if use is not None:
            card.utilization_pct.append(use.gpu)
        if links is not None:
            card.links_first = card.links_first or sum(links)
            recoveries = nvml.link_recoveries(n, card.parent, len(links))
            if recoveries is not None:
                card.recoveries.append(recoveries)
        row = GpuRow(
            t_s=t_s,
            node=self.node,
            gpu=card.index,
            rank=rank,
            **nvml.facts(n, card.parent, card.handle),
            utilization_pct=getattr(use, "gpu", None),
            memory_utilization_pct=getattr(use, "memory", None),
            throttle=None if throttle is None else ", ".join(throttle),
            nvlink_active=None if links is None else sum(links),
            processes=None if pids is None else len(pids),
        )
        if card.ecc_first is None:
            card.ecc_first = row.ecc_uncorrected
        return row

    def _state(self, card: _Card, row: GpuRow) -> GpuState:
        throttled, used, recoveries = card.throttled, card.utilization_pct, card.recoveries
        return GpuState(
            **shared(GpuState, row),
            lost=card.lost,
            others=card.others,
            most_used_pct=max(used) if len(used) == KEPT else None,
            throttled_share=sum(throttled) / len(throttled) if len(throttled) >= _ENOUGH else None,
            ecc_before=card.ecc_first,
            xids=tuple(card.xids),
            nvlink_before=card.links_first,
            nvlink_recoveries=recoveries[-1] - recoveries[0] if len(recoveries) > 1 else None,
        )

    def _is_lost(self, card: _Card) -> bool:
        try:
            self.n.nvmlDeviceGetTemperature(card.parent, 0)
        except self.n.NVMLError as e:
            return getattr(e, "value", None) == nvml.GPU_IS_LOST
        return False

    def _listen(self, handle: Any) -> Any:
        """Return an event set for the driver's Xid errors; None if the card or its driver has none."""
        n = self.n
        with contextlib.suppress(n.NVMLError, AttributeError):
            events = n.nvmlEventSetCreate()
            n.nvmlDeviceRegisterEvents(handle, n.nvmlEventTypeXidCriticalError, events)
            return events
        return None

    def _hear(self, card: _Card) -> None:
        """Add the Xid errors since the last sample; does not wait for one."""
        n = self.n
        while card.events is not None and len(card.xids) < _MOST_XIDS:
            try:
                card.xids.append(int(n.nvmlEventSetWait_v2(card.events, 0).eventData))
            except n.NVMLError as e:
                if getattr(e, "value", None) != n.NVML_ERROR_TIMEOUT:
                    card.events = None  # the card is lost (see `lost`), or the driver is too old
                return
