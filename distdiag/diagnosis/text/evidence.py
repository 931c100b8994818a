"""Joins the evidence of a verdict: the reason that is shown is the reason that decided, with what explains it."""

from __future__ import annotations

from distdiag.diagnosis.culprit.case import Reason
from distdiag.diagnosis.culprit.verdict import Verdict

# They state why: a condition in the source adds nothing.
_COMPLETE = (Reason.EXHAUSTED, Reason.EXCEPTION, Reason.LOOP, Reason.EXTRA, Reason.SKIPPED, Reason.ORDER)
_PLACES = (Reason.CONDITION, Reason.PARTING)


def reason_text(verdict: Verdict) -> str:
    """Return the end of a sentence: what decided, and what explains it."""
    worded = [testimony for testimony in verdict.evidence if testimony.text]
    if not worded:
        return ""
    first, *rest = worded
    if first.name in (*_COMPLETE, *_PLACES):
        return first.text
    more = next((testimony.text for testimony in rest if testimony.name in (*_COMPLETE, *_PLACES)), "")
    return first.text + more


def advice(verdict: Verdict) -> str:
    """Return what the evidence advises; empty if nothing does. The source is more exact than the rhythm of calls."""
    advised = [testimony for testimony in verdict.evidence if testimony.advice]
    advised.sort(key=lambda testimony: testimony.name is Reason.RHYTHM)
    return advised[0].advice if advised else ""
