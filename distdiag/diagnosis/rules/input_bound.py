"""input_bound: every rank loses this share of its step time to waiting for data.

If only one rank waits for data it is a straggler. If the first batch of each epoch costs most, more
workers do not help.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from distdiag.diagnosis import kinds
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Finding, Severity
from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.diagnosis.model.syntax import Source
from distdiag.diagnosis.slow_case import at_lock
from distdiag.diagnosis.step_times import Window, share_of_all
from distdiag.diagnosis.text.phrases import at, waited_for_worker, wheres
from distdiag.diagnosis.text.straggler import SHARED_LOCK
from distdiag.diagnosis.text.template import Template
from distdiag.diagnosis.training_data import least_fetching, only_shadow, training_loaders

kind = kinds.INPUT_BOUND


@dataclass(frozen=True)
class Limits:
    share: float = 0.3
    """Share of step time that even the least affected rank waits for data."""
    fetching: float = 0.8
    """Share of the time that loader workers fetch. If the workers of every rank are above it, all loaders are at their limit, and
    in each step the rank that waits for data delays the others."""
    first_batch: float = 0.7
    """Share of the waits for data that is for the first batches of epochs, if loaders cost their start, and not each batch."""
    least_epoch: int = 3
    """Steps of an epoch below which its first one has much of all waits in any case."""


limits = Limits()
INPUT_BOUND = Template(
    kind, None, "every rank waits for data: {share:share} of step time (p50 {ms:.0f} ms on the slowest rank){site}{most}{worker}",
    "up to {share:share} of step time", "{do}", proved=True, severity=Severity.INFO)  # fmt: skip
EPOCH_STARTS = Template(
    kind, None, "every rank waits for data: {share:share} of step time{site}, {first:share} of that for the first batch of an epoch of {n} batches, "
    "{seconds:.1f} s each time{worker}", "up to {share:share} of step time", "{do}; more workers do not make the first batch come earlier",
    proved=True, severity=Severity.INFO)  # fmt: skip
_DO_FIRST = {
    "again": "set `persistent_workers=True`: each epoch starts the loader's workers (now {workers}) again; their copy of the dataset then stays, so "
    "an epoch that the main process sets in it no longer reaches them; or let the dataset read files and build tables once, in `__init__`, before "
    "workers start, or make epochs longer",
    "stream": "the workers stay (persistent_workers), but each epoch calls the dataset's `__iter__` again: let that yield while it fills a shuffle "
    "buffer, fill less, keep the buffer from one epoch to the next, or make epochs longer",
    "map": "the workers stay (persistent_workers), but load nothing ahead for the next epoch: make epochs longer, as by a sampler that goes over "
    "the data several times, or let the first samples of an epoch take less",
}
_SPLIT = "; each worker of an IterableDataset reads all of its stream unless that is split by `get_worker_info()`: more of them would repeat samples"
_DO = {
    "lock": SHARED_LOCK,
    "workers": "raise num_workers (now {workers}) or prefetch_factor; `distdiag probe dataloader` finds the setting",
    "worker's line": "let that line of the worker do less for each sample (what it reads or builds again, once in `__init__`), or raise num_workers "
    "(now {workers}); `distdiag probe dataloader` finds the setting",
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
        yield from _found(facts.snapshot, window, facts.source)


def _found(s: Snapshot, window: Window, source: Source) -> Iterator[Finding]:
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
    stream = loader is not None and loader.dataset_length is None and bool(loader.workers or loader.batch_size)
    seen = max(window.ranks, key=lambda q: sum(n for _, n in s.ranks[q].worker_sites))
    worker = waited_for_worker(s.ranks[seen]) if workers else ""
    if (starts := _epoch_starts(s, window)) is not None:
        (first, first_ms, n), kept = starts, bool(loader and loader.persistent_workers)
        yield EPOCH_STARTS(
            victims=window.ranks, where=where, site=site, share=share, first=first, n=n, seconds=first_ms / 1e3, worker=worker,
            do=_DO_FIRST["stream" if kept and stream else "map" if kept else "again"].format(workers=workers),
        )  # fmt: skip
        return
    # without workers the dataset and what makes batches of it run in the rank itself, where their lines are sampled
    rank = max(window.ranks, key=lambda q: len(s.ranks[q].phase_stacks.get("data", ())))
    stack = () if workers else s.ranks[rank].phase_stacks.get("data", ())
    inside = list(itertools.takewhile(lambda x: site is not None and x.key != site.key, stack))
    most = f"; most of it{at(inside[-1])}" if inside and len(inside) < len(stack) else ""
    if most and inside[0].key != inside[-1].key:
        most += f",{at(inside[0])}"
    lines = [s.ranks[seen].worker_sites] if worker else [s.ranks[q].phase_sites.get("data", ()) for q in window.ranks]
    lock = at_lock(lines, source) if worker or most else None
    if lock is not None:
        most = f"; they wait there for a lock{at(lock)}"
    do = _DO["lock" if lock is not None else "line" if most else "worker's line" if worker else "workers"].format(
        workers=workers
    )
    yield INPUT_BOUND(
        victims=window.ranks, where=where, site=site, share=share, ms=ms, most=most, worker=worker,
        do=do + _SPLIT if stream and not most else do, severity=None if lock is None else Severity.WARNING,
    )  # fmt: skip


def _epoch_starts(s: Snapshot, window: Window) -> tuple[float, float, int] | None:
    """Return (share of the waits for data that are for the first batch of an epoch, their mean in ms, batches of an epoch).

    Of the rank with the least share; None if that is no more than the rest, or not known.
    """
    of_rank: list[tuple[float, float, int]] = []
    loaders = training_loaders(s)
    for q, steps in window.steps.items():
        x, batches = loaders.get(q), statistics.median(y.samples / max(y.batch, 1) for y in steps)
        length = (x.length or x.previous_batches) if x is not None else 0
        if x is None or not x.workers or x.persistent_workers is None or not length or batches < 1:
            return None
        per_epoch, rest = divmod(length, round(batches))
        if rest or per_epoch < limits.least_epoch:
            return None
        # the epoch's first step, or the one before: a batch may be in use
        begun = s.ranks[q].step - x.batches // round(batches) + 1
        of_first = ([y.data_ms for y in steps if (y.step - at) % per_epoch == 0] for at in (begun, begun + 1))
        waits = max(of_first, key=sum)
        total = sum(y.data_ms for y in steps)
        of_rank.append((sum(waits) / total if total else 0.0, statistics.fmean(waits or [0.0]), length))
    found = min(of_rank)
    return found if found[0] >= limits.first_batch else None
