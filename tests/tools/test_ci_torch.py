"""`.ci/torch` keeps the newest torch between runs of the gate; where it cannot be had, it gives the reason and leaves nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import REPOSITORY, clean_env

TORCH = "9.9.9"
NAME = f"torch-{TORCH}-py{sys.version_info[0]}.{sys.version_info[1]}"


def ci_torch(home: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    env = clean_env(home, {"PYTHON": sys.executable, "PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", **extra})
    for name in ("PIP_FIND_LINKS", "XDG_CACHE_HOME"):
        if name not in extra:
            env.pop(name, None)
    return subprocess.run(
        [REPOSITORY / ".ci/torch", TORCH], env=env, capture_output=True, text=True, timeout=120, check=False, cwd=home
    )


def kept(cache: Path) -> list[str]:
    return sorted(p.name for p in (cache / "distdiag-ci").iterdir() if p.is_dir())


def test_without_an_index_the_reason_is_given_and_nothing_is_left(tmp_path: Path) -> None:
    done = ci_torch(tmp_path)
    assert done.returncode == 1 and not done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"torch {TORCH} cannot be installed: ERROR: No matching distribution found"), done.stderr
    assert kept(tmp_path / ".cache") == []


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"NEEDED_GB": "100000000"}, "less than 100000000 GB are free in "),
        ({"XDG_CACHE_HOME": "/proc/nowhere"}, "no place in /proc/nowhere/distdiag-ci"),
        ({"PYTHON": "no-such-python"}, "no no-such-python"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, extra: dict[str, str], reason: str) -> None:
    done = ci_torch(tmp_path, **extra)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.splitlines()[-1].startswith(f"torch {TORCH} cannot be installed: {reason}")


def test_a_kept_environment_is_used_again_without_a_home(tmp_path: Path) -> None:
    python = tmp_path / "distdiag-ci" / NAME / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 0\n")  # it imports torch, in the version that its directory names
    python.chmod(0o755)
    done = ci_torch(tmp_path, XDG_CACHE_HOME=str(tmp_path), HOME="")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{python}\n", "")


def test_a_damaged_environment_is_not_used(tmp_path: Path) -> None:
    cache = tmp_path / ".cache"
    python = cache / "distdiag-ci" / NAME / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    (cache / "distdiag-ci" / f"{NAME}.partial").mkdir()  # of a run that was killed
    done = ci_torch(tmp_path, NEEDED_GB="100000000")
    assert done.returncode == 1 and kept(cache) == []
