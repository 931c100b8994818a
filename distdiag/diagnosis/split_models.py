"""Replicated layers and learning rates of split models (tensor parallelism by hand, FSDP's shards, ZeRO), where whole replicas cannot be compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from distdiag.diagnosis.comparison import by_step, minority
from distdiag.diagnosis.model.findings import Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import RankState, Sample, Site, Snapshot
from distdiag.diagnosis.replicas import (
    SHARDED,
    SPARSE,
    averaged_by_ddp,
    averaging_site,
    comparable,
    differ,
    each_text,
    exchange_tensors,
    limits,
    sampled,
    samples_of,
    separate_sets,
    sets_text,
)
from distdiag.diagnosis.text.drift import CROSSED, DENSE_DO, LAYERS, RATES, SPARSE_DO, SPLIT_LAYERS
from distdiag.diagnosis.text.phrases import wheres
from distdiag.diagnosis.training_data import synchronous
from distdiag.terms.ranks import by_value


def crossed(s: Snapshot) -> Iterator[Finding]:
    """Yield that separate sets of ranks average all gradients, each of ranks that began with other parameters than one another.

    Only where each rank began as one rank of every other set did: groups of another dimension of the mesh, it seems, than they should be.
    """
    sets, first = separate_sets(s), {q: next(iter(samples_of(r, "parameters")), None) for q, r in s.ranks.items()}
    peers = by_value({q: (x.key, x.value) for q, x in first.items() if x is not None and not x.step}).values()
    sites = {q: site for of in sets for q in of if (site := _averages_all(s, q, of)) is not None}
    if len(sites) == s.world_size and all(len({*x} & {*of}) == 1 for x in peers for of in sets):
        yield CROSSED(
            victims=sorted(s.ranks), where=wheres(s, s.ranks, "user_code", sites), sets=sets_text(sets), peers=sets_text([tuple(x) for x in peers]),
        )  # fmt: skip


def _averages_all(s: Snapshot, rank: int, group: tuple[int, ...]) -> Site | None:
    """Return the line whose all_reduces among these ranks had as many elements, in the last step of a rank, as its layers have."""
    r, of = s.ranks[rank], Counter[Site]()
    names = {name for name, g in s.groups.items() if {*g.ranks} == {*group}}
    layers = [x for x in samples_of(r, "layers") if not x.step]
    *_, since_s, until_s = (math.inf, math.inf, *(x.end_s for x in r.steps))
    for c in r.calls:
        in_step = since_s < (c.entered_s or 0.0) <= until_s
        if in_step and c.site is not None and c.op == "all_reduce" and c.group in names:
            of[c.site] += math.prod(c.shape or ())
    return next((site for site, n in of.items() if n == sum(x.key >> 34 for x in layers)), None)


def layers(s: Snapshot) -> Iterator[Finding]:
    """Yield the classes of layers that were equal on all ranks before the first step and drift, while others stay equal.

    Only where the layers of a third class were each rank's own from the start: so equal ones were made equal on purpose; or where exactly the
    gradients of the equal ones are reduced. Nothing is known of a rank's own layers that all begin with one constant, unless their class has
    other parameters.
    """
    found: dict[str, list[str]] = {"equal": [], "drift": [], "own": []}
    newest: dict[str, Sample] = {}
    for name in dict.fromkeys(x.name for x in sampled(s, "layers")):
        of = by_step({q: {x.step: x for x in samples_of(r, "layers") if x.name == name} for q, r in s.ranks.items()})
        apart = [differ([x.value for x in at.values()], limits.relative) for at in of.values()]
        other = any(len({x.key & (SPARSE - 1) for x in at.values()}) > 1 for at in of.values())
        if 0 not in of or len(apart) <= limits.samples or other:
            return
        trained = len({at[min(at)].value for at in of.values()}) > 1
        # to the last bit: what drifts slowly does not stay equal
        same = all(len({x.value for x in at.values()}) == 1 for at in of.values())
        at_last = of[max(of)]
        sort = "own" if apart[0] else "drift" if all(apart[1:]) else "equal" if trained and same else ""
        if sort:
            found[sort].append(name)
            newest[name] = at_last[min(at_last)]
    left_out = not found["own"] and _exactly_reduced(s, sum(newest[name].key >> 34 for name in found["equal"]))
    if not (found["drift"] and (found["own"] or left_out)):
        return
    common: dict[str, Any] = {
        "victims": sorted(s.ranks), "names": tuple(found["drift"]), "step": min(x.step for x in sampled(s, "layers") if x.step),
        "drift": ", ".join(found["drift"]),
    }  # fmt: skip
    if found["equal"]:
        where = wheres(s, sorted(s.ranks), None, {q: averaging_site(r, True) for q, r in s.ranks.items()})
        sparse = all(newest[name].key & SPARSE for name in found["drift"])
        yield LAYERS(
            **common, where=where, equal=", ".join(found["equal"]), sparse=" sparse" if sparse else "", how=SPARSE_DO if sparse else DENSE_DO,
            severity=Severity.INFO if left_out and not sparse else None,
        )  # fmt: skip
    elif (sets := _peers(s, found["drift"])) and (across := _across(s, sets)):
        yield SPLIT_LAYERS(
            **common, where=(), sets=sets_text(sets), own=", ".join(found["own"]), group=rank_list(across)
        )


def _exactly_reduced(s: Snapshot, elements: int) -> bool:
    """True if the ranks have reduced so many elements, not none, over all of them in each sampled step, and exchange nothing else."""
    least, most = (share * elements for share in limits.reduced)
    reduced = [{x.key for x in samples_of(r, "reduced")} for r in s.ranks.values()]
    more = exchange_tensors(s, "all_reduce") or any(r.p2p_issued or r.models for r in s.ranks.values())
    fits = all(of and all(least <= n <= most for n in of) for of in reduced)
    return bool(elements) and not more and fits


def _peers(s: Snapshot, drift: list[str]) -> list[tuple[int, ...]]:
    """Return the sets of ranks that stay equal to the last bit in all classes, as data parallel ranks of a split model do.

    Nothing if a rank has no peer, its shards are FSDP's, or all classes of `drift` begin with one constant, which says nothing.
    """
    layers = {q: tuple((x.name, x.step, x.value) for x in samples_of(r, "layers")) for q, r in s.ranks.items()}
    sets = [tuple(x) for x in by_value(layers).values()]
    sizes = {len(x) for x in sets}
    varied = any(x.name in drift and not x.key >> 32 & 1 for x in sampled(s, "layers"))
    sharded = any(x.key & SHARDED for x in sampled(s, "learning_rate"))
    return sets if len(sizes) == 1 < min(sizes) and varied and not sharded else []


def _across(s: Snapshot, sets: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the first group with a rank of each set that reduces tensors in each step, if every rank is in one; no stages of a pipeline."""
    part = {name: g.ranks for name, g in s.groups.items() if len(g.ranks) < s.world_size}
    crossing = {name: ranks for name, ranks in part.items() if all({*ranks} & {*x} for x in sets)}
    found = {
        q: c.group
        for q, r in s.ranks.items() for c in r.calls
        if c.group in crossing and c.op.startswith(("all_reduce", "reduce_scatter")) and (c.bytes or 0) > limits.metrics_bytes
        and r.enqueued.get(c.group, 0) >= r.step and not r.p2p_issued
    }  # fmt: skip
    return tuple(crossing[found[min(found)]]) if len(sets) > 1 and len(found) == s.world_size else ()


def rates(s: Snapshot) -> Iterator[Finding]:
    """Yield that learning rates differ between ranks of which each steps a part of one model: FSDP's shards, or ZeRO's parameters."""
    rates = by_step({q: {x.step: x for x in samples_of(r, "learning_rate")} for q, r in s.ranks.items()})
    equal = [k for k, of in rates.items() if not differ([x.value for x in of.values()], limits.relative)]
    since = [k for k in rates if not equal or k > equal[-1]]
    if len(since) < limits.modes or len({x.key >> 32 for x in rates[since[-1]].values()}) > 1:
        return
    sharded = bool(rates[since[-1]][min(s.ranks)].key & SHARDED)
    if not (synchronous(s) and not any(r.models for r in s.ranks.values()) if sharded else _zero(s, since)):
        return
    values = {q: x.value for q, x in rates[since[-1]].items()}
    kept = [q for q in sorted(s.ranks) if len({of[q].value for of in rates.values()}) == 1]
    odd = tuple(kept) if 0 < len(kept) < len(values) else minority(values)
    yield RATES(
        culprits=odd, victims=[q for q in sorted(s.ranks) if q not in odd], step=since[0], where=(), each=each_text(values), newest=since[-1],
        kept=f"; that of {rank_list(odd)} has not changed since step {min(rates)}" if odd and odd == tuple(kept) else "",
        how="the parameters are sharded" if sharded else "the replicas stay equal, as ranks send what they have stepped to the others (ZeRO)",
        proved=sharded and since[-1] >= limits.certain_step,
    )  # fmt: skip


def _zero(s: Snapshot, steps: list[int]) -> bool:
    """True if DDP averages each step and the replicas are equal at the newest of these steps, and ranks send tensors to the others."""
    sums = by_step({q: {x.step: x for x in samples_of(r, "parameters")} for q, r in s.ranks.items()})
    newest = [[*sums[k].values()] for k in steps[-limits.modes :] if k in sums]
    same = [comparable([x.key for x in of]) and not differ([x.value for x in of], limits.relative) for of in newest]
    whole = all(s.whole(m.group) for r in s.ranks.values() for m in r.models)
    equal = len(same) == limits.modes and all(same)
    return equal and whole and averaged_by_ddp(s) == "each_step" and all(map(_sends, s.ranks.values()))


def _sends(r: RankState) -> bool:
    """True if a rank has sent tensors to the others, or got theirs, since its oldest step that is known."""
    since_s = r.steps[0].end_s if r.steps else math.inf
    large = (c for c in r.calls if (c.bytes or 0) > limits.metrics_bytes and (c.entered_s or 0.0) >= since_s)
    return any(c.op.startswith(("broadcast", "all_gather", "allgather")) for c in large)
