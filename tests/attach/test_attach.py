"""`distdiag attach` on real jobs that nobody recorded: hung ones, healthy ones that go on, and bad input."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from distdiag.attach import ranks, sample, verdict
from distdiag.attach.ranks import Candidate, Job
from distdiag.attach.sample import Sample, py_spy
from distdiag.errors import DistdiagError
from distdiag.sources.stacks.calls import position
from distdiag.sources.stacks.frames import Frame, Process, Stack
from tests.jobs import REPOSITORY, distdiag, free_port, launch, start, wait_for
from tests.jobs import Job as Started
from tests.standins import needs_stream

JOBS = REPOSITORY / "tests" / "faults" / "jobs"


def _no_py_spy() -> str:
    try:
        py_spy()
    except DistdiagError as e:
        return str(e)
    return ""


needs_py_spy = pytest.mark.skipif(bool(_no_py_spy()), reason=_no_py_spy() or "py-spy is here")


@contextmanager
def plain(name: str, ranks: int, how: str) -> Iterator[Started]:
    """Start a job of the collection without distdiag: by torchrun, by itself, or each rank with its variables set.

    A forked launcher is torchrun without its import, and its ranks are started as always; forked ranks cannot be attached to.
    """
    script = JOBS / f"{name}.py"
    if how.startswith("forked"):
        with launch([script], nproc=ranks, timeout=170, fork_ranks=how == "forked ranks") as job:
            yield job
        return
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        script,
    ]
    if how == "spawn":
        command = [sys.executable, script]
    elif how == "environment":
        port = free_port()
        given = f"WORLD_SIZE={ranks} MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
        one = [f"RANK={r} LOCAL_RANK={r} {given} {sys.executable} {script} &" for r in range(ranks)]
        command = ["bash", "-c", " ".join([*one, "wait"])]
    with start(command, timeout=170) as job:
        yield job


def attach(job: Started, *options: str) -> dict[str, Any]:
    ended = distdiag("attach", str(job.process.pid), "--json", *options, timeout=90)
    if not ended.stdout:  # a rank ended, or began, while it was sampled
        assert "error:" in ended.stderr and "Traceback" not in ended.stderr, ended.stderr
        return {}
    return json.loads(ended.stdout)


HUNG = [  # job, ranks, launch; who is named, at which lines
    ("unet_cells", 3, "environment", {0}, {(0, 88), (1, 101), (2, 101)}),
    ("grad_reduce", 3, "forked launcher", {0}, {(0, 32), (1, 34), (2, 34)}),
    ("spawn_early", 2, "spawn", {1}, {(0, 44), (1, 51)}),
    ("polite_night", 2, "torchrun", {1}, {(0, 50)}),
    ("nfs_tiles", 2, "environment", {1}, {(1, 53), (1, 29), (0, 56)}),  # line 29: in a worker of its loader
    ("tensor_rows", 4, "forked launcher", set(), {(0, 53), (1, 56), (2, 56), (3, 53)}),
    ("registry_retry", 2, "forked launcher", {1}, {(1, 30), (0, 41)}),
]


@pytest.mark.job
@needs_py_spy
@pytest.mark.parametrize(("name", "size", "how", "culprits", "sites"), HUNG, ids=[f"{x[0]}-{x[2]}" for x in HUNG])
def test_hung_job(name: str, size: int, how: str, culprits: set[int], sites: set[tuple[int, int]]) -> None:
    with plain(name, size, how) as job:

        def verdict() -> dict[str, Any] | None:
            found = attach(job)
            return found if any(f["severity"] != "info" for f in found.get("findings", ())) else None

        def stands() -> dict[str, Any] | None:
            found = verdict()  # a job that starts slowly waits for its slowest rank, too
            shown = {
                (w["rank"], w["line"]) for f in (found or {}).get("findings", ()) for w in (*f["where"], *f["waiting"])
            }
            return found if found is not None and sites <= shown else None

        found = wait_for(stands, 120, "the verdict", job)
        (finding,) = found["findings"]
        assert found["schema"] == "distdiag.findings/1"
        assert set(finding["culprits"]) == culprits, finding
        assert finding["certainty"] == "suspected"
        assert all(w["file"] == str(JOBS / f"{name}.py") for w in (*finding["where"], *finding["waiting"]) if w["file"])
        assert "#" not in finding["message"]
        assert any("longest pause" in note for note in found["notes"])


@pytest.mark.job
@needs_py_spy
@needs_stream
def test_a_host_that_spins_for_its_device_counts_as_waiting() -> None:
    """NCCL's calls return at once; the host waits later, and a waiting host looks busy."""
    env = {"PYTHONPATH": str(REPOSITORY / "tests" / "standins" / "stream")}
    with launch([JOBS / "grad_reduce.py"], nproc=3, timeout=170, env=env) as job:

        def verdict() -> dict[str, Any] | None:
            found = attach(job)
            return found if found.get("findings") else None

        found = wait_for(verdict, 150, "the verdict", job)
    (finding,) = found["findings"]
    assert (finding["kind"], finding["certainty"]) == ("stall", "suspected")
    assert {w["rank"] for w in (*finding["where"], *finding["waiting"])} == {0, 1, 2}


@pytest.mark.job
@needs_py_spy
@pytest.mark.parametrize(
    ("name", "size", "how"), [("kmeans", 2, "torchrun"), ("spawn_fine", 2, "spawn"), ("micro_accum", 2, "environment")]
)
def test_healthy_job_goes_on_and_ends_as_without(name: str, size: int, how: str) -> None:
    with plain(name, size, "spawn" if how == "spawn" else "forked ranks") as alone, plain(name, size, how) as job:
        seen = 0
        while job.process.poll() is None and seen < 3:
            found = attach(job)
            seen += found.get("ranks_seen", 0) == size and "error" not in found
            bad = [f for f in found.get("findings", ()) if f["severity"] == "error"]
            assert not bad, bad
        assert job.wait() == 0, job.tail()
        assert alone.wait() == 0, alone.tail()
        assert seen
        assert _results(job) == _results(alone)


def _results(job: Started) -> list[str]:
    """Return what a job printed, without times."""
    return sorted(
        " ".join(w for w in line.split() if not w.rstrip("s").replace(".", "").isdigit() or "." not in w)
        for line in job.stdout().splitlines()
    )


# -- which processes are a job -----------------------------------------------------------------------------------------


def test_bad_pids_are_one_line_and_a_hint() -> None:
    if _no_py_spy():
        pytest.skip(_no_py_spy())
    for given, words in (
        (["4194304"], "no such process"),
        ([], "name the job"),
        (["--job", "x", "--here"], "name the job"),
        (["--job", "no-such-job"], "no"),
        (["0"], "0"),
    ):
        ended = distdiag("attach", *given)
        assert ended.returncode in (2, 4), (given, ended)
        lines = ended.stderr.splitlines()
        assert len(lines) == 2 and lines[0].startswith("distdiag: error: ") and lines[1].startswith("hint: "), (
            ended.stderr
        )
        assert words in lines[0]
        assert not ended.stdout


@needs_py_spy
def test_a_process_without_torch_is_refused() -> None:
    with start([sys.executable, "-c", "import time; time.sleep(60)"]) as job:
        ended = distdiag("attach", str(job.process.pid))
        assert ended.returncode == 2
        assert "has not loaded torch" in ended.stderr


def test_missing_py_spy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DistdiagError, match="py-spy") as e:
        py_spy()
    assert e.value.hint == "pip install py-spy"


def process(pid: int, parent: int = 1, env: dict[str, str] | None = None, *command: str) -> Candidate:
    found = Candidate(pid, parent, pid, env or {}, command or ("python", "train.py"))
    found.__dict__["maps"] = b"/x/libtorch_cpu.so\n"
    return found


def here(monkeypatch: pytest.MonkeyPatch, *found: Candidate) -> list[Job]:
    monkeypatch.setattr(ranks, "living", lambda: iter(found))
    return ranks.jobs_here()


def rank(n: int, of: int, port: int = 29500, **more: str) -> dict[str, str]:
    return {"RANK": str(n), "WORLD_SIZE": str(of), "MASTER_PORT": str(port), **more}


def test_jobs_are_told_apart_by_port_and_run_id(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = here(
        monkeypatch,
        process(10), process(11, 10, rank(0, 2)), process(12, 10, rank(1, 2)),
        process(20), process(21, 20, rank(0, 2, 29501)), process(22, 20, rank(1, 2, 29501)),
    )  # fmt: skip
    assert [[p.pid for p in j.processes] for j in jobs] == [[11, 12], [21, 22]]
    assert jobs[0].described == "job train.py: launcher 10, ranks 0, 1 (pids 11, 12)"
    with pytest.raises(DistdiagError, match="2 jobs") as e:
        ranks.chosen((), None, jobs)
    assert e.value.code == 2
    assert "29501" in e.value.hint
    assert ranks.chosen((), "29501", jobs) is jobs[1]
    assert ranks.chosen((10,), None, jobs) is ranks.chosen((12,), None, jobs) is jobs[0]
    with pytest.raises(DistdiagError, match="2 jobs"):
        ranks.chosen((11, 21), None, jobs)


def test_workers_launchers_and_helpers_are_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "7"}
    jobs = here(
        monkeypatch,
        process(10, 1, slurm, "python", "torchrun"),
        process(11, 10, slurm | rank(0, 2)), process(12, 10, slurm | rank(1, 2)),
        process(13, 11, slurm | rank(0, 2)),  # a worker of rank 0's loader
        process(14, 11, slurm | rank(0, 2), "python", "-c", "from multiprocessing.resource_tracker import main"),
    )  # fmt: skip
    assert [[p.pid for p in j.processes] for j in jobs] == [[11, 12]]
    assert ranks.chosen((13,), None, jobs) is jobs[0]
    assert "7" in jobs[0].names


def test_children_that_were_spawned_are_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = ("python", "-c", "from multiprocessing.spawn import spawn_main", "--multiprocessing-fork")
    jobs = here(
        monkeypatch, process(10), process(11, 10, {}, *fork), process(12, 10, {}, *fork), process(13, 11, {}, *fork)
    )
    assert [[p.pid for p in j.processes] for j in jobs] == [[11, 12]]
    assert jobs[0].names[0] == "10"
    assert jobs[0].world is None
    assert jobs[0].described == "job train.py: launcher 10, 2 ranks (pids 11, 12)"


def test_ranks_of_other_hosts_are_not_expected_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def node(n: int) -> dict[str, str]:
        return rank(n, 8, LOCAL_RANK=str(n - 4), LOCAL_WORLD_SIZE="4", MASTER_ADDR="node0")

    (job,) = here(monkeypatch, process(10), *(process(n + 10, 10, node(n)) for n in (4, 5, 7)))
    assert job.world == 8
    assert job.expected({4, 5, 7}) == {4, 5, 6, 7}


# -- the verdict on samples --------------------------------------------------------------------------------------------

C10D = "/x/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py"


def in_all_reduce(pid: int, line: int = 7) -> Sample:
    frames = (Frame("all_reduce", C10D, 9), Frame("fit", "/nowhere/train.py", line, {"i": "3"}, {"i": 5}))
    return Sample(Process(pid, (Stack(frames, (), True, "MainThread"),)), paused_s=0.01)


def sampled(monkeypatch: pytest.MonkeyPatch, samples: dict[int, Sample]) -> None:
    monkeypatch.setattr(sample, "take", lambda found, native=False: {p.pid: samples[p.pid] for p in found})
    monkeypatch.setattr(verdict.time, "sleep", lambda s: None)


def test_no_permission_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = here(monkeypatch, process(11, 1, rank(0, 1)))
    sampled(monkeypatch, {11: Sample(error="Permission Denied: Try running again with elevated permissions")})
    with pytest.raises(DistdiagError, match="no permission") as e:
        verdict.attach(job)
    assert all(
        words in e.value.hint for words in ("CAP_SYS_PTRACE", "kubectl debug --profile=sysadmin", "ptrace_scope")
    )
    sampled(monkeypatch, {11: Sample(error="it has ended")})
    with pytest.raises(DistdiagError, match="has ended") as e:
        verdict.attach(job)
    assert e.value.code == 4


def a_recorded_rank() -> Candidate:
    recorded = process(11, 1, rank(0, 1), "python", "-m", "distdiag.run", "--run-dir", "/runs/a b", "train.py")
    recorded.__dict__["maps"] += b"7f0 rw-s 0 00:1a 5 /dev/shm/distdiag-1000/x/rank_0.page\n"
    return recorded


def test_of_two_jobs_the_one_that_is_not_recorded_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    other, third = (process(pid, 1, rank(0, 1, port)) for pid, port in ((21, 29501), (31, 29502)))
    recorded, job = here(monkeypatch, a_recorded_rank(), other)
    assert ranks.chosen((), None, [recorded, job]) is job and ranks.chosen((), None, [recorded]) is recorded
    with pytest.raises(DistdiagError, match="3 jobs") as e:
        ranks.chosen((), None, here(monkeypatch, a_recorded_rank(), other, third))
    assert e.value.hint.count("recorded") == 1


def test_a_recorded_job_is_left_to_diagnose(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = here(monkeypatch, a_recorded_rank())
    with pytest.raises(DistdiagError, match="recorded") as e:
        verdict.attach(job)
    assert e.value.hint == "distdiag diagnose '/runs/a b'"


def test_ranks_without_a_process_and_on_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
    pair = [process(11, 1, rank(0, 3) | local), process(12, 1, rank(1, 3) | local | {"LOCAL_RANK": "1"})]
    (job,) = here(monkeypatch, *pair)
    sampled(monkeypatch, {11: in_all_reduce(11), 12: in_all_reduce(12)})
    report = verdict.attach(job)
    (finding,) = report.findings
    assert (finding.kind, finding.cause, finding.culprits, finding.victims) == ("rank_lost", "silent", (2,), (0, 1))
    two = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "exp 7"}
    (job,) = here(monkeypatch, process(11, 1, rank(0, 2) | two))
    report = verdict.attach(job)
    waits = "rank 0 waits in all_reduce at train.py:7 in fit, and the stacks of the ranks that it waits for are missing"
    assert report.unjudged == f"{waits}; 1 of 2 ranks are on other hosts"
    assert "on each of them run: distdiag attach --job 'exp 7'" in report.notes
    assert not report.findings


def test_pauses_are_printed_and_a_data_worker_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = ("python", "-c", "spawn_main", "--multiprocessing-fork")
    (job,) = here(monkeypatch, process(10), *(process(pid, 10, {}, *fork) for pid in (11, 12, 13)))
    worker = Frame("_worker_loop", "/x/lib/python3.12/site-packages/torch/utils/data/_utils/worker.py", 1)
    samples = {
        11: in_all_reduce(11),
        12: in_all_reduce(12),
        13: Sample(Process(13, (Stack((worker,), name="MainThread"),))),
    }
    sampled(monkeypatch, samples)
    report = verdict.attach(job)
    assert report.ranks_seen == report.world_size == 2
    assert any("the longest pause: 10 ms (rank 1)" in note for note in report.notes)
    assert any("order in which their processes started" in note for note in report.notes)


def test_a_rank_that_ends_while_it_is_sampled_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = here(monkeypatch, process(11, 1, rank(0, 2)), process(12, 1, rank(1, 2)))
    waiting, leaving = in_all_reduce(11), in_all_reduce(12, line=9)
    taken = iter([{11: waiting, 12: leaving}, {11: waiting, 12: Sample(error=sample.ENDED)}, {11: waiting}])
    monkeypatch.setattr(sample, "take", lambda found, native=False: next(taken) if list(found) else {})
    monkeypatch.setattr(verdict.time, "sleep", lambda s: None)
    report = verdict.attach(job)
    assert not [f for f in report.findings if f.severity != "info"]
    assert "rank 1 ended while the job was sampled" in report.notes


def taken_over_time(monkeypatch: pytest.MonkeyPatch, *rounds: dict[int, Sample]) -> list[float]:
    """Let `sample.take` return these samples in turn, then the last ones again; return the list of pauses between them."""
    left, slept = list(rounds), []

    def take(found: list[Candidate], native: bool = False) -> dict[int, Sample]:
        pids = [p.pid for p in found]
        if not pids:
            return {}
        samples = left.pop(0) if len(left) > 1 else left[0]
        return {pid: samples[pid] for pid in pids}

    monkeypatch.setattr(sample, "take", take)
    monkeypatch.setattr(verdict.time, "sleep", slept.append)
    return slept


def busy_sample(pid: int, line: int, **more: float) -> Sample:
    user = Frame("fit", "/nowhere/train.py", line, {"i": "3"}, {"i": 5})
    return Sample(Process(pid, (Stack((user,), (), False, "MainThread"),)), **more)


def test_a_rank_without_a_cpu_is_sampled_again_and_then_left_unjudged(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = here(monkeypatch, process(11, 1, rank(0, 2)), process(12, 1, rank(1, 2)))

    def at_s(t: float, queued_s: float) -> dict[int, Sample]:
        waiting = in_all_reduce(11)
        waiting.at_s = t
        return {11: waiting, 12: busy_sample(12, 9, at_s=t, queued_s=queued_s, cpu_s=t - queued_s)}

    slept = taken_over_time(monkeypatch, *(at_s(t, 0.9 * t) for t in (0.0, 1.0, 2.5, 4.0, 5.5, 7.0)))
    report = verdict.attach(job)
    assert len(slept) == 2 + verdict.AGAIN
    assert report.unjudged == "rank 1 waited for a CPU for 6.3 of 7.0 s: attach again"
    assert all(f.severity == "info" for f in report.findings)
    # the same rank, when it gets a CPU and is still at that line
    slept = taken_over_time(monkeypatch, at_s(0.0, 0.0), at_s(1.0, 0.9), at_s(2.5, 2.0), at_s(4.5, 2.1))
    report = verdict.attach(job)
    assert len(slept) == 3 and report.unjudged is None
    (finding,) = report.findings
    assert (finding.severity, finding.culprits) == ("warning", (1,))


def test_ranks_whose_loader_workers_work_are_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = here(monkeypatch, process(11, 1, rank(0, 2)), process(12, 1, rank(1, 2)))

    def waits(pid: int, t: float, children_s: float) -> Sample:
        recv = Frame("poll", "/opt/lib/python3.11/selectors.py", 415)
        user = Frame("main", "/nowhere/train.py", 51, {"x": "t"}, {"x": 5})
        stack = Stack((recv, user), ("recvmsg",), True, "MainThread")
        return Sample(Process(pid, (stack,)), at_s=t, children_s=children_s)

    assert position(waits(11, 0, 0).process.judged).activity == "socket"  # type: ignore[union-attr]
    for share, severities in ((0.5, []), (0.0, ["warning"])):
        times = [{pid: waits(pid, t, share * t) for pid in (11, 12)} for t in (0.0, 1.0, 2.5, 4.0, 5.5, 7.0)]
        taken_over_time(monkeypatch, *times)
        report = verdict.attach(job)
        assert [f.severity for f in report.findings] == severities
        assert (report.unjudged or "").startswith("rank 0 waits for its child processes" if share else "")


@needs_py_spy
def test_a_process_that_has_ended_has_no_sample() -> None:
    with start([sys.executable, "-c", "pass"]) as job:
        job.wait()
        gone = Candidate(job.process.pid, 1, 5, {}, ("python",))
        assert sample.take([gone])[gone.pid].error == sample.ENDED


@pytest.mark.job
@needs_py_spy
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="a namespace needs root and unshare")
def test_ranks_in_a_pid_namespace_are_found_from_outside() -> None:
    """As from the host of a container: by the pid that the host has for them."""
    port = free_port()
    one = [
        f"RANK={r} WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port} {sys.executable} {JOBS}/polite_night.py &"
        for r in (0, 1)
    ]
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "bash", "-c", " ".join([*one, "wait"])]
    with start(inside, timeout=170) as job:
        found = wait_for(lambda: (x := attach(job)).get("ranks_seen") == 2 and x, 120, "both ranks", job)
        assert "error" not in found
