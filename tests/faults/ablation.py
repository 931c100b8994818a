"""What each witness and each limit of the diagnosis is worth on tapes: `distdiag bench faults --replay --ablate`.

Each witness is left out, each limit is halved and doubled, and every tape is judged again. A limit that is not read, or a witness
that is not asked, while a tape is judged is not varied on it.
"""

from __future__ import annotations

import dataclasses
import pkgutil
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType, MappingProxyType, ModuleType
from typing import Any

import msgspec

from distdiag import diagnosis
from distdiag.diagnosis import comparison, endings, history, pauses
from distdiag.diagnosis.culprit import verdict as verdicts
from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.culprit.witnesses import ORDER, Reason
from distdiag.tapes.tape import Verdict, judge, read_tape
from tests.faults.replay import left_out, spread


class Variant(msgspec.Struct, frozen=True):
    """One change of the diagnosis: a witness left out, or a limit halved or doubled."""

    where: str  # "witness", or the module of the limit
    name: str
    factor: float | None = None  # None: left out

    def __str__(self) -> str:
        if self.factor is None:
            return f"without {self.name}"
        return f"{self.where}.{self.name} × {self.factor:g}"


class Effect(msgspec.Struct, frozen=True):
    """What a variant changed in the verdict on one tape."""

    tape: str
    variant: Variant
    changes: tuple[str, ...]  # of kind, cause, culprit, line, reason, found, cleared, severity


Tables = dict[Any, Any]
_MEASURED = re.compile(r"[\d.,]+ ?(ms|s|min|h|%|[KMG]i?B|times)\b|[\d.]+%")


@cache
def _modules() -> tuple[ModuleType, ...]:
    """Return every module of the diagnosis."""
    found = pkgutil.walk_packages(diagnosis.__path__, f"{diagnosis.__name__}.")
    return tuple(import_module(module.name) for module in found)


@cache
def _limits() -> Tables:
    """Return every `limits` object of the diagnosis by the name of its module."""
    objects = (getattr(module, name, None) for module in _modules() for name in ("limits", "LIMITS"))
    return {type(x).__module__.rsplit(".", 1)[-1]: x for x in objects if x is not None}


@cache
def _constants() -> Tables:
    """Return (module's name, constant's name) -> number, of the modules whose limits are constants."""
    found = {
        name: module
        for module in (history, pauses, endings, comparison, verdicts)  # before those from which it imports
        for name, value in vars(module).items()
        if name.isupper() and type(value) in (int, float)
    }
    return {(module.__name__.rsplit(".", 1)[-1], name): getattr(module, name) for name, module in found.items()}


def scaled(value: Any, factor: float) -> Any:
    """Return a limit with every number in it multiplied; None if it has none."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return None
    if isinstance(value, int):
        return max(1, round(value * factor))
    if isinstance(value, float):
        return value * factor
    if isinstance(value, (dict, MappingProxyType)):
        return MappingProxyType({k: scaled(v, factor) for k, v in value.items()})
    if isinstance(value, tuple):
        inner = tuple(scaled(v, factor) for v in value)
        return None if any(v is None for v in inner) else inner
    return None


def variants() -> list[Variant]:
    """Return every witness left out, and every limit halved and doubled."""
    out = [Variant("witness", str(reason)) for reason in Reason if reason is not Reason.NONE]
    fields = [(where, x.name, getattr(of, x.name)) for where, of in _limits().items() for x in dataclasses.fields(of)]
    for where, name, value in (*fields, *((*at, value) for at, value in _constants().items())):
        out += [Variant(where, name, x) for x in (0.5, 2.0) if scaled(value, x) not in (None, value)]
    return out


@contextmanager
def applied(variant: Variant) -> Iterator[None]:
    """Leave out the witness of a variant, or change its limit."""
    if variant.factor is None:
        with left_out((variant.name,)):
            yield
        return
    before = _constants().get((variant.where, variant.name))
    holders = [_limits().get(variant.where)] if before is None else []
    if before is None:
        before = getattr(holders[0], variant.name)
    else:  # the module's, and that of each module that imports it
        holders = [module for module in _modules() if vars(module).get(variant.name) is before]
    for holder in holders:
        object.__setattr__(holder, variant.name, scaled(before, variant.factor))
    try:
        yield
    finally:
        for holder in holders:
            object.__setattr__(holder, variant.name, before)


@contextmanager
def _watched() -> Iterator[set[tuple[str, str]]]:
    """Collect the limits that are read, and the witnesses that are asked, as (module, field)."""
    seen: set[tuple[str, str]] = set()
    ran: set[CodeType] = set()
    before, decide = [], verdicts.decide

    def asked(case: Case) -> tuple[Testimony, tuple[Testimony, ...]]:
        seen.update(("witness", witness.name) for witness in ORDER[case.incident.root])
        return decide(case)

    def called(frame: FrameType, event: str, _: object) -> None:
        ran.add(frame.f_code)

    verdicts.decide = asked
    for where, limits in _limits().items():
        kind = type(limits)

        def read(self: Any, name: str, where: str = where) -> Any:
            seen.add((where, name))
            return object.__getattribute__(self, name)

        before.append(kind)
        kind.__getattribute__ = read
    sys.setprofile(called)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        names = {name for code in ran for name in code.co_names}
        seen.update(at for at in _constants() if at[1] in names)
        verdicts.decide = decide
        for kind in before:
            del kind.__getattribute__


def _reasons(verdict: Verdict) -> dict[str, tuple[str, str]]:
    """Return message and advice by finding, without measured values, which depend on the poll."""
    return {f.key: (_MEASURED.sub("", f.message), _MEASURED.sub("", f.advice)) for f in verdict.findings}


def _changes(before: Verdict, now: Verdict) -> tuple[str, ...]:
    """Return in what two verdicts on one tape differ."""
    found = []
    if before.answers != now.answers:
        old = {(a.kind, a.cause, a.culprits): a for a in before.answers}
        new = {(a.kind, a.cause, a.culprits): a for a in now.answers}
        gone, come = [a for k, a in old.items() if k not in new], [a for k, a in new.items() if k not in old]
        if gone and come:
            for name in ("kind", "cause", "culprits"):
                if {getattr(a, name) for a in gone} != {getattr(a, name) for a in come}:
                    found.append({"culprits": "culprit"}.get(name, name))
        found += [f"lost {a.kind}/{a.cause}" for a in gone if not come]
        found += [f"new {a.kind}/{a.cause}" for a in come if not gone]
        for key in old.keys() & new.keys():
            found += ["line"] * (old[key].where != new[key].where)
            for name in ("severity", "certainty", "cleared"):
                found += [name] * (getattr(old[key], name) != getattr(new[key], name))
    if not found and _reasons(before) != _reasons(now):
        found.append("reason")
    return tuple(dict.fromkeys(found))


class Effects(msgspec.Struct, frozen=True):
    """What all variants changed on one tape, and which of them were tried."""

    tried: tuple[Variant, ...]
    changed: tuple[Effect, ...]


def ablated(path: Path) -> Effects:
    """Judge one tape with every variant."""
    tape = read_tape(path)
    name = f"{path.parent.name}/{path.stem}"
    with _watched() as used:
        before = judge(tape)
    tried = [v for v in variants() if (v.where, v.name) in used]
    out = []
    for variant in tried:
        with applied(variant):
            changes = _changes(before, judge(tape))
        if changes:
            out.append(Effect(name, variant, changes))
    return Effects(tuple(tried), tuple(out))


def report(paths: Sequence[Path], parallel: int = 2) -> Iterator[str]:
    """Yield the lines of a Markdown page: which variant changes which verdicts, and which changes none."""
    effects = list(spread(ablated, list(paths), parallel))
    tried: dict[Variant, int] = defaultdict(int)
    changed: dict[Variant, list[Effect]] = defaultdict(list)
    for one in effects:
        for variant in one.tried:
            tried[variant] += 1
        for effect in one.changed:
            changed[effect.variant].append(effect)
    backends = sorted({path.parent.name for path in paths})
    on = ", ".join(f"{sum(path.parent.name == backend for path in paths)} on {backend}" for backend in backends)
    yield f"{len(paths)} tapes ({on}), {len(variants())} variants, {sum(tried.values())} verdicts."
    yield ""
    yield "| variant | judged | verdicts changed | which |"
    yield "|---|---|---|---|"
    for variant in variants():
        if changed[variant]:
            jobs = "; ".join(f"{e.tape}: {', '.join(e.changes)}" for e in changed[variant])
            yield f"| {variant} | {tried[variant]} | {len(changed[variant])} | {jobs} |"
    yield ""
    yield "## Changes nothing"
    yield ""
    witnesses = [v.name for v in variants() if v.factor is None and not changed[v]]
    yield f"Witnesses: {', '.join(witnesses) or 'none'}."
    yield ""
    yield "Limits, halved and doubled (number of tapes on which they are read):"
    yield ""
    names = dict.fromkeys((v.where, v.name) for v in variants() if v.factor is not None)
    for where, name in names:
        both = [v for v in variants() if (v.where, v.name) == (where, name)]
        if not any(changed[v] for v in both):
            yield f"- {where}.{name} ({max(tried[v] for v in both)})"
