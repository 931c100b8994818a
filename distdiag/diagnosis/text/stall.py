"""Wording of stalls: what a rank that others wait for does, and what to do about it."""

from __future__ import annotations

from distdiag.terms.activity import ACTIVITIES

DOES = {a.word: a.does for a in ACTIVITIES if a.does}
DO = {a.word: a.do for a in ACTIVITIES if a.do}
DEFAULT_ADVICE = "check that line; `distdiag dump` saves all stacks; this is cleared if the rank continues"
NOBODY = (
    "`distdiag dump` saves the stacks of all threads: look for a lock or a native call that two of them need, threads that communicate "
    "at once, or a device that hangs"
)
