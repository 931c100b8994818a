"""The recorder's handle; without `--monitor`, a replacement that does nothing.

Without `--monitor` the recorder is not imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Union

from distdiag.train.config import TrainConfig

if TYPE_CHECKING:
    from distdiag.recorder import Handle

T = TypeVar("T")


class NotRecorded:
    run_dir: Path | None = None

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def epoch(self, epoch: int) -> None: ...

    def log(self, **scalars: float) -> None: ...

    def meta(self, **facts: Any) -> None: ...

    def batches(self, iterable: Iterable[T], length: int | None = None) -> Iterable[T]:
        return iterable

    def detach(self) -> None: ...


Recording: TypeAlias = Union["Handle", NotRecorded]


def start_recording(config: TrainConfig) -> Recording:
    """Attach the recorder if `--monitor` is set. Call it before `init_process_group`, so that groups are recorded."""
    if not config.monitor:
        return NotRecorded()
    import distdiag
    from distdiag.recorder import start_monitor
    from distdiag.terms.units import parse_keep

    if config.keep:
        start_monitor.options = start_monitor.Options(keep_bytes=parse_keep(config.keep))
    return distdiag.attach(config.run_dir or None, name=config.name or config.model)
