"""Wording for ranks whose calls in one collective differ: the two sides, and what would make them equal."""

from __future__ import annotations

from collections.abc import Collection

from distdiag.diagnosis.culprit import rhythm
from distdiag.diagnosis.culprit.rank_condition import Source
from distdiag.diagnosis.culprit.verdict import Verdict
from distdiag.diagnosis.culprit.witnesses import Reason, condition_of
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Site, Snapshot
from distdiag.diagnosis.text.incident import group_label, verb
from distdiag.diagnosis.text.phrases import at, place_text
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.graph import Wait

EXHAUSTED_ADVICE = "give every rank the same number of batches (drop_last, DistributedSampler), or use Join"


def message(snapshot: Snapshot, verdict: Verdict, source: Source | None) -> str:
    """Return which rank is in which call where, and what decided who is wrong."""
    wait, culprits = verdict.wait, verdict.culprits
    what = wait.conflict or "op"
    sides = _sides(verdict)[:3]
    texts = [f"{rank_list(set(s))} {verb(s, 'is', 'are')} in {_side_text(wait, s, what)}" for s in sides]
    number = "" if wait.p2p or what == "op" else f" #{wait.seq:,}"
    if culprits:
        texts = [texts[0] + f" where {texts[1]}", *texts[2:]]
        end = _reason_text(snapshot, verdict, source)
    elif verdict.cause == "order_mismatch":
        end = "; they make these calls in another order, or not equally often"
    else:
        end = "; cannot tell which side is wrong"
    return f"{', '.join(texts)}{number} ({group_label(snapshot, wait.group)}): it can never complete{end}"


def _reason_text(snapshot: Snapshot, verdict: Verdict, source: Source | None) -> str:
    culprits = verdict.culprits
    if verdict.reason is Reason.EXHAUSTED:
        return f"; {rank_list(culprits)} ran out of batches"
    odd = rhythm.rhythm_of(snapshot, verdict.wait) if verdict.reason is Reason.RHYTHM else None
    if odd is not None:
        return f"; {odd.text}"
    behind = condition_of(snapshot, verdict.wait, source)
    if behind is None or behind[0] != culprits:
        return ""
    _, (file, line, text) = behind
    return f"; only {rank_list(culprits)} {verb(culprits, 'gets', 'get')} there, by `{text}`{at(Site(file, line))}"


def advice(snapshot: Snapshot, verdict: Verdict) -> str:
    """Return what to change."""
    wait, cause = verdict.wait, verdict.cause
    a, b = (wait.calls[min(s)] for s in _sides(verdict)[:2])
    both = _both(a.site, b.site)
    if verdict.reason is Reason.EXHAUSTED:
        return EXHAUSTED_ADVICE
    odd = rhythm.rhythm_of(snapshot, wait) if verdict.reason is Reason.RHYTHM else None
    if odd is not None and cause == "missing_rank":
        left = verb(verdict.culprits, "is", "are") + (" early in" if odd.early else " not in")
        call = a if odd.early else b
        return (
            f"find why {rank_list(verdict.culprits)} {left} {compatible.op_name(call.op)}{at(call.site)}: fewer or more "
            "batches, a break, return or skipped batch on some ranks only"
        )
    one = f"{compatible.op_name(a.op)}{at(a.site)}"
    return {
        "missing_rank": f"call {one} on all ranks or on none: look for a condition on the rank around it",
        "order_mismatch": f"issue the collectives in the same order, and equally often, on all ranks: compare {both}",
        "shape": f"compare the tensors at {both}: a parameter, bucket or last batch differs between ranks",
        "dtype": f"compare the dtypes at {both}: a tensor made from Python or NumPy numbers, autocast, or a cast on some ranks only",
        "root": f"pass the same src/dst on all ranks: compare {both}",
    }.get(cause, f"make all ranks call the same operation: compare {both}")


def _both(a: Site | None, b: Site | None) -> str:
    """Return the sites of two calls; one site if it is the same."""
    if a is None or b is None:
        return "the two calls"
    return f"the ranks at {place_text(a)}" if place_text(a) == place_text(b) else f"{place_text(a)} and {place_text(b)}"


def _sides(verdict: Verdict) -> list[frozenset[int]]:
    """Return the sides of a conflict, that of the culprits first."""
    return sorted(verdict.wait.sides, key=lambda s: (not (s & set(verdict.culprits)), -len(s), min(s)))


def _side_text(wait: Wait, side: Collection[int], cause: str) -> str:
    """Return `all_reduce` / `1,048,576 elements of float32` / `root rank 1`, with the site of the side's first rank."""
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
