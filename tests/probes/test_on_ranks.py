"""Every probe on real ranks; every injected fault is found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import torch.multiprocessing

from distdiag.errors import DistdiagError, ExitCode
from distdiag.probekit.command import catalog
from distdiag.probekit.verdict.result import Result, Verdict

pytestmark = [pytest.mark.job, pytest.mark.usefixtures("no_child_left"), pytest.mark.timeout(300)]
OnRanks = Callable[..., list[Result]]

COLLECTIVES = [
    "broadcast",
    "allreduce",
    "reduce",
    "gather",
    "scatter",
    "allgather",
    "reducescatter",
    "alltoall",
    "sendrecv",
]


def test_all_runs_every_probe_on_two_ranks(on_ranks: OnRanks, capfd: pytest.CaptureFixture[str]):
    results = on_ranks("all", "--max-bytes", "64K", "--factor", "64", seconds=15.0)

    assert "Exception ignored" not in capfd.readouterr().err  # workers are forked while a thread of ours runs
    by_name = {r.probe: r for r in results}
    assert list(by_name) == list(catalog.PROBES)
    for name in ["barrier", *COLLECTIVES]:
        r = by_name[name]
        assert r.verdict is not Verdict.FAIL, r.reasons
        assert r.rows and all(row.correct and row.iterations > 0 for row in r.rows)
        assert r.world_size == 2 and r.ceilings["tcp_both_ways_gbps"]
    pair = by_name["pairs"].rows
    assert [p.ranks for p in pair] == [(0, 1)] and pair[0].correct and pair[0].round_trip_us > 0
    loader = by_name["dataloader"]
    assert sum(row.recommended for row in loader.rows) == 1 and all(row.samples_per_s > 0 for row in loader.rows)
    step = {row.strategy: row for row in by_name["step"].rows}
    assert "single" in step and step["single"].speed_up == 1.0
    assert by_name["gpu"].rows or by_name["gpu"].reasons[0].startswith("not possible here: ")


@pytest.mark.parametrize("dtype", ["bfloat16", "int64"])
def test_three_ranks_and_other_types_are_exact(on_ranks: OnRanks, dtype: str):
    for name in ("allreduce", "reducescatter"):
        (r,) = on_ranks(
            name, "--dtype", dtype, "--min-bytes", "24", "--max-bytes", "6K", "--factor", "250", nproc=3, seconds=1.0
        )
        assert [row.correct for row in r.rows] == [True] * len(r.rows), r.reasons
        assert all(row.bytes % 3 == 0 for row in r.rows) or name == "allreduce"


def test_the_step_probe_compares_strategies(on_ranks: OnRanks, tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "tiny_net.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 64), nn.ReLU(), nn.Linear(64, 10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (r,) = on_ranks("step", "--model", "tiny_net:make", "--batch-size", "16", seconds=12.0)

    rows = {row.strategy: row for row in r.rows}
    assert list(rows) == ["single", "single-threads", "dataparallel", "ddp", "fsdp"]
    assert "(threads)" in rows["dataparallel"].label and rows["dataparallel"].parts_ms["replicate"] > 0
    assert rows["ddp"].exposed_ms is not None and rows["ddp"].ranks == 2
    # FSDP keeps half of everything on each of two ranks; DDP keeps all of it.
    assert rows["fsdp"].state_bytes < 0.6 * rows["ddp"].state_bytes
    assert rows["ddp"].state_bytes == rows["single"].state_bytes


def test_the_dataloader_probe_uses_the_users_dataset(on_ranks: OnRanks, tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_data.py").write_text(
        "import time, torch\n"
        "class Slow(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 4000\n"
        "    def __getitem__(self, i):\n"
        "        time.sleep(0.01)\n"
        "        return {'x': torch.zeros(10), 'y': i}\n"
        "def make(): return Slow()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (r,) = on_ranks(
        "dataloader", "--dataset", "my_data:make", "--workers", "0,2", "--batch-size", "4", seconds=8.0, nproc=1
    )

    assert r.details["dataset"] == "my_data:make"
    none, two = (next(row for row in r.rows if row.setting.workers == w) for w in (0, 2))
    assert two.samples_per_s > 1.2 * none.samples_per_s  # it sleeps: workers help on any machine
    assert next(row for row in r.rows if row.recommended).setting.workers == 2


# ---------------------------------------------------------------------- injected faults


def test_a_delayed_rank_is_named_with_its_delay(on_ranks: OnRanks):
    for _attempt in range(4):  # a neighbour on this host delays ranks too: judged on the quietest of a few
        (r,) = on_ranks("allreduce", "--inject", "delay:rank=1,ms=5", "--max-bytes", "16K", seconds=2.5)
        if all(row.late_rank == 1 and abs(row.skew_us - 5000) <= 1000 for row in r.rows):
            break
    assert [row.late_rank for row in r.rows] == [1] * len(r.rows)
    assert [row.skew_us for row in r.rows] == pytest.approx([5000] * len(r.rows), abs=1000)
    assert all(row.wire_us < row.skew_us for row in r.rows)
    assert any(reason.startswith(("rank 1 arrives 4", "rank 1 arrives 5")) for reason in r.reasons)
    assert r.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_wrong_values_are_found_on_their_rank(on_ranks: OnRanks, name: str):
    (r,) = on_ranks(name, "--inject", "corrupt:rank=1", "--min-bytes", "4K", "--max-bytes", "4K", seconds=0.1)
    assert r.verdict is Verdict.FAIL
    assert r.reasons[0].startswith("wrong values on rank 1")
    assert {w.rank for w in r.rows[0].wrong} == {1} and not r.rows[0].correct


def test_a_rank_that_never_arrives_is_named(on_ranks: OnRanks):
    with pytest.raises(DistdiagError) as e:
        on_ranks("allreduce", "--inject", "drop:rank=1", "--timeout", "2")
    assert e.value.code is ExitCode.TIMEOUT
    assert "rank 1 never arrived within 2 s" in e.value.message and "rank 0 waited" in e.value.message
    assert "interface" in e.value.hint and "drop injected" in e.value.hint


def test_a_missing_interface_is_named(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(DistdiagError) as e:
        on_ranks("barrier", "--timeout", "3")
    assert "all 2 ranks arrived, but cannot connect to each other" in e.value.message
    assert "nosuch0 no address (GLOO_SOCKET_IFNAME=nosuch0)" in e.value.message
    assert "rank 0 has no interface nosuch0" in e.value.hint


def align_clocks(rank: int, folder: str) -> None:
    """Run two ranks that believe they are on two hosts, although they share a clock."""
    import contextlib
    from types import SimpleNamespace

    import torch.distributed as dist

    from distdiag.probekit.ranks.job import align

    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    job = SimpleNamespace(
        rank=rank, world_size=2, control=dist.group.WORLD, step=lambda label: contextlib.nullcontext()
    )
    offsets, error = align(job, ["here", "there"])  # type: ignore[arg-type]
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        with open(f"{folder}/offsets", "w") as f:
            f.write(f"{offsets[0]} {offsets[1]} {error}")
    os._exit(0)


@pytest.mark.usefixtures("frozen_heap")
def test_clocks_of_two_hosts_are_aligned_by_round_trips(tmp_path):
    torch.multiprocessing.start_processes(align_clocks, (str(tmp_path),), nprocs=2, start_method="fork")  # type: ignore[attr-defined]
    mine, other, error = map(int, (tmp_path / "offsets").read_text().split())
    assert mine == 0 and error > 0
    assert abs(other) <= error  # the true offset is 0


def in_a_while(action: Callable[[list[psutil.Process]], None], ranks: int) -> threading.Thread:
    """Do something to the ranks after they have been measuring for a moment."""

    def wait_and_act() -> None:
        me = psutil.Process()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            children = sorted(me.children(), key=lambda p: p.pid)
            # gloo's threads exist once the group does.
            if len(children) == ranks and all(p.num_threads() > 2 for p in children):
                time.sleep(0.5)
                action(children)
                return
            time.sleep(0.02)

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


def test_a_killed_rank_is_named_with_its_signal(on_ranks: OnRanks):
    thread = in_a_while(lambda ranks: ranks[1].kill(), 2)
    with pytest.raises(DistdiagError) as e:
        on_ranks("allreduce", "--max-bytes", "1M", "--precision", "0.01", seconds=60.0)
    thread.join()
    assert "rank 1 was killed by SIGKILL" in e.value.message and e.value.code is ExitCode.FAILED


def test_a_stopped_rank_is_named_and_killed(on_ranks: OnRanks):
    thread = in_a_while(lambda ranks: os.kill(ranks[1].pid, signal.SIGSTOP), 2)
    with pytest.raises(DistdiagError) as e:
        on_ranks("allreduce", "--max-bytes", "1M", "--precision", "0.01", "--timeout", "2", seconds=60.0)
    thread.join()
    assert "rank 1 never arrived" in e.value.message and "rank 1 is silent" in e.value.hint
    assert e.value.code is ExitCode.TIMEOUT


@pytest.fixture
def busy_cores() -> Iterator[None]:
    """Run a busy loop on every core, and one more."""
    burn = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range((os.cpu_count() or 1) + 1)]
    try:
        yield
    finally:
        for p in burn:
            p.kill()
            p.wait()


@pytest.mark.usefixtures("busy_cores")
def test_busy_cores_are_inconclusive_and_never_a_failure(on_ranks: OnRanks):
    # No machine reaches this floor: on a quiet host the probe would fail.
    (r,) = on_ranks("allreduce", "--floor", "10000", "--min-bytes", "64K", "--max-bytes", "1M", seconds=3.0)
    assert r.verdict is Verdict.INCONCLUSIVE
    assert r.host_noise is not None and r.host_noise.noisy and (r.host_noise.foreign_cpus or 0) > 0.3
    assert any("others used" in reason for reason in r.reasons) and any(
        "below the floor" in reason for reason in r.reasons
    )
