"""docs/findings and docs/reference are what their tools write today."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]


@pytest.mark.parametrize(("folder", "tool"), [("findings", "finding_pages.py"), ("reference", "reference.py")])
def test_the_generated_pages_are_current(folder: str, tool: str) -> None:
    current = runpy.run_path(str(PROJECT / "tools" / tool))["pages"]()
    written = {file.name: file.read_text() for file in (PROJECT / "docs" / folder).glob("*.md")}
    stale = [name for name in {*written, *current} if written.get(name) != current.get(name)]
    assert not stale, f"run `python tools/{tool}`: {', '.join(sorted(stale))}"
