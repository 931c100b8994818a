"""mismatch: the ranks' calls in one collective differ in operation, shape, dtype, root or group; or the wrapped models do.

Proved by the wait-for graph while the ranks wait, by how the backend aborted them, or by a collective that completed
although the calls differ: then the job continues with wrong values.

Faulty jobs: grad_reduce, asr_preds, lesion_metrics, best_worker, active_sites, vocab_build, tagger_heads, gan_scores,
charlm_clip, box_matching, token_budget, moe_capacity, patent_claims. Healthy look-alikes: padded_gather, cyclegan_fine,
empty_records, token_nosync, moe_popular, patent_halves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from distdiag.diagnosis import kinds
from distdiag.diagnosis.endings import Cascade, End, call_of_thread, model_shapes
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Certainty, CollectiveRef, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import Call, CompletedConflict, Life, Snapshot
from distdiag.diagnosis.text.incident_finding import incident_findings
from distdiag.diagnosis.text.phrases import at, count, site_text, where
from distdiag.diagnosis.waits.compatible import op_name

kind = kinds.MISMATCH


@dataclass(frozen=True)
class Limits:
    """None: calls differ or they do not. `culprit.verdict.SETTLED_S`: how long the vote waits for ranks that have not arrived."""


limits = Limits()


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    """Yield the mismatches of ranks that wait, that were aborted, and of collectives that completed."""
    match facts.cascade.end:
        case End.MODEL:
            yield _model(facts.snapshot, facts.cascade)
        case End.ABORTED:
            if facts.cascade.incident is None:
                yield _two_threads(facts.snapshot, facts.cascade)
    yield from (f for f in facts.repeated if f.kind == kind.name)
    yield from incident_findings(facts, kind)
    yield from completed(facts.snapshot)


def completed(s: Snapshot) -> list[Finding]:
    """Return one finding per cause for collectives that completed although the ranks' calls differ: its first occurrence."""
    seen: dict[str, CompletedConflict] = {}
    for conflict in s.completed_conflicts:
        seen.setdefault(conflict.cause, conflict)
    return [_completed(s, conflict) for conflict in seen.values() if all(q in s.ranks for q in conflict.calls)]


# -- wording ----------------------------------------------------------------------------------------------------------


def _completed(s: Snapshot, conflict: CompletedConflict) -> Finding:
    sides: dict[str, list[int]] = {}
    for q, call in sorted(conflict.calls.items()):
        sides.setdefault(_what(call, conflict.cause), []).append(q)
    most = max(map(len, sides.values()))
    odd = tuple(sorted(q for side in sides.values() if len(side) < most for q in side))
    call = next(iter(conflict.calls.values()))
    text = "; ".join(f"{rank_list(side)}: {what}{at(conflict.calls[side[0]].site)}" for what, side in sides.items())
    rest = tuple(q for q in sorted(conflict.calls) if q not in odd)
    return Finding(
        kind=kind.name,
        cause=conflict.cause,
        certainty=Certainty.PROVED,
        severity=Severity.ERROR,
        culprits=odd,
        victims=rest,
        collective=CollectiveRef(call.op, conflict.group, conflict.seq, call.bytes),
        where=tuple(where(s.ranks[q], "user_code", conflict.calls[q].site) for q in odd or rest),
        waiting=tuple(where(s.ranks[q], "user_code", conflict.calls[q].site) for q in rest) if odd else (),
        first_seen_s=call.entered_s,
        message=f"{call.op} #{conflict.seq} ({conflict.group}) completed, but the ranks called it with different arguments: {text}",
        cost="the result is wrong on every rank, without an error",
        advice="make dtype, root and operation the same on every rank before the call",
        collective_completed=True,
    )


def _what(call: Call, cause: str) -> str:
    if cause == "dtype":
        return call.dtype or "?"
    return f"root {call.root}" if cause == "root" else call.op


def _two_threads(s: Snapshot, cascade: Cascade) -> Finding:
    """Return the finding of ranks that gloo aborted because two of their threads use one group."""
    threads = {q: call for q in cascade.ranks if (call := call_of_thread(s.ranks[q])) is not None}
    ranks = tuple(threads)
    first = threads[ranks[0]]
    killed = sorted(q for q in (*ranks, *cascade.others) if s.ranks[q].life == Life.KILLED)
    return Finding(
        kind=kind.name,
        cause="shape",
        certainty=Certainty.SUSPECTED,
        severity=Severity.ERROR,
        culprits=ranks,
        victims=cascade.others,
        where=tuple(where(s.ranks[q], "killed", call.site) for q, call in threads.items()),
        waiting=tuple(where(s.ranks[q]) for q in cascade.others),
        step=s.ranks[ranks[0]].step,
        first_seen_s=min((t for q in ranks if (t := s.ranks[q].ended_s) is not None), default=s.t_s),
        message=f"another thread of {rank_list(ranks)} is in {op_name(first.op)}{at(first.site)} while the main thread uses the same "
        f"group at {site_text(s.ranks[ranks[0]].current_site)}: the calls of two threads mix, and gloo aborted {rank_list(killed)}",
        cost="the job ended",
        advice="let the main thread make that call, or give the thread its own process group (`dist.new_group()`), and make the same "
        "calls in a thread on every rank",
    )


def _model(s: Snapshot, cascade: Cascade) -> Finding:
    shapes = model_shapes(s)
    ranks = [s.ranks[q] for side in shapes for q in side]
    odd = cascade.ranks
    sizes = {
        r.rank: f"{count(r.models[-1].parameters, 'parameter')} of {count(r.models[-1].elements, 'element')}"
        for r in ranks
    }
    groups = "; ".join(f"{rank_list(side)}: {sizes[side[0]]}" for side in shapes)
    if len(set(sizes.values())) == 1:
        groups += ", in different shapes"
    places = tuple(where(r, "crashed", r.models[-1].site) for r in ranks)
    return Finding(
        kind=kind.name,
        cause="model",
        certainty=Certainty.PROVED,
        severity=Severity.ERROR,
        culprits=odd,
        victims=cascade.others,
        where=tuple(w for w in places if w.rank in odd or not odd),
        waiting=tuple(w for w in places if odd and w.rank not in odd),
        first_seen_s=min((r.ended_s for r in ranks if r.ended_s is not None), default=s.t_s),
        message=f"the wrapped module differs between ranks: {groups}",
        cost="DDP refuses to start",
        advice="build the same module, in the same order, on every rank; compare the ranks' configurations",
    )
