"""mismatch: the ranks' calls in one collective differ in operation, shape, dtype, root or group; or the wrapped models do.

Proved by the wait-for graph while the ranks wait, by how the backend aborted them, or by a collective that completed
although the calls differ: then the job continues with wrong values.
"""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.diagnosis import kinds
from distdiag.diagnosis.comparison import minority
from distdiag.diagnosis.endings import SPLITS, Cascade, End, call_of_thread, model_shapes
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, CollectiveRef, Finding, rank_list
from distdiag.diagnosis.model.snapshot import CompletedConflict, Life, Snapshot
from distdiag.diagnosis.text.conflict import THREADS_ADVICE
from distdiag.diagnosis.text.incident import group_label
from distdiag.diagnosis.text.incident_finding import incident_findings
from distdiag.diagnosis.text.phrases import at, wheres
from distdiag.diagnosis.text.template import Template
from distdiag.diagnosis.waits.compatible import elements, op_name
from distdiag.diagnosis.waits.wait import last_wait
from distdiag.terms.ranks import by_value
from distdiag.terms.units import counted

kind = kinds.MISMATCH
limits = None  # calls differ or they do not; `culprit.verdict.SETTLED_S`: how long the vote waits for ranks


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    """Yield the mismatches of ranks that wait, that were aborted, and of collectives that completed."""
    match facts.cascade.end:
        case End.MODEL:
            yield _model(facts.snapshot, facts.cascade)
        case End.ABORTED:
            if facts.cascade.incident is None:
                yield _two_threads(facts.snapshot, facts.cascade)
        case End.LOST if SPLITS.search(facts.snapshot.ranks[facts.cascade.ranks[0]].exception or ""):
            yield _own_splits(facts.snapshot, facts.cascade)
    yield from incident_findings(facts, kind)
    yield from completed(facts.snapshot)


def completed(s: Snapshot) -> list[Finding]:
    """Return one finding per cause for collectives that completed although the ranks' calls differ: its first occurrence."""
    seen: dict[str, CompletedConflict] = {}
    for conflict in s.completed_conflicts:
        seen.setdefault(conflict.cause, conflict)
    return [_completed(s, conflict) for conflict in seen.values() if all(q in s.ranks for q in conflict.calls)]


# -- wording ----------------------------------------------------------------------------------------------------------

COMPLETED = Template(kind, "dtype",
    "{op} #{seq:,} ({group}) completed, but the ranks called it with different arguments: {each}",
    "the result is wrong, without an error",
    "make size, dtype, root and operation the same on every rank before the call", proved=True)  # fmt: skip
TWO_THREADS = Template(kind, "shape",
    "another thread of {culprits} is in {op}{site} while the main thread uses the same group{main}: the calls of "
    "two threads mix, and gloo aborted {killed}", "the job ended",
    THREADS_ADVICE)  # fmt: skip
OWN_SPLITS = Template(kind, "shape",
    "{culprits} called {op}{site} with split sizes that do not fit: what {culprits:it|each} sends to itself is "
    "not what it expects from itself{sizes}", "the job ended",
    "exchange the input splits with an all_to_all before every call{site}, and keep none from an earlier step: equal sums are "
    "not enough, every entry of input_split_sizes and output_split_sizes must fit", proved=True)  # fmt: skip
MODEL = Template(kind, "model", "the wrapped module differs between ranks: {each}", "DDP refuses to start",
    "build the same module, in the same order, on every rank; compare the ranks' configurations",
    proved=True)  # fmt: skip


def _completed(s: Snapshot, conflict: CompletedConflict) -> Finding:
    calls, cause = conflict.calls, conflict.cause
    words = {
        "dtype": lambda c: c.dtype or "?",
        "root": lambda c: f"root {c.root}",
        "shape": lambda c: f"{elements(c):,} elements",
    }
    what = {q: words.get(cause, lambda c: c.op)(c) for q, c in sorted(calls.items())}
    odd = minority(what)
    rest = [q for q in what if q not in odd]
    sides = sorted(by_value(what).items(), key=lambda side: side[1][0] not in odd)
    call, sites = next(iter(calls.values())), {q: c.site for q, c in calls.items()}
    return COMPLETED(
        cause=cause, culprits=odd, victims=rest,
        collective=CollectiveRef(op_name(call.op), group_label(s, conflict.group), conflict.seq, call.bytes),
        where=wheres(s, odd or rest, "user_code", sites),
        waiting=wheres(s, rest, "user_code", sites) if odd else (), first_seen_s=call.entered_s, completed=True,
        op=op_name(call.op), seq=conflict.seq, group=group_label(s, conflict.group),
        each="; ".join(f"{rank_list(side)}: {what}{at(sites[side[0]])}" for what, side in sides),
    )  # fmt: skip


def _two_threads(s: Snapshot, cascade: Cascade) -> Finding:
    """Return the finding of ranks that gloo aborted because two of their threads use one group."""
    threads = {q: call for q in cascade.ranks if (call := call_of_thread(s.ranks[q])) is not None}
    first, call = next((s.ranks[q], call) for q, call in threads.items())
    return TWO_THREADS(
        culprits=threads, victims=cascade.others,
        where=wheres(s, threads, "killed", {q: c.site for q, c in threads.items()}),
        waiting=wheres(s, cascade.others), step=first.step,
        first_seen_s=min((t for q in threads if (t := s.ranks[q].ended_s) is not None), default=s.t_s),
        op=op_name(call.op), site=call.site, main=first.current_site,
        killed=sorted(q for q in (*threads, *cascade.others) if s.ranks[q].life == Life.KILLED),
    )  # fmt: skip


def _own_splits(s: Snapshot, cascade: Cascade) -> Finding:
    """Return the finding of ranks whose own two lists of split sizes gloo refused: it compares the rank's part in both."""
    first = s.ranks[cascade.ranks[0]]
    call = last_wait(first)
    sent, received = (elements(call), call.received) if call is not None else (None, None)
    sizes = f"; rank {first.rank} sends {sent:,} and expects {received:,} elements in all" if sent and received else ""
    return OWN_SPLITS(
        culprits=sorted(cascade.ranks), victims=cascade.others, where=wheres(s, sorted(cascade.ranks), "crashed"),
        step=first.step, first_seen_s=first.ended_s, op=op_name(call.op) if call is not None and call.op else "all_to_all",
        site=first.current_site, sizes=sizes,
    )  # fmt: skip


def _model(s: Snapshot, cascade: Cascade) -> Finding:
    sides, odd = by_value(model_shapes(s)).values(), cascade.ranks
    models = {q: s.ranks[q].models[-1] for side in sides for q in side}
    sizes = {q: f"{counted(m.parameters, 'parameter')} of {counted(m.elements, 'element')}" for q, m in models.items()}
    each = "; ".join(f"{rank_list(side)}: {sizes[side[0]]}" for side in sides)
    sites = {q: m.site for q, m in models.items()}
    named = {m.parameter_order >> 32 for m in models.values()}  # one, if all have the same parameters
    how = "different orders" if len(named) == 1 and any(named) else "different shapes"
    return MODEL(
        culprits=odd, victims=cascade.others,
        where=wheres(s, (q for q in models if q in odd or not odd), "crashed", sites),
        waiting=wheres(s, (q for q in models if odd and q not in odd), "crashed", sites),
        first_seen_s=min((t for q in models if (t := s.ranks[q].ended_s) is not None), default=s.t_s),
        each=each + (f", in {how}" if len(set(sizes.values())) == 1 else ""),
    )  # fmt: skip
