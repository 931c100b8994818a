"""The verdict on logs: formats of torch, NCCL, launchers and Slurm, with invented ranks, times and hosts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from distdiag.diagnosis.model.findings import Finding, Report
from distdiag.sources.logs.verdict import diagnose_logs

ABORT = "Signal 6 (SIGABRT) received by PID 9"


def diagnose(tmp_path: Path, text: str, name: str = "job.log") -> Report:
    (tmp_path / name).write_text(text)
    report = diagnose_logs([str(tmp_path / name)])
    assert report is not None
    return report


def only(report: Report) -> Finding:
    assert len(report.findings) == 1, report.findings
    return report.findings[0]


def about(f: Finding) -> tuple[str, str | None, tuple[int, ...], tuple[int, ...]]:
    return f.kind, f.cause, f.culprits, f.victims


def timeout(
    rank: int,
    seq: int = 40,
    op: str = "ALLREDUCE",
    numel: int | None = 64,
    prefix: str = "[rank{}]:",
    ran: int = 600_020,
) -> str:
    sizes = f", NumelIn={numel}, NumelOut={numel}" if numel is not None else ""
    return (
        f"{prefix.format(rank)}[E ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={seq}, OpType={op}{sizes}, Timeout(ms)=600000) ran for {ran} milliseconds before timing out.\n"
    )


def counters(rank: int, at: int, issued: int, done: int, group: str = "PG ID 0 PG GUID 0(default_pg)") -> str:
    return (
        f"[rank{rank}]:[E ProcessGroupNCCL.cpp:1785] [{group} Rank {rank}] Exception (either an error or timeout) detected by "
        f"watchdog at work: {at}, last enqueued NCCL work: {issued}, last completed NCCL work: {done}.\n"
    )


def signal(rank: int, issued: int, done: int, first: int | None = None) -> str:
    whose = "this local rank" if first is None else f" rank {first}"
    return (
        f"[rank{rank}]:[E ProcessGroupNCCL.cpp:1870] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Received a dump signal due to a "
        f"collective timeout from {whose} and we will try our best to dump the debug info. Last enqueued NCCL work: {issued}, "
        f"last completed NCCL work: {done}.\n"
    )


def raised(rank: int, what: str, file: str = "/w/run.py", line: int = 7, prefix: str = "[rank{}]: ") -> str:
    p = prefix.format(rank)
    return (
        f'{p}Traceback (most recent call last):\n{p}  File "{file}", line {line}, in main\n{p}    step()\n{p}{what}\n'
    )


def table(rank: int, code: int, what: str, host: str = "n1") -> str:
    return (
        f"  time      : 2031-01-01_00:00:00\n  host      : {host}\n  rank      : {rank} (local_rank: {rank % 8})\n"
        f"  exitcode  : {code} (pid: {900 + rank})\n  error_file: <N/A>\n  traceback : {what}\n"
    )


# -- collectives that timed out ---------------------------------------------------------------------------------------


def test_a_rank_that_reports_no_timeout_may_be_the_missing_one(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, "".join(timeout(r) for r in (0, 1, 3))))
    assert about(f) == ("timeout", "late_rank", (2,), (0, 1, 3))
    assert "all_reduce #40" in f.message and f.certainty == "suspected"


@pytest.mark.parametrize("prefix", ["", "3: ", "\x1b[36m(Actor pid=7)\x1b[0m "])
def test_old_wording_without_numbers_or_sizes(tmp_path: Path, prefix: str) -> None:
    text = "".join(
        f"{prefix}[E ProcessGroupNCCL.cpp:325] [Rank {r}] Watchdog caught collective operation timeout: "
        "WorkNCCL(OpType=BROADCAST, Timeout(ms)=1800000) ran for 1801000 milliseconds before timing out.\n"
        for r in (1, 2, 3)
    )
    f = only(diagnose(tmp_path, text))
    assert about(f) == ("timeout", "late_rank", (0,), (1, 2, 3)) and f.message.startswith("broadcast timed out")


def test_all_ranks_waited_so_none_is_to_blame(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, "".join(timeout(r) + counters(r, 40, 44, 39) for r in range(4))))
    assert about(f) == ("stall", "unknown", (), (0, 1, 2, 3)) and "default_pg" in f.message


def test_one_rank_alone_shows_nobody_to_blame(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, timeout(118)))
    assert about(f) == ("timeout", "late_rank", (), (118,)) and "not in the log" in f.message


def test_the_counters_show_the_rank_that_issued_less(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, signal(1, 22, 21) + signal(0, 21, 21, first=1) + signal(2, 22, 21)))
    assert about(f) == ("timeout", "late_rank", (0,), (1, 2)) and "only #21" in f.message


def test_a_timeout_of_a_group_that_the_log_does_not_name(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, signal(1, 9, 9) + signal(0, 9, 9, first=1)))
    assert about(f) == ("timeout", "late_rank", (), (0, 1)) and "another group" in f.message


def test_only_some_lines_name_the_group(tmp_path: Path) -> None:
    text = timeout(0) + counters(0, 40, 41, 39, "PG 1") + timeout(2) + timeout(3)
    assert about(only(diagnose(tmp_path, text)))[2:] == ((1,), (0, 2, 3))


@pytest.mark.parametrize(
    ("odd", "cause"), [(timeout(3, op="BROADCAST"), "op"), (timeout(3, numel=65), "shape")]
)  # fmt: skip
def test_ranks_in_different_calls_of_one_number(tmp_path: Path, odd: str, cause: str) -> None:
    f = only(diagnose(tmp_path, "".join(timeout(r) for r in range(3)) + odd))
    assert about(f) == ("mismatch", cause, (3,), (0, 1, 2))


def test_sizes_may_differ_where_the_operation_allows_it(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, "".join(timeout(r, op="GATHER", numel=r) for r in range(3))))
    assert f.kind == "stall"


def test_ranks_in_different_numbers_of_an_unknown_group(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, timeout(0, 96) + timeout(7, 64, ran=9_000_000)))
    assert about(f) == ("timeout", "late_rank", (), (0, 7)) and "suspended" in f.message


def test_ranks_in_different_numbers_of_one_group(tmp_path: Path) -> None:
    text = "".join(timeout(r, n) + counters(r, n, n, n - 1) for r, n in ((0, 50), (1, 50), (2, 51)))
    assert about(only(diagnose(tmp_path, text))) == ("timeout", "late_rank", (2,), (0, 1))


def test_the_stack_of_the_collective_gives_the_line(tmp_path: Path) -> None:
    stack = (
        "[rank1]:[E ProcessGroupNCCL.cpp:684] Stack trace of the failed collective: \n"
        "#0 all_reduce from /usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py:9\n#1 evaluate from /w/run.py:31\n"
    )
    f = only(diagnose(tmp_path, timeout(1) + "".join(f"[rank1]:{line}\n" for line in stack.splitlines()) + timeout(0)))
    assert [(w.file, w.line) for w in f.waiting if w.rank == 1] == [("/w/run.py", 31)]


def test_a_stuck_watchdog(tmp_path: Path) -> None:
    text = "[rank5]:[F ProcessGroupNCCL.cpp:1169] [PG 0 Rank 5] ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress\n"
    assert about(only(diagnose(tmp_path, text))) == ("stall", "unknown", (5,), ())


# -- a rank failed, and the others followed ---------------------------------------------------------------------------


def test_the_rank_that_raised_is_the_cause_whatever_the_launcher_lists_first(tmp_path: Path) -> None:
    text = (
        raised(5, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.") + timeout(0) + timeout(1)
    )
    text += "Root Cause (first observed failure):\n[0]:\n" + table(0, -6, ABORT)
    f = only(diagnose(tmp_path, text))
    assert about(f) == ("rank_lost", "crashed", (5,), (0, 1))
    assert [(w.file, w.line) for w in f.where] == [("/w/run.py", 7)]


def test_what_a_rank_raises_after_its_timeout_is_no_cause(tmp_path: Path) -> None:
    text = timeout(0) + timeout(1) + timeout(3) + raised(0, "RuntimeError: CUDA error: unspecified launch failure")
    assert about(only(diagnose(tmp_path, text)))[:3] == ("timeout", "late_rank", (2,))


def test_the_same_exception_on_all_ranks(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, "".join(raised(r, "ModuleNotFoundError: No module named 'abc'") for r in range(3))))
    assert (
        about(f) == ("rank_lost", "configuration", (), (0, 1, 2))
        and "all 3 ranks in the log raised the same" in f.message
    )


def test_an_error_of_some_ranks_is_not_one_of_all(tmp_path: Path) -> None:
    text = "".join(raised(r, "AssertionError: 12 heads are not divisible by 8") for r in (0, 1))
    ends = table(0, 1, "To enable traceback") + table(1, 1, "To enable traceback")
    rest = "".join(f"W0 api.py:897] Sending process {7 + r} closing signal SIGTERM\n" for r in (2, 3))
    assert about(only(diagnose(tmp_path, text)))[1:3] == ("configuration", ())
    assert about(only(diagnose(tmp_path, text + ends)))[1:3] == ("configuration", ())
    for more in (rest, "h:7:8 [0] NCCL INFO comm 0x1 rank 0 nranks 4 cudaDev 0\n", "[rank2]: done\n"):
        assert about(only(diagnose(tmp_path, text + more + ends)))[1:3] == ("crashed", (0, 1))


def test_an_error_of_all_ranks_of_the_only_node_in_the_log_is_not_that_of_these_ranks(tmp_path: Path) -> None:
    text = "".join(
        raised(r, "AssertionError: Number of layers should be divisible by the pipeline size") for r in range(8, 16)
    )
    f = only(diagnose(tmp_path, text))
    assert about(f)[1:3] == ("configuration", ()) and f.message.startswith(
        "ranks 8–15, all in the log, raised the same"
    )
    assert "pipeline-num-layers" in f.advice
    assert only(diagnose(tmp_path, text + "[rank2]: done\n")).culprits == tuple(range(8, 16))
    assert only(diagnose(tmp_path, text.replace("rank8]", "rank7]"))).culprits == (7, *range(9, 16))


def test_ranks_that_find_different_gradients_are_not_the_cause(tmp_path: Path) -> None:
    what = "FloatingPointError: Fatal error: gradients are inconsistent between workers. Try --ddp-backend=legacy_ddp."
    for ranks in ((0,), (0, 1, 2, 3)):
        f = only(diagnose(tmp_path, "".join(raised(r, what) for r in ranks)))
        assert about(f)[:3] == ("replica_drift", "gradients_not_synced", ()) and "legacy_ddp" in f.advice


def test_frames_of_libraries_are_not_the_site(tmp_path: Path) -> None:
    text = (
        raised(1, "").rstrip()
        + '\n[rank1]:   File "/usr/lib/python3.12/site-packages/torch/nn/f.py", line 3, in g\n[rank1]: ValueError: odd\n'
    )
    assert [w.file for w in only(diagnose(tmp_path, text)).where] == ["/w/run.py"]


@pytest.mark.parametrize(
    ("text", "cause", "culprits", "word"),
    [
        ("torch.distributed.elastic:\n" + table(11, -9, "Signal 9 (SIGKILL) received by PID 9"), "killed", (11,), "SIGKILL"),
        (table(2, 1, "ValueError: no such file"), "crashed", (2,), "ValueError"),
        ("mpirun noticed that process rank 7 with PID 0 on node n4 exited on signal 9 (Killed).\n", "killed", (7,), "on n4"),
        ("  Process name: [[29,1],3]\n  Exit code:    1\n", "crashed", (3,), "exit code 1"),
        ("[ERROR] [launch.py:321:sigkill_handler] ['python', '--local_rank=1'] exits with return code = -11\n", "killed", (), "SIGSEGV"),
        ("torch.multiprocessing.spawn.ProcessExitedException: process 2 terminated with signal SIGSEGV\n", "killed", (2,), "SIGSEGV"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=4.0.\nsrun: error: n7: tasks 1-2: Out Of Memory\n", "killed", (1, 2), "memory"),
        ("-- Process 1 terminated with the following error:\n" + raised(1, "OSError: No space left on device", prefix=""), "crashed", (1,), "OSError"),
        ("h1:71:99 [3] NCCL INFO comm 0x1 rank 11 nranks 16 cudaDev 3\nh1:71:99 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n", "crashed", (11,), "GPU memory"),
    ],
)  # fmt: skip
def test_how_processes_ended(tmp_path: Path, text: str, cause: str, culprits: tuple[int, ...], word: str) -> None:
    f = only(diagnose(tmp_path, text))
    assert (f.kind, f.cause, f.culprits) == ("rank_lost", cause, culprits) and word in f.message


@pytest.mark.parametrize(("op", "kind"), [("_ALLGATHER_BASE", "mismatch"), ("ALLGATHER", "timeout")])
def test_sizes_are_compared_where_the_operation_needs_equal_ones(tmp_path: Path, op: str, kind: str) -> None:
    """A list of tensors may have different sizes in all_gather, one tensor may not."""
    f = only(diagnose(tmp_path, timeout(4, op=op, numel=64) + timeout(5, op=op, numel=32)))
    assert f.kind == kind and f.certainty == "suspected"


def test_a_task_of_srun_is_a_node_where_torchrun_started_the_ranks(tmp_path: Path) -> None:
    text = "0: W1 torch/distributed/elastic/agent/server/api.py:1] hello\nsrun: error: n7: task 1: Out Of Memory\n"
    f = only(diagnose(tmp_path, text))
    assert f.culprits == () and "n7" in f.message


@pytest.mark.parametrize(
    ("text", "cause", "culprits"),
    [
        ("[Rank 1] NCCL watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered\n", "ecc", (1,)),
        ("[ 8.1] NVRM: Xid (PCI:0000:3b:00): 79, pid=4, name=python, GPU has fallen off the bus.\n", "xid", ()),
    ],
)  # fmt: skip
def test_hardware(tmp_path: Path, text: str, cause: str, culprits: tuple[int, ...]) -> None:
    f = only(diagnose(tmp_path, text))
    assert (f.kind, f.cause, f.culprits) == ("gpu", cause, culprits)


# -- what torch reports about several ranks ---------------------------------------------------------------------------


BACKWARD = "/usr/lib/python3.12/site-packages/torch/autograd/graph.py"


def fingerprint(op: str, shape: str, seq: int = 5) -> str:
    return f"CollectiveFingerPrint(SequenceNumber={seq}, OpType={op}, TensorShape=[{shape}], TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda))"


@pytest.mark.parametrize(("other", "cause"), [(("REDUCE", "4"), "op"), (("ALLREDUCE", "5"), "shape")])
def test_fingerprints_that_differ(tmp_path: Path, other: tuple[str, str], cause: str) -> None:
    what = f"Rank 1 is running collective: {fingerprint('ALLREDUCE', '4')}, but Rank 2 is running collective: {fingerprint(*other)}."
    f = only(diagnose(tmp_path, raised(1, f"RuntimeError: Detected mismatch between collectives on ranks. {what}")))
    assert about(f) == ("mismatch", cause, (), (1, 2)) and f.certainty == "proved"
    assert "find_unused_parameters" not in f.advice
    in_backward = raised(1, f"RuntimeError: Detected mismatch between collectives on ranks. {what}", file=BACKWARD)
    f = only(diagnose(tmp_path, in_backward))
    assert ("same modules on all ranks" in f.advice and "find_unused_parameters" in f.advice) is (cause == "shape")


def test_parameters_without_gradient(tmp_path: Path) -> None:
    text = raised(
        1, "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one."
    )
    text += "[rank1]: Parameters which did not receive grad for rank 1: head.bias, head.weight\n"
    text += "[rank1]: Parameter indices which did not receive grad for rank 1: 6 7\n"
    f = only(diagnose(tmp_path, text))
    assert about(f) == ("unused_parameters", "never_used", (), (1,)) and f.names == ("head.bias", "head.weight")
    text += "[rank0]: Parameter indices which did not receive grad for rank 0: 2\n"
    assert only(diagnose(tmp_path, text)).cause == "differs_between_ranks"


@pytest.mark.parametrize(("theirs", "certainty"), [(8, "proved"), (0, "suspected"), (1506656875, "suspected")])
def test_counts_of_parameters(tmp_path: Path, theirs: int, certainty: str) -> None:
    text = f"RuntimeError: DDP expects same model across all ranks, but Rank 0 has 10 params, while rank 1 has inconsistent {theirs} params.\n"
    f = only(diagnose(tmp_path, text))
    assert (f.kind, f.cause, f.victims, f.certainty) == ("mismatch", "model", (0, 1), certainty)


def test_ranks_late_for_a_monitored_barrier(tmp_path: Path) -> None:
    text = "[E ProcessGroupGloo.cpp:137] Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0.\n"
    report = diagnose(tmp_path, text)
    assert about(only(report)) == ("timeout", "late_rank", (), (1,))
    text += "RuntimeError: [Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 2000 ms\n"
    assert about(only(diagnose(tmp_path, text))) == ("timeout", "late_rank", (2, 3), (0, 1))


@pytest.mark.parametrize(("spelling", "reason", "culprits"), [
    ("retreiving", "Socket Timeout", (0,)), ("retrieving", "wait timeout after 600000ms, keys: /default_pg/0//cuda//0", (0,)),
    ("retrieving", "Connection reset by peer", ()), ("retrieving", "Broken pipe", ()),
])  # fmt: skip
def test_a_communicator_that_rank_0_did_not_make(
    tmp_path: Path, spelling: str, reason: str, culprits: tuple[int, ...]
) -> None:
    what = f"[4] is setting up NCCL communicator and {spelling} ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: {reason}"
    f = only(diagnose(tmp_path, raised(4, f"torch.distributed.DistBackendError: {what}")))
    kind = ("timeout", "late_rank") if culprits else ("rank_lost", "silent")
    assert about(f) == (*kind, culprits, (4,)) and "run.py:7" in f.message


# -- connections, and what came from outside --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("n1:7:8 [2] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer n5<42830>\n", "n5"),
        ("[rank8]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:525] Read error [10.0.0.4]:25266: Connection reset by peer\n", "10.0.0.4"),
        ("n1:7:8 [2] misc/socket.cc:518 NCCL WARN Net : Call to recv from 10.2.8.7<58355> failed : Broken pipe\n", "10.2.8.7"),
        ("n1:7:8 [4] net_ib.cc:5 NCCL WARN NET/IB : Got completion from peer 10.3.1.9<4> with status=12 opcode=0 len=0 vendor err 129 (Recv)\n", "status 12"),
        ("[rank1]:[E ProcessGroupGloo.cpp:145] Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] no error\n", "gloo on rank 1"),
        ("[rank0]: torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/3 clients joined.\n", "2 of 3 ranks"),
        ("[E socket.cpp:793] [c10d] The client socket has timed out after 1800s while trying to connect to (n1, 57388).\n", "n1:57388"),
    ],
)  # fmt: skip
def test_lost_connections_blame_no_rank(tmp_path: Path, text: str, word: str) -> None:
    f = only(diagnose(tmp_path, text))
    assert (f.kind, f.cause, f.culprits, f.certainty) == ("rank_lost", "silent", (), "suspected") and word in f.message


@pytest.mark.parametrize(
    "text",
    [
        "W1 torch/distributed/elastic/agent/server/api.py:7] Received 15 death signal, shutting down workers\n",
        "slurmstepd: error: *** STEP 8.0 ON n1 CANCELLED AT 2031-02-11T04:00:12 DUE TO TIME LIMIT ***\n",
    ],
)
def test_stopped_from_outside(tmp_path: Path, text: str) -> None:
    report = diagnose(tmp_path, text)
    assert report.findings == () and (report.state_text or "").startswith("stopped by") and report.state == "failed"


HEALTHY = (
    "n1:1:1 [0] NCCL INFO comm 0x5 rank 0 nranks 2 cudaDev 0 - Init COMPLETE\nstep 9 error_rate 0.1 timeout=1800\n"
    "WARNING: download, Connection reset by peer (attempt 1/5)\nValueError is handled\n[rank0]:[W ProcessGroupNCCL.cpp:1187] Warning: "
    "process group has NOT been destroyed before we destruct ProcessGroupNCCL.\nTraining finished: 0 errors\n"
)  # fmt: skip


def test_a_healthy_log_accuses_nobody(tmp_path: Path) -> None:
    report = diagnose(tmp_path, HEALTHY)
    assert report.findings == () and report.unjudged is not None and report.world_size == 2


# -- forms of files ---------------------------------------------------------------------------------------------------

ONE = timeout(1) + raised(3, "ValueError: odd batch")


def _json_lines(text: str) -> bytes:
    return "".join(
        json.dumps({"ts": "2031-01-01", "level": "INFO", "message": line}) + "\n" for line in text.splitlines()
    ).encode()


FORMS = {
    "gzip": lambda t: gzip.compress(t.encode()),
    "CRLF": lambda t: t.replace("\n", "\r\n").encode(),
    "UTF-16": lambda t: b"\xff\xfe" + t.encode("utf-16-le"),
    "latin-1": lambda t: b"caf\xe9 \xff\xfe\n" + t.encode(),
    "colours": lambda t: "".join(f"\x1b[31m{line}\x1b[0m\n" for line in t.splitlines()).encode(),
    "progress bars": lambda t: "".join(f"10%|#  | 1/9\r20%|## | 2/9\r{line}\n" for line in t.splitlines()).encode(),
    "JSON lines": _json_lines,
    "docker": lambda t: "".join(json.dumps({"log": line + "\n", "stream": "stderr"}) + "\n" for line in t.splitlines()).encode(),
    "kubectl": lambda t: "".join(f"[pod/job-worker-1/pytorch] 2031-01-01T00:00:00.1Z {line}\n" for line in t.splitlines()).encode(),
    "srun --label": lambda t: "".join(f"12: {line}\n" for line in t.splitlines()).encode(),
    "far behind": lambda t: b"step 1 loss 0.5\n" * 50_000 + t.encode() + b"step\n" * 50_000,
    "a metric first": lambda t: b"{'loss': 1.5}\n" + t.encode(),
    "JSON metrics between": lambda t: b'{"loss": 1.5}\n' + t.encode() + b'{"loss": 1.4}\n',
    "one long line": lambda t: b"x" * 3_000_000 + b"\n" + t.encode(),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_the_file_changes_nothing(tmp_path: Path, form: str) -> None:
    path = tmp_path / ("job.log.gz" if form == "gzip" else "job.log")
    path.write_bytes(FORMS[form](ONE))
    report = diagnose_logs([str(path)])
    assert report is not None
    assert about(only(report)) == ("rank_lost", "crashed", (3,), (1,)), report


@pytest.mark.parametrize("name", ["logs/rank{}.log", "logs/none_x/attempt_0/{}/stderr.log", "logs/train-{}.txt"])
def test_a_file_of_each_rank(tmp_path: Path, name: str) -> None:
    for rank in range(4):
        path = tmp_path / name.format(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("step 1\n" + (raised(2, "ValueError: odd batch", prefix="") if rank == 2 else ""))
    report = diagnose_logs([str(tmp_path / "logs")])
    assert report is not None
    assert only(report).culprits == (2,) and report.ranks_seen == 4


def test_no_rank_is_guessed_from_the_names_of_nodes(tmp_path: Path) -> None:
    for node in (4, 7):
        (tmp_path / f"slurm-{node}.out").write_text(
            raised(0, "ValueError: odd batch", prefix="") if node == 7 else "step 1\n"
        )
    report = diagnose_logs([str(tmp_path)])
    assert report is not None and only(report).culprits == ()


def test_a_damaged_gzip_file_is_judged_as_far_as_it_goes(tmp_path: Path) -> None:
    whole = gzip.compress((ONE + "".join(f"{i * i}\n" for i in range(60_000))).encode())
    (tmp_path / "job.log.gz").write_bytes(whole[: len(whole) // 2])
    report = diagnose_logs([str(tmp_path / "job.log.gz")])
    assert report is not None and only(report).culprits == (3,) and "damaged" in report.notes[0]


TAR = b"rank0.log".ljust(257, b"\0") + b"ustar  \0".ljust(255, b"\0") + b"step 1 loss 0.5\n" * 4000


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04}.", b'{"version": "2.9", "entries": []}', b"\x7fELF\0\0\0", b'[{"a": 1}]', TAR]
)
def test_other_files_are_no_logs(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.log").write_bytes(content)
    assert diagnose_logs([str(tmp_path / "x.log")]) is None


LIVE = """step 40 loss 0.3
[distdiag] █ ERROR mismatch/shape  rank 2 is in all_gather of 49 elements where ranks 0, 1 are in all_gather of 50 elements
[distdiag]   cost   the job makes no progress
[distdiag]   where  /job/train.py:38 in score (rank 2); waiting: /job/train.py:38 in score (ranks 0, 1)
[distdiag]   do     compare the tensors
"""
SUMMARY = """
[distdiag] the job failed: rank 2 exited
[distdiag] 1 error, 1 warning found:
[distdiag] █ ERROR mismatch/shape  rank 2 is in all_gather of 49 elements where ranks 0, 1 are in all_gather of 50 elements
[distdiag]   cost   the job ended
[distdiag]   warning straggler: rank 1 is 40 ms slower
[distdiag] verdict: distdiag diagnose reports/a    report: distdiag report reports/a
"""


def test_what_distdiag_printed_while_the_job_ran_is_the_verdict(tmp_path: Path) -> None:
    watchdog = timeout(0) + timeout(1) + counters(0, 40, 41, 39)
    report = diagnose(tmp_path, LIVE + watchdog + SUMMARY)
    first, second = report.findings
    assert about(first) == ("mismatch", "shape", (2,), (0, 1)) and first.certainty == "proved"
    assert [(w.rank, w.file, w.line, w.function) for w in first.where] == [(2, "/job/train.py", 38, "score")]
    assert (first.cost, first.advice) == ("the job ended", "compare the tensors")
    assert (second.kind, second.severity) == ("straggler", "warning")
    assert (report.state, report.ranks_seen) == ("failed", 3)
    assert any("distdiag diagnose reports/a" in n for n in report.notes)


def test_a_message_of_two_lines_is_one_finding(tmp_path: Path) -> None:
    first = "rank 2 skipped all_gather (train.py:38): `if rank < 2` (line 37)"
    live = LIVE.replace(LIVE.splitlines()[1].partition("  ")[2], first, 1)
    live = live.replace("[distdiag]   cost", "[distdiag]   more   rank 2 is in barrier\n[distdiag]   cost", 1)
    f = only(diagnose(tmp_path, live + live))
    assert f.message == f"{first}; rank 2 is in barrier" and f.cost == "the job makes no progress"
    cleared = f"[distdiag] cleared, the job continues: error mismatch: {f.message}\n"
    assert diagnose(tmp_path, live + cleared).findings == ()


def test_the_last_of_two_recorded_runs_in_one_log_is_judged(tmp_path: Path) -> None:
    later = "[distdiag] █ ERROR deadlock/missing_rank  rank 1 has not entered barrier\n"
    report = diagnose(tmp_path, LIVE + SUMMARY + SUMMARY + later)
    assert only(report).kind == "deadlock"
    report = diagnose(tmp_path, LIVE + SUMMARY + later + SUMMARY.replace("reports/a", "reports/b"))
    assert [f.kind for f in report.findings] == ["mismatch", "straggler"]
    assert [n for n in report.notes if "recorded" in n] == [
        "distdiag recorded this job (line 2): `distdiag diagnose reports/b` has the whole verdict"
    ]


def test_logs_of_several_recorded_runs_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(LIVE + SUMMARY)
    (tmp_path / "b.log").write_text(SUMMARY.replace("reports/a", "reports/b"))
    report = diagnose_logs([str(tmp_path)])
    assert report is not None
    assert [n for n in report.notes if "recorded" in n] == [
        "distdiag recorded a job (a.log line 2): `distdiag diagnose reports/a` has the whole verdict",
        "distdiag recorded a job (b.log line 2): `distdiag diagnose reports/b` has the whole verdict",
        "these logs are of 2 recorded runs: give those of one run for its verdict alone",
    ]
    (tmp_path / "b.log").write_text(
        "".join(f"[distdiag] node 1: {line[11:]}\n" for line in SUMMARY.splitlines() if line)
    )
    again = diagnose_logs([str(tmp_path)])
    assert again is not None and any("recorded this job" in n for n in again.notes)


@pytest.mark.parametrize(
    ("text", "odd"), [("flour\n200 g of butter\n", True), ("[rank0]: step 3 loss 0.2\n", False), (LIVE, False)]
)
def test_a_text_of_something_else_does_not_look_like_a_log(tmp_path: Path, text: str, odd: bool) -> None:
    report = diagnose(tmp_path, text)
    assert any("does not look like a log of a distributed job" in note for note in report.notes) == odd


def test_a_job_that_distdiag_saw_end_has_ended(tmp_path: Path) -> None:
    end = "step 768\n\n[distdiag] the job ended: all ranks ended normally after 768 steps\n"
    report = diagnose(tmp_path, end + "[distdiag] nothing found\n")
    assert (report.state, report.findings, report.unjudged) == ("ended", (), None)
    late = diagnose(tmp_path, end + "[distdiag]   warning straggler: rank 1 is 40 ms slower\n")
    assert late.state == "ended" and only(late).kind == "straggler"


def test_what_distdiag_took_back_is_no_finding(tmp_path: Path) -> None:
    message = LIVE.splitlines()[1].partition("  ")[2]
    report = diagnose(tmp_path, LIVE + f"[distdiag] cleared, the job continues: error mismatch: {message}\n")
    assert report.findings == () and report.state == "running"


@pytest.mark.parametrize(
    "line",
    [
        "[distdiag] █ ERROR nonsense/shape  rank 2 is late",
        "[distdiag] █ ERROR mismatch/nonsense  rank 2 is late",
        "[distdiag]   where  /job/train.py:38 in score (rank 2)",
        "[distdiag] ",
        "[distdiag] verdict: distdiag diagnose " + "x" * 5000,
    ],
)
def test_lines_of_another_version_are_no_findings(tmp_path: Path, line: str) -> None:
    assert diagnose(tmp_path, line + "\n").findings == ()
