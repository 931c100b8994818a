"""Files and links that the hand-written documents name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*PROJECT.glob("*.md"), *(PROJECT / "docs").glob("*.md"), PROJECT / "tests/standins/README.md"]
SOURCES = [
    f"/{path.relative_to(PROJECT)}"
    for folder in ("distdiag", "tests", "probes", "benchmarks", "tools")
    for path in (PROJECT / folder).rglob("*.*")
]
SKIPPED = ("train.py", "KIND.py")  # a user's script, and a pattern


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(PROJECT)))
def test_files_and_links_in_a_document_exist(document: Path) -> None:
    text = document.read_text()
    named = re.findall(r"`([\w./-]+\.(?:py|sql|c))`", text)
    missing = [n for n in named if not n.endswith(SKIPPED) and not any(s.endswith(f"/{n}") for s in SOURCES)]
    links = [x for x in re.findall(r"\]\(([^)#\s]+)", text) if not x.startswith("http")]
    assert missing + [x for x in links if not (document.parent / x).exists()] == []
