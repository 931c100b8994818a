"""The whole command: in a terminal, under torchrun, with mpirun's variables, interrupted, and hanging."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.jobs import free_port

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.job, pytest.mark.timeout(300)]
PROBE = [sys.executable, "-m", "distdiag", "probe"]


def finished(command: list[str], env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run to the end in its own session, which is killed in any case."""
    p = subprocess.Popen(
        command, env=env, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        out, err = p.communicate(timeout=200)
    finally:
        kill_session(p.pid)
    return subprocess.CompletedProcess(command, p.returncode, out, err)


def kill_session(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        pass


def wait_or_kill(p: subprocess.Popen[str]) -> None:
    """Wait for it to end by itself; then kill its session."""
    try:
        p.wait(timeout=100)
    except subprocess.TimeoutExpired:
        pass


def the_object(text: str) -> dict[str, Any]:
    data = json.loads(text)
    assert next(iter(data)) == "schema"
    return data


def test_one_command_starts_ranks_and_prints_one_object(clean_environment: dict[str, str], tmp_path: Path):
    saved = tmp_path / "base.json"
    command = [*PROBE, "allreduce", "--nproc", "2", "--max-bytes", "64K", "--factor", "8", "--budget", "6", "--json"]
    p = finished([*command, "--save", str(saved)], clean_environment, tmp_path)

    data = the_object(p.stdout)
    assert p.returncode == {"pass": 0, "fail": 1, "inconclusive": 3}[data["verdict"]], p.stderr
    assert data["verdict"] != "fail" and data["world_size"] == 2 and data["backend"] == "gloo"
    assert [r["bytes"] for r in data["rows"]][:1] == [1024] and all(r["correct"] for r in data["rows"])
    assert json.loads(saved.read_text())["schema"] == "distdiag.probe-baseline/1"
    assert f"--against {saved}" in p.stderr and "Traceback" not in p.stderr

    # Against itself on another world size: foreign, refused.
    p = finished(
        [*PROBE, "allreduce", "--nproc", "3", "--max-bytes", "1K", "--budget", "5", "--against", str(saved)],
        clean_environment,
        tmp_path,
    )
    assert p.returncode == 2 and "world_size: 2 there, 3 here" in p.stderr and p.stdout == ""


def test_a_probe_runs_as_a_script_under_torchrun(clean_environment: dict[str, str], tmp_path: Path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [
        str(ROOT / "probes" / "allreduce.py"),
        "--max-bytes",
        "4K",
        "--budget",
        "30",
        "--precision",
        "20",
        "--json",
    ]
    p = finished([*torchrun, *script], clean_environment, tmp_path)

    data = the_object(p.stdout)  # one object, from rank 0
    assert data["world_size"] == 2 and [r["correct"] for r in data["rows"]] == [True, True]
    # A verdict other than pass is torchrun's failure, as it should be.
    assert (p.returncode == 0) == (data["verdict"] == "pass"), p.stderr


def test_a_probe_runs_under_mpiruns_variables(clean_environment: dict[str, str], tmp_path: Path):
    port = str(free_port())
    ranks: list[subprocess.Popen[str]] = []
    for rank in range(2):
        env = clean_environment | {
            "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_PORT": port,
        }  # fmt: skip
        command = [*PROBE, "barrier", "--budget", "30", "--precision", "20", "--json"]
        ranks.append(
            subprocess.Popen(
                command,
                env=env,
                cwd=tmp_path,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        )
    try:
        outputs = [p.communicate(timeout=200) for p in ranks]
    finally:
        for p in ranks:
            kill_session(p.pid)
    data = the_object(outputs[0][0])
    assert data["probe"] == "barrier" and data["world_size"] == 2 and data["rows"][0]["iterations"] > 0
    assert outputs[1][0] == "" and ranks[1].returncode == 0


def test_ranks_that_never_connect_are_named_with_the_interface(clean_environment: dict[str, str], tmp_path: Path):
    env = clean_environment | {
        "RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    p = finished([*PROBE, "allreduce", "--timeout", "2", "--json"], env, tmp_path)
    assert p.returncode == 5
    error = the_object(p.stdout)["error"]
    assert error["kind"] == "timeout" and "ranks 1, 2 of 3 never arrived" in error["message"]
    assert "lo 127.0.0.1" in error["message"] and "GLOO_SOCKET_IFNAME" in error["message"]
    assert "127.0.0.1" in error["hint"] and "Traceback" not in p.stderr


def start_measuring(env: dict[str, str], cwd: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Start a long probe; return it, and its two ranks once they measure."""
    command = [*PROBE, "allreduce", "--nproc", "2", "--budget", "100", "--precision", "0.001"]
    p = subprocess.Popen(
        command, env=env, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and p.poll() is None:
        try:
            ranks = psutil.Process(p.pid).children(recursive=True)
            if len(ranks) == 2 and all(r.num_threads() > 2 for r in ranks):  # gloo has its threads
                return p, ranks
        except psutil.NoSuchProcess:
            pass  # it ended between two polls
        time.sleep(0.05)
    kill_session(p.pid)
    raise AssertionError(f"the ranks did not start: {p.communicate()}")


@pytest.mark.parametrize(
    "how", ["Ctrl-C in a terminal", "Ctrl-C pressed thrice", "SIGINT to the command alone", "SIGKILL to the command"]
)
def test_no_process_is_left_behind(how: str, clean_environment: dict[str, str], tmp_path: Path):
    p, ranks = start_measuring(clean_environment, tmp_path)
    try:
        if "Ctrl-C" in how:  # reaches the whole foreground process group
            for _ in range(3 if "thrice" in how else 1):
                os.killpg(p.pid, signal.SIGINT)
                time.sleep(0.2)
        else:
            os.kill(p.pid, signal.SIGINT if "SIGINT" in how else signal.SIGKILL)
        gone, alive = psutil.wait_procs(ranks, timeout=100)
    finally:
        if how != "SIGKILL to the command":
            wait_or_kill(p)
        kill_session(p.pid)
        out, err = p.communicate()
    assert len(gone) == 2 and not alive
    assert p.returncode == (130 if "KILL" not in how else -signal.SIGKILL)
    assert "Traceback" not in err and out == ""


def test_an_interrupt_is_not_lost_in_a_callback_of_the_garbage_collector(
    clean_environment: dict[str, str], tmp_path: Path
):
    """Python prints and drops exceptions raised there, including KeyboardInterrupt, so it must not be raised there."""
    script = (
        "import os, signal, time\n"
        "from distdiag.probekit.ranks import launch\n"
        "class Unlucky:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(1)\n"
        "signal.signal(signal.SIGINT, launch._interrupt_once)\n"
        "with launch._no_interrupt_lost():\n"
        "    try:\n"
        "        unlucky = Unlucky()\n"
        "        del unlucky\n"
        "        time.sleep(60)\n"
        "    except KeyboardInterrupt:\n"
        "        print('ended', signal.getsignal(signal.SIGINT) is signal.SIG_IGN)\n"
    )
    p = finished([sys.executable, "-c", script], clean_environment, tmp_path)
    assert (p.returncode, p.stdout, p.stderr) == (0, "ended True\n", "")
