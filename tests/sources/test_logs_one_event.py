"""One event is one finding, and one process has one name, whatever launchers and collectors put around its lines. All texts are made up."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from distdiag.sources.logs.verdict import diagnose_logs
from distdiag.sources.logs.writers import time_of, writer
from tests.sources.test_logs import about, diagnose, only, raised, table, timeout

KILLED = "Memory cgroup out of memory: Killed process {pid} (pt_data_worker) total-vm:9kB, anon-rss:9kB\n"


GLOO_LATE = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"
)
BAR = "Map:  {0}%|##  | {0}/100 [06:10:53<4:31:33, 17.07 examples/s]\n"


def test_the_host_in_front_of_a_kernels_line_has_the_gpu(tmp_path: Path) -> None:
    ranks = "".join(f"{q}: [rank {q}/8] host h{q // 4}\n" for q in range(8))
    xid = (
        "h1 kernel: [74785.661190] NVRM: Xid (PCI:0000:3b:00): 79, pid=2117, name=python, GPU has fallen off the bus.\n"
    )
    report = diagnose(
        tmp_path, ranks + xid + raised(5, "torch.AcceleratorError: CUDA error: unspecified launch failure")
    )
    assert report is not None and report.ranks_seen == 8
    assert only(report).message.startswith("host h1 has a GPU with Xid 79")


def test_a_host_is_named_once(tmp_path: Path) -> None:
    line = "us-gpu12:423:611 [0] net_socket.cc:540 NCCL WARN NET/Socket : peer 192.168.1.13<51220> message truncated : receiving 524288 bytes instead of 65536\n"
    assert only(diagnose(tmp_path, line)).message.startswith("GPU 0 of us-gpu12 and its peer at 192.168.1.13")


def test_ranks_on_one_gpu_are_why_nccl_calls_their_use_invalid(tmp_path: Path) -> None:
    both = "[rank1]: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000\n"
    text = both + "".join(raised(q, "RuntimeError: ncclCommInitRank failed: invalid usage") for q in (0, 1))
    assert only(diagnose(tmp_path, text)).message.startswith("ranks 0, 1 share one GPU")


def test_a_bar_that_moves_while_others_wait_is_of_the_silent_rank(tmp_path: Path) -> None:
    late = "".join(raised(q, GLOO_LATE) for q in (1, 2))
    f = only(diagnose(tmp_path, "[rank0]: ok\n" + BAR.format(70) + late + BAR.format(72)))
    assert f.culprits == (0,) and "a progress bar moved on" in f.message and "longer timeout" in f.advice
    f = only(diagnose(tmp_path, "[rank0]: ok\n" + BAR.format(70) + late))
    assert f.culprits == (0,) and "progress bar" not in f.message and f.advice.startswith("read the log of rank 0")


def test_of_nested_labels_the_innermost_is_the_process(tmp_path: Path) -> None:
    line = "(Engine_0 pid=40) (Worker TP2 pid=52) RuntimeError: CUDA error: misaligned address\n"
    assert (writer(line).process, writer(line).pid) == ("Worker TP2 pid=52", 52)
    assert only(diagnose(tmp_path, line)).message.startswith("Worker TP2 pid=52 had a CUDA error")


def test_a_loaders_worker_is_the_process_that_the_kernel_killed(tmp_path: Path) -> None:
    lost = raised(1, "RuntimeError: DataLoader worker (pid(s) 70, 71) exited unexpectedly")
    f = only(diagnose(tmp_path, lost + KILLED.format(pid=71) + timeout(0)))
    assert about(f) == ("rank_lost", "killed", (1,), (0,)) and "which the kernel killed" in f.message
    assert about(only(diagnose(tmp_path, lost + KILLED.format(pid=99))))[1] == "crashed"


def test_a_fault_and_the_signal_that_it_names_are_one_event(tmp_path: Path) -> None:
    fault = 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x0f (most recent call first):\n  File "/u/d.py", line 4 in read\n'
    table = "  time      : 2031-02-03_04:05:06\n  host      : h7\n  rank      : 9 (local_rank: 1)\n  exitcode  : {code} (pid: 8)\n  traceback : Signal\n"
    f = only(diagnose(tmp_path, fault + table.format(code=-11)))
    assert f.culprits == (9,) and f.message == "rank 9 on h7 died in native code: Segmentation fault at d.py:4 in read"
    assert len(diagnose(tmp_path, fault + table.format(code=-9)).findings) == 2


@pytest.mark.parametrize(
    "banner", ["!!!!!!! Segfault encountered !!!!!!!\n", "Fatal Python error: Segmentation fault\n"]
)
def test_a_fault_and_the_only_worker_that_was_lost_after_it_are_probably_one(tmp_path: Path, banner: str) -> None:
    died = "ERROR 03-02 Worker proc VllmWorker-{} died unexpectedly, shutting down executor.\n"
    fault = banner + '  File "<unknown>", line 0, in ncclGroupEnd\n\n'
    f = only(diagnose(tmp_path, fault + died.format(1)))
    assert f.culprits == (1,) and f.message.startswith("probably rank 1 died in native code")
    assert f.certainty == "suspected" and "the stack below it" in f.advice
    assert only(diagnose(tmp_path, fault)).culprits == ()
    assert len(diagnose(tmp_path, fault + died.format(1) + died.format(2)).findings) == 2
    assert len(diagnose(tmp_path, died.format(1) + fault).findings) == 2


def test_a_message_that_is_logged_and_raised_is_one_event_of_the_task_that_ended(tmp_path: Path) -> None:
    listen = "The server socket has failed to listen on any local network address."
    text = f"[E203 04:05:06.1 socket.cpp:462] [c10d] {listen}\n"
    text += raised(0, f"DistNetworkError: {listen} port: 29511, useIpv6: false, code: -98", prefix="")
    f = only(diagnose(tmp_path, text + "srun: error: n4: task 2: Exited with exit code 1\n"))
    assert f.culprits == (2,) and "rank 2 on n4 could not listen: port 29511 is in use" in f.message
    assert f.certainty == "suspected"


def test_ranks_that_the_launcher_saw_fail_are_named_with_a_nameless_error(tmp_path: Path) -> None:
    """All of them failed in one second, so their order shows nothing; one alone is the process with the only error."""
    error = raised(0, "KeyError: 'y'", prefix="")
    error += raised(
        0, "RuntimeError: [p/gloo/transport/tcp/pair.cc:5] Connection closed by peer [10.1.0.4]:4", prefix=""
    )
    ended = [table(r, 1, "To enable traceback see: x") for r in (0, 2)]
    f = only(diagnose(tmp_path, error + ended[0] + ended[1]))
    assert f.culprits == () and "reports that ranks 0, 2 failed, and the log does not show whose" in f.message
    assert only(diagnose(tmp_path, error + ended[1])).message == "rank 2 on n1 raised KeyError: 'y' at run.py:7 in main"


def test_the_systems_error_after_an_exception_is_a_part_of_it(tmp_path: Path) -> None:
    ended = raised(3, "RuntimeError: [enforce fail at x.cc:7] . unexpected pos 3 vs 4").replace(
        "in main", "in <module>"
    )
    text = ended + "[rank3]: OSError: [Errno 28] No space left on device\n"
    f = only(diagnose(tmp_path, text))
    assert f.message.endswith("at run.py:7; it also reported OSError: [Errno 28] No space left on device")
    other = ended + "[rank4]: OSError: [Errno 28] No space left on device\n"
    assert all("also reported" not in f.message for f in diagnose(tmp_path, other).findings)


def test_a_devices_failure_is_told_with_what_its_process_reports(tmp_path: Path) -> None:
    xid = "NVRM: Xid (PCI:0000:1b:00): 95, pid=41, name=python, Uncontained\n"
    f = only(diagnose(tmp_path, raised(1, "RuntimeError: CUDA error: uncorrectable ECC error encountered") + xid))
    assert f.culprits == (1,) and "Xid 95" in f.message
    assert f.message.endswith("the process itself reports a GPU with an uncorrectable memory error (ECC)")


@pytest.mark.parametrize("line", ["world_size=8 nnodes=2 host=a", "rank=1 world_size=8"])
def test_a_line_with_the_number_of_ranks_gives_it(tmp_path: Path, line: str) -> None:
    assert diagnose(tmp_path, f"[x][INFO] - {line}\n" + raised(1, "ValueError: x")).world_size == 8


def test_rays_memory_monitor_names_the_process_and_the_drivers_line_is_not_where_it_died(tmp_path: Path) -> None:
    text = raised(
        0, "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.", prefix=""
    )
    text += (
        "Memory on the node (IP: 10.9.0.4, ID: 5f) where the task (actor ID: 7, name=W, pid=312, memory used=40.1GB) was running was "
        "95.2GB / 100.0GB (0.952), which exceeds the memory usage threshold of 0.95.\n"
    )
    f = only(diagnose(tmp_path, text))
    assert f.message.startswith("process 312 on 10.9.0.4 was killed") and "run.py" not in f.message


def test_the_command_in_deepspeeds_last_line_is_that_of_its_last_process(tmp_path: Path) -> None:
    line = "['/usr/bin/python', '-u', 't.py', '--local_rank=3', '--x'] exits with return code = -7\n"
    assert only(diagnose(tmp_path, line)).message.startswith("a process was killed by SIGBUS")


def test_colours_inside_a_message_hide_nothing(tmp_path: Path) -> None:
    red, off = "\x1b[1;31m", "\x1b[0m"
    text = f"╭─── {red}Traceback {off}{red}(most recent call last){off} ───╮\n│{off} {red}/home/u/{off}cb.py:{red}51{off} in end    │\n╰───╯\n"
    f = only(diagnose(tmp_path, text + f"{red}KeyError: {off}'dice'\n" + timeout(1) + timeout(2)))
    assert "raised KeyError: 'dice' at cb.py:51 in end" in f.message


def test_a_collectors_record_has_the_time_and_the_pod_of_a_line(tmp_path: Path) -> None:
    rows = [
        (
            "11:02:10",
            "ft-3",
            "2031-05-05 13:02:10 [rank25] RuntimeError: CUDA error: uncorrectable ECC error encountered",
        ),
        ("11:02:11", "ft-3", "NVRM: Xid (PCI:0000:1b:00): 48, pid=4012, name=python, DBE (double bit error)"),
        ("11:12:12", "ft-0", timeout(1).strip()),
    ]
    text = "".join(
        json.dumps({"timestamp": f"2031-05-05T{t}.1Z", "labels": {"pod": pod}, "line": line}) + "\n"
        for t, pod, line in rows
    )
    f = only(diagnose(tmp_path, text))
    assert about(f) == ("gpu", "xid", (25,), (1,)) and "then timed out" in f.message


@pytest.mark.parametrize(
    ("line", "pod"),
    [
        ('2031-05-05T11:02:10Z {app="t", pod="ft-3"} RuntimeError: x', "ft-3"),
        ("ft-3 trainer 2031-05-05T11:02:10.1Z RuntimeError: x", "ft-3"),
        ("epoch-3 done 2031-05-05 11:02:10", ""),
    ],
)
def test_the_pod_that_loki_and_stern_put_in_front_of_a_line(line: str, pod: str) -> None:
    assert writer(line).process == pod


def test_times_with_zones_are_of_one_clock() -> None:
    zulu, east, local = map(
        time_of, ("2031-04-30T22:30:00.5Z x", "2031-05-01T00:30:00+0200 x", "2031-04-30 22:30:00,5 x")
    )
    assert zulu == east and zulu is not None and local is not None
    assert zulu[0] != local[0]
    assert time_of("2031-02-31 10:00:00 x") is None


def test_what_failed_in_the_runs_before_is_a_note(tmp_path: Path) -> None:
    again = "I203 api.py:926] Worker group FAILED. 2/3 attempts left; will restart worker group\n"
    first = "[rank6]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
    report = diagnose(tmp_path, first + again + raised(1, "KeyError: 'x'"))
    assert report.findings[0].culprits == (1,)
    assert any("rank 6 has a GPU with an uncorrectable memory error (ECC) on line 1" in note for note in report.notes)


@pytest.mark.parametrize(
    ("line", "failed"),
    [
        ("It usually means the container was OOMKilled by the kernel, that is, it got a signal.", False),
        ("    Reason:       OOMKilled", True),
        ('"reason":"OOMKilled"', True),
        ("pod w-1 was OOMKilled", True),
        ("container OOMKilled (exit code 137)", True),
    ],
)
def test_a_status_is_evidence_and_a_sentence_about_it_is_not(tmp_path: Path, line: str, failed: bool) -> None:
    assert bool(diagnose(tmp_path, line + "\n").findings) is failed


def test_a_rank_number_of_a_group_is_no_rank_of_the_job(tmp_path: Path) -> None:
    text = (
        "[rank37]: EI0002: has not received the Notify record from remote rank{}: [24]. base information: [tag[AllReduce_x]]. "
        "group information: [group:[{}], rankSize[32]]\n"
    )
    f = only(diagnose(tmp_path, text.format("", "group_7")))
    assert (f.culprits, f.victims) == ((), (37,)) and "rank 24 of group_7" in f.message
    assert only(diagnose(tmp_path, text.format("", "hccl_world_group"))).culprits == (24,)
    numbered = text.format("", "group_7").replace("rankSize[32]", "rankSize[32], rankId[{} 24]")
    assert only(diagnose(tmp_path, numbered.format(25))).culprits == ()
    assert only(diagnose(tmp_path, numbered.format(37))).culprits == (24,)  # then ranks 0 to 37 are its first ones


def test_other_messages(tmp_path: Path) -> None:
    beat = (
        "UNAVAILABLE: Task /job:w/replica:0/task:3 heartbeat timeout. This indicates that the remote task has failed.\n"
    )
    assert about(only(diagnose(tmp_path, beat)))[:2] == ("rank_lost", "silent")
    boot = "n2:7:9 [0] bootstrap.cc:131 NCCL WARN Message truncated : received 1024 bytes instead of 256\n"
    f = only(diagnose(tmp_path, boot))
    assert f.kind == "rank_lost" and "different versions of NCCL" in f.message
    lost = "[rank3]: DistBackendError: [3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Connection reset by peer\n"
    f = only(diagnose(tmp_path, raised(0, "ImportError: no y") + lost))
    assert f.culprits == (0,) and "rank 3 then lost its connection" in f.message


def test_a_programs_xid_and_the_exception_of_its_process_are_one_event(tmp_path: Path) -> None:
    text = "NVRM: Xid (PCI:0000:8d:00): 31, pid=551, name=python, MMU Fault: at 0x7f\n"
    text += raised(3, "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling x")
    text += "E304 api.py:874] failed (exitcode: 1) local_rank: 3 (pid: 551) of binary: python\n"
    f = only(diagnose(tmp_path, text))
    assert about(f)[:3] == ("gpu", "xid", (3,)) and f.certainty == "suspected"


@pytest.mark.parametrize("xids", [(94, 31), (31, 94), (94, 154, 13)])
def test_of_a_devices_xids_that_of_the_hardware_is_named_with_its_own_advice(
    tmp_path: Path, xids: tuple[int, ...]
) -> None:
    dmesg = "".join(f"NVRM: Xid (PCI:0000:8d:00): {n}, pid=551, name=serve, Of number {n}\n" for n in xids)
    (tmp_path / "dmesg-h4.txt").write_text(dmesg)
    error = raised(0, "RuntimeError: CUDA error: unspecified launch failure", prefix="")
    (tmp_path / "serve.log").write_text("[2031-03-02 08:19:45 TP5] " + error)
    report = diagnose_logs([str(tmp_path)])
    assert report is not None
    f = only(report)
    first, _, then = f.message.partition("; ")
    assert first == "the host of dmesg-h4.txt has a GPU with Xid 94 at PCI 0000:8d:00: Of number 94"
    assert then.startswith("TP5 of serve.log then had a CUDA error")
    assert "the GPU's memory" in f.advice and "program" not in f.advice


@pytest.mark.parametrize("worker", ["", "(Engine pid=8) (W pid=71, ip=10.1.1.3) "])
def test_what_ray_passes_on_is_of_the_worker_that_raised_it_on_its_node(tmp_path: Path, worker: str) -> None:
    line = "(Engine pid=8) (W pid={}) rank {} in world size 4 is assigned as TP rank 0\n"
    text = "".join(line.format(pid, r) for pid, r in ((20, 0), (21, 1), ("70, ip=10.1.1.3", 2), ("71, ip=10.1.1.3", 3)))
    what = '  File "/a/d.py", line 8, in load\n    raise x\nHeaderError: cut off\n'
    passed_on = "ray.exceptions.RayTaskError(HeaderError): ray::W.load() (pid=71, ip=10.1.1.3, actor_id=7)\n" + what
    lines = "".join(f"(Engine pid=8) {x}\n" for x in passed_on.splitlines())
    lines += "".join(worker + x + "\n" for x in ("Traceback (most recent call last):\n" + what).splitlines() if worker)
    f = only(diagnose(tmp_path, text + lines))
    assert f.culprits == (3,) and f.message == "rank 3 on 10.1.1.3 raised HeaderError: cut off at d.py:8 in load"


IB = "n8:2:3 [{gpu}] transport/net_ib.cc:9 NCCL WARN NET/IB : "


def test_an_rdma_error_of_the_host_that_reports_it_is_not_its_peers(tmp_path: Path) -> None:
    line = (
        IB.format(gpu=0) + "Got completion from peer 10.2.0.3<3> with status={} opcode=0 len=0 vendor err 83 (Send)\n"
    )
    assert "failed on GPU 0 of n8 itself" in only(diagnose(tmp_path, line.format(4))).message
    assert "lost its RDMA connection to 10.2.0.3" in only(diagnose(tmp_path, line.format(12))).message


def test_a_port_that_failed_comes_before_the_connections_through_it(tmp_path: Path) -> None:
    port = "".join(IB.format(gpu=g) + "Got async event : port error\n" for g in range(2))
    lost = "n9:2:3 [4] net_ib.cc:9 NCCL WARN NET/IB : Got completion from peer 10.2.0.8<3> with error 12, opcode 2, len 1, vendor err 129\n"
    f = only(diagnose(tmp_path, port + lost))
    assert f.message.startswith("host n8 lost a port")
    queue = IB.format(gpu=0) + "mlx5_0:1 Got async event : local access violation work queue error\n"
    assert "lost a port" not in "".join(x.message for x in diagnose(tmp_path, queue).findings)


def test_a_connection_that_timed_out_names_its_peer(tmp_path: Path) -> None:
    line = "[2031-06-17 06:48:31 TP{}] RuntimeError: [gloo/transport/tcp/pair.cc:538] Read error [10.0.0.11]:21204: Connection timed out\n"
    f = only(diagnose(tmp_path, line.format(4) + line.format(5)))
    assert f.message.startswith("TP4, TP5 lost a connection to 10.0.0.11")


def test_the_launchers_of_a_cray_and_kubernetes_name_who_was_killed(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, "x1s2.hsn: rank 12 died from signal 9\nx1s3.hsn: rank 3 died from signal 15\n"))
    assert f.culprits == (12,) and "on x1s2.hsn was killed by SIGKILL" in f.message
    pod = "Name:             w-2\n    State:          Terminated\n      Reason:       OOMKilled\n      Exit Code:    137\n"
    assert only(diagnose(tmp_path, pod)).message.startswith("w-2 was killed: the host or its memory limit")


@pytest.mark.parametrize(
    ("losses", "culprits"),
    [
        ({0: "2.1 nan nan"}, None),
        ({0: "2.1 nan 1.5"}, ()),  # a step that was skipped
        ({0: "2.1 2.0 nan nan", 1: "2.1 nan nan nan", 2: "2.1 2.0 nan nan"}, (1,)),
        ({0: "2.1 nan nan", 1: "2.1 nan nan"}, None),
        ({0: "2.1 2.0 1.9", 1: "2.1 nan nan"}, (1,)),
    ],
)
def test_a_loss_that_stays_nan_is_the_reason_if_there_is_no_other(
    tmp_path: Path, losses: dict[int, str], culprits: tuple[int, ...] | None
) -> None:
    rows = zip(*(text.split() for text in losses.values()), strict=True)
    text = "".join(
        f"[rank{r}]: step {i} loss: {x}\n" for i, row in enumerate(rows) for r, x in zip(losses, row, strict=True)
    )
    records = re.sub(
        r"\[rank(\d)\]: step (\d) loss: (\S+)", r'{"rank": \1, "step": \2, "local_loss": \3, "lr": 0.1}', text
    )
    as_records = diagnose(tmp_path, records.replace("nan", "NaN").replace("inf", "Infinity"))
    report = diagnose(tmp_path, text + "val_loss: nan\n{'train_runtime': 9.1}\n")
    assert [f.culprits for f in as_records.findings] == [f.culprits for f in report.findings]
    assert all(f.message.startswith("local_loss is NaN") and "(step " in f.message for f in as_records.findings)
    assert [(f.kind, f.culprits) for f in report.findings] == (
        [] if culprits == () else [("nonfinite", culprits or ())]
    )
    failed = only(diagnose(tmp_path, text + raised(2, "KeyError: 'x'")))
    assert "KeyError" in failed.message


def test_a_single_task_that_srun_names_is_the_rank_of_its_lines(tmp_path: Path) -> None:
    fault = '0: Fatal Python error: Bus error\n0: Current thread 0x0f (most recent call first):\n0:   File "/u/d.py", line 4 in read\n'
    f = only(diagnose(tmp_path, fault + "srun: error: n2: task 0: Bus error\n"))
    assert f.culprits == (0,) and "truncated" in f.advice


def test_memory_that_another_process_holds_is_not_saved_by_a_smaller_batch(tmp_path: Path) -> None:
    full = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB. Process 99 has 20.10 GiB memory in use. Including non-PyTorch memory, this process has 3.10 GiB memory in use."
    f = only(diagnose(tmp_path, raised(2, full)))
    assert f.message.endswith("at run.py:7 in main: process 99, which is not this rank, holds 20.1 GiB of that GPU")
    assert "end it" in f.advice and "gpu_memory_utilization" not in f.advice
    assert "batch" in only(diagnose(tmp_path, raised(2, full.replace("1 GiB", "30 GiB")))).advice  # it is not enough


@pytest.mark.parametrize(("held", "other"), [("74.12", False), ("40.00", True)])
def test_a_process_with_the_memory_of_the_rank_is_the_rank(tmp_path: Path, held: str, other: bool) -> None:
    full = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB. GPU 3 has a total capacity of 79.00 GiB of which 512.00 MiB is "
        f"free. Process 88 has {held} GiB memory in use. Of the allocated memory 30.00 GiB is allocated by PyTorch, and 1.90 GiB is reserved"
    )
    text = f"(W pid=7, ip=10.0.0.2) [init] rank=3 local_rank=3 world_size=8\n(W pid=7, ip=10.0.0.2) {full}\n"
    f = only(diagnose(tmp_path, text + raised(3, full)))
    assert f.culprits == (3,) and ("which is not this rank" in f.message) is other
    assert "lower the batch" in only(diagnose(tmp_path, raised(2, full.partition(" Process")[0]))).advice


@pytest.mark.parametrize(
    ("held", "allocated", "says"),
    [
        (("20.50", "40.90"), "40.20", "process 70, which is not this rank, holds 20.5 GiB"),
        (("40.90", "20.50"), "20.00", "process 70, which is not this rank, holds 40.9 GiB"),
        (("31.50", "30.90"), "30.40", "another process, which is not this rank, holds about 31.5 GiB"),
        (("20.00", "21.00"), "35.00", ""),
    ],
)
def test_of_several_processes_the_rank_is_the_one_that_fits_what_it_allocated(
    tmp_path: Path, held: tuple[str, str], allocated: str, says: str
) -> None:
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 63.00 GiB of which 900.00 MiB is free. "
        + "".join(f"Process 7{i} has {gib} GiB memory in use. " for i, gib in enumerate(held))
        + f"Of the allocated memory {allocated} GiB is allocated by PyTorch, and 200.00 MiB is reserved by PyTorch but unallocated."
    )
    message = only(diagnose(tmp_path, raised(1, text))).message
    assert says in message and ("holds" in message) is bool(says)


@pytest.mark.parametrize(
    ("file", "prefix", "engine"),
    [
        ("/e/site-packages/sglang/srt/model_executor/runner.py", "", True),
        ("/e/site-packages/vllm/v1/worker/gpu.py", "(Worker pid=4) ", True),
        ("/u/load.py", "(EngineCore_DP0 pid=4) ", True),
        ("/u/vllm/train.py", "[rank1]: ", False),
    ],
)
def test_what_to_lower_where_memory_is_full_depends_on_the_program(
    tmp_path: Path, file: str, prefix: str, engine: bool
) -> None:
    full = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB."
    advice = only(diagnose(tmp_path, raised(1, full, file=file, prefix=prefix))).advice
    assert ("mem-fraction-static" in advice, "checkpointing" in advice) == (engine, not engine)


def test_what_did_not_start_comes_before_those_that_could_not_reach_it(tmp_path: Path) -> None:
    late = "n2: [E420 10:05:00.1 socket.cpp:1019] [c10d] The client socket has timed out after 300000ms while trying to connect to (n1, 29400).\n"
    f = only(
        diagnose(tmp_path, late + "n1: python3: can't open file '/run/t.py': [Errno 2] No such file or directory\n")
    )
    assert "did not start on n1: can't open file '/run/t.py'" in f.message
    beat = "W603 1 rdzv.py:9] The node 'n7_1_0' has failed to send a keep-alive heartbeat to the rendezvous 'j' due to an error of type RendezvousTimeoutError.\n"
    f = only(
        diagnose(
            tmp_path,
            beat + "elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed.\n",
        )
    )
    assert "torchrun on n7_1_0 lost the rendezvous" in f.message


def test_ranks_that_only_report_the_one_without_data_are_not_the_cause(tmp_path: Path) -> None:
    others = "".join(
        raised(r, "RuntimeError: Detected at least one rank that exhausted inputs. Throwing across all ranks.")
        for r in (0, 1)
    )
    f = only(diagnose(tmp_path, others + raised(3, "RuntimeError: Rank 3 exhausted all inputs.")))
    assert f.culprits == (3,) and "drop_last" in f.advice


def test_what_accelerate_compared_is_a_mismatch_of_the_ranks_not_a_failure_of_the_one_that_prints_it(
    tmp_path: Path,
) -> None:
    text = raised(
        0,
        "accelerate.utils.operations.DistributedOperationException: Cannot apply desired operation due to shape mismatches.",
    )
    text += "[rank0]: Operation: `accelerate.utils.operations.gather`\n[rank0]: Input shapes:\n"
    shapes = "".join(f"[rank0]:   - Process {r}: [4, {131 if r == 2 else 128}]\n" for r in range(3))
    f = only(diagnose(tmp_path, text + shapes))
    assert about(f) == ("mismatch", "shape", (2,), (0, 1)) and "[4, 131] on rank 2" in f.message


def test_amds_driver_names_the_gpu_that_it_reset(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, "[ 31.3] amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!\n" + timeout(0) + timeout(1)))
    assert about(f)[:2] == ("gpu", "lost") and "0000:c1:00.0" in f.message and f.victims == (0, 1)
    fault = "[ 13.9] amdgpu 0000:1c:00.0: {1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!\n"
    f = only(diagnose(tmp_path, fault + "HW Exception by GPU node-3 (Agent handle: 0x55b2) reason :GPU Hang\n"))
    assert "0000:1c:00.0: uncorrectable hardware error" in f.message


def test_what_the_ranks_wrote_before_different_calls(tmp_path: Path) -> None:
    line = "[NeMo I 2026-07-08 19:01:4{r} nemo_logging:393] rank {r}: checkpoint /r/e.ckpt {what}\n"
    text = "".join(line.format(r=r, what="already exists, skip" if r else "does not exist, saving") for r in range(3))
    text += "".join(timeout(r, op="ALLREDUCE" if r else "_ALLGATHER_BASE") for r in range(3))
    f = only(diagnose(tmp_path, text))
    assert f.culprits == (0,) and "before that is `rank 0: checkpoint /r/e.ckpt does not exist, saving`" in f.message
    assert "that of ranks 1, 2 `rank 1: checkpoint /r/e.ckpt already exists, skip`" in f.message
    assert "FSDP" not in f.advice
    sharded = text + "[rank0]:[E1 ProcessGroupNCCL.cpp:1785] [PG ID 1 PG GUID 1(mesh_fsdp) Rank 0] x\n"
    sharded = sharded.replace("ALLREDUCE", "_REDUCE_SCATTER_BASE")
    assert "FSDP" in only(diagnose(tmp_path, sharded)).advice


def test_amds_driver_and_the_process_report_one_hang_of_one_gpu(tmp_path: Path) -> None:
    driver = "[Sat May  9 02:19:49 2026] amdgpu 0000:46:00.0: amdgpu: "
    text = "[rank2]: HW Exception by GPU node-4 (Agent handle: 0x55d3) reason :GPU Hang\n"
    text += f"{driver}ring sdma0.0 timeout, signaled seq=55418, emitted seq=55421\n{driver}GPU reset begin!\n"
    f = only(diagnose(tmp_path, text))
    assert about(f)[:3] == ("gpu", "lost", (2,)) and "times" not in f.message and "HW Exception" in f.message
    by_launcher = text.replace("[rank2]: ", "") + table(2, -6, "Signal 6 (SIGABRT) received by PID 902")
    assert about(only(diagnose(tmp_path, by_launcher)))[:3] == ("gpu", "lost", (2,))
    assert "times" not in only(diagnose(tmp_path, text.partition("\n")[2])).message


def test_the_child_that_a_shell_reports_is_that_of_its_files_task(tmp_path: Path) -> None:
    lost = "[rank{r}]: RuntimeError: [gloo/transport/tcp/pair.cc:544] Connection closed by peer [10.1.0.5]:4\n"
    for r in (0, 1, 3):
        (tmp_path / f"slurm-7_{r}.out").write_text(lost.format(r=r))
    (tmp_path / "slurm-7_2.out").write_text("/var/job7/script: line 8: 611 Killed     python train.py\n")
    report = diagnose_logs([str(tmp_path)])
    assert report is not None
    f = only(report)
    assert f.culprits == (2,) and f.certainty == "suspected"


def test_zero_3_that_waits_for_another_module(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, raised(2, "AssertionError: {'id': 1, 'status': 'INFLIGHT', 'numel': 0}")))
    assert "same modules" in f.advice


def test_torchs_own_prefix_marks_an_exception_that_nobody_caught_also_without_its_frames(tmp_path: Path) -> None:
    waits = "[rank0]: DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//cuda//1\n"
    f = only(diagnose(tmp_path, "n-1: [rank1]: ModuleNotFoundError: No module named 'x'\n" + waits))
    assert about(f) == ("rank_lost", "crashed", (1,), (0,))
    assert diagnose(tmp_path, "[rank1] ERROR sample: ValueError: odd size\n").findings == ()


def test_the_pod_that_did_not_start_is_named(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, 'Warning Failed pod/w-2 Failed to pull image "reg/x:9": not found\n'))
    assert "did not start on w-2: Failed to pull image" in f.message


def test_what_nccl_prints_again_without_a_name_is_no_other_rank(tmp_path: Path) -> None:
    text = "h:{pid}:9 [{r}] NCCL INFO ncclCommInitRank comm 0x5 rank {r} nranks 2 cudaDev {r} - Init START\n"
    text = text.format(pid=1, r=0) + text.format(pid=2, r=1)
    text += "h:1:9 [0] include/alloc.h:112 NCCL WARN Cuda failure 999 'unknown error'\nLast error:\nCuda failure 999 'unknown error'\n"
    f = only(diagnose(tmp_path, text))
    assert f.culprits == (0,) and "same on all" not in f.message and "NCCL_CUMEM_ENABLE=0" in f.advice


def test_rays_description_of_an_actor_names_the_process_that_was_lost(tmp_path: Path) -> None:
    actor = "        class_name: Worker\n        actor_id: 5066\n        pid: 8768\n        name: W_0:3\n        namespace: b88\n        ip: 10.9.4.5\n"
    died = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR\n"
    assert only(diagnose(tmp_path, actor + died)).message.startswith("process 8768 on 10.9.4.5 was lost")
    assert only(diagnose(tmp_path, died)).message.startswith("a process was lost")


def test_counters_alone_do_not_show_that_a_collective_timed_out(tmp_path: Path) -> None:
    line = "[rank1]:[E909 08:45:30.1 ProcessGroupNCCL.cpp:2252] [PG ID 2 PG GUID 3 Rank 1] {} PG status: last enqueued work: 67, last completed work: 30\n"
    unknown = line.format("failure detected by watchdog at work sequence id: 31")
    assert "failed or timed out" in only(diagnose(tmp_path, unknown)).message


def test_a_shell_reports_that_a_process_aborted(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, "/x/run.sh: line 36:    14 Aborted                 (core dumped) python3 t.py\n"))
    assert f.message == "process 14 was killed by SIGABRT"


def test_a_failure_that_ray_passes_on_is_of_the_process_that_it_names(tmp_path: Path) -> None:
    text = "ray.exceptions.RayTaskError(RuntimeError): ray::W.run() (pid=40, ip=10.1.1.2, actor_id=7, repr=<W>)\n"
    text += '  File "/a/r.py", line 2, in run\nray::Inner.step() (pid=71, ip=10.1.1.3)\n  File "/a/d.py", line 8, in collate\n    raise x\n'
    f = only(diagnose(tmp_path, text + "RuntimeError: bad sample 9\n"))
    assert f.message.startswith("process 71 on 10.1.1.3 raised RuntimeError: bad sample 9 at d.py:8")
    assert only(
        diagnose(tmp_path, "(Inner pid=71, ip=10.1.1.3) [rank5]: ready\n" + text + "RuntimeError: bad sample 9\n")
    ).culprits == (5,)


def test_of_several_reports_of_lost_memory_the_one_with_the_process_counts(tmp_path: Path) -> None:
    raylet = "(raylet) node_manager.cc:9: 1 Workers (tasks / actors) killed due to memory pressure (OOM) at node (ID: 5f, IP: 10.9.0.4) over\n"
    assert only(diagnose(tmp_path, raylet)).message.startswith("a process on 10.9.0.4 was killed")
    task = "where the task (actor ID: 7, name=W, pid=312, memory used=40.1GB) was running was 9GB, which exceeds the memory usage threshold\n"
    f = only(diagnose(tmp_path, raylet + f"Memory on the node (IP: 10.9.0.4, ID: 5f) {task}"))
    assert f.message.startswith("process 312 on 10.9.0.4 was killed")


DIED = (
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n\tclass_name: W\n\tactor_id: 5f01\n\tpid: 312\n"
    "\tname: q1WorkerDict_1:2\n\tnamespace: 8c\n\tip: 10.9.0.4\nThe actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR\n"
)


@pytest.mark.parametrize(("gpus", "who", "culprits"), [("", "process 312 on 10.9.0.4", ()), ("['trainer.n_gpus_per_node=4']\n", "rank 6 on 10.9.0.4", (6,))])  # fmt: skip
def test_the_worker_that_died_on_the_host_where_ray_killed_one_for_memory_is_that_one(
    tmp_path: Path, gpus: str, who: str, culprits: tuple[int, ...]
) -> None:
    raylet = "(raylet, ip={0}) node_manager.cc:9: 1 Workers (tasks / actors) killed due to memory pressure (OOM) at node (ID: 5f, IP: {0}) over\n"
    f = only(diagnose(tmp_path, gpus + DIED + raylet.format("10.9.0.4")))
    assert f.message.startswith(f"{who} was killed by Ray's memory monitor") and f.culprits == culprits
    assert "RAY_memory_usage_threshold" in f.advice and f.cause == "killed"
    elsewhere = diagnose(tmp_path, gpus + DIED + raylet.format("10.9.0.5"))
    assert "memory monitor" not in elsewhere.findings[0].message


SEGMENT = "Error while creating shared memory segment /dev/shm/nccl-x (size 9), error: No space left on device (28)"
UNHANDLED = "torch.distributed.DistBackendError: NCCL error in: P.cpp:9, {}, NCCL version 2.21.5"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (UNHANDLED.format("remote process exited or there was a network error"), "rank 1 then failed with NCCL errors"),
        ("DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.", "rank 1 then lost its conn"),
        ("torch.distributed.DistNetworkError: Invalid answer to a ping", "rank 1 then failed while connecting"),
        ("torch.distributed.DistBackendError: another rank has failed", "rank 1 then failed in torch.distributed"),
    ],
)
def test_of_a_rank_that_follows_only_its_lines_are_told(tmp_path: Path, error: str, words: str) -> None:
    f = only(diagnose(tmp_path, raised(0, "KeyError: 'x'") + raised(1, error)))
    assert f.culprits == (0,) and f"; {words}" in f.message


def test_the_rank_whose_last_error_is_the_cause_is_none_of_its_followers(tmp_path: Path) -> None:
    error = UNHANDLED.format("unhandled system error")
    text = f"h1:10:40 [0] misc/shmutils.cc:129 NCCL WARN {SEGMENT}\n" + raised(0, error) + f"[rank0]: {SEGMENT}\n"
    f = only(diagnose(tmp_path, text + raised(1, error)))
    assert about(f)[2:] == ((0,), (1,)) and "; rank 1 then failed with NCCL errors" in f.message


@pytest.mark.parametrize(("seen", "culprits"), [((0, 1, 3), (2,)), ((0, 1), ()), ((0, 1, 3, 5), ())])
def test_the_rank_that_did_not_join_is_the_one_without_a_line(
    tmp_path: Path, seen: tuple[int, ...], culprits: tuple[int, ...]
) -> None:
    error = "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 3/4 clients joined."
    f = only(diagnose(tmp_path, "".join(f"[rank{r}]: ready\n" for r in seen) + raised(0, error)))
    assert f.culprits == culprits and f.certainty == "suspected"
    assert ("does not say which" in f.message) is not bool(culprits)


@pytest.mark.parametrize(
    ("option", "env", "differs"),
    [("--master_port={}", "", True), ("--rdzv-endpoint=10.1.1.4:{}", "", True), ("--rdzv-endpoint=10.1.1.4:7000", "MASTER_PORT={}", False)],
)  # fmt: skip
def test_ports_of_the_master_that_differ(tmp_path: Path, option: str, env: str, differs: bool) -> None:
    line = "+ torchrun --nnodes=2 {} --master_addr=10.1.1.4 t.py\n"
    (tmp_path / "n-0.out").write_text(line.format(option.format(7001)) + env.format(7001) + "\n")
    (tmp_path / "n-1.out").write_text(
        line.format(option.format(7000))
        + "[W1 socket.cpp:752] [c10d] The client socket has failed to connect to [10.1.1.4]:7000 (errno: 111 - Connection refused).\n"
        "[E1 socket.cpp:1019] [c10d] The client socket has timed out after 9000ms while trying to connect to (10.1.1.4, 7000).\n"
    )
    report = diagnose_logs([str(tmp_path / "n-0.out"), str(tmp_path / "n-1.out")])
    assert report is not None
    assert ("its master port is 7000, n-0.out's is 7001" in only(report).message) is differs


def test_a_port_that_the_kernel_and_nccl_report_is_one_event_of_the_host(tmp_path: Path) -> None:
    link = "2031-03-02T08:00:00+00:00 h-9 kernel: mlx5_core 0000:9a:00.0 ibp154s0: Link down\n"
    nccl = "h-9:7:9 [4] transport/net_ib.cc:123 NCCL WARN NET/IB : mlx5_4:1 Got async event : port error\n"
    assert only(diagnose(tmp_path, link + nccl)).message.startswith("host h-9 lost a port of the network: mlx5_core")
    assert only(diagnose(tmp_path, nccl)).message.startswith("host h-9 lost a port of the network: mlx5_4:1")
    module = "2031-03-02T08:00:00+00:00 h-9 kernel: mlx5_core 0000:9a:00.0: Port module event[error]: module 0, Cable error, Bus stuck (I2C)\n"
    assert "reported of its module: Cable error, Bus stuck (line 1)" in only(diagnose(tmp_path, module + link)).message
    other = module.replace("9a:", "9b:")
    assert "module" not in only(diagnose(tmp_path, other + link)).message


def test_rays_memory_monitor_names_the_node_of_a_rank(tmp_path: Path) -> None:
    text = "(T pid=9, ip=10.0.0.1) - (node_id=8c, ip=10.0.0.2, pid=32) world_rank=3, local_rank=1, node_rank=1\n"
    text += "Memory on the node (IP: 10.0.0.2, ID: 5f) where the task (actor ID: 7, name=W, pid=32, memory used=40GB) was running was 95GB / 100GB, which exceeds the memory usage threshold of 0.95.\n"
    assert only(diagnose(tmp_path, text)).message.startswith("rank 3 on 10.0.0.2 was killed")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('Warning Failed pod/fit-2 Failed to pull image "r.io/fit:7": unauthorized\n', "imagePullSecrets"),
        (raised(0, "ValueError: batch size 96 must be divisible by world size 7"), "--nnodes MIN:MAX"),
        (raised(0, "ValueError: hidden size 96 must be divisible by tensor parallel size 7"), "tensor, pipeline"),
    ],
)
def test_advice_on_images_and_batches(tmp_path: Path, text: str, words: str) -> None:
    assert words in only(diagnose(tmp_path, text)).advice


def test_who_starts_the_jobs_store_is_rank_0_of_the_node_that_its_label_names(tmp_path: Path) -> None:
    text = raised(
        0,
        "DistNetworkError: The server socket has failed to listen on any local network address. port: 29511, code: -98",
        file="/e/torch/distributed/rendezvous.py",
        prefix="gpu7: ",
    )
    f = only(diagnose(tmp_path, text))
    assert f.culprits == (0,) and f.certainty == "suspected" and "several" not in f.advice
    assert f.message.startswith("gpu7 (rank 0) could not listen: port 29511 is in use")
    f = only(diagnose(tmp_path, text.replace("rendezvous.py", "other.py")))
    assert f.culprits == () and f.message.startswith("gpu7 could not listen")


VERSION = "{} NCCL version {}+cuda12.4\n"
INTERNAL = "torch.distributed.DistBackendError: NCCL error in: P.cpp:9, internal error - please report, NCCL version {}"
TRUNCATED = "h1:7:9 [0] misc/socket.cc:567 NCCL WARN Message truncated : received 256 bytes instead of 64\n"
COUNT = "h1:7:9 [0] bootstrap.cc:154 NCCL WARN Bootstrap Root : mismatch in rank count from procs 4 : 9437184\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (VERSION.format("[h-a:0]:", "2.18.1") + VERSION.format("[h-b:1]:", "2.20.5"), "h-a runs NCCL 2.18.1, h-b runs"),
        (VERSION.format("h-b:8:9 [0] NCCL INFO", "2.20.5"), "h-b runs NCCL 2.20.5, rank 0 runs NCCL 2.18.1: NCCL"),
        (VERSION.format("h-b:8:9 [0] NCCL INFO", "2.18.1"), "two ends have different versions of NCCL, or are of diff"),
        ("NCCL version 2.20.5+cuda12.4\n", "a process of job.log runs NCCL 2.20.5, rank 0 runs NCCL 2.18.1"),
        ("NCCL version 2.20.5+cuda12.4\n" + "epoch 1 step 3 loss 2.0\n" * 3, "two ends have different versions of NCCL, or"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("warning", [TRUNCATED, COUNT])
def test_nodes_with_different_versions_of_nccl(tmp_path: Path, text: str, words: str, warning: str) -> None:
    f = only(diagnose(tmp_path, text + warning + raised(0, INTERNAL.format("2.18.1"))))
    assert words in f.message and f.certainty == "suspected" and "one" in f.advice
    assert diagnose(tmp_path, text).findings == ()


@pytest.mark.parametrize("prefix", ["[rank0]: ", ""])
@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("2031-01-01 09:00:00 ERROR trainer: the shard index is empty", True),
        ("terminate called after throwing an instance of 'tc::Refused'", True),
        ("thread 'main' panicked at src/lib.rs:7: no tokens", True),
        ("ERROR:torch.distributed.elastic.multiprocessing.api:failed", False),
        ("2031-01-01 09:00:00 ERROR cache: miss, retrying", False),
        ("2031-01-01 09:00:00 ERROR cache: miss\nstep 7 loss 2.0", False),
        ("2031-01-01 09:00:00 INFO ready", False),
    ],
)
def test_an_error_that_no_row_knows_is_shown_with_the_exit_code(
    tmp_path: Path, line: str, shown: bool, prefix: str
) -> None:
    text = "".join(f"{prefix}{part}\n" for part in line.split("\n"))
    ended = "  time      : 2031-01-01_09:00:09\n  host      : h7\n  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: 8)\n  traceback : To enable traceback\n"
    f = only(diagnose(tmp_path, text + ended))
    assert f.culprits == (0,) and "exit code 1" in f.message
    assert (line[-12:] in f.message and "may be the reason" in f.message) is shown
    assert diagnose(tmp_path, text).findings == ()


@pytest.mark.parametrize(
    ("prefix", "words"), [(" 0: ", "rank 0 raised"), ("0: ", "task 0 raised"), ("12: ", "rank 12 raised")]
)
def test_srun_pads_the_number_of_a_task(tmp_path: Path, prefix: str, words: str) -> None:
    assert only(diagnose(tmp_path, raised(0, "KeyError: 'x'", prefix=prefix))).message.startswith(words)


@pytest.mark.parametrize(("up", "lost"), [("08:00:09", False), ("08:04:00", True)])
def test_a_port_that_is_active_again_only_after_a_failure_was_lost(tmp_path: Path, up: str, lost: bool) -> None:
    link = "Mar 02 {} h-9 kernel: bnxt_en 0000:5e:00.0 ens5: NIC Link is {}\n"
    (tmp_path / "kernel.log").write_text(link.format("08:00:01", "Down") + link.format(up, "Up"))
    died = "[rank4]:[E302 08:01:20.5 ProcessGroupNCCL.cpp:9] [Rank 4] NCCL error: remote process exited or there was a network error\n"
    died += "h-2:7:8 [4] NCCL WARN NET/IB : Got completion from peer 10.0.0.9<7> with status=12 opcode=0\n"
    (tmp_path / "job.log").write_text(died)
    report = diagnose_logs([str(tmp_path / "job.log"), str(tmp_path / "kernel.log")])
    assert report is not None
    assert only(report).message.startswith("host h-9 lost a port" if lost else "NCCL on GPU 4 of h-2 lost its RDMA")
    notes = diagnose(tmp_path, (tmp_path / "kernel.log").read_text()).notes
    assert any("it was active again on line 2" in note for note in notes) and not any("the job" in n for n in notes[:1])


@pytest.mark.parametrize(
    "launcher",
    [
        "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   RANK 9 PID 41 RUNNING AT n7\n=   KILLED BY SIGNAL: 9 (Killed)\n",
        "mpirun noticed that process rank 9 with PID 0 on node n7 exited on signal 9 (Killed).\n",
        raised(9, "ValueError: x", prefix="1: [rank{}]: "),
    ],
)
def test_a_task_of_srun_is_no_rank_where_another_launcher_started_them(tmp_path: Path, launcher: str) -> None:
    memory = "slurmstepd: error: Detected 1 oom_kill event in StepId=4.0.\nsrun: error: n7: task 1: Out Of Memory\n"
    findings = diagnose(tmp_path, launcher + memory).findings
    assert {r for f in findings for r in f.culprits} == {9} and not any("9 on n7 were" in f.message for f in findings)


def test_a_task_of_srun_that_runs_deepspeeds_launcher_is_a_node(tmp_path: Path) -> None:
    text = "[INFO] [launch.py:256:main] process 71 spawned with command: ['python', '-u', 't.py', '--local_rank=0']\nsrun: error: n7: task 1: Killed\n"
    f = only(diagnose(tmp_path, text))
    assert f.culprits == () and f.message.startswith("the ranks on n7 were killed")


GAUDI = "[ 91.2] habanalabs {}: {}\n"


def test_a_device_that_its_driver_and_its_process_report_is_one_event(tmp_path: Path) -> None:
    """Each of the driver's lines is on the same device; what the process raised follows."""
    kernel = GAUDI.format("hl2", "HBM1 pc6 interrupts info: CA_PAR=0, SERR=0, DERR=1")
    kernel += GAUDI.format("hl2", "Going to reset device")
    own = "FATAL ERROR :: MODULE:PT_DEVMEM Synapse detected a device critical error that requires a restart. (hl: 2) [HBM DERR]"
    f = only(diagnose(tmp_path, kernel + raised(2, f"RuntimeError: {own}")))
    assert (f.kind, f.cause, f.culprits) == ("gpu", "ecc", (2,)) and "DERR=1" in f.message and "hardware" in f.advice
    assert f.message.endswith(
        "the process itself reports a fatal error of its device: device critical error [HBM DERR]"
    )
    f = only(diagnose(tmp_path, raised(2, f"RuntimeError: {own}")))
    assert (f.kind, f.culprits) == ("gpu", (2,)) and "not the code in the traceback" in f.advice


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (GAUDI.format("accel5", "Going to HARD reset device"), "lost"),
        ("[ 7.1] amdgpu 0000:c1:00.0: amdgpu: ring comp_1.2.0 timeout, signaled seq=7, emitted seq=9\n", "lost"),
        ("[ 7.1] amdgpu 0000:c1:00.0: amdgpu: socket: 1, die: 0, 2 new uncorrectable hardware errors detected in umc block\n", "lost"),
        ("[rank3]: RuntimeError: copy:x.cpp:9 NPU function error: HBM MULTI BIT ECC ERROR.\n", "lost"),
        (GAUDI.format("accel5", "HBM1 pc6 interrupts info: CA_PAR=0, SERR=1, DERR=0"), ""),
        ("[ 7.1] amdgpu 0000:c1:00.0: amdgpu: 0 new uncorrectable hardware errors detected in gfx block\n", ""),
    ],
)  # fmt: skip
def test_fatal_errors_of_devices_of_other_vendors(tmp_path: Path, line: str, cause: str) -> None:
    found = [(f.kind, f.cause) for f in diagnose(tmp_path, line).findings]
    assert found == ([("gpu", cause)] if cause else [])


@pytest.mark.parametrize(
    ("unexpected", "judged", "words", "advice"),
    [
        ("nan on rank 6 at", "Possible transient error!", "same GPU (node g-3, device 2)", "test that GPU"),
        ("nan on rank 6 at", "First rerun: unexpected result is not reproducible within the tolerance (1.5 != nan). Transient error!", "same GPU (node g-3, device 2)", "before that iteration"),
        ("nan on rank 6 at", "Second rerun: unexpected result is not reproducible on a different GPU", "on another GPU (node g-3, device 2), it got another", "in the run before"),
        ("nan on rank 6 at", "Second rerun: unexpected result is reproducible on a different GPU, therefore it was likely correct", "got the same result: not a fault of the GPU", "that rank's batch"),
        ("inf at /m/t.py line 8, invokation #1 at", "Possible persistent error!", "the GPU that it had before", "in the run before"),
        ("nan on rank 6 at", "Second rerun: it is not reproducible. Possible persistent error!", "on another GPU (node g-3, device 2)", "in the run before"),
        ("nan at /m/t.py line 8, invokation #1 at", "Correct result (but possible Application error) (x)!", "not a fault of the GPU", "batch"),
    ],
)  # fmt: skip
def test_a_second_run_of_an_iteration_shows_whether_its_gpu_is_at_fault(
    tmp_path: Path, unexpected: str, judged: str, words: str, advice: str
) -> None:
    text = f"ERROR:rerun_state_machine:Unexpected result {unexpected} iteration #71 (message='NaN in local forward loss')\n"
    again = f"ERROR:rerun_state_machine:Rank 6, node g-3, device 2, iteration #71: {judged}\n"
    f = only(diagnose(tmp_path, text + again))
    assert f.culprits == (6,) and f.certainty == "suspected" and words in f.message and advice in f.advice
    assert words not in only(diagnose(tmp_path, text + again.replace("#71", "#60"))).message


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("+ torchrun --nnodes=2 --master_addr=gpu-3 --master_port=29511 t.py\n", True),
        ("MASTER_ADDR=gpu-3\n", True),
        ("+ torchrun --nnodes=2 --master_addr=gpu-3 --master_port=29400 t.py\n", False),
        ("+ torchrun --master_addr=localhost --master_port=29511 t.py\n", False),
    ],
)
def test_the_host_of_a_port_in_use_is_that_of_the_master_address(tmp_path: Path, command: str, named: bool) -> None:
    listen = "[E1 socket.cpp:500] [c10d] The server socket has failed to listen on any local network address. The server socket has failed to bind to [::]:29511 (errno: 98 - Address already in use).\n"
    listen = (
        "[E1 socket.cpp:500] [c10d] The server socket has failed to listen on any local network address.\n" + listen
    )
    assert ("the job's store is on gpu-3" in only(diagnose(tmp_path, command + listen)).message) is named
