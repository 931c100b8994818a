"""comm_bound: every rank loses this share of its time to communication that does not overlap with
computation; it is an info. That `no_sync()` has no effect is counted, and is a warning; so are many
tiny calls of one line, if the time that they take is certain.

If one rank is late, the others wait for it: that is a straggler instead. On a device backend no
host waits in a collective, so DDP's own timings are used.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from distdiag.diagnosis import call_cost, comparison, kinds
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.gradient_cost import Gradients, gradients
from distdiag.diagnosis.model.findings import Abstained, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import WARM_STEPS, Buckets, RankState, Site, Snapshot
from distdiag.diagnosis.replicas import limits as averaged
from distdiag.diagnosis.rules.straggler import limits as straggling
from distdiag.diagnosis.step_times import LIMITS as STEPS
from distdiag.diagnosis.step_times import Window, share_of_all
from distdiag.diagnosis.text.phrases import at, wheres
from distdiag.diagnosis.text.straggler import stack_of
from distdiag.diagnosis.text.template import Template
from distdiag.diagnosis.training_data import only_shadow, stages
from distdiag.terms.units import counted, percent, size_text

kind = kinds.COMM_BOUND
BF16_BACKENDS = ("nccl", "xccl")
_STUCK = {k.name for k in (kinds.DEADLOCK, kinds.MISMATCH, kinds.STALL, kinds.TIMEOUT, kinds.RANK_LOST)}
PARTS = 4  # buckets that one bucket of all gradients is split into


@dataclass(frozen=True)
class Limits:
    share: float = 0.3
    """Share of its time that even the least affected rank loses."""
    tiny_share: float = 0.15
    """The same to many calls of a line that carry a number or two: at any load, one call would do."""
    least_span_ms: float = 1000.0
    """Milliseconds that the collectives of a loop without optimizer steps must span."""
    small_bucket_bytes: int = 1 << 20
    """Mean bytes of a bucket below which the latency of each all-reduce matters more than its
    bytes."""
    broadcast_bytes: int = 1 << 20
    """Bytes of the buffers of a step below which a wait in their broadcast may be that for a late rank."""
    micro_batches: int = 4
    """Micro-batches per stage, from which on more shorten the idle time of a pipeline little."""


limits = Limits()
WAIT_IN_TURN = "each rank waits at least {} of step time, but all of them only {}: mostly one waits for another"
PROBE = "`distdiag probe allreduce` measures what this machine can do"
COMM_BOUND = Template(
    kind, None,
    "communication that no computation hides (exposed): at least {share:share} of {of} on every rank{late}{gradients}{cores}",
    "{share:share} of {of}", "{do}", severity=Severity.INFO)  # fmt: skip
# NCCL has no all-reduce of sparse gradients
SHARDED = "split the table by rows over the ranks, as TorchRec does, or train it less often"
SPARSE = "`Embedding(…, sparse=True)` sends those only; its optimizer must take sparse gradients, as SGD and SparseAdam do, and `clip_grad_norm_` takes none"
REDUCED_AGAIN = Template(
    kind, None,
    "gradients are reduced twice: DDP averages them in backward, and in each step the script reduces as many elements again{site}",
    "the time of the second reduction", call_cost.AGAIN, severity=Severity.INFO)  # fmt: skip
IN_VAIN = Template(
    kind, None,
    "`no_sync()` has no effect{site}: {n} of {every} backward passes of a step run in it, their forward does not, so all {every} exchange "
    "{size}gradients",
    "{n} of {every} exchanges of gradients in each step{saved}",
    "put the forward inside `no_sync()`, too: DDP decides there whether the backward exchanges gradients", proved=True)  # fmt: skip
BUFFERS = (
    "constant buffers (masks, tables of positions) need no broadcast: set `broadcast_buffers=False` in DDP; if its batch norm needs the broadcast, "
    "keep the constants as plain attributes instead"
)
STAGES = Template(
    kind, None,
    "every rank waits at least {share:share} of {of} for what the others send{late}{bubble}{cores}",
    "{share:share} of {of}", "{do}; " + PROBE, severity=Severity.INFO)  # fmt: skip
BUBBLE = ": the idle time of a pipeline (its bubble) is part of it, as communication is"
DO_PIPELINE = "more micro-batches per step shorten the idle time at the pipeline's start and end"
DO_EXCHANGE = (
    "send less, exchange less often, or compute while messages are under way (`isend` and `irecv` early, `wait()` late)"
)


class Part(NamedTuple):
    """A part of the communication: its share of the time of the rank that loses least to it, what it is, and what to do about it."""

    share: float
    text: str
    advice: str
    many: bool = False  # tiny calls


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    s, window, ddp = facts.snapshot, facts.window, gradients(facts.snapshot)
    share, in_turn, of, why = 0.0, 0.0, "step time", None
    if isinstance(window, Abstained):
        late, why = any(f.kind == kinds.STRAGGLER.name for f in facts.found), window
        share, of = (0.0 if late else _shared_waits(s)), "the time"
        if share < limits.share and not late and ddp is not None and not all(r.wait_measured for r in s.ranks.values()):
            share, of = ddp.share, "step time"  # hosts run ahead, DDP's times are the device's
        else:
            ddp = None
    elif facts.shadows:
        why = only_shadow(facts.shadows)
    elif window.inferred:
        share = ddp.share if ddp is not None else 0.0
        why = None if ddp is not None else Abstained("communication is on the device, and DDP has timed too few steps")
    else:
        share = share_of_all(window, lambda x: x.wait_ms, limits.share)
        together = min(share, _together(window)) if share and not stages(s) else share
        if together < limits.share <= share:
            why = Abstained(WAIT_IN_TURN.format(percent(share), percent(together)), checked=True)
        in_turn, share = share - together, together
    often = call_cost.often(s) and not facts.shadows
    line = call_cost.dearest(s, facts.source, _reduced_again(s)) if often or share >= limits.share else None
    if line is not None and line.many and isinstance(window, Window) and not window.inferred:
        # those that the page keeps are of a step or two
        line = replace(line, share=min(line.share, share_of_all(window, lambda x: x.wait_ms, 0.0)))
    least = max(limits.tiny_share, ddp.share if ddp is not None else 0.0)
    tiny = line is not None and line.many and line.share >= least
    if any(f.kind in _STUCK for f in facts.found):
        yield Abstained("the ranks have stopped for another reason")
    elif (vain := _in_vain(s, gradients(s))) is not None:
        yield vain
    elif share >= limits.share or tiny:
        late = ", with no rank late" if isinstance(window, Abstained) else _late(window, in_turn)
        ranks = sorted(s.ranks) if isinstance(window, Abstained) else window.ranks
        parts = [Part(line.share, line.text, line.advice, line.many)] if line is not None else []
        yield _finding(s, ranks, share, of, ddp, late, [*_buffers(s, window), *parts])
    elif (site := _reduced_again(s)) is not None:
        yield REDUCED_AGAIN(
            victims=sorted(s.ranks), site=at(site), where=wheres(s, s.ranks, None, dict.fromkeys(s.ranks, site))
        )
    elif why is not None:
        yield why


def _in_vain(s: Snapshot, ddp: Gradients | None) -> Finding | None:
    """Return the finding of backward passes that exchange gradients in `no_sync()`, if all ranks make them in their steps."""
    of = {q: (m, r.step) for q, r in s.ranks.items() if r.step > WARM_STEPS for m in r.models if m.vain_no_syncs}
    if len(of) < s.world_size:
        return None
    each = ((round(m.vain_no_syncs / step), round(m.synced_backwards / step), m) for m, step in of.values())
    n, every, m = min(each, key=lambda x: x[:2])
    if not 0 < n < every:
        return None
    sites = {q: next(iter(stack_of(s.ranks[q], "backward")), None) for q in of}
    return IN_VAIN(
        victims=sorted(of), where=wheres(s, of, None, sites), site=sites[min(sites)], n=n, every=every,
        size=f"{size_text(m.buckets.bytes)} of " if m.buckets is not None else "",
        saved=f": up to {percent(ddp.share * n / every)} of step time" if ddp is not None else "",
    )  # fmt: skip


def _reduced_again(s: Snapshot) -> Site | None:
    """Return where the script reduces in each step as many elements as there are gradients, although DDP averages those of every step.

    What it reduces between a step and the next backward are parameters, and a communication hook in Python reduces for DDP.
    """
    least, most = averaged.reduced
    for r in s.ranks.values():
        shares = [x.value for x in r.samples if x.kind == "reduced"]
        each_step = r.models and all(m.synced_backwards >= averaged.averaged * r.step > 0 for m in r.models)
        by_hook = any(m.buckets is not None and m.buckets.comm_hook for m in r.models)
        parameters = any(x.value > averaged.metrics for x in r.samples if x.kind == "averaged")
        known = each_step and not by_hook and not parameters and len(shares) >= averaged.samples
        if not known or not all(least <= share <= most for share in shares):
            return None
    calls = (c for r in s.ranks.values() for c in reversed(r.calls))
    return next((c.site for c in calls if c.op == "all_reduce" and (c.bytes or 0) > averaged.metrics_bytes), None)


def _buffers(s: Snapshot, window: Window | Abstained) -> Iterator[Part]:
    """Yield what DDP's broadcasts of buffers cost; nothing where hosts do not wait in them, or they are small."""
    if isinstance(window, Abstained) or window.inferred:
        return
    known = [[m.buckets for m in r.models if m.buckets is not None] for r in s.ranks.values()]
    mine = max(known, key=lambda of_rank: sum(b.broadcast_bytes for b in of_rank))
    n_bytes = sum(b.broadcast_bytes for b in mine)
    if n_bytes >= limits.broadcast_bytes:
        share = share_of_all(window, lambda x: x.forward_wait_ms, 0.0)
        name = max(mine, key=lambda b: b.broadcast_bytes).largest_buffer
        size = size_text(n_bytes) + (f" (the largest is {name})" if name else "")
        text = f"DDP's broadcast of buffers in each forward, {size}, takes {percent(share)}"
        yield Part(share, text, BUFFERS)


def _micro_batches(s: Snapshot) -> int | None:
    """Return how many messages each rank sends to the next per step, if ranks are a chain: a step has no more micro-batches than that."""
    each = []
    for q, r in s.ranks.items():
        sent: Counter[int] = Counter()
        for key, n in r.p2p_issued.items():
            direction, peer, *_ = key.split(":")
            if direction == "send":
                sent[int(peer)] += n
        if not r.step or not all(abs(peer - q) == 1 for peer in sent):
            return None
        each += [n / r.step for peer, n in sent.items() if peer == q + 1]
    return round(min(each)) if len(each) == s.world_size - 1 and max(each) < min(each) + 0.5 else None


def _first_message(r: RankState) -> str:
    """Return whether a rank sends or receives first in a step; empty if no step begins in the calls that are known."""
    known_s = next((c.entered_s for c in r.calls if c.entered_s is not None), math.inf)
    begun_s = next((x.end_s for x in r.steps if x.end_s >= known_s), math.inf)
    after = (c.op for c in r.calls if c.peer is not None and (c.entered_s or 0.0) >= begun_s)
    return next((way for op in after for way in ("send", "recv") if way in op), "")


def _pipeline(s: Snapshot) -> bool:
    """True if one rank alone begins each step by sending: the first stage. Ranks that exchange with each other all do, or every other one."""
    first = [_first_message(r) for r in s.ranks.values()]
    return first.count("send") == 1 if all(first) else _micro_batches(s) is not None


def _few(s: Snapshot) -> str:
    """Return how much of a pipeline's step its few micro-batches leave idle; nothing if they are many, or their number is not known."""
    n, stages_ = _micro_batches(s), s.world_size
    enough = limits.micro_batches * stages_
    if not n or n >= enough:
        return ""
    idle, then = (percent((stages_ - 1) / (m + stages_ - 1)) for m in (n, enough))
    return (
        f": each stage sends the next one {counted(n, 'message')} per step, so a step has {'one micro-batch' if n == 1 else f'at most {n} of them'}, "
        f"with which each of {stages_} stages is idle for {idle} of it; {enough} make that {then}"
    )


def _shared_waits(s: Snapshot) -> float:
    """Return the share of time that every host waits in collectives of all ranks, without an optimizer."""
    recent = [a for a in s.arrivals if s.whole(a.group)]
    if len(recent) < STEPS.least or s.world_size < 2:
        return 0.0
    span_ms = (recent[-1].t_s - recent[0].t_s) * 1e3
    return min(sum(a.shared_ms for a in recent[:-1]) / span_ms, 1.0) if span_ms > limits.least_span_ms else 0.0


def _together(window: Window) -> float:
    """Return the share of step time in which all ranks wait: the last to arrive does so for no other rank."""
    columns = list(zip(*window.steps.values(), strict=True))
    total_ms = sum(max(x.step_ms for x in column) for column in columns)
    return sum(min(x.wait_ms for x in column) for column in columns) / total_ms if total_ms > 0 else 0.0


def _late(window: Window, in_turn: float) -> str:
    """Return whether a rank works longest in most steps, which may be its host's load, or what more each waits for another; else nothing.

    Args:
        in_turn: Share of step time that each rank waits beyond what all wait together.
    """
    most = comparison.persistent(window, 1.0, 0.0, several=False)
    n, often = len(window.columns), len(most.indices)
    if often >= straggling.recurrence * n:
        return f"; {rank_list(most.ranks)} works longest in {often} of {n} steps"
    if in_turn >= straggling.shares[0][1]:
        return f"; {percent(in_turn)} more for whichever rank is late"
    return ", with no rank late" if 2 * often <= n else ""


def _finding(
    s: Snapshot, ranks: list[int], share: float, of: str, ddp: Gradients | None, late: str, parts: Sequence[Part]
) -> Finding | Abstained:
    gradients_ = ddp.share if ddp is not None else 0.0
    share = max(share, gradients_)  # both are lower limits
    part = max(parts, key=lambda x: x.share, default=None)
    busy = (s.host_cpu_pct or 0.0) > STEPS.busy_host_pct
    known, certain = False, False  # something is large, or frequent; what that takes is known
    text, do = "", f"{PROBE}; communicate less often, or in larger messages"
    if part is not None and part.share >= max(share / 2, gradients_):
        share = max(share, part.share)
        known, text, do = True, f"; {part.text}", f"{part.advice}; {PROBE}"
        certain = part.many and not busy and part.share >= limits.share
    elif ddp is not None and ddp.share >= share / 2:  # the gradients are most of it
        b = ddp.buckets
        known = b.bytes >= limits.small_bucket_bytes or _passes(s) > 1
        text = f"; DDP's gradients, {size_text(b.bytes)} in {counted(b.buckets, 'bucket')}, take {percent(ddp.share)}"
        if 2 * b.largest_bytes >= b.bytes > 0:
            text += f" ({percent(b.largest_bytes / b.bytes)} of the bytes are {b.largest})"
        on_nccl = all(any(word in g.backend for word in BF16_BACKENDS) for g in s.groups.values())
        do = "; ".join(_advice(ddp, b, on_nccl, _passes(s)))
    if busy and not known and not stages(s):  # a rank that waits for a CPU makes all others wait in their collectives
        return Abstained("the host's cores are all in use: what is lost to communication is not known", undecided=True)
    cores = "; the host's cores are all in use: part of that is waiting for a CPU" if busy else ""
    if ddp is None and stages(s):
        bubble, do = (BUBBLE, DO_PIPELINE + _few(s)) if _pipeline(s) else ("", DO_EXCHANGE)
        return STAGES(victims=ranks, share=share, of=of, cores=cores, late=late, bubble=bubble, do=do)
    return COMM_BOUND(
        victims=ranks, share=share, of=of, gradients=text, cores=cores, do=do, late=late,
        severity=Severity.WARNING if certain else None,
    )  # fmt: skip


def _passes(s: Snapshot) -> int:
    """Return how many backward passes of each step exchange gradients, if that are as many on all ranks."""
    each = {m.synced_backwards // r.step for r in s.ranks.values() for m in r.models if r.step and m.synced_backwards}
    return each.pop() if len(each) == 1 else 1


def _advice(ddp: Gradients, b: Buckets, on_nccl: bool, passes: int) -> Iterator[str]:
    """Yield what reduces the exposed time of gradients, with the gain.

    A gain is at most what is exposed: communication that overlaps with the computation of gradients costs no
    time. For most changes there is only this upper limit: how much of the rest will overlap is not known
    before it is tried.
    """
    low, high = ddp.interval or (0.0, 0.0)
    interval = f" (95 % interval {percent(low / 2).removesuffix(' %')} to {percent(high / 2)})" if ddp.interval else ""
    if passes > 1:
        saved = percent(ddp.share * (passes - 1) / passes)
        yield f"each of the {passes} backward passes of a step exchanges gradients: make all but the last under `no_sync()`: about {saved} less time"
    if b.embedding and 2 * b.largest_bytes >= b.bytes > 0:
        rows = f"the gradient of {b.largest} is dense, though a step reads few of its rows: "
        yield rows + (SHARDED if on_nccl else SPARSE)
    if passes == 1:
        saved = f"about {percent(ddp.share / 2)} less time per batch{interval}"
        yield f"accumulate gradients over 2 batches, the first under `no_sync()`: {saved}"
    if b.comm_hook is None and "float" in b.dtypes.replace("bfloat16", "").split(", "):
        hook = "bf16_compress_hook" if on_nccl else "fp16_compress_hook"  # torch refuses bf16 on other backends
        saved = percent(min(ddp.share, ddp.comm_share / 2))
        yield f"`register_comm_hook(None, {hook})` halves the bytes: at most {saved} less time"
    if b.buckets == 1 and b.bytes >= PARTS * limits.small_bucket_bytes and 2 * b.last_bytes <= b.bytes:
        # the last one is always exposed, and no bucket splits a parameter
        split = percent(min(ddp.share, ddp.comm_share * (1 - b.last_bytes / b.bytes)))
        yield f"all gradients are one bucket, so nothing overlaps: set `bucket_cap_mb` below {b.bytes >> 20}" + (
            f"; {PARTS} buckets save at most {split}" if b.last_bytes else ""
        )
    elif b.buckets > 2 and b.bytes / b.buckets < limits.small_bucket_bytes:  # DDP makes the first of two small
        yield f"buckets of {size_text(b.bytes // b.buckets)} are small: raise `bucket_cap_mb`"
    if not b.gradient_as_bucket_view:
        yield "`gradient_as_bucket_view=True` saves a copy of the gradients"
    yield PROBE
