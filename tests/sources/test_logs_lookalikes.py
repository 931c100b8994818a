"""More logs: what only looks like a failure, and failures that are printed in several lines or by other launchers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sources.test_logs import about, diagnose, fingerprint, only, raised, table, timeout

TORCH = "/usr/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py"


def test_an_exception_that_was_caught_is_no_failure(tmp_path: Path) -> None:
    caught = raised(1, "requests.exceptions.ConnectionError: Max retries exceeded")
    goes_on = "".join(f"[rank0]: step {i}\n" for i in range(600))
    report = diagnose(tmp_path, caught + goes_on)
    assert report.findings == () and "probably caught" in report.notes[0]
    assert only(diagnose(tmp_path, caught)).culprits == (1,)
    assert only(diagnose(tmp_path, caught + goes_on + timeout(0))).culprits == (1,)


def test_a_lost_connection_inside_torch_is_no_failure_of_that_rank(tmp_path: Path) -> None:
    lost = (
        raised(2, "", line=9).rstrip()
        + f'\n[rank2]:   File "{TORCH}", line 3, in init\n[rank2]: RuntimeError: Connection reset by peer\n'
    )
    f = only(diagnose(tmp_path, lost))
    assert about(f) == ("rank_lost", "silent", (), (2,)) and "run.py:9" in f.message
    f = only(diagnose(tmp_path, raised(2, "RuntimeError: Connection reset by peer")))
    assert about(f) == ("rank_lost", "crashed", (2,), ())


def test_the_rank_that_raised_and_those_that_lost_it(tmp_path: Path) -> None:
    text = raised(6, "AssertionError: empty mask") + raised(
        0, "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0."
    )
    text += "[rank3]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
    assert about(only(diagnose(tmp_path, text))) == ("rank_lost", "crashed", (6,), (0, 3))


def test_a_traceback_in_the_table_of_torchrun(tmp_path: Path) -> None:
    rows = table(16, 1, "Traceback (most recent call last):", host="w2")
    text = rows + '    File "/w/run.py", line 41, in main\n      x = next(it)\n  StopIteration\n===\n'
    f = only(diagnose(tmp_path, text))
    assert f.culprits == (16,) and "StopIteration at run.py:41" in f.message


def test_a_class_of_the_program_ends_a_traceback(tmp_path: Path) -> None:
    assert "raised BadShard: 17" in only(diagnose(tmp_path, raised(1, "data.errors.BadShard: 17"))).message


def test_a_rank_that_followed_is_no_cause(tmp_path: Path) -> None:
    text = table(9, -15, "Signal 15 (SIGTERM) received by PID 1") + table(
        11, -11, "Signal 11 (SIGSEGV) received by PID 2"
    )
    assert about(only(diagnose(tmp_path, text)))[:3] == ("rank_lost", "killed", (11,))


def test_a_failure_that_every_attempt_repeats(tmp_path: Path) -> None:
    once = raised(2, "ValueError: bad shard")
    report = diagnose(
        tmp_path, f"{once}[default] Worker group FAILED. 2/3 attempts left; will restart worker group\n{once}"
    )
    assert only(report).culprits == (2,) and any("restarted" in note for note in report.notes)


@pytest.mark.parametrize(
    ("text", "culprits", "word"),
    [
        ("[rank1]: Last error:\n[rank1]: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000\n", (0, 1), "share one GPU"),
        ("h1:9:9 [0] bootstrap.cc:131 NCCL WARN Bootstrap Root : rank 1 of 8 ranks has already checked in\n", (1,), "exists twice"),
        ("RuntimeError: DataLoader worker (pid 5) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory.\n", (), "full /dev/shm"),
        ("A worker died or was killed while executing a task by an unexpected system error. Worker IP address: 10.1.1.9 Worker port: 1 Worker PID: 71 Worker exit type: SYSTEM_ERROR\n", (), "process 71 on 10.1.1.9"),
        ("[rank2]: RuntimeError: CUDA error: device-side assert triggered\n", (2,), "device-side assert"),
    ],
)  # fmt: skip
def test_failures_of_one_line(tmp_path: Path, text: str, culprits: tuple[int, ...], word: str) -> None:
    f = only(diagnose(tmp_path, text))
    assert (f.kind, f.cause, f.culprits) == ("rank_lost", "crashed", culprits) and word in f.message


OFI = (
    "[rank3]: torch.distributed.DistBackendError: NCCL error in: P.cpp:3, remote process exited or there was a network error, NCCL version 2.28.8\n"
    "[rank3]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n[rank3]: Last error:\n"
    "[rank3]: NET/OFI Request 0x7 completed with error. RC: 113.\n"
)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (raised(1, "ValueError: host not found: Name or service not known"), "could not resolve a host name at run.py:7"),
        ("WARNING:torch.distributed.elastic.rendezvous:The node 'w3_71_0' has failed to send a keep-alive heartbeat to the rendezvous 'none'\n", "w3_71_0"),
        ("h1:1:2 [0] socket.h:403 NCCL WARN Connect to 10.2.2.13<41> failed : Connection refused\n", "could not make a connection to 10.2.2.13"),
        (OFI, "completed with error. RC: 113"),
        ("ncclRemoteError: A call failed.\nLast error:\nNET/IB : Got completion from peer 10.4.7.1<3> with error 12, opcode 0, len 0, vendor err 129\n", "status 12"),
        ("ncclRemoteError: A call failed.\nLast error:\nsocketProgressOpt: Call to recv from 10.3.9.9<33> failed : Connection reset by peer\n", "10.3.9.9"),
    ],
)  # fmt: skip
def test_the_network_or_the_start_is_to_blame(tmp_path: Path, text: str, word: str) -> None:
    f = only(diagnose(tmp_path, text))
    assert f.kind == "rank_lost" and f.culprits == () and word in f.message, f


def test_ctrl_c_is_no_failure(tmp_path: Path) -> None:
    text = (
        "W1 torch/distributed/elastic/agent/server/api.py:7] Received 2 death signal, shutting down workers\n"
        + raised(0, "KeyboardInterrupt")
    )
    report = diagnose(tmp_path, text)
    assert report.findings == () and report.state_text == "stopped by Ctrl-C (SIGINT)"
    assert "when Ctrl-C came: rank 0 at run.py:7 in main" in report.notes


@pytest.mark.parametrize(
    "line",
    [
        "[rank1]:[W TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=50): Failed to recv, got 0 bytes. Did the remote server shutdown or crash?",
        "[rank1]:[W1028 10:11:12.345 TCPStore.cpp:125] [c10d] recvValue failed on TCPStore: Broken pipe",
        "[W socket.cpp:426] [c10d] The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).",
        "h1:1:1 [0] NCCL INFO Call to connect to 10.1.1.1<7> failed : Connection refused, retrying",
        "h1:1:1 [0] ofi_init.cc:1 NCCL WARN NET/OFI Only EFA provider is supported",
        "[ 1.2] NVRM: Xid (PCI:0000:3b:00): 45, pid=7, name=python, Ch 00000010",
        "h1:1:1 [0] NCCL INFO [Service thread] Connection closed by localRank 0",
    ],
)
def test_what_healthy_jobs_print_too(tmp_path: Path, line: str) -> None:
    assert diagnose(tmp_path, f"step 1\n{line}\nstep 2\n").findings == ()


@pytest.mark.parametrize(
    ("text", "cause", "word"),
    [
        (
            "run.sh: line 28:  8156 Killed                  python3 main.py\n",
            "killed",
            "process 8156 was killed by SIGKILL",
        ),
        ("    exitCode: 137\n", "killed", "SIGKILL"),
        ("command terminated with exit code 139\n", "killed", "SIGSEGV"),
        ("Fatal Python error: Segmentation fault\n", "crashed", "native code"),
    ],
)
def test_how_shells_and_containers_report_an_end(tmp_path: Path, text: str, cause: str, word: str) -> None:
    f = only(diagnose(tmp_path, text))
    assert (f.kind, f.cause, f.culprits) == ("rank_lost", cause, ()) and word in f.message


@pytest.mark.parametrize(
    "prefix", ["job-worker-3 pytorch ", "worker-3  | ", "2031-01-01T00:00:00Z ", "Jan 01 00:00:00 n4 python[71]: "]
)
def test_any_prefix_of_a_traceback(tmp_path: Path, prefix: str) -> None:
    text = "".join(f"{prefix}{line}\n" for line in raised(0, "data.BadShard: 17", prefix="").splitlines())
    assert "raised BadShard: 17 at run.py:7" in only(diagnose(tmp_path, text)).message


def test_the_first_of_several_ends_is_named(tmp_path: Path) -> None:
    text = table(4, 1, "To enable traceback see: x") + table(2, 1, "To enable traceback see: x").replace(
        "00:00:00", "00:00:03"
    )
    assert "rank 4 first (2031-01-01 00:00:00)" in only(diagnose(tmp_path, text)).message


@pytest.mark.parametrize(
    ("text", "kind", "victims", "word"),
    [
        ("Waiting in store based barrier to initialize process group for rank: 0, key: store_based_barrier_key:1 (world_size=4, worker_count=8, timeout=0:30:00)\n", "rank_lost", (0,), "8 processes have joined a job of 4"),
        ("RuntimeError: Timed out initializing process group in store based barrier on rank 30, for key: k:5 (world_size=64, num_workers_joined=56, timeout=0:30:00)\n", "rank_lost", (), "8 of 64 ranks"),
        (raised(0, "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /broadcast/0/7"), "timeout", (0,), "for /broadcast/0/7, which no process has set"),
        (raised(1, "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete")
         + raised(0, "RuntimeError: Application timeout caused pair closure"), "timeout", (0, 1), "after 30 minutes: ranks 0, 1 waited"),
    ],
)  # fmt: skip
def test_ranks_that_waited_outside_nccl(
    tmp_path: Path, text: str, kind: str, victims: tuple[int, ...], word: str
) -> None:
    f = only(diagnose(tmp_path, text))
    assert (f.kind, f.culprits, f.victims) == (kind, (), victims) and word in f.message


def test_a_barrier_that_is_still_waiting_is_no_failure(tmp_path: Path) -> None:
    text = "Waiting in store based barrier to initialize process group for rank: 0, key: k:1 (world_size=4, worker_count=3, timeout=0:30:00)\n"
    assert diagnose(tmp_path, text).findings == ()


def test_the_rank_that_neither_timed_out_nor_lost_a_connection(tmp_path: Path) -> None:
    text = raised(
        0,
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete",
    )
    text += raised(2, "RuntimeError: [gloo/transport/tcp/pair.cc:5] Connection closed by peer [127.0.0.1]:4711")
    f = only(diagnose(tmp_path, text + table(1, -15, "Signal 15 (SIGTERM) received by PID 1")))
    assert about(f) == ("timeout", "late_rank", (1,), (0, 2))


def test_exits_after_a_known_failure_are_no_failures_of_their_own(tmp_path: Path) -> None:
    text = (
        raised(3, "ValueError: odd")
        + "srun: error: n1: tasks 0-2,4-7: Exited with exit code 1\nsrun: error: n2: task 8: Killed\n"
    )
    assert only(diagnose(tmp_path, text)).culprits == (3,)
    killed = raised(3, "ValueError: odd") + table(5, -11, "Signal 11 (SIGSEGV) received by PID 3")
    assert [f.culprits for f in diagnose(tmp_path, killed).findings] == [(3,), (5,)]


def test_an_error_of_nccl_without_its_reason(tmp_path: Path) -> None:
    text = raised(
        1,
        "torch.distributed.DistBackendError: NCCL error in: P.cpp:3, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20",
    )
    f = only(diagnose(tmp_path, text))
    assert (
        f.culprits == () and f.victims == (1,) and "unhandled cuda error" in f.message and "NCCL_DEBUG=WARN" in f.advice
    )


def test_the_side_with_fewer_ranks_is_named_and_its_line(tmp_path: Path) -> None:
    def mismatch(rank: int, op: str, other: int, other_op: str, line: int) -> str:
        pair = f"Rank {rank} is running collective: {fingerprint(op, '4')}, but Rank {other} is running collective: {fingerprint(other_op, '4')}."
        return raised(rank, f"RuntimeError: Detected mismatch between collectives on ranks. {pair}", line=line)

    text = (
        mismatch(0, "ALLREDUCE", 1, "BROADCAST", 21)
        + mismatch(1, "BROADCAST", 0, "ALLREDUCE", 18)
        + mismatch(2, "ALLREDUCE", 1, "BROADCAST", 21)
    )
    f = only(diagnose(tmp_path, text))
    assert about(f) == ("mismatch", "op", (1,), (0, 2)) and [(w.rank, w.line) for w in f.where] == [(1, 18)]


def test_a_rank_that_never_joined_a_gloo_group(tmp_path: Path) -> None:
    text = raised(
        0, "torch.distributed.DistStoreError: wait timeout after 6000ms, keys: /default_pg/0//cpu//0/1", prefix=""
    )
    f = only(
        diagnose(tmp_path, text + table(0, 1, "To enable traceback see: x") + table(1, -15, "Signal 15 (SIGTERM)"))
    )
    assert (f.kind, f.cause, f.culprits) == ("timeout", "late_rank", (1,)) and "did not join" in f.message


def test_a_rank_that_ended_silently_is_the_one_that_lost_no_connection(tmp_path: Path) -> None:
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc:5] Connection closed by peer [127.0.0.1]:4711"
    text = (
        raised(0, lost)
        + raised(2, lost)
        + table(0, 1, "To enable traceback see: x")
        + table(2, 1, "To enable traceback see: x")
    )
    assert about(only(diagnose(tmp_path, text))) == ("rank_lost", "silent", (1,), (0, 2))
    assert only(diagnose(tmp_path, raised(0, lost) + raised(2, lost))).culprits == ()  # perhaps a part of the log only


def test_a_traceback_without_a_rank_explains_an_exit_code(tmp_path: Path) -> None:
    once = raised(0, "ModuleNotFoundError: No module named 'abc'", prefix="")
    f = only(diagnose(tmp_path, once * 3 + table(1, 1, "To enable traceback see: x")))
    assert f.culprits == () and "(3 times)" in f.message
    assert only(diagnose(tmp_path, once + table(1, 1, "To enable traceback see: x"))).culprits == (1,)


@pytest.mark.parametrize("prefix", ["[default{}]:", "{}: ", "[rank{}]: ", "(Actor pid={}) "])
def test_interleaved_tracebacks(tmp_path: Path, prefix: str) -> None:
    each = [
        raised(r, f"ValueError: {word}", file=f"/w/{word}.py", prefix=prefix).splitlines()
        for r, word in ((1, "one"), (2, "two"))
    ]
    text = "".join(f"{a}\n{b}\n" for a, b in zip(*each, strict=True))
    assert [f.message.partition(" raised ")[2] for f in diagnose(tmp_path, text).findings] == [
        "ValueError: one at one.py:7 in main",
        "ValueError: two at two.py:7 in main",
    ]
