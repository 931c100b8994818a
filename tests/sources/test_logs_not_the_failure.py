"""What programs print that is not the failure itself: victims' lines, samples of the data, servers that stop, tables of memory. All texts are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from distdiag.sources.logs.verdict import diagnose_logs
from tests.sources.test_logs import about, diagnose, only, raised, table

RDMA = "[default2]:node-c2:{pid}:91 [2] transport/net_ib.cc:17 NCCL WARN NET/IB : Got completion from peer 10.9.1.4<411> with status=12 opcode=0 len=0 vendor err 129 (Send)\n"
SEEN = "[default2]:[rank{r}]:[E520 {at} ProcessGroupNCCL.cpp:2271] [PG ID 3 PG GUID 11(DP) Rank 1]  failure detected by watchdog at work sequence id: 71 PG status: last enqueued work: 75, last completed work: 70\n"
REMOTE = "[default2]:[rank{r}]:[E520 {at} ProcessGroupNCCL.cpp:1899] [PG ID 3 PG GUID 11(DP) Rank 1] Process group watchdog thread terminated with exception: NCCL error: remote process exited or there was a network error, NCCL version 2.21.5\n"
WAITED = "[rank{r}]:[E520 {at} ProcessGroupNCCL.cpp:632] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=71, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=900000) ran for 900031 milliseconds before timing out.\n"
ENDED = table(10, -6, "Signal 6 (SIGABRT) received by PID 910", host="node-c2")


@pytest.mark.parametrize("seen", ["", SEEN])
def test_a_network_that_failed_before_the_others_timed_out_is_the_cause(tmp_path: Path, seen: str) -> None:
    (tmp_path / "node-c1.log").write_text("".join(WAITED.format(r=r, at="06:35:10.1") for r in range(8)))
    own = RDMA.format(pid=910) + (seen + REMOTE).format(r=10, at="06:20:09.5") + ENDED
    (tmp_path / "node-c2.log").write_text(own)
    report = diagnose_logs([str(tmp_path)])
    assert report is not None
    f = only(report)
    assert about(f) == ("rank_lost", "silent", (), (*range(8), 10))
    assert f.message.startswith("NCCL on rank 10 lost its RDMA connection to 10.9.1.4 (status 12: ")
    assert f.message.endswith("; ranks 0–7 then timed out in all_reduce #71")
    late = own.replace("06:20:09", "06:35:11")  # of the same time: the one may follow from the other
    (tmp_path / "node-c2.log").write_text(late)
    report = diagnose_logs([str(tmp_path)])
    assert report is not None and report.findings[0].kind != "rank_lost"


def test_a_rank_with_an_error_and_no_timeout_did_not_wait_until_one(tmp_path: Path) -> None:
    group = "[rank{r}]:[E520 06:35:10.2 ProcessGroupNCCL.cpp:2271] [PG ID 3 PG GUID 11(DP) Rank 0]  failure detected by watchdog at work sequence id: 71 PG status: last enqueued work: 75, last completed work: 70\n"
    text = WAITED.format(r=2, at="06:35:10.1") + group.format(r=2) + (SEEN + REMOTE).format(r=10, at="06:20:09.5")
    message = diagnose(tmp_path, text).findings[0].message
    assert "timed out after 15 minutes: rank 2 waited in it, rank 10 failed in it" in message


def test_a_number_on_a_node_is_no_rank_of_the_job(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, "[default0]:step 4 loss: 2.0\n" + RDMA.format(pid=77)))
    assert about(f) == ("rank_lost", "silent", (), ()) and f.message.startswith("NCCL on GPU 2 of node-c2 lost")


HCCL = "RuntimeError: The Inner error is reported as above. The process exits for this inner error, and the current working operator name is {}.\n"


def test_an_inner_error_of_hccl_follows_from_the_rank_that_failed(tmp_path: Path) -> None:
    waited = "".join(raised(r, HCCL.format("HcclReduceScatter").strip()) for r in range(4))
    full = raised(6, "RuntimeError: NPU out of memory. Tried to allocate 2.50 GiB (NPU 2; 60.97 GiB total capacity)")
    f = only(diagnose(tmp_path, waited + full))
    assert about(f) == ("rank_lost", "crashed", (6,), (0, 1, 2, 3)) and "failed with HCCL errors" in f.message
    own = only(diagnose(tmp_path, raised(1, HCCL.format("SoftmaxV2").strip())))  # of no other rank
    assert own.culprits == (1,)


# -- inference servers beside a trainer ---------------------------------------------------------------------------------

FULL = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB. GPU 3 has a total capacity of 79.11 GiB of which 1.10 GiB is free. Process 6611 has 69.00 GiB memory in use. Including non-PyTorch memory, this process has 9.00 GiB memory in use."
SERVES = "(EngineCore_1 pid=6611) INFO 03-04 [parallel_state.py:10] rank 0 in world size 1 is assigned as DP rank 0\n[Gloo] Rank 0 is connected to 0 peer ranks.\n"


def test_a_server_of_one_rank_is_not_rank_0_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(raised(3, FULL))
    (tmp_path / "serve.log").write_text(SERVES)
    report = diagnose_logs([str(tmp_path)])
    assert report is not None and report.world_size is None
    f = only(report)
    assert f.culprits == (3,) and ": process 6611 (EngineCore_1), which is not this rank, holds 69 GiB" in f.message
    assert "keep this job off that GPU" in f.advice and "set_device" not in f.advice


LOST = (
    "ERROR 03-04 05:06:08 [core_client.py:562] Engine core proc EngineCore_1 died unexpectedly, shutting down client.\n"
)
EXITS = "(EngineCore_1 pid=6611) INFO 03-04 05:06:07 [core.py:712] EngineCore exiting.\n"


def test_a_server_that_was_asked_to_exit_was_not_lost(tmp_path: Path) -> None:
    stopped = diagnose(tmp_path, "step 9 loss: 0.4\nINFO:     Shutting down\n" + EXITS + LOST)
    assert not stopped.findings and stopped.state == "running"
    assert only(diagnose(tmp_path, "step 9 loss: 0.4\n" + LOST + EXITS)).message.startswith("EngineCore_1 was lost")
    full = diagnose(tmp_path, raised(2, FULL) + EXITS + LOST)
    assert full.findings[0].culprits == (2,)


# -- text that is data --------------------------------------------------------------------------------------------------

SAMPLE = "inputs:\n<|im_start|>user\nIt dies with\n\nTraceback (most recent call last):\n  File \"fit.py\", line 4, in <module>\n    run()\nRuntimeError: CUDA error: an illegal memory access was encountered\nwhy?<|im_end|>\n<|im_start|>assistant\nA bug.<|im_end|>\n"  # fmt: skip


LLAMA = (("<|im_start|>", "<|start_header_id|>"), ("user\n", "user<|end_header_id|>\n"), ("<|im_end|>\n", "<|eot_id|>"))


@pytest.mark.parametrize("tokens", [(), LLAMA])
def test_a_sample_of_the_data_is_no_log(tmp_path: Path, tokens: tuple[tuple[str, str], ...]) -> None:
    sample = SAMPLE
    for token, other in tokens:
        sample = sample.replace(token, other)
    begun = sample + "\n***** Running training *****\n"
    assert not diagnose(tmp_path, begun).findings
    f = only(diagnose(tmp_path, begun + raised(5, "RuntimeError: CUDA error: misaligned address")))
    assert f.culprits == (5,) and "misaligned" in f.message
    quoted = (
        "INFO: Received request r-1: prompt: '<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n', params\n"
    )
    for before in (quoted, "<|im_start|>assistant\n"):  # they leave no turn open
        assert only(diagnose(tmp_path, before + raised(5, "RuntimeError: CUDA error: misaligned address"))).culprits
    assert only(diagnose(tmp_path, SAMPLE.replace("<|im_start|>user\n", ""))).kind == "rank_lost"


def caught(logged: str) -> str:
    scored = f'(Scorer pid=41) {logged}\n(Scorer pid=41) Traceback (most recent call last):\n(Scorer pid=41)   File "/u/judge.py", line 8, in check\n(Scorer pid=41) u.errors.SlowError: no answer\n'
    return "".join(f"(Driver pid=9) step:{i} - loss:0.4\n" for i in range(4)) + scored


def test_an_exception_that_a_worker_logged_is_past_when_the_job_went_on(tmp_path: Path) -> None:
    steps = [f"(Driver pid=9) step:{i} - loss:0.4\n" for i in range(4, 8)]
    logged = caught("ERROR:2031-03-04 05:06:07,8:no verdict for this answer")
    report = diagnose(tmp_path, logged + "".join(steps))
    assert not report.findings and "the job went on" in report.notes[0]
    assert only(diagnose(tmp_path, logged + steps[0])).kind == "rank_lost"
    assert only(diagnose(tmp_path, caught("scoring") + "".join(steps))).kind == "rank_lost"  # nobody logged it


# -- what else a log shows of a failure ---------------------------------------------------------------------------------

KILLED = "Memory on the node (IP: 10.5.0.6, ID: 7c) where the task (actor ID: 9b, name=q1WorkerDict_0:3, pid=58, memory used=40.00GB) was running was 480.00GB / 503.00GB (0.954), which exceeds the memory usage threshold of 0.95. Ray killed this worker\nPID\tMEM(GB)\tCOMMAND\n"


def test_the_process_that_held_most_of_a_hosts_memory_is_named(tmp_path: Path) -> None:
    users = "31\t{}\tray::DataServer.load\n58\t40.00\tray::WorkerDict.update\n59\t39.50\tray::WorkerDict.update\n"
    f = only(diagnose(tmp_path, KILLED + users.format("300.25")))
    assert "process 58 (q1WorkerDict_0:3) on 10.5.0.6 was killed" in f.message
    assert "; ray::DataServer.load (pid 31) held most of it: 300 GB, the next process 40 GB (line 3)" in f.message
    assert "see what ray::DataServer.load (pid 31) keeps" in f.advice and "DataLoader" not in f.advice
    f = only(diagnose(tmp_path, KILLED + users.format("41.00")))
    assert "held most" not in f.message and "more host memory" in f.advice


SCALE = "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.\n"


def test_tracebacks_of_all_ranks_without_names_are_of_all_ranks(tmp_path: Path) -> None:
    frames = 'Traceback (most recent call last):\n  File "/w/fit.py", line 3, in <module>\n'
    twice = "".join(line * 2 for line in frames.splitlines(keepends=True)) + "    raise Exception(\n" * 2 + SCALE * 2
    world = "world_size=4 nodes=1 \n"
    f = only(diagnose(tmp_path, world.replace(" nodes", ", num_nodes") + twice + (frames + SCALE) * 2))
    assert about(f) == ("nonfinite", "gradient", (), (0, 1, 2, 3)) and f.certainty == "suspected"
    assert f.message.startswith("all 4 ranks got gradients that overflow fp16")
    f = only(diagnose(tmp_path, world.replace(" nodes", ", num_nodes") + twice))
    assert about(f)[2:] == ((), ()) and f.message.endswith("(2 times)")


@pytest.mark.parametrize(("signal", "joins"), [("Segmentation fault", True), ("Aborted", False)])
def test_a_loaders_worker_and_its_fault_are_one_event(tmp_path: Path, signal: str, joins: bool) -> None:
    fault = 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x0e (most recent call first):\n  File "/u/clips.py", line 31 in decode\n\n'
    lost = raised(4, f"RuntimeError: DataLoader worker (pid 333) is killed by signal: {signal}. ")
    report = diagnose(tmp_path, fault + lost)
    assert len(report.findings) == 1 + (not joins)
    f = next(f for f in report.findings if f.culprits)
    assert f.culprits == (4,) and f"(signal: {signal})" in f.message and "oom" not in f.advice
    assert ("; the worker failed at clips.py:31 in decode" in f.message) is joins


UNIQUE = "torch.distributed.DistBackendError: [{r}] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: wait timeout after 300000ms, keys: /default_pg/0//cuda//0"
BAR = "Packing samples (num_proc=4):  {p}%|#         | {n}/90000 [05:02<40:00, 9.9 examples/s]\n"


def test_a_first_collective_that_waits_for_the_rank_that_goes_first(tmp_path: Path) -> None:
    def lines(helper: str) -> str:
        frame = f'  File "/w/data.py", line 9, in {helper}\n'
        failed = (raised(r, UNIQUE.format(r=r)).replace("    step()\n", f"    step()\n[rank{r}]: {frame}") for r in (1, 2, 3))  # fmt: skip
        return BAR.format(p=10, n=9000) + "".join(failed) + BAR.format(p=11, n=9900)

    f = only(diagnose(tmp_path, lines("local_main_process_first")))
    assert about(f) == ("timeout", "late_rank", (0,), (1, 2, 3)) and "inside local_main_process_first" in f.message
    assert "(`Packing samples (num_proc=4)`: 9,900 of 90,000" in f.message and "before the job starts" in f.advice
    assert "inside" not in only(diagnose(tmp_path, lines("setup"))).message
