"""`make venv` reuses an installed torch that is new enough, and uses no network if everything is up to date."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
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
    monkeypatch.setattr(module, "NAMED_TORCH", "")  # `make test TORCH=…` sets it for us, too
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


@pytest.mark.parametrize(
    ("named", "there", "requirement"),
    [
        ("", "2.14.1+cu130", ["torch==2.13.0"]),
        ("2.15.0", "2.15.0+cu132", ["torch==2.15.0"]),
        ("torch==2.10.*", "2.10.0", ["torch==2.10.*"]),
        ("2.14.1+cpu", "2.14.1+cpu", ["torch==2.14.1+cpu"]),
        ("torch==2.13.0 --index-url https://a/cpu", "2.13.0", ["torch==2.13.0", "--index-url", "https://a/cpu"]),
        ("torch --pre", None, ["--upgrade", "torch", "--pre"]),
    ],
)
def test_a_named_torch_is_reused_only_if_it_is_that_version(
    tmp_path: Path,
    make_venv: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    named: str,
    there: str | None,
    requirement: list[str],
) -> None:
    monkeypatch.setattr(make_venv, "NAMED_TORCH", named)
    version, pip = make_venv.wanted_torch()
    assert pip == requirement
    if there is not None:
        assert make_venv.find_torch(fake_python(tmp_path / "python", there), version) == (there, "/opt/site-packages")
    other = make_venv.find_torch(fake_python(tmp_path / "other", "2.12.0+cpu"), version)
    assert (other is None) == bool(named)


@pytest.mark.parametrize("named", ["2.15.0;reboot", "pytorch", "torch>=2.14", "--pre", "/tmp/torch.whl"])
def test_what_names_no_version_of_torch_is_refused(
    make_venv: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    monkeypatch.setattr(make_venv, "NAMED_TORCH", named)
    assert make_venv.main() == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.endswith("names no version") and hint.startswith("hint: make venv TORCH=")


def test_a_named_torch_lifts_the_cap_of_the_machine(
    tmp_path: Path, make_venv: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "torch-9.9.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch-9.9.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 9.9.0\n")
        wheel.writestr("torch-9.9.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("torch-9.9.0.dist-info/RECORD", "")
    (tmp_path / "cap.txt").write_text("torch<9\n")
    # the wheel is found through the same file: its other settings stay in force
    (tmp_path / "pip.conf").write_text(
        f"[global]\nconstraint = {tmp_path}/cap.txt\nno-index = true\nfind-links = {tmp_path}\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    for name in ("PIP_CONSTRAINT", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(make_venv, "PYTHON", Path(sys.executable))
    install = ["--dry-run", "--ignore-installed", "torch==9.9.0"]
    with pytest.raises(subprocess.CalledProcessError):
        make_venv.pip(*install)
    monkeypatch.setattr(make_venv, "NAMED_TORCH", "9.9.0")
    make_venv.pip(*install)
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "cap.txt"))
    make_venv.pip(*install)


@pytest.mark.parametrize(
    ("torch", "venv"),
    [
        ("", ".venv"),
        ("2.15.0", ".venv-torch-2.15.0"),
        ("torch==2.10.*", ".venv-torch-2.10"),
        ("torch==2.13.0 --index-url https://a/cpu", ".venv-torch-2.13.0"),
        ("torch", ".venv-torch-newest"),
    ],
)
def test_each_torch_has_its_own_environment(tmp_path: Path, torch: str, venv: str) -> None:
    shown = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "test", f"TORCH={torch}"],
        cwd=REPOSITORY, env=clean_env(tmp_path), capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert shown.splitlines()[-1].startswith(f"{venv}/bin/python -m pytest ")


def test_the_version_of_torch_is_the_one_that_pip_knows(
    tmp_path: Path, make_venv: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text('__version__ = "2.15.0+cu132"\n')
    (tmp_path / "torch-2.15.0.dist-info").mkdir()
    (tmp_path / "torch-2.15.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.15.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert make_venv.find_torch(sys.executable) == ("2.15.0", str(tmp_path)), "pip refuses torch==2.15.0+cu132"


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
