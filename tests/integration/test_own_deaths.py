"""Our own processes are killed, stopped or starved while a hang is being proved; disks fail; pids come back; users share a node."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.failing_disk import failing_disk
from tests.integration.test_autopsy import JOB
from tests.jobs import ONE_RANK, REPOSITORY, clean_env, closed, distdiag, launch, rows, start, wait_for

pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]


def hang(tmp_path: Path) -> list[dict]:
    """Return the open findings of severity error."""
    found = rows(tmp_path / "R", "SELECT json FROM finding WHERE severity = 'error' AND cleared_s IS NULL")
    return [json.loads(text) for (text,) in found]


@pytest.mark.parametrize("victim", ["monitor", "launcher", "reader"])
def test_a_kill_during_the_suspicion_costs_no_verdict(tmp_path: Path, victim: str) -> None:
    rng = random.Random(victim)
    (tmp_path / "train.py").write_text(textwrap.dedent(JOB))
    with launch(["-m", "distdiag.run", "--run-dir", "R", "train.py", "hang"], cwd=tmp_path, fork_ranks=True) as job:
        wait_for(
            lambda: b"E " in (tmp_path / "truth.0").read_bytes() if (tmp_path / "truth.0").exists() else None,
            60,
            "the hang",
            job,
        )
        reader = subprocess.Popen(
            [sys.executable, "-m", "distdiag", "dump", "R", "--no-save"], cwd=tmp_path, env=clean_env(tmp_path / "home"),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            time.sleep(rng.uniform(0.0, 0.8))
            pids = {"monitor": job.monitor_pids(), "launcher": [job.process.pid], "reader": [reader.pid]}
            for pid in pids[victim]:
                os.kill(pid, signal.SIGKILL)
            (found,) = wait_for(lambda: hang(tmp_path), 60, "the verdict")
        finally:
            reader.kill()
            reader.wait()
    assert (found["kind"], found["certainty"]) in {("deadlock", "proved"), ("mismatch", "proved")}, found


RANK = """
import os, sys, time
from pathlib import Path
if "steps" in sys.argv:
    import torch  # steps are counted only with it
import distdiag
run = distdiag.attach()
if "forks" in sys.argv and (pid := os.fork()) == 0:
    time.sleep(3)  # a child that outlives some beats of its parent, without a word
    os._exit(3)
for step in range(4000):
    run.step()
    time.sleep(0.05)
    if Path("end").exists():
        break
if "forks" in sys.argv:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
"""


def one_rank(tmp_path: Path, *arguments: str, **env: str):
    (tmp_path / "job.py").write_text(RANK)
    full = {**ONE_RANK, "MASTER_PORT": "29514", "DISTDIAG_RUN_DIR": "R", **env}
    return start([sys.executable, "job.py", *arguments], cwd=tmp_path, env=full)


def stepping(tmp_path: Path) -> int:
    ((step,),) = rows(tmp_path / "R", "SELECT coalesce(max(step), 0) FROM step") or [(0,)]
    return step


def test_a_monitor_that_was_stopped_goes_on_and_loses_no_step(tmp_path: Path) -> None:
    with one_rank(tmp_path, "steps") as job:
        wait_for(lambda: stepping(tmp_path) > 3, 60, "steps", job)
        (pid,) = job.monitor_pids()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(4)
        assert job.monitor_pids() == [pid]  # no second one: it still holds its lock
        os.kill(pid, signal.SIGCONT)
        before = stepping(tmp_path)
        wait_for(lambda: stepping(tmp_path) > before + 80, 60, "steps after it", job)
        (tmp_path / "end").touch()
        assert job.wait() == 0
        closed(tmp_path / "R")
    ((count, newest),) = rows(tmp_path / "R", "SELECT count(*), max(step) FROM step")
    assert count == newest
    assert rows(tmp_path / "R", "SELECT message FROM finding WHERE severity != 'info'") == []


def test_a_rank_that_was_stopped_is_named_and_then_goes_on(tmp_path: Path) -> None:
    with one_rank(tmp_path, "steps") as job:
        wait_for(lambda: stepping(tmp_path) > 3, 60, "steps", job)
        os.kill(job.process.pid, signal.SIGSTOP)
        wait_for(lambda: rows(tmp_path / "R", "SELECT life FROM rank") == [("stopped",)], 30, "its state")
        os.kill(job.process.pid, signal.SIGCONT)
        (tmp_path / "end").touch()
        assert job.wait() == 0
        closed(tmp_path / "R")
    assert rows(tmp_path / "R", "SELECT life, exit_code FROM rank") == [("finished", 0)]


def test_a_child_that_was_forked_after_the_start_is_no_rank(tmp_path: Path) -> None:
    with one_rank(tmp_path, "steps", "forks") as job:
        wait_for(lambda: stepping(tmp_path) > 3, 60, "steps", job)
        (tmp_path / "end").touch()
        assert job.wait() == 0, job.tail()
        closed(tmp_path / "R")
    assert rows(tmp_path / "R", "SELECT life, exit_code FROM rank") == [("finished", 0)]
    assert distdiag("diagnose", "R", cwd=tmp_path).returncode == 0


# in a new pid namespace, whose next pid can be set
REUSED = """
import json, os, pathlib, signal, subprocess, sys, time
env = {**os.environ, "DISTDIAG_RUN_DIR": "R"}
rank = subprocess.Popen([sys.executable, "job.py"], env=env)
def find(word):
    for p in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if word in (p / "cmdline").read_bytes():
                return int(p.name)
        except OSError:
            pass
end = time.monotonic() + 60
while not (find(b"distdiag.monitor") and pathlib.Path("R/run.db").exists()) and time.monotonic() < end:
    time.sleep(0.05)
time.sleep(1.5)
with_monitor = "monitor" in sys.argv
if with_monitor:
    os.kill(find(b"distdiag.monitor"), signal.SIGKILL)
os.kill(rank.pid, signal.SIGKILL)
rank.wait()
pathlib.Path("/proc/sys/kernel/ns_last_pid").write_text(str(rank.pid - 1))
other = subprocess.Popen(["sleep", "30"])
if not with_monitor:
    while find(b"distdiag.monitor") and time.monotonic() < end:
        time.sleep(0.05)
done = subprocess.run([sys.executable, "-m", "distdiag", "diagnose", "R", "--json"], env=env, capture_output=True, text=True)
lives = other.poll() is None
other.kill()
print(json.dumps({"reused": other.pid == rank.pid, "code": done.returncode, "verdict": json.loads(done.stdout), "lives": lives}))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a pid namespace")
@pytest.mark.parametrize("killed", ["", "monitor"])
def test_a_pid_that_another_process_gets_is_not_the_rank(tmp_path: Path, killed: str) -> None:
    (tmp_path / "job.py").write_text(RANK)
    (tmp_path / "all.py").write_text(REUSED)
    env = clean_env(tmp_path / "home", {**ONE_RANK, "MASTER_PORT": "29515", "PYTHONPATH": str(REPOSITORY)})
    done = subprocess.run(
        ["unshare", "-pf", "--mount-proc", "--kill-child", sys.executable, "all.py", killed], cwd=tmp_path, env=env,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["reused"] and found["lives"] and found["code"] == 1
    assert found["verdict"]["state"] == "failed", found["verdict"]


WRITES = """
import pathlib, sys
from distdiag.diagnosis.model.findings import Finding
from distdiag.store.rows import StepRow
from distdiag.store.writer import Writer
flag = pathlib.Path("failing")
w = Writer(pathlib.Path("R"))
for step in range(300):
    w.add([StepRow(rank=0, step=step, step_ms=1.0)])
    if step == 100:
        flag.touch()
        w.finding(Finding(kind="deadlock", severity="error", message="found while the disk failed"))
    if step == 200:
        flag.unlink()
    w._retry_at = 0.0
    w.commit()
    print(step, w.failed_writes, w.last_error)
w.close()
"""


def test_a_disk_that_fails_for_a_while_loses_no_row(tmp_path: Path) -> None:
    """EIO from every write to the database and its log, by a preloaded library: this needs no device mapper."""
    env = clean_env(tmp_path / "home", {"PYTHONPATH": str(REPOSITORY), **failing_disk(tmp_path, tmp_path / "failing")})
    done = subprocess.run(
        [sys.executable, "-c", WRITES], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    lines = [line.split(" ", 2) for line in done.stdout.splitlines()]
    assert lines[99][1:] == ["0", "None"] and "I/O error" in lines[150][2] and int(lines[199][1]) > 50
    assert lines[299][2] == "None"
    assert rows(tmp_path / "R", "SELECT count(*) FROM step") == [(300,)]
    assert rows(tmp_path / "R", "SELECT message FROM finding") == [("found while the disk failed",)]
    assert rows(tmp_path / "R", "PRAGMA integrity_check") == [("ok",)]
