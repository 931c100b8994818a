"""Base of all probes: a name, a measurement on all ranks, and a table."""

from __future__ import annotations

import abc
import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distdiag.probekit.command.options import Options
    from distdiag.probekit.ranks.job import Job
    from distdiag.probekit.verdict.result import Result


@dataclass(slots=True)
class Table:
    """Rows of cells as text; `headers` carry the unit."""

    headers: list[str]
    rows: list[list[str]] = field(default_factory=list)
    left: set[int] = field(default_factory=set)  # columns of text, aligned left


class Probe(abc.ABC):
    """One measurement. `run` is called on every rank; rank 0 has the result."""

    name: str
    summary: str
    min_ranks: int = 2
    default_ranks: int = 2
    share_in_all: float = 1.0  # of the budget of `all`, relative to one collective

    def check(self, options: Options) -> None:
        """Check the options before any rank is started.

        Raises:
            DistdiagError: an option is wrong, with the remedy.
        """
        return None

    def preload(self) -> None:
        """Import heavy modules once, in the process that ranks are forked from."""
        return None

    def launch(self, options: Options, gpus: int, deadline_s: float) -> list[Result] | None:
        """Start the ranks on this host by itself and return rank 0's results; None: the command starts them.

        Args:
            gpus: GPUs of this host.
            deadline_s: time.monotonic() at which measuring should end.
        """
        return None

    def on_paper(self, options: Options) -> list[Result]:
        """Return the results of `options.paper`, by formula; only `step` has formulas."""
        raise NotImplementedError(f"{self.name} has no formula")

    @abc.abstractmethod
    def run(self, job: Job) -> Result | None:
        """Measure within `job.left_s()`; return the result on rank 0, None elsewhere."""

    @abc.abstractmethod
    def table(self, result: Result, ascii_only: bool = False) -> Table:
        """Return the figures as a table."""

    def drawing(self, result: Result, ascii_only: bool = False) -> list[str]:
        """Return lines under the table: bars, a heat map, an explanation."""
        return []

    def headline(self, result: Result) -> str:
        """Return the line of `all` for this probe, without the verdict."""
        return self.summary


def load_probe(name: str) -> Probe:
    """Import the probe's script and return its `PROBE`."""
    try:
        module = importlib.import_module(f"distdiag.probes.{name}")
    except ModuleNotFoundError as e:
        if not (e.name or "").startswith("distdiag.probes"):
            raise
        # a checkout that was not installed: the scripts are next to the package
        root = str(Path(__file__).resolve().parents[3])
        if root not in sys.path:
            sys.path.append(root)
        module = importlib.import_module(f"probes.{name}")
    return module.PROBE
