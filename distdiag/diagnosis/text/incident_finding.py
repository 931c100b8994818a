"""Makes the finding of one incident of the wait-for graph.

`conflict` and `cycle` have the text of these; the text about ranks that ended or are stopped is here.
"""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.diagnosis.comparison import vetoed
from distdiag.diagnosis.culprit.case import Reason
from distdiag.diagnosis.culprit.verdict import Verdict
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.kinds import Kind
from distdiag.diagnosis.model.findings import Abstained, Finding
from distdiag.diagnosis.model.snapshot import Life, RankState, Snapshot
from distdiag.diagnosis.text import abort, conflict, cycle, evidence
from distdiag.diagnosis.text.incident import (
    calls_of,
    collective_ref,
    collective_text,
    host_text,
    implicit_text,
    where_of_ranks,
)
from distdiag.diagnosis.text.phrases import NO_PROGRESS
from distdiag.diagnosis.text.template import Template, filled
from distdiag.diagnosis.training_data import UNSEEN
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.incidents import Root

_HAS_CALLED = (
    "{culprits} waits in {what}{site} for ranks that have ended: it has made collective calls that they never made; "
)
_DO_GONE = {
    "rank_stopped": "resume it with `kill -CONT` on {culprits}'s process, or end the job",
    "rank_finished": "let all ranks leave the loop in the same step: {culprits} left it before the others (fewer batches, "
    "an early return or break, or an exit on some ranks only); reduce the condition over the ranks (all_reduce a flag), "
    "and leave where it holds on any",
    "missing_rank": "look for {op} (or a forward of the wrapped model) that only {culprits} runs",
    "rank_exited": "see the error of {culprits}, then restart the job: the others cannot continue without it",
}


def incident_findings(facts: Facts, kind: Kind) -> Iterator[Finding | Abstained]:
    """Yield the findings of this kind that the wait-for graph proves, or has proved."""
    yield from (f for f in facts.repeated if f.kind == kind.name)
    if (unseen := vetoed((UNSEEN,), facts.snapshot)) is not None:
        yield unseen
    for verdict in facts.verdicts:
        if verdict.kind is kind:
            yield incident_finding(facts.snapshot, verdict)


def incident_finding(snapshot: Snapshot, verdict: Verdict) -> Finding:
    incident, culprits, victims = verdict.incident, verdict.culprits, verdict.victims
    if incident.root is Root.ABORT:
        return abort.finding(snapshot, verdict)
    calls = calls_of(verdict.waits)
    members, proved, cost = incident.members, snapshot.source != "stacks", NO_PROGRESS
    match incident.root:
        case Root.CONFLICT:
            message, advice = conflict.message(snapshot, verdict), conflict.advice(verdict)
            calls = conflict.with_threads(verdict, calls)
            cost = NO_PROGRESS if not verdict.wait.died else "the backend aborts the job"
        case Root.CYCLE:
            for rank in incident.victims:
                state = snapshot.ranks[rank]
                if rank not in calls and state.blocked is not None:
                    calls[rank] = (incident.waits[0], state.blocked)
            message, advice = cycle.message(snapshot, verdict), cycle.advice(snapshot, verdict, calls)
            proved = proved and snapshot.source != "dumps"
        case Root.GONE:
            message, advice = _gone(snapshot, verdict), _gone_advice(verdict)
            members = frozenset(culprits)
    in_it = members | incident.victims if incident.root is Root.GONE else members
    stepping = (snapshot.ranks[q].step for q in in_it if q in snapshot.ranks)
    outside = incident.victims - members
    # it has existed since the last member entered its wait
    blocked = (snapshot.ranks[q].blocked for q in (*culprits, *victims) if q in snapshot.ranks)
    complete_s = max((b.entered_s for b in blocked if b is not None and b.entered_s is not None), default=None)
    return Template(verdict.kind, verdict.cause, "{head}{text}{hosts}", cost, "{do}", proved)(
        culprits=culprits, victims=victims, collective=collective_ref(snapshot, verdict.wait, verdict.call),
        where=where_of_ranks(snapshot, culprits or members, calls),
        waiting=where_of_ranks(snapshot, victims if culprits else outside, calls),
        step=max(stepping, default=0) or None,
        first_seen_s=None if snapshot.source == "dumps" else complete_s,
        head=evidence.head_text(verdict), text=message, hosts=host_text(snapshot, (*culprits, *victims)), do=advice,
    )  # fmt: skip


# -- ranks that wait for one that ended or is stopped -------------------------------------------------------------------


def _gone(snapshot: Snapshot, verdict: Verdict) -> str:
    """Return which rank ended, how, and which ranks wait for it where; if it ended normally, how it can have left the loop."""
    wait, call = verdict.wait, verdict.call
    what = collective_text(snapshot, wait, call)
    if call is not None and wait.ranks:
        what += implicit_text(snapshot.ranks.get(min(wait.ranks)), call)
    ended, stuck = sorted(verdict.incident.members), verdict.incident.victims
    text, left = "{ended} " + _ending([snapshot.ranks[q] for q in ended]), ""
    waiting = "; {stuck} {stuck:waits|wait} for {ended:it|them}"
    if verdict.reason is Reason.HISTORY:
        text = _HAS_CALLED + text
    else:
        if verdict.reason is Reason.EXHAUSTED:
            text = "{culprits} ran out of batches and {culprits:has|have} ended"
        text += waiting + " in {what}" if wait.p2p else " and {ended:has|have} not entered {what}" + waiting
        # how a rank left the loop that the others are in is only a question for one that ended normally
        if verdict.reason is Reason.NONE and verdict.cause == "rank_finished":
            left = evidence.reason_text(verdict)
    first, site = snapshot.ranks[ended[0]], call.site if call else None
    facts = {"signal": first.signal, "exception": first.exception, "code": first.exit_code, "what": what, "site": site}
    return filled(text, culprits=verdict.culprits, ended=ended, stuck=stuck, **facts) + left


def _ending(states: list[RankState]) -> str:
    """Return a template of how ranks ended, by the first."""
    first = states[0]
    match first.life:
        case Life.STOPPED:
            return "{ended:is|are} stopped (SIGSTOP)"
        case Life.KILLED:
            return "{ended:was|were} killed" + (" by signal {signal}" if first.signal else "")
        case Life.CRASHED:
            return "ended with an error" + (" ({exception})" if len(states) == 1 and first.exception else "")
    return "exited with code {code}" if first.exit_code else "ended normally"


def _gone_advice(verdict: Verdict) -> str:
    op = compatible.op_name(verdict.call.op) if verdict.call is not None else "the collective"
    return evidence.advice(verdict) or filled(_DO_GONE[verdict.cause], culprits=verdict.culprits, op=op)
