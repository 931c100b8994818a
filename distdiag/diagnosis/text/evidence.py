"""Joins the evidence of a verdict: the reason that is shown is the reason that decided, with what explains it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from distdiag.diagnosis.culprit.case import Reason, Testimony
from distdiag.diagnosis.culprit.paths import Condition, Way
from distdiag.diagnosis.culprit.verdict import Verdict
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call, Site
from distdiag.diagnosis.text.conditions import diverge_text
from distdiag.diagnosis.text.incident import calls_of
from distdiag.diagnosis.text.phrases import op_at, places_text, site_text
from distdiag.diagnosis.text.template import filled
from distdiag.diagnosis.waits.incidents import Root

# They state why, or at which condition in the source: no other adds anything.
_COMPLETE = (
    Reason.EXHAUSTED, Reason.JOIN, Reason.HANDLER, Reason.EXCEPTION, Reason.LOOP, Reason.EXTRA, Reason.SKIPPED, Reason.UNUSED, Reason.ORDER,
    Reason.CONDITION, Reason.PARTING,
)  # fmt: skip
_DO_EXIT = (
    "make no collective in `__exit__` if an exception passes (exc_type is not None); and let all ranks skip such a round together (all_reduce a flag "
    "first), or let the error end {culprits}"
)
_DID = {
    Way.ALONE: "only {culprits} made {call}",
    Way.AGAIN: "{culprits} made {call} once more",
    Way.SKIPPED: "{culprits} skipped {call}",
    Way.MORE: "{culprits} {culprits:makes|make} one more pass of the loop, in {call}",
    Way.LEFT: "{culprits} left the loop before {call}",
    Way.STAYED: "{culprits} {culprits:is|are} still in the loop, in {call}",
    Way.ROUND: "{culprits} ended a round of the loop around {call} early",
}


def head_text(verdict: Verdict) -> str:
    """Return `rank 1 skipped all_reduce (a.py:15): `if n > 0` (line 31); `: what the culprits did, and why.

    It begins the message, because a narrow screen shows no more. Empty if no testimony has it.
    """
    if not verdict.culprits:
        return ""
    found = next((t for t in _shown(verdict) if t.head or t.conditions), None)
    if found is None:
        return ""
    head, file = (found.head, "") if found.head else _head(verdict, found.conditions)
    places = {c: f"line {c.line}" if c.file == file else site_text(c.site) for c in found.conditions}
    conditions = " or ".join(f"`{condition.text}` ({place})" for condition, place in places.items())
    by = ", past " if found.conditions and all(condition.past for condition in found.conditions) else ": "
    return f"{head}{by}{conditions}; " if head and conditions else f"{head}; " if head else ""


def reason_text(verdict: Verdict) -> str:
    """Return the end of a sentence: what decided, and what explains it; without what `head_text` has."""
    shown, head, exits = _shown(verdict), head_text(verdict), _exit(verdict)
    text = "".join(t.text + ("" if head else diverge_text(t.conditions)) for t in shown)
    if exits is None:
        return text
    where = places_text(Site(exits.file, exits.line).key)
    return f"{text}; {rank_list(verdict.culprits[:1])} is in `{exits.function}` ({where}), which also runs while an exception passes"


def advice(verdict: Verdict) -> str:
    """Return what the evidence advises; empty if nothing does. The source is more exact than the rhythm or the order of calls, an error more than both."""
    advised = [testimony for testimony in verdict.evidence if testimony.advice]
    order = {Reason.SWALLOWED: 0, Reason.RHYTHM: 2, Reason.DIVERGENCE: 2}
    first = min(advised, key=lambda testimony: order.get(testimony.name, 1)).advice if advised else ""
    return filled(_DO_EXIT, culprits=verdict.culprits) if first and _exit(verdict) else first


def _exit(verdict: Verdict) -> Site | None:
    """Return the `__exit__` in which a culprit is at its call, if an exception that it caught is what led it there."""
    caught = any(c.text.startswith("except") for t in _shown(verdict) for c in t.conditions)
    state = verdict.case.states.get(verdict.culprits[0]) if caught and verdict.culprits else None
    stack = state.user_stack if state is not None else ()
    return next((site for site in stack if site.function in ("__exit__", "__aexit__")), None)


def _shown(verdict: Verdict) -> Sequence[Testimony]:
    worded = [testimony for testimony in verdict.evidence if testimony.text or testimony.head or testimony.conditions]
    swallowed = [testimony for testimony in worded if testimony.name is Reason.SWALLOWED]
    worded = [testimony for testimony in worded if testimony not in swallowed]
    complete = [testimony for testimony in worded if testimony.name in _COMPLETE]
    shown = worded[:1] if worded[:1] == complete[:1] else [*worded[:1], *complete[:1]]
    return [*shown, *swallowed]


def _head(verdict: Verdict, conditions: Iterable[Condition]) -> tuple[str, str]:
    """Return (what the culprits did, the file of the call that it names); empty if that is not one thing."""
    way, *others = {condition.way for condition in conditions}
    gone = verdict.incident.root is Root.GONE
    call = _own(verdict) if way in (Way.ALONE, Way.AGAIN, Way.STAYED, Way.MORE) and not gone else verdict.call
    if others or call is None or call.site is None:
        return "", ""
    if call.p2p and way in (Way.SKIPPED, Way.LEFT):  # its own half of the message
        half = "send to" if verdict.wait.key[2] == "recv" else "recv from"
        half = f"its {half} {rank_list(verdict.wait.ranks)}"
        return filled(_DID[Way.SKIPPED], culprits=verdict.culprits, call=half), ""
    text = "{culprits} ended before {call}" if gone else _DID[way]
    return filled(text, culprits=verdict.culprits, call=op_at(call)), call.site.file


def _own(verdict: Verdict) -> Call | None:
    calls = verdict.wait.calls if verdict.incident.root is not Root.CYCLE else {}
    rank = verdict.culprits[0]
    return calls.get(rank) or next((c for r, (_, c) in calls_of(verdict.waits).items() if r == rank), None)
