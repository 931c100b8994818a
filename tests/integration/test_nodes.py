"""Nodes that share no directory, as network namespaces: one verdict over all ranks, by messages that only the job's monitors can read."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import Job, closed, distdiag, free_port, rows, start, wait_for
from tests.nodes import LINK, Cluster

pytestmark = [pytest.mark.job, pytest.mark.timeout(300)]

LOOP = """
    import os, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.ones(10)
    secret_of_the_job = "a text that nobody else may read"
    for i in range(100_000):
        dist.all_reduce(x)
        x /= world
        time.sleep(0.02)
        if os.path.exists(HANG) and rank == world - 1:
            dist.barrier()
"""


@pytest.fixture
def hang(tmp_path: Path) -> Path:
    """A file; once it exists, the last rank leaves the order of all others."""
    return tmp_path / "hang"


@pytest.fixture
def script(tmp_path: Path, hang: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(LOOP).replace("HANG", repr(str(hang))))
    return path


def lives(cluster: Cluster) -> dict[int, str]:
    return dict(rows(cluster.run(0), "SELECT rank, life FROM rank"))


def meta(cluster: Cluster, key: str) -> str:
    return dict(rows(cluster.run(0), "SELECT key, value FROM meta")).get(key) or ""


def all_heard(cluster: Cluster, jobs: list[Job], world: int) -> None:
    def heard() -> bool:
        found = lives(cluster)
        return len(found) == world and set(found.values()) == {"running"}

    wait_for(heard, 90, "node 0 to see all ranks", jobs[0])


def deadlock(cluster: Cluster) -> dict[str, Any] | None:
    return next((f for f in cluster.findings() if f["kind"] == "deadlock"), None)


def test_a_deadlock_over_nodes_without_a_shared_directory(tmp_path: Path, script: Path, hang: Path) -> None:
    n = 4
    with Cluster(tmp_path, n, {1: 1000}) as cluster, cluster.job(script, fork_ranks=True) as jobs:
        all_heard(cluster, jobs, n)
        assert [f for f in cluster.findings() if f["severity"] != "info"] == []
        hang.touch()
        f = wait_for(lambda: deadlock(cluster), 30, "the deadlock", jobs[0])
        assert (f["cause"], f["certainty"]) == ("missing_rank", "proved")
        assert (f["culprits"], f["victims"]) == ([n - 1], list(range(n - 1)))
        assert "deadlock/missing_rank" in wait_for(jobs[0].stderr, 10, "node 0 to print it", jobs[0])
        assert "deadlock" not in jobs[1].stderr()
        nodes = wait_for(lambda: json.loads(meta(cluster, "nodes") or "{}"), 10, "the clocks", jobs[0])
        assert nodes["by"] == "zeromq" and set(nodes["nodes"]) == {str(k) for k in range(1, n)}
        for of_node in nodes["nodes"].values():  # one machine: the wall clocks are equal
            assert abs(of_node["clock_offset_s"]) <= of_node["clock_uncertainty_s"] + 1e-4 < 1.0
        assert not (cluster.run(0) / "nodes/1.state").exists()
        assert json.loads((cluster.run(0) / "run.json").read_text())["nodes_by"] == "zeromq"
        answer = distdiag("dump", cluster.run(0), "--json", timeout=60)
        assert answer.returncode == 0, answer.stderr
        stacks = json.loads(answer.stdout)["ranks"]
        assert sorted(map(int, stacks)) == list(range(n))
        assert all("train.py" in "".join(of_rank["stack"]) for of_rank in stacks.values())
        assert "barrier" in stacks[str(n - 1)]["op"] and "all_reduce" in stacks["0"]["op"]


def test_a_full_disk_of_another_node_is_shown_on_node_0_and_costs_no_verdict(
    tmp_path: Path, script: Path, hang: Path
) -> None:
    disk = tmp_path / "node_1"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", disk], capture_output=True).returncode:
        pytest.skip("no file system can be mounted")
    try:
        with Cluster(tmp_path, 2) as cluster, cluster.job(script, fork_ranks=True) as jobs:
            all_heard(cluster, jobs, 2)
            with suppress(OSError), (disk / "filling").open("wb", buffering=0) as f:
                while True:
                    f.write(b"0" * (1 << 16))
            full = wait_for(
                lambda: next((f for f in cluster.findings() if f["cause"] == "disk_full"), None),
                60,
                "the fault",
                jobs[0],
            )
            assert (full["kind"], full["severity"]) == ("recorder", "warning")
            assert full["message"].startswith("node 1: the run could not be written: "), full["message"]
            hang.touch()
            f = wait_for(lambda: deadlock(cluster), 30, "the deadlock", jobs[0])
            assert (f["certainty"], f["culprits"]) == ("proved", [1])
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


TRAINING = """
    import time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    for step in range(100_000):
        optimizer.zero_grad()
        model(torch.randn(16, 64)).sum().backward()
        time.sleep(0.1)
        optimizer.step()
"""


def test_a_profile_has_the_ranks_of_all_nodes(tmp_path: Path, script: Path) -> None:
    script.write_text(textwrap.dedent(TRAINING))
    with Cluster(tmp_path, 2) as cluster, cluster.job(script, fork_ranks=True) as jobs:
        all_heard(cluster, jobs, 2)
        answer = distdiag("profile", cluster.run(0), "--json", timeout=120)
        assert answer.returncode == 0, answer.stderr
        found = json.loads(answer.stdout)
        assert [r["rank"] for r in found["ranks"]] == [0, 1] and found["missing"] == []
        first = found["first_step"]
        assert f"recording steps {first} to {first + 2} of rank 0 and other nodes" in answer.stderr
        assert {p.name for p in (cluster.run(0) / "profile/1").iterdir()} >= {"rank_0.json", "rank_1.json"}
        one = distdiag("profile", cluster.run(0), "--ranks", "1", "--json", timeout=120)
        assert [r["rank"] for r in json.loads(one.stdout)["ranks"]] == [1], one.stderr
        none = distdiag("profile", cluster.run(0), "--ranks", "1,7", "--json", timeout=120)
        assert [m["rank"] for m in json.loads(none.stdout)["missing"]] == [7], none.stderr


def test_a_cut_link_is_silence_and_no_proof(tmp_path: Path, script: Path) -> None:
    with Cluster(tmp_path, 2) as cluster, cluster.job(script, fork_ranks=True) as jobs:
        all_heard(cluster, jobs, 2)
        cluster.cut(1)
        wait_for(lambda: lives(cluster).get(1) == "silent", 40, "node 1 to fall silent", jobs[0])
        assert lives(cluster)[0] == "running"
        assert "rank 1 not heard of since" in wait_for(lambda: meta(cluster, "state_text"), 5, "the state")
        (text,) = [t for (t,) in rows(cluster.run(0), "SELECT text FROM event") if "not heard of" in t]
        assert text.startswith("node 1 (rank 1) not heard of since")
        lost = wait_for(
            lambda: next((f for f in cluster.findings() if f["kind"] == "rank_lost"), None), 60, "the finding", jobs[0]
        )
        assert (lost["cause"], lost["certainty"]) == ("silent", "suspected")
        assert "not been heard of since" in lost["message"]
        assert not [f for f in cluster.findings() if f["certainty"] == "proved" and f["kind"] != "recorder"]
        cluster.mend(1)
        wait_for(lambda: lives(cluster).get(1) == "running", 30, "node 1 to be heard of again", jobs[0])


@pytest.mark.parametrize("power", [True, False])
def test_a_killed_node_is_not_blamed_by_proof(power: bool, tmp_path: Path, script: Path) -> None:
    with Cluster(tmp_path, 2) as cluster, cluster.job(script, fork_ranks=True) as jobs:
        all_heard(cluster, jobs, 2)
        if power:  # it fails: nothing says goodbye
            cluster.cut(1)
        cluster.kill(1)
        if power:
            wait_for(lambda: lives(cluster).get(1) == "silent", 40, "node 1 to fall silent", jobs[0])
        else:  # the kernel closes its connections: gloo fails on node 0
            jobs[0].wait(60)
            closed(cluster.run(0))
        assert not [f for f in cluster.findings() if f["certainty"] == "proved" and f["kind"] != "recorder"]


def test_another_monitor_of_node_0_is_found_again(tmp_path: Path, script: Path, hang: Path) -> None:
    with Cluster(tmp_path, 2) as cluster, cluster.job(script, fork_ranks=True) as jobs:
        all_heard(cluster, jobs, 2)
        port = json.loads(meta(cluster, "nodes"))["port"]
        (before,) = jobs[0].monitor_pids()
        os.kill(before, signal.SIGKILL)
        wait_for(lambda: set(jobs[0].monitor_pids()) - {before}, 30, "another monitor", jobs[0])
        hang.touch()
        f = wait_for(lambda: deadlock(cluster), 40, "the deadlock", jobs[0])
        assert f["culprits"] == [1] and f["certainty"] == "proved"
        assert json.loads(meta(cluster, "nodes"))["port"] == port


def test_a_stranger_on_the_wire_reads_no_text_of_the_job(tmp_path: Path, script: Path) -> None:
    with Cluster(tmp_path, 2) as cluster, cluster.wire() as wire, cluster.job(script, fork_ranks=True) as jobs:
        all_heard(cluster, jobs, 2)
        nodes = json.loads(wait_for(lambda: meta(cluster, "nodes"), 20, "the port", jobs[0]))
        of_port = wait_for(lambda: len(found := wire(nodes["port"])) > 5_000 and found, 30, "20 s of messages", jobs[0])
        for text in (b"train.py", b"all_reduce", b"default_pg", b"running", b"secret", str(tmp_path).encode()):
            assert text not in of_port, text
        assert b"CURVE" in of_port  # the greeting of ZMTP: this is the right port


def torchrun(cluster: Cluster, stack: ExitStack, program: list[str]) -> list[Job]:
    """Start one process of a program on each node, not recorded."""
    jobs, port = [], str(free_port())
    for k in range(cluster.n):
        here = cluster.run(k).parent
        here.mkdir(parents=True, exist_ok=True)
        command = [
            *cluster.inside(k), sys.executable, "-m", "torch.distributed.run", "--nnodes", str(cluster.n), "--node-rank", str(k),
            "--master-addr", cluster.address(0), "--master-port", port, "--nproc-per-node", "1", *program,
        ]  # fmt: skip
        jobs.append(stack.enter_context(start(command, cwd=here, env={"GLOO_SOCKET_IFNAME": LINK}, timeout=200)))
    return jobs


def test_a_slow_link_between_two_nodes_is_named_by_the_probe(tmp_path: Path) -> None:
    with Cluster(tmp_path, 4) as cluster, ExitStack() as stack:
        cluster.slow(1, 2, "20mbit")
        jobs = torchrun(cluster, stack, ["-m", "distdiag.probes.pairs", "--json", "--budget", "40"])
        jobs[0].wait(180)
        found = json.loads(jobs[0].stdout())
        # on a busy host the probe suspects only
        assert found["verdict"] in ("fail", "inconclusive"), found
        # a busy host delays other pairs, too, by a few times
        slow = re.findall(
            r"the link between ranks (\d) and (\d) is slow \(transfer ([\d.]+) times", str(found["reasons"])
        )
        assert [(a, b) for a, b, times in slow if float(times) > 20] == [("1", "2")], found["reasons"]


def test_a_slow_link_shows_in_the_live_run_as_time_that_all_ranks_communicate(tmp_path: Path, script: Path) -> None:
    script.write_text(textwrap.dedent(TRAINING).replace("64, 64", "600, 600").replace("16, 64", "16, 600"))
    with Cluster(tmp_path, 2) as cluster:
        cluster.slow(0, 1, "50mbit")  # 1.5 MB of gradients take 0.23 s; of less, a full host says nothing
        with cluster.job(script, fork_ranks=True) as jobs:
            all_heard(cluster, jobs, 2)
            found = wait_for(
                lambda: next((f for f in cluster.findings() if f["kind"] == "comm_bound"), None), 120, "it", jobs[0]
            )
            assert found["severity"] == "info" and "distdiag probe" in found["advice"], found
            assert not [f for f in cluster.findings() if f["severity"] == "error"]


def test_a_full_disk_of_node_0_costs_no_verdict(tmp_path: Path, script: Path, hang: Path) -> None:
    place = tmp_path / "node_0"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", place], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small file system can be made: {mounted.stderr.strip()}")
    try:
        with Cluster(tmp_path, 2) as cluster, cluster.job(script, fork_ranks=True) as jobs:
            all_heard(cluster, jobs, 2)
            filling = place / "filling"
            with suppress(OSError), open(filling, "wb", buffering=0) as f:
                while f.write(b"0" * 4096):
                    pass
            assert os.statvfs(place).f_bavail == 0

            time.sleep(3)
            hang.touch()
            wait_for(lambda: "deadlock/missing_rank" in jobs[0].stderr(), 40, "the verdict", jobs[0])
            assert all(job.process.poll() is None for job in jobs)
            filling.unlink()
            f = wait_for(lambda: deadlock(cluster), 40, "the verdict in run.db", jobs[0])
            assert (f["certainty"], f["culprits"]) == ("proved", [1])

            def noted() -> bool:
                return any((f["kind"], f["cause"]) == ("recorder", "disk_full") for f in cluster.findings())

            wait_for(noted, 40, "the full disk in the run of node 0", jobs[0])
    finally:
        subprocess.run(["umount", "-l", place], check=False)
