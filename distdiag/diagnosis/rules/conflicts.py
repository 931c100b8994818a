"""Ranks that meet in one collective with different calls: what differs, who is wrong, and the words for it."""

from __future__ import annotations

from collections.abc import Collection

from distdiag.diagnosis.culprit import blame
from distdiag.diagnosis.culprit.blame import Reason
from distdiag.diagnosis.culprit.rank_condition import Source
from distdiag.diagnosis.model.findings import Certainty, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import Site, Snapshot
from distdiag.diagnosis.text.incident import (
    calls_of,
    collective_ref,
    group_label,
    newest_step,
    places,
    verb,
)
from distdiag.diagnosis.text.phrases import NO_PROGRESS, at, place_text
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.graph import Wait, WaitGraph
from distdiag.diagnosis.waits.incidents import Incident


def conflict(
    snapshot: Snapshot, graph: WaitGraph, incident: Incident, exhausted: Collection[int], source: Source | None
) -> Finding | None:
    """The finding of one such meeting; None where more has to be seen first."""
    (wait,) = incident.waits
    verdict = blame.of_conflict(snapshot, wait, exhausted, source)
    if blame.undecided(snapshot, graph, wait, verdict):
        return None
    culprits, reason = verdict
    victims = incident.victims - set(culprits)
    kind, cause = _kind(snapshot, wait, culprits, reason)
    calls = calls_of([wait, *(w for w in graph.waits if w.ranks)])
    main = next((wait.calls[r] for side in wait.sides for r in sorted(side) if r not in culprits), None)
    return Finding(
        kind=kind,
        cause=cause,
        certainty=Certainty.PROVED,
        severity=Severity.ERROR,
        culprits=culprits,
        victims=tuple(sorted(victims)),
        collective=collective_ref(snapshot, wait, main),
        where=places(snapshot, culprits or incident.members, calls),
        waiting=places(snapshot, victims if culprits else victims - incident.members, calls),
        step=newest_step(snapshot, incident.members),
        message=_message(snapshot, wait, cause, culprits, reason, source),
        cost=NO_PROGRESS if not wait.died else "the backend aborts the job",
        advice=_advice(snapshot, wait, cause, culprits, reason),
    )


def _kind(snapshot: Snapshot, wait: Wait, culprits: tuple[int, ...], reason: Reason) -> tuple[str, str]:
    """Different operations are a mismatch where ranks do different things with the same data, and a deadlock where
    they have come to different places of the program."""
    cause = wait.conflict or "op"
    if cause != "op" or wait.p2p:
        return "mismatch", cause
    if reason in (Reason.EXHAUSTED, Reason.SITE, Reason.HISTORY, Reason.RHYTHM, Reason.CONDITION):
        return "deadlock", "missing_rank"
    states = snapshot.ranks
    here = {r: blame.standing(states.get(r), c) for r, c in wait.calls.items()}
    sides = [[r for r in side if r in states] for side in wait.sides]
    if any(not side or any(here[r] is None for r in side) for side in sides) or _same_data(wait):
        return "mismatch", "op"
    known = [
        all(here[b] in states[a].sites for a in sides[i] for b in sides[j] if here[b] != here[a])
        for i, j in ((0, 1), (1, 0))
    ]
    if len({here[r] for side in sides for r in side}) == 1:
        return "mismatch", "op"
    if culprits:
        return ("deadlock", "missing_rank") if any(known) else ("mismatch", "op")
    return ("deadlock", "order_mismatch") if all(known) else ("mismatch", "op")


def _same_data(wait: Wait) -> bool:
    """One function, and the same tensor on both sides: the operations were exchanged, not the way of the program."""
    calls = [next(wait.calls[r] for r in sorted(side)) for side in wait.sides]
    first = calls[0]
    return all(
        c.shape is not None
        and c.shape == first.shape
        and compatible.dtype_name(c.dtype) == compatible.dtype_name(first.dtype)
        and c.site is not None
        and first.site is not None
        and (c.site.file, c.site.function) == (first.site.file, first.site.function)
        for c in calls
    )


def _side_text(snapshot: Snapshot, wait: Wait, side: Collection[int], cause: str) -> str:
    """`all_reduce` / `1,048,576 elements of float32` / `root rank 1`, with the place of the first rank of the side."""
    call = wait.calls[min(side)]
    op = compatible.op_name(call.op)
    n, dtype = compatible.elements(call), compatible.dtype_name(call.dtype)
    what = {
        "op": f"{op} #{wait.seq:,}" if not wait.p2p else op,
        "root": f"{op} with root {call.root}",
        "dtype": f"{op} of {dtype}",
        "shape": f"{op} of {n:,} elements" if n is not None else op,
    }[cause]
    return f"{what}{at(call.site)}"


def _message(
    snapshot: Snapshot, wait: Wait, cause: str, culprits: tuple[int, ...], reason: Reason, source: Source | None
) -> str:
    label = group_label(snapshot, wait.group)
    what = wait.conflict or "op"
    sides = sorted(wait.sides, key=lambda s: (not (s & set(culprits)), -len(s), min(s)))[:3]
    texts = [f"{rank_list(set(s))} {verb(s, 'is', 'are')} in {_side_text(snapshot, wait, s, what)}" for s in sides]
    number = "" if wait.p2p or what == "op" else f" #{wait.seq:,}"
    if culprits:
        texts = [texts[0] + f" where {texts[1]}", *texts[2:]]
        end = "" if reason is not Reason.EXHAUSTED else f"; {rank_list(culprits)} ran out of batches"
        odd = blame.rhythm_of(snapshot, wait) if reason is Reason.RHYTHM else None
        end = end if odd is None else f"; {odd.text}"
        behind = blame.condition_of(snapshot, wait, source) if not end else None
        if behind is not None and behind[0] == culprits:
            _, (file, line, text) = behind
            end = f"; only {rank_list(culprits)} {verb(culprits, 'comes', 'come')} there, by `{text}`{at(Site(file, line))}"
        return f"{', '.join(texts)}{number} ({label}): it can never complete{end}"
    blame_text = (
        "they come to these calls in another order, or not equally often"
        if cause == "order_mismatch"
        else "neither side can be told to be the wrong one"
    )
    return f"{', '.join(texts)}{number} ({label}): it can never complete; {blame_text}"


def _advice(snapshot: Snapshot, wait: Wait, cause: str, culprits: tuple[int, ...], reason: Reason) -> str:
    sides = sorted(wait.sides, key=lambda s: (not (s & set(culprits)), -len(s), min(s)))
    a, b = (wait.calls[min(s)] for s in sides[:2])
    both = f"{place_text(a.site)} and {place_text(b.site)}" if a.site and b.site else "the two calls"
    if reason is Reason.EXHAUSTED:
        return "give every rank the same number of batches (drop_last, DistributedSampler), or use Join"
    odd = blame.rhythm_of(snapshot, wait) if reason is Reason.RHYTHM else None
    if odd is not None and cause == "missing_rank":
        left = "came early to" if odd.early else "has not come to"
        call = a if odd.early else b
        return (
            f"find why {rank_list(culprits)} {left} {compatible.op_name(call.op)}{at(call.site)}: fewer or more batches, a break, "
            "return or skipped batch on some ranks only"
        )
    match cause:
        case "missing_rank":
            one = f"{compatible.op_name(a.op)}{at(a.site)}"
            return f"call {one} on all ranks or on none: look for a condition on the rank around it"
        case "order_mismatch":
            return f"issue the collectives in the same order, and as often, on all ranks: compare {both}"
        case "shape":
            return f"compare the tensors at {both}: a parameter, bucket or last batch differs between ranks"
        case "dtype":
            return f"compare the dtypes at {both}: autocast, or a cast on some ranks only"
        case "root":
            return f"pass the same src/dst on all ranks: compare {both}"
    return f"make all ranks call the same operation: compare {both}"
