"""The registry of kinds and the rules are consistent: a kind is registered everywhere or a test fails."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import pkgutil
import re
from pathlib import Path

import pytest

from distdiag.diagnosis import kinds, rules
from distdiag.diagnosis.kinds import KINDS
from distdiag.diagnosis.rules import RULES
from distdiag.diagnosis.text.template import Template
from distdiag.monitor import self_check
from distdiag.sources.dumps import absent

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
    if rule.limits is None:
        assert "class Limits" not in source(rule)
        return
    assert dataclasses.is_dataclass(rule.limits) and type(rule.limits).__dataclass_params__.frozen  # pyright: ignore
    (limits,) = ast.parse(inspect.getsource(type(rule.limits))).body
    assert isinstance(limits, ast.ClassDef)
    for field, below in zip(limits.body, [*limits.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant), ast.unparse(field)


def test_every_rule_has_faulty_jobs_and_healthy_ones_that_look_like_them() -> None:
    faulty = {kind for job in MANIFEST["jobs"] for kind in job["expected"]["kinds_any_or_all"]}
    like = {kind for job in MANIFEST["jobs"] for kind in job.get("looks_like", ())}
    names = {rule.kind.name for rule in RULES}
    assert names - faulty == names - like == {"gpu"}  # the collection runs without one
    assert like <= names and not any(job["faulty"] for job in MANIFEST["jobs"] if "looks_like" in job)


def constructors(folder: Path) -> list[tuple[Path, ast.Call]]:
    """Return every `Finding(...)` below a folder."""
    trees = ((file, ast.parse(file.read_text())) for file in folder.rglob("*.py"))
    calls = ((file, node) for file, tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [(file, call) for file, call in calls if getattr(call.func, "id", "") == "Finding"]


def test_only_templates_build_findings() -> None:
    """`test_template.py` asserts that each template has a cause and a severity of its kind."""
    assert [file.name for file, _ in constructors(DIAGNOSIS)] == ["template.py"]


def test_the_monitors_own_findings_have_a_registered_kind_and_cause() -> None:
    made = constructors(PROJECT / "distdiag" / "monitor")
    assert made
    for file, call in made:
        given = {k.arg: k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)}
        assert given.get("cause", KINDS[given["kind"]].causes[0]) in KINDS[given["kind"]].causes, file


def test_recorder_has_the_causes_that_the_monitor_and_the_reader_of_dumps_report() -> None:
    tree = list(ast.walk(ast.parse((PROJECT / "distdiag" / "monitor" / "self_check.py").read_text())))
    given = [call.args[1] for call in tree if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Fault"]
    given += [x.value for x in tree if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == "cause"]
    chosen = [part for x in given for part in ((x.body, x.orelse) if isinstance(x, ast.IfExp) else (x,))]
    own = {x.value for x in chosen if isinstance(x, ast.Constant)} | set(self_check.ADVICE)
    dumps = {x.cause for x in vars(absent).values() if isinstance(x, Template) and x.kind is kinds.RECORDER}
    assert set(kinds.RECORDER.causes) == own | dumps


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind.name)
def test_a_cause_that_replaces_a_templates_is_one_of_its_kind(rule: rules.Rule) -> None:
    files = [DIAGNOSIS / room / f"{rule.kind.name}.py" for room in ("rules", "text")]
    trees = [ast.parse(path.read_text()) for path in files if path.exists()]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    given = [
        k.value
        for call in calls
        if isinstance(call.func, (ast.Name, ast.IfExp))
        for k in call.keywords
        if k.arg == "cause"
    ]
    for value in given:
        compared = {id(x) for node in ast.walk(value) if isinstance(node, ast.Compare) for x in ast.walk(node)}
        texts = (x for x in ast.walk(value) if isinstance(x, ast.Constant) and isinstance(x.value, str))
        for text in texts:
            assert id(text) in compared or text.value in rule.kind.causes, ast.unparse(value)


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
