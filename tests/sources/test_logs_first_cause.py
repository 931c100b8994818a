"""Whose error comes first, and who it is, where one line alone does not show it. All texts are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from distdiag.report.words import verdict
from distdiag.sources.logs.verdict import diagnose_logs
from tests.sources.test_logs import about, diagnose, only, raised, table, timeout

STEPS = "".join(f"[rank{n % 4}] step {n} loss 2.1\n" for n in range(200, 232))
APART = "".join(timeout(r) for r in (0, 2, 3)) + timeout(1, op="_ALLGATHER_BASE")


def together(tmp_path: Path, **texts: str):
    paths = []
    for name, text in texts.items():
        paths.append(tmp_path / name.replace("__", "-").replace("_", "."))
        paths[-1].write_text(text)
    report = diagnose_logs(list(map(str, paths)))
    assert report is not None
    return report


def test_an_exception_after_which_one_rank_went_on_is_the_likely_cause_if_that_rank_parts(tmp_path: Path) -> None:
    error = raised(1, "ValueError: bad sample 7", file="/w/data.py")
    text = f"{STEPS}{error}[rank1] step 232 loss 2.0\n"
    report = diagnose(tmp_path, text + APART)
    f = only(report)
    assert about(f) == ("mismatch", "op", (1,), (0, 2, 3)) and f.certainty == "suspected"
    assert f.message.startswith("rank 1 raised ValueError: bad sample 7 at data.py:7 in main (line 36) and went on")
    assert "likely" in f.message and "on all ranks alike" in f.advice
    assert not any("bad sample" in note for note in report.notes)


def caught_oom(gpu: int) -> str:
    return f"2031-01-01 00:00:00 | WARNING | trainer | ran out of memory, skipping batch: CUDA out of memory. Tried to allocate 2.00 GiB (GPU {gpu}; 31.7 GiB total capacity)\n"


def test_a_caught_lack_of_memory_is_the_likely_cause_if_that_rank_parts(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, STEPS + caught_oom(1) + APART))
    assert about(f) == ("mismatch", "op", (1,), (0, 2, 3)) and f.certainty == "suspected"
    assert f.message.startswith(
        "rank 1 ran out of memory on GPU 1 (line 33) and went on, which is the likely first cause"
    )
    assert f.advice.startswith("let an out-of-memory error end all ranks")


@pytest.mark.parametrize(
    "before",
    [caught_oom(2), caught_oom(1) + caught_oom(2), caught_oom(1) + STEPS, caught_oom(0)],
    ids=["another", "two", "long_ago", "perhaps_of_any"],
)
def test_a_caught_lack_of_memory_of_others_or_long_before_is_no_cause(tmp_path: Path, before: str) -> None:
    assert "ran out of memory" not in only(diagnose(tmp_path, STEPS + before + APART)).message


def test_a_job_that_skips_batches_without_memory_is_healthy(tmp_path: Path) -> None:
    assert not diagnose(tmp_path, STEPS + caught_oom(1) + STEPS).findings


@pytest.mark.parametrize(
    "errors",
    [
        raised(3, "ValueError: y"),
        raised(1, "ValueError: y") + raised(3, "ValueError: y"),
        raised(1, "ValueError: y") + STEPS,
    ],
    ids=["another", "two", "long_ago"],
)  # fmt: skip
def test_an_exception_of_other_ranks_or_long_before_is_a_note(tmp_path: Path, errors: str) -> None:
    more = "".join(f"[rank{r}] step 233 loss 2.0\n" for r in range(4))
    report = diagnose(tmp_path, STEPS + errors + more + APART)
    assert "ValueError" not in only(report).message
    [note] = [n for n in report.notes if "ValueError: y" in n]
    assert "the job went on: it was probably caught" in note and "well" not in note


def test_the_errors_in_a_launchers_log_are_of_the_ranks_that_it_started(tmp_path: Path) -> None:
    """The other launcher's rank only waited for these."""
    other = "".join(f"| distributed init (rank {r}): env://\n" for r in range(2))
    other += raised(0, "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 2/4 clients joined.", prefix="")  # fmt: skip
    ours = raised(0, "RuntimeError: no kernel image", prefix="") * 2
    ours += table(2, 1, "To enable traceback see: x", host="b") + table(3, 1, "To enable traceback see: x", host="b")
    report = together(tmp_path, a_log=other + table(0, 1, "To enable traceback see: x", host="a"), b_log=ours)
    f = only(report)
    assert f.culprits == (2, 3) and f.message.startswith("ranks 2, 3 on b raised RuntimeError: no kernel image")
    assert "does not show" not in f.message
    assert report.ranks_seen == 4


def test_what_others_report_of_the_process_that_failed_is_a_part_of_it(tmp_path: Path) -> None:
    lost = "F0101 client.h:8] UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n/job:jax_worker/replica:0/task:2\n"
    error = raised(0, "tensorflow.DataLossError: corrupted record at 12 [Op:x]", prefix="")
    report = together(tmp_path, alpha_log=lost, beta_log=lost, gamma_log=error)
    f = only(report)
    assert "DataLossError" in f.message and "fetch it again" in f.advice
    assert f.message.endswith(
        "the nodes of alpha.log, beta.log report that /job:jax_worker/replica:0/task:2 sent no heartbeats any more"
    )
    assert verdict(report) == "failed: 1 error (no rank known)"


def test_a_nameless_failure_is_probably_of_the_rank_that_all_others_wait_for(tmp_path: Path) -> None:
    wait = "EI0002: [PID: 1] The Notify register has not received the Notify record from remote rank [2].base\n"
    head = "[ERROR] 2031-05-05-10:00:1{0} (PID:{0}, Device:{0}, RankID:{0}) ERR02200 DIST call hccl api failed.\n"
    text = raised(0, "OSError: [Errno 116] Stale file handle", prefix="")
    text += "".join(head.format(r) + wait for r in (0, 1, 3))
    f = only(diagnose(tmp_path, text))
    assert about(f) == ("rank_lost", "crashed", (2,), (0, 1, 3)) and f.certainty == "suspected"
    assert f.message.startswith("probably rank 2 raised OSError") and "mount it again" in f.advice


def test_the_launcher_that_could_not_listen_is_named(tmp_path: Path) -> None:
    text = (
        'Traceback (most recent call last):\n  File "/p/accelerate/commands/launch.py", line 9, in launch_command\n'
        '    run()\n  File "/p/torch/distributed/run.py", line 8, in run\n    x()\n'
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29511\n"
    )
    f = only(diagnose(tmp_path, text))
    assert f.message.startswith("accelerate could not listen: port 29511") and "--main_process_port" in f.advice


def test_a_full_gpu_is_named_as_its_process_counts(tmp_path: Path) -> None:
    what = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB. GPU 5 has a total capacity of 79.00 GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process has 4.00 GiB memory in use. Process 88 has 70.00 GiB memory in use."
    assert "70 GiB of that GPU (cuda:5)" in only(diagnose(tmp_path, raised(5, what))).message


def test_a_stop_from_outside_names_the_ranks_that_lost_their_connections(tmp_path: Path) -> None:
    pod = "Name:             w-2\nMessage:          The node was low on resource: memory. x\n"
    lost = "[rank0]: ncclRemoteError: A call failed possibly due to a network error.\n[rank0]: Last error:\n[rank0]: NET/Socket : peer 10.0.0.3<4> closed\n"
    report = together(tmp_path, w__0_log=lost, events_txt=pod)
    assert "; rank 0 failed with NCCL errors; no other cause found" in verdict(report)
    assert any("NCCL reports on line 3 of w-0.log: NET/Socket" in note for note in report.notes)


def test_a_file_named_by_a_host_is_of_that_host(tmp_path: Path) -> None:
    kernel = "[Tue Jun 18 19:45:38 2030] infiniband mlx5_3: Port: 1 Link DOWN\n"
    job = "n21:33:39 [3] net_ib.cc:95 NCCL WARN NET/IB : mlx5_3:1 Got async event : port error\n" + timeout(0)
    report = together(tmp_path, n21__dmesg_log=kernel, job_log=job)
    assert only(report).message.startswith("host n21 lost a port of the network")


def test_a_bus_error_of_a_loaders_worker_does_not_prove_that_shared_memory_was_full(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, raised(3, "RuntimeError: DataLoader worker (pid 5) is killed by signal: Bus error. It is possible that workers are out of shared memory")))  # fmt: skip
    assert "rank 3 had a bus error or no shared memory (most often a full /dev/shm)" in f.message


def test_a_job_that_ended_well_is_not_told_how_to_see_a_hang(tmp_path: Path) -> None:
    steps = "".join(f"0: step={n} loss=1.5\n" for n in range(5))
    report = diagnose(tmp_path, "1: h1:7:7 [0] NCCL INFO x\n" + steps + "JobID|State|ExitCode\n77|COMPLETED|0:0\n77.0|COMPLETED|0:0\n")  # fmt: skip
    assert any("ended well" in note for note in report.notes)
    assert not any("hang" in note or "sacct" in note for note in report.notes)


def test_a_line_without_a_writer_is_quoted_as_a_line(tmp_path: Path) -> None:
    event = "58m  Warning  FailedScheduling  pod/w-0  0/12 nodes are available: 12 Insufficient nvidia.com/gpu.\n"
    report = diagnose(tmp_path, event + "Training complete. exit 0\n")
    assert any(note.startswith("line 1 has `58m Warning FailedScheduling") for note in report.notes)
