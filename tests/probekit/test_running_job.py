"""A probe next to a running job, from another terminal."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distdiag.probekit.command import running_job
from distdiag.probekit.command.options import parse
from distdiag.store.rows import CollectiveRow
from distdiag.store.writer import Writer


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A run whose monitor has written some of the job's own collectives."""
    path = tmp_path / "run"
    path.mkdir()
    with Writer(path) as writer:  # open as long as the test runs: a live monitor
        writer.meta(started_unix_s=time.time(), heartbeat_unix_s=time.time(), name="mine", world_size=2)
        writer.add(
            [
                CollectiveRow(
                    pgroup="default_pg", seq=i, op="all_reduce", dtype="float32", bytes=4_000_000, ranks=2, t_s=float(i),
                    duration_us=4000.0, skew_us=10.0, late_rank=None, step=i,
                )
                for i in range(20)
            ]
        )  # fmt: skip
        writer.commit()
        yield path


def test_a_probe_next_to_a_running_job_warns_and_is_recorded_in_its_run(run_dir: Path, make_result: Any, make_row: Any):
    options = parse(["--run", str(run_dir), "--budget", "7"], "allreduce")
    run = running_job.find_run(options)
    assert run is not None and run.live and run.name == "mine" and run.world_size == 2
    warning = run.warning(options)
    assert "run mine is running here" in warning and "7 s" in warning and "2 ranks" in warning

    result = make_result([make_row(2**20, 1000.0), make_row(2**22, 4200.0)])
    result.reasons.append("fine")
    run.shown_against_job([result])
    assert "the job's own all_reduce of 4,000,000 bytes reaches 1.00 GB/s (20 calls" in result.notes[-1]
    assert "1.00 GB/s at 4,194,304" in result.notes[-1]

    assert "recorded into" in run.record([result])
    with sqlite3.connect(run_dir / "run.db") as con:
        ((t_s, name, verdict, text),) = con.execute("SELECT t_s, name, verdict, json FROM probe").fetchall()
    con.close()
    assert name == "allreduce" and verdict == "pass" and t_s >= 0 and json.loads(text)["probe"] == "allreduce"


def test_a_finished_run_is_not_written_unless_named(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    with sqlite3.connect(run_dir / "run.db") as con:
        con.execute("INSERT OR REPLACE INTO meta VALUES ('monitor_ended', '1')")
    con.close()
    named = running_job.find_run(parse(["--run", str(run_dir)], "allreduce"))
    assert named is not None and not named.live
    monkeypatch.setenv("DISTDIAG_RUN_DIR", str(run_dir))
    assert running_job.find_run(parse([], "allreduce")) is None
    assert running_job.find_run(parse(["--no-record"], "allreduce")) is None


def test_an_unwritable_run_is_reported_and_does_not_fail_the_probe(run_dir: Path, make_result: Any, make_row: Any):
    run = running_job.find_run(parse(["--run", str(run_dir)], "allreduce"))
    assert run is not None
    with sqlite3.connect(run_dir / "run.db") as con:
        con.execute("DROP TABLE probe")
    con.close()
    assert "not recorded" in run.record([make_result([make_row()])])
