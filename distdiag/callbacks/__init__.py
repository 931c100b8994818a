"""Callbacks that give a recorded job's epochs and phases their names: `lightning`, `transformers`, `accelerate`; one module each.

Steps need no callback: an optimizer's step ends one. A callback records the process if nothing else does, and never raises into the job.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import distdiag


class Names:
    """The handle of this rank, and the phase that is open: a framework begins and ends one in different calls."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._handle: distdiag.Handle | None = None
        self.phase = ""  # that is open; empty: none

    @property
    def handle(self) -> distdiag.Handle:
        """Attach at the first use: frameworks make callbacks in processes that will be no rank."""
        if self._handle is None:
            self._handle = distdiag.attach()
        return self._handle

    def enter(self, phase: str) -> None:
        if phase != self.phase:
            self.leave()
            self._open.enter_context(self.handle.phase(phase))
            self.phase = phase

    def leave(self, *_: Any) -> None:
        self._open.close()
        self.phase = ""

    def __reduce__(self) -> tuple[type[Names], tuple[()]]:
        return Names, ()  # frameworks copy and pickle callbacks; another process has its own handle
