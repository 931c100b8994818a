"""Everything of a job is killed at a random moment: what `diagnose` reports afterwards is true, and nothing is written into the run."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from distdiag import cgroups
from distdiag.page import directories
from tests.jobs import ONE_RANK, REPOSITORY, Job, distdiag, kill_marked, launch, rows, start, unwrapped, wait_for

pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]

SAMPLED_S = 0.8  # a busy rank's line is sampled twice a second, and later on a loaded machine
HANG_S = 2.5  # the monitor, or the pages alone, must explain a hang that is this old
# Each line that lasts writes its letter and the time first: what is known of the end is compared with it.
JOB = """
    import os, sys, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    phase, rank = sys.argv[1], dist.get_rank()
    out = os.open(f"truth.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    x, kept = torch.ones(512, 512), []

    def compute(seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            torch.mm(x, x)

    for step in range(100_000):
        if phase == "forward":
            os.write(out, b"A %d\\n" % time.monotonic_ns()); compute(0.4)  # A
            os.write(out, b"B %d\\n" % time.monotonic_ns()); compute(0.3)  # B
        if phase == "growing" and rank == 1:
            os.write(out, b"C %d\\n" % time.monotonic_ns()); kept.append(bytearray(os.urandom(1 << 20) * 16)); time.sleep(0.05)  # C
        if phase == "steps":
            os.write(out, b"D %d\\n" % time.monotonic_ns()); time.sleep(0.5)  # D
        if phase == "hang" and step == 20 and rank == 0:
            os.write(out, b"E %d\\n" % time.monotonic_ns()); dist.broadcast(x[0], 0)  # E
            os.write(out, b"H %d\\n" % time.monotonic_ns()); time.sleep(100)  # H
        os.write(out, b"F %d\\n" % time.monotonic_ns()); dist.all_reduce(x[0])  # F
        x.fill_(1.0)
        os.write(out, b"G %d\\n" % time.monotonic_ns()); time.sleep(0.02)  # G
"""
BROADCASTS = """
    import time

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP


    def main() -> None:
        dist.init_process_group("gloo")
        model = DDP(torch.nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(dist.get_rank())
        best = torch.zeros(1)
        for step in range(10000):
            loss = model(torch.randn(4, 8)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.05)
            if step % 20 < 19:
                dist.all_reduce(best)
                continue
            if dist.get_rank() == 0 and step > 50:
                dist.broadcast(best, 0)
            dist.all_reduce(best)


    main()
"""  # the job of docs/howto/gone.md
PHASES = ("forward", "hang", "growing", "steps")
# Each phase once, the hang before and after it is explained; two are evicted. AUTOPSY_SEEDS=20 tests the first 20.
SEEDS = range(int(os.environ.get("AUTOPSY_SEEDS", "0"))) or (0, 1, 3, 5, 9, 14)
_TEXT = textwrap.dedent(JOB).splitlines()
COMPUTES = {_TEXT.index("def compute(seconds):") + n for n in (2, 3, 4)}  # called by A and B
LINES = {m[1]: n for n, line in enumerate(_TEXT, 1) if (m := re.search(r"# ([A-H])$", line))}


def killed(job: Job, rng: random.Random, evicted: bool) -> float:
    """Kill ranks, monitor and launcher in random order; return when, in monotonic seconds."""
    pids = [*job.rank_pids().values(), *job.monitor_pids(), job.process.pid]
    rng.shuffle(pids)
    at = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGKILL) if evicted else (signal.SIGKILL,):
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        time.sleep(0.05 * evicted)
    kill_marked(job.mark)  # a rank that has seen the monitor die may have started another
    return at


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of every file; SQLite's index of its log is not data."""
    found = {str(p): p.lstat() for p in folder.rglob("*") if not p.name.endswith("-shm")}
    return {name: (st.st_size, st.st_mtime_ns) for name, st in found.items()}


def truth(tmp_path: Path, rank: int) -> list[tuple[str, float]]:
    """Return (letter, monotonic seconds) of each line that the rank began, in order."""
    marks = [line.split() for line in (tmp_path / f"truth.{rank}").read_text().splitlines()]
    return [(m[0], int(m[1]) / 1e9) for m in marks if len(m) == 2]


def was_at(tmp_path: Path, rank: int, end_s: float) -> set[int]:
    """Return the lines in which the rank was since the last sample that must have seen it."""
    marks = truth(tmp_path, rank)
    lately = {LINES[letter] for letter, t_s in marks if t_s >= end_s - SAMPLED_S}
    lately |= {LINES[letter] for letter, t_s in [m for m in marks if m[1] < end_s - SAMPLED_S][-1:]}
    return lately | (COMPUTES if lately & {LINES["A"], LINES["B"]} else set())


def verdict(tmp_path: Path) -> dict[str, Any]:
    before = tree(tmp_path / "R")
    pages = [d for found in directories.of_run(tmp_path / "R").values() for d in found]
    shown = [tree(d) for d in pages]
    done = distdiag("diagnose", "R", "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert tree(tmp_path / "R") == before and [tree(d) for d in pages] == shown
    return json.loads(done.stdout)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_reported_of_a_job_that_was_killed_is_true(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    phase = PHASES[seed % len(PHASES)]
    (tmp_path / "train.py").write_text(textwrap.dedent(JOB))
    with launch(["-m", "distdiag.run", "--run-dir", "R", "train.py", phase], cwd=tmp_path, fork_ranks=True) as job:
        wait_for(lambda: all((tmp_path / f"truth.{q}").exists() for q in (0, 1)), 60, "the ranks", job)
        time.sleep(rng.uniform(0.0, 6.0))
        end_s = killed(job, rng, evicted=seed % 5 == 4)
    found = verdict(tmp_path)
    directories_left = [d for dirs in directories.of_run(tmp_path / "R").values() for d in dirs]
    assert found["state"] == "failed" and found["ranks_seen"] == 2, found
    for seen in found["last_seen"]:
        allowed = was_at(tmp_path, seen["rank"], end_s)
        assert seen["file"] == str(tmp_path / "train.py") and seen["line"] in allowed, (seen, allowed, found)
    serious = [f for f in found["findings"] if f["severity"] == "error" and f["cleared_s"] is None]
    marks = [(letter, t_s) for letter, t_s in truth(tmp_path, 0) if letter == "E"]
    if not marks:
        assert serious == [], serious
    for f in serious:
        assert f["kind"] == "deadlock" or f["kind"] == "mismatch", f
        assert {w["line"] for w in (*f["where"], *f["waiting"])} <= {LINES["E"], LINES["F"]}, f
    if marks and end_s - marks[0][1] > HANG_S:
        assert serious, found
    text = distdiag("diagnose", "R", cwd=tmp_path).stdout
    assert "last seen:" in text and "ended without a last word" in text, text
    for d in directories_left:
        assert directories.remove(d)


GROWS = """
import sys, time
from pathlib import Path
import distdiag
run, kept = distdiag.attach(), []
for step in range(4000):
    run.step()
    if sys.argv[1] == "1" and Path("go").exists():
        kept.append(bytearray(b"x" * (8 << 20)))
    time.sleep(0.1)  # slower than the samples of the monitor
"""


@pytest.fixture
def limited() -> Iterator[Path]:
    """A memory cgroup of 256 MiB in this process's own."""
    above = cgroups.memory_cgroup()
    folder = (above or Path("/nowhere")) / f"distdiag-test-{os.getpid()}"
    limits = ("memory.limit_in_bytes", "memory.max", "memory.memsw.limit_in_bytes")
    try:
        folder.mkdir()
    except OSError as e:
        pytest.skip(f"no memory cgroup can be made here: {e}")
    try:
        for name in limits:
            if (folder / name).exists():
                (folder / name).write_text(str(256 << 20))
        if cgroups.oom_kills(folder) is None or not any((folder / n).exists() for n in limits):
            pytest.skip("this kernel counts no memory kills, or has no limit here")
        yield folder
    finally:
        wait_for(lambda: not (folder / "cgroup.procs").read_text(), 20, "the cgroup to be empty")
        folder.rmdir()


def test_a_kill_for_memory_is_named_with_the_rank_that_grew(tmp_path: Path, limited: Path) -> None:
    """The kernel kills the largest process; then everything else is killed, as with `memory.oom.group`."""
    (tmp_path / "job.py").write_text(GROWS)
    env = {**ONE_RANK, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29512", "DISTDIAG_RUN_DIR": "R"}
    inside = f'echo $$ > {limited}/cgroup.procs; exec "$@"'
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(
                start(["sh", "-c", inside, "sh", sys.executable, "job.py", str(q)], cwd=tmp_path,
                      env={**env, "RANK": str(q), "LOCAL_RANK": str(q)})
            )
            for q in (0, 1)
        ]  # fmt: skip
        query = "SELECT count(DISTINCT rank) FROM process WHERE t_s > 1"
        wait_for(lambda: rows(tmp_path / "R", query) == [(2,)], 60, "samples of both ranks")
        (tmp_path / "go").touch()
        end = time.monotonic() + 60
        while not cgroups.oom_kills(limited):
            assert time.monotonic() < end, "nothing was killed"
            time.sleep(0.001)
        for job in jobs:
            kill_marked(job.mark)
        found = verdict(tmp_path)
    assert "the kernel's out-of-memory killer ended 1 process of the job's cgroup" in found["state_text"], found
    assert any("memory: rank 1 grew by" in note for note in found["notes"]), found["notes"]
    for pages in (d for dirs in directories.of_run(tmp_path / "R").values() for d in dirs):
        directories.remove(pages)


def judged_of(text: str) -> list[str]:
    """Return the lines above the notes, joined, without folders, line numbers, times and counts."""
    lines = unwrapped(text).partition("\nnote: ")[0].splitlines()
    return [
        re.sub(r"\d+(\.\d+)? s\b|#\d+|(?<=:)\d+|(?<=line )\d+", "~", re.sub(r"[^\s`(]*/", "", line)) for line in lines
    ]


def test_the_page_on_killed_jobs_shows_what_is_printed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(BROADCASTS))
    command = ["-m", "distdiag.run", "--run-dir", "R", "train.py"]
    with launch(command, nproc=2, cwd=tmp_path, timeout=120, fork_ranks=True) as job:
        wait_for(lambda: "ERROR deadlock" in job.stderr(), 90, "the deadlock", job)
        time.sleep(HANG_S)  # not for luck: the age of the wait when everything is killed
        for number in (signal.SIGSTOP, signal.SIGKILL):  # at once: no rank sees another end
            for pid in (*job.monitor_pids(), job.process.pid, *job.rank_pids().values()):
                os.kill(pid, number)
        kill_marked(job.mark)
        shown = distdiag("diagnose", "R", cwd=tmp_path).stdout
    page = (REPOSITORY / "docs/howto/gone.md").read_text().partition("```text\n")[2].partition("```\n")[0]
    first, *rest = judged_of(shown)
    assert first.startswith("run R, ended ~ ago: ") and rest == judged_of(page)[1:]
