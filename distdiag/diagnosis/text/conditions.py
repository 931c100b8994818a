"""Wording of the conditions by which ranks parted, and what to do about them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from distdiag.diagnosis.culprit.paths import Condition, Way, rank_condition
from distdiag.diagnosis.model import rank_tests
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.guards import GuardKind, on_stack
from distdiag.diagnosis.model.snapshot import Call, Site
from distdiag.diagnosis.model.syntax import Source
from distdiag.diagnosis.text.phrases import at, op_at, site_text
from distdiag.terms.operations import op_name

# a loss that counts nothing, and has a gradient for every parameter also where an output is not finite
NO_WEIGHT = "of `0 * sum(p.sum() for p in model.parameters())`"


def diverge_text(conditions: Sequence[Condition]) -> str:
    """Return `; they diverge at `if loss < 0.2` (train.py:6)`; empty without a condition."""
    return f"; they diverge at {shown}" if (shown := conditions_text(conditions)) else ""


def conditions_text(conditions: Sequence[Condition]) -> str:
    """Return `` `if loss < 0.2` (train.py:6) or `while x` (train.py:9)``; empty without a condition."""
    return " or ".join(f"`{c.text}` ({site_text(c.site)})" for c in conditions)


def left_text(ranks: Collection[int], call: Call) -> str:
    """Return `rank 1 left the loop before all_reduce (train.py:15)`."""
    return f"{rank_list(ranks)} left the loop before {op_at(call)}"


def guard_text(stack: Sequence[Site], source: Source, *kinds: GuardKind) -> str:
    """Return `` `if rank == 0` at train.py:40``: the innermost condition of these kinds for a line or its callers that can differ between
    ranks, one on the rank before others; empty without one."""
    held = [g for g in on_stack(stack, source) if g.kind in kinds and g.branch == "body" and g.can_differ()]
    found = next((g for g in reversed(held) if g.on_rank), next(reversed(held), None))
    return f"`{found.text}`{at(found.place)}" if found is not None else ""


def kept_text(mine: Sequence[Site], theirs: Sequence[Site], ranks: Collection[int], source: Source) -> str:
    """Return `` `if rank == 0` at train.py:40 keeps that work to rank 0: ``, of what ranks do while another waits; empty if no condition on the rank does."""
    found = rank_condition(mine, theirs, source)
    alone = found is not None and found.way is Way.ALONE
    return f"`{found.text}`{at(found.site)} keeps that work to {rank_list(ranks)}: " if found and alone else ""


def handler_advice(who: str, what: str = "", guard: str = "") -> str:
    """Return what to do about an exception that some ranks caught and went on after.

    Args:
        what: The exception, which the message has, if known; else `guard` is the handler.
    """
    find = (
        f"fix what raised {what.partition(':')[0]} on {who}"
        if what
        else f"find what {guard} caught on {who} (log its traceback), fix it"
    )
    return f"{find}, or re-raise it, so that all ranks end; to go on after a failure, let all ranks agree on it first (all_reduce a flag)"


def _loop_advice(condition: Condition, culprits: Collection[int], guard: str) -> str:
    start = rank_tests.counts_from(condition.text)
    compare = f" (compare `{start}`, from which it counts, on the ranks)" if start else ""
    find = f"find why it did not on {rank_list(culprits)}{compare}" if culprits else f"compare its length{compare}"
    if any(f".{of}()" in condition.text for of in ("items", "keys", "values")):
        find = "compare its keys, and let a rank keep one that it lacks, with a zero (a zero loss, not none)"
    return f"let the loop {guard} run equally often on all ranks: {find}, or let all ranks decide together when it ends"


def decision_advice(
    condition: Condition, culprits: Collection[int], call: Call | None = None, ddp: bool = False, inside: bool = False
) -> str:
    """Return what to do about a condition that held on some ranks only.

    Args:
        call: What the culprits left out, or made alone.
        ddp: It is a call of DDP's own.
        inside: A library makes it, in what the line calls: the forward of a sharded module, for example.
    """
    site = call.site and Site(call.site.file, call.site.line) if call is not None else None
    near = site is None or site.file == condition.file
    guard = f"`{condition.text}`{f' at line {condition.line}' if near else at(condition.site)}"
    who, place = rank_list(culprits) if culprits else "some", at(site)
    agree = f"(all_reduce {'a flag' if condition.text.startswith('except') else 'what it tests'})"
    if condition.keeps_results:
        what = (op_name(call.op) if call is not None else "") or "the collective"
        return (
            f"make {what}{place} outside of the function whose results {guard} keeps: a rank that has the result does not run it, and "
            "which ranks have it depends on their data"
        )
    led_past = condition.past or condition.way not in (Way.ALONE, Way.AGAIN)
    if condition.failed and led_past and not (call is not None and call.p2p):
        return handler_advice("the other ranks" if condition.past else who, "", guard)
    if condition.way in (Way.SKIPPED, Way.ROUND) and call is not None:
        past = f"too, where {guard} leads past it"
        if call.p2p:
            way, peer = ("sends", "to") if "send" in call.op else ("receives", "from")
            return f"see that {who} {way} its message {peer} rank {call.peer}, {past}, or tells rank {call.peer} that none follows"
        what, nothing = op_name(call.op) or "the collective", ""
        if ddp:
            what, nothing = f"DDP's {what}", f", for example with the backward {NO_WEIGHT}"
        elif "reduce" in call.op and not inside:
            nothing = ", with zeros if it has nothing to add"
        elif ("gather" in call.op or "all_to_all" in call.op) and not inside:
            nothing = ", with its own part, or an empty one"
        do = f"run the line{place}, in which a library makes {what}," if inside else f"make {what}{place}"
        if condition.on_rank:
            return f"{do} on all ranks or on none: {guard} leads {who} past it"
        if ddp or rank_tests.of_amount(condition.text):
            return f"{do} on {who}, {past}{nothing}, or leave it out only where all ranks do {agree}"
        return f"let all ranks decide together whether they make {what}{place}: {guard} leads {who} past it {agree}"
    if condition.way is Way.AGAIN:
        return (
            f"find what {who} caught there ({guard}: log it with its traceback), and repeat no function that makes a collective on one "
            "rank alone: let all ranks agree on the failure, and repeat it together (all_reduce a flag)"
        )
    if condition.way is Way.ALONE and call is not None and not call.p2p:
        if ddp and op_name(call.op) == "broadcast":
            inner = f"call the module inside DDP (`model.module(...)`{place}), which communicates nothing"
            return f"on {who} {inner}, or let all ranks run what {guard} keeps to {who}"
        agree = "" if condition.on_rank else f" {agree}"
        return f"make {op_name(call.op) or 'the collective'}{place} on all ranks or on none: {guard} keeps it to {who}{agree}"
    if condition.way is Way.LEFT and condition.on_rank:
        return f"let all ranks leave that loop in the same round (all_reduce what {guard} tests): it lets {who} leave alone"
    if condition.is_loop:
        return _loop_advice(condition, culprits, guard)
    return f"find why {guard} had another result on {who}, or let all ranks decide together {agree}"
