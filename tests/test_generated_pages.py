"""docs/findings, docs/reference and docs/cases are what their tools write today."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import clean_env

PROJECT = Path(__file__).parents[1]
PAGES = "import json, runpy, sys; print(json.dumps(runpy.run_path(sys.argv[1])['pages']()))"


@pytest.mark.parametrize(
    ("folder", "tool"), [("findings", "finding_pages.py"), ("reference", "reference.py"), ("cases", "case_studies.py")]
)
def test_the_generated_pages_are_current(folder: str, tool: str, tmp_path: Path) -> None:
    # in a new process: what other tests have imported or set must not be in the pages
    made = subprocess.run(
        [sys.executable, "-c", PAGES, str(PROJECT / "tools" / tool)],
        cwd=PROJECT, env=clean_env(tmp_path), capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    current = json.loads(made.stdout)
    written = {file.name: file.read_text() for file in (PROJECT / "docs" / folder).glob("*.md")}
    stale = [name for name in {*written, *current} if written.get(name) != current.get(name)]
    assert not stale, f"run `python tools/{tool}`: {', '.join(sorted(stale))}"
