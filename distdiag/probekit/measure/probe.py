"""Base of all probes: a name, a measurement on all ranks, and a table."""

from __future__ import annotations

import abc
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distdiag.errors import DistdiagError
from distdiag.terms.units import MISSING

if TYPE_CHECKING:
    from distdiag.probekit.command.options import Options
    from distdiag.probekit.ranks.job import Job
    from distdiag.probekit.verdict.result import Result


class Column(NamedTuple):
    """One column of a probe's table, also in CSV; the header carries the unit."""

    header: str
    cell: Callable[[Any], str | None]  # text of one row; None: not measured, shown as a dash
    left: bool = False  # text, aligned left
    optional: bool = False  # left out if no row has a value


def shown(value: float | None, form: str) -> str | None:
    """Return a number as `format` does; None if it was not measured."""
    return None if value is None else format(value, form)


@dataclass(slots=True)
class Table:
    headers: list[str]
    rows: list[list[str]]
    left: set[int]

    @classmethod
    def of(cls, columns: Sequence[Column], rows: Sequence[Any]) -> Table:
        cells = [(c, [c.cell(row) for row in rows]) for c in columns]
        kept = [(c, texts) for c, texts in cells if not c.optional or any(t is not None for t in texts)]
        by_row = [[MISSING if (text := texts[i]) is None else text for _, texts in kept] for i in range(len(rows))]
        return cls([c.header for c, _ in kept], by_row, {i for i, (c, _) in enumerate(kept) if c.left})


class Probe(abc.ABC):
    """One measurement. `run` is called on every rank; rank 0 has the result."""

    name: str
    min_ranks: int = 2
    default_ranks: int = 2
    share_in_all: float = 1.0  # of the budget of `all`, relative to one collective
    messages: bool = False  # it sends and receives
    columns: Sequence[Column] = ()

    def check(self, options: Options) -> None:
        if self.messages and options.device == "cuda" and options.backend == "gloo":
            raise DistdiagError("gloo has no send and recv of CUDA tensors", "--device cpu, or --backend nccl")

    def preload(self) -> None:
        """Import heavy modules once, in the process that ranks are forked from."""
        return None

    @abc.abstractmethod
    def run(self, job: Job) -> Result | None:
        """Measure within `job.left_s()`; return the result on rank 0, None elsewhere."""

    def table(self, result: Result) -> Table:
        return Table.of(self.columns, result.rows)

    def drawing(self, result: Result) -> list[str]:
        """Return lines under the table: bars, a heat map, an explanation."""
        return []

    @abc.abstractmethod
    def headline(self, result: Result) -> str:
        """Return the line of `all` for this probe, without the verdict."""


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
