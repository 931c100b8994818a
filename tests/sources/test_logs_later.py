"""What came later clears what came before; one process has several names; who waits is not who failed. All texts are made up."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distdiag.sources.logs.verdict import diagnose_logs
from tests.sources.test_logs import diagnose, only, raised, table, timeout

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB."
STEPS = "".join(f"step {i} loss 0.5{i}\n" for i in range(40, 44))
TASK = "srun: error: n3: task {}: Exited with exit code 1\n"
EVERY_50 = "".join(f"[rank0]: step {i} loss 0.5\n" for i in (300, 350, 400, 450))
RESTART = "[default] Worker group FAILED. 2/3 attempts left; will restart worker group\n"
LOST = "RuntimeError: [/p/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.9.0.4]:5131"


def uncaught(rank: int, what: str) -> str:
    return raised(rank, what).replace("in main", "in <module>")


QUOTED = uncaught(0, OOM).replace("[rank0]: ", "")  # it may be a part of a sample
NO_MODULE = "ModuleNotFoundError: No module named 'fused'"
OPTIONAL = raised(0, NO_MODULE, file="/w/ops/__init__.py", prefix="").replace("in main", "in <module>")


@pytest.mark.parametrize(
    "text",
    [
        raised(3, OOM) + "[rank3]: epoch 2 | batch 17 | loss 0.91\n",
        raised(3, OOM) + "[rank3]: lowering the batch size\n[rank3]: iter 12: loss=2.2\n",
        raised(1, "ConnectionResetError: [Errno 104] Connection reset by peer")
        + "[rank1]: retrying in 5 s\n[rank1]: Epoch: 3\n",
        raised(0, "ValueError: bad shard") + RESTART + STEPS,
        raised(0, "ValueError: bad shard") + table(0, 1, "Signal 1") + RESTART + STEPS + "Training complete.\n",
        raised(0, OOM, prefix="") + STEPS,
        "step 3 loss 0.9\n(raylet, ip=10.9.0.8) Raylet received SIGTERM, draining node (spot instance preemption notice).\n"
        "(TrainController pid=8) Started training worker group of size 2:\n" + STEPS,
        raised(1, OOM) + "Training finished. Result(metrics={'loss': 0.5}, error=None)\n",
        timeout(2) + "[rank0]: wrote the sample above\n[rank0]: Training finished in 3 h\n",
        timeout(2) + raised(0, LOST) + "JobId=71 JobState=COMPLETED ExitCode=0:0\n",
        raised(5, "KeyError: 'x'") + "72.batch  python  COMPLETED  0:0\n",
        "kernel: Out of memory: Killed process 4711 (mysqld) total-vm:1kB\nstep 7 loss 0.1\n",
        "kernel: Out of memory: Killed process 4711 (java) total-vm:1kB\n",
        "worker-1 exited with code 137\n" + "".join(f"worker-0 | epoch 1 step {i}\n" for i in range(30)),
        raised(4, OOM) + '{"level": "info", "rank": 4, "message": "step 18, loss 1.9"}\n',
        raised(4, OOM) + "[rank4]: train:  15%|#  | 300/2000 [02:00<13:00,  2.39it/s]\n",
        raised(0, LOST) + "[rank0]: store answered at the 2nd attempt\n[rank0]: step 3, lr 1e-4\n",
        "Name:         w-1\n  State:      Running\n  Last State:  Terminated\n    Reason:    OOMKilled\n    Exit Code: 137\n",
        "W0302 08:00:00.123456 44 wds.py:88] skipping a sample\n"
        + raised(0, "OSError: image file is truncated", prefix="")
        + "[rank 1] step 30, loss 1.9\n",
        raised(0, OOM) + "[rank0]: Decreasing batch size to: 32\n 10%|# | 20/200 [00:09<01:00, 4.0it/s]\n",
        raised(0, OOM) + "{'train_runtime': 51.2, 'train_loss': 0.81, 'epoch': 1.0}\n",
        "[rank0]: CUDA out of memory. Tried to allocate 1 GiB. Trying batch size 8\n[rank0]: trainer finished, all done\n",
        # a rank without steps: those of another one are more than can be in flight
        raised(5, "ValueError: odd clip") + EVERY_50,
        "[rank5]: ERROR clips: cannot read clip 31, skipping it\n"
        + raised(5, "ValueError: odd")
        + "[rank0]: step 40 loss 0.5\n",
        raised(5, "ValueError: odd clip") + "0: [2031-03-02 08:00:00] done, 4 ranks, 900 iterations\n",
        # the scheduler appended a later run
        uncaught(5, "ImportError: no x") + EVERY_50,
        uncaught(5, "ImportError: no x") + TASK.format(5) + EVERY_50,
        uncaught(5, "ImportError: no x").replace("[rank5]: ", "") + TASK.format(5) + EVERY_50,
        QUOTED + EVERY_50,
        # an import whose error was caught begins at no script
        OPTIONAL + STEPS,
        "WARNING:root:no fused kernels, falling back to eager\n"
        + QUOTED.replace(OOM, NO_MODULE)
        + "".join(f"step {i}/900 loss 2.1\n" for i in range(1, 21)),
    ],
)
def test_a_failure_after_which_the_job_went_on_is_no_finding(tmp_path: Path, text: str) -> None:
    report = diagnose(tmp_path, text)
    assert [f for f in report.findings if f.severity == "error"] == []
    assert report.state in ("running", "ended") and any("the job went on" in note for note in report.notes)


@pytest.mark.parametrize(
    ("last", "state"),
    [
        ("Training finished.\n", "ended"),
        ("[rank0]: the run has completed successfully\n", "ended"),
        ("2031-03-02 08:41:10 INFO torchrun: exited with code 0\n", "ended"),
        ("exit 0\n", "ended"),
        ("{'train_runtime': 51.2, 'train_loss': 0.81, 'epoch': 1.0}\n", "ended"),
        ("I0302 08:41:10 agent.py:9] [default] worker group successfully finished. Waiting 300 seconds\n", "ended"),
        ("JobId=71 JobState=COMPLETED ExitCode=0:0\n", "ended"),
        (raised(1, "KeyError: 'x'") + "exit code 1\n", "failed"),
        ("exit code 10\n", "running"),
        ("[rank1]: exited with code 0\n", "running"),  # the others may hang
        ("Training epoch 3 completed\n", "running"),
        ("train: 100%|####| 50/50 [00:10<00:00, 5.0it/s]\n", "running"),  # of one epoch
        ("> building the train dataset: done\n", "running"),
        ("Training finished.\neval step 3, loss 0.4\n", "running"),
        ("Training finished.\nupload: Error: no space left\n", "running"),
    ],
)
def test_the_state_is_what_the_last_lines_say(tmp_path: Path, last: str, state: str) -> None:
    assert diagnose(tmp_path, STEPS + last).state == state


def test_a_job_has_ended_if_each_file_with_steps_says_so(tmp_path: Path) -> None:
    for rank, last, state in (
        (0, "Training finished.\n", "ended"),
        (1, "", "running"),
        (1, "all steps done\n", "ended"),
    ):
        (tmp_path / f"rank{rank}.log").write_text(STEPS + last)
        report = diagnose_logs([str(tmp_path)])
        assert report is not None and report.state == state


@pytest.mark.parametrize(
    ("end", "ended"),
    [
        ("Process 71 exits successfully.\nProcess 72 exits successfully.\n", True),
        ("Process 71 exits successfully.\nProcess 71 exits successfully.\n", False),
        ("[rank0]: exiting with code 0\n[rank1]: exiting with code 0, will be requeued\n", True),
        ("[rank0]: Done.\n[rank1]: Done.\n", True),
        ("[rank0]: Done.\n[rank1]: Done.\n[rank0]: step 6 loss 0.2\n", False),
        ("[rank0]: Done.\n", False),
        ("`Trainer.fit` stopped: `max_epochs=1` reached.\nEpoch 0: 100%|####| 64/64 [00:12<00:00]\n", True),
        ("`Trainer.fit` stopped: `max_epochs=1` reached.\nEpoch 1: 100%|####| 64/64 [00:12<00:00]\n", False),
        ("[rank0]: Training finished\n" + "[rank1]:[W1229 22:06:38.5 TCPStore.cpp:106] Broken pipe\n" * 15, True),
        ("{'train_runtime': 131.2, 'train_steps_per_second': 3.812}\n100%|####| 500/500 [02:11<00:00]\n", True),
        ("{'train_runtime': 131.2, 'train_steps_per_second': 3.812}\n 60%|##  | 300/500 [02:11<00:00]\n", False),
        ("training is done\n validation loss at iteration 4 on validation set | lm loss value: 6.9E+00\n", True),
        ("(Controller pid=7) [State Transition] SHUTTING_DOWN -> FINISHED.\n", True),
        ("(Controller pid=7) [State Transition] ABORTING -> ERRORED.\n", False),
        ("Result(metrics={'epoch': 7}, checkpoint=None, error=None)\n", True),
        ("Result(metrics={'epoch': 7}, checkpoint=None, error=RuntimeError())\n", False),
        ("# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 225.8\n", True),
        ("# Out of bounds values : 3 FAILED\n# Avg bus bandwidth    : 225.8\n", False),
    ],
)
def test_a_job_has_ended_if_all_its_processes_have(tmp_path: Path, end: str, ended: bool) -> None:
    steps = "".join(f"[rank{q}]: step {n} loss 0.3\n" for n in range(5) for q in (0, 1))
    report = diagnose(tmp_path, f"{steps}Epoch 0: 100%|####| 64/64 [00:11<00:00]\n{end}")
    assert report is not None and (report.unjudged is None) is ended
    assert ended or not any("ended well" in note for note in report.notes)


def test_a_failure_that_ended_an_earlier_run_was_not_caught(tmp_path: Path) -> None:
    failed = "E0302 08:00:00.1 8 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 3 (pid: 9) of binary: python\n"
    report = diagnose(tmp_path, raised(3, OOM) + failed + "".join(f"[rank0]: step {i} loss 0.5\n" for i in range(40)))
    assert report.findings == ()
    (note,) = (note for note in report.notes if "rank 3" in note)
    assert "by which a run in this log ended" in note and "caught" not in note


@pytest.mark.parametrize(
    "end",
    [
        "exiting program at iteration 59\n",
        "[exiting program after 300 minutes] datetime: 2031-03-02 08:00:00\n",
        "2031-03-02 08:00:00 | INFO | fairseq_cli.train | done training in 7120.4 seconds\n",
        "[03/02 08:00:00 d2.engine.hooks]: Overall training speed: 8998 iterations in 0:54:00 (0.3601 s / it)\n",
        "Training time 1:12:40\n",
        "saved out/final\ndone in 1:12:40\n",
        "300 epochs completed in 4.182 hours.\n",
        "training complete, 1000 steps in 613.1 s\n",
        "Training finished with 2 checkpoints.\nResult(metrics={'loss': 0.5, 'epoch': 12}, error=None)\n",
    ],
)
def test_a_job_that_says_at_its_end_that_it_is_done_ended_well(tmp_path: Path, end: str) -> None:
    report = diagnose(tmp_path, raised(0, OOM) + "[rank0]: retrying with batch size 8\n" + end)
    assert report.findings == () and any("says that the job ended well" in note for note in report.notes)
    assert (report.state, report.unjudged) == ("ended", None)
    assert only(diagnose(tmp_path, end + raised(0, OOM))).culprits == (0,)


REQUEST = "ERROR 06-02 21:20:44 [serving.py:20] " + "ERROR 06-02 21:20:44 [serving.py:20] ".join(
    (
        "Traceback (most recent call last):\n",
        '  File "/o/vllm/entrypoints/openai/serving.py", line 33, in check\n',
        "ValueError: the prompt is too long\n",
    )
)
POSTED = 'INFO:     10.0.0.4:5112 - "POST /v1/completions HTTP/1.1" {}\n'
SERVER_STOPS = "INFO:     Application shutdown complete.\nINFO:     Finished server process [4201]\n"


@pytest.mark.parametrize(
    ("rest", "went_on"),
    [
        (POSTED.format("200 OK") + SERVER_STOPS, True),
        (3 * POSTED.format("200 OK"), True),
        ("INFO 06-02 21:31 [log.py:1] Avg generation throughput: 901.2 tokens/s\n" + SERVER_STOPS, True),
        (SERVER_STOPS, False),
        ("INFO 06-02 21:31 [log.py:1] Avg generation throughput: 0.0 tokens/s\n" + SERVER_STOPS, False),
        (3 * POSTED.format("500 Internal Server Error") + SERVER_STOPS, False),
    ],
)
def test_a_server_that_serves_after_an_error_was_not_ended_by_it(tmp_path: Path, rest: str, went_on: bool) -> None:
    report = diagnose(tmp_path, POSTED.format("200 OK") + REQUEST + rest)
    assert bool(report.findings) is not went_on


@pytest.mark.parametrize(
    ("before", "well"),
    [
        (POSTED.format("200 OK"), True),
        (POSTED.format("200 OK") + REQUEST + 3 * POSTED.format("200 OK"), True),
        (POSTED.format("200 OK") + "ERROR 06-02 21:20:44 [core.py:9] EngineCore hit a bug, bye\n", False),
    ],
)
def test_a_server_that_was_asked_to_shut_down_ended_well(tmp_path: Path, before: str, well: bool) -> None:
    report = diagnose(tmp_path, before + "INFO:     Shutting down\n" + SERVER_STOPS)
    assert report.findings == ()
    assert any("says that the job ended well" in note for note in report.notes) is well
    assert (report.state == "ended") is well is (report.unjudged is None)


STOPPED = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2031-01-02T03:04:05 DUE TO {} ***\n"


@pytest.mark.parametrize(
    ("begin", "earlier"),
    [
        (
            STOPPED.format("PREEMPTION") + "# restart: SLURM_RESTART_COUNT=1\n",
            "2031-01-02T03:04:05: preemption (line 2)",
        ),
        (STOPPED.format("PREEMPTION") + "srun: job 7 has been allocated resources\n", "preemption (line 2)"),
        ("srun: error: Node failure on n4\nSLURM_RESTART_COUNT: 2\nstep 60 loss 0.3\n", "node n4 was lost"),
        (STOPPED.format("NODE FAILURE") + "step 400 loss 0.3\nstep 800 loss 0.3\n", "node failure (line 2)"),
    ],
)
@pytest.mark.parametrize("end", ["", STOPPED.format("X Y").replace("03:04:05", "09:00:00")])
def test_what_failed_after_a_stop_and_a_new_start_is_the_verdict(
    tmp_path: Path, begin: str, earlier: str, end: str
) -> None:
    report = diagnose(tmp_path, "step 20 loss 0.9\n" + begin + uncaught(9, OOM) + TASK.format(9) + end)
    assert [f.culprits for f in report.findings] == [(9,)]
    assert any("1 run before it" in n and earlier in n for n in report.notes)


def test_a_report_of_lsf_before_the_output_is_of_the_same_run(tmp_path: Path) -> None:
    text = "TERM_RUNLIMIT: job killed after reaching LSF run time limit.\nstep 1 loss 0.3\nstep 400 loss 0.3\n"
    report = diagnose(tmp_path, text + "step 800 loss 0.3\nReceived SIGTERM: 15\n")
    assert "run time limit" in (report.state_text or "") and not any("before it (re" in n for n in report.notes)
    assert any("bsub -W" in n for n in report.notes) and not any("sbatch" in n for n in report.notes)


def test_the_variable_of_a_requeued_job_alone_begins_no_run(tmp_path: Path) -> None:
    text = "step 20 loss 0.9\n" + uncaught(9, OOM) + "env of rank 3: SLURM_RESTART_COUNT=1\n" + TASK.format(9)
    report = diagnose(tmp_path, text)
    assert [f.culprits for f in report.findings] == [(9,)]
    assert not any("before it" in n for n in report.notes)


@pytest.mark.parametrize("lost", [table(3, -9, "Signal 9"), "Spot interruption notice received: instance i-0\n"])
def test_what_was_lost_before_a_restart_was_not_caught(tmp_path: Path, lost: str) -> None:
    report = diagnose(tmp_path, lost + RESTART + STEPS)
    assert report.findings == () and (report.unjudged or "").startswith("no error that ended the job")
    assert any("was started again" in note for note in report.notes) and not any(
        "caught" in note for note in report.notes
    )


@pytest.mark.parametrize(
    ("text", "culprits"),
    [
        (STEPS + raised(3, OOM), (3,)),
        (QUOTED + STEPS + "done.\n", ()),
        (OPTIONAL, ()),
        (QUOTED + STEPS, ()),
        # the same few steps of many ranks
        (QUOTED + "".join(f"[rank{q}]: step {i} loss 0.3\n" for i in (7, 8) for q in range(16)), ()),
        (
            raised(3, OOM) + "".join(f"[rank{q}]: step {i} loss 0.3\n" for i in (7, 8) for q in range(16) if q != 3),
            (3,),
        ),
        (raised(3, OOM) + "Training finished iteration 2 at 2031-03-02 08:00:00. Total running time: 9min\n", (3,)),
        (EVERY_50 + "done.\n" + QUOTED, ()),
        ("W0302 08:00:00.1 44 wds.py:8] skipping a sample\n" + raised(3, "OSError: x"), (3,)),
        ("[rank5]: INFO graph: compiling\n" + raised(3, "OSError: x") + "step 9 loss 2\n", (3,)),
        (raised(3, OOM) + "[rank0]: step 41 loss 0.3\n", (3,)),
        (raised(3, OOM) + "".join(f"[rank0]: step {i} loss 0.3\n" for i in range(60, 76)), (3,)),
        (raised(3, OOM) + EVERY_50.replace("step", "eval step"), (3,)),
        (uncaught(3, OOM) + EVERY_50 + uncaught(2, OOM), (2,)),
        (uncaught(3, OOM) + TASK.format(3) + EVERY_50 + uncaught(2, OOM) + TASK.format(2), (2,)),
        (raised(3, OOM) + "[rank3]: step 41 loss 0.3\n" + table(3, 1, "Signal 1"), (3,)),
        (raised(3, "ValueError: 1") + "[rank3]: step 5\n" + raised(3, "KeyError: 'b'"), (3,)),
        (raised(2, "KeyError: 'y'") + RESTART + raised(2, "KeyError: 'y'"), (2,)),
        ("Training finished\n" + raised(2, "OSError: disk full"), (2,)),
        (raised(2, OOM) + "=== 1 failed, 3 passed in 2 s ===\n", (2,)),
        (raised(2, OOM) + "Training run done with errors, exit code: 1\n", (2,)),
        (raised(2, OOM) + "n1 exited with code 0\nn2 exited with code 137\n", (2,)),
    ],
)
def test_a_failure_that_ended_its_process_stays(tmp_path: Path, text: str, culprits: tuple[int, ...]) -> None:
    assert diagnose(tmp_path, text).findings[0].culprits == culprits


def test_an_optional_import_is_not_why_a_later_step_failed(tmp_path: Path) -> None:
    steps = "".join(f"step {i} loss 0.3\n" for i in range(40))
    for text, culprits in ((raised(3, OOM) + timeout(0), (3,)), (timeout(0) + timeout(1), ())):
        report = diagnose(tmp_path, OPTIONAL + steps + text)
        f = only(report)
        assert f.culprits == culprits and NO_MODULE not in f.message
        assert any(NO_MODULE in note for note in report.notes)


@pytest.mark.parametrize(
    ("text", "certainty"),
    [
        (raised(3, "KeyError: 'x'"), "proved"),
        (raised(3, "KeyError: 'x'") + "[rank0]: step 41 loss 0.3\n", "suspected"),
        (raised(3, "KeyError: 'x'") + "[rank0]: step 41 loss 0.3\n" + timeout(0), "proved"),
        (raised(3, "KeyError: 'x'") + EVERY_50 + timeout(0), "suspected"),
        (uncaught(3, "KeyError: 'x'") + "[rank0]: step 41 loss 0.3\n", "proved"),
    ],
)
def test_an_exception_that_may_have_been_caught_is_suspected(tmp_path: Path, text: str, certainty: str) -> None:
    f = only(diagnose(tmp_path, text))
    assert f.certainty == certainty and ("progress that may be later" in f.cost) == (certainty == "suspected"), f


@pytest.mark.parametrize(
    ("before", "what", "after", "certainty"),
    [
        ("2031-03-02 08:05:10 ERROR clip 31 is odd\n", "main", 40, None),
        ("2031-03-02 08:05:10 ERROR clip 31 is odd\n", "main", 12, "suspected"),
        ("2031-03-02 08:05:10 start\nloss is low\n", "main", 40, "suspected"),  # when it was raised is not known
        ("2031-03-02 08:05:10 ERROR clip 31 is odd\n", "<module>", 12, "proved"),
    ],
)
def test_steps_in_the_file_of_another_rank(
    tmp_path: Path, before: str, what: str, after: int, certainty: str | None
) -> None:
    steps = "".join(f"2031-03-02 08:{n:02}:00 step {n} loss 0.3\n" for n in range(after))
    (tmp_path / "rank0.log").write_text(steps)
    (tmp_path / "rank3.log").write_text(before + raised(3, "KeyError: 'x'", prefix="").replace("main", what))
    report = diagnose_logs([str(tmp_path)])
    assert report is not None
    assert [f.certainty for f in report.findings] == ([certainty] if certainty else []), report


@pytest.mark.parametrize("end", ["", TASK.format(5)])
def test_the_note_on_an_earlier_run_does_not_call_its_end_caught(tmp_path: Path, end: str) -> None:
    report = diagnose(tmp_path, uncaught(5, "ImportError: no x") + end + EVERY_50)
    (note,) = (note for note in report.notes if "rank 5" in note)
    assert "caught" not in note and ("by which a run in this log ended" in note) == bool(end)


BARRIER = "torch.distributed.DistStoreError: Timed out initializing process group in store based barrier on rank: {}, for key: store_based_barrier_key:1 (world_size=4, num_workers_joined=3, timeout=0:30:00)"


@pytest.mark.parametrize(
    ("text", "kind", "culprits", "says"),
    [
        ("I rank=6 pid=911 started\nI rank=7 pid=912 started\n" + STEPS + "Out of memory: Killed process 912 (python3) total-vm:1kB\n", "rank_lost", (7,), "out of memory"),
        ("(T pid=31, ip=10.0.0.2) [rank4] ready\n(T pid=32, ip=10.0.0.2) [rank5] ready\nMemory on the node where the task (actor ID: 5, pid=32, memory used=90GB) was running was 7GB / 8GB, which exceeds the memory usage threshold of 0.95.\n", "rank_lost", (5,), "memory"),
        ("process 51 spawned with command: ['python', '-u', 'a.py', '--local_rank=0']\nprocess 52 spawned with command: ['python', '-u', 'a.py', '--local_rank=1']\nOut of memory: Killed process 52 (pt_main_thread)\n", "rank_lost", (1,), "memory"),
        ("(Worker_TP2 pid=9) INFO rank 2 in world size 4 is assigned as TP rank 2\n" + raised(0, OOM + " GPU 2 has 79 GiB. Process 444 has 30.50 GiB memory in use. Including non-PyTorch memory, this process has 40.00 GiB memory in use.", prefix="(Worker_TP2 pid=9) "), "rank_lost", (2,), "process 444"),
        ("".join(raised(r, BARRIER.format(r), prefix="") for r in (0, 1, 3)), "rank_lost", (2,), "3 of 4"),
        ("[1,0]<stderr>:stall_inspector.cc:107] One or more tensors are waiting\n[1,0]<stderr>:Missing ranks:\n[1,0]<stderr>:3: [allreduce.grad, allreduce.bias]\n", "stall", (3,), "did not submit"),
        (raised(0, "TimeoutError: RPC call to profile timed out.", prefix="(EngineCore_DP0 pid=5) "), "timeout", (), "which worker"),
        (raised(1, "RuntimeError: [enforce fail at /p/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8192 vs 4096"), "mismatch", (), "8192"),
        ("".join(timeout(r) for r in (1, 2, 3)) + "[rank0]: weights written in 950.4 s\n" + raised(0, "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0.", line=88), "timeout", (0,), "run.py:88"),
        ('[rank1]: Fatal Python error: Bus error\n[rank1]: \n[rank1]: Thread 0x01 (most recent call first):\n[rank1]:   File "/a/other.py", line 3 in wait\n[rank1]: \n[rank1]: Current thread 0x02 (most recent call first):\n[rank1]:   File "/a/ext.py", line 61 in pack\n[rank1]:   File "/a/main.py", line 9 in <module>\n', "rank_lost", (1,), "ext.py:61"),
    ],
)  # fmt: skip
def test_names_of_one_process_and_who_waits(
    tmp_path: Path, text: str, kind: str, culprits: tuple[int, ...], says: str
) -> None:
    f = only(diagnose(tmp_path, text))
    assert (f.kind, f.culprits) == (kind, culprits) and says in f.message, f


def test_a_pod_and_the_environment_in_its_description(tmp_path: Path) -> None:
    (tmp_path / "describe.txt").write_text(
        "Name:         fox-worker-4\n    State:      Terminated\n      Reason:   OOMKilled\n    Environment:\n      RANK:     5\n"
    )
    (tmp_path / "worker-0.log").write_text("RANK=1 WORLD_SIZE=6\n" + raised(1, LOST))
    report = diagnose_logs([str(tmp_path)])
    assert report is not None and only(report).culprits == (5,)


def test_the_smaller_side_of_two_models_is_named(tmp_path: Path) -> None:
    text = "".join(
        raised(
            a,
            f"RuntimeError: DDP expects same model across all ranks, but Rank {a} has {n} params, while rank {b} has inconsistent {m} params.",
        )
        for a, n, b, m in ((0, 40, 3, 42), (1, 40, 3, 42), (3, 42, 0, 40))
    )
    assert only(diagnose(tmp_path, text)).culprits == (3,)


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_a_log_on_standard_input_is_read(name: str) -> None:
    command = [sys.executable, "-m", "distdiag", "diagnose", name, "--json"]
    done = subprocess.run(command, input=raised(3, OOM), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and json.loads(done.stdout)["findings"][0]["culprits"] == [3], done.stderr


def test_pipes_of_a_shell_are_read_and_named(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(raised(3, OOM))
    command = f"{sys.executable} -m distdiag diagnose <(cat a.log)"
    of_two = subprocess.run(
        ["bash", "-c", f"{command} <(echo '[rank0]: a line') --json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert of_two.returncode == 1 and json.loads(of_two.stdout)["findings"][0]["culprits"] == [3], of_two.stderr
    (tmp_path / "a.log").write_text("")
    empty = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert re.match(r"distdiag: error: /dev/fd/\d+: empty\n", empty.stderr), empty.stderr


def test_endless_standard_input_does_not_fill_the_disk(tmp_path: Path) -> None:
    code = "import sys, distdiag.cli.diagnose as d; d.MOST_STDIN = 3 << 20; from distdiag.cli import main; sys.exit(main(['diagnose', '-']))"
    with subprocess.Popen(["yes", "[rank0]: a line"], stdout=subprocess.PIPE) as yes:
        done = subprocess.run(
            [sys.executable, "-c", code], stdin=yes.stdout, capture_output=True, text=True, timeout=60, check=False,
            env=os.environ | {"TMPDIR": str(tmp_path)},
        )  # fmt: skip
        yes.kill()
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines() == [
        "distdiag: error: standard input has more than 3 MiB",
        "hint: write it into a file, and name that",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("why", "advice"), [("TIME LIMIT", "more time (--time)"), ("PREEMPTION", "requeue it"), ("NODE FAILURE", "")]
)
def test_a_stop_from_outside_says_what_to_do(tmp_path: Path, why: str, advice: str) -> None:
    report = diagnose(
        tmp_path, f"slurmstepd: error: *** JOB 7 ON g1 CANCELLED AT 2031-03-02T09:00:00 DUE TO {why} ***\n"
    )
    assert report.findings == () and (report.state_text or "").startswith("stopped by Slurm")
    assert any(advice in note for note in report.notes) if advice else len(report.notes) == 1


def test_a_log_without_an_error_says_what_to_collect_and_claims_nothing(tmp_path: Path) -> None:
    report = diagnose(tmp_path, "rank0 step 40 loss 2.1\nrank0 step 80 loss 2.0\n")
    assert report.findings == () and "sacct" in report.notes[-1] and "py-spy" in report.notes[-1]
    assert not any("no line names a rank" in note for note in report.notes)


@pytest.mark.parametrize(
    ("rest", "findings"),
    [
        ("(TrainWorker pid=71) Setting up process group for: env:// [rank=0, world_size=2]\n", 0),
        ("(Trainer pid=70) - (node_id=a1, ip=10.9.0.2, pid=71) world_rank=0, local_rank=0, node_rank=0\n", 0),
        ("(TrainWorker pid=71) epoch 1 step 30 loss 0.5\n", 0),
        ("Trial T_7f_00001 finished iteration 1 at 2031-03-02 08:00:00. Total running time: 9min\n", 0),
        ("(TrainWorker pid=71) Checkpoint successfully created at: Checkpoint(filesystem=local, path=/r/c)\n", 0),
        ("(autoscaler +2m) Tip: use `ray status` to view detailed cluster status.\n", 1),
    ],
)
@pytest.mark.parametrize("first", [False, True])
def test_a_request_that_waits_is_no_failure_of_a_job_whose_ranks_ran(
    tmp_path: Path, first: bool, rest: str, findings: int
) -> None:
    line = "(autoscaler +1m) Warning: The following resource request cannot be scheduled right now: {'GPU': 2.0}. It\n"
    assert len(diagnose(tmp_path, line + rest if first else rest + line).findings) == findings


def test_a_line_that_no_row_knows_is_not_the_one_that_a_note_explains(tmp_path: Path) -> None:
    text = "(API pid=1) ERROR 03-02 Error in a request\n" + raised(4, OOM) + "[rank4]: step 3 loss 0.5\n"
    notes = diagnose(tmp_path, text).notes
    assert any("the job went on" in note for note in notes)
    assert any(note.startswith("no other message that distdiag knows") for note in notes)


@pytest.mark.parametrize("event", ["0/5 nodes are available: 5 Insufficient gpu.\n", 'Back-off pulling image "x:1"\n'])
def test_a_pod_that_waited_has_started_if_the_job_made_steps(tmp_path: Path, event: str) -> None:
    assert "did not start" in only(diagnose(tmp_path, event + raised(1, LOST))).message
    step = "[rank1]: step 9 loss 0.5\n"
    assert "lost a connection" in only(diagnose(tmp_path, event + step + raised(1, LOST))).message


@pytest.mark.parametrize("done", ["Training finished in 3 h, model saved", "JobId=71 JobState=COMPLETED ExitCode=0:0"])
def test_of_a_job_that_ended_well_no_lines_like_errors_are_shown(tmp_path: Path, done: str) -> None:
    text = f"step 3 loss 0.4\n{done}\n[W1 TCPStore.cpp:1] sendBytes failed\nException left by sendBytes at x.hpp:6\n"
    notes = diagnose(tmp_path, text).notes
    words = "line 2 of job.log says that the job ended well; lines that look like errors come after it: 4"
    assert words in notes
    assert not any("sendBytes" in note for note in notes)
    assert any("sendBytes" in note for note in diagnose(tmp_path, text.replace(done, "x")).notes)


def test_the_stack_of_a_warning_looks_like_no_error(tmp_path: Path) -> None:
    noise = "[rank1]:[W604 01:44:31.1 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=5): Broken pipe\n"
    noise += "Exception raised from sendBytes at U.hpp:653 (most recent call first):\nframe #0: c10::Error::Error(x)\n"
    assert not any("look like errors" in note for note in diagnose(tmp_path, noise).notes)


def test_torchruns_agent_says_that_its_ranks_ended_well(tmp_path: Path) -> None:
    end = "I614 09:44:50.0 711 torch/distributed/elastic/agent/server/api.py:879] [default] worker group successfully finished. Waiting 300 seconds for other agents to finish.\n"
    report = diagnose(tmp_path, "[rank0] step 900 loss 1.4 world 4\n" + end)
    assert report.findings == () and any("line 2 of" in n and "ended well" in n for n in report.notes)


DONE = "step 90 loss 1.2\n0: [2031-01-02 03:00:00] training finished: 90 iterations, val ppl 5.8\nsaved the last checkpoint\n"
LIMIT = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2031-01-02T03:04:05 DUE TO TIME LIMIT ***\n"
SIGTERM = "W0206 12:00:07.4 7 torch/distributed/elastic/agent/server/api.py:719] Received 15 death signal, shutting down workers\n"


@pytest.mark.parametrize("stop", [LIMIT, SIGTERM, LIMIT + "srun: error: n1: tasks 0-1: Terminated\n"])
def test_a_stop_after_the_job_has_ended_is_no_failure(tmp_path: Path, stop: str) -> None:
    for words in (
        DONE,
        "step 9 loss 2.1\nTraining complete.\n",
        "Epoch 4: 100%|##| 9/9\n`Trainer.fit` stopped: `max_epochs=5` reached.\n",
    ):
        report = diagnose(tmp_path, words + stop)
        assert (report.state, report.findings, report.unjudged, report.state_text) == ("ended", (), None, None)
        assert any("after the job had ended well: stopped by" in note for note in report.notes)
    (tmp_path / "slurm.out").write_text(stop)
    report = diagnose_logs([str(tmp_path / "slurm.out"), str(tmp_path / "job.log")])
    assert report is not None and report.state == "failed"
    (tmp_path / "job.log").write_text(DONE)
    report = diagnose_logs([str(tmp_path / "slurm.out"), str(tmp_path / "job.log")])
    assert report is not None and report.state == "ended"


@pytest.mark.parametrize(
    "words",
    [
        "step 90 loss 1.2\n",
        "the preparing job finished\n",
        "step 90 loss 1.2\nEvaluation run finished\n",
        DONE + "Starting trial 2\n",
        DONE + "step 1 loss 2.0\n",
        "step 90 loss 1.2\nTraining complete, starting the evaluation\n",
        DONE + raised(0, "ValueError: no such bucket"),
    ],
)
def test_a_stop_in_a_job_that_has_not_ended_is_a_failure(tmp_path: Path, words: str) -> None:
    assert diagnose(tmp_path, words + LIMIT).state == "failed"


@pytest.mark.parametrize(("end", "well"), [("OK", True), ("OK (skipped=2)", True), ("FAILED (failures=1)", False)])
def test_failures_that_a_unittest_wanted_are_none(tmp_path: Path, end: str, well: bool) -> None:
    report = diagnose(tmp_path, raised(0, OOM) + f"{'-' * 70}\nRan 6 tests in 81.331s\n\n{end}\n")
    assert (report.findings == ()) is well and (report.state == "ended") is well


def test_the_log_of_one_of_several_ranks_does_not_show_how_the_job_ended(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.log").write_text(f"Rank: {rank}, world size: 2\nstep 9 loss 2.1\nTraining finished\n")
    one, both = (diagnose_logs([str(tmp_path / f"rank{r}.log") for r in range(n)]) for n in (1, 2))
    assert one is not None and one.unjudged is not None
    assert both is not None and both.unjudged is None
