"""Text for ranks whose calls in one collective differ: the two sides, and how to make them equal."""

from __future__ import annotations

from collections.abc import Collection

from distdiag.diagnosis.culprit import (
    arguments,
    extra_backward,
    message_counts,
    pending_exception,
    rhythm,
    skipped,
    uneven_loop,
)
from distdiag.diagnosis.culprit.parting import SHOWN, Condition, decision_advice, parting_text
from distdiag.diagnosis.culprit.verdict import Verdict
from distdiag.diagnosis.culprit.witnesses import Reason, condition_of, parting_of
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.guards import Source
from distdiag.diagnosis.model.snapshot import RankState, Site, Snapshot
from distdiag.diagnosis.text import pending_exception as exception_text
from distdiag.diagnosis.text.incident import group_label, implicit_text, verb
from distdiag.diagnosis.text.phrases import at, count, site_text
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.wait import Wait

SHOWN_RANKS = 4
EXHAUSTED_ADVICE = "give every rank the same number of batches (drop_last, DistributedSampler), or use Join"


def message(snapshot: Snapshot, verdict: Verdict, source: Source | None) -> str:
    """Return which rank is in which call at which site, and why the culprit is wrong."""
    wait, culprits = verdict.wait, verdict.culprits
    what = wait.conflict or "op"
    if what == "shape" and compatible.splits_disagree(wait.calls.values()):
        return _splits_text(snapshot, verdict, source)
    sides = _sides(verdict)[:3]
    texts = [f"{rank_list(set(s))} {verb(s, 'is', 'are')} in {_side_text(snapshot, wait, s, what)}" for s in sides]
    number = "" if wait.p2p or what == "op" else f" #{wait.seq:,}"
    if culprits:
        texts = [texts[0] + f" where {texts[1]}", *texts[2:]]
        end = _reason_text(snapshot, verdict, source)
    elif verdict.cause == "order_mismatch":
        end = "; they make these calls in a different order, or not equally often" + parting_text(
            _tie_parting(snapshot, wait, source)
        )
    elif arguments.reordered(snapshot.ranks, wait):
        end = "; both sides have made either call before: they make them in a different order" + parting_text(
            _tie_parting(snapshot, wait, source)
        )
    else:
        end = "; cannot tell which side is wrong" + parting_text(_tie_parting(snapshot, wait, source))
    return f"{', '.join(texts)}{number} ({group_label(snapshot, wait.group)}): it can never complete{end}"


def _splits_text(snapshot: Snapshot, verdict: Verdict, source: Source | None) -> str:
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
        f"{received:,}" + (_reason_text(snapshot, verdict, source) if verdict.culprits else "")
    )


def _tie_parting(snapshot: Snapshot, wait: Wait, source: Source | None) -> list[Condition]:
    """Return the conditions at which the paths of two sides diverge, if neither is known to be wrong."""
    found = [c for side in wait.sides[:2] for c in parting_of(snapshot, wait, side, source)]
    return list(dict.fromkeys(found))[-SHOWN:]


def _reason_text(snapshot: Snapshot, verdict: Verdict, source: Source | None) -> str:
    culprits = verdict.culprits
    if verdict.reason is Reason.EXHAUSTED:
        return f"; {rank_list(culprits)} ran out of batches"
    if (raised := _raised(snapshot, verdict)) is not None:
        return exception_text.text(raised)
    if (loop := uneven_loop.uneven_loop(snapshot, sorted(verdict.wait.calls))) is not None:
        return uneven_loop.text(loop)
    behind = condition_of(snapshot, verdict.wait, source)
    if verdict.cause in ("dtype", "shape", "root") and (before := _before_text(snapshot, verdict)):
        return before + (_behind_text(verdict, behind[1]) if behind is not None and behind[0] == culprits else "")
    if (extra := _extra(snapshot, verdict)) is not None:
        return extra_backward.text(extra)
    if (found := _skipped(snapshot, verdict)) is not None:
        return skipped.text(snapshot, found, source)
    odd = rhythm.rhythm_of(snapshot, verdict.wait) if verdict.reason is Reason.RHYTHM else None
    first = f"; {odd.text}" if odd is not None else ""
    if behind is None or behind[0] != culprits:
        parting = parting_of(snapshot, verdict.wait, culprits, source)
        more = None if parting or first else message_counts.more_calls(snapshot, culprits, verdict.victims)
        return first + (message_counts.text(more) if more is not None else parting_text(parting))
    return first + _behind_text(verdict, behind[1])


def _behind_text(verdict: Verdict, condition: Condition) -> str:
    """Return the condition on the rank that leads only the culprits to their call, or away from the others'."""
    file, line, text, names_leaver = condition
    due, culprits = f"due to `{text}`{at(Site(file, line))}", verdict.culprits
    if names_leaver:
        skipped_call = verdict.wait.calls[min(_sides(verdict)[1])]
        return f"; {rank_list(culprits)} left before {compatible.op_name(skipped_call.op)}{at(skipped_call.site)} {due}"
    return f"; only {rank_list(culprits)} {verb(culprits, 'runs', 'run')} it {due}"


def _raised(snapshot: Snapshot, verdict: Verdict) -> RankState | None:
    """Return the culprit that handles an exception which the others do not have."""
    return pending_exception.of(snapshot.ranks, verdict.culprits, frozenset(verdict.wait.calls) - set(verdict.culprits))


def _before_text(snapshot: Snapshot, verdict: Verdict) -> str:
    """Return the culprit's argument in earlier calls at this site; empty if it has not changed."""
    rank = verdict.culprits[0]
    state, call = snapshot.ranks.get(rank), verdict.wait.calls.get(rank)
    found = arguments.changed(state, call, verdict.cause) if state is not None and call is not None else None
    if found is None:
        return ""
    value = found.before
    if verdict.cause == "shape" and isinstance(value, int):
        value = count(value, "element")
    elif verdict.cause == "root":
        value = f"root {value}"
    times = "twice" if found.times == 2 else f"{found.times:,} times"
    who = "all ranks" if _all_changed(snapshot, verdict) else rank_list(verdict.culprits)
    return f"; before, {who} called it with {value} ({times})"


def _all_changed(snapshot: Snapshot, verdict: Verdict) -> bool:
    """True if the argument is new on all ranks, and was the same before: a last batch, for example."""
    known = {q: snapshot.ranks[q] for q in verdict.wait.calls if q in snapshot.ranks}
    found = [arguments.changed(state, verdict.wait.calls[q], verdict.cause) for q, state in known.items()]
    return len({f.before for f in found if f is not None}) == 1 and None not in found


def _skipped(snapshot: Snapshot, verdict: Verdict) -> skipped.Skipped | None:
    """Return the forwards without backward of the culprit, if it has any."""
    found = skipped.skipped(snapshot, sorted(verdict.wait.calls))
    return found if found is not None and verdict.culprits == (found.rank,) else None


def _extra(snapshot: Snapshot, verdict: Verdict) -> extra_backward.Extra | None:
    """Return the culprit's backward passes beyond its steps, if it has any."""
    found = extra_backward.extra_backward(snapshot, sorted(verdict.wait.calls))
    return found if found is not None and verdict.culprits == (found.rank,) else None


def advice(snapshot: Snapshot, verdict: Verdict, source: Source | None = None) -> str:
    """Return what to change; if neither side is known to be wrong, the smallest edit, and on which ranks."""
    wait, cause = verdict.wait, verdict.cause
    a, b = (wait.calls[min(s)] for s in _sides(verdict)[:2])
    both = _both(a.site, b.site)
    if verdict.reason is Reason.EXHAUSTED:
        return EXHAUSTED_ADVICE
    if (raised := _raised(snapshot, verdict)) is not None:
        return exception_text.advice(raised, verdict.culprits)
    if verdict.culprits and uneven_loop.uneven_loop(snapshot, sorted(wait.calls)) is not None:
        return uneven_loop.ADVICE
    if (extra := _extra(snapshot, verdict)) is not None and cause in ("missing_rank", "op", "shape"):
        return extra_backward.advice(extra)
    if (found := _skipped(snapshot, verdict)) is not None and cause in ("missing_rank", "op", "shape"):
        return skipped.advice(found)
    odd = rhythm.rhythm_of(snapshot, wait) if verdict.reason is Reason.RHYTHM else None
    if odd is not None and cause == "missing_rank" and (decides := _deciding(snapshot, verdict, source)) is not None:
        return decision_advice(decides, verdict.culprits)
    if odd is not None and cause == "missing_rank":
        left = verb(verdict.culprits, "is", "are") + (" early in" if odd.early else " not in")
        call = a if odd.early else b
        return (
            f"find why {rank_list(verdict.culprits)} {left} {compatible.op_name(call.op)}{at(call.site)}: fewer or more "
            "batches, a break, return or skipped batch on some ranks only"
        )
    if cause == "shape" and compatible.splits_disagree(wait.calls.values()):
        return (
            f"compare the split sizes at {both}: what a rank sends to another must be what that rank expects of it; exchange the "
            "input splits with an all_to_all first, and change none of them afterwards"
        )
    if wait.p2p and cause == "shape":
        return f"send and receive tensors of the same size, and in the same order: compare {both}"
    if not verdict.culprits and arguments.reordered(snapshot.ranks, wait):
        return (
            f"compare {both}: make these calls in the same order on all ranks; loop over a sorted list, not over a set or a "
            "directory listing, whose order differs between processes"
        )
    one = f"{compatible.op_name(a.op)}{at(a.site)}"
    if cause in ("op", "missing_rank", "shape") and (only_some := _only_some_text(snapshot, verdict, source)):
        return only_some
    apart = a.site is not None and b.site is not None and a.site.key != b.site.key
    if verdict.culprits and (cause == "missing_rank" or (cause in ("shape", "dtype") and apart)):
        if (decides := _deciding(snapshot, verdict, source)) is not None:
            return decision_advice(decides, verdict.culprits)
        if cause == "shape":
            return f"make the same calls in the same order on all ranks: compare {both}"
    if cause == "shape" and verdict.culprits and _all_changed(snapshot, verdict):
        return (
            "a batch is smaller than before, and not equally large on all ranks: use drop_last=True or a DistributedSampler (it "
            "pads), or exchange the sizes first and pad to the largest"
        )
    if not verdict.culprits and apart and len(parted := _tie_parting(snapshot, wait, source)) == 1:
        (decides,) = parted
        return (
            f"find on which rank `{decides.text.removesuffix(':')}` at line {decides.line} had the wrong result, or let all ranks decide "
            "together (all_reduce what it tests)"
        )
    return {
        "missing_rank": f"call {one} on all ranks or on none: look for a condition on the rank around it",
        "order_mismatch": f"issue the collectives in the same order, and equally often, on all ranks: compare {both}"
        + _swap_text(verdict),
        "shape": f"compare the tensors at {both}: a parameter, bucket or last batch differs between ranks, or the order of the calls "
        "does (a loop over a set, or over names that each rank collects itself)",
        "dtype": f"{_cast_text(verdict)}: the tensors at {both} come from Python or NumPy numbers, autocast, or a cast on some "
        "ranks only",
        "root": f"pass the same src/dst on all ranks: compare {both}",
    }.get(cause, f"make all ranks call the same operation: compare {both}")


def _only_some_text(snapshot: Snapshot, verdict: Verdict, source: Source | None) -> str:
    """Return what to do about a call that a condition on the rank keeps to some ranks; an empty text if there is none."""
    behind = condition_of(snapshot, verdict.wait, source)
    if not verdict.culprits or behind is None or behind[0] != verdict.culprits:
        return ""
    state, own = snapshot.ranks.get(verdict.culprits[0]), verdict.wait.calls[verdict.culprits[0]]
    who, (file, line, text, names_leaver) = rank_list(verdict.culprits), behind[1]
    guard = f"`{text.removesuffix(':')}`{at(Site(file, line))}"
    if names_leaver:
        other = verdict.wait.calls[min(_sides(verdict)[1])]
        return f"make {compatible.op_name(other.op)}{at(other.site)} on all ranks or on none: {guard} lets {who} leave before it"
    if implicit_text(state, own) and compatible.op_name(own.op) == "broadcast":
        return (
            f"on {who} call the module inside DDP (`model.module(...)`{at(own.site)}), which communicates nothing, or let all "
            f"ranks run what {guard} keeps to {who}"
        )
    return f"make {compatible.op_name(own.op)}{at(own.site)} on all ranks or on none: {guard} keeps it to {who}"


def _deciding(snapshot: Snapshot, verdict: Verdict, source: Source | None) -> Condition | None:
    """Return the one condition on data at which the paths diverge; None if it is on the rank, or not known."""
    if condition_of(snapshot, verdict.wait, source) is not None:
        return None
    found = parting_of(snapshot, verdict.wait, verdict.culprits, source)
    return found[0] if len(found) == 1 else None


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


def _both(a: Site | None, b: Site | None) -> str:
    """Return the sites of two calls; one site if it is the same."""
    if a is None or b is None:
        return "the two calls"
    return f"the ranks at {site_text(a)}" if site_text(a) == site_text(b) else f"{site_text(a)} and {site_text(b)}"


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
