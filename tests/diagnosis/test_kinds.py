"""The registry of kinds and the rules are consistent: a kind is registered everywhere or a test fails."""

from __future__ import annotations

import ast
import dataclasses
import json
import pkgutil
import re
from pathlib import Path

import pytest

from distdiag.diagnosis import kinds, rules
from distdiag.diagnosis.kinds import KINDS
from distdiag.diagnosis.rules import RULES

PROJECT = Path(__file__).parents[2]
DIAGNOSIS = PROJECT / "distdiag" / "diagnosis"
MANIFEST = json.loads((PROJECT / "tests" / "faults" / "manifest.json").read_text())
WITHOUT_RULE = {"recorder"}  # reported by the monitor about itself, and by the reader of dumps


def source(rule: rules.Rule) -> str:
    return (DIAGNOSIS / "rules" / f"{rule.kind.name}.py").read_text()


def test_every_kind_has_one_rule_in_a_file_of_its_name() -> None:
    files = {module.name for module in pkgutil.iter_modules(rules.__path__)}
    names = [rule.kind.name for rule in RULES]
    assert len(set(names)) == len(names) and set(names) == files == set(KINDS) - WITHOUT_RULE


def test_every_rule_has_tests_in_a_file_of_its_name() -> None:
    names = {p.stem.removeprefix("test_") for p in (Path(__file__).parent / "rules").glob("test_*.py")}
    assert {rule.kind.name for rule in RULES} - {"deadlock"} <= names  # deadlocks have several files


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind.name)
def test_every_limit_is_frozen_and_documented(rule: rules.Rule) -> None:
    assert dataclasses.is_dataclass(rule.limits) and type(rule.limits).__dataclass_params__.frozen  # pyright: ignore
    (limits,) = (x for x in ast.parse(source(rule)).body if isinstance(x, ast.ClassDef) and x.name == "Limits")
    for field, below in zip(limits.body, [*limits.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant), ast.unparse(field)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind.name)
def test_every_rule_names_faulty_jobs_and_healthy_look_alikes_that_exist(rule: rules.Rule) -> None:
    about = ast.get_docstring(ast.parse(source(rule))) or ""
    found = re.search(r"Faulty jobs: (.*?)\.\s+Healthy look-alikes: (.*?)\.", about, re.DOTALL)
    assert found is not None
    faulty = {job["name"]: job["faulty"] for job in MANIFEST["jobs"]}
    for names, expected in zip(found.groups(), (True, False), strict=True):
        for name in re.findall(r"\b[a-z][a-z0-9]*_[a-z0-9_]+\b", names.split("none in the collection")[0]):
            assert faulty[name] is expected, name


def test_every_finding_that_the_code_makes_has_a_registered_kind_cause_and_severity() -> None:
    made = 0
    for file in (*DIAGNOSIS.rglob("*.py"), *(PROJECT / "distdiag" / "monitor").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding"):
                continue
            made += 1
            given = {k.arg: k.value for k in node.keywords}
            name = given["kind"].value if isinstance(given["kind"], ast.Constant) else None
            kind = KINDS[name or file.stem] if name or file.stem in KINDS else None
            cause = given.get("cause")
            if kind is not None and isinstance(cause, ast.Constant):
                assert cause.value in kind.causes, f"{file}:{node.lineno}"
            severity = given.get("severity")
            if kind is not None and isinstance(severity, ast.Attribute):
                assert severity.attr.lower() in kind.severities, f"{file}:{node.lineno}"
    assert made > 20


def test_the_engine_knows_no_kind() -> None:
    text = (DIAGNOSIS / "engine.py").read_text()
    for kind in KINDS.values():
        assert f'"{kind.name}"' not in text
    assert not re.findall(r"kinds\.[A-Z]+", text)


def test_an_explained_kind_exists() -> None:
    for kind in KINDS.values():
        for entry in kind.explains:
            assert set(entry.causes) <= set(KINDS[entry.kind].causes)


def test_the_collection_and_the_readme_know_the_same_kinds() -> None:
    expected = {name for job in MANIFEST["jobs"] for name in job["expected"]["kinds_any_or_all"]}
    assert expected <= set(KINDS)
    readme = (PROJECT / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in KINDS)


def test_severities_of_a_kind_are_in_order() -> None:
    order = [kinds.Severity.INFO, kinds.Severity.WARNING, kinds.Severity.ERROR]
    assert all(list(kind.severities) == [x for x in order if x in kind.severities] for kind in KINDS.values())
