"""Templates of findings: a cause's sentences, and the only code that builds a finding from them.

A rule or reader has one template for each way in which a cause is worded, all of a kind in one
place. `{name}` is filled with a fact, by its type:

    {culprits} {victims} {other}   ranks: `rank 3`, `ranks 0–511`; both always known, as is {step}
    {victims:waits|wait}           the first word for one rank (or the number 1), else the second
    {victims:#}                    how many
    {site}                         ` at train.py:88 in step`, with the space before it; nothing if
                                   it is not known. Default: the first site of `where`
    {collective}                   `all_reduce #417 (default_pg)`
    {part:share} {n:size} {t:time} `22 %`, `4.0 KiB`, `40 s`
    {text} {ms:.0f}                as in Python; None is an empty text
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from string import Formatter
from typing import Any

from distdiag.diagnosis.kinds import Kind
from distdiag.diagnosis.model.findings import Certainty, CollectiveRef, Finding, Severity, Where, rank_list
from distdiag.diagnosis.model.snapshot import Call, Site
from distdiag.diagnosis.text.phrases import at, op_text, reference
from distdiag.terms.units import percent, rough_duration, size_text

_LINE = re.compile(r"[^\s(),;`]+:\d+")
_CALLERS = re.compile(r" \(called at [^()]+\)")
_UNITS = {"share": percent, "size": lambda n: size_text(int(n)), "time": rough_duration}


class _Words(Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        one, bar, many = format_spec.partition("|")
        if bar:
            return one if (value if isinstance(value, int) else len(value)) == 1 else many
        if format_spec == "#":
            return f"{len(value):,}"
        if format_spec in _UNITS:
            return _UNITS[format_spec](value)
        match value:
            case None:
                return ""
            case Where():
                return at(Site(value.file, value.line or 0, value.function or "")) if value.file else ""
            case Site():
                return at(value)
            case Call():
                return op_text(value)
            case tuple() | list() | set() | frozenset():
                return rank_list(value)
        return format(value, format_spec)


_WORDS = _Words()


def filled(template: str, **facts: object) -> str:
    """Return a template with its facts; the module's docstring has the fields. KeyError: a fact is missing."""
    return _WORDS.vformat(template, (), facts)


def callers_once(message: str) -> str:
    """Return a message that names the callers of a line once: without those of a call whose line and callers were named before."""
    for found in reversed(list(_CALLERS.finditer(message))):
        callers = [m.group() for m in _LINE.finditer(found.group())]
        before = [m.group() for m in _LINE.finditer(message[: found.start()])]
        chain = before[-1:] + callers
        if any(before[i : i + len(chain)] == chain for i in range(len(before) - 1)):
            message = message[: found.start()] + message[found.end() :]
    return message


@dataclass(frozen=True, slots=True)
class Template:
    """The sentences of a cause, and what is the same in all its findings.

    Attributes:
        message: What, who, where; the fact that matters first.
        cost: What it costs the job.
        advice: What to do, as an order that a person can follow.
        proved: Its findings stay true whatever the job does next.
        severity: Default: the worst that the kind may have.
    """

    kind: Kind
    cause: str | None
    message: str = "{message}"
    cost: str = ""
    advice: str = ""
    proved: bool = False
    severity: Severity | None = None

    def __call__(
        self,
        *,
        culprits: Collection[int] = (),
        victims: Collection[int] = (),
        where: Iterable[Where] = (),
        waiting: Iterable[Where] = (),
        names: Iterable[str] = (),
        collective: CollectiveRef | Call | None = None,
        step: int | None = None,
        first_seen_s: float | None = None,
        evidence: Iterable[str] = (),
        cause: str | None = None,
        proved: bool | None = None,
        severity: Severity | None = None,
        completed: bool = False,
        **facts: object,
    ) -> Finding:
        """Return the finding.

        Args:
            cause: Instead of the template's; also `proved` and `severity`.
            completed: The collective completed although the ranks' calls differ.
            facts: What the templates name.
        """
        culprits, victims = tuple(culprits), tuple(victims)
        where = tuple(where)
        facts = {"site": next(iter(where), None), "collective": collective, "step": step} | facts
        facts |= {"culprits": culprits, "victims": victims}
        if isinstance(collective, Call):
            collective = reference(collective)
        certain = self.proved if proved is None else proved
        message, cost, advice = (filled(text, **facts) for text in (self.message, self.cost, self.advice))
        return Finding(
            kind=self.kind.name, cause=cause or self.cause, severity=severity or self.severity or self.kind.severities[-1],
            certainty=Certainty.PROVED if certain else Certainty.SUSPECTED, culprits=culprits, victims=victims,
            collective=collective, where=where, waiting=tuple(waiting), names=tuple(names), step=step,
            first_seen_s=first_seen_s, message=callers_once(message), cost=cost, advice=advice, evidence=tuple(evidence),
            collective_completed=completed,
        )  # fmt: skip
