"""The commands look for runs below TMPDIR, too: what lies there on this machine is none of the tests' business."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path_factory.mktemp("tmp")
    monkeypatch.setenv("TMPDIR", str(directory))
    return directory
