"""uneven_batches: ranks cannot run the same number of steps, or their batches differ in size.

`count` is predicted at the start of an epoch from the loaders' lengths, if the loop cannot end before its loader; or it is
found when a rank has run out of batches and the others wait for it. `size`: DDP averages ranks, not samples.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from distdiag.diagnosis import kinds
from distdiag.diagnosis.comparison import minority, vetoed
from distdiag.diagnosis.endings import End
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Finding, Severity, Where, rank_list
from distdiag.diagnosis.model.guards import may_end_early
from distdiag.diagnosis.model.snapshot import DEAD, Loader, RankState, Snapshot
from distdiag.diagnosis.text.phrases import at, where, wheres
from distdiag.diagnosis.text.template import Template
from distdiag.diagnosis.training_data import LARGER, NOT_ONE_MODEL, elements, even_advice, only_shadows, uneven_ranks
from distdiag.terms.ranks import by_value

kind = kinds.UNEVEN_BATCHES


@dataclass(frozen=True)
class Limits:
    size_steps: int = 24
    """Steps that a difference in local batch size must last: the last batch of an epoch is often smaller."""
    size_window: int = 40
    """Newest steps that are compared."""
    same_size: float = 0.9
    """Share of a rank's steps with one size; below it, sizes vary on purpose: token budgets, buckets."""
    weighted: float = 0.5
    """The losses' ratio, as an exponent of the ratio of the batches. Above this the loss is a sum over samples, not a mean."""


limits = Limits()
COUNT = Template(kind, "count", "{each}{site}",
    "after batch {fewest:,} {victims} cannot go on: {culprits} {culprits:has|have} no batch left",
    "{do}")  # fmt: skip
SIZE = Template(kind, "size", "local batch sizes differ in every step: {each}",
    "DDP averages ranks, not samples: a sample of the small batch weighs {factor:.1f}x as much",
    "use the same batch size on every rank, or weight each rank's loss by its number of samples", proved=True,
    severity=Severity.WARNING)  # fmt: skip


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    s = facts.snapshot
    if (seen := _seen(facts)) is not None:
        yield seen
    elif (veto := vetoed(NOT_ONE_MODEL, s)) is not None:
        yield veto
    else:
        for cause, outcome in (("count", _count(facts)), ("size", _size(s))):
            yield replace(outcome, cause=cause) if isinstance(outcome, Abstained) else outcome


# -- number of batches -----------------------------------------------------------------------------------------------


def _seen(facts: Facts) -> Finding | None:
    """Return the finding of ranks that ran out of batches, if ranks are stuck or ended because of that."""
    s = facts.snapshot
    stuck = not facts.repeated and any(f.kind == kinds.DEADLOCK.name for f in facts.found)
    if not (stuck or facts.cascade.end is End.OUT_OF_BATCHES) or not uneven_ranks(s):
        return None
    return _count_finding(s, facts.loaders, {q: x.batches for q, x in facts.loaders.items()}, predicted=False)


def _count(facts: Facts) -> Finding | Abstained:
    """Return the finding of loaders whose lengths differ, at the start of an epoch."""
    loaders = facts.loaders
    if len(loaders) < 2:
        return Abstained("not every rank trains from a known DataLoader")
    if len({x.iterations_started for x in loaders.values()}) > 1:  # a new pass may have a new loader of another length
        return Abstained("the ranks are in different passes over their data")
    if any(x.length is None or x.site is None for x in loaders.values()):
        return Abstained("the length of a loader is not known")
    if any(r.life in DEAD for r in facts.snapshot.ranks.values()):
        return Abstained("a rank has ended")
    lengths = {q: x.length or 0 for q, x in loaders.items()}
    if len(set(lengths.values())) < 2:
        return Abstained("the loaders of all ranks have the same length", checked=True)
    if any(x.batches > (x.length or 0) for x in loaders.values()):
        return Abstained("a loader gave more batches than its length")
    for x in loaders.values():
        if x.site is None or x.promised:
            continue
        text = facts.source(x.site.file)
        if text is None or may_end_early(text, x.site.line):
            return Abstained(f"the loop{at(x.site)} may end before its loader does")
    return _count_finding(facts.snapshot, loaders, lengths, predicted=True)


def _count_finding(s: Snapshot, loaders: dict[int, Loader], counts: dict[int, int], predicted: bool) -> Finding:
    """Return the finding on numbers of batches; the ranks with the fewest are the culprits."""
    exhausted = sorted(q for q, x in loaders.items() if x.exhausted)
    by_count = dict(sorted(by_value(counts).items()))
    fewest, short = next(iter(by_count.items()))
    rest = sorted(q for q in counts if q not in short)
    out, waiting = (sorted(short), rest) if rest else (exhausted, [q for q in counts if q not in exhausted])
    if predicted:
        texts = "; ".join(f"{rank_list(ranks)}: {n:,}" for n, ranks in by_count.items())
        each = f"ranks have different numbers of batches per epoch: {texts}"
    else:
        each = "; ".join(_seen_texts(loaders, counts, exhausted))
    return COUNT(
        proved=not predicted, culprits=out, victims=waiting,
        where=(w for q in out for w in _past_the_loop(s.ranks[q], loaders[q])),
        waiting=(_past_the_loop(s.ranks[q], loaders[q])[0] for q in waiting), step=s.ranks[out[0]].step,
        each=each, site=loaders[min(short)].site, fewest=fewest,
        do=even_advice(loaders.values()),
    )  # fmt: skip


def _seen_texts(loaders: dict[int, Loader], counts: dict[int, int], out: list[int]) -> Iterator[str]:
    """Yield which ranks ran out of batches and after how many, and how many the others have had."""
    for n, ranks in sorted(by_value({q: counts[q] for q in out}).items()):
        yield f"{rank_list(ranks)} ran out of batches after {n:,}"
    if len(set(counts.values())) == 1:
        return
    for n, ranks in sorted(by_value({q: k for q, k in counts.items() if q not in out}).items()):
        lengths = {loaders[q].length for q in ranks}
        length = lengths.pop() if len(lengths) == 1 else None
        of = f" of {length:,}" if length else ""
        yield f"{rank_list(ranks)} {'has' if len(ranks) == 1 else 'have'} had {n:,}{of}"


def _past_the_loop(r: RankState, x: Loader) -> tuple[Where, ...]:
    """Return where a rank waits or ended, if it does, and the loop in which its batches are counted."""
    loop = where(r, "data", x.site)
    there = r.blocked is not None or r.life in DEAD
    return (where(r), loop) if there and r.current_site is not None and r.current_site != x.site else (loop,)


# -- size of batches -------------------------------------------------------------------------------------------------


def _size(s: Snapshot) -> Finding | Abstained:
    usual: dict[int, int] = {}
    for r in s.ranks.values():
        sizes = [x.batch for x in r.steps[-limits.size_window :] if x.batch]
        if len(sizes) < limits.size_steps:
            return Abstained(f"{len(sizes)} of {limits.size_steps} steps with a known batch size")
        size, n = Counter(sizes).most_common(1)[0]
        if n < limits.same_size * len(sizes):
            return Abstained("batch sizes vary from step to step")
        if only_shadows(r.steps[-limits.size_window :]):
            return Abstained(f"rank {r.rank} only shadows the collectives of the others")
        usual[r.rank] = size
    if len(set(usual.values())) < 2:
        why = "all ranks' batches have the same first dimension (samples) in most of their newest steps"
        return Abstained(why + _larger(s), checked=True)
    if (entered := _equal_inputs(s)) is not None:
        why = f"the loaders' batches differ, but {entered:,} samples enter the module on every rank"
        return Abstained(why, checked=True)
    if _weighted(s, usual):
        return Abstained("the losses are weighted by batch size", checked=True)
    most = Counter(usual.values()).most_common()
    odd = minority(usual) if most[0][1] > most[1][1] else ()
    sites = {q: next((x.site for x in s.ranks[q].loaders if x.in_training), None) for q in usual}
    return SIZE(
        culprits=odd, victims=sorted(set(usual) - set(odd)),
        where=wheres(s, odd or sorted(usual), "data", sites), step=min(r.step for r in s.ranks.values()),
        each="; ".join(f"{rank_list([q for q, n in usual.items() if n == k])}: {k} samples" for k, _ in most),
        factor=max(usual.values()) / min(usual.values()),
    )  # fmt: skip


def _larger(s: Snapshot) -> str:
    """Return which rank's batches have more elements than the others', as those of longer samples; empty if none has."""
    largest, n = max(elements(s).items(), key=lambda x: x[1], default=(0, 0.0))
    usual = statistics.median([x for q, x in elements(s).items() if q != largest] or [0.0])
    return f"; those of rank {largest} have {n / usual:.1f} times as many elements" if 0 < LARGER * usual <= n else ""


def _equal_inputs(s: Snapshot) -> int | None:
    """Return the samples that enter the first wrapped module, if as many enter each, as often, on every rank.

    Then the loader is not the rank's batch: one rank reads for all, and hands out parts.
    """
    used = ([(m.batch, round(m.forwards / max(r.step, 1))) for m in r.models if m.forwards] for r in s.ranks.values())
    entered = set(map(tuple, used))
    inputs = entered.pop() if len(entered) == 1 else ()
    return inputs[0][0] if inputs and all(size and often for size, often in inputs) else None


def _weighted(s: Snapshot, usual: dict[int, int]) -> bool:
    """True if the losses are in proportion to the batch sizes: the loss is a sum over samples.

    Late in training losses scatter, and their ratio with them.
    """
    small, large = min(usual, key=lambda q: usual[q]), max(usual, key=lambda q: usual[q])
    losses = [{x.step: x.loss for x in s.ranks[q].steps if x.loss is not None and x.loss > 0} for q in (small, large)]
    ratios = [math.log(losses[1][k] / losses[0][k]) for k in losses[0].keys() & losses[1].keys()]
    expected = math.log(usual[large] / usual[small])
    return len(ratios) >= limits.size_steps and statistics.median(ratios) > limits.weighted * expected
