"""Probes inside a training job: agreed on by all ranks, recorded, within their share of the time."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp

from distdiag.errors import DistdiagError
from distdiag.probekit.command import catalog
from distdiag.probekit.command.options import parse
from distdiag.probekit.in_job import running_job
from distdiag.store.rows import CollectiveRow
from distdiag.store.writer import Writer


@pytest.mark.parametrize(
    ("text", "names"),
    [("", ()), ("allreduce", ("allreduce",)), ("all_reduce, broadcast,allreduce", ("allreduce", "broadcast")), ("barrier", ("barrier",))],
)  # fmt: skip
def test_the_training_option_accepts_probe_names(text: str, names: tuple[str, ...]):
    assert catalog.parse_collectives(text) == names


@pytest.mark.parametrize("text", ["nothing", "step", "all", "allreduce,gpu"])
def test_probes_that_cannot_run_in_a_job_are_refused(text: str):
    with pytest.raises(DistdiagError):
        catalog.parse_collectives(text)


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


def train(rank: int, folder: str, run_dir: str, share: float, seconds: float) -> None:
    """Run a training with steps of 2 ms, as far as the probe sees it."""
    import torch.distributed as dist

    from distdiag.probekit.in_job.probe import InTrainingProbe

    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    probe = InTrainingProbe(("allreduce", "barrier"), every=10, run_dir=run_dir, share=share)
    began = time.monotonic()
    results = []
    step = 0
    more = True
    while more:
        time.sleep(0.002)
        step += 1
        results += probe.maybe_run(step)
        more = time.monotonic() - began < seconds
        if step % 50 == 0:  # all ranks end at the same step
            votes: list[Any] = [None, None]
            dist.all_gather_object(votes, more)
            more = votes[0]
        else:
            more = True
    summary = {
        "runs": probe.runs,
        "spent_s": probe.spent_s,
        "elapsed_s": time.monotonic() - began,
        "lost": probe.not_recorded,
    }
    summary["results"] = [r.as_json() for r in results]
    probe.close()
    dist.barrier()
    dist.destroy_process_group()
    Path(folder, f"rank{rank}.json").write_text(json.dumps(summary))
    os._exit(0)


@pytest.mark.job
@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize("share", [0.3, 0.01])
def test_a_probe_in_a_job_runs_between_steps_within_its_share_and_is_recorded(
    share: float, tmp_path: Path, run_dir: Path
):
    seconds = 3.0 if share > 0.1 else 1.0
    mp.start_processes(train, (str(tmp_path), str(run_dir), share, seconds), nprocs=2, start_method="fork")  # type: ignore[attr-defined]

    mine, other = (json.loads((tmp_path / f"rank{r}.json").read_text()) for r in (0, 1))
    assert mine["runs"] == other["runs"]
    with sqlite3.connect(run_dir / "run.db") as con:
        rows = con.execute("SELECT t_s, name, verdict, json FROM probe").fetchall()
    con.close()
    # The decisions cost a broadcast, which a neighbour may slow down.
    assert mine["spent_s"] <= 2 * share * mine["elapsed_s"] + 0.1
    if share < 0.1:
        return
    assert mine["runs"] >= 1 and other["results"] == []
    assert [name for _, name, _, _ in rows] == ["allreduce", "barrier"] * mine["runs"] and mine["lost"] == 0
    t_s, _, verdict, text = rows[0]
    data = json.loads(text)
    assert data["schema"] == "distdiag.probe/1" and verdict == "pass" and t_s > 0
    assert data["details"]["inside"] and data["details"]["step"] % 10 == 0
    assert [r["bytes"] for r in data["rows"]] == [64 * 2**10, 4 * 2**20] and all(
        r["busbw_gbps"] > 0 for r in data["rows"]
    )
    # 4 MB in 4 ms: the rate of the job's own all_reduce is shown next to it.
    assert data["details"]["job"]["busbw_gbps"] == pytest.approx(1.0) and data["details"]["job"]["count"] == 20


def test_a_process_without_a_group_runs_no_probe():
    from distdiag.probekit.in_job.probe import InTrainingProbe

    probe = InTrainingProbe(("allreduce",), every=1)
    assert probe.maybe_run(1) == [] and not probe.active
    probe.close()


# ---------------------------------------------------------------------- next to a running job, from another terminal


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
