"""What the Data screen reads: the loaders of every rank, and how long a rank and the others waited for data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from distdiag.store.frames import Frame
from distdiag.store.reader import Run
from distdiag.store.rows import LoaderRow
from distdiag.terms.quantiles import median_low
from distdiag.tui.data import step_window
from distdiag.tui.data.history import RANKS
from distdiag.tui.data.snapshot import Request

STEPS = 200


@dataclass(frozen=True)
class Waited:
    """Waiting for data of one rank, and the median of up to eight others, in the same steps."""

    rank: int
    times: tuple[float, ...] = ()
    own_ms: tuple[float | None, ...] = ()
    share_pct: tuple[float | None, ...] = ()  # of the rank's step time
    others_ms: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class LoaderData:
    """Loaders of every rank; fingerprints that more than one rank has."""

    loaders: dict[int, tuple[LoaderRow, ...]] = field(default_factory=dict)
    shared: frozenset[int] = frozenset()  # fingerprints of training data on more than one rank
    waited: Waited | None = None  # of the rank under the cursor

    @property
    def training(self) -> list[LoaderRow]:
        return [x for rows in self.loaders.values() for x in rows if x.in_training]


def read(run: Run, request: Request, frame: Frame, cache: dict[Any, Any]) -> LoaderData:
    """Read the loaders, and the last steps of the rank under the cursor."""
    by_rank: dict[int, list[LoaderRow]] = {}
    for loader in run.loaders():
        by_rank.setdefault(loader.rank, []).append(loader)
    found = LoaderData({rank: tuple(rows) for rank, rows in by_rank.items()})
    prints = Counter(x.fingerprint for x in found.training if x.fingerprint is not None)
    waited = _waited(run, frame, request.rank, request.at_s, cache) if request.rank is not None else None
    return LoaderData(found.loaders, frozenset(k for k, n in prints.items() if n > 1), waited)


def _waited(run: Run, frame: Frame, rank: int, at_s: float | None, cache: dict[Any, Any]) -> Waited:
    span = run.step_range(at_s)
    if span is None:
        return Waited(rank)
    ranks = (rank, *step_window.some_ranks(frame, RANKS, without=rank)[:RANKS])
    columns, first = ("t_end_s", "data_ms", "step_ms"), max(span[0], span[1] - STEPS + 1)
    found = step_window.read(run, cache, "waited", columns, ranks, (first, span[1], 1), span[1])
    steps = sorted((s for s in found.values() if s.get(rank, (None,))[0] is not None), key=lambda s: s[rank][0])
    own = [s[rank] for s in steps]
    others = [[data for r, (_, data, _) in s.items() if r != rank and data is not None] for s in steps]
    return Waited(
        rank,
        tuple(t for t, _, _ in own),
        tuple(data for _, data, _ in own),
        tuple(100 * data / ms if data is not None and ms else None for _, data, ms in own),
        tuple(map(median_low, others)),
    )
