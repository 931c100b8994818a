"""A test whose ranks hang fails with the verdict, and the next one runs; every other test ends as without the plugin."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import clean_env, unwrapped, wait_for

pytestmark = [pytest.mark.job, pytest.mark.timeout(400)]

SUITE = '''
import os, subprocess, sys
import pytest, torch
import torch.distributed as dist
import torch.multiprocessing as mp

JOB = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0 and sys.argv[1] == "hangs":
    dist.barrier()
dist.all_reduce(torch.ones(2))
dist.destroy_process_group()
"""

def train(rank, store, hangs):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for step in range(4):
        if hangs and step == 3 and rank == 1:
            dist.barrier()
        dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()

@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_started(tmp_path, method, hangs):
    mp.start_processes(train, (tmp_path / "store", hangs), nprocs=2, start_method=method)

@pytest.mark.parametrize("hangs", ["hangs", "ends"])
def test_torchrun(tmp_path, hangs):
    (tmp_path / "job.py").write_text(JOB)
    # nothing here looks at the exit code
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                    str(tmp_path / "job.py"), hangs], timeout=120)

def gives_up(rank, store):
    from datetime import timedelta
    group = dict(init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=2))
    dist.init_process_group("gloo", **group)
    with pytest.raises(RuntimeError):  # rank 1 leaves out what rank 0 waits for
        dist.all_reduce(torch.ones(3)) if rank == 0 else dist.recv(torch.ones(5), src=0)

def test_expected_timeout(tmp_path):
    mp.start_processes(gives_up, (tmp_path / "store",), nprocs=2, start_method="fork")

def test_group_of_pytest_itself(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    from distdiag.recorder import session
    assert session.current is None

def test_plain():
    assert "DISTDIAG_RUN_DIR" in os.environ

def test_fails():
    assert False, "its own reason"

@pytest.mark.distdiag_off
def test_off():
    assert os.environ["DISTDIAG"] == "0"

@pytest.mark.xfail
def test_xfails():
    assert False

@pytest.mark.skip(reason="not now")
def test_skipped():
    pass
'''
EXPECTED = {
    "test_started[spawn-False]": "PASSED", "test_started[fork-False]": "PASSED", "test_torchrun[ends]": "PASSED",
    "test_started[spawn-True]": "FAILED", "test_started[fork-True]": "FAILED", "test_torchrun[hangs]": "FAILED",
    "test_group_of_pytest_itself": "PASSED", "test_expected_timeout": "PASSED", "test_plain": "PASSED",
    "test_fails": "FAILED", "test_off": "PASSED", "test_xfails": "XFAIL", "test_skipped": "SKIPPED",
}  # fmt: skip


def test_hanging_tests_fail_with_their_line_and_others_as_they_did(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import torch\n")  # before any plugin is configured
    (tmp_path / "test_suite.py").write_text(SUITE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:xdist", "-rN", "test_suite.py"],
        cwd=tmp_path, env=clean_env(tmp_path / "home", {"TMPDIR": str(tmp_path)}), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=350,
    )  # fmt: skip
    outcomes = dict(re.findall(r"^test_suite\.py::(\S+) (\w+)", done.stdout, re.MULTILINE))
    assert outcomes == EXPECTED, done.stdout
    verdicts = [line for line in unwrapped(done.stdout).splitlines() if line.startswith("█ ERROR")]
    started = [
        v for v in verdicts if "rank 1 is in barrier at test_suite.py" in v or "rank 1 made barrier (test_suite.py" in v
    ]
    assert len(started) == 2 * 2, done.stdout  # as the failure, and as a section below the test's own
    assert any("only rank 0 made barrier (job.py:5): `if dist.get_rank() == 0" in v for v in verdicts), verdicts
    assert "its own reason" in done.stdout
    kept = {Path(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("  run    ")}
    assert len(kept) == 3 and all((run / "run.db").exists() for run in kept)
    left = {p.name for p in next(tmp_path.glob("distdiag-pytest-*")).iterdir()} - {"latest"}
    assert left == {run.name for run in kept}


LATE = """
import os, signal, subprocess, time
from datetime import timedelta
from pathlib import Path
import pytest
import torch, torch.distributed as dist
import torch.multiprocessing as mp

def until(true):
    end = time.monotonic() + 60
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    assert true()

def monitors(run):
    made = subprocess.run(["pgrep", "-f", f"distdiag.monitor.*{run} "], capture_output=True, text=True)
    return [int(pid) for pid in made.stdout.split()]

def train(rank, where, timeout_s):
    group = dict(init_method=f"file://{where}/store", rank=rank, world_size=2, timeout=timedelta(seconds=timeout_s))
    dist.init_process_group("gloo", **group)
    (where / f"joined_{rank}").touch()
    until((where / "go").exists)
    if rank == 0:
        dist.barrier()
    dist.all_reduce(torch.ones(1))

def started(where, timeout_s):
    context = mp.start_processes(train, (where, timeout_s), nprocs=2, join=False, start_method="fork")
    until(lambda: len(list(where.glob("joined_*"))) == 2)
    return context.processes

@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    where = tmp_path_factory.mktemp("ranks")
    yield where / "go", started(where, 60)

def test_of_fixture_passes(ranks):
    pass

@pytest.fixture(scope="module")
def run(tmp_path_factory):
    where = tmp_path_factory.mktemp("other")
    processes, run = started(where, 2), Path(os.environ["DISTDIAG_RUN_DIR"])
    until(lambda: monitors(run) and (run / "run.db").exists())
    os.kill(monitors(run)[0], signal.SIGSTOP)  # as on a busy machine: it judges late
    (where / "go").touch()
    for p in processes:
        p.join()
    return run

def test_expects_a_timeout(run):
    pass

def test_fails_by_itself(run):
    os.kill(monitors(run)[0], signal.SIGCONT)
    until(lambda: not monitors(run))
    assert False, "its own reason"

def test_of_fixture_hangs(ranks):
    go, processes = ranks
    go.touch()
    for p in processes:
        p.join()
"""


def test_a_verdict_fails_only_a_test_during_which_its_ranks_lived(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(LATE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:xdist", "-rN", "test_suite.py"],
        cwd=tmp_path, env=clean_env(tmp_path / "home", {"TMPDIR": str(tmp_path)}), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    outcomes = dict(re.findall(r"^test_suite\.py::(\S+) (\w+)", done.stdout, re.MULTILINE))
    assert list(outcomes.values()) == ["PASSED", "PASSED", "FAILED", "FAILED"], done.stdout
    verdicts = re.findall("^█ ERROR +(\\w+)|^E +AssertionError: (its own reason)", done.stdout, re.MULTILINE)
    assert verdicts == [("", "its own reason"), ("deadlock", "")], done.stdout


SHORT = """
import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

def train(rank, store, recorded):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    from distdiag.recorder import session
    (recorded / str(rank)).write_text(str(session.current.pages))
    dist.destroy_process_group()

@pytest.mark.parametrize("n", range(2))
def test_short(tmp_path, n):
    mp.start_processes(train, (tmp_path / "store", tmp_path), nprocs=2, start_method="fork")
"""


def test_ranks_that_end_leave_no_pages_in_memory(tmp_path: Path) -> None:
    """No monitor removes those of ranks that end before they have one."""
    (tmp_path / "test_suite.py").write_text(SHORT)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--basetemp", tmp_path / "tests", "test_suite.py"],
        cwd=tmp_path, env=clean_env(tmp_path / "home", {"TMPDIR": str(tmp_path)}), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=350,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    pages = {Path(file.read_text()) for file in tmp_path.glob("tests/*/[01]")}
    assert len(pages) == 2
    wait_for(lambda: not any(p.exists() for p in pages), 60, "the pages to be removed")  # of a slow test by its monitor
    assert not list(tmp_path.glob("distdiag-pytest-*"))


WORKER = """
import os, sys
import torch, torch.distributed as dist

def test_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    dist.destroy_process_group()
    assert not any(name.startswith("distdiag.recorder") for name in sys.modules)
    assert os.environ["DISTDIAG_RUN_DIR"].startswith(os.environ["TMPDIR"])
"""


def test_a_worker_of_xdist_is_pytest_and_no_rank(tmp_path: Path) -> None:
    """It inherits the variables of its controller, and was recorded into ./reports by them."""
    pytest.importorskip("xdist")
    (tmp_path / "test_suite.py").write_text(WORKER)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "1", "test_suite.py"],
        cwd=tmp_path, env=clean_env(tmp_path / "home", {"TMPDIR": str(tmp_path)}), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert not (tmp_path / "reports").exists() and not list(tmp_path.glob("distdiag-pytest-*"))


def test_without_room_for_runs_the_tests_run(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text("def test_passes():\n    pass\n")
    (tmp_path / "sitecustomize.py").write_text(
        "import tempfile\ndef no(*a, **k):\n    raise OSError(28, 'No space left')\ntempfile.mkdtemp = no\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "test_suite.py"],
        cwd=tmp_path, env=clean_env(tmp_path / "home", {"PYTHONPATH": str(tmp_path)}), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "not all tests were recorded or judged: OSError" in done.stdout
