"""A node's label, a device's process, attempts to connect: what several lines say of one thing is one finding. All texts are made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distdiag.sources.logs.verdict import diagnose_logs
from distdiag.sources.logs.writers import writer
from tests.sources.test_logs import about, diagnose, only, raised, timeout

XID = "NVRM: Xid (PCI:0000:c7:00): {}, pid={}, name=python, {}\n"
LIMIT = "slurmstepd: error: *** JOB 7 ON b-7 CANCELLED AT 2026-08-20T08:20:10 DUE TO TIME LIMIT ***\n"


@pytest.mark.parametrize(
    ("line", "label", "host"),
    [
        ("n4: Traceback (most recent call last):", "n4", ""),
        ("(blade03) ImportError: x", "blade03", ""),
        ("[worker-5] x", "worker-5", ""),
        ("node-2  | x", "node-2", ""),
        ("[3120481.032001] amdgpu 0000:d6:00.0: x", "", ""),
        ("10.0.0.3: [rank13]: KeyError: 'a'", "10.0.0.3", ""),
        ("Jul 08 14:25:35 dgx-06 trainer[21]: x", "trainer[21]", "dgx-06"),
        ("2026-07-08T14:25:35+0000 dgx-06 kernel: x", "", "dgx-06"),
        ("[kmsg h-9] x", "", "h-9"),
        ("slurmstepd-gn21: error: x", "", "gn21"),
        ("[1,mpirank:9,algo-3]<stderr>:x", "", "algo-3"),
        ("[1,9]<stderr>:x", "", ""),
        ("RuntimeError: x", "", ""),
        ("step100: loss 3", "", ""),
        ("mlx5_2: x", "", ""),
        ("EI0002: x", "", ""),
        ("[rank3]: x", "", ""),
        ("6: x", "", ""),
    ],
)
def test_what_stands_in_front_of_each_line_names_a_node_or_worker(line: str, label: str, host: str) -> None:
    who = writer(line)
    assert (who.label, who.host) == (label, host)


def test_a_nodes_label_names_the_process_and_is_no_rank(tmp_path: Path) -> None:
    text = "".join(f"n4: {line}\n" for line in raised(0, "KeyError: 'x'", prefix="").splitlines())
    finding = only(diagnose(tmp_path, "n0: [rank0]: ready\nn4: [rank32]: ready\n" + text))
    assert finding.culprits == () and finding.message.startswith("n4 raised KeyError")


@pytest.mark.parametrize(("shift", "culprits"), [(0, (5,)), (1, ())])
def test_a_label_is_a_rank_only_if_all_of_its_form_are(tmp_path: Path, shift: int, culprits: tuple[int, ...]) -> None:
    waits = "".join(f"[w-{r + shift}] {timeout(r)}" for r in (0, 1, 2, 3))
    text = "".join(f"[w-5] {line}\n" for line in raised(0, "KeyError: 'x'", prefix="").splitlines())
    finding = only(diagnose(tmp_path, text + waits))
    assert finding.culprits == culprits and finding.certainty == "suspected"


def test_the_drivers_later_line_names_the_process_of_a_device(tmp_path: Path) -> None:
    ends = "[0]:\n  host      : h3\n  rank      : 2 (local_rank: 2)\n  exitcode  : 1 (pid: 7113)\n  traceback : To enable\n"
    text = XID.format(74, "'<unknown>'", "NVLink: fatal error") + XID.format(45, 7113, "Ch 00000012")
    peer = raised(1, "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution")
    for log in (text + peer + ends, peer + text + ends):  # a log keeps the order of one writer only
        finding = only(diagnose(tmp_path, log))
        assert finding.culprits == (2,) and "rank 1 then had a CUDA error" in finding.message


@pytest.mark.parametrize("host", ["h3", "h4"])
def test_a_device_and_the_process_on_its_host_are_one_failure(tmp_path: Path, host: str) -> None:
    text = f"Jul 08 14:25:35 h3 kernel: {XID.format(79, 1, 'GPU has fallen off the bus.')}"
    text += f"Jul 08 14:25:35 {host} t[5]: [rank5]: RuntimeError: CUDA error: unspecified launch failure\n"
    findings = diagnose(tmp_path, text).findings
    assert [f.culprits for f in findings] == ([(5,)] if host == "h3" else [(), (5,)])


def test_a_worker_that_the_kernel_killed_is_a_lack_of_host_memory(tmp_path: Path) -> None:
    killed = "6: RuntimeError: DataLoader worker (pid 18) is killed by signal: Killed. \n"
    memory = "slurmstepd-c7: error: Detected 1 oom_kill event in StepId=9.0.\n"
    for text in (memory + killed, killed + memory):
        assert "ran out of memory" in only(diagnose(tmp_path, text)).message
    assert "ran out of memory" not in only(diagnose(tmp_path, killed)).message


@pytest.mark.parametrize(
    ("pod", "numbered", "expected"),
    [
        ("w-2", True, [((3,), "rank 3 lost")]),
        ("w-2", False, [((), "w-2 lost")]),
        ("w-5", False, [((), "w-2 lost"), ((), "w-5 was killed")]),
    ],
)
def test_a_loaders_worker_and_its_pods_limit_are_one_event(
    tmp_path: Path, pod: str, numbered: bool, expected: list[tuple[tuple[int, ...], str]]
) -> None:
    text = "[pod/w-2/torch] 2031-03-02T09:00:00Z INFO rank=3 world_size=4\n" * numbered
    text += raised(
        0, "RuntimeError: DataLoader worker (pid 70) is killed by signal: Killed. ", prefix="[pod/w-2/torch] "
    )
    text += f"$ kubectl describe pod {pod}\n    State:   Terminated\n      Reason:       OOMKilled\n"
    report = diagnose(tmp_path, text)
    assert [
        (f.culprits, f.message[: len(words)]) for f, (_, words) in zip(report.findings, expected, strict=True)
    ] == expected
    joined = (
        "lost a DataLoader worker at run.py:7 in main, which the kernel killed: the host or its memory limit ran out"
    )
    assert (joined in report.findings[0].message) is (len(expected) == 1)


def test_a_port_that_nccl_and_the_kernel_report_is_one_event(tmp_path: Path) -> None:
    nccl = "h7:34:39 [0] NCCL WARN NET/IB : Got async event : port error on mlx5_1:1\n"
    kernel = "[  +0.1] mlx5_core 0000:18:00.0 mlx5_1: Link down\n"
    for text in (nccl + kernel, kernel + nccl):
        assert only(diagnose(tmp_path, text)).message.startswith("host h7 lost a port of the network: Got async event")
    assert len(diagnose(tmp_path, nccl + nccl.replace("h7", "h8") + kernel).findings) == 3


def test_two_exceptions_with_one_remedy_are_one_failure_of_the_rank_that_a_logger_names(tmp_path: Path) -> None:
    first = raised(0, "RuntimeError: unable to open shared memory object: Too many open files (24)", prefix="")
    text = first + "[ERROR] fit: rank 3 (pid 9): exception in epoch 6\n"
    text += raised(0, "RuntimeError: received 0 items of ancdata", line=9, prefix="")
    finding = only(diagnose(tmp_path, text))
    assert finding.culprits == (3,) and "Too many open files" in finding.message


def test_an_exception_of_all_ranks_of_which_one_has_no_prefix(tmp_path: Path) -> None:
    detail = "\tsize mismatch for head.weight: copying a param with shape [9]\n"
    world = "".join(f"Initializing distributed: GLOBAL_RANK: {r}, MEMBER: {r + 1}/3\n" for r in range(3))
    error = "RuntimeError: Error(s) in loading state_dict for Net:"
    text = world + raised(1, error) + f"[rank1]: {detail}" + raised(0, error, prefix="") + detail
    finding = only(diagnose(tmp_path, text + raised(2, error) + f"[rank2]: {detail}"))
    assert (
        finding.message.startswith("all 3 ranks raised the same error")
        and "size mismatch for head.weight" in finding.message
    )


def test_attempts_to_connect_say_why_a_node_did_not_join(tmp_path: Path) -> None:
    late = "[rank0]: torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 4/8 clients joined.\n"
    end = "[vm-b] [E303 10:11:05.9 socket.cpp:819] [c10d] The client socket has timed out after 60000ms while trying to connect to ({}, 29500).\n"
    refused = "[vm-b] [W303 10:10:11.7 socket.cpp:755] [c10d] The client socket has failed to connect to [h-17]:29500 (errno: 111 - Connection refused).\n"
    run = "[vm-a] + torchrun --master-addr 10.0.3.71 x.py\n[vm-b] + torchrun --master-addr 10.0.3.17 x.py\n"
    finding = only(diagnose(tmp_path, run + refused + end.format("10.0.3.17") + late))
    assert "vm-b could not reach" in finding.message and "vm-a's is 10.0.3.71" in finding.message
    unknown = "[vm-b] [W303 10:10:11.7 socket.cpp:759] [c10d] The IPv6 network addresses of (m-0, 29500) cannot be retrieved (gai error: -2 - Name or service not known).\n"
    finding = only(diagnose(tmp_path, unknown + end.format("m-0") + late))
    assert "does not resolve" in finding.message and "correct that name" in finding.advice
    for_now = unknown.replace("-2 - Name or service not known", "-3 - Temporary failure in name resolution")
    advice = only(diagnose(tmp_path, for_now + end.format("m-0") + late)).advice
    assert advice.startswith("start with the DNS of the host or pod that wrote ") and ".log" in advice


def test_ranks_with_another_version_of_nccl(tmp_path: Path) -> None:
    line = "b{}: b{}:12:14 [0] init.cc:9 NCCL WARN Mismatched NCCL version detected : rank {} version {} rank {} version {}\n"
    text = line.format(0, 0, 1, 22105, 0, 22602) + line.format(2, 2, 1, 22105, 2, 22602)
    finding = only(diagnose(tmp_path, text))
    assert finding.culprits == (1,) and "rank 1 has NCCL 2.21.5" in finding.message
    tie = only(diagnose(tmp_path, line.format(0, 0, 1, 22105, 0, 22602)))
    assert tie.culprits == () and tie.certainty == "suspected"


@pytest.mark.parametrize(
    ("rest", "hung"),
    [
        ("", True),
        ("".join(f"2026-08-20 0{h}:00:00 monitor ok util=100 power={h}\n" for h in range(2, 8)), True),
        ("2026-08-20 08:15:00 evaluating mmlu\n", False),
    ],
)
def test_a_job_that_wrote_nothing_for_long_before_its_limit_hung(tmp_path: Path, rest: str, hung: bool) -> None:
    steps = "".join(f"2026-08-20 01:0{m}:00 rank0 step {m} loss 2.0\n" for m in range(6))
    report = diagnose(tmp_path, steps + rest + LIMIT)
    assert report.state_text is not None and "time limit" in report.state_text
    assert [f.kind for f in report.findings] == (["stall"] if hung else [])
    assert any("more time (--time" in note for note in report.notes) is not hung


RETRIES = "".join(
    f"2026-08-20 0{h}:00:00 {{0}} WARNING reader: s3://lake/p-7.zst: Read timeout, retry {h}/inf in 9 s\n"
    for h in range(2, 8)
)
ENDED_BY = "srun: error: n1: tasks 0-3: Terminated\n"


@pytest.mark.parametrize("end", [LIMIT, ENDED_BY, ""])
@pytest.mark.parametrize(("prefix", "who", "culprits"), [("[rank5]", "rank 5", (5,)), ("[n1][05]", "n1[05]", ())])
def test_a_rank_that_alone_goes_on_with_retries_is_what_the_job_waits_for(
    tmp_path: Path, prefix: str, who: str, culprits: tuple[int, ...], end: str
) -> None:
    steps = "".join(f"2026-08-20 01:0{m}:00 [rank0] step {m} loss 2.0\n" for m in range(6))
    f = only(diagnose(tmp_path, steps + RETRIES.format(prefix) + end))
    assert about(f) == ("stall", "unknown", culprits, ()) and f.severity == ("error" if end else "warning")
    assert (
        f.message.startswith(f"{who} alone wrote after the last step, 6 times that it tries again")
        and "p-7.zst" in f.message
    )
    assert "wrote nothing" not in f.message and "bound these retries" in f.advice
    tasks = "srun: error: n0: tasks 0-3: Terminated\nsrun: error: n1: tasks 4-7: Terminated\n"
    assert only(diagnose(tmp_path, steps + RETRIES.format(prefix) + tasks)).culprits == (5,)
    others = diagnose(tmp_path, steps + RETRIES.format(prefix) + RETRIES.format("[rank2]") + LIMIT)
    assert only(others).culprits == () and "alone" not in only(others).message
    assert "made no step" in only(others).message and "wrote nothing" not in only(others).message
    assert not diagnose(tmp_path, steps + RETRIES.format(prefix) + "2026-08-20 08:00:00 Training finished\n").findings


@pytest.mark.parametrize("key", ["object", "involvedObject"])
def test_an_eviction_in_kubernetes_events(tmp_path: Path, key: str) -> None:
    of = "pod/w-3" if key == "object" else {"kind": "Pod", "name": "w-3"}
    event = {"ts": "1", "reason": "Evicted", key: of, "message": "Pod ephemeral local storage usage exceeds 200Gi. "}
    text = "\n".join([json.dumps(event), raised(0, "RuntimeError: Connection closed by peer [10.0.0.1]:9")])
    report = diagnose(tmp_path, text)
    assert report.findings == () and "pod w-3 was evicted: Pod ephemeral" in (report.state_text or "")


def test_what_rich_wraps_is_joined(tmp_path: Path) -> None:
    indent = " " * 29
    handler = (
        f"[03/02/31 08:00:01] INFO     [rank 0] step 9 loss 2.1             fit.py:88\n{' ' * 20}ERROR    [rank 2] step failed: CUDA error: an       fit.py:97\n"
        f"{indent}illegal memory access was encountered\n"
        f"{indent}╭──────── Traceback (most recent call last) ───────╮\n{indent}│ /w/fit.py:71 in step                             │\n"
        f"{indent}│ ❱ 71     loss.backward()                         │\n{indent}╰──────────────────────────────────────────────────╯\n"
        f"{indent}AcceleratorError: CUDA error: an illegal memory\n{indent}access was encountered\n"
    )
    f = only(diagnose(tmp_path, handler))
    assert (
        f.culprits == (2,)
        and f.message == "rank 2 had a CUDA error: an illegal memory access was encountered at fit.py:71 in step"
    )
    box = (
        "[rank1]: ╭──── Traceback (most recent call last) ────╮\n[rank1]: │ /w/a/folder/with/a/name/that/is/too/long/f │\n[rank1]: │ it.py:61 in main                           │\n"
        "[rank1]: ╰────────────────────────────────────────────╯\n[rank1]: RuntimeError: The size of a tensor, a (604)\n[rank1]: must match the size of tensor b (512)\n[rank1]: next line\n"
    )
    f = only(diagnose(tmp_path, box))
    assert f.culprits == (1,) and "(604) must match the size of tensor b (512) at fit.py:61 in main" in f.message


def test_an_empty_file_among_others_is_a_rank_that_wrote_nothing(tmp_path: Path) -> None:
    for r in range(3):
        (tmp_path / f"rank_{r}.log").write_text(timeout(r) if r < 2 else "")
    report = diagnose_logs([str(tmp_path)])
    assert report is not None and only(report).culprits == (2,)
    assert any("written nothing" in note and "rank_2.log" in note for note in report.notes)


@pytest.mark.parametrize("helper", ["main_process_first", "torch_distributed_zero_first", "rank_zero_first"])
def test_ranks_wait_in_a_helper_for_the_rank_that_goes_first(tmp_path: Path, helper: str) -> None:
    stack = "[rank1]:[E302 08:00:09.1 P.cpp:7] [PG ID 0 PG GUID 0(default_pg) Rank 1] Stack trace of the failed collective: \n#0 barrier from /v/torch/distributed/distributed_c10d.py:4\n"
    stack += f"#1 {helper} from /v/site-packages/lib/state.py:5\n#2 load from /w/data.py:55\n"
    f = only(diagnose(tmp_path, timeout(1) + stack + timeout(2) + timeout(3)))
    assert f.culprits == (0,) and f"inside {helper}" in f.message and "before the job starts" in f.advice
    assert f.waiting[0].line == 55


@pytest.mark.parametrize(("host", "culprits"), [("h3 kernel: ", (9,)), ("h4 kernel: ", ()), ("", (9,))])
def test_nccl_names_the_rank_of_a_device(tmp_path: Path, host: str, culprits: tuple[int, ...]) -> None:
    line = "h3:{}:7 [{}] NCCL INFO ncclCommInitRank comm 0x5 rank {} nranks 16 cudaDev {} nvmlDev 0 busId {} commId 0x7 - Init COMPLETE\n"
    text = line.format(40, 0, 8, 0, "1b000") + line.format(41, 1, 9, 1, "c7000")
    clock = "Jul 08 14:25:35 " if host else ""
    f = diagnose(tmp_path, text + clock + host + XID.format(79, 1, "GPU has fallen off the bus.")).findings[0]
    assert (f.kind, f.culprits) == ("gpu", culprits)


def test_the_process_that_starts_the_ranks_is_none_of_them(tmp_path: Path) -> None:
    text = raised(0, "AttributeError: Can't get local object 'main.<locals>.<lambda>'", prefix="").replace(
        "Traceback (most recent call last):\n", 'Traceback (most recent call last):\n  File "/v/torch/multiprocessing/spawn.py", line 3, in start_processes\n'
    )  # fmt: skip
    f = only(diagnose(tmp_path, text))
    assert f.culprits == () and f.message.startswith("the process that spawns") and "importable" in f.advice


def test_a_launcher_names_the_rank_of_a_pid(tmp_path: Path) -> None:
    text = (
        "(T pid=9) - (node_id=5f, ip=10.0.0.7, pid=311) world_rank=3, local_rank=1, node_rank=1\n"
        "Out of memory: Killed process 311 (ray::W) total-vm:9kB\n"
    )
    assert only(diagnose(tmp_path, text)).culprits == (3,)


SPAWNED = (
    "{0}: [INFO] [launch.py:256:main] process {1} spawned with command: ['python', '-u', 'x.py', '--local_rank={2}']\n"
)
CGROUP = "w-1: [99.7] Memory cgroup out of memory: Killed process 71 (python3) total-vm:9kB\n"


def test_a_local_rank_is_a_rank_where_the_launcher_gives_the_node_s_first(tmp_path: Path) -> None:
    text = SPAWNED.format("w-0", 71, 0) + SPAWNED.format("w-1", 71, 2)
    f = only(diagnose(tmp_path, text + CGROUP))
    assert (
        f.message.startswith("local rank 2 on w-1 was killed") and f.culprits == () and "name the node" not in f.advice
    )
    nodes = "".join(f"w-{n}: [INFO] [launch.py:164:main] nnodes=2, num_local_procs=4, node_rank={n}\n" for n in (0, 1))
    assert only(diagnose(tmp_path, text + nodes + CGROUP)).culprits == (6,)
    elastic = (
        "  global_ranks=[8, 9, 10]\n[default2]:RuntimeError: CUDA error: an illegal memory access was encountered\n"
    )
    assert only(diagnose(tmp_path, elastic)).culprits == (10,)
    mixed = only(diagnose(tmp_path, "  global_ranks=[0, 1, 2]\n" + elastic))
    assert mixed.message.startswith("local rank 2 had") and mixed.certainty == "suspected"


def test_the_only_rank_of_a_node_has_all_lines_with_its_label(tmp_path: Path) -> None:
    lines = [f"10.0.0.{n}: [INFO] [launch.py:148:main] nnodes=2, num_local_procs=1, node_rank={n}\n" for n in (0, 1)]
    found = [
        only(
            diagnose(
                tmp_path,
                "".join(lines).replace("procs=1", f"procs={n}") + raised(0, "ValueError: odd", prefix="10.0.0.1: "),
            )
        )
        for n in (1, 2)
    ]
    assert [f.culprits for f in found] == [(1,), ()]


def test_a_pid_in_the_kernels_log_of_a_host_is_the_rank_that_its_launcher_started(tmp_path: Path) -> None:
    nodes = "".join(f"w-{n}: [INFO] [launch.py:164:main] nnodes=2, num_local_procs=4, node_rank={n}\n" for n in (0, 1))
    nodes += "w-0: [INFO] [launch.py:162:main] global_rank_mapping={'w-0': [0, 1, 2, 3], 'w-1': [4, 5, 6, 7]}\n"
    (tmp_path / "train.log").write_text(
        nodes + SPAWNED.format("w-0", 71, 0) + SPAWNED.format("w-1", 71, 2) + timeout(0)
    )
    (tmp_path / "w-1-dmesg.txt").write_text(
        "[Mon Mar  3 16:50:54 2031] Out of memory: Killed process 71 (python3) total-vm:9kB\n"
    )
    report = diagnose_logs([str(tmp_path)])
    assert report is not None and only(report).message.startswith("rank 6 on w-1 was killed")


def test_the_node_with_another_master_is_named_by_its_file(tmp_path: Path) -> None:
    for node, master in (("n1", "n1"), ("n4", "n3")):
        (tmp_path / f"{node}.log").write_text(f"+ export MASTER_ADDR={master} MASTER_PORT=29500\n")
    with (tmp_path / "n4.log").open("a") as f:
        f.write(
            "[E303 10:11:05.9 socket.cpp:819] [c10d] The client socket has timed out after 60000ms while trying to connect to (n3, 29500).\n"
        )
        f.write("[c10d] The client socket has failed to connect to [n3]:29500 (errno: 111 - Connection refused).\n")
    report = diagnose_logs([str(tmp_path)])
    assert report is not None and only(report).message.startswith(
        "the node of n4.log could not reach the job's store at n3:29500"
    )
    assert (
        "its master address is n3, n1.log's is n1" in only(report).message and "one MASTER_ADDR" in only(report).advice
    )


def test_the_rank_that_serves_the_store_waited_in_vain_for_one_that_failed(tmp_path: Path) -> None:
    late = raised(
        0, "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 2/3 clients joined."
    )
    late += raised(1, "torch.distributed.DistNetworkError: failed to recv, got 0 bytes")
    f = only(diagnose(tmp_path, raised(2, "ImportError: undefined symbol: x") + late))
    assert about(f) == ("rank_lost", "crashed", (2,), (0, 1))
    assert "ranks 0, 1 then waited in vain for all ranks to join or failed while connecting" in f.message


def test_the_one_host_of_the_failed_ranks_is_named(tmp_path: Path) -> None:
    error = "".join(raised(r, "OSError: [Errno 116] Stale file handle") for r in (4, 5))
    ends = "srun: error: c2: tasks 4-5: Exited with exit code 1\nsrun: error: c1: tasks 0-3: Terminated\n"
    f = only(diagnose(tmp_path, error + ends))
    assert f.message.startswith("ranks 4, 5 on c2 raised OSError") and f.culprits == (4, 5)
