"""Templates of findings: how facts become words, and that every template fits its kind."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import distdiag.diagnosis
import distdiag.sources
from distdiag.diagnosis import kinds
from distdiag.diagnosis.model.findings import Certainty, Finding, Severity
from distdiag.diagnosis.model.snapshot import Call, Site
from distdiag.diagnosis.text.finding import finding_lines, in_the_past
from distdiag.diagnosis.text.template import Template, callers_once, filled

SITE = Site("/job/train.py", 88, "evaluate")


def templates() -> list[tuple[str, Template]]:
    """Return every template of the package, with its module and name."""
    found: dict[int, tuple[str, Template]] = {}
    for package in (distdiag.diagnosis, distdiag.sources):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for name, value in vars(importlib.import_module(info.name)).items():
                many = value.values() if isinstance(value, dict) else [value]
                for one in many:
                    if isinstance(one, Template):
                        found.setdefault(id(one), (f"{info.name}.{name}", one))
    return list(found.values())


@pytest.mark.parametrize(
    ("template", "facts", "text"),
    [
        ("{ranks} {ranks:waits|wait}", {"ranks": (3,)}, "rank 3 waits"),
        ("{ranks} {ranks:waits|wait}", {"ranks": (0, 1, 2, 3)}, "ranks 0–3 wait"),
        ("{n:,} parameter{n:|s}", {"n": 1}, "1 parameter"),
        ("{n:,} parameter{n:|s}", {"n": 4096}, "4,096 parameters"),
        ("waits{site}", {"site": SITE}, "waits at train.py:88 in evaluate"),
        ("waits{site}", {"site": None}, "waits"),
        ("in {call}", {"call": Call(op="all_reduce", group="pg", seq=4)}, "in all_reduce #4 (pg)"),
        ("{a:share}, {b:size}, {c:time}", {"a": 0.217, "b": 4096, "c": 40.2}, "22 %, 4.0 KiB, 40 s"),
        ("{text}, {ms:.0f} ms", {"text": "{braces} stay", "ms": 2.4}, "{braces} stay, 2 ms"),
    ],
)
def test_facts_become_words_by_their_type(template: str, facts: dict[str, object], text: str) -> None:
    assert filled(template, **facts) == text


def test_a_finding_has_what_its_template_and_its_kind_set() -> None:
    template = Template(kinds.STRAGGLER, "host", "{culprits}: +{ms} ms", "{victims} {victims:waits|wait}", "wait")
    found = template(culprits=[1], victims=[0, 2], ms=3, step=7)
    assert (found.kind, found.cause, found.culprits, found.victims, found.step) == (
        "straggler",
        "host",
        (1,),
        (0, 2),
        7,
    )
    assert (found.message, found.cost, found.advice) == ("rank 1: +3 ms", "ranks 0, 2 wait", "wait")
    assert (found.severity, found.certainty) == (Severity.WARNING, Certainty.SUSPECTED)
    other = template(culprits=[1], ms=3, cause="data", proved=True, severity=Severity.INFO)
    assert (other.cause, other.severity, other.certainty) == ("data", Severity.INFO, Certainty.PROVED)
    with pytest.raises(KeyError):
        template(culprits=[1])


def test_every_template_has_a_cause_and_a_severity_of_its_kind() -> None:
    for name, template in templates():
        kind = template.kind
        assert kinds.KINDS[kind.name] is kind, name
        assert template.cause in (kind.causes or (None,)), name
        assert template.severity is None or template.severity in kind.severities, name


def test_a_long_message_keeps_its_first_clause_on_the_first_line() -> None:
    """A semicolon inside parentheses ends no clause."""
    first = f"rank 2 has not entered all_gather #23 (the group of ranks 1, 2; 40 B){' and so on' * 6}"
    head, more, *_ = finding_lines(Finding(kind="stall", message=f"{first}; rank 1 waits; it is idle"), 400)
    assert head.endswith(first) and more.split() == ["more", "rank", "1", "waits;", "it", "is", "idle"]


def test_after_the_end_nothing_is_advised_that_needs_a_running_job() -> None:
    do = "see where it hangs; `distdiag dump` saves all stacks; this is cleared if the rank continues"
    f = in_the_past(Finding(kind="stall", message="", cost="1 of 2 ranks wait", advice=do))
    assert (f.cost, f.advice) == ("1 of 2 ranks waited", "see where it hangs")
    kept = Finding(kind="straggler", message="", cost="ranks 1, 2 wait 220 ms of a step", advice="look at its host")
    assert in_the_past(kept) == kept
    grows = "host memory of rank 0 grows by 1.0 MiB per step (9.5 MiB a minute), 2.0 GiB at step 40, full in 2 hours at this rate; it may be"
    grew = in_the_past(Finding(kind="memory", message=grows)).message
    assert grew == "host memory of rank 0 grew by 1.0 MiB per step (9.5 MiB a minute), 2.0 GiB at step 40; it may be"


def test_the_callers_of_a_line_are_named_once() -> None:
    first = "rank 2 skipped all_gather (w2v.py:21, called at w2v.py:26, called at w2v.py:48)"
    again = "; ranks 0, 1 are in all_gather at w2v.py:21 in gather (called at w2v.py:26 in forward, from w2v.py:48 in forward)"
    other = "; rank 2 is in all_gather at w2v.py:21 in gather (called at w2v.py:30 in forward)"
    assert callers_once(first + again + other) == first + again.partition(" (")[0] + other
