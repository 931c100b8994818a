"""What came first and which process it was: ranks, pids, tasks and clocks of a log are joined where it joins them, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest

from distdiag.sources.logs.verdict import diagnose_logs
from distdiag.sources.logs.writers import apart, time_of
from tests.sources.test_logs import about, counters, diagnose, only, raised, signal, table, timeout

CUDA = "RuntimeError: CUDA error: an illegal memory access was encountered"
XID = "[ 9.1] NVRM: Xid (PCI:0000:c1:00): 74, pid={pid}, name=python3, NVLink: fatal error detected on link 2\n"
RAY = "A worker died or was killed while executing a task by an unexpected system error. Worker IP address: 10.1.1.9 Worker PID: {pid}\n"
STOP = "slurmstepd: error: *** STEP 7.0 ON n3 CANCELLED AT 2031-03-01T08:00:00 DUE TO PREEMPTION ***\n"
GLOO = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting {ms}ms for recv operation to complete"


def at(clock: str, text: str) -> str:
    """Return a line of torch's C++ code with a time."""
    return text.replace("[E ", f"[E0301 {clock}.114205 ")


def test_what_torch_derives_from_an_empty_buffer_does_not_hide_that_nothing_ever_arrived(tmp_path: Path) -> None:
    text = "".join(timeout(r, 1, "ALLGATHER") + counters(r, 1, 1, -1) for r in range(3))
    text += raised(
        1,
        "RuntimeError: DDP expects same model across all ranks, but Rank 1 has 7 params, while rank 0 has inconsistent 0 params.",
    )
    f = only(diagnose(tmp_path, text))
    assert (
        about(f) == ("stall", "unknown", (), (0, 1, 2))
        and "never worked" in f.message
        and "NCCL_P2P_DISABLE" in f.advice
    )
    later = "".join(timeout(r, 9) + counters(r, 9, 9, 8) for r in range(3))
    assert "never worked" not in only(diagnose(tmp_path, later)).message


def test_a_process_that_timed_out_was_alive_until_then(tmp_path: Path) -> None:
    """Ray names it by its pid, the watchdog by its rank; a launcher's signal is its end and no cause."""
    label = "(Worker pid=515, ip=10.1.1.9) "
    f = only(diagnose(tmp_path, label + timeout(7, 212) + RAY.format(pid=515)))
    assert about(f) == ("timeout", "late_rank", (), (7,)) and "#212" in f.message
    f = only(diagnose(tmp_path, label + timeout(7, 212) + RAY.format(pid=516).replace(".9", ".8")))
    assert f.kind == "timeout"  # whose pid it is, is not known
    killed = timeout(0) + timeout(1) + table(1, -9, "Signal 9 (SIGKILL) received by PID 9")
    assert only(diagnose(tmp_path, killed)).kind == "stall"
    assert only(diagnose(tmp_path, killed + table(2, -9, "Signal 9 (SIGKILL) received by PID 4"))).culprits == (2,)


def test_a_task_of_srun_is_a_node_where_lines_have_the_prefix_of_torchrun(tmp_path: Path) -> None:
    text = "".join(f"[default{r}]:{timeout(r, 660)}" for r in range(4)) + "srun: error: n9: task 1: Killed\n"
    f = only(diagnose(tmp_path, text))
    assert about(f) == ("rank_lost", "killed", (), (0, 1, 2, 3)) and f.certainty == "suspected"
    assert "the ranks on n9" in f.message and "timed out in all_reduce #660" in f.message


@pytest.mark.parametrize(("clock", "blamed"), [("09:42:31", "timeout"), ("07:59:31", "rank_lost")])
def test_an_error_after_the_timeouts_is_not_their_cause(tmp_path: Path, clock: str, blamed: str) -> None:
    error = at(clock, "[rank1]:[E ProcessGroupNCCL.cpp:1] [Rank 1] note: debugger detached\n") + raised(1, CUDA)
    text = "".join(at("08:00:07", timeout(r)) for r in (0, 2, 3)) + error
    f = only(diagnose(tmp_path, text))
    assert about(f)[0] == blamed and f.culprits == (1,)
    assert ("later rank 1 had a CUDA error" in f.message) is (blamed == "timeout")
    assert " then " not in f.message  # when it was raised is not known, only that it was later than the line before


def test_without_clocks_the_order_of_two_ranks_is_not_known(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, timeout(0) + raised(3, "ValueError: odd")))
    assert about(f) == ("rank_lost", "crashed", (3,), (0,)) and " then " not in f.message


def test_what_stopped_the_job_from_outside_came_before_the_errors_after_it(tmp_path: Path) -> None:
    report = diagnose(tmp_path, STOP + raised(6, CUDA) + "srun: error: n3: task 6: Exited with exit code 1\n")
    assert report.findings == () and "preemption" in (report.state_text or "")
    assert only(diagnose(tmp_path, raised(6, CUDA) + STOP)).culprits == (6,)
    memory = STOP + "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\n"
    assert only(diagnose(tmp_path, memory)).cause == "killed"


def test_a_send_and_its_recv_are_no_two_collectives(tmp_path: Path) -> None:
    pipe = "PG ID 4 PG GUID 11(pipe)"
    text = "".join(
        timeout(r, 17, op).replace(f"[Rank {r}]", "[Rank 0]") + counters(r, 17, 17, 16, pipe)
        for r, op in ((4, "SEND"), (12, "RECV"))
    )
    f = only(diagnose(tmp_path, text))
    assert about(f) == ("stall", "unknown", (), (4, 12)) and "halves" in f.message


def test_a_rank_that_was_asked_to_dump_has_not_timed_out(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, signal(2, 90, 88, first=21)))
    assert about(f)[:3] == ("timeout", "late_rank", ()) and f.message.startswith("rank 21 reported a timeout")
    assert "rank 21" in f.advice and "2 operations in flight" in f.message
    f = only(diagnose(tmp_path, timeout(1, 22) + counters(1, 22, 22, 21) + signal(0, 24, 21, first=1)))
    assert f.victims == (0, 1)  # it is in that collective, too
    text = "".join(timeout(r, 22) + counters(r, 22, 24, 21) for r in (0, 2, 3)) + signal(1, 22, 21, first=3)
    f = only(diagnose(tmp_path, text))  # the others are many, and it came later than they: what it says is no timeout
    assert (
        about(f) == ("timeout", "late_rank", (1,), (0, 2, 3))
        and "ranks 0, 2, 3 waited in it; rank 1 reported no" in f.message
    )
    assert "issued there, too" in f.message and "did not make" not in f.advice


def test_writers_without_a_rank_count(tmp_path: Path) -> None:
    gloo = raised(0, GLOO.format(ms=900_000), prefix="")
    f = only(diagnose(tmp_path, gloo + gloo + timeout(3, 5120) + counters(3, 5120, 5120, 5119)))
    assert about(f) == ("timeout", "late_rank", (), (3,))
    assert "2 processes whose rank the log does not show waited for 15 minutes in gloo at run.py:7" in f.message


@pytest.mark.parametrize(
    "line",
    [
        "step 4 says: 'If you see \"CUDA out of memory. Tried to allocate 1 GiB\", lower --batch.'\n",
        'docs: look for "NCCL WARN Mismatched collective detected, rank 3" in the log\n',
    ],
)
def test_a_quotation_is_no_evidence(tmp_path: Path, line: str) -> None:
    assert diagnose(tmp_path, line + "step 5\n").findings == ()
    assert diagnose(tmp_path, 'level=error msg="RuntimeError: CUDA out of memory. Tried"\n').findings != ()


def test_one_event_is_one_finding_and_its_process_is_the_rank(tmp_path: Path) -> None:
    (tmp_path / "fit.log").write_text('{\n "seed": 3\n}\n' + raised(2, CUDA) + table(2, -6, "Signal 6 (SIGABRT)"))
    (tmp_path / "kernel.txt").write_text(XID.format(pid=902))
    (tmp_path / "notes.txt").write_text("buy milk\n")
    (tmp_path / "conf.log").write_text('{"lr": 1}')
    report = diagnose_logs([str(tmp_path)])
    assert report is not None
    f = only(report)
    assert about(f) == ("gpu", "xid", (2,), ())
    (left,) = [note for note in report.notes if note.startswith("not read as a log")]
    assert "notes.txt (it has no message" in left and "conf.log (a JSON document)" in left


def test_a_file_that_begins_with_nul_bytes_is_a_log(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_bytes(b"\0" * 200_000 + raised(1, CUDA).encode())
    report = diagnose_logs([str(tmp_path)])
    assert report is not None and only(report).culprits == (1,)


@pytest.mark.parametrize("around", [("\0\n", ""), ("\0", ""), ("\n", "\0" * 4000)])
def test_a_few_nul_bytes_do_not_make_a_log_a_binary(tmp_path: Path, around: tuple[str, str]) -> None:
    """The handler of a loader's worker writes its message with the NUL byte at its end."""
    worker = (
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\n"
    )
    loader = "RuntimeError: DataLoader worker (pid 5) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit."
    (tmp_path / "job.log").write_text(worker + around[0] + raised(3, loader) + around[1])
    report = diagnose_logs([str(tmp_path)])
    assert report is not None and only(report).culprits == (3,)
    assert "--shm-size" in only(report).advice and "fewer DataLoader workers" in only(report).advice


EARLY, MEANWHILE, LATE = "[Sat Mar  1 04:00:00 2031] ", "[Sun Mar  2 08:13:00 2031] ", "[Sun Mar  2 13:31:00 2031] "
LOG = "".join(f"2031-03-02 {8 + n // 60:02}:{n % 60:02}:00 step {n} loss 0.4\n" for n in range(0, 150, 2))


@pytest.mark.parametrize(
    ("kernel", "more", "found"),
    [
        (EARLY + XID.format(pid=902), "", False),
        (EARLY + XID.format(pid=902), raised(2, CUDA), False),
        ("Mar 01 04:00:00 n7 kernel: " + XID.format(pid=902), "", False),
        ("2031-03-02T05:00:00+01:00 n7 kernel: " + XID.format(pid=902), "", True),  # a zone may be between the clocks
        (MEANWHILE + XID.format(pid=902), "", False),
        (MEANWHILE.replace("08:13", "10:28") + XID.format(pid=902), "", True),  # when the job wrote last
        (MEANWHILE.replace("08:13", "05:28") + XID.format(pid=902), "", True),  # the same, if its zone differs
        (LATE + XID.format(pid=902), "", True),
        (LATE + XID.format(pid=902), "2031-03-02 10:31:00 Training finished\n", False),
        (LATE + XID.format(pid=902), "2031-03-02 10:31:00 Training finished\n" + raised(2, "ValueError: 1"), True),
        (MEANWHILE + "mlx5_core 0000:5e:00.0 mlx5_2: Port: 1 Link DOWN\n", "", False),
        (MEANWHILE + "Out of memory: Killed process 905 (python) total-vm:9kB\n", "", False),
        (XID.format(pid=902), "", True),
        (XID.format(pid=902), "2031-03-02 10:31:00 Training finished\n", False),
    ],
)
def test_a_node_s_event_before_or_long_before_the_end_of_the_job_is_a_note(
    tmp_path: Path, kernel: str, more: str, found: bool
) -> None:
    (tmp_path / "dmesg.txt").write_text(kernel)
    (tmp_path / "train.log").write_text(LOG + more)
    report = diagnose_logs([str(tmp_path)])
    assert report is not None
    assert any(f.kind == "gpu" for f in report.findings) == found, report
    assert "Traceback" in more or all("may have ended" in f.cost for f in report.findings if f.kind == "gpu")
    assert found or any("dmesg.txt; the job " in note and "caught" not in note for note in report.notes), report.notes


@pytest.mark.parametrize(
    ("first", "second", "seconds"),
    [
        ("[Tue Dec 30 23:00:00 2031] x", "2031-12-31 01:00:00 x", 7200),
        ("Dec 31 23:00:00 n7 x", "2032-01-01 01:00:00 x", 7200),
        ("[E0228 23:00:00.1 x.cpp:1] x", "Mar  1 00:00:00 n7 x", 25 * 3600),  # it may be a leap year
        ("0001-01-01T00:00:00+14:00 x", "Jan  1 00:00:00 n7 x", 14 * 3600 - 86400),
    ],
)
def test_times_of_two_clocks(first: str, second: str, seconds: float) -> None:
    a, b = time_of(first), time_of(second)
    assert a is not None and b is not None
    assert apart(a, b) == seconds


@pytest.mark.parametrize(
    ("prefix", "own", "caught", "culprits", "words"),
    [
        ("[1,mpirank:{},algo-{}]<stderr>:", "KeyError: 'mask'", False, (5,), "rank 5 on algo-2 raised KeyError: 'mask'"),
        ("", "KeyError: 'mask'", False, (5,), "rank 5 raised KeyError: 'mask'"),  # by the rank that called MPI_Abort
        ("", "KeyError: 'mask'", True, (), "lost a connection"),  # perhaps of one process
        ("", "ConnectionError: [Errno 111] Connection refused", False, (), "lost a connection"),
    ],
)  # fmt: skip
def test_of_two_processes_without_names_that_ended_the_one_with_its_own_exception_failed(
    tmp_path: Path, prefix: str, own: str, caught: bool, culprits: tuple[int, ...], words: str
) -> None:
    def of(rank: int, what: str, inner: bool = False) -> str:
        text = raised(0, what, prefix="") if inner else raised(0, what, prefix="").replace("in main", "in <module>")
        return "".join(prefix.format(rank, 1 + rank // 4) + line + "\n" for line in text.splitlines())

    victim = of(0, "RuntimeError: Horovod has been shut down. This was caused by an exception", caught)
    abort = "MPI_ABORT was invoked on rank 5 in communicator MPI_COMM_WORLD\n"
    f = only(diagnose(tmp_path, victim + of(5, own) + abort * bool(culprits)))
    assert f.culprits == culprits
    assert words in f.message
    assert f.certainty == ("proved" if prefix else "suspected")


@pytest.mark.parametrize(
    ("there", "to", "words", "advice"),
    [
        ("docker0:172.17.0.1", "172.17.0.1", "to 172.17.0.1 (docker0 on n8): that is a bridge", "set NCCL_SOCKET_IFNAME (and GLOO_SOCKET_IFNAME) on n8 to its interface in the network of the other hosts (there ens3), or NCCL_SOCKET_IFNAME=^docker0,virbr0,lo"),
        # one of that host itself, which NCCL lists
        ("virbr0:192.168.122.1<0> [1]enp9:10.3.0.8", "192.168.122.1", "(virbr0 on n8): that is a bridge", "set NCCL_SOCKET_IFNAME=enp9 (and GLOO_SOCKET_IFNAME) on n8"),
        ("veth4a:10.8.0.5", "10.8.0.5", "to 10.8.0.5 (veth4a on n8): that is a bridge", "=^veth4a,docker0,virbr0,lo"),
        ("", "192.168.122.1", "to 192.168.122.1: that is most often libvirt's own bridge", "NCCL_SOCKET_IFNAME=^virbr0,docker0,lo"),
        ("", "172.17.0.1", "to 172.17.0.1: that is most often docker's own bridge", "on the host that has this address"),
        ("ens4:10.3.0.8", "10.3.0.8", "to 10.3.0.8 (ens4 on n8): nothing listens there", "look at 10.3.0.8 (ens4 on n8) first"),
        ("docker0:172.17.0.1", "10.3.0.7", "to 10.3.0.7: nothing listens there", "look at 10.3.0.7 first"),  # of the same host
    ],
)  # fmt: skip
def test_nccls_lines_name_the_host_and_interface_of_an_address(
    tmp_path: Path, there: str, to: str, words: str, advice: str
) -> None:
    text = "n7:40:40 [0] NCCL INFO Bootstrap : Using ens3:10.3.0.7<0>\n"
    text += f"n8:50:50 [0] NCCL INFO NET/Socket : Using [0]{there}<0> [1]lo9:10.9.0.1<0>\n" if there else ""
    text += f"n7:40:47 [0] socket.h:403 NCCL WARN Connect to {to}<4117> failed : Connection refused\n"
    f = only(diagnose(tmp_path, text))
    assert words in f.message and advice in f.advice


ROUTE = "n5:8:8 [{gpu}] misc/socket.cc:5 NCCL WARN socketPollConnect: Connect to 10.1.0.4<40123> returned 113(No route to host) errno 115(x)\n"
SHELL = "run.sh: line 4:    17 Killed                  python train.py\n"


@pytest.mark.parametrize("killed", [SHELL, "Killed\n", "srun terminated: exit code 137\n"])
@pytest.mark.parametrize(
    ("text", "kind", "word"),
    [
        (timeout(0, op="ALLREDUCE") + timeout(1, op="BROADCAST"), "mismatch", "different calls"),
        (ROUTE.format(gpu=0) + ROUTE.format(gpu=1) + raised(0, "RuntimeError: NCCL error: unhandled system error", prefix=""), "rank_lost", "no route"),
        ("Mismatched NCCL version detected : rank 0 version 22105 rank 8 version 21903\n", "rank_lost", "does not mix"),
    ],
)  # fmt: skip
def test_a_nameless_kill_after_the_ranks_had_failed_is_no_cause(
    tmp_path: Path, killed: str, text: str, kind: str, word: str
) -> None:
    f = only(diagnose(tmp_path, text + killed))
    assert f.kind == kind and word in f.message and f.cause != "killed"


def test_a_nameless_kill_explains_a_lost_connection_and_what_came_after_it(tmp_path: Path) -> None:
    """A peer notices the end of a process at once, often before the shell reports it."""
    lost = raised(1, "RuntimeError: [x/gloo/transport/tcp/pair.cc:5] Connection closed by peer [10.1.0.4]:4")
    for text in (lost + SHELL, SHELL + timeout(0) + timeout(1)):
        assert only(diagnose(tmp_path, text)).cause == "killed"


STACK = "[rank{r}]: Stack trace of the failed collective: \n#0 all_gather from /usr/lib/python3.12/site-packages/torch/distributed/d.py:9\n{inside}#2 step from /u/fit.py:{line}\n"
INSIDE = "#1 {} from /usr/lib/python3.12/site-packages/x/y.py:4\n"


@pytest.mark.parametrize(
    ("name", "others", "named"),
    [
        ("_zero3_consolidated_16bit_state_dict", timeout(1), True),
        ("get_model_state_dict", timeout(1), True),
        ("save_pretrained", timeout(1, op="_ALLGATHER_BASE") + STACK.format(r=1, inside="", line=40), True),
        ("save_pretrained", "", True),
        ("save_pretrained", timeout(1, op="_ALLGATHER_BASE"), False),  # it may be in the same function
        ("set_model_state_dict", timeout(1), False),
        ("_load_state_dict_pre_hook", timeout(1), False),
    ],
)
def test_a_call_that_gathers_the_state_of_all_ranks_on_one_rank(
    tmp_path: Path, name: str, others: str, named: bool
) -> None:
    text = timeout(0, op="_ALLGATHER_BASE") + others + STACK.format(r=0, inside=INSIDE.format(name), line=31)
    f = only(diagnose(tmp_path, text))
    assert (f"rank 0 is inside {name}, which waits for all ranks" in f.message) is named
    assert (f"call {name} on all ranks" in f.advice) is named


SYNC = INSIDE.format("_sync_ddp_if_available") + INSIDE.format("log")


@pytest.mark.parametrize(
    ("inside", "line", "do"),
    [
        (SYNC, 31, "call self.log(sync_dist=True) on all ranks"),
        ("", 31, "make the call at fit.py:31 in step on all ranks or on none; else look for a condition on rank 0"),
        ("", 40, "look for a collective in what only rank 0 does"),  # at one line
    ],
)
def test_a_rank_that_is_alone_in_a_call(tmp_path: Path, inside: str, line: int, do: str) -> None:
    text = timeout(0) + timeout(1, op="BROADCAST") + timeout(2, op="BROADCAST")
    text += STACK.format(r=0, inside=inside, line=line) + "".join(STACK.format(r=r, inside="", line=40) for r in (1, 2))
    f = only(diagnose(tmp_path, text))
    assert (f.kind, f.culprits) == ("mismatch", (0,)) and f.advice.startswith(do)
    assert ("rank_zero_only=True and sync_dist=False" in f.advice) is bool(inside)


def test_a_rank_whose_operation_differs_is_named_in_what_to_do(tmp_path: Path) -> None:
    text = "".join(timeout(r, op="_ALLGATHER_BASE") for r in (0, 1, 3)) + timeout(2, op="_REDUCE_SCATTER_BASE")
    f = only(diagnose(tmp_path, text))
    assert (f.kind, f.cause, f.culprits) == ("mismatch", "op", (2,))
    assert f.advice.startswith("look for a condition on rank 2, or on its data") and "ZeRO-3" in f.advice


@pytest.mark.parametrize("late", [(0,), (0, 2)])
def test_the_last_line_without_a_rank_is_most_likely_of_rank_0_if_it_is_late(
    tmp_path: Path, late: tuple[int, ...]
) -> None:
    text = "using world size: 8, data-parallel size: 8\n> building the shuffle index for 9 files ...\n"
    report = diagnose(tmp_path, text + "".join(timeout(r) for r in range(8) if r not in late))
    f = only(report)
    assert (f.kind, f.culprits, report.world_size) == ("timeout", late, 8)
    assert "most likely of rank 0, is `> building the shuffle index for 9 files ...`" in f.message
    assert f.advice.startswith("if rank 0 was still preparing data") and "did not make" not in f.advice
    assert f.advice.endswith("whether they came to that call" if len(late) > 1 else "whether it came to that call")
    other = only(diagnose(tmp_path, text + "".join(timeout(r) for r in range(8) if r != 3)))
    assert other.culprits == (3,) and "shuffle index" not in other.message
