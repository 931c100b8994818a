"""Matrix, wheels, classifiers and documents name the same versions of Python and torch, and actions are pinned by commit."""

from __future__ import annotations

import re
import tomllib

import distdiag
from tests.jobs import REPOSITORY

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
MATRIX = (REPOSITORY / ".github/workflows/test.yml").read_text()
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def constant(name: str) -> str:
    found = re.search(rf'^{name} = "([\d.]+)"$', (REPOSITORY / "tools/make_venv.py").read_text(), re.MULTILINE)
    assert found, name  # .ci/run finds NEWEST_TORCH in the same way
    return found[1]


def test_actions_are_pinned_by_commit_with_their_version() -> None:
    used = [line.strip() for path in WORKFLOWS for line in path.read_text().splitlines() if "uses:" in line]
    assert len(used) > 5
    assert [
        line for line in used if not re.fullmatch(r"- uses: [\w.-]+/[\w.-]+@[0-9a-f]{40} # v[\d.]+(: .*)?", line)
    ] == []


def test_wheels_matrix_and_classifiers_have_the_same_pythons() -> None:
    classifiers = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["project"]["classifiers"]))
    wheels = [f"3.{minor}" for minor in re.findall(r"cp3(\d+)-", " ".join(PROJECT["tool"]["cibuildwheel"]["build"]))]
    row = re.search(r"python: \[(.*)\]", MATRIX)
    assert row and re.findall(r"[\d.]+", row[1]) == wheels == classifiers
    assert PROJECT["project"]["requires-python"] == f">={classifiers[0]}"


def test_oldest_default_and_newest_torch_are_in_the_matrix_and_the_readme() -> None:
    tested = set(re.findall(r'"(\d+\.\d+)\.\*"', MATRIX))
    oldest = next(
        d.partition(">=")[2] for d in PROJECT["project"]["optional-dependencies"]["probe"] if d.startswith("torch>=")
    )
    for version in (oldest, constant("DEFAULT_TORCH"), constant("NEWEST_TORCH")):
        assert ".".join(version.split(".")[:2]) in tested
    readme = (REPOSITORY / "README.md").read_text()
    assert f"`torch=={constant('DEFAULT_TORCH')}`" in readme and f"TORCH={constant('NEWEST_TORCH')}`" in readme
    assert f"torch {oldest} is the oldest version" in readme


def test_the_version_is_in_one_place() -> None:
    citation = (REPOSITORY / "CITATION.cff").read_text()
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "distdiag.version.VERSION"}
    assert f"\n## {distdiag.__version__}\n" in (REPOSITORY / "CHANGELOG.md").read_text()
    assert f"\nversion: {distdiag.__version__}\n" in citation


def test_a_release_has_twelve_lines_at_most() -> None:
    _, *releases = (REPOSITORY / "CHANGELOG.md").read_text().split("\n## ")
    assert [r.partition("\n")[0] for r in releases][-2:] == ["0.2.0", "0.1.0"]
    assert all(len(r.strip().splitlines()) - 2 <= 12 for r in releases)
