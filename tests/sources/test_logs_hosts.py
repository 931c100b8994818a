"""What the kernel, the driver or a daemon reports of a host, and the failures that follow from it. All names are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sources.test_logs import about, diagnose, only, raised, timeout
from tests.sources.test_logs_first_cause import together

MODULE = "Mar 07 08:02:11 oak3 kernel: NVRM: API mismatch: the client has the version 601.12.03, but\n"
EVICTED = "Mar 07 08:02:11 oak3 kernel: LustreError: 167-0: lake2-MDT0001-mdc-ff00: This client was evicted by lake2-MDT0001; in progress operations using this service will fail.\n"
RESTORED = (
    "Mar 07 08:02:11 oak3 kernel: Lustre: lake2-OST0003-osc-ff: Connection to lake2-OST0003 (at 9.0.0.1@tcp) was lost; in\n"
    "Mar 07 08:02:19 oak3 kernel: Lustre: lake2-OST0003-osc-ff: Connection restored to 9.0.0.1@tcp (at 9.0.0.1@tcp)\n"
)
DISK = "Mar 07 08:02:11 oak3 kernel: I/O error, dev nvme7n1, sector 81 op 0x0:(READ)\n"
NVML = "Failed to initialize NVML: Unknown Error\n"
NO_GPU = "RuntimeError: No CUDA GPUs are available"
E803 = "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display driver / cuda driver combination"
E5, E108 = "OSError: [Errno 5] Input/output error", "OSError: [Errno 108] Cannot send after transport endpoint shutdown"


def on(host: str, *ranks: int, what: str) -> str:
    code = "".join(raised(r, what, prefix=f"{r}: ") for r in ranks)
    return f"{code}srun: error: {host}: tasks {ranks[0]}-{ranks[-1]}: Exited with exit code 1\n"


@pytest.mark.parametrize(
    ("what", "report", "words"),
    [
        (E803, MODULE, ("the NVIDIA driver on oak3 reports that its libraries", "reboot")),
        (NO_GPU, MODULE, ("different versions, which is the likely cause (line 1 of kernel.txt)", "reboot")),
        (E5, EVICTED, ("the kernel on oak3 reports that the file system's server lake2-MDT0001 has evicted", "drain the node")),
        (E108, EVICTED.replace("Error: 167-0:", ": 167-0:"), ("evicted", "drain the node")),
        (E5, "[81.2] ceph: mds0 rejected session\n", ("mds0 has evicted this client: what was in progress failed, which may be the cause", "drain")),
        (E5, DISK, ("the disk nvme7n1 has errors", "replace that disk")),
        (E5, "Mar 07 08:02:11 oak3 kernel: nfs: server fs-4 not responding, timed out\n", ("NFS server fs-4", "storage")),
    ],
)  # fmt: skip
def test_a_failure_follows_from_what_its_host_reports(
    tmp_path: Path, what: str, report: str, words: tuple[str, str]
) -> None:
    report_ = together(tmp_path, job_log=on("oak3", 4, 5, what=what) + "0: | distributed init (rank 0): env://\n", kernel_txt=report)  # fmt: skip
    f = only(report_)
    assert about(f)[:3] == ("rank_lost", "crashed", (4, 5)) and words[0] in f.message and words[1] in f.advice
    assert any("kernel.txt" in e for e in f.evidence) and not any("not read" in n for n in report_.notes)


@pytest.mark.parametrize(
    ("what", "report"),
    [
        (E5, EVICTED.replace("oak3", "oak4")),  # of another host
        ("ValueError: bad sample 7", EVICTED),
        (E5, MODULE),
        (E803, "Mar 07 08:02:11 oak3 kernel: I/O error, dev sr0, sector 81\n"),
        (E5, RESTORED),
    ],
    ids=["host", "program", "driver", "cdrom", "restored"],
)  # fmt: skip
def test_a_failure_does_not_follow_from_another_report(tmp_path: Path, what: str, report: str) -> None:
    f = only(together(tmp_path, job_log=on("oak3", 4, 5, what=what), kernel_txt=report))
    assert "reports that" not in f.message


@pytest.mark.parametrize(
    ("when", "follows"), [("2031-03-07T08:02:13+00:00", True), ("2031-03-07T07:40:13+00:00", False), ("2031-03-09T08:02:13+00:00", False)]
)  # fmt: skip
def test_a_report_explains_what_failed_soon_after_it(tmp_path: Path, when: str, follows: bool) -> None:
    job = on("oak3", 4, 5, what=E5).replace("4: Trace", f"4: {when} Trace").replace("4: OSE", f"4: {when} OSE")
    report = EVICTED.replace("Mar 07 08:02:11", "2031-03-07T08:02:11+00:00")
    f = only(together(tmp_path, job_log=job, kernel_txt=report))
    assert ("evicted" in f.message) is follows


def test_different_errors_with_one_report_are_one_finding(tmp_path: Path) -> None:
    job = on("oak3", 4, what=E5) + on("oak3", 5, what=E108) + on("oak3", 6, what="RuntimeError: unexpected pos 8 vs 4")
    job += "".join(timeout(r) for r in (0, 1))
    f = only(together(tmp_path, job_log=job, messages_oak3_txt=EVICTED))
    assert about(f) == ("rank_lost", "crashed", (4, 5, 6), (0, 1))
    assert "ranks 4, 5, 6 on oak3 failed with 3 different errors (rank 4 raised OSError: [Errno 5]" in f.message


def test_a_container_that_lost_its_gpus_explains_each_later_attempt(tmp_path: Path) -> None:
    again = "I0307 08:00:00.1 31 torch/distributed/elastic/agent/server/api.py:889] [default] Worker group FAILED. 2/3 attempts left; will restart worker group\n"
    text = f"[rank0] step 10 loss 2.0\n[metrics] poll failed: {NVML}[rank0] step 20 loss 1.9\n"
    text += raised(1, "OSError: no answer", line=9) + again + "".join(raised(r, NO_GPU) for r in range(4)) + again
    f = only(diagnose(tmp_path, text + "".join(raised(r, NO_GPU) for r in range(4))))
    assert about(f)[:2] == ("rank_lost", "crashed") and "which is the likely cause (line 2)" in f.message
    assert "create it again" in f.advice


FAULT = "nvidia 0000:{}:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x1e address=0x8f flags=0x30]\n"
BUS = "n1:8:9 [0] NCCL INFO comm 0x5 rank 0 nranks 4 cudaDev 0 busId 41000 commId 0x5 - Init COMPLETE\n"


@pytest.mark.parametrize(
    ("lines", "devices"),
    [
        ("".join(map(FAULT.format, ("01", "41"))), "0000:01:00.0, 0000:41:00.0"),
        ("AMD-Vi: Event logged [IO_PAGE_FAULT device=41:00.0 domain=0x1e\n", "41:00.0"),
        ("DMAR: [DMA Write NO_PASID] Request device [41:00.0] fault addr 0xff [fault reason 0x05] PTE\n", "41:00.0"),
        ("DMAR: [DMA Write NO_PASID] Request device [03:00.0] fault addr 0xff [fault reason 0x05] PTE\n", ""),  # no GPU
    ],
)
def test_gpus_that_the_iommu_refuses_may_be_why_all_ranks_wait(tmp_path: Path, lines: str, devices: str) -> None:
    report = diagnose(tmp_path, BUS + lines + "".join(map(timeout, range(4))))
    f = only(report)
    assert (f"refused accesses to memory by {devices}:" in f.message) is bool(devices)
    assert f.advice.startswith("run once with NCCL_P2P_DISABLE=1") is bool(devices)
    hangs = diagnose(tmp_path, BUS + lines)
    assert not hangs.findings and any("NCCL_P2P_DISABLE" in n for n in hangs.notes) is bool(devices)


def test_a_disk_that_was_nearly_full_explains_that_it_is_full(tmp_path: Path) -> None:
    warned = "(raylet, ip=9.0.0.4) [2031-03-07 08:02:11,147 E 7 8] (raylet) file_system_monitor.cc:116: /big/ray/session_1 is over 95% full, available space: 3.1 GB; capacity: 90 GB.\n"
    text = warned + raised(
        0, "ray.exceptions.OutOfDiskError: Local disk is full", prefix="(Shuffle pid=77, ip=9.0.0.4) "
    )
    f = only(diagnose(tmp_path, text))
    assert "the raylet on 9.0.0.4 reports that the disk of /big/ray/session_1 is over 95% full" in f.message
    assert "object_spilling_config" in f.advice and not any("95%" in n for n in diagnose(tmp_path, warned).notes)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("ModuleNotFoundError: No module named 'numpy._core'", "numpy 2 wrote"),
        ("AttributeError: Can't get attribute 'Mix' on <module 'aug.ops' from '/w/aug/ops.py'>", "in the same versions"),
        ("AttributeError: Can't get attribute 'Mix' on <module '__main__' from '/w/run.py'>", "read its traceback"),
        ("ModuleNotFoundError: No module named 'shapely'", "install it"),
        (E803, "different versions there: reboot"),
        (E108, "the file system failed"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/s/tmp-checkpoint-8' -> '/s/checkpoint-8'", "upgrade transformers"),
    ],
)  # fmt: skip
def test_the_advice_names_what_the_error_alone_shows(tmp_path: Path, what: str, words: str) -> None:
    assert words in only(diagnose(tmp_path, raised(1, what))).advice


@pytest.mark.parametrize(
    "error",
    [
        "FileExistsError: [Errno 17] File exists: '/s/x'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/s/a' -> '/s/b'",
    ],
)
def test_a_race_inside_a_package_is_not_of_the_users_code(tmp_path: Path, error: str) -> None:
    package = raised(1, error, file="/e/lib/python3.12/site-packages/saver/core.py")
    assert "is in saver itself, not in your code" in only(diagnose(tmp_path, package)).advice
    assert "itself" not in only(diagnose(tmp_path, raised(1, error))).advice
    assert "itself" not in only(diagnose(tmp_path, package.replace(error, "ValueError: x"))).advice


def test_an_error_of_all_ranks_of_one_host_is_compared_with_the_others(tmp_path: Path) -> None:
    there = "".join(raised(r, "RuntimeError: odd thing", prefix=f"[oak4] [rank{r}]: ") for r in (2, 3))
    f = only(diagnose(tmp_path, "".join(f"[oak3] [rank{r}] up\n" for r in (0, 1)) + there))
    assert f.advice.startswith("only the ranks of oak4 have it: compare that host")
    f = only(diagnose(tmp_path, there))
    assert "oak4" not in f.advice


def test_a_module_that_is_missing_while_an_object_is_read_is_another_environment(tmp_path: Path) -> None:
    what = "ModuleNotFoundError: No module named 'shapely._geo'"
    reads = raised(1, what).replace(
        "    step()\n",
        '    step()\n[rank1]:   File "/e/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 9, in _tensor_to_object\n[rank1]:     return _unpickler(b).load()\n',
    )
    assert "in the same versions" in only(diagnose(tmp_path, reads)).advice
    assert only(diagnose(tmp_path, raised(1, what))).advice.startswith("install it")


def test_libfabrics_reason_is_read(tmp_path: Path) -> None:
    text = "libfabric:48:17::efa:cq:handle_error():79<warn> err: 113, message: Unresponsive receiver. This may be rules in the security group.\n"
    text += "[rank0]:[E ProcessGroupNCCL.cpp:1484] [Rank 0] Process group watchdog thread terminated with exception: NCCL error: unhandled system error, NCCL version 2.30.5\n"
    f = only(diagnose(tmp_path, text))
    assert "Unresponsive receiver" in f.message and "whose other side is that group itself" in f.advice
