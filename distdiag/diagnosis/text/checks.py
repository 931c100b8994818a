"""Text about what was checked, what could not be checked, and why a kind was not found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from distdiag.diagnosis.model.findings import Check, Finding
from distdiag.terms.tables import WIDTH, wrapped
from distdiag.terms.units import counted


def checked_lines(checks: Sequence[Check], width: int = WIDTH) -> list[str]:
    """Return the kinds that were checked, and those that could not be, with the reason."""
    missing = [c for c in checks if not c.checked]
    partly = {c.kind for c in missing if c.cause is None}
    judged = [kind for kind in dict.fromkeys(c.kind for c in checks) if kind not in partly]
    by_reason: dict[str, list[str]] = {}
    for c in missing:
        if c.cause is None or c.kind not in partly:
            by_reason.setdefault(c.reason, []).append(_name(c))
    reasons = [f"{', '.join(names)} ({reason})" for reason, names in by_reason.items()]
    lines = [f"checked: {', '.join(judged)}"] if judged else []
    lines += [f"not checked: {'; '.join(reasons)}"] if reasons else []
    return [part for line in lines for part in wrapped(line, width)]


def why_lines(kind: str, checks: Iterable[Check], findings: Iterable[Finding]) -> list[str]:
    """Return what is known about one kind: how often it was found, and the newest reason of each check."""
    mine = [c for c in checks if c.kind == kind]
    found = [f for f in findings if f.kind == kind]
    cleared = sum(f.cleared_s is not None for f in found)
    head = f"found {counted(len(found), 'time')}" + (f", {cleared} cleared" if cleared else "")
    if not found:
        head = "not found" if any(c.checked for c in mine) else "not checked" if mine else "not evaluated in this run"
    reasons = [f"{_name(c)}: {'' if c.checked else 'not checked: '}{c.reason}" for c in mine if c.reason]
    return [f"{kind}: {head}", *(line for reason in reasons for line in wrapped(reason, head="  "))]


def _name(c: Check) -> str:
    return c.kind if c.cause is None else f"{c.kind}/{c.cause}"
