"""Reasons that the log itself names: a death, a killer, a survived error, a shared end. All texts are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from distdiag.diagnosis.model.findings import State
from distdiag.sources.logs.verdict import diagnose_logs
from tests.sources.test_logs import diagnose, only, raised, timeout

CANCELLED = raised(9, "RuntimeError: cancelled", file="/x/distributed/shm_broadcast.py", prefix="(Engine pid=7) ")
ASSIGNED = "".join(f"(Engine pid=7) (W pid=2{r}, ip=10.8.0.{r}) rank {r} in world size 4 is DP 0\n" for r in range(4))
STALL = "[1,0]<stderr>:Missing ranks:\n[1,0]<stderr>:1: [allreduce.a]\n[1,0]<stderr>:0: [broadcast.b]\n[1,0]<stderr>:2: [broadcast.b]\n"
KILLED = "mpirun noticed that process rank 2 with PID 0 on node g1 exited on signal 9 (Killed).\n"
MONITOR = "[2031-05-02 08:03:10,402] [ERROR] [RankMonitorServer:6@g2] Did not get subsequent heartbeat. Waited 90.00 seconds.\n"
SENT = "[2031-05-02 08:03:10,405] [ERROR] [Monitor@g2] Sending SIGKILL to rank process pid=441: over its limit\n"
ENDED = "[2031-05-02 08:03:12,000] [ERROR] failed (exitcode: -9) local_rank: 2 (pid: 441) of binary: p\n"
FULL = "2031-02-08 10:28:31,113 - root - ERROR - no checkpoint: [Errno 28] No space left on device; skipped\n"
SAVING = "2031-02-08 10:28:25,496 - root - INFO - Saving the model\n"
EFA = "[1,{0}]<stdout>:a{0}:15{0}:22 [0] ofi_process_cq:9 NCCL WARN NET/OFI Request 0x7f1 completed with error. RC: 113. Error: 15 (Unreachable remote). Completed length: 0\n"
CCL = "2031:01:28-16:35:45:(35{0}) |CCL_ERROR| base.cpp:36 start: error while creating worker thread #0 pthread_create returns 22\n"


@pytest.mark.parametrize(
    ("text", "kind", "culprits", "words", "advice"),
    [
        (ASSIGNED + "(Engine pid=7) ERROR RayWorkerProc rank=[3] died unexpectedly, shutting down\n" + CANCELLED, "rank_lost/crashed", (3,), "rank 3;10.8.0.3;was lost", "own log;dmesg"),
        ("train worker-2 exited unexpectedly\n", "rank_lost/crashed", (), "worker-2 was lost", ""),
        (CANCELLED, "rank_lost/silent", (), "Engine pid=7 stopped waiting;cancelled", "workers' own logs"),
        (STALL + "^Cmpirun: killing job...\n\n" + KILLED, "stall/unknown", (1,), "rank 1 did not submit;broadcast.b", "hvd.join"),
        (STALL + KILLED, "stall/unknown", (1,), "rank 1 did not submit", ""),
        ("[1,0]<stderr>:Missing ranks:\n[1,0]<stderr>:2: [allreduce.a]\n" + KILLED, "rank_lost/killed", (2,), "rank 2;SIGKILL", "dmesg"),
        (MONITOR + SENT + ENDED, "stall/unknown", (6,), "rank 6;no sign of life for 90 s;the monitor ended its process", "py-spy"),
        (SENT + ENDED, "rank_lost/killed", (), "another process sent;over its limit", "the kernel had no part in it"),
        (SAVING + "[rank0]: " + FULL + "".join(map(timeout, (1, 2, 3))), "timeout/late_rank", (0,), "its last line;No space left on device", "make room;must still make the calls"),
        (SAVING + FULL + "".join(map(timeout, (1, 2, 3))), "timeout/late_rank", (0,), "the last line before that is;No space left", "the rank that printed it"),
        (SAVING + "".join(map(timeout, (1, 2, 3))), "timeout/late_rank", (0,), "most likely of rank 0, is;Saving", "still saving"),
        ("".join(map(EFA.format, (0, 1))), "rank_lost/silent", (), "ranks 0, 1 could not reach others over EFA: Unreachable remote", "security group"),
        ("".join(map(CCL.format, (0, 1))) + raised(0, "RuntimeError: oneCCL: exec.cpp:13 start: EXCEPTION: failed to start worker # 0"), "rank_lost/configuration", (), "rank 0;worker threads;pthread_create returns 22", "CCL_WORKER_AFFINITY"),
    ],
)  # fmt: skip
def test_the_reason_that_the_log_names(
    tmp_path: Path, text: str, kind: str, culprits: tuple[int, ...], words: str, advice: str
) -> None:
    f = only(diagnose(tmp_path, text))
    assert (f"{f.kind}/{f.cause}", f.culprits) == (kind, culprits), f
    assert all(word in f.message for word in words.split(";")), f.message
    assert all(word in f.advice for word in advice.split(";")), f.advice


@pytest.mark.parametrize("end", ["RuntimeError: DataLoader worker (pid(s) 12) exited unexpectedly", "RuntimeError: x"])
def test_a_loaders_worker_is_no_rank_that_died(tmp_path: Path, end: str) -> None:
    assert "was lost: killed" not in only(diagnose(tmp_path, raised(1, end))).message


def test_what_is_printed_is_not_advised_to_be_printed(tmp_path: Path) -> None:
    error = raised(0, "RuntimeError: oneCCL: exec.cpp:13 start: EXCEPTION: failed to start")
    assert "run again with CCL_LOG_LEVEL" in only(diagnose(tmp_path, error)).advice
    error_of_nccl = raised(0, "RuntimeError: NCCL error in: P.cpp:3, internal error, NCCL version 2.21.5")
    assert "run again with NCCL_DEBUG" in only(diagnose(tmp_path, error_of_nccl)).advice
    debug = "n1:8:8 [0] NCCL INFO Bootstrap : Using eth0:10.4.0.1<0>\n"
    assert "NCCL_DEBUG is on" in only(diagnose(tmp_path, debug + error_of_nccl)).advice
    advice = only(diagnose(tmp_path, "(353) |CCL_ERROR| exec.cpp:13 condition failed\n" + error)).advice
    assert "first |CCL_ERROR| line" in advice and "run again" not in advice


@pytest.mark.parametrize(
    ("one_line", "words"), [(True, "did not arrive as it was sent"), (False, "another collective")]
)
def test_ranks_that_fail_in_one_constructor_were_in_it(tmp_path: Path, one_line: bool, words: str) -> None:
    what = "RuntimeError: DDP expects same model across all ranks, but Rank {} has 68 params, while rank {} has inconsistent 0 params."
    f = only(diagnose(tmp_path, raised(0, what.format(0, 1)) + raised(1, what.format(1, 0), line=7 if one_line else 9)))
    assert f.kind == "mismatch" and f.culprits == () and words in f.message and "NCCL_P2P_DISABLE" in f.advice


@pytest.mark.parametrize(
    ("numbers", "words"), [((77, 75), "rank 0 had made 2 calls more"), ((40, 99), "59 calls"), ((7, 7), "")]
)
def test_by_how_many_calls_ranks_are_apart(tmp_path: Path, numbers: tuple[int, int], words: str) -> None:
    call = "CollectiveFingerPrint(SequenceNumber={}, OpType={}, TensorShape=[64], TensorDtypes=Float)"
    both = (call.format(n, op) for n, op in zip(numbers, ("BROADCAST", "ALLREDUCE"), strict=True))
    text = "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: {}, but Rank 1 is running collective: {}"
    message = only(diagnose(tmp_path, raised(0, text.format(*both)))).message
    assert words in message and ("by these numbers" in message) is bool(words)


@pytest.mark.parametrize("why", ["", "Connection refused"])
def test_a_timeout_does_not_show_that_nothing_listens(tmp_path: Path, why: str) -> None:
    attempt = (
        f"[W socket.cpp:60] [c10d] The client socket has failed to connect to [10.2.1.6]:29400 (errno: 111 - {why}).\n"
    )
    text = "[E socket.cpp:86] [c10d] The client socket has timed out after 60s while trying to connect to (10.2.1.6, 29400).\n"
    f = only(diagnose(tmp_path, attempt * bool(why) + text))
    assert "does not listen" not in f.message and (why.lower() or "does not show whether") in f.message
    assert bool(why) or "firewall" in f.advice


def test_a_pid_of_the_kernel_is_the_rank_that_a_launcher_started(tmp_path: Path) -> None:
    lines = [f"n{node}: num_local_procs=2, node_rank={node}\n" for node in (0, 1)]
    spawn = "n{}: [INFO] [launch.py:25] process {} spawned with command: ['p', 't.py', '--local_rank={}']\n"
    lines += [spawn.format(node, 70 + 10 * node + local, local) for node in (0, 1) for local in (0, 1)]
    (tmp_path / "run.log").write_text("".join(lines) + "n1: ['p', '--local_rank=1'] exits with return code = -9\n")
    (tmp_path / "n1-dmesg.txt").write_text("[Thu Nov  2 09:15:17 2031] Out of memory: Killed process 80 (python3) x\n")
    report = diagnose_logs([str(tmp_path)])
    assert report is not None and report.ranks_seen == 4
    f = only(report)
    assert (f.kind, f.cause, f.culprits) == ("rank_lost", "killed", (2,)) and "rank 2 on n1" in f.message


def test_the_host_at_one_end_of_all_connections_that_failed(tmp_path: Path) -> None:
    warn = "NET/IB: Got completion from peer 10.4.0.{}<4> with status=12 opcode=0 len=0 vendor err 129 (Recv) localGid ::1 hca mlx5_3\n"
    for host, peers in enumerate(([2], [2], [0, 1])):
        start = f"w-{host}:8:8 [0] NCCL INFO Bootstrap : Using eth0:10.4.0.{host}<0>\n"
        ends = (
            f"w-{host}:8:47 [0] net_ib.cc:18 NCCL WARN {warn.format(p)}Last error:\n{warn.format(p)}" for p in peers
        )
        (tmp_path / f"w-{host}.log").write_text(start + "".join(ends))
    report = diagnose_logs([str(tmp_path)])
    assert report is not None
    f = only(report)
    assert "w-2 at one end" in f.message and "over mlx5_3" in f.message and "link at w-2 first" in f.advice


@pytest.mark.parametrize(
    ("end", "well"),
    [
        ("training complete, saved final.pt\n", True),
        ("`Trainer.fit` stopped: early stopping\n", True),
        ("2031-12-04 04:20:17 toolkit INFO     Reporting training SUCCESS\n", True),
        ("(Task pid=8) Training Progress: 100%|████| 39/39 [3:20:11<00:00]\n('val': 0.61)\n", True),
        ("Epoch 7: 100%|████| 400/400 [01:07<00:00,  5.1it/s]\n", False),
    ],
)
def test_a_good_end_has_one_verdict(tmp_path: Path, end: str, well: bool) -> None:
    report = diagnose(tmp_path, "step 9 loss 0.4\n" + end)
    assert report.findings == () and (report.state == State.ENDED) is well and (report.unjudged is None) is well
    assert any("says that the job ended well" in note for note in report.notes) is well


def test_torchs_line_of_information_is_no_past_failure(tmp_path: Path) -> None:
    waits = "INFO:torch.distributed:Waiting in store based barrier for rank: 2, key: k (world_size=3, worker_count=2, timeout=0:30:00)\n"
    report = diagnose(tmp_path, waits + "".join(f"Epoch: 1 step {n} loss=1.8\n" for n in range(40)))
    assert report.findings == () and "barrier" not in " ".join(report.notes)


def test_advice_is_on_the_launcher_that_the_log_shows(tmp_path: Path) -> None:
    aborted = "MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD\nwith errorcode 1.\n"
    advice = only(diagnose(tmp_path, aborted)).advice
    assert "mpirun" in advice and "torchrun" not in advice
