"""docs/findings is what `tools/finding_pages.py` writes today."""

from __future__ import annotations

import runpy
from pathlib import Path

PROJECT = Path(__file__).parents[1]


def test_the_pages_of_the_findings_are_current() -> None:
    tool = runpy.run_path(str(PROJECT / "tools" / "finding_pages.py"))
    written = {file.name: file.read_text() for file in (PROJECT / "docs" / "findings").glob("*.md")}
    current = tool["pages"]()
    stale = [name for name in {*written, *current} if written.get(name) != current.get(name)]
    assert not stale, f"run `python tools/finding_pages.py`: {', '.join(sorted(stale))}"
