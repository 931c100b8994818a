"""Joins the evidence of a verdict: the reason that is shown is the reason that decided, with what explains it."""

from __future__ import annotations

from distdiag.diagnosis.culprit.case import Reason
from distdiag.diagnosis.culprit.verdict import Verdict

# They state why, or at which condition in the source: no other adds anything.
_COMPLETE = (
    Reason.EXHAUSTED, Reason.EXCEPTION, Reason.LOOP, Reason.EXTRA, Reason.SKIPPED, Reason.ORDER,
    Reason.CONDITION, Reason.PARTING,
)  # fmt: skip


def reason_text(verdict: Verdict) -> str:
    """Return the end of a sentence: what decided, and what explains it."""
    worded = [testimony for testimony in verdict.evidence if testimony.text]
    complete = [testimony for testimony in worded if testimony.name in _COMPLETE]
    shown = worded[:1] if worded[:1] == complete[:1] else [*worded[:1], *complete[:1]]
    return "".join(testimony.text for testimony in shown)


def advice(verdict: Verdict) -> str:
    """Return what the evidence advises; empty if nothing does. The source is more exact than the rhythm of calls."""
    advised = [testimony for testimony in verdict.evidence if testimony.advice]
    return min(advised, key=lambda testimony: testimony.name is Reason.RHYTHM).advice if advised else ""
