"""The first fact of a log before its echoes; runs, containers and groups kept apart; ends that no row knows. All texts are made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distdiag.sources.logs.verdict import diagnose_logs
from tests.sources.test_logs import diagnose, only, raised, timeout

REMOTE = "torch.distributed.DistBackendError: NCCL error in: U.hpp:8, remote process exited or there was a network error, NCCL version 2.21.5"
NPU = "RuntimeError: npuSynchronizeDevice:x.ts:4 NPU function error: AclrtSynchronizeDeviceWithTimeout, error code is 507048"
NOTIFY = "[rank{}]: EI0002: The Notify register has not received the Notify record from remote rank [2].base information: [tag[AllGather_group_name_0]]\n"
LOST = "[rank{}]:     Cluster Exception Location[IP/ID]:[10.8.0.4/2], ExceptionType:[Heartbeat Lost Occurred]\n"
JAX = "{0}: F0302 08:00:01.1 9 client.h:77] UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n{0}: /job:jax_worker/replica:0/task:3\n"
POD = "Name:             fit-2\n    State:          Running\n    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137\n"
NODE = "ray.exceptions.ActorDiedError: x\n\tactor_id: 5f\n\tpid: 71\n\tnamespace: n\n\tip: 10.9.0.6\nThe actor died because its node has died. Node Id: c1ff\n"
RUN = "(W pid=71, ip=10.9.0.6) [rank2] step 3\n(W pid=72, ip=10.9.0.6) [rank3] step 3\n(W pid=70, ip=10.9.0.4) [rank0] step 3\n"
EXIT = "E0302 08:01:00.1 5 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 0 (pid: 53) of binary: p\n"
STEPS = "".join(f"step {n} loss 2.1\n" for n in (0, 500, 1000, 1500))
BUILD = raised(1, "RuntimeError: Error building extension 'fused'") + raised(
    0, "ImportError: /c/torch_extensions/fused.so: cannot open shared object file"
)


@pytest.mark.parametrize(
    ("text", "kind", "culprits", "words"),
    [
        (raised(0, NPU) + NOTIFY.format(0) + raised(1, NPU) + NOTIFY.format(1) + LOST.format(1), "timeout/late_rank", (2,), "AllGather heartbeat 10.8.0.4"),
        ("".join(map(JAX.format, (0, 1, 2))) + "srun: error: t1: task 2: Aborted\nsrun: error: t1: task 3: Killed\n", "rank_lost/silent", (3,), "heartbeats"),
        (raised(4, "RuntimeError: NCCL Error 6: remote process exited or there was a network error") + raised(5, "KeyError: 'x'"), "rank_lost/crashed", (5,), "KeyError"),
        (POD + raised(4, REMOTE), "rank_lost/killed", (), "fit-2 memory"),
        (RUN + NODE + timeout(0), "rank_lost/silent", (2, 3), "node 10.9.0.6 (ranks 2, 3)"),
        (raised(0, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.") + EXIT + STEPS + raised(1, "KeyError: 'y'"), "rank_lost/crashed", (1,), "KeyError"),
        (raised(0, "RuntimeError: cancelled") + raised(2, "v.EngineDeadError: see above") + raised(1, "KeyError: 'z'"), "rank_lost/crashed", (1,), "KeyError"),
        (BUILD, "rank_lost/crashed", (1,), "Error building extension"),
        ("ssh: Could not resolve hostname w-2.svc: Name or service not known\nORTE was unable to reliably start one or more daemons.\n", "rank_lost/configuration", (), "ssh resolve w-2.svc"),
        (raised(1, "ImportError: /x.so: undefined symbol: _Z3") + "[rank0]: ImportError: /x.so: undefined symbol: _Z3\n", "rank_lost/configuration", (), "symbol run.py:7"),
        ("srun: error: Task launch for StepId=7.0 failed on node g11: Job credential expired\nsrun: error: Timed out waiting for job step to complete\n", "rank_lost/configuration", (), "g11 credential"),
        ("subprocess.CalledProcessError: Command '['p', 't.py']' died with <Signals.SIGSEGV: 11>.\n", "rank_lost/killed", (), "SIGSEGV"),
        ("step 1 loss 2.0\nSegmentation fault (core dumped)\n", "rank_lost/killed", (), "SIGSEGV"),
        ("slurmstepd: error: Exceeded job memory limit\n", "rank_lost/killed", (), "memory"),
        ("step 1 loss 2.0\n[rank3]:[E302 08:00:01.1 P.cpp:6] [Rank 3] Watchdog caught collective opera", "timeout/late_rank", (), "rank 3 ends inside"),
        (raised(0, "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 6/8 clients joined.") + raised(1, "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Connection reset by peer"), "rank_lost/silent", (), "2 of 8 ranks had not joined"),
        ("step 1 loss 2.0\nsbatch: error: Batch job submission failed: Invalid account\n", "rank_lost/crashed", (), "Invalid account"),
    ],
)  # fmt: skip
def test_the_first_fact_comes_before_its_echoes(
    tmp_path: Path, text: str, kind: str, culprits: tuple[int, ...], words: str
) -> None:
    f = only(diagnose(tmp_path, text))
    assert (f"{f.kind}/{f.cause}", f.culprits) == (kind, culprits), f
    assert all(word in f.message for word in words.split()), f.message


@pytest.mark.parametrize(
    "text",
    [
        "I0302 a.py:8] [default] worker group successfully finished. Waiting 300 seconds for other agents to finish.\nThe node 'b_2_0' has failed to send a keep-alive heartbeat to the rendezvous '7' due to an error of type RendezvousConnectionError.\n",
        "Exception ignored in: <function Pool.__del__ at 0x7f>\nAttributeError: closed\n",
        "wandb: ERROR Error while calling the API: 502\n",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n",
    ],
)  # fmt: skip
def test_what_follows_the_end_of_a_healthy_job_is_no_failure(tmp_path: Path, text: str) -> None:
    assert diagnose(tmp_path, STEPS + text).findings == ()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("=>> PBS: job killed: walltime 86412 exceeded limit 86400\n", "walltime"),
        ("TERM_RUNLIMIT: job killed after reaching LSF run time limit.\n", "run time limit"),
    ],
)
def test_other_schedulers_limits(tmp_path: Path, line: str, words: str) -> None:
    report = diagnose(tmp_path, STEPS + line)
    assert report.findings == () and words in (report.state_text or "")


@pytest.mark.parametrize(
    ("text", "advice", "not_this"),
    [
        ("ssh: Could not resolve hostname w-2.svc: Name or service not known\n", "getent hosts w-2.svc", "MASTER_ADDR"),
        (raised(1, "op_builder.CUDAMismatchException: Installed CUDA version 11.5 does not match the version torch was compiled with 12.1"), "torch.version.cuda", "traceback"),
    ],
)  # fmt: skip
def test_what_to_correct_on_a_host(tmp_path: Path, text: str, advice: str, not_this: str) -> None:
    f = only(diagnose(tmp_path, text))
    assert advice in f.advice and not_this not in f.advice


# the thread that copies batches has no rank; its process then raises that it ended
PINNED = "Exception in thread Thread-7 (_pin_memory_loop):\n" + raised(0, "{}", prefix="").replace("in main", "in run")
PIN_ENDED = raised(2, "RuntimeError: Pin memory thread exited unexpectedly")


def test_what_a_thread_raised_and_the_report_of_its_rank_are_one_failure(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, PINNED.format("RuntimeError: received 0 items of ancdata") + PIN_ENDED))
    assert f.culprits == (2,) and "ancdata" in f.message and "ulimit -n" in f.advice
    f = only(diagnose(tmp_path, PIN_ENDED))
    assert f.culprits == (2,) and "Pin memory thread" in f.message


def test_ranks_that_wait_after_a_launchers_line_are_of_the_same_run(tmp_path: Path) -> None:
    killed = EXIT.replace("exitcode: 1", "exitcode: -9")
    f = only(diagnose(tmp_path, killed + STEPS + timeout(1) + timeout(2)))
    assert "killed by SIGKILL" in f.message


def in_group(rank: int, group: str, member: int, op: str = "ALLREDUCE") -> str:
    """Return a timeout in a group, of the member with this number."""
    told = f"[rank{rank}]:[E302 08:00:01.2 P.cpp:9] [PG ID 3 PG GUID {group} Rank {member}] failure detected by watchdog at work sequence id: 40 PG status: last enqueued work: 41, last completed work: 39\n"
    return timeout(rank).replace("ALLREDUCE", op) + told


@pytest.mark.parametrize("step", [1, 8])
def test_waits_lead_through_groups_to_the_rank_that_reports_nothing(tmp_path: Path, step: int) -> None:
    data = [in_group(2 * step * i, "4(dp)", i) for i in (0, 1, 3)] + [
        in_group(2 * step * i + step, "5(dp)", i) for i in (0, 1, 3)
    ]
    f = only(diagnose(tmp_path, "".join(data) + in_group(4 * step, "9(tp)", 0)))
    assert f.culprits == (5 * step,) and "without rank" in f.message


def test_a_first_stage_that_sends_nothing(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, "".join(in_group(1 + 4 * i, "6(pp)", i, "RECV") for i in (1, 2, 3))))
    assert f.culprits == (1,) and f.certainty == "suspected"


def test_the_exception_in_a_json_record(tmp_path: Path) -> None:
    steps = "".join(json.dumps({"t": "2031-03-02T08:00:00Z", "rank": r, "msg": "step 5"}) + "\n" for r in range(3))
    error = {"t": "2031-03-02T08:00:01Z", "rank": 2, "lvl": "ERROR", "msg": "failed", "exc": raised(2, "OSError: [Errno 28] No space left on device", prefix="")}  # fmt: skip
    f = only(diagnose(tmp_path, steps + json.dumps(error) + "\n"))
    assert f.culprits == (2,) and "No space" in f.message


def test_two_launchers_with_one_local_rank(tmp_path: Path) -> None:
    for node in ("a", "b"):
        (tmp_path / f"{node}.log").write_text(
            EXIT.replace("exitcode: 1", "exitcode: -9" if node == "b" else "exitcode: 1")
        )
    report = diagnose_logs([str(tmp_path)])
    assert report is not None and only(report).message.startswith("local rank 0 of b.log was killed")


@pytest.mark.parametrize("prefix", ["[rank2]: ", "2: ", "Rank 2: "])
def test_the_last_line_of_the_rank_that_the_others_wait_for(tmp_path: Path, prefix: str) -> None:
    said = "".join(f"{prefix}shard {n} of 40\n" for n in range(3))
    f = only(diagnose(tmp_path, said + "".join(timeout(r) for r in (0, 1, 3, 4))))
    assert f.culprits == (2,) and "its last line is `" in f.message and "shard 2 of 40`" in f.message
    ruled = said + f"{prefix}=====\n" + "".join(timeout(r) for r in (0, 1, 3, 4))
    assert "shard 2 of 40`" in only(diagnose(tmp_path, ruled)).message


def test_a_file_with_the_lines_of_several_ranks_is_not_that_of_the_one_in_its_name(tmp_path: Path) -> None:
    report = diagnose(tmp_path, "".join(timeout(r) for r in (0, 1, 3)) + "fit.py FAILED\n", "job_rank2.log")
    assert "FAILED" not in only(report).message


def test_wrong_arguments_and_a_rank_before_each_line(tmp_path: Path) -> None:
    wrong = "".join(f"[rank{r}]: fit.py: error: unrecognized arguments: --local-rank={r}\n" for r in (0, 1))
    f = only(diagnose(tmp_path, wrong))
    assert (f.cause, f.culprits, f.victims) == ("configuration", (), (0, 1)) and "LOCAL_RANK" in f.advice
    f = only(diagnose(tmp_path, raised(1, "ValueError: The other worker has failed") + raised(3, "KeyError: 'x'")))
    assert f.culprits == (3,)


@pytest.mark.parametrize("stamp", ["2031-03-02T09:00:00.123456Z ", "2031-03-02T09:00:00+01:00 "])
def test_a_time_that_a_container_puts_in_front_hides_nothing(tmp_path: Path, stamp: str) -> None:
    text = "".join(map(JAX.format, (0, 1, 2))) + "srun: error: t1: task 2: Aborted\n"
    assert only(diagnose(tmp_path, "".join(f"{stamp}{line}\n" for line in text.splitlines()))).culprits == (3,)
    node = "".join(f"{stamp}{line}\n" for line in (RUN + NODE + timeout(0)).splitlines())
    assert only(diagnose(tmp_path, node)).culprits == (2, 3)
