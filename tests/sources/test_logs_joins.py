"""Lines that mean something only together: a bar that moves on, a listing of a quota, a kernel's line after a good end. All texts are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from distdiag.sources.logs.verdict import diagnose_logs
from tests.sources.test_logs import diagnose, only, raised, timeout
from tests.sources.test_logs_first_cause import together

STEPS = "".join(f"2031-03-04 1{n}:00:00 epoch {n} loss 0.{9 - n}\n" for n in range(4))
SEGFAULT = "[Tue Mar  4 12:30:00 2031] python3[7712]: segfault at 8 ip 00007f sp 00007f error 4 in libx.so[7f+1]\n"


@pytest.mark.parametrize(
    ("end", "errors"),
    [
        ("all ranks finished, destroying process group\n$ dmesg -T\n", 0),
        ("training finished\n$ sacct -j 7\n7   COMPLETED      0:0   01:30:41\n$ dmesg -T\n", 0),
        ("$ dmesg -T\n", 1),
        ("training finished\nrun.sh: line 3:  7712 Segmentation fault  python fit.py\n", 1),
    ],
)
def test_what_the_kernel_prints_after_a_good_end_did_not_end_the_job(tmp_path: Path, end: str, errors: int) -> None:
    report = diagnose(tmp_path, STEPS + end + SEGFAULT)
    assert len(report.findings) == errors
    assert errors or any("ended well after that" in note for note in report.notes)


def test_a_sample_that_quotes_two_errors_shows_no_run_that_ended(tmp_path: Path) -> None:
    text = "sample:\n  | torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    text += "  wrong: 'Out of memory: Killed process 7 (python3) total-vm:9kB'\n"
    report = diagnose(tmp_path, text + STEPS + "training finished\n")
    assert report.findings == () and not any("a run in this log ended" in note for note in report.notes)


USING = "n{n}:{n}0:{n}0 [0] NCCL INFO Bootstrap : Using {at}<0>\n"
UNREACHED = "n7:70:77 [3] misc/socket.cc:4 NCCL WARN socketPollConnect: connect to {to}<417> returned No route to host, exceeded retries (9)\n"
CLOSED = raised(4, "torch.distributed.DistBackendError: NCCL error: x, remote process exited") + (
    "[rank4]: Last error:\n[rank4]: socketProgress: Connection closed by remote peer n7<3835>\n"
)


def test_the_bridge_that_a_host_announced_explains_what_its_peers_closed(tmp_path: Path) -> None:
    bridge = USING.format(n=7, at="bond1:10.3.0.7") + USING.format(n=8, at="br-0123456789ab:172.19.0.1")
    f = only(diagnose(tmp_path, bridge + UNREACHED.format(to="172.19.0.1") + CLOSED))
    assert "172.19.0.1 (br-0123456789ab on n8): that is a bridge" in f.message
    assert "(there bond1), or NCCL_SOCKET_IFNAME=^br-0123456789ab," in f.advice and "on n8" in f.advice
    f = only(diagnose(tmp_path, UNREACHED.format(to="10.3.0.8") + CLOSED))
    assert "no route" in f.message and "10.3.0.8" in f.message
    assert only(diagnose(tmp_path, CLOSED)).advice.startswith("look at n7 first")


LOOPBACK = "(W pid={n}{ip}) [W1 ProcessGroupGloo.cpp:760] Warning: Unable to resolve hostname to a (local) address. Using the loopback address as fallback.\n"
MESH = "(W pid={n}{ip}) [rank{n}]:[E1 ProcessGroupGloo.cpp:143] Gloo connectFullMesh failed with [x/gloo/pair.cc:1] no error\n"


def test_the_host_whose_gloo_listens_on_the_loopback_address(tmp_path: Path) -> None:
    there = ", ip=10.4.0.8"
    text = LOOPBACK.format(n=3, ip=there) + MESH.format(n=3, ip=there)
    f = only(diagnose(tmp_path, text + MESH.format(n=0, ip="")))
    assert "gloo on ranks 0, 3 could not" in f.message and "10.4.0.8 cannot resolve its own host name" in f.message
    f = only(diagnose(tmp_path, text + LOOPBACK.format(n=5, ip=there) + MESH.format(n=0, ip="")))
    assert "gloo on ranks 0, 3 could not" in f.message  # rank 5 has only a warning
    f = only(diagnose(tmp_path, text))
    assert "rank 3 on 10.4.0.8 could not" in f.message and "cannot resolve" not in f.message


FAILED = "RuntimeError: [enforce fail at inline_container.cc:7] . PytorchStreamWriter failed writing file data/{}: file write failed"
LISTED = "     Filesystem    used   quota   limit   grace   files\n       /big     {}    18T     20T       -   31022\n"


@pytest.mark.parametrize(
    ("used", "second", "words", "numbers"),
    [("20T*", 8, "the quota of /big is exceeded", True), ("17T", 8, "", True), ("20T*", 5, "/big is exceeded", False)],
)
def test_a_file_that_was_not_written_where_the_quota_is_exceeded(
    tmp_path: Path, used: str, second: int, words: str, numbers: bool
) -> None:
    f = only(diagnose(tmp_path, raised(6, FAILED.format(5)) + raised(2, FAILED.format(second)) + LISTED.format(used)))
    assert words in f.message and ("exceeded" in f.message) is bool(words)
    assert ("the numbers are those of rank 6" in f.message) is numbers
    assert ("checkpoint before the one" in f.advice) is bool(words)


BAR = "Packing rows:  {p}%|## | {n}/900 [10:00<1:30:00, 15.0 rows/s]\n"


@pytest.mark.parametrize(
    ("before", "after", "moves"), [(90, 99, True), (90, 90, False), (90, 900, False), (90, 0, False)]
)
def test_a_bar_that_moves_while_others_wait_is_of_the_rank_that_does_not(
    tmp_path: Path, before: int, after: int, moves: bool
) -> None:
    text = "rank: 0, world size: 3, gpu\n" + BAR.format(p=before // 9, n=before)
    f = only(diagnose(tmp_path, text + timeout(1) + timeout(2) + BAR.format(p=after // 9, n=after) * bool(after)))
    assert f.culprits == (0,)
    assert ("a progress bar moved on" in f.message) is moves
    assert ("num_proc" in f.advice) is moves


KILLED = "Out of memory: Killed process 52 (python3) total-vm:1kB\n"
USED = "[INFO] [utils.py:7:see_memory_usage] CPU Virtual Memory:  used = {} GB, percent = 1.0%\n"


def test_whose_memory_ran_out_and_how_it_grew(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, "".join(map(USED.format, (102.4, 241.9, 368.0))) + KILLED))
    assert "the host itself ran out of memory" in f.message and "rises from 102 to 368 GB" in f.message
    f = only(diagnose(tmp_path, "".join(map(USED.format, (360.4, 361.9, 362.0))) + f"Memory cgroup o{KILLED[1:]}"))
    assert "its memory limit" in f.message and "rises" not in f.message


def test_the_one_rank_whose_memory_grew_until_it_was_killed(tmp_path: Path) -> None:
    step = "{r}: [2025-10-30 11:02:3{n}][INFO] step {n} loss 2.1 rss {gb} GB\n"
    end = "slurmstepd: error: Detected 1 oom_kill event in StepId=9.0. Some of the step tasks have been OOM Killed.\n"
    end += "srun: error: n2: task 2: Out Of Memory\n"
    for most, grown in ((30, True), (0, False)):
        rows = ((n, r, 14 + 0.1 * n + most * n * (r == 2)) for n in range(7) for r in range(3))
        text = "".join(step.format(n=n, r=r, gb=round(gb, 1)) for n, r, gb in rows)
        f = only(diagnose(tmp_path, text + end))
        assert f.culprits == (2,) and ("memory of rank 2, and of no other rank so much, rises" in f.message) is grown
        assert ("what rank 2 alone keeps" in f.advice) is grown is ("rises" in f.message)


def test_the_number_of_a_worker_that_verl_names_by_its_node(tmp_path: Path) -> None:
    text = "['trainer.n_gpus_per_node={}']\nMemory on the node (IP: 10.5.0.6, ID: 3) where the task (actor ID: c, name=q1WorkerDict_1:2:WorkerDict.__init__, pid=58, memory used=57GB) was running was 478GB / 503GB, which exceeds the memory usage threshold of 0.95.\n"
    f = only(diagnose(tmp_path, text.format(4)))
    assert f.culprits == (6,) and f.certainty == "suspected"
    assert only(diagnose(tmp_path, text.format(2))).culprits == ()


def test_the_master_address_that_each_node_has_for_itself(tmp_path: Path) -> None:
    command = "+ torchrun --nnodes=2 --master_addr=localhost --master_port=426 fit.py\n  min_nodes        : 2\n"
    lost = (
        "[E socket.cpp:6] [c10d] The client socket has failed to connect to any network address of (localhost, 426).\n"
    )
    f = only(diagnose(tmp_path, command + lost))
    assert "--master_addr is localhost" in f.message and f.advice.startswith("give --master_addr")


def test_a_cut_image_is_not_named_by_its_message(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, raised(3, "OSError: image file is truncated (4 bytes not processed)")))
    assert "find it" in f.advice and "LOAD_TRUNCATED_IMAGES" in f.advice


def test_all_ranks_that_deepspeed_launches(tmp_path: Path) -> None:
    text = "[INFO] [launch.py:1:main] dist_world_size=8\n" + timeout(1)
    (tmp_path / "fit.log").write_text(text)
    report = diagnose_logs([str(tmp_path / "fit.log")])
    assert report is not None and report.world_size == 8


PEER = "worker-1.job.ml.svc.cluster.local"


@pytest.mark.parametrize(
    ("after", "rank_of_peer", "kind", "culprits"),
    [
        (5, 9, "rank_lost", (2,)),  # its log is missing, and it closed first
        (700, 9, "timeout", ()),  # whether it or the rank that timed out ended first is not known
        (700, 0, "timeout", ()),  # it is the host of the rank that timed out
    ],
)
def test_the_peer_that_closed_the_connections_and_has_no_log_is_where_to_look(
    tmp_path: Path, after: int, rank_of_peer: int, kind: str, culprits: tuple[int, ...]
) -> None:
    def stamped(second: int, text: str) -> str:
        return "".join(f"2031-03-04T10:{second // 60:02}:{second % 60:02}.5Z {x}" for x in text.splitlines(True))

    logs = {}
    for q in (0, 1, 3):
        name = "worker-1" if q == rank_of_peer else f"pod-{q}"
        logs[f"p{q}_log"] = stamped(
            0, f"{name}:1:66 [0] NCCL INFO comm 0x5 rank {q} nranks 4 cudaDev 0 - Init COMPLETE\n"
        )
    closed = "misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer"
    for q in (1, 3):
        logs[f"p{q}_log"] += stamped(after, f"pod-{q}:1:66 [0] {closed} {PEER}<51022>\n")
    logs["p0_log"] += stamped(605, timeout(0))
    f = only(together(tmp_path, **logs))
    assert (f.kind, f.culprits) == (kind, culprits)
    assert (f"ranks 1, 3 lost their connections to {PEER}" in f.message) is (rank_of_peer != 0)
    assert (f"see how the process on {PEER} ended" in f.advice) is (rank_of_peer != 0)


def test_the_rest_of_a_message_is_found_behind_the_lines_of_other_ranks(tmp_path: Path) -> None:
    heads = [raised(q, "RuntimeError: Error(s) in loading state_dict for Net:") for q in range(3)]
    rest = "".join(f"[rank{q}]: \tsize mismatch for emb.weight: torch.Size([8, 4])\n" for q in range(3))
    f = only(diagnose(tmp_path, "".join(heads) + rest))
    assert f.victims == (0, 1, 2) and "for Net: size mismatch for emb.weight" in f.message
