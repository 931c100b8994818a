"""Makes the finding of one incident of the wait-for graph; `conflict`, `cycle` and `gone` have the text of each kind."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.diagnosis.culprit.verdict import Verdict
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.kinds import Kind
from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.diagnosis.text import abort, conflict, cycle, evidence, gone
from distdiag.diagnosis.text.incident import calls_of, collective_ref, host_text, where_of_ranks
from distdiag.diagnosis.text.phrases import NO_PROGRESS
from distdiag.diagnosis.text.template import Template
from distdiag.diagnosis.waits.incidents import Root


def incident_findings(facts: Facts, kind: Kind) -> Iterator[Finding]:
    """Yield the findings of this kind that the wait-for graph proves."""
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
            cost = NO_PROGRESS if not verdict.wait.died else "the backend aborts the job"
        case Root.CYCLE:
            for rank in incident.victims:
                state = snapshot.ranks[rank]
                if rank not in calls and state.blocked is not None:
                    calls[rank] = (incident.waits[0], state.blocked)
            message, advice = cycle.message(snapshot, verdict), cycle.advice(snapshot, verdict, calls)
            proved = proved and snapshot.source != "dumps"
        case Root.GONE:
            message, advice = gone.message(snapshot, verdict), gone.advice(verdict)
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
