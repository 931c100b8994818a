"""Text for ranks whose calls in one collective differ: the two sides, and how to make them equal."""

from __future__ import annotations

from collections.abc import Collection

from distdiag.diagnosis.culprit.case import Reason
from distdiag.diagnosis.culprit.verdict import Verdict
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.diagnosis.text import evidence
from distdiag.diagnosis.text.incident import group_label, implicit_text, verb
from distdiag.diagnosis.text.phrases import at, both_sites, count
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.wait import Wait

SHOWN_RANKS = 4


def message(snapshot: Snapshot, verdict: Verdict) -> str:
    """Return which rank is in which call at which site, and why the culprit is wrong."""
    wait, culprits = verdict.wait, verdict.culprits
    what = wait.conflict or "op"
    if what == "shape" and compatible.splits_disagree(wait.calls.values()):
        return _splits_text(snapshot, verdict)
    sides = _sides(verdict)[:3]
    texts = [f"{rank_list(set(s))} {verb(s, 'is', 'are')} in {_side_text(snapshot, wait, s, what)}" for s in sides]
    number = "" if wait.p2p or what == "op" else f" #{wait.seq:,}"
    reason = evidence.reason_text(verdict)
    if culprits:
        texts = [texts[0] + f" where {texts[1]}", *texts[2:]]
    elif verdict.cause == "order_mismatch":
        reason = "; they make these calls in a different order, or not equally often" + reason
    elif not any(testimony.name is Reason.ORDER for testimony in verdict.also):
        reason = "; cannot tell which side is wrong" + reason
    return f"{', '.join(texts)}{number} ({group_label(snapshot, wait.group)}): it can never complete{reason}"


def _splits_text(snapshot: Snapshot, verdict: Verdict) -> str:
    """Return what each rank sends and expects in an all_to_all: the first ranks, and the sums over all."""
    calls = sorted(verdict.wait.calls.items())
    sizes = {rank: (compatible.elements(call) or 0, call.received or 0) for rank, call in calls}
    each = [f"rank {rank} sends {sent:,} and expects {received:,} elements" for rank, (sent, received) in sizes.items()]
    others = f", and {len(each) - SHOWN_RANKS} more ranks" if len(each) > SHOWN_RANKS else ""
    sent, received = (sum(both) for both in zip(*sizes.values(), strict=True))
    call = calls[0][1]
    return (
        f"{', '.join(each[:SHOWN_RANKS])}{others} in {compatible.op_name(call.op)} #{verdict.wait.seq:,}{at(call.site)} "
        f"({group_label(snapshot, verdict.wait.group)}): it can never complete, as all ranks together send {sent:,} and expect "
        f"{received:,}" + (evidence.reason_text(verdict) if verdict.culprits else "")
    )


def advice(verdict: Verdict) -> str:
    """Return what to change; if neither side is known to be wrong, the smallest edit, and on which ranks."""
    wait, cause = verdict.wait, verdict.cause
    a, b = (wait.calls[min(side)] for side in _sides(verdict)[:2])
    both = both_sites(a.site, b.site)
    if cause == "shape" and compatible.splits_disagree(wait.calls.values()):
        return (
            f"compare the split sizes at {both}: what a rank sends to another must be what that rank expects of it; exchange the "
            "input splits with an all_to_all first, and change none of them afterwards"
        )
    if wait.p2p and cause == "shape":
        return f"send and receive tensors of the same size, and in the same order: compare {both}"
    apart = a.site is not None and b.site is not None and a.site.key != b.site.key
    if (cause not in ("dtype", "root") or apart) and (advised := evidence.advice(verdict)):
        return advised
    if cause == "shape" and verdict.culprits and apart:
        return f"make the same calls in the same order on all ranks: compare {both}"
    return {
        "missing_rank": f"call {compatible.op_name(a.op)}{at(a.site)} on all ranks or on none: look for a condition on the rank "
        "around it",
        "order_mismatch": f"issue the collectives in the same order, and equally often, on all ranks: compare {both}"
        + _swap_text(verdict),
        "shape": f"compare the tensors at {both}: a parameter, bucket or last batch differs between ranks, or the order of the calls "
        "does (a loop over a set, or over names that each rank collects itself)",
        "dtype": f"{_cast_text(verdict)}: the tensors at {both} come from Python or NumPy numbers, autocast, or a cast on some "
        "ranks only",
        "root": f"pass the same src/dst on all ranks: compare {both}",
    }.get(cause, f"make all ranks call the same operation: compare {both}")


def _cast_text(verdict: Verdict) -> str:
    """Return the smallest edit: which ranks cast to which dtype."""
    sides = [
        (rank_list(side), compatible.dtype_name(verdict.wait.calls[min(side)].dtype)) for side in _sides(verdict)[:2]
    ]
    (mine, _), (_, theirs) = sides
    return f"on {mine} cast the tensor to {theirs} before the call" + (
        "" if verdict.culprits else f", or on {sides[1][0]} to {sides[0][1]}"
    )


def _swap_text(verdict: Verdict) -> str:
    """Return the smallest edit for a true tie: either side can make the other's call first."""
    first, second = _sides(verdict)[:2]
    a, b = (f"{compatible.op_name(c.op)}{at(c.site)}" for c in (verdict.wait.calls[min(s)] for s in (first, second)))
    return (
        f"; it is enough that {rank_list(second)} {verb(second, 'calls', 'call')} {a} first, or {rank_list(first)} {b}"
    )


def _sides(verdict: Verdict) -> list[frozenset[int]]:
    """Return the sides of a conflict, the culprits' side first."""
    return sorted(verdict.wait.sides, key=lambda s: (not (s & set(verdict.culprits)), -len(s), min(s)))


def _side_text(snapshot: Snapshot, wait: Wait, side: Collection[int], cause: str) -> str:
    """Return `all_reduce` / `1,048,576 elements of float32` / `root rank 1`, with the site of the side's first rank."""
    call = wait.calls[min(side)]
    op = compatible.op_name(call.op)
    n, dtype = compatible.elements(call), compatible.dtype_name(call.dtype)
    what = {
        "op": f"{op} #{wait.seq:,}" if not wait.p2p else op,
        "root": f"{op} with root {call.root}",
        "dtype": f"{op} of {dtype}",
        "shape": f"{op} of {count(n, 'element')}" if n is not None else op,
    }[cause]
    implicit = implicit_text(snapshot.ranks.get(min(side)), call) if cause == "op" else ""
    return f"{what}{at(call.site)}{implicit}"
