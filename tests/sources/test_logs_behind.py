"""What is behind a failure or a timeout: the fabric of the GPUs, a limit of threads, a missing interface; and what only looks like one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from distdiag.sources.logs.verdict import judge_logs
from tests.sources.test_logs import about, diagnose, only, raised, timeout

STEPS = "".join(f"step {i} loss {i / 7:.2f}\n" for i in range(5, 60))
OTHERS = "".join(timeout(r) for r in (0, 2, 3))
FABRIC = (
    "UserWarning: CUDA initialization: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
    "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized (Triggered internally)\n"
)
BLAS = "[rank1]: OpenBLAS blas_thread_init: pthread_create failed for thread 8 of 9: Resource temporarily unavailable\n"
LIMIT = "[rank1]: OpenBLAS blas_thread_init: RLIMIT_NPROC 3000 current, 3000 max\n"
NO_INTERFACE = "node2:71:71 [0] bootstrap.cc:53 NCCL WARN Bootstrap : no socket interface found\n"


@pytest.mark.parametrize("error", ["ValueError: no GPUs found!", "AssertionError: torch.cuda.is_available()"])
def test_a_warning_that_the_fabric_is_not_set_up_explains_what_misses_its_gpu(tmp_path: Path, error: str) -> None:
    f = only(diagnose(tmp_path, FABRIC + raised(1, error) + OTHERS))
    assert about(f) == ("rank_lost", "crashed", (1,), (0, 2, 3))
    assert "802" in f.message
    assert "fabric manager" in f.advice
    other = only(diagnose(tmp_path, FABRIC + raised(1, "KeyError: 'labels'")))
    assert "fabric" not in other.advice


def test_a_warning_that_the_fabric_is_not_set_up_explains_an_exit_without_a_message(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, FABRIC + "failed (exitcode: 1) local_rank: 0 (pid: 911) of binary: python\n"))
    assert "fabric manager" in f.advice
    assert not diagnose(tmp_path, FABRIC + STEPS).findings  # it trains on the CPU


@pytest.mark.parametrize(
    "text",
    [
        BLAS + LIMIT,
        "[rank1]: libgomp: Thread creation failed: Resource temporarily unavailable\n",
        "[rank1]: OMP: System error #11: Resource temporarily unavailable\n",
        "[rank1]:   what():  Resource temporarily unavailable\n",
        raised(1, "BlockingIOError: [Errno 11] Resource temporarily unavailable", "/usr/lib/multiprocessing/popen_fork.py"),
        raised(1, "RuntimeError: can't start new thread", "/usr/lib/python3.12/threading.py"),
    ],
)  # fmt: skip
def test_who_could_start_no_thread_is_the_rank_that_others_wait_for(tmp_path: Path, text: str) -> None:
    f = only(diagnose(tmp_path, text + OTHERS))
    assert about(f) == ("rank_lost", "crashed", (1,), (0, 2, 3))
    assert "ulimit -u" in f.advice
    assert ("3,000" in f.message) is (LIMIT in text)


def test_a_worker_that_was_lost_had_no_more_threads(tmp_path: Path) -> None:
    died = "actor_id: 5c0f\n\tpid: 44\n\tip: 10.0.0.5\nThe actor is dead because its worker process has died.\n"
    f = only(diagnose(tmp_path, BLAS.replace("[rank1]:", "(Worker pid=44, ip=10.0.0.5)") + died))
    assert "could not start a thread" in f.message
    assert not diagnose(tmp_path, BLAS + "".join(f"[rank1]: step {i}\n" for i in range(5))).findings


def test_another_lack_of_a_resource_is_no_limit_of_threads(tmp_path: Path) -> None:
    f = only(
        diagnose(tmp_path, raised(1, "BlockingIOError: [Errno 11] Resource temporarily unavailable", "/w/lock.py"))
    )
    assert "ulimit" not in f.advice


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("node2:71:71 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to bond7\n" + NO_INTERFACE, "interface bond7"),
        ("node2:71:99 [0] NCCL WARN No interface found with NCCL_SOCKET_IFNAME=eth7\n", "interface eth7"),
        (raised(1, "RuntimeError: [enforce fail at gloo/device.cc:9] Unable to find interface for: ib9"), "interface ib9"),
        (raised(1, "RuntimeError: Unable to find address for: ens9f1"), "interface ens9f1"),
        (raised(1, "RuntimeError: [gloo/transport/tcp/device.cc:84] bind: No such device"), "interface of that name"),
        (NO_INTERFACE, "interface of that name"),
    ],
)  # fmt: skip
def test_a_missing_interface_is_why_the_others_timed_out(tmp_path: Path, text: str, named: str) -> None:
    f = only(diagnose(tmp_path, text + OTHERS))
    assert (f.kind, f.cause) == ("rank_lost", "crashed")
    assert "found no network interface" in f.message
    assert named in f.advice


def test_an_exception_before_a_missing_interface_comes_first(tmp_path: Path) -> None:
    first = diagnose(tmp_path, raised(1, "KeyError: 'labels'") + NO_INTERFACE + OTHERS).findings[0]
    assert "KeyError" in first.message


@pytest.mark.parametrize(
    "line",
    [
        "[rank0]: ImportError: cannot import name 'fused', falling back to eager\n",
        "ImportError: No module named apex; falling back to the native optimizer\n",
        "CUDA error: no kernel image is available, falling back to the slow path\n",
    ],
)
def test_a_fallback_is_no_failure(tmp_path: Path, line: str) -> None:
    assert not diagnose(tmp_path, f"starting\n{line}").findings


def program(nth: int, what: str) -> str:
    """Return what a program printed that the job has run."""
    return f'Traceback (most recent call last):\n  File "/tmp/box/{nth}/solution.py", line {nth}, in <module>\n    f()\n{what}\n'


ERRORS = ("KeyError: 7", "IndexError: list index out of range", "ZeroDivisionError: division by zero", "TypeError: no")


@pytest.mark.parametrize("steps", [1, 300])  # more than the end that is read for progress
def test_errors_of_programs_that_the_job_runs_are_none_of_its_own(tmp_path: Path, steps: int) -> None:
    work = [
        program(n, e) + "".join(f"step {steps * n + i} reward 0.5\n" for i in range(steps))
        for n, e in enumerate(ERRORS)
    ]
    assert not diagnose(tmp_path, "".join(work)).findings
    f = only(diagnose(tmp_path, "".join(work) + raised(1, "ValueError: own") + "exits with return code = 1\n"))
    assert f.culprits == (1,)


def test_ranks_that_fail_one_after_another_are_no_programs(tmp_path: Path) -> None:
    one_step = "".join(program(n, e) + "step 7 loss 0.5\n" for n, e in enumerate(ERRORS))
    assert len(diagnose(tmp_path, one_step).findings) == len(ERRORS)
    equal = "".join(program(1, ERRORS[0]) + f"step {n} loss 0.5\n" for n in range(4))
    assert diagnose(tmp_path, equal).findings


def test_equal_lines_that_ray_left_out_are_counted(tmp_path: Path) -> None:
    ooms = "(Worker pid=11, ip=10.0.0.1) torch.OutOfMemoryError: CUDA out of memory.{}\n"
    again = " [repeated 4x across cluster] (Ray deduplicates logs by default.)"
    f = only(diagnose(tmp_path, ooms.format("") + ooms.format(again)))
    assert "4 more such lines" in f.message
    assert "repeated" not in f.message


def test_who_writes_behind_the_label_of_one_process_of_several(tmp_path: Path) -> None:
    lines = raised(0, "KeyError: 'x'", prefix="p2/4 | ")
    assert only(diagnose(tmp_path, "p1/4 | step 1\n" + lines)).message.startswith("p2/4 raised KeyError")


def test_the_device_of_an_npu_is_joined_with_its_rank(tmp_path: Path) -> None:
    broken = "npu:3 error: HBM multi-bit ECC error\n"
    assert only(diagnose(tmp_path, f"rank: 11, device: npu:3\n{broken}")).culprits == (11,)
    two_nodes = f"rank: 11, device: npu:3\nrank: 3, device: npu:3\n{broken}"
    assert only(diagnose(tmp_path, two_nodes)).culprits == ()


def test_one_rank_that_stops_early_decides_for_all(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, "[rank1]: [trainer] early stopping: no improvement in 5 evaluations\n" + OTHERS))
    assert f.culprits == (1,)
    assert "before each rank leaves the loop" in f.advice


def test_the_port_in_use_is_named_in_the_advice(tmp_path: Path) -> None:
    text = "The server socket has failed to listen on any local network address. port: 29512, useIpv6: false\n"
    assert "sport = :29512" in only(diagnose(tmp_path, text)).advice


def test_small_logs_take_time_in_proportion_to_their_number(tmp_path: Path) -> None:
    paths = [tmp_path / f"rank{n}.log" for n in range(1200)]
    for n, path in enumerate(paths):
        path.write_text(f"step 1 loss {n}\nstep 2 loss 1\n{raised(n, 'KeyError: 1')}{timeout(n)}")

    def takes_s(number: int) -> float:
        began = time.process_time()
        judge_logs([str(tmp_path)], paths[:number])
        return time.process_time() - began

    few_s = takes_s(150)
    assert takes_s(1200) < 16 * few_s
