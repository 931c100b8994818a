"""Accelerate: a tracker. The loop is the script's own, so the script names its epochs and phases.

names = DistdiagTracker()
accelerator = Accelerator(log_with=names)
accelerator.init_trackers("project", config={"lr": 0.1})
for epoch in names.epochs(range(3)):
    …
    with names.phase("validate"):
        evaluate()
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from accelerate.tracking import GeneralTracker  # type: ignore[import-not-found]

from distdiag.callbacks import Names


class DistdiagTracker(GeneralTracker):
    """Names epochs and phases on every rank; keeps what `accelerator.log` gets, which is on the main process alone."""

    name = "distdiag"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self) -> None:
        super().__init__()
        self._names = Names()

    @property
    def tracker(self) -> Any:
        return self._names.handle

    def epochs(self, numbers: Iterable[int]) -> Iterator[int]:
        """Yield each number, and record it as the epoch that begins."""
        for number in numbers:
            self._names.handle.epoch(number)
            yield number

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return the block that is this phase: `with names.phase("validate"):`."""
        return self._names.handle.phase(name)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        numbers = {str(k): v for k, v in values.items() if isinstance(v, int | float)}  # a text may be a secret
        self._names.handle.meta(**numbers)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._names.handle.log(**{str(k): v for k, v in values.items() if isinstance(v, int | float)})
