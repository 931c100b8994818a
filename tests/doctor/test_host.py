"""The host's checks, with synthetic limits, folders and environments."""

from __future__ import annotations

import importlib.util
import os
import resource
import socket
from collections import namedtuple
from pathlib import Path

import pytest

from distdiag import cgroups
from distdiag.doctor import host
from distdiag.doctor.check import Verdict, examination, failed, passed, skipped, warned

GIB = 2**30
Usage = namedtuple("Usage", "total used free")


def test_the_overall_verdict_is_that_of_the_worst_check() -> None:
    ok, bad, worst, absent = passed("a", "x"), warned("b", "y", "do"), failed("c", "z", "do"), skipped("d", "none")
    assert examination([ok, absent]).verdict == Verdict.PASS
    assert examination([bad, ok]).verdict == Verdict.WARN
    assert examination([ok, worst, bad]).verdict == Verdict.FAIL


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(cgroups, "cores", lambda: None)


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("env", "ranks", "verdict", "says"),
    [
        ({}, 8, "pass", "8 usable"),
        ({}, 2, "warn", "OMP_NUM_THREADS=4"),
        ({"OMP_NUM_THREADS": "4"}, 2, "pass", "OMP_NUM_THREADS=4"),
        ({"OMP_NUM_THREADS": "8"}, 2, "warn", "16 threads"),
        ({"OMP_NUM_THREADS": "4,2"}, 2, "pass", "OMP_NUM_THREADS=4"),
        ({"OMP_NUM_THREADS": "many"}, 2, "warn", "not a number"),
    ],
)
def test_more_threads_than_cores_are_reported(env: dict[str, str], ranks: int, verdict: str, says: str) -> None:
    check = host.cores(env, ranks)
    assert check.verdict == verdict
    assert says in f"{check.found} {check.remedy}"


def test_a_cpu_quota_overrides_the_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(cgroups, "cores", lambda: 2.0)
    check = host.cores({"OMP_NUM_THREADS": "4"}, 1)
    assert check.verdict == "warn" and "cgroup quota 2" in check.found and check.remedy == "export OMP_NUM_THREADS=2"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu.max": "nonsense"}, None),
        ({}, None),
    ],
)
def test_the_cpu_quota_is_read_from_both_cgroup_versions(
    tmp_path: Path, files: dict[str, str], cores: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cgroups.cores(tmp_path, tmp_path / "none") == cores


@pytest.mark.parametrize(
    ("line", "job", "files"),
    [
        ("0::/slurm/job_7/step_0", "slurm/job_7", {"cpu.max": "250000 100000"}),
        ("3:cpuacct,cpu:/slurm/job_7/step_0", "cpu/slurm/job_7", {"cpu.cfs_quota_us": "250000", "cpu.cfs_period_us": "100000"}),
    ],
)  # fmt: skip
def test_a_cpu_quota_of_a_parent_cgroup_applies(tmp_path: Path, line: str, job: str, files: dict[str, str]) -> None:
    """The job's quota applies if the step has none; of several the smallest."""
    (tmp_path / "own").write_text(f"9:name=systemd:/\n{line}\n")
    (tmp_path / job / "step_0").mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / job / name).write_text(text)
    assert cgroups.cores(tmp_path, tmp_path / "own") == 2.5
    (tmp_path / job / "step_0" / "cpu.max").write_text("100000 100000")
    assert cgroups.cores(tmp_path, tmp_path / "own") == 1.0


def test_a_containers_memory_limit_overrides_the_hosts_memory(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(str(GIB))
    (tmp_path / "memory.current").write_text(str(GIB // 2))
    limits = cgroups.memory_limits(tmp_path, tmp_path / "none")
    check = host.memory(limits)
    assert check.verdict == "warn" and "cgroup limit 1.0 GiB, 512.0 MiB left" in check.found


@pytest.mark.parametrize(
    ("line", "job", "limit", "used"),
    [
        ("0::/slurm/job_7/step_0", "slurm/job_7", "memory.max", "memory.current"),
        ("4:memory:/slurm/job_7/step_0", "memory/slurm/job_7", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_a_memory_limit_of_a_parent_cgroup_applies(tmp_path: Path, line: str, job: str, limit: str, used: str) -> None:
    """The job's limit applies if the step has none; cached pages of files do not count."""
    (tmp_path / "own").write_text(f"9:name=systemd:/\n{line}\n")
    folder = tmp_path / job
    (folder / "step_0").mkdir(parents=True)
    (folder / "step_0" / limit).write_text("max" if limit == "memory.max" else str(2**63 - 4096))
    (folder / limit).write_text(str(4 * GIB))
    (folder / used).write_text(str(3 * GIB))
    (folder / "memory.stat").write_text(f"anon 5\n{'total_' if job[0] == 'm' else ''}inactive_file {GIB}\n")
    assert [(x.limit_bytes, x.used_bytes()) for x in cgroups.memory_limits(tmp_path, tmp_path / "own")] == [
        (4 * GIB, 2 * GIB)
    ]


@pytest.mark.parametrize(("free", "verdict"), [(64 * 2**20, "warn"), (8 * GIB, "pass")])
def test_small_shared_memory_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, verdict: str
) -> None:
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: Usage(free, 0, free))
    check = host.shared_memory(tmp_path)
    assert check.verdict == verdict
    assert check.remedy is None or "--shm-size" in check.remedy


def test_missing_shared_memory_is_reported(tmp_path: Path) -> None:
    assert host.shared_memory(tmp_path / "absent").verdict == "fail"


@pytest.mark.parametrize(
    ("soft", "hard", "verdict", "remedy"),
    [
        (1024, 1_048_576, "warn", "ulimit -n 1,048,576"),
        (1024, 1024, "warn", "limits.conf"),
        (65536, 65536, "pass", None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, "pass", None),
    ],
)
def test_a_low_limit_of_open_files_is_reported(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, verdict: str, remedy: str | None
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    check = host.open_files()
    assert check.verdict == verdict
    assert check.remedy is None if remedy is None else remedy in (check.remedy or "")


def test_locked_memory_matters_only_with_rdma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    assert host.locked_memory(tmp_path / "absent").verdict == "pass"
    (tmp_path / "mlx5_0").mkdir()
    check = host.locked_memory(tmp_path)
    assert check.verdict == "warn" and "mlx5_0" in check.found and "ulimit -l unlimited" in (check.remedy or "")


def test_a_low_limit_of_processes_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    (tmp_path / "pids.max").write_text("512\n")
    assert host.processes(tmp_path).verdict == "warn"
    (tmp_path / "pids.max").write_text("max\n")
    assert host.processes(tmp_path).verdict == "pass"


@pytest.mark.parametrize(
    ("free", "kind", "verdict"),
    [(100 * GIB, "ext4", "pass"), (100 * GIB, "nfs4", "warn"), (GIB, "ext4", "warn"), (2**20, "ext4", "fail")],
)
def test_little_disk_space_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, kind: str, verdict: str
) -> None:
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: Usage(free, 0, free))
    monkeypatch.setattr(host.location, "filesystem_type", lambda _: kind)
    check = host.run_directory(tmp_path / "reports" / "not yet")
    assert check.verdict == verdict and (kind in check.found)
    assert not (tmp_path / "reports").exists(), "looking must not create it"


def test_an_unwritable_run_directory_is_reported() -> None:
    assert host.run_directory(Path("/proc/none")).verdict == "fail"


def test_the_clock_check_has_a_result() -> None:
    check = host.clock()
    assert check.verdict in ("pass", "warn", "skip")
    assert (check.remedy is None) == (check.verdict != "warn")


@pytest.mark.parametrize(
    ("env", "unset"),
    [
        ({}, None),
        ({"TORCH_DISTRIBUTED_DEBUG": "INFO"}, None),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, "TORCH_DISTRIBUTED_DEBUG"),
        ({"NCCL_P2P_DISABLE": "1", "CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING NCCL_P2P_DISABLE"),
        ({"MASTER_ADDR": "localhost", "RANK": "0"}, "RANK MASTER_ADDR"),
        ({"MASTER_ADDR": "node0", "RANK": "0", "TORCHELASTIC_RUN_ID": "x"}, None),
    ],
)
def test_leftover_environment_variables_are_reported(env: dict[str, str], unset: str | None) -> None:
    check = host.variables(env)
    assert check.remedy == (f"unset {unset}" if unset else None)


def test_metrics_that_cannot_be_served_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.metrics({}).verdict == "skip"
    assert host.metrics({"DISTDIAG_METRICS": "127.0.0.1:0,otlp"}).verdict == "pass"
    assert host.metrics({"DISTDIAG_METRICS": "everywhere"}).verdict == "warn"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check = host.metrics({"DISTDIAG_METRICS": str(port)})
    assert check.verdict == "warn" and "in use" in check.found
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    check = host.metrics({"DISTDIAG_METRICS": "9464"})
    assert check.verdict == "warn" and check.remedy == "pip install prometheus-client"
