"""Classify what a rank is doing, from its innermost frame and the text of its line."""

from __future__ import annotations

from distdiag.page.layout import Phase
from distdiag.terms import activity


def activity_of(raw_innermost: str, line: str, phase: Phase, idle: bool) -> str:
    """Return one of the words of `findings.Where.state`, for a living rank that does not wait in a collective.

    Args:
        raw_innermost: `module.function` of the innermost Python frame.
        line: Text of the user's line.
        phase: The phase word of the page.
        idle: True if the main thread sleeps and uses no CPU.
    """
    if phase == Phase.DATA:
        return "data"
    if (word := activity.by_frame(raw_innermost)) is not None:
        return word
    if phase == Phase.CHECKPOINT:
        return "checkpoint"
    return activity.by_line(line, idle) or "user_code"
