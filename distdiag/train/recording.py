"""The recorder's handle, or, without `--monitor`, something that takes the same calls and does nothing.

Without `--monitor` nothing of the recorder is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeVar

from distdiag.train.config import TrainConfig

T = TypeVar("T")


class Recording(Protocol):
    """The recorder as the training loop uses it; see `distdiag.recorder.Handle`."""

    @property
    def run_dir(self) -> Path | None: ...
    def phase(self, name: str) -> AbstractContextManager[None]: ...
    def epoch(self, epoch: int) -> None: ...
    def log(self, **scalars: float) -> None: ...
    def meta(self, **facts: Any) -> None: ...
    def batches(self, iterable: Iterable[T], length: int | None = None) -> Iterable[T]: ...
    def detach(self) -> None: ...


class NotRecorded:
    """A job without `--monitor`."""

    run_dir: Path | None = None

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def epoch(self, epoch: int) -> None: ...

    def log(self, **scalars: float) -> None: ...

    def meta(self, **facts: Any) -> None: ...

    def batches(self, iterable: Iterable[T], length: int | None = None) -> Iterable[T]:
        return iterable

    def detach(self) -> None: ...


def start_recording(config: TrainConfig) -> Recording:
    """Attach the recorder with `--monitor`. Call it before `init_process_group`, so that the groups are recorded."""
    if not config.monitor:
        return NotRecorded()
    import distdiag
    from distdiag.recorder import start_monitor
    from distdiag.recorder.run_claim import keep_bytes

    if config.keep:
        start_monitor.options = start_monitor.Options(keep_bytes=keep_bytes(config.keep))
    return distdiag.attach(config.run_dir or None, name=config.name or config.model)
