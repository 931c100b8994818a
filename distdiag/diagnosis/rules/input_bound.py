"""input_bound: every rank loses this share of its step time to waiting for data.

If only one rank waits for data it is a straggler.

Faulty jobs: decode_bound. Healthy look-alikes: worker_pool, rate_limited.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from distdiag.diagnosis import kinds
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Finding
from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.diagnosis.step_times import Window, share_of_all
from distdiag.diagnosis.text.phrases import at, wheres
from distdiag.diagnosis.text.template import Template
from distdiag.diagnosis.training_data import least_fetching, only_shadow

kind = kinds.INPUT_BOUND


@dataclass(frozen=True)
class Limits:
    share: float = 0.3
    """Share of step time that even the least affected rank waits for data."""
    fetching: float = 0.8
    """Share of the time that loader workers fetch. If the workers of every rank are above it, all loaders are at their limit, and
    in each step the rank that waits for data delays the others."""


limits = Limits()
INPUT_BOUND = Template(
    kind, None, "every rank waits for data: {share:share} of step time (p50 {ms:.0f} ms on the slowest rank){site}{most}",
    "up to {share:share} of step time", "{do}", proved=True)  # fmt: skip
_DO = {
    "workers": "raise num_workers (now {workers}) or prefetch_factor; `distdiag probe dataloader` finds the setting",
    "line": "num_workers=0: that code runs in the training process: set num_workers (`distdiag probe dataloader` finds it), and let it do less "
    "for each batch: read files and build tables once, in `__init__`",
}


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    window = facts.window
    if isinstance(window, Abstained):
        yield window
    elif facts.shadows:
        yield only_shadow(facts.shadows)
    else:
        yield from _found(facts.snapshot, window)


def _found(s: Snapshot, window: Window) -> Iterator[Finding]:
    columns = list(zip(*window.steps.values(), strict=True))
    share = share_of_all(window, lambda x: x.data_ms, limits.share)
    # all loaders are at their limit: the slowest of each step counts
    if not share and least_fetching(s) >= limits.fetching:
        share = min(1.0, statistics.median(max(x.data_ms / max(x.step_ms, 1e-3) for x in column) for column in columns))
    if share < limits.share:
        return
    ms = statistics.median(max(x.data_ms for x in column) for column in columns)
    loader = next((x for r in s.ranks.values() for x in r.loaders if x.in_training), None)
    site, workers = (None, 0) if loader is None else (loader.site, loader.workers)
    where = wheres(s, window.ranks, "data", dict.fromkeys(window.ranks, site))
    # without workers the dataset and what makes batches of it run in the rank itself, where their lines are sampled
    rank = max(window.ranks, key=lambda q: len(s.ranks[q].phase_stacks.get("data", ())))
    stack = () if workers else s.ranks[rank].phase_stacks.get("data", ())
    inside = list(itertools.takewhile(lambda x: site is not None and x.key != site.key, stack))
    most = f"; most of it{at(inside[-1])}" if inside and len(inside) < len(stack) else ""
    if most and inside[0].key != inside[-1].key:
        most += f",{at(inside[0])}"
    yield INPUT_BOUND(
        victims=window.ranks, where=where, site=site, share=share, ms=ms, most=most,
        do=_DO["line" if most else "workers"].format(workers=workers),
    )  # fmt: skip
