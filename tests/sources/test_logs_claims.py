"""A finding claims no more than the lines show: which ranks, which host, which of several logs, which of two jobs. All texts are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from distdiag.sources.logs.verdict import diagnose_logs
from tests.sources.test_logs import about, counters, diagnose, only, raised, timeout

# -- sizes in watchdogs' lines -----------------------------------------------------------------------------------------


def sized(rank: int, numel: int, parts: int, op: str = "ALLGATHER") -> str:
    sizes = f"NumelIn={numel}, NumelOut={numel * parts}"
    return timeout(rank, op=op).replace("NumelIn=64, NumelOut=64", sizes) + counters(rank, 40, 40, 39)


ANALYZED = "error msg: Culprit rank {}; Error type: {}, Expected input sizes: '[[6, 32]]' does not match found input sizes: '[[5, 32]]'\n"


def test_the_rank_whose_part_of_an_all_gather_has_another_size(tmp_path: Path) -> None:
    text = "".join(sized(r, 160 if r == 2 else 192, 4) for r in range(4))
    f = only(diagnose(tmp_path, text))
    assert about(f) == ("mismatch", "shape", (2,), (0, 1, 3))
    assert "160 elements" in f.message and "drop_last" in f.advice
    f = only(diagnose(tmp_path, text + ANALYZED.format(2, "SIZE_OR_SYNTAX_MISMATCH")))
    assert f.culprits == (2,) and "[[5, 32]]" in f.message


def test_parts_of_different_sizes_that_all_ranks_know_are_no_mismatch(tmp_path: Path) -> None:
    texts = (sized(r, n, 1).replace(f"NumelOut={n}", "NumelOut=600") for r, n in enumerate((100, 200, 300)))
    assert only(diagnose(tmp_path, "".join(texts))).kind != "mismatch"


def test_the_culprit_that_the_analyzer_of_dumps_names(tmp_path: Path) -> None:
    text = "Collective sequence number: 7 has errors\ncollective: nccl:all_gather\n"
    f = only(diagnose(tmp_path, text + ANALYZED.format(3, "SIZE_OR_SYNTAX_MISMATCH")))
    assert about(f)[:3] == ("mismatch", "shape", (3,)) and "[[5, 32]]" in f.message
    waits = "".join(timeout(r, numel=None) for r in range(4))
    f = only(diagnose(tmp_path, waits + ANALYZED.format(3, "COLLECTIVE_TYPE_MISMATCH")))
    assert about(f) == ("mismatch", "op", (3,), (0, 1, 2))


# -- which ranks -------------------------------------------------------------------------------------------------------


def test_a_rank_whose_watchdog_hangs_did_not_time_out(tmp_path: Path) -> None:
    (tmp_path / "dmesg.txt").write_text(
        "[Tue Mar 4 02:07:10 2031] NVRM: Xid (PCI:0000:1b:00): 79, pid=7, GPU has fallen\n"
    )
    stuck = "[rank2]:[E ProcessGroupNCCL.cpp:9] [Rank 2] ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress\n"
    (tmp_path / "job.log").write_text("".join(timeout(r) for r in (0, 1, 3)) + stuck)
    report = diagnose_logs([str(tmp_path)])
    assert report is not None
    message = only(report).message
    assert "ranks 0, 1, 3 timed out" in message or "ranks 0, 1, 3 then timed out" in message
    assert "rank 2 reported no timeout: its watchdog made no progress" in message


def announced(*ranks: int, world: int = 8) -> str:
    return "".join(f"Initializing distributed: GLOBAL_RANK: {r}, MEMBER: {r + 1}/{world}\n" for r in ranks)


CLIENTS = "[rank0]: torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. {}/8 clients joined.\n"


def test_ranks_that_were_never_launched(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, "#SBATCH --ntasks=2\n" + announced(1, 0) + CLIENTS.format(2)))
    assert about(f)[:3] == ("rank_lost", "configuration", (2, 3, 4, 5, 6, 7))
    assert "2 tasks" in f.message and "--ntasks-per-node" in f.advice
    f = only(diagnose(tmp_path, announced(1, 0) + CLIENTS.format(2)))
    assert f.culprits == (2, 3, 4, 5, 6, 7) and "tasks" not in f.message


TASKS = "   NumNodes=2 NumCPUs=8 NumTasks={} CPUs/Task=2\n"
LIMIT = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2031-01-02T03:04:05 DUE TO TIME LIMIT ***\n"
NO_IPV6 = "[W socket.cpp:663] [c10d] The IPv6 network addresses of (n1, 168) cannot be retrieved (gai error: -2 - Name or service not known).\n"


@pytest.mark.parametrize("end", ["", LIMIT, NO_IPV6 + LIMIT])
def test_fewer_tasks_than_ranks_are_never_all_there(tmp_path: Path, end: str) -> None:
    f = only(diagnose(tmp_path, TASKS.format(2) + announced(1, 0) + end))
    assert about(f)[:3] == ("rank_lost", "configuration", (2, 3, 4, 5, 6, 7)) and "2 tasks" in f.message
    for tasks, ranks, more in ((2, (0,), ""), (8, (0, 1), ""), (2, (0, 1), "step 1 loss 2.0\n")):
        assert diagnose(tmp_path, TASKS.format(tasks) + announced(*ranks) + more + end).findings == ()


@pytest.mark.parametrize("joined", [3, 5])
def test_others_joined_than_those_that_the_log_shows(tmp_path: Path, joined: int) -> None:
    f = only(diagnose(tmp_path, "#SBATCH --ntasks=8\n" + announced(1, 0) + CLIENTS.format(joined)))
    assert f.culprits == () and "does not say which" in f.message


def comm(host: str, pid: int, rank: int, of: int, comm_id: str) -> str:
    who = f"(Worker pid={pid}, ip=10.3.0.{of}) {host}:{pid}:{pid} [{rank}]"
    return (
        f"{who} NCCL INFO ncclCommInitRank comm 0x5{pid} rank {rank} nranks 4 cudaDev {rank} nvmlDev {rank} busId {rank + 1}9000 "
        f"commId {comm_id} - Init START\n"
    )


def test_ranks_of_two_communicators_are_not_those_of_the_job(tmp_path: Path) -> None:
    text = "".join(comm("h1", 100 + r, r, 1, "0xa1") + comm("h2", 200 + r, r, 2, "0xb2") for r in range(4))
    warn = "(Worker pid={0}, ip=10.3.0.2) h2:{0}:{0} [{1}] transport/nvls.cc:254 NCCL WARN Cuda failure 401 'the operation cannot be performed in the present state'\n"
    text += "".join(warn.format(200 + r, r) for r in range(4))
    report = diagnose(tmp_path, text)
    f = only(report)
    assert "all 4 ranks" not in f.message and "h2" in f.message and f.culprits == f.victims == ()
    assert report.world_size is None


# -- what a library reports first ----------------------------------------------------------------------------------------

QP = "Call to ibv_modify_qp failed with 22 Invalid argument, on dev mlx5_{}:1, curr state INIT, next state RTR, local GID index 3, local GID {}, remote GID {}\n"
CLOSED = "h{0}:{1}:{1} [{2}] misc/socket.cc:64 NCCL WARN socketProgress: Connection closed by remote peer h1<4711>\n"


def test_a_device_without_an_address_is_the_cause_of_closed_connections(tmp_path: Path) -> None:
    ranks = "".join(
        f"h{h}:{10 * h + d}:{10 * h + d} [{d}] NCCL INFO comm 0x{h}{d} rank {2 * h + d - 2} nranks 4\n"
        for h in (1, 2)
        for d in (0, 1)
    )
    text = (
        "h2:21:21 [1] ibvwrap.cc:262 NCCL WARN "
        + QP.format(2, "::", "::ffff:10.4.0.1")
        + "h1:11:11 [1] ibvwrap.cc:262 NCCL WARN "
        + QP.format(2, "::ffff:10.4.0.1", "::")
    )
    closed = CLOSED.format(1, 10, 0) + CLOSED.format(2, 20, 0)
    f = only(diagnose(tmp_path, ranks + closed + text))
    assert f.culprits == (3,) and "h2" in f.message and "mlx5_2" in f.message
    assert "NCCL_IB_HCA=^mlx5_2" in f.advice and "show_gids" in f.advice
    mirror = only(diagnose(tmp_path, ranks + text.splitlines(keepends=True)[1] + closed))
    assert mirror.culprits == () and "other end" in mirror.message


def test_two_devices_with_addresses_that_could_not_connect(tmp_path: Path) -> None:
    failed = QP.format(2, "fe80::1", "::ffff:10.4.0.1").replace("22 Invalid argument", "110 Connection timed out")
    f = only(diagnose(tmp_path, "h2:21:21 [1] ibvwrap.cc:262 NCCL WARN " + failed + CLOSED.format(1, 10, 0)))
    assert f.culprits == () and "110 Connection timed out (local GID fe80::1, " in f.message and "route" in f.advice


# -- which log, which job ------------------------------------------------------------------------------------------------

TAKEN = "[E socket.cpp:462] [c10d] The server socket has failed to listen on any local network address.\n"
STEPS = "".join(f"Epoch {i} saved to out/b\n" for i in range(1, 6))
KEPT = "[WARNING] The node 'n7.local_31_0' has failed to send a keep-alive heartbeat to the rendezvous 'a1' due to an error of type RendezvousConnectionError.\n"
ENDED = raised(0, "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed.", prefix="")  # fmt: skip
OTHER = "$ tail -n 2 ../other/train.log\nEpoch 90 saved to out/a\ntraining finished\n"


@pytest.mark.parametrize("after", ["", OTHER])
def test_a_launcher_that_used_the_store_of_another_job(tmp_path: Path, after: str) -> None:
    f = only(diagnose(tmp_path, TAKEN + STEPS + KEPT + ENDED + after))
    assert f.kind == "rank_lost" and "line 1" in f.message and "another" in f.message
    assert "--standalone" in f.advice


def test_a_port_in_use_without_a_lost_store_is_what_ended_the_job(tmp_path: Path) -> None:
    assert "could not listen" in only(diagnose(tmp_path, TAKEN)).message
    report = diagnose(tmp_path, TAKEN + STEPS + "training finished\n")
    assert report.findings == ()


def test_another_log_that_a_shell_shows_is_not_the_end_of_this_one(tmp_path: Path) -> None:
    failed = "step 3 loss 0.4\n" + raised(1, "ValueError: odd clip").replace("in main", "in <module>")
    assert only(diagnose(tmp_path, failed + OTHER)).culprits == (1,)
    again = (
        "$ python train.py --resume\n" + "".join(f"step {i} loss 0.4\n" for i in range(4, 40)) + "training finished\n"
    )
    assert diagnose(tmp_path, failed + again).findings == ()
    out = "a@b:/w# tail -n 1 job.out\ntraining finished\n"
    assert diagnose(tmp_path, "a@b:/w# cat job.err\n" + failed.replace("<module>", "main") + out).findings == ()
    whole = "$ cat train.log\n" + failed.replace("<module>", "main") + "[rank1]: step 4 loss 0.4\ntraining finished\n"
    assert diagnose(tmp_path, whole).findings == ()


STDIN = '{0}Traceback (most recent call last):\n{0}  File "<stdin>", line 1, in <module>\n{0}KeyError: 4\n'


@pytest.mark.parametrize("prefix", ["[sample]   ", "> "])
def test_a_traceback_of_an_interactive_session_ends_no_job(tmp_path: Path, prefix: str) -> None:
    steps = "".join(f"step {i} loss 0.4\n" for i in range(3, 9))
    assert diagnose(tmp_path, steps + STDIN.format(prefix) + steps).findings == ()
    assert "KeyError" in only(diagnose(tmp_path, STDIN.format(""))).message


POD = "{}   Warning   {}   pod/w-1   {}\n"
PENDING = POD.format("9m", "FailedScheduling", "0/5 nodes are available: 5 Insufficient nvidia.com/gpu.")
PULL = POD.format("8m", "Failed", 'Failed to pull image "r.io/x:1": rpc error: deadline exceeded')
PLACED = "7m   Normal   Scheduled   pod/w-1   Successfully assigned team/w-1 to node-5\n"
PULLED = '6m   Normal   Pulled   pod/w-1   Successfully pulled image "r.io/x:1" in 41s\n'


@pytest.mark.parametrize(
    "text",
    [
        PENDING + PLACED,
        PENDING + PLACED + PULL + PULLED,
        PENDING + "2m  Normal  Done  myjob/x  MPIJob x successfully completed.\n",
    ],
)
def test_a_pod_that_was_started_after_all(tmp_path: Path, text: str) -> None:
    assert diagnose(tmp_path, text).findings == ()


@pytest.mark.parametrize("text", [PENDING, PLACED + PULL, PENDING + PLACED.replace("w-1", "w-2"), PULL + PLACED])
def test_a_pod_that_was_not_started(tmp_path: Path, text: str) -> None:
    assert "did not start on w-1" in only(diagnose(tmp_path, text)).message


def test_a_process_of_another_user_that_the_kernel_killed_is_no_part_of_the_job(tmp_path: Path) -> None:
    kernel = "[Wed Apr 16 11:20:31 2031] Memory cgroup out of memory: Killed process 71 (samtools) total-vm:1kB\n"
    ran = "step 1 loss 0.5\nstep 2 loss 0.4\n"
    report = diagnose(tmp_path, kernel + ran + raised(1, "KeyError: 'x'"))
    assert only(report).culprits == (1,) and not any("line 1" in note for note in report.notes)
    (note,) = (n for n in diagnose(tmp_path, kernel + ran).notes if "line 1" in n)
    assert "process 71 (samtools), none of this job's processes" in note
