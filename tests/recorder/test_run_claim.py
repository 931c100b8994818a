"""Where a run is written: all ranks of a job agree, attempts and jobs are kept apart, nothing is overwritten."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from distdiag.recorder import run_claim
from distdiag.store import rundir
from tests.jobs import REPOSITORY, clean_env

CLAIM = "import sys; from distdiag.recorder import run_claim; print(run_claim.claim(sys.argv[1] or None, 'job'))"


def claims(tmp_path: Path, run_dir: str, ranks: int, **env: str) -> set[str]:
    """The answers of `ranks` processes that ask at the same time."""
    full = clean_env(tmp_path / "home", {"PYTHONPATH": str(REPOSITORY), "MASTER_PORT": "29500", **env})

    def ask(rank: int) -> str:
        done = subprocess.run(
            [sys.executable, "-c", CLAIM, run_dir], cwd=tmp_path, env={**full, "RANK": str(rank)},
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    with ThreadPoolExecutor(ranks) as pool:
        return set(pool.map(ask, range(ranks)))


def test_ranks_that_ask_at_once_get_one_answer(tmp_path: Path) -> None:
    assert claims(tmp_path, "R", 4, TORCHELASTIC_RUN_ID="a") == {str(tmp_path / "R")}


def test_without_a_directory_all_ranks_agree_on_a_new_one(tmp_path: Path) -> None:
    (answer,) = claims(tmp_path, "", 3, TORCHELASTIC_RUN_ID="a")
    assert Path(answer).parent == tmp_path / "reports" and answer.endswith("-job")


def test_a_restart_and_another_job_get_directories_of_their_own_and_readers_take_the_newest(tmp_path: Path) -> None:
    (first,) = claims(tmp_path, "R", 2, TORCHELASTIC_RUN_ID="a")
    (Path(first) / "run.db").touch()
    (second,) = claims(tmp_path, "R", 2, TORCHELASTIC_RUN_ID="a", TORCHELASTIC_RESTART_COUNT="1")
    assert second == str(tmp_path / "R" / "attempt_1")
    (Path(second) / "run.db").touch()
    (third,) = claims(tmp_path, "R", 2, TORCHELASTIC_RUN_ID="b")
    assert third == str(tmp_path / "R" / "attempt_2")
    assert claims(tmp_path, "R", 1, TORCHELASTIC_RUN_ID="a") == {first}
    (Path(third) / "run.db").touch()
    assert rundir.resolve(str(tmp_path / "R")) == Path(third)


def test_the_socket_of_a_rank_fits_into_a_socket_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x" * 300)
    pages = run_claim.page_dir(tmp_path / ("deep/" * 40))
    assert len(str(pages / "r4095.sock")) <= 107
