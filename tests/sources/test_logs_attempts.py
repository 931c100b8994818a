"""A stop from outside ends one attempt of a job; what fails after a later start in the same log is judged first. All texts are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sources.test_logs import about, diagnose, only, raised, timeout

CUT = "slurmstepd: error: *** STEP 81.0 ON b4 CANCELLED AT 2031-05-06T01:20:30 DUE TO PREEMPTION ***\n"
RUN = "".join(f"step {n} loss 2.{n}\n" for i in range(3) for n in [700 + i])
DAMAGED = "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory"


def _loads(rank: int, function: str) -> str:
    """Return the traceback of a rank that loads a damaged file in a function."""
    p = f"[rank{rank}]: "
    frames = f'{p}  File "/w/run.py", line 9, in <module>\n{p}    main()\n{p}  File "/v/site-packages/lib/io.py", line 5, in {function}\n{p}    read()\n'
    return f"{p}Traceback (most recent call last):\n{frames}{p}{DAMAGED}\n"


@pytest.mark.parametrize(
    "start",
    [
        "[2031-05-06 02:44:10,125] [INFO] [comm.py:9:init] starting\n",
        "[W506 02:44:10.125000077 socket.cpp:7] [c10d] connecting\n",
        "---- requeue of job 81, restart count 2 ----\n",
    ],
)
def test_a_failure_of_a_later_attempt_comes_before_the_stop_of_the_one_before(tmp_path: Path, start: str) -> None:
    report = diagnose(tmp_path, RUN + CUT + start + raised(2, "KeyError: 'router'"))
    assert about(only(report)) == ("rank_lost", "crashed", (2,), ())
    assert report.state_text is None and any("preemption (line 4)" in note for note in report.notes)


@pytest.mark.parametrize("start", ["", "[2031-05-06 01:20:52,125] [INFO] [comm.py:9:end] closing\n"])
def test_what_fails_right_after_a_stop_follows_from_it(tmp_path: Path, start: str) -> None:
    report = diagnose(tmp_path, RUN + CUT + start + raised(2, "KeyError: 'router'"))
    assert not report.findings and "preemption" in (report.state_text or "")


def test_a_damaged_checkpoint_is_not_fetched_again(tmp_path: Path) -> None:
    assert "before that one" in only(diagnose(tmp_path, _loads(3, "load_checkpoint"))).advice
    assert "fetch it again" in only(diagnose(tmp_path, _loads(3, "from_pretrained"))).advice


def _hccl(rank: int, local: int, remote: int, parameter: str = "count") -> str:
    p = f"[rank{rank}]:"
    return (
        f"{p} RuntimeError: call.cpp:2 OPS function error: HcclAllgather, error code is 5\n"
        f"{p} EI0005: [PID: 3] The arguments for collective communication are inconsistent between ranks: tag [AllGather_10.1.1.1], "
        f"parameter [{parameter}], local [{local}], remote [{remote}]\n"
        f"{p} Create dest error! createLink para:rank[{rank}]-localUserrank[{rank}], dst_rank[{rank + 1}]-remoteUserrank[0]\n"
    )


def test_hccl_compares_the_arguments_of_two_ranks(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, RUN + _hccl(1, 96, 40) + _hccl(2, 40, 96) + _hccl(3, 96, 40)))
    assert about(f) == ("mismatch", "shape", (2,), (1, 3))
    assert "40 on rank 2" in f.message and "96 on ranks 1, 3" in f.message and not f.waiting
    f = only(diagnose(tmp_path, _hccl(1, 4, 9, "dataType")))
    assert about(f) == ("mismatch", "dtype", (), (1,)) and f.certainty == "suspected"
    assert "9 on a rank that the log does not name" in f.message


def test_ranks_that_raised_the_same_error_do_not_wait(tmp_path: Path) -> None:
    text = "".join(
        raised(
            r,
            f"RuntimeError: DDP expects same model across all ranks, but Rank {r} has {n} params, while rank {q} has inconsistent {m} params.",
        )
        for r, n, q, m in ((0, 30, 1, 28), (1, 28, 0, 30), (2, 30, 1, 28))
    )
    f = only(diagnose(tmp_path, text))
    assert about(f)[2:] == ((1,), (0, 2)) and not f.waiting and [w.rank for w in f.where] == [1]


def test_the_node_of_the_rendezvous_may_have_ended_or_only_be_unreachable(tmp_path: Path) -> None:
    lost = "[rank{r}]:[W506 01:20:30.1 TCPStore.cpp:1] [c10d] recvValue failed on SocketImpl(fd=6, remote=[a0.pool]:29400): Broken pipe\n"
    agent = "W0506 01:20:31 9 dynamic_rendezvous.py:3] The node 'a1_9_0' has failed to send a keep-alive heartbeat to the rendezvous 'j' due to an error of type RendezvousConnectionError.\n"
    f = only(diagnose(tmp_path, RUN + "".join(lost.format(r=r) for r in range(4, 8)) + agent))
    assert "serves it (a0.pool) could not be reached" in f.message and "no log has a line of ranks 0–3" in f.message
    assert f.certainty == "suspected"
    waits = "".join(timeout(r) for r in range(4))
    assert only(diagnose(tmp_path, RUN + waits)).cost == "the job made no progress from then on"
    assert only(diagnose(tmp_path, waits)).cost == "the job made no progress until it ended"


def test_equal_calls_that_time_out_on_all_ranks(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, "".join(timeout(r) for r in range(4))))
    assert "all with 64 elements" in f.message and "their calls are equal" in f.advice and "py-spy dump" in f.advice
    f = only(diagnose(tmp_path, "".join(timeout(r, numel=None) for r in range(4))))
    assert "elements" not in f.message and "check that all ranks made the same call" in f.advice


def _reran(node: str, device: int, what: str) -> str:
    return f"ERROR:rerun:Rank 3, node {node}, device {device}, iteration #77: {what}\n"


NAN = "ERROR:rerun:Unexpected result nan on rank 3 at iteration #77 invocation #1 (message='found NaN in the loss')\n"
SAME_GPU = _reran("c7", 6, "First rerun: unexpected result is reproducible within the tolerance (nan = nan).")


def test_a_rerun_elsewhere_names_the_gpu_of_the_first_one(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, NAN + SAME_GPU))
    assert "device 6, line 2), it got the same result" in f.message and f.advice.startswith(
        "resume from the checkpoint"
    )
    again = "[default] Setting OMP_NUM_THREADS environment variable for each process to be 1\n"
    f = only(diagnose(tmp_path, NAN + SAME_GPU + again + _reran("c9", 1, "Possible persistent error!")))
    assert "it had before: node c7, device 6 (line 2)" in f.message and "take out device 6 of node c7" in f.advice


XID = "NVRM: Xid (PCI:0000:2a:00): 79, pid=7, GPU has fallen off the bus?\n"


def test_a_panel_of_rich_quotes(tmp_path: Path) -> None:
    panel = "╭──── sample ────╮\n│ Prompt         │\n│ " + XID + "╰────────────────╯\n"
    report = diagnose(tmp_path, RUN + panel + RUN)
    assert not report.findings and not any("fell off" in note for note in report.notes)
    assert diagnose(tmp_path, RUN + XID).findings


def test_what_a_run_of_pytest_that_passed_has_provoked_is_no_note(tmp_path: Path) -> None:
    text = raised(1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB.") + "loss: nan\nloss: nan\n"
    quiet = diagnose(tmp_path, text + "=== 31 passed, 2 skipped in 7.25s ===\n")
    assert not quiet.findings and not any("memory" in n or "NaN" in n for n in quiet.notes)
    assert diagnose(tmp_path, text + "=== 2 failed, 31 passed in 7.25s ===\n").findings


def test_a_short_title_keeps_what_tells(tmp_path: Path) -> None:
    cuda = "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might have already set an error? Error 802: system not yet initialized"
    assert "Error 802: system not yet initialized" in only(diagnose(tmp_path, raised(1, cuda))).message
    cache = "/home/kim/.triton/cache/" + 40 * "QX" + "/"
    moved = (
        f"FileNotFoundError: [Errno 2] No such file or directory: '{cache}tmp.pid_81_7/norm.ttir' -> '{cache}norm.ttir'"
    )
    assert (
        "'/home/kim/.triton/…/norm.ttir' -> '/home/kim/.triton/…/norm.ttir'"
        in only(diagnose(tmp_path, raised(1, moved))).message
    )


CLOSING = "W0506 01:20:30.1 9 torch/distributed/elastic/multiprocessing/api.py:897] Sending process {} closing signal SIGTERM\n"
AGAIN = "I0506 01:20:40.1 9 torch/distributed/elastic/agent/server/api.py:889] [default] Worker group FAILED. {}/2 attempts left; will restart worker group\n"


def _full(rank: int, pid: int) -> str:
    """Return that a rank's GPU is full, and which process holds most of it."""
    gpu = f"GPU {rank} has a total capacity of 39.39 GiB of which 71.19 MiB is free. Process {pid} has 38.02 GiB memory in use."
    return raised(
        rank,
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 100.00 MiB. {gpu} Including non-PyTorch memory, this process has 1.29 GiB memory in use.",
    )


LOST = "[rank2]: RuntimeError: [/p/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.9.0.4]:5131\n"
FULL = "".join(_full(r, 50 + r) for r in (0, 1))
LEFT = CLOSING.format(50) + CLOSING.format(51) + AGAIN.format(2)


@pytest.mark.parametrize("last", ["", AGAIN.format(1) + FULL])
def test_an_attempt_that_fails_by_what_the_one_before_left_is_not_the_cause(tmp_path: Path, last: str) -> None:
    report = diagnose(tmp_path, RUN + raised(2, "KeyError: 'router'") + LEFT + FULL + last)
    assert about(only(report)) == ("rank_lost", "crashed", (2,), ())
    (note,) = (n for n in report.notes if n.startswith("judged: "))
    assert "rank 0 ran out of GPU memory" in note and "process 50 of an earlier attempt" in note


def test_an_attempt_that_fails_by_itself_is_judged_and_the_one_before_is_a_note(tmp_path: Path) -> None:
    report = diagnose(tmp_path, raised(2, "KeyError: 'router'") + LEFT + raised(1, "ValueError: x"))
    assert only(report).culprits == (1,)
    assert any("KeyError" in n and "nothing shows that it follows from them" in n for n in report.notes)
    third = CLOSING.format(50) + AGAIN.format(1) + _full(0, 50)
    report = diagnose(tmp_path, raised(2, "KeyError: 'router'") + LEFT + raised(1, "ValueError: x") + third)
    assert only(report).culprits == (1,)
    assert any("the last run in the log that failed by itself; 1 run before it" in n for n in report.notes)
    assert any("1 later one failed by what it had left" in n for n in report.notes)


def test_each_full_gpu_has_its_own_holder_and_the_attempt_before_is_no_rank(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, RUN + LOST + LEFT + FULL))
    assert "process 50 of an earlier attempt, which has not ended, holds 38 GiB of that GPU (cuda:0)" in f.message
    assert "likewise process 51 on cuda:1" in f.message and "another rank" not in f.message
    assert "before a restart" in f.advice
    joins = "[default] Detected 1 new nodes from group_rank=0; will restart worker group\n"
    report = diagnose(tmp_path, RUN + CLOSING.format(50) + CLOSING.format(51) + joins + FULL)
    assert "process 50 of an earlier attempt" in only(report).message and not any("judged" in n for n in report.notes)
    f = only(diagnose(tmp_path, CLOSING.format(50) + CLOSING.format(51) + FULL))
    assert "another rank of this job (pid 50)" in f.message and "likewise pid 51 on cuda:1" in f.message
