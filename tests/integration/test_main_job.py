"""`torchrun -m distdiag.train --monitor`: real jobs of two ranks, healthy and with each injected fault, and their findings."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import REPOSITORY, Job, closed, launch, rows, shared, unwrapped, wait_for

pytestmark = [pytest.mark.job, pytest.mark.timeout(240)]

Train = Callable[..., AbstractContextManager[Job]]
FAULTS = str(REPOSITORY / "distdiag" / "train" / "faults.py")


@pytest.fixture
def train(tmp_path: Path, images: Path) -> Train:
    """Return a function that starts the recorded reference job on two ranks."""

    def start(*options: str, fork_ranks: bool = False) -> AbstractContextManager[Job]:
        arguments = ["-m", "distdiag.train", "--monitor", "--run-dir", "R", "--batch-size", "8", *options]
        data = {"DISTDIAG_DATA": str(images)}
        return launch(arguments, nproc=2, cwd=tmp_path, env=data, timeout=200.0, fork_ranks=fork_ranks)

    return start


def findings(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(j) for (j,) in rows(run_dir, "SELECT json FROM finding")]


def meta(run_dir: Path) -> dict[str, str]:
    return dict(rows(run_dir, "SELECT key, value FROM meta"))


def found(run_dir: Path, kinds: Sequence[str]) -> dict[str, Any] | None:
    return next((f for f in findings(run_dir) if f["kind"] in kinds), None)


def serious(run_dir: Path) -> list[tuple[str, str, list[int]]]:
    return [(f["kind"], f["cause"], f["culprits"]) for f in findings(run_dir) if f["severity"] in ("warning", "error")]


def distdiag(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "distdiag", *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


def ended(run_dir: Path) -> None:
    """Wait until the monitor has written its last rows, which may be after the launcher's end."""
    closed(run_dir)


def test_a_healthy_run_is_recorded_shown_and_has_no_findings(tmp_path: Path, train: Train) -> None:
    run = tmp_path / "R"
    with train("--max-steps", "60") as job:
        wait_for(lambda: meta(run).get("state") == "running", 120, "the run to begin", job)
        live = distdiag("tui", "R", "--once", cwd=tmp_path)
        assert job.wait() == 0, job.tail()
        ended(run)
        # the monitor prints its summary last; the launcher may have ended by then
        wait_for(lambda: re.search("nothing found|no error or warning found", job.stderr()), 30, "the summary")
    assert live.returncode == 0, live.stderr
    assert "RUNNING" in live.stdout and "rank" in live.stdout
    after = distdiag("tui", "R", "--once", cwd=tmp_path)
    assert after.returncode == 0 and "ENDED" in after.stdout
    verdict = distdiag("diagnose", "R", "--json", cwd=tmp_path)
    report = json.loads(verdict.stdout)
    assert verdict.returncode == 0, verdict.stdout
    assert report["schema"] == "distdiag.findings/1" and report["state"] == "ended"
    assert [f for f in report["findings"] if f["severity"] != "info"] == []
    con = sqlite3.connect(run / "run.db")
    assert con.execute("SELECT rank, count(*), max(step) FROM step GROUP BY rank").fetchall() == [
        (0, 60, 60),
        (1, 60, 60),
    ]
    whole, parts, wait = con.execute(
        "SELECT sum(step_ms), sum(data_ms + forward_ms + backward_ms + optimizer_ms + other_ms), sum(wait_ms) FROM step"
    ).fetchone()
    con.close()
    assert 0.98 * (whole - wait) < parts < 1.02 * whole  # waiting for DDP's buffers is in no phase


def test_training_continues_without_its_monitor_and_has_no_findings(tmp_path: Path, train: Train) -> None:
    """A rank starts another monitor; the rank that reads the data for all does not keep more memory than the others."""
    run = tmp_path / "R"
    options = ["--max-steps", "80", "--validate-every", "0", "--data", str(shared("cifar-10-batches-py"))]
    with train(*options, fork_ranks=True) as job:
        wait_for(lambda: meta(run).get("state") == "running", 120, "the run to begin", job)
        monitors = job.monitor_pids()
        assert len(monitors) == 1
        os.kill(monitors[0], signal.SIGKILL)
        assert job.wait() == 0, job.tail()
        ended(run)
        assert "CIFAR-10 (50,000 + 10,000 images)" in job.stdout()
    screen = distdiag("tui", "R", "--once", cwd=tmp_path)
    assert screen.returncode == 0
    assert "ended" in screen.stdout.splitlines()[0] and "step 80/80" in screen.stdout
    assert meta(run)["monitor_pid"] != str(monitors[0])
    assert serious(run) == []


def test_a_deadlock_is_proved_and_printed_while_the_job_hangs(tmp_path: Path, train: Train) -> None:
    run = tmp_path / "R"
    with train("--max-steps", "200", "--inject", "deadlock@rank1:step20", fork_ranks=True) as job:
        finding = wait_for(lambda: found(run, ["deadlock"]), 150, "the deadlock to be found", job)
        wait_for(lambda: "ERROR deadlock" in job.stderr(), 10, "the deadlock to be reported", job)
        dump = distdiag("dump", "R", cwd=tmp_path)
        output = [line for line in unwrapped(job.stderr()).splitlines() if line.startswith("[distdiag]")]
    assert (finding["cause"], finding["certainty"], finding["severity"]) == ("missing_rank", "proved", "error")
    assert (finding["culprits"], finding["victims"]) == ([1], [0])
    place = finding["where"][0]
    source = Path(FAULTS).read_text().splitlines()
    assert place["file"] == FAULTS and "barrier(" in source[place["line"] - 1]
    assert finding["detected_s"] - finding["first_seen_s"] <= 3.0
    assert serious(run) == [("deadlock", "missing_rank", [1])]
    assert finding["evidence"] and all((run / path).exists() for path in finding["evidence"])
    assert dump.returncode == 0 and "1 rank (1)" in dump.stdout and "wait_for_the_others" in dump.stdout
    assert [line.split()[1] for line in output[1:5]] == ["more", "cost", "where", "do"]


def place(finding: dict[str, Any], rank: int) -> Path:
    """Return the file of the line that a finding names on a rank."""
    (at, *_) = [w for w in finding["where"] if w["rank"] == rank]
    assert at["line"] > 0
    return Path(at["file"])


def test_uneven_batches_and_a_nan_are_found(tmp_path: Path, train: Train) -> None:
    run = tmp_path / "R"
    options = ["--max-steps", "60", "--inject", "uneven@rank1", "--inject", "nan@rank1:step20"]
    with train(*options, fork_ranks=True) as job:
        uneven = wait_for(lambda: found(run, ["uneven_batches"]), 150, "the uneven share to be found", job)
        nan = wait_for(lambda: found(run, ["nonfinite"]), 150, "the NaN to be found", job)
    assert (uneven["cause"], uneven["culprits"]) == ("count", [1])
    assert nan["cause"] in ("loss", "gradient") and nan["culprits"] == [1]
    assert all(place(f, 1).is_relative_to(REPOSITORY / "distdiag") for f in (uneven, nan))
    assert {k for k, _, _ in serious(run)} <= {"uneven_batches", "nonfinite", "deadlock"}


def test_unused_parameters_are_named(tmp_path: Path, train: Train) -> None:
    run = tmp_path / "R"
    with train("--max-steps", "60", "--inject", "unused", fork_ranks=True) as job:
        finding = wait_for(lambda: found(run, ["unused_parameters"]), 150, "unused parameters to be found", job)
    assert (finding["cause"], finding["culprits"]) == ("never_used", [])
    assert sorted(finding["names"]) == ["auxiliary_head.bias", "auxiliary_head.weight"]
    assert "never called auxiliary_head" in finding["message"]
    assert {k for k, _, _ in serious(run)} <= {"unused_parameters", "deadlock"}


def test_a_straggler_is_named_with_its_phase(tmp_path: Path, train: Train) -> None:
    run = tmp_path / "R"
    with train("--max-steps", "400", "--inject", "straggler@rank1:120ms", fork_ranks=True) as job:
        finding = wait_for(lambda: found(run, ["straggler"]), 150, "the straggler to be found", job)
    assert (finding["cause"], finding["culprits"], finding["victims"]) == ("forward", [1], [0])


def test_a_rank_killed_from_outside_is_named_and_the_monitor_continues(tmp_path: Path, train: Train) -> None:
    run = tmp_path / "R"
    with train("--max-steps", "2000") as job:
        wait_for(lambda: meta(run).get("state") == "running", 120, "the run to begin", job)
        os.kill(job.rank_pid(1), signal.SIGKILL)
        finding = wait_for(lambda: found(run, ["rank_lost"]), 60, "the lost rank to be found", job)
        job.wait()
        ended(run)
    assert (finding["cause"], finding["culprits"]) == ("killed", [1])
    assert (
        "SIGKILL" in finding["message"] or "a signal" in finding["message"]
    )  # its parent may reap it before the monitor reads its status
    assert meta(run)["state"] == "failed"
    assert serious(run) == [("rank_lost", "killed", [1])]
