"""timeout: a collective ran into its group's timeout although the late rank was alive."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.diagnosis import kinds
from distdiag.diagnosis.endings import End, timed_out, unset_key
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Finding
from distdiag.diagnosis.text.conditions import kept_text
from distdiag.diagnosis.text.phrases import where, where_stack
from distdiag.diagnosis.text.stall import NOT_JOINED
from distdiag.diagnosis.text.template import Template
from distdiag.diagnosis.waits.wait import last_wait
from distdiag.terms.units import rough_duration

kind = kinds.TIMEOUT
limits = None  # the backend's own timeout is the limit
LATE = Template(kind, "late_rank",
    "{what} timed out on {victims}: {culprits} {culprits:was|were} alive and late{by}{site}",
    "the job ended", "{kept}do that work on all ranks, or {elsewhere}, or raise the group's timeout to cover it",
    proved=True)  # fmt: skip
UNSEEN = Template(kind, "late_rank",
    "{what} timed out on {victims}{at_call}: {culprits} {culprits:was never seen and|were never seen, and at least one of them} had not come to it{by}",
    "the job ended", NOT_JOINED.advice)  # fmt: skip


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    if facts.cascade.end is not End.TIMEOUT:
        return
    s = facts.snapshot
    late = [s.ranks[q] for q in facts.cascade.ranks if q in s.ranks]
    victims = timed_out(s, facts.ends)
    first, call = victims[0], last_wait(victims[0])
    since_s = call.entered_s if call is not None else None
    waited_s = (first.ended_s or s.t_s) - since_s if since_s is not None else 0.0
    yield (LATE if late else UNSEEN)(
        culprits=[r.rank for r in late] or facts.cascade.ranks, victims=[r.rank for r in victims], collective=call,
        where=(w for r in late for w in where_stack(r, r.user_stack, None, 3)), waiting=map(where, victims),
        step=first.step, first_seen_s=since_s, what=call or ("a wait for a key of a store" if unset_key(first) else "a collective"),
        kept=kept_text(late[0].user_stack, first.user_stack, facts.cascade.ranks, facts.source) if late else "",
        elsewhere="outside the step" if first.step else "before init_process_group, or in a job of its own",
        by=f" {'by more than' if late else 'for'} {rough_duration(waited_s)}" if waited_s else "", at_call=first.current_site,
    )  # fmt: skip
