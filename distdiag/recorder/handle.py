"""What `attach()` returns: the optional calls by which a job informs its recorder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from distdiag.page.layout import Phase
from distdiag.recorder import session as sessions
from distdiag.recorder.state import guarded, now_ns

T = TypeVar("T")


class Handle:
    """Returned by `attach()`. Every method is optional, and none raises into the job."""

    def __init__(self, session: sessions.Session | None) -> None:
        self._session = session  # None from `detach()` on
        self._run_dir = session.run_dir if session else None

    @property
    def run_dir(self) -> Path | None:
        """Directory of this run; None if nothing could be recorded."""
        return self._run_dir

    @property
    def _accounting(self) -> Any:
        return self._session.accounting if self._session else None

    @guarded
    def step(self, samples: int | None = None) -> None:
        """End a step here: for loops without a `torch.optim` optimizer."""
        if accounting := self._accounting:
            if samples is not None:
                accounting.ledger.samples = samples
            accounting.close_step(now_ns())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what the rank does, as in `with handle.phase("validate"):`: init, validate, checkpoint, data, …"""
        before = self._enter(name)
        try:
            yield
        finally:
            self._leave(before)

    @guarded
    def _enter(self, name: str) -> Any:
        if not (accounting := self._accounting):
            return None
        from distdiag.recorder.hooks.step_accounting import PHASES

        ledger = accounting.ledger
        before, ledger.idle = ledger.idle, int(PHASES.get(name, Phase.OTHER))
        accounting.enter(ledger.idle)
        return before

    @guarded
    def _leave(self, before: Any) -> None:
        if before is not None and (accounting := self._accounting):
            accounting.ledger.idle = before
            accounting.enter(before)

    @guarded
    def epoch(self, epoch: int) -> None:
        """Set the number of the epoch that begins."""
        if self._session:
            self._session.recorder.header.epoch = epoch

    @guarded
    def log(self, **scalars: float) -> None:
        """Record values that readers show: `handle.log(loss=1.2, accuracy=0.4)`."""
        if not self._session:
            return
        page = self._session.recorder.page
        for name, value in scalars.items():
            page.add("scalars", name=page.text(name), step=page.header.step, value=float(value), t_ns=now_ns())

    @guarded
    def meta(self, **facts: Any) -> None:
        """Record facts about the job: dataset, model, planned steps (`max_steps=…`)."""
        if self._session:
            self._session.recorder.note(**facts)

    def batches(self, iterable: Iterable[T], length: int | None = None) -> Iterable[T]:
        """Return an iterator over batches from something other than a DataLoader; waits, length and end are recorded."""
        if not (accounting := self._accounting):
            return iterable
        from distdiag.recorder.hooks.step import batches

        return batches(accounting, iterable, length)

    @guarded
    def detach(self) -> None:
        """Stop recording: this rank has finished its training."""
        session, self._session = self._session, None
        if session:
            session.detach()


def attach(run_dir: str | None = None, *, name: str | None = None) -> Handle:
    """See `distdiag.attach`."""
    if sessions.current is not None:
        return Handle(sessions.current)
    rank, world, local = sessions.from_environment()
    return Handle(sessions.start(run_dir, name, rank, world, local))
