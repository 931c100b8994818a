"""Logs in which what is printed last, or most often, only follows: wrappers, addresses inside a host, victims of a full GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sources.test_logs import about, counters, diagnose, only, raised, table, timeout

WORKER = "(Worker pid={pid}, ip=10.4.0.{n}) {host}:{pid}:{pid} [0] "
REFUSED = "misc/socket.cc:52 NCCL WARN Call to connect to {peer}<4071> failed : Connection refused\n"


def on_two_hosts(interface: str, peer: str) -> str:
    lines = (WORKER.format(pid=n + 50, n=n, host=f"g{n}") for n in (1, 2))
    text = "".join(f"{line}NCCL INFO Bootstrap : Using {interface}:{peer}<0>\n" for line in lines)
    return text + WORKER.format(pid=52, n=2, host="g2") + REFUSED.format(peer=peer)


@pytest.mark.parametrize(
    "wrapper",
    [
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        "RuntimeError: the server did not start, see the error above",
        "RuntimeError: One of the subprocesses has failed: exit code 1",
        "RuntimeError: Rank 1 scheduler is dead. Please check if there are relevant logs.",
        "RuntimeError: Initialization failed: please check the worker logs for details",
    ],
)
def test_an_exception_that_only_reports_another_does_not_hide_a_lost_connection(tmp_path: Path, wrapper: str) -> None:
    last = f'Traceback (most recent call last):\n  File "/bin/serve", line 9, in <module>\n    main()\n{wrapper}\n'
    f = only(
        diagnose(tmp_path, on_two_hosts("docker0", "172.17.0.1") + last.replace("Runtime", "(Server pid=9) Runtime"))
    )
    assert f == only(diagnose(tmp_path, on_two_hosts("docker0", "172.17.0.1") + last))
    assert "could not make a connection to 172.17.0.1 (docker0 on g1, g2)" in f.message
    assert f.advice.startswith("set NCCL_SOCKET_IFNAME to the interface that all hosts share (and GLOO_SOCKET_IFNAME)")
    assert wrapper.partition(": ")[2][:20] in only(diagnose(tmp_path, last)).message  # alone, it is all there is


@pytest.mark.parametrize(
    ("interface", "peer", "own"),
    [
        ("docker0", "172.17.0.1", True),
        ("lo", "127.0.0.1", True),
        ("usb0", "169.254.3.1", True),
        ("virbr0", "192.168.122.1", True),
        ("eth0", "10.9.0.2", False),
    ],
)
def test_an_address_inside_each_host_that_two_hosts_give_is_the_wrong_one(
    tmp_path: Path, interface: str, peer: str, own: bool
) -> None:
    f = only(diagnose(tmp_path, on_two_hosts(interface, peer)))
    assert ("an address inside each of these hosts" in f.message) is own
    assert f.advice.startswith("set NCCL_SOCKET_IFNAME") is own


CLOSES = "W0101 08:00:01.1 9 torch/distributed/elastic/multiprocessing/api.py:897] Sending process {} closing signal SIGTERM\n"
FULL = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 1 has a total capacity of 39.4 GiB of which 90.00 MiB is free. "
FAILED = "E0101 08:00:01.1 9 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: {} (pid: {}) of binary: /bin/python\n"


@pytest.mark.parametrize(
    ("pids", "lines", "words", "advice"),
    [
        ((71, 72), CLOSES.format(71) + CLOSES.format(72), "2 other ranks of this job (pid 71, 72) hold 4 GiB", "map_location"),
        ((71,), "".join(f"[rank{q}] starts, pid={70 + q}\nINFO rank {q} pid {70 + q}\n" for q in (0, 1)), "another rank of this job (rank 1) holds 2 GiB", "set_device(LOCAL_RANK)"),
        ((88,), CLOSES.format(71), "process 88, which is not this rank, holds 2 GiB", "something else holds memory"),
    ],
)  # fmt: skip
def test_processes_of_the_job_that_hold_a_part_of_a_full_gpu_are_its_ranks(
    tmp_path: Path, pids: tuple[int, ...], lines: str, words: str, advice: str
) -> None:
    held = "".join(f"Process {pid} has 2.00 GiB memory in use. " for pid in pids)
    mine = "Process 70 has 35.20 GiB memory in use. "
    own = "Of the allocated memory 33.00 GiB is allocated by PyTorch, and 1.70 GiB is reserved by PyTorch but unallocated."
    f = only(diagnose(tmp_path, raised(0, FULL + mine + held + own) + lines + FAILED.format(0, 70)))
    assert words in f.message and advice in f.advice


@pytest.mark.parametrize(
    "error",
    [
        "ACL stream synchronize failed, error code:507048",
        "ACL device synchronize failed, error code:507046",
        "call: aclrtSynchronizeStream, error code is 507048",
    ],
)
def test_a_device_that_does_not_synchronize_after_a_timeout_is_none_of_its_own(tmp_path: Path, error: str) -> None:
    late = "[rank{q}]: RuntimeError: {error}\n[rank{q}]: EI0002: The wait execution of the Notify register times out. Reason: The Notify register has not received the Notify record from remote rank [1].base information: [tag[AllReduce_1]]\n"
    text = raised(1, "RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB")
    f = only(diagnose(tmp_path, text + "".join(late.format(q=q, error=error) for q in (0, 2, 3))))
    assert f.culprits == (1,) and "ranks 0, 2, 3 then timed out waiting" in f.message
    alone = only(diagnose(tmp_path, f"[rank2]: RuntimeError: {error}\n"))
    assert alone.message.startswith("a task on the NPU of rank 2 did not end in time")


PENDING = "0/7 nodes are available: 7 Insufficient nvidia.com/gpu."


@pytest.mark.parametrize(
    "event",
    [
        f"9s  Warning  FailedScheduling  pod/fit-chief-0  {PENDING}",
        f'"Unable to schedule pod; no fit; waiting" pod="ml/fit-chief-0" err="{PENDING}"',
        f"$ kubectl describe pod fit-chief-0\n  Warning  FailedScheduling  9s  default-scheduler  {PENDING}",
    ],
)
def test_a_pod_that_no_node_takes_is_named(tmp_path: Path, event: str) -> None:
    f = only(diagnose(tmp_path, f"{event}\n"))
    assert "did not start on fit-chief-0: 0/7 nodes" in f.message
    assert f.advice.startswith("give the cluster what the pod requests")


def completion(host: str, peer: str) -> str:
    status = "with status=12 opcode=0 len=0 vendor err 129 (Send)"
    return (
        f"{host}:70:71 [2] transport/net_ib.cc:99 NCCL WARN NET/IB : Got completion from peer {peer}<4001> {status}\n"
    )


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ((("a1", 3), ("a2", 3), ("a3", 2)), "connection to 10.6.0.3 (a3) (status 12"),
        ((("a3", 1), ("a1", 3), ("a2", 3)), "connection to 10.6.0.3 (a3) (status 12"),
        ((("a1", 2), ("a2", 1)), "connection to 10.6.0.2 (a2), 10.6.0.1 (a1) (status 12"),  # one link, both ends
        ((("a1", 3), ("a2", 3), ("a2", 1)), "connection to 10.6.0.3 (a3), 10.6.0.1 (a1) (status 12"),
    ],
)
def test_the_host_that_several_others_lost_is_named_and_not_what_it_lost_itself(
    tmp_path: Path, lost: tuple[tuple[str, int], ...], words: str
) -> None:
    hosts = "".join(f"a{n}:70:70 [0] NCCL INFO Bootstrap : Using ib0:10.6.0.{n}<0>\n" for n in (1, 2, 3))
    f = only(diagnose(tmp_path, hosts + "".join(completion(host, f"10.6.0.{n}") for host, n in lost)))
    assert words in f.message
    assert ("check that link at a3 first" in f.advice) is (") (" in words and "," not in words)


def test_a_rank_is_said_to_have_lost_only_what_its_own_lines_name(tmp_path: Path) -> None:
    rank = "a3:80:80 [2] NCCL INFO comm 0x5 rank 6 nranks 8 cudaDev 2 busId 1b000 commId 0x8 - Init COMPLETE\n"
    own = completion("a3", "10.6.0.1").replace("70:71", "80:81")
    f = only(diagnose(tmp_path, rank + own + completion("a1", "10.6.0.3")))
    assert "NCCL on rank 6 lost its RDMA connection to 10.6.0.1 (status" in f.message and "10.6.0.3" not in f.message
    f = only(diagnose(tmp_path, rank + own + completion("a1", "10.6.0.3") + completion("a2", "10.6.0.3")))
    assert "GPU 2 of a1, GPU 2 of a2 lost its RDMA connection to 10.6.0.3 (status" in f.message
    assert "at a3 first" in f.advice


def test_the_last_line_of_a_rank_before_it_made_another_call(tmp_path: Path) -> None:
    lines = "".join(f"[rank{q}]: iteration 40\n" for q in range(4)) + "[rank2]: writes the sharded weights\n"
    other = timeout(2).replace("ALLREDUCE", "BROADCAST")
    late = "".join(timeout(q) for q in (0, 1)) + other + timeout(3)
    f = only(diagnose(tmp_path, lines + late))
    assert f.culprits == (2,) and f.message.endswith(
        "the last line of rank 2 before that is `writes the sharded weights`, that of ranks 0, 1, 3 `iteration 40`"
    )
    assert "last line" not in only(diagnose(tmp_path, lines.replace("[rank2]: ", "") + late)).message


def test_the_last_line_of_the_rank_that_horovod_misses(tmp_path: Path) -> None:
    text = "".join(f"[1,{q}]<stdout>:epoch 3\n" for q in range(3)) + "[1,0]<stdout>:scores 900 test images\n"
    stall = "[1,0]<stderr>:[2031-02-03 04:05:06.7: W /h/stall_inspector.cc:107] One or more tensors were submitted to be reduced by subset of ranks and are waiting\n[1,0]<stderr>:Missing ranks:\n[1,0]<stderr>:0: [allreduce.w, allreduce.b ...]\n"
    end = "[1,1]<stderr>:RuntimeError: Horovod has been shut down.\n"
    report = diagnose(tmp_path, text + stall * 2 + end)
    f = only(report)
    assert f.culprits == (0,) and "the last line of rank 0 before that is `scores 900 test images`" in f.message
    assert report.ranks_seen == 3


ABORTED = table(3, -6, "Signal 6 (SIGABRT) received by PID 903")
RDMA = "transport/net_ib.cc:8 NCCL WARN NET/IB : Got completion from peer 10.8.0.6<4> with error 12, opcode 0, len 0, vendor err 129\n"


@pytest.mark.parametrize("named", ["[rank3]: ", ""])
def test_an_abort_does_not_hide_the_transport_s_error_before_it(tmp_path: Path, named: str) -> None:
    f = only(diagnose(tmp_path, named + RDMA + ABORTED))
    assert "lost its RDMA connection to 10.8.0.6" in f.message and f.culprits == ()
    assert "SIGABRT" in only(diagnose(tmp_path, ABORTED)).message


@pytest.mark.parametrize(
    "line",
    [
        "NET/IB : req 0/1 tag 0 peer 10.8.0.6<58> collective mismatch error, local size 4096 remote size 512",
        "NET/Socket : peer 10.8.0.6<58> message truncated : receiving 512 bytes instead of 4096",
    ],
)
def test_two_hosts_whose_messages_differ_in_size(tmp_path: Path, line: str) -> None:
    hosts = "".join(f"g{n}:7:8 [0] NCCL INFO Bootstrap : Using eth0:10.8.0.{n}<0>\n" for n in (5, 6))
    setting = "g5:7:8 [0] NCCL INFO NCCL_ALGO set by environment to Ring\n"
    f = only(diagnose(tmp_path, f"{hosts}{setting}g5:7:9 [0] net.cc:4 NCCL WARN {line}\n"))
    assert f.kind == "mismatch" and "10.8.0.6" in f.message and "(4096 and 512 bytes)" in f.message
    assert "NCCL_ALGO is Ring on g5, not shown on g6" in f.message


def test_what_fails_after_the_work_is_not_a_rank_s_data(tmp_path: Path) -> None:
    failed = raised(1, "OSError: no answer of the other hosts")
    f = only(diagnose(tmp_path, f"step 9 loss 1.0\nTraining finished, all saved\n{failed}"))
    assert "line 2 before it says `Training finished, all saved`" in f.message and "what follows" in f.advice
    assert "before it says" not in only(diagnose(tmp_path, f"Training finished\nstep 9 loss 1.0\n{failed}")).message


def test_where_a_rank_raised_its_timeout(tmp_path: Path) -> None:
    why = "RuntimeError: NCCL communicator was aborted on rank 0.  Original reason for failure was: "
    waits = timeout(0, op="ALLGATHER") + "".join(timeout(r) for r in (1, 2, 3))
    end = raised(0, why + timeout(0, op="ALLGATHER", prefix=""), prefix="").replace("in main", "in save_state")
    f = only(diagnose(tmp_path, waits + end))
    assert f.culprits == (0,) and "rank 0 is inside save_state" in f.message and "run.py" in str(f.where[0])


@pytest.mark.parametrize("last", ["Finished, shutting down workers", "All processes finished without errors"])
def test_a_good_end_and_a_warning_s_text(tmp_path: Path, last: str) -> None:
    report = diagnose(
        tmp_path, f"[rank0]: /a/b.py:4: UserWarning: x failed (CommError('late'))\nstep 9 loss 1.0\n{last}\n"
    )
    assert (
        report.findings == () and "ended well" in " ".join(report.notes) and "UserWarning" not in " ".join(report.notes)
    )


FULL_DISK = "OSError: [Errno 28] No space left on device: '/c/k.bin'"


def _raised_in(prefix: str, file: str, error: str) -> str:
    return f'{prefix}Traceback (most recent call last):\n{prefix}  File "{file}", line 5, in read\n{prefix}    get()\n{prefix}{error}\n'


@pytest.mark.parametrize(
    ("label", "culprits"), [("Worker_TP2", (2,)), ("Worker_TP2_EP2", (2,)), ("Worker_DP1_TP2", ())]
)
def test_a_parent_that_waits_for_its_worker_only_follows(tmp_path: Path, label: str, culprits: tuple[int, ...]) -> None:
    worker, parent = f"({label} pid=33) ERROR ", "(EngineCore_DP0 pid=20) ERROR "
    waits = _raised_in(parent, "/v/vllm/distributed/device_communicators/shm_broadcast.py", "TimeoutError")
    waits += f"{parent}The above exception was the direct cause of the following exception:\n"
    waits += _raised_in(parent, "/v/vllm/v1/engine/core.py", "TimeoutError: RPC call to execute_model timed out.")
    f = only(diagnose(tmp_path, _raised_in(worker, "/v/triton/cache.py", FULL_DISK) + waits))
    assert f.message.startswith(f"{label} pid=33 raised OSError") and f.culprits == culprits
    assert "which worker did not answer is not in the log" in only(diagnose(tmp_path, waits)).message


def test_watchdogs_that_report_an_error_of_the_network_show_no_timeout(tmp_path: Path) -> None:
    """Their line is `either an error or timeout`, and no rank reports a timeout."""
    text = "".join(f"[rank{r}] step {r} loss 2.1\n[rank{r}]: {RDMA}" + counters(r, 40, 41, 39) for r in (1, 2))
    f = only(diagnose(tmp_path, text))
    assert about(f) == ("rank_lost", "silent", (), (1, 2)) and "RDMA connection to 10.8.0.6" in f.message
    f = only(diagnose(tmp_path, text + counters(0, 40, 41, 39)))
    assert f.kind == "stall", "rank 0 may have waited for another reason"
