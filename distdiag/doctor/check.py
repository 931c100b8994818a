"""A check of the doctor: a fact about the machine, a verdict, and the remedy."""

from __future__ import annotations

from enum import StrEnum

import msgspec

SCHEMA = "distdiag.doctor/1"


class Verdict(StrEnum):
    PASS = "pass"
    WARN = "warn"  # works, with a cost or a limit that is named
    FAIL = "fail"  # distributed jobs, or recording them, will not work
    SKIP = "skip"  # not on this machine, or could not be checked


_ORDER = (Verdict.SKIP, Verdict.PASS, Verdict.WARN, Verdict.FAIL)


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """What was checked (`name`), what was found, and what to do unless it passed."""

    name: str
    verdict: Verdict
    found: str
    remedy: str | None = None


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `distdiag doctor --json`."""

    schema: str = SCHEMA
    verdict: Verdict
    checks: tuple[Check, ...]


def examination(checks: list[Check]) -> Examination:
    """Return all checks with the worst of their verdicts."""
    return Examination(verdict=max((c.verdict for c in checks), key=_ORDER.index), checks=tuple(checks))


def passed(name: str, found: str) -> Check:
    return Check(name=name, verdict=Verdict.PASS, found=found)


def warned(name: str, found: str, remedy: str) -> Check:
    return Check(name=name, verdict=Verdict.WARN, found=found, remedy=remedy)


def failed(name: str, found: str, remedy: str) -> Check:
    return Check(name=name, verdict=Verdict.FAIL, found=found, remedy=remedy)


def skipped(name: str, found: str) -> Check:
    return Check(name=name, verdict=Verdict.SKIP, found=found)
