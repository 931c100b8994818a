"""Makes the finding of one incident of the wait-for graph; `conflict`, `cycle` and `gone` have the text of each kind."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.diagnosis.culprit.verdict import Verdict
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.kinds import Kind
from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.diagnosis.text import abort, conflict, cycle, gone
from distdiag.diagnosis.text.incident import calls_of, collective_ref, host_text, newest_step, where_of_ranks
from distdiag.diagnosis.text.phrases import NO_PROGRESS
from distdiag.diagnosis.text.template import Template
from distdiag.diagnosis.waits.incidents import Root


def incident_findings(facts: Facts, kind: Kind) -> Iterator[Finding]:
    """Yield the findings of this kind that the wait-for graph proves."""
    for verdict in facts.verdicts:
        if verdict.kind is kind:
            yield incident_finding(facts.snapshot, verdict)


def incident_finding(snapshot: Snapshot, verdict: Verdict) -> Finding:
    """Return the finding of a judged incident."""
    incident, culprits, victims = verdict.incident, verdict.culprits, verdict.victims
    if incident.root is Root.ABORT:
        return abort.finding(snapshot, verdict)
    calls = calls_of(verdict.waits)
    members = incident.members
    proved, cost = True, NO_PROGRESS
    match incident.root:
        case Root.CONFLICT:
            step = newest_step(snapshot, members)
            message, advice = conflict.message(snapshot, verdict), conflict.advice(verdict)
            cost = NO_PROGRESS if not verdict.wait.died else "the backend aborts the job"
        case Root.CYCLE:
            step = newest_step(snapshot, members)
            for rank in incident.victims:
                state = snapshot.ranks[rank]
                if rank not in calls and state.blocked is not None:
                    calls[rank] = (incident.waits[0], state.blocked)
            message, advice = cycle.message(snapshot, verdict), cycle.advice(snapshot, verdict, calls)
            proved = snapshot.source != "dumps"
        case Root.GONE:
            step = newest_step(snapshot, [*culprits, *incident.victims])
            message, advice = gone.message(snapshot, verdict), gone.advice(verdict)
            members = frozenset(culprits)
    outside = incident.victims - members
    return Template(verdict.kind, verdict.cause, "{text}{hosts}", cost, "{do}", proved)(
        culprits=culprits, victims=victims, collective=collective_ref(snapshot, verdict.wait, verdict.call),
        where=where_of_ranks(snapshot, culprits or members, calls),
        waiting=where_of_ranks(snapshot, victims if culprits else outside, calls), step=step,
        first_seen_s=None if snapshot.source == "dumps" else _complete_since(snapshot, (*culprits, *victims)),
        text=message, hosts=host_text(snapshot, (*culprits, *victims)), do=advice,
    )  # fmt: skip


def _complete_since(snapshot: Snapshot, members: tuple[int, ...]) -> float | None:
    """Return when the last member entered its wait: the incident has existed since then."""
    blocked = (snapshot.ranks[q].blocked for q in members if q in snapshot.ranks)
    return max((b.entered_s for b in blocked if b is not None and b.entered_s is not None), default=None)
