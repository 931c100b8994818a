"""`make venv` reuses an installed torch that is new enough, and uses no network if everything is up to date."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.jobs import REPOSITORY, clean_env


@pytest.fixture
def make_venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, running in its own checkout."""
    spec = importlib.util.spec_from_file_location("make_venv", REPOSITORY / "tools" / "make_venv.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["torch"]\n')
    (tmp_path / "constraints.txt").write_text("ruff==1\n")
    venv = tmp_path / ".venv"
    for attribute, path in {
        "ROOT": tmp_path, "VENV": venv, "PYTHON": venv / "bin" / "python", "STAMP": venv / ".installed",
    }.items():  # fmt: skip
        monkeypatch.setattr(module, attribute, path)
    return module


def fake_python(path: Path, torch: str | None) -> str:
    """Make a Python whose torch has this version (None: it has none)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + (f"echo {torch} /opt/site-packages\n" if torch else "exit 1\n"))
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("2.10.0", True),
        ("2.13.0+cu130", True),
        ("2.11.0a0+gitabc", True),
        ("3.0.0", True),
        ("2.9.1", False),
        ("1.13.1", False),
        (None, False),
    ],
)
def test_an_installed_torch_is_reused(tmp_path: Path, make_venv: ModuleType, version: str | None, found: bool) -> None:
    answer = make_venv.find_torch(fake_python(tmp_path / "python", version))
    assert answer == ((version, "/opt/site-packages") if found else None)


def test_a_missing_python_has_no_torch(make_venv: ModuleType) -> None:
    assert make_venv.find_torch("/no/such/python") is None


def test_an_up_to_date_venv_is_not_rebuilt(make_venv: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("started a process")

    make_venv.PYTHON.parent.mkdir(parents=True)
    make_venv.PYTHON.touch()
    make_venv.STAMP.write_text(make_venv.fingerprint())
    monkeypatch.setattr(subprocess, "run", refuse)
    assert make_venv.main() == 0
    with (make_venv.ROOT / "pyproject.toml").open("a") as f:
        f.write("[tool.ruff]\nline-length = 99\n")
    assert make_venv.main() == 0, "the environment does not depend on the linter's settings"
    with (make_venv.ROOT / "constraints.txt").open("a") as f:
        f.write("numpy==2\n")
    with pytest.raises(AssertionError, match="started a process"):
        make_venv.main()
    assert not make_venv.STAMP.exists(), "a half-made environment must not look finished"


def test_without_a_package_index_the_remedy_is_named(
    make_venv: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_python(make_venv.PYTHON, None)  # its pip fails, too
    assert make_venv.main() == 2
    output = capsys.readouterr().err.splitlines()
    assert output[-2].startswith("make_venv: error: ") and output[-1].startswith("hint: ")
    assert not make_venv.STAMP.exists()


def test_constraints_pin_all_but_torch() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all("==" in pin for pin in pins)
    assert not any(pin.startswith(("torch==", "distdiag")) for pin in pins)
    assert {"pytest", "textual", "pandas", "ruff"} <= {pin.partition("==")[0] for pin in pins}


def test_make_lists_its_targets(tmp_path: Path) -> None:
    answer = subprocess.run(
        ["make", "--no-print-directory"],
        cwd=REPOSITORY,
        env=clean_env(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 0, answer.stderr
    for target in ("demo", "test", "check", "gpu-check", "bench", "pictures", "clean"):
        assert f"make {target} " in answer.stdout
    assert sys.version_info >= (3, 11)
