"""Recording ends no process: neither one that shuts down, nor one that calls exec, nor one that has detached."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import Job, distdiag, launch, rows, runs, start, wait_for

pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]

# Rank 0 waits for rank 2, which waits for the end of rank 1's process: for some seconds rank 1 is silent while others wait.
AWAITED = """
    import ctypes, os, sys, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    pair = dist.new_group([0, 2])
    pids = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    x = torch.ones(4)
    for _ in range(40):
        dist.all_reduce(x)
    if dist.get_rank() == 1 and "exec" in sys.argv:
        os.execv("/bin/sleep", ["sleep", "5"])
    if dist.get_rank() == 1:  # Python has ended, C has not: CUDA, NCCL and profilers take such seconds
        libc = ctypes.CDLL(None)
        libc.__cxa_atexit(ctypes.cast(libc.sleep, ctypes.c_void_p), ctypes.c_void_p(5), None)
        sys.exit()
    while dist.get_rank() == 2 and os.path.exists(f"/proc/{pids[1]}"):
        time.sleep(0.1)
    dist.barrier(pair)
"""
ASKED = """
    import ctypes, os, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.ones(4)
    for _ in range(20):
        dist.all_reduce(x)
    if dist.get_rank() == 1:
        libc = ctypes.CDLL(None)
        command = ctypes.create_string_buffer(b"while [ ! -e enough ]; do sleep 0.1; done")
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(command))  # it is read after Python's end
        libc.__cxa_atexit(ctypes.cast(libc.system, ctypes.c_void_p), command, None)
    while dist.get_rank() == 0 and not os.path.exists("go"):
        time.sleep(0.05)
"""
LEFT_OPEN = """
    import gc, os, time
    out = open("out", "w")
    def write(text): print(text, file=out)
    class Slow:
        def __del__(self): time.sleep(7)
    if os.environ.get("DISTDIAG_RUN_DIR"):
        from distdiag.recorder import pulse
        began, plain = [], pulse.now_ns
        def slow():  # a collection that happens to run in this thread, and takes long
            if not began:
                found = Slow()
                found.itself = found
                del found
                began.append(1)
                gc.collect()
            return plain()
        pulse.now_ns = slow
        while not began:
            time.sleep(0.01)
    for line in range(600):
        write("x" * 8)
"""
DETACHES = """
    import time
    import torch
    import torch.distributed as dist
    import distdiag

    dist.init_process_group("gloo")
    handle = distdiag.attach()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()

    train(20)
    handle.log(during=1.0)
    if dist.get_rank() == 0:
        handle.detach()
        assert handle.run_dir is not None
        handle.log(after=1.0)
        handle.step()
        time.sleep(6)  # it writes a summary; the other waits for it
    dist.barrier()
    train(5)
    dist.destroy_process_group()
"""


def write(tmp_path: Path, text: str) -> Path:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(text))
    return script


def serious(run_dir: Path) -> list[dict[str, Any]]:
    """Return everything reported so far at warning or above, cleared findings included."""
    return [json.loads(text) for (text,) in rows(run_dir, "SELECT json FROM finding WHERE severity != 'info'")]


def recorded(job: Job) -> None:
    wait_for(lambda: not job.monitor_pids(), 30, "the monitor to write its last rows")


def test_a_rank_that_shuts_down_is_sent_no_signal(tmp_path: Path) -> None:
    run = tmp_path / "R"
    with launch(["-m", "distdiag.run", "--run-dir", run, write(tmp_path, AWAITED)], nproc=3, cwd=tmp_path) as job:
        assert job.wait() == 0, job.tail()
        recorded(job)
    ends = rows(run, "SELECT rank, life, exit_code, signal FROM rank ORDER BY rank")
    assert ends == [(q, "finished", 0, None) for q in (0, 1, 2)]
    # on a busy machine its end takes so long that the ranks that wait for it are reported as stalled, which they are
    assert {f["kind"] for f in serious(run)} <= {"stall"}


def test_a_rank_that_calls_exec_is_sent_no_signal(tmp_path: Path) -> None:
    script = write(tmp_path, AWAITED)
    command = ["-m", "distdiag.run", "--run-dir", "R", script, "exec"]
    with launch(command, nproc=3, cwd=tmp_path, fork_ranks=True) as job:
        assert job.wait() == 0, job.tail()  # 1 if a signal had ended that program


def test_a_dump_sends_no_signal_to_a_rank_that_shuts_down(tmp_path: Path) -> None:
    run = tmp_path / "R"
    command = ["-m", "distdiag.run", "--run-dir", run, write(tmp_path, ASKED)]
    with launch(command, cwd=tmp_path, fork_ranks=True) as job:
        finished = "SELECT rank FROM rank WHERE life = 'finished'"
        wait_for(lambda: rows(run, finished) == [(1,)], 90, "rank 1 to leave its script", job)
        for _ in range(3):  # the last one finds it silent
            shown = distdiag("dump", run, "--timeout", "2", "--no-save", cwd=tmp_path)
            assert shown.returncode in (0, 5), shown.stderr  # 5: a rank did not answer
        ((pid,),) = rows(run, "SELECT pid FROM rank WHERE rank = 1")
        assert runs(pid)
        (tmp_path / "enough").touch()
        (tmp_path / "go").touch()
        assert job.wait() == 0, job.tail()


def test_a_rank_that_detached_is_not_judged_and_not_recorded(tmp_path: Path) -> None:
    run = tmp_path / "R"
    env = {"DISTDIAG_RUN_DIR": str(run)}
    with launch([write(tmp_path, DETACHES)], cwd=tmp_path, env=env, fork_ranks=True) as job:
        assert job.wait() == 0, job.tail()
        recorded(job)
    steps = rows(run, "SELECT rank, count(*), max(step) FROM step GROUP BY rank ORDER BY rank")
    assert steps == [(0, 20, 20), (1, 25, 25)]
    logged = rows(run, "SELECT rank, name FROM scalar WHERE name IN ('during', 'after') ORDER BY rank, name")
    assert logged == [(0, "during"), (1, "during")]
    assert serious(run) == []


@pytest.mark.parametrize("recorded", [False, True])
def test_a_file_that_the_script_left_open_is_complete(tmp_path: Path, recorded: bool) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(LEFT_OPEN))
    before = ["-m", "distdiag.run", "--quiet"] * recorded
    env = {"DISTDIAG_RUN_DIR": "R", "RANK": "0", "WORLD_SIZE": "1"} if recorded else {}
    with start([sys.executable, *before, "script.py"], cwd=tmp_path, env=env) as job:
        assert job.wait() == 0, job.tail()
    assert (tmp_path / "out").stat().st_size == 600 * 9
