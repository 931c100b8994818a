"""A node's label, a device's process, attempts to connect: what several lines say of one thing is one finding. All texts are made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distdiag.sources.logs.writers import writer
from tests.sources.test_logs import diagnose, only, raised, timeout

XID = "NVRM: Xid (PCI:0000:c7:00): {}, pid={}, name=python, {}\n"
LIMIT = "slurmstepd: error: *** JOB 7 ON b-7 CANCELLED AT 2026-08-20T08:20:10 DUE TO TIME LIMIT ***\n"


@pytest.mark.parametrize(
    ("line", "label", "host"),
    [
        ("n4: Traceback (most recent call last):", "n4", ""),
        ("(blade03) ImportError: x", "blade03", ""),
        ("[worker-5] x", "worker-5", ""),
        ("10.0.0.3: [rank13]: KeyError: 'a'", "10.0.0.3", ""),
        ("Jul 08 14:25:35 dgx-06 trainer[21]: x", "trainer[21]", "dgx-06"),
        ("2026-07-08T14:25:35+0000 dgx-06 kernel: x", "", "dgx-06"),
        ("[kmsg h-9] x", "", "h-9"),
        ("slurmstepd-gn21: error: x", "", "gn21"),
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
    assert finding.culprits == (0, 1, 2) and "size mismatch for head.weight" in finding.message


def test_attempts_to_connect_say_why_a_node_did_not_join(tmp_path: Path) -> None:
    late = "[rank0]: torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 4/8 clients joined.\n"
    end = "[vm-b] [E303 10:11:05.9 socket.cpp:819] [c10d] The client socket has timed out after 60000ms while trying to connect to ({}, 29500).\n"
    refused = "[vm-b] [W303 10:10:11.7 socket.cpp:755] [c10d] The client socket has failed to connect to [h-17]:29500 (errno: 111 - Connection refused).\n"
    run = "[vm-a] + torchrun --master-addr 10.0.3.71 x.py\n[vm-b] + torchrun --master-addr 10.0.3.17 x.py\n"
    finding = only(diagnose(tmp_path, run + refused + end.format("10.0.3.17") + late))
    assert "vm-b could not reach" in finding.message and "vm-a's is 10.0.3.71" in finding.message
    unknown = "[vm-b] [W303 10:10:11.7 socket.cpp:759] [c10d] The IPv6 network addresses of (m-0, 29500) cannot be retrieved (gai error: -2 - Name or service not known).\n"
    assert "does not resolve" in only(diagnose(tmp_path, unknown + end.format("m-0") + late)).message


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
        ("2026-08-20 01:10:00 training finished\n", False),
    ],
)
def test_a_job_that_wrote_nothing_for_long_before_its_limit_hung(tmp_path: Path, rest: str, hung: bool) -> None:
    steps = "".join(f"2026-08-20 01:0{m}:00 rank0 step {m} loss 2.0\n" for m in range(6))
    report = diagnose(tmp_path, steps + rest + LIMIT)
    assert report.state_text is not None and "time limit" in report.state_text
    assert [f.kind for f in report.findings] == (["stall"] if hung else [])


@pytest.mark.parametrize("key", ["object", "involvedObject"])
def test_an_eviction_in_kubernetes_events(tmp_path: Path, key: str) -> None:
    of = "pod/w-3" if key == "object" else {"kind": "Pod", "name": "w-3"}
    event = {"ts": "1", "reason": "Evicted", key: of, "message": "Pod ephemeral local storage usage exceeds 200Gi. "}
    text = "\n".join([json.dumps(event), raised(0, "RuntimeError: Connection closed by peer [10.0.0.1]:9")])
    report = diagnose(tmp_path, text)
    assert report.findings == () and "pod w-3 was evicted: Pod ephemeral" in (report.state_text or "")
