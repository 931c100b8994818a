"""Text for ranks whose calls in one collective differ: the two sides, and how to make them equal."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import reduce

from msgspec.structs import replace

from distdiag.diagnosis.culprit.case import Reason
from distdiag.diagnosis.culprit.verdict import Verdict
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call, Life, Site, Snapshot
from distdiag.diagnosis.text import evidence
from distdiag.diagnosis.text.incident import group_text, implicit_text, number_text, verb
from distdiag.diagnosis.text.phrases import at, both_sites, site_text
from distdiag.diagnosis.text.template import filled
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.wait import Wait, last_wait
from distdiag.terms.units import counted

SHOWN_RANKS = 4
SHOWN_CALLERS = 4
_OWN_GROUP = "let the main thread make that call, or give the thread its own process group (`dist.new_group()`)"
THREADS_ADVICE = f"{_OWN_GROUP}, and make the same calls in a thread on every rank"
_ASYNC_SAVE = re.compile(r"(?<!def )\basync_save\s*\(")  # of checkpoints: it communicates in a thread of torch's
_SAVES_ADVICE = (
    'give async_save{site} its own process group, which all ranks make once: `process_group=dist.new_group(backend="gloo")`; '
    "or wait for its result before the next collective"
)
_SPLITS = (
    "{each} in {op} #{seq:,}{site} ({group}): it can never complete, as all ranks together send {sent:,} and "
    "expect {received:,}{reason}"
)
_SPLITS_ADVICE = (
    "compare the split sizes at {both}: what a rank sends to another must be what that rank expects of it; "
    "exchange the input splits with an all_to_all first, and change none of them afterwards"
)
# by cause; "message" is one of other size, "way" ranks whose calls are at different sites
_ADVICE = {
    "message": "send and receive tensors of the same size, and in the same order: compare {both}",
    "way": "make the same calls in the same order on all ranks: compare {both}",
    "missing_rank": "find what let {first} reach {a} while {second} {second:is|are} in {b}: a condition, an exception, or a loop "
    "with fewer rounds; let all ranks decide together",
    "order_mismatch": "issue the collectives in the same order, and equally often, on all ranks: compare {both}; "
    "it is enough that {second} {second:calls|call} {a} first, or {first} {b}",
    "shape": "compare the tensors at {both}: a size that comes from the data (a count of classes without minlength, a mask, the last batch), "
    "a parameter or bucket, or the order of the calls (a loop over a set, or over names that each rank collects itself) differs between ranks",
    "activations": "give all ranks of the group inputs of the same size: a collective in a module's `forward` is as large as the rank's own "
    "batch, and ranks that share one (tensor, sequence or context parallel) must not leave out or load batches by themselves: compare the batches of {both}",
    "dtype": "on {first} cast the tensor to {theirs} before the call{either}: it may come from Python or "
    "NumPy numbers, autocast, or a cast or a checkpoint on some ranks only: compare {both}",
    "gather": "{a} needs tensors of one size: exchange the sizes first and pad to the largest, or use all_gather_object; compare what "
    "each rank has there",
    "root": "pass the same src/dst on all ranks: compare {both}; if each rank chooses it by its own values, let one rank choose and "
    "broadcast its choice",
    "led": "see the call{led} that leads {first} to {a}: if only {first} {first:makes|make} it, as under `if rank == 0`, let all ranks make it, or "
    "none; {second} {second:is|are} at {both}",
    # a later line: others have yet to come there, or in a loop, to come there again
    "past": "see whether {first} left out {b}, to which the call{other} leads {second}: all ranks must make it; if both lines are in one "
    "loop, see what leads only {first} to the call{led}",
    "op": "make all ranks call the same operation: compare {both}, and find what leads {first} to the one and {second} to the other",
}


def message(snapshot: Snapshot, verdict: Verdict) -> str:
    """Return which rank is in which call at which site, and why the culprit is wrong."""
    wait, culprits = verdict.wait, verdict.culprits
    what = wait.conflict or "op"
    if what == "shape" and compatible.splits_disagree(wait.calls.values()):
        return _splits_text(snapshot, verdict)
    sides = _sides(verdict)[:3]
    texts = []
    for side in sides:
        left = _left(snapshot, wait, side)  # on a device the smaller of two calls may end alone
        all_left = verb(side, "has completed", "have completed") if left == sorted(side) else ""
        does = all_left or ("have made" if left else verb(side, "is in", "are in"))
        some = f" ({rank_list(left)} {verb(left, 'has', 'have')} completed it)" if left and not all_left else ""
        texts.append(f"{rank_list(side)} {does} {_side_text(verdict, snapshot, side, what)}{some}")
    number, group = number_text(snapshot, wait), group_text(snapshot, wait.group)
    end = "they cannot complete together" if snapshot.source == "stacks" else "it can never complete"
    end += " on all ranks" if any(_left(snapshot, wait, side) for side in wait.sides) else ""
    led = _led(verdict) if culprits else None
    reason = evidence.reason_text(verdict)
    if led is not None:
        reason = f"; {rank_list(sides[0])} came there by the call{at(led[0])}, the others by that{at(led[1])}" + reason
    threads = _threads(wait)
    if threads:
        who = rank_list(threads) if culprits else "each rank"
        reason = f"; two threads of {who} use this group: which one calls first is chance"
    elif culprits:
        texts = [texts[0] + f" where {texts[1]}", *texts[2:]]
    elif verdict.cause == "order_mismatch":
        reason = "; they make these calls in a different order, or not equally often" + reason
    elif not any(testimony.name is Reason.ORDER for testimony in verdict.evidence):
        reason = "; cannot tell which side is wrong" + reason
    call = f", {'both' if len(sides) == 2 else 'each'} as collective{number} of {group}" if number else f" ({group})"
    return f"{', '.join(texts)}{call}: {end}{reason}"


def _splits_text(snapshot: Snapshot, verdict: Verdict) -> str:
    """Return what each rank sends and expects in an all_to_all: the first ranks, and the sums over all."""
    calls = sorted(verdict.wait.calls.items())
    sizes = {rank: (compatible.elements(call) or 0, call.received or 0) for rank, call in calls}
    each = [f"rank {rank} sends {sent:,} and expects {received:,} elements" for rank, (sent, received) in sizes.items()]
    others = f", and {len(each) - SHOWN_RANKS} more ranks" if len(each) > SHOWN_RANKS else ""
    sent, received = (sum(both) for both in zip(*sizes.values(), strict=True))
    op, site = compatible.op_name(calls[0][1].op), calls[0][1].site
    return filled(
        _SPLITS, each=", ".join(each[:SHOWN_RANKS]) + others, op=op, seq=verdict.wait.seq, site=site, sent=sent,
        received=received, group=group_text(snapshot, verdict.wait.group),
        reason=evidence.reason_text(verdict) if verdict.culprits else "",
    )  # fmt: skip


def advice(verdict: Verdict) -> str:
    """Return what to change; if neither side is known to be wrong, the smallest edit, and on which ranks."""
    wait, cause, (first, second) = verdict.wait, verdict.cause, _sides(verdict)[:2]
    a, b = wait.calls[min(first)], wait.calls[min(second)]
    both = both_sites(a.site, b.site)
    if cause == "shape" and compatible.splits_disagree(wait.calls.values()):
        return filled(_SPLITS_ADVICE, both=both)
    apart = a.site is not None and b.site is not None and a.site.key != b.site.key
    if _threads(wait):
        call = next(call for call in wait.calls.values() if call.other_thread)
        saves = _saved_at(verdict, call)
        by_torch = saves or (
            call.site is None and verdict.case.snapshot.source == "dumps"
        )  # its stack has no other code
        return filled(_SAVES_ADVICE, site=saves) if by_torch else THREADS_ADVICE if verdict.culprits else _OWN_GROUP
    row = cause if cause in _ADVICE else "op"
    other_call = apart and cause == "dtype" and compatible.elements(a) != compatible.elements(b)
    if wait.p2p and cause == "shape":
        row = "message"
    elif (cause not in ("dtype", "root") or apart) and (advised := evidence.advice(verdict)):
        return advised
    elif other_call:  # no cast would make it the same
        row = "missing_rank"
    elif cause == "shape" and verdict.culprits and apart:
        row = "way"
    elif cause == "shape" and a.site is not None and not apart and a.site.function == "forward":
        row = "activations"
    elif cause == "shape" and compatible.op_name(a.op).startswith(("all_gather", "gather")):
        row = "gather"
    led = _led(verdict) if row == "op" and verdict.culprits else None
    if led is not None:
        row, both = "led" if led[0].line < led[1].line else "past", site_text(b.site) if b.site else "another call"
    mine, theirs = (compatible.dtype_name(call.dtype) for call in (a, b))
    return filled(
        _ADVICE[row], both=both, first=first, second=second, theirs=theirs,
        led=led and led[0], other=led and led[1], either="" if verdict.culprits else f", or on {rank_list(second)} to {mine}",
        a=f"{compatible.op_name(a.op)}{at(a.site)}", b=f"{compatible.op_name(b.op)}{at(b.site)}",
    )  # fmt: skip


def _led(verdict: Verdict) -> tuple[Site, Site] | None:
    """Return the lines of both sides in the innermost function that both are in, if the culprits' call is made further inside. Of stacks
    only: where calls are counted, a call has its callers."""
    first, second = (verdict.case.states[min(side)].user_stack[::-1] for side in _sides(verdict)[:2])
    for mine, theirs in zip(first, second, strict=False):
        if mine != theirs:
            shared = (mine.file, mine.function) == (theirs.file, theirs.function)
            return (mine, theirs) if shared and mine != first[-1] and verdict.case.snapshot.source == "stacks" else None
    return None


def _sides(verdict: Verdict) -> list[frozenset[int]]:
    """Return the sides of a conflict, the culprits' side first."""
    return sorted(verdict.wait.sides, key=lambda s: (not (s & set(verdict.culprits)), -len(s), min(s)))


def _left(snapshot: Snapshot, wait: Wait, side: Collection[int]) -> list[int]:
    """Return the ranks whose call has completed: of a broadcast those that have got the root's tensor.

    On a host backend a call that raised counts as complete: only one that has made the next call is known to be through.
    """
    known = {q for q in side if q in wait.calls and wait.calls[q].on_device}
    if wait.p2p:  # the number is that of the message, and no count of the group's collectives
        return sorted(q for q in known if wait.calls[q].completed_s is not None)
    known |= {q for q in side if snapshot.ranks[q].enqueued.get(wait.group, 0) > wait.seq}
    return sorted(q for q in known if snapshot.ranks[q].completed.get(wait.group, 0) >= wait.seq)


def with_threads(verdict: Verdict, calls: dict[int, tuple[Wait, Call]]) -> dict[int, tuple[Wait, Call]]:
    """Return the calls with the line that starts torch's own thread for those of that thread, which have no line of the script."""
    return {
        q: (wait, replace(call, site=_saved_at(verdict, call)) if call.other_thread and call.site is None else call)
        for q, (wait, call) in calls.items()
    }


def _saved_at(verdict: Verdict, call: Call) -> Site | None:
    """Return the line of the script that starts torch's own thread for checkpoints; None if that thread need not be the call's."""
    files = dict.fromkeys(frame.file for state in verdict.case.states.values() for frame in state.user_stack)
    texts = ((file, (verdict.case.source(file) or "").splitlines()) for file in files)
    lines = [
        Site(file, n) for file, text in texts for n, x in enumerate(text, 1) if _ASYNC_SAVE.search(x.partition("#")[0])
    ]
    return lines[0] if call.site is None and len(lines) == 1 else None


def _side_text(verdict: Verdict, snapshot: Snapshot, side: Collection[int], cause: str) -> str:
    """Return `all_reduce` / `1,048,576 elements of float32` / `root rank 1`, with the site of the side's first rank."""
    call = verdict.wait.calls[min(side)]
    op = compatible.op_name(call.op)
    n, dtype = compatible.elements(call), compatible.dtype_name(call.dtype)
    sizes = {compatible.elements(one) for one in verdict.wait.calls.values()}
    what = {
        "op": op,
        "root": f"{op} with root {call.root}",
        "dtype": f"{op} of {f'{n:,} {dtype}' if n is not None and len(sizes) > 1 else dtype}",
        "shape": f"{op} of {counted(n, 'element')}" if n is not None else op,
    }[cause]
    if call.other_thread:
        saves = _saved_at(verdict, call)
        return f"{what}{at(call.site)}, in another thread{f' (of torch, for async_save{at(saves)})' if saves else ''}"
    implicit = implicit_text(snapshot.ranks.get(min(side)), call) if cause == "op" else ""
    return f"{what}{at(_sites(verdict)[min(side)])}{implicit}"


def _sites(verdict: Verdict) -> dict[int, Site | None]:
    """Return the sites of the calls; if all are at one line, which the ranks have reached by different callers, with these.

    Not those of a killed rank: its last sample may be older than its call.
    """
    calls, states = verdict.wait.calls, verdict.case.states
    sites = {rank: call.site for rank, call in calls.items()}
    stacks = {q: states[q].user_stack for q, call in calls.items() if q in states and last_wait(states[q]) == call}
    parted = next((n for n, x in enumerate(zip(*stacks.values(), strict=False)) if len(set(x)) > 1), 0)
    one_line = len({*sites.values(), *(x[0] for x in stacks.values() if x)}) == 1
    if len(stacks) < len(sites) or not one_line or parted >= SHOWN_CALLERS:
        return sites
    paths = ((q, stack[: parted + 1]) for q, stack in stacks.items() if parted and states[q].life != Life.KILLED)
    return sites | {q: reduce(lambda outer, x: replace(x, caller=outer), reversed(path), None) for q, path in paths}


def _threads(wait: Wait) -> list[int]:
    """Return the ranks of which another thread than the main one made the call."""
    return sorted(rank for rank, call in wait.calls.items() if call.other_thread)
