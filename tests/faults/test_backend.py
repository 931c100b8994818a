"""`distdiag bench faults --backend NAME`: the environment of its jobs, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distdiag.errors import DistdiagError
from tests.faults.collection import backend_environment
from tests.jobs import REPOSITORY


def _backend(folder: Path, prepare: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text("print('loaded')\n")
    if prepare:
        (folder / "prepare.py").write_text(prepare)
    return folder


def test_the_gloo_backend_changes_nothing(tmp_path: Path) -> None:
    assert backend_environment(tmp_path / "faults/manifest.json", None) == {}
    assert backend_environment(tmp_path / "faults/manifest.json", "gloo") == {}


def test_a_backend_is_found_next_to_the_collection_or_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = tmp_path / "faults/manifest.json"
    folder = _backend(tmp_path / "standins/other", "open('prepared', 'w')")
    monkeypatch.chdir(tmp_path)
    for name in ("other", str(folder)):
        env = backend_environment(manifest, name)
        done = subprocess.run(
            [sys.executable, "-c", "pass"], env={**os.environ, **env}, capture_output=True, text=True, check=True
        )
        assert done.stdout == "loaded\n"
    assert (tmp_path / "prepared").exists()


def test_a_backend_that_is_missing_or_cannot_be_built_is_refused(tmp_path: Path) -> None:
    manifest = tmp_path / "faults/manifest.json"
    with pytest.raises(DistdiagError, match="no backend 'other'"):
        backend_environment(manifest, "other")
    _backend(tmp_path / "standins/other", "import sys; sys.exit('no C++ compiler')")
    with pytest.raises(DistdiagError, match="cannot be built: no C\\+\\+ compiler"):
        backend_environment(manifest, "other")


def test_the_stand_in_runs_the_sitecustomize_that_it_hides(tmp_path: Path) -> None:
    hidden = _backend(tmp_path / "hidden")
    path = os.pathsep.join([str(REPOSITORY / "tests/standins/stream"), str(hidden)])
    done = subprocess.run(
        [sys.executable, "-c", "pass"], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout == "loaded\n"
