"""Logs of Horovod, HCCL, Open MPI, AMD's driver and the kernel, with invented ranks and hosts; and who wrote a log of a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from distdiag.cli import main
from distdiag.sources.logs.verdict import diagnose_logs
from tests.jobs import unwrapped
from tests.sources.test_logs import about, diagnose, only, raised, timeout

HEARTBEAT = (
    "[rank{q}]:[E ProcessGroupNCCL.cpp:1282] [PG 0 Rank {q}] Heartbeat monitor timed out! Process will be terminated.\n"
)
SCRIPT = '  File "/w/train.py", line {line}, in {name}\n    run()\n'


@pytest.mark.parametrize(
    ("text", "expected", "says"),
    [
        (
            "[1,0]<stderr>:Stalled ops:g.2 [missing ranks: 3] [ready ranks: 0, 1, 2]\n",
            ("timeout", "late_rank", (3,), (0, 1, 2)),
            "rank 3 did not submit",
        ),
        (
            "RuntimeError: The server socket has failed to listen on any local network address. port: 29571, useIpv6: false, code: -98, name: EADDRINUSE\n",
            ("rank_lost", "configuration", (), ()),
            "could not listen: port 29571 is in use",
        ),
        (
            "RuntimeError: The server socket has failed to listen on any local network address. The server socket has failed to bind to [::]:29571 (errno: 98)\n",
            ("rank_lost", "configuration", (), ()),
            "could not listen: port 29571 is in use",
        ),
        (
            "OSError: EADDRINUSE\n",
            ("rank_lost", "configuration", (), ()),
            "could not listen: the port is in use",
        ),
        (
            raised(0, "RuntimeError: [gloo/transport/tcp/listener.cc:97] bind: Address already in use"),
            ("rank_lost", "configuration", (0,), ()),
            "rank 0 could not listen: the port is in use at run.py:7",
        ),
        (
            raised(
                2,
                "OSError: [Errno 98] error while attempting to bind on address ('0.0.0.0', 8017): address already in use",
            ),
            ("rank_lost", "configuration", (2,), ()),
            "rank 2 could not listen: port 8017 is in use",
        ),
        (
            "[1,7]<stderr>:[n03:00411] Signal: Segmentation fault (11)\n",
            ("rank_lost", "crashed", (7,), ()),
            "died in native code: Segmentation fault",
        ),
        (
            "HW Exception by GPU node-4 (Agent handle: 0x12) reason :GPU Hang\nAborted (core dumped)\n",
            ("rank_lost", "crashed", (), ()),
            "had a GPU error: HW Exception by GPU node-4",
        ),
        (
            "kernel: NVRM: Xid (PCI:0000:1b:00): 45, pid=77, name=python, Ch 00000002 caused by previous Xid 149\n" * 2,
            ("gpu", "xid", (), ()),
            "the host has a GPU with Xid 149 at PCI 0000:1b:00",
        ),
        (
            "[rank2]: RuntimeError: call: HcclBroadcast, error code is 9\n",
            ("rank_lost", "crashed", (), (2,)),
            "HCCL failed on rank 2",
        ),
        (HEARTBEAT.format(q=0) + HEARTBEAT.format(q=3), ("stall", "unknown", (), (0, 3)), "the watchdog of ranks 0, 3"),
        (
            "Exception: process 5 terminated with signal SIGKILL\n",
            ("rank_lost", "killed", (5,), ()),
            "rank 5 was killed",
        ),
        (
            "RuntimeError: CUDA error: out of memory\n",
            ("rank_lost", "crashed", (), ()),
            "a process ran out of GPU memory",
        ),
    ],
    ids=[
        "horovod",
        "port",
        "port_of_older_torch",
        "port_unknown",
        "port_of_gloo",
        "port_of_a_server",
        "openmpi",
        "amd",
        "xid_45",
        "hccl",
        "heartbeat",
        "mp_spawn",
        "cuda_oom",
    ],
)
def test_messages_of_other_libraries(
    tmp_path: Path, text: str, expected: tuple[str, str | None, tuple[int, ...], tuple[int, ...]], says: str
) -> None:
    f = only(diagnose(tmp_path, text))
    assert about(f) == expected and says in f.message


def test_lines_that_a_terminal_wrapped_are_joined(tmp_path: Path) -> None:
    text = "".join(timeout(q) for q in range(4))
    wrapped = "\n".join(line[i : i + 132] for line in text.splitlines() for i in range(0, len(line), 132)) + "\n"
    f = only(diagnose(tmp_path, "start\n" + wrapped))
    assert f.victims == (0, 1, 2, 3) and f.message.startswith("all_reduce #40 timed out after 10 minutes")
    assert [int(e.rpartition(":")[2]) for e in f.evidence] == [3, 5, 7, 9]  # the last part of each


def several(tmp_path: Path, files: dict[str, str]) -> list[tuple[str, str, tuple[int, ...]]]:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    report = diagnose_logs([str(tmp_path)])
    assert report is not None
    return [(f.message, f.certainty, f.culprits) for f in report.findings]


@pytest.mark.parametrize("name", ["node{}.log", "host-{}.log", "job-worker-{}.log", "pod_{}.txt", "out{}.log"])
def test_the_number_of_a_node_is_no_rank(tmp_path: Path, name: str) -> None:
    exit_of = "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 3 (pid: 71) of binary: python\n"
    found = several(tmp_path, {name.format(0): exit_of, name.format(1): "INFO ends, local_rank: 1\n"})
    ((message, certainty, culprits),) = found
    assert message.startswith("local rank 3") and certainty == "suspected" and culprits == ()


def test_a_local_rank_is_named_as_one_unless_the_job_has_one_node(tmp_path: Path) -> None:
    text = "[default3]:RuntimeError: CUDA error: an illegal memory access was encountered\n"
    f = only(diagnose(tmp_path, text))
    assert (f.message.split(" had")[0], f.certainty, f.culprits) == ("local rank 3", "suspected", (3,))
    alone = "[default3]:n1:91:91 [3] NCCL INFO comm 0x1 rank 3 nranks 4 cudaDev 3 - Init COMPLETE\n" + text
    f = only(diagnose(tmp_path, alone))
    assert (f.message.split(" had")[0], f.certainty, f.culprits) == ("rank 3", "proved", (3,))


def trace(name: str, error: str, line: int = 9) -> str:
    return "Traceback (most recent call last):\n" + SCRIPT.format(line=line, name=name) + error + "\n"


def test_different_exceptions_of_two_ranks_are_two_findings(tmp_path: Path) -> None:
    found = several(tmp_path, {f"rank{q}.log": trace("main", f"ValueError: bad {q}", 10 + q) for q in (0, 1)})
    assert [(m.partition(" at ")[0], c) for m, _, c in found] == [
        ("rank 0 raised ValueError: bad 0", (0,)),
        ("rank 1 raised ValueError: bad 1", (1,)),
    ]


@pytest.mark.parametrize(
    ("first", "last", "says", "do"),
    [
        ("KeyError: 'vocab'", "ValueError: no vocabulary in x.json", "raised ValueError: no vocabulary in x.json, because of KeyError: 'vocab'", ""),
        ("OSError: [Errno 28] No space left on device", "FileNotFoundError: [Errno 2] No such file: 'p.tmp'", "raised OSError: [Errno 28] No space left on device at {0}; while handling that, it raised FileNotFoundError", "make room"),
        ("ValueError: odd", "OSError: [Errno 28] No space left on device", "raised ValueError: odd at {0}; while handling that, it raised OSError", "make room"),
        ("queue.Empty", "RuntimeError: DataLoader worker (pid(s) 8) exited unexpectedly", "raised RuntimeError: DataLoader worker", ""),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.", "RuntimeError: CUDA error: unspecified launch failure", "ran out of GPU memory at {0}", ""),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.", "Exception: capture failed: CUDA out of memory. Tried to allocate 1.00 GiB.", "ran out of GPU memory at {0}", ""),
    ],
)  # fmt: skip
def test_of_a_chain_of_exceptions_the_first_is_the_reason(
    tmp_path: Path, first: str, last: str, says: str, do: str
) -> None:
    text = trace("load", first, 31) + "\nDuring handling of the above exception, another exception occurred:\n\n"
    f = only(diagnose(tmp_path, text + trace("<module>", last, 9), "rank1.log"))
    site = f"{f.where[0].file.rpartition('/')[2]}:31 in load"
    assert says.format(site) in f.message and do in f.advice


def test_the_place_of_a_cause_is_in_the_traceback_that_raised_it(tmp_path: Path) -> None:
    text = (
        trace("load", "ValueError: odd", 31)
        + "\nThe above exception was the direct cause of the following exception:\n\n"
    )
    f = only(diagnose(tmp_path, text + trace("<module>", "RuntimeError: step failed", 9), "rank1.log"))
    assert "raised RuntimeError: step failed, because of ValueError: odd at" in f.message and f.where[0].line == 31


@pytest.mark.parametrize("label", ["", "worker-0: "])
def test_hccls_first_code_names_the_rank_and_all_that_followed_are_counted(tmp_path: Path, label: str) -> None:
    code = (
        "EI0006: 2031-03-02-09:02:00.1 Getting socket times out. Reason: Remote Rank did not send the data in time.\n"
    )
    first = "EJ0001: 2031-03-02-09:00:00.1 Failed to initialize the HCCP process. Reason: Maybe the last training process is running.\n"
    text = trace("main", NPU.format(q=9).rstrip()) + first
    text += "".join(trace("main", NPU.format(q=q).rstrip()) + code for q in (*range(9), 10, 11))
    f = only(diagnose(tmp_path, "".join(label + line for line in text.splitlines(keepends=True))))
    assert f.culprits == (9,) and f.victims == (*range(9), 10, 11)


@pytest.mark.parametrize(("name", "steps", "ended"), [("evaluate", 900, 0), ("<module>", 900, 0), ("<module>", 9, 1)])
def test_an_exception_after_which_a_job_makes_more_steps_than_are_in_flight_ended_none(
    tmp_path: Path, name: str, steps: int, ended: int
) -> None:
    more = "".join(f"step {i}, an Error rate of 0.1\n" for i in range(steps))
    assert len(diagnose(tmp_path, trace(name, "ValueError: empty") + more).findings) == ended


def test_a_source_line_in_a_traceback_is_no_message(tmp_path: Path) -> None:
    text = (
        "[rank4]: Traceback (most recent call last):\n"
        '[rank4]:   File "/w/pynccl.py", line 257, in check\n'
        '[rank4]:     raise RuntimeError(f"NCCL error: {text}")\n'
        "[rank4]: RuntimeError: NCCL error: unhandled cuda error\n"
    )
    assert (
        "NCCL failed on rank 4 at pynccl.py:257 in check: unhandled cuda error"
        in only(diagnose(tmp_path, text)).message
    )


def test_an_unknown_error_inside_a_collective_is_only_suspected(tmp_path: Path) -> None:
    text = (
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/w/train.py", line 7, in step\n'
        "[rank1]:     dist.all_reduce(x)\n"
        '[rank1]:   File "/v/torch/distributed/distributed_c10d.py", line 2501, in all_reduce\n'
        "[rank1]:     work = group.allreduce([tensor], opts)\n"
        "[rank1]: RuntimeError: acmeccl: status 17\n"
    )
    f = only(diagnose(tmp_path, text))
    assert (f.culprits, f.certainty) == ((1,), "suspected") and "read the others' logs first" in f.advice


def test_a_log_without_a_known_message_shows_its_last_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "workerlog.0").write_text("rank=0: starting\n2026-01-01 E coordination: Error: task 37 left\nepoch 3\n")
    (tmp_path / "job.e12345").write_text("nothing here\n")
    assert main(["diagnose", str(tmp_path)]) == 3
    shown = unwrapped(capsys.readouterr().out)
    assert shown.startswith("no verdict: no error that distdiag knows in 2 logs")
    assert "look like errors: line 2 of workerlog.0: 2026-01-01 E coordination: Error: task 37 left" in shown


def test_oneccls_prefix_names_the_process_that_hydra_names_with_its_rank(tmp_path: Path) -> None:
    """oneCCL logs an exception, and C++ prints it again without a name: it is one failure."""
    what = "oneCCL: ze_call.cpp:2 EXCEPTION: ze error, code: ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY\n"
    text = "[rank=0]: step 3\n[rank=5]: step 3\n2031:03:02-09:00:00:(7105) |CCL_ERROR| worker.cpp:3 caught: " + what
    text += f"terminate called after throwing an instance of 'x'\n  what():  {what}"
    pals = diagnose(
        tmp_path, text + "x1.y: rank 5 died from signal 6 and dumped core\nx2.y: rank 2 died from signal 15\n"
    )
    assert only(pals).culprits == (5,) and "xpu-smi" in only(pals).advice
    nobody = only(diagnose(tmp_path, text.replace("(7105) ", "")))
    assert nobody.message == "a process ran out of GPU memory inside oneCCL, not in torch's allocator"
    for rank, signal in ((5, 6), (2, 9)):
        text += f"=   RANK {rank} PID {7100 + rank} RUNNING AT n{rank}\n=   KILLED BY SIGNAL: {signal} (x)\n"
    f = only(diagnose(tmp_path, text))
    assert f.culprits == (5,) and f.message.startswith("rank 5 on n5 ran out of GPU memory inside oneCCL")


NPU = "RuntimeError: [ERROR] HCCL error in: torch_npu/csrc/x.cpp:5\n[ERROR] 2031-03-02-09:0{q}:00 (PID:41{q}, Device:{q}, RankID:{q}) ERR02200 DIST call hccl api failed.\n"


def test_all_lines_of_an_exception_of_torch_npu_are_of_the_rank_that_one_names(tmp_path: Path) -> None:
    busy = "EJ0001: 2031-03-02-09:02:00.1 Failed to initialize the HCCP process. Reason: Maybe the last training process is running.\n"
    late = "EI0006: [PID: 41{q}] 2031-03-02-09:0{q}:00.1 Getting socket times out. Reason: Remote Rank did not send the data\n"
    waits = "".join((NPU + late).format(q=q) for q in (3, 4))
    f = only(diagnose(tmp_path, raised(2, NPU.format(q=2).strip(), prefix="") + busy + waits))
    assert about(f) == ("rank_lost", "crashed", (2,), (3, 4))
    assert "could not start HCCL" in f.message and "ranks 3, 4 then timed out" in f.message
    f = only(diagnose(tmp_path, raised(2, "RuntimeError: [ERROR] HCCL error in: x.cpp:5\n[rank2]: " + busy)))
    assert f.culprits == (2,) and "could not start HCCL" in f.message
    f = only(diagnose(tmp_path, waits))
    assert (f.kind, f.victims) == ("timeout", (3, 4))


PORT = "[ERROR] HCCL(4{q},python3):2031-03-02-09:00:57.070.463 [hccl_socket.cc:110] [4{q}][HcclSocket][Listen] socket type[1], listen on ip[10.0.2.9] and specific port[16666] fail. Please check the port status and whether the port is being used by other process.\n"
INIT = "RuntimeError: createHCCLComm:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:2043 HCCL function error: HcclCommInitRootInfoConfig(numRanks, &rootInfo, rank, config, &(comm->hcclComm_)), error code is {code}"
HEAD = (
    "[rank{q}]: [ERROR] 2031-03-02-09:0{m}:58 (PID:4{q}, Device:{q}, RankID:{q}) ERR02200 DIST call hccl api failed.\n"
)
TIMES_OUT = "[rank{q}]: EI0006: [PID: 4{q}] 2031-03-02-09:02:57.1 Getting socket times out. Reason: 1. The remote does not initiate a connect request.\n"


def test_a_port_that_hccl_could_not_open_is_of_the_rank_whose_pid_its_line_has(tmp_path: Path) -> None:
    text = PORT.format(q=4) + raised(4, INIT.format(code=19)) + HEAD.format(q=4, m=0)
    for q in (0, 1, 2, 3, 5, 6, 7):
        text += raised(q, INIT.format(code=9)) + HEAD.format(q=q, m=2) + TIMES_OUT.format(q=q)
    f = only(diagnose(tmp_path, text))
    assert about(f) == ("rank_lost", "configuration", (4,), (0, 1, 2, 3, 5, 6, 7))
    assert "port 16666 is in use" in f.message and "HCCL_NPU_SOCKET_PORT_RANGE" in f.advice


def test_an_error_with_another_code_is_another_error(tmp_path: Path) -> None:
    """Also where the code is in a part of the text that a finding leaves out."""
    long = (
        "RuntimeError: " + "the call of the library that makes the communicator has failed, " * 4 + "error code is {}"
    )
    texts = [raised(q, long.format(19 if q == 2 else 9)) for q in range(3)]
    assert {f.culprits for f in diagnose(tmp_path, "".join(texts)).findings} == {(2,), (0, 1)}
    f = only(diagnose(tmp_path, "".join(raised(q, long.format(9)) for q in range(3))))
    assert f.message.startswith("all 3 ranks in the log raised the same error")


@pytest.mark.parametrize(("late_s", "culprits"), [(50, (2,)), (4, ())])
def test_a_rank_that_raised_an_error_long_before_the_others(
    tmp_path: Path, late_s: int, culprits: tuple[int, ...]
) -> None:
    def stamped(q: int, second: int) -> str:
        lines = raised(q, "ValueError: the shards differ").splitlines(keepends=True)
        return "".join(f"2031-03-02T09:00:{second:02}.1Z {line}" for line in lines)

    f = only(diagnose(tmp_path, stamped(0, 1 + late_s) + stamped(1, 2 + late_s) + stamped(2, 1)))
    assert f.culprits == culprits and f.certainty == ("suspected" if culprits else "proved")
    assert ("same error" in f.message) is not bool(culprits)
    assert ("ranks 0, 1 raised it" in f.message) is bool(culprits)


BARRIER = "jaxlib.xla_extension.XlaRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. {}\n"
TASKS = "/job:w/replica:0/task:2\n/job:w/replica:0/task:1\n\nMore of gRPC: /job:w/replica:0/task:0\n"


@pytest.mark.parametrize(
    "text",
    [
        "Barrier_id: PjRT_Client_Connect. Timed out task names:\n" + TASKS,
        "Id: Start::0. This usually happens when a task is late.\n# of tasks that reached the barrier: 1/3.\n"
        "The first task at the barrier: /job:w/replica:0/task:0. Some timed out task names:\n" + TASKS,
    ],
)
def test_the_processes_that_never_came_to_a_barrier_of_jax(tmp_path: Path, text: str) -> None:
    f = only(diagnose(tmp_path, raised(0, BARRIER.format(text), prefix="")))
    assert about(f)[:3] == ("timeout", "late_rank", (1, 2)) and "num_processes" in f.advice


@pytest.mark.parametrize(
    ("what", "advice"),
    [
        ("BlockingIOError: [Errno 11] Unable to open file (unable to lock file, errno = 11, error message = 'Resource temporarily unavailable')", "locked that file"),
        ("OSError: fork: Resource temporarily unavailable", "ulimit -u"),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "read its traceback"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'o/tmp-9' -> 'o/9'", "renamed it first"),
        ("ImportError: /n/.triton/cache/ABC/launch.so: cannot stat shared object: Stale file handle", "TRITON_CACHE_DIR"),
    ],
)  # fmt: skip
def test_what_an_error_of_a_file_calls_for(tmp_path: Path, what: str, advice: str) -> None:
    assert advice in only(diagnose(tmp_path, raised(1, what))).advice


def test_a_loss_scale_at_its_minimum_is_no_crash(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, raised(1, "Exception: Current loss scale already at minimum - cannot decrease it.")))
    assert about(f)[:3] == ("nonfinite", "gradient", (1,)) and "bf16" in f.advice


def test_a_first_node_whose_name_means_each_node_itself(tmp_path: Path) -> None:
    launch = "  min_nodes        : {}\n  master_addr=localhost.localdomain\n"
    lost = "[E socket.cpp:6] [c10d] The client socket has failed to connect to any network address of (localhost.localdomain, 426).\n"
    f = only(diagnose(tmp_path, launch.format(2) + lost))
    assert "the first of 2 nodes was named localhost.localdomain" in f.message and "--local-addr" in f.advice
    assert "--local-addr" not in only(diagnose(tmp_path, launch.format(1) + lost)).advice


def test_the_rank_that_goes_first_is_late_for_hccl_too(tmp_path: Path) -> None:
    """Its bar moves on while the others wait for a connection in `main_process_first`; it was not named."""
    bar = "Running tokenizer on dataset: {}%|###  | {}000/412000 [02:22<04:03, 1067.14 examples/s]\n"
    what = "RuntimeError: create:build/x.ts:69 HCCL function error: hcclCommInitRootInfoConfig(n), error code is 4"
    inside = '[rank{q}]:   File "/x/site-packages/transformers/training_args.py", line 2471, in main_process_first\n'
    inside += '[rank{q}]:   File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3703, in barrier\n'
    text = "".join(f"Process rank: {q}, world size: 4, device: npu:{q}\n" for q in range(4)) + bar.format(3, 12)
    for q in (1, 2, 3):
        *head, last = raised(q, what).splitlines(keepends=True)
        text += "".join([*(f"[rank{q}]: note\n" for _ in range(20)), *head, inside.format(q=q), last])
        text += HEAD.format(q=q, m=2) + TIMES_OUT.format(q=q)
    f = only(diagnose(tmp_path, text + bar.format(37, 152)))
    assert about(f) == ("timeout", "late_rank", (0,), (1, 2, 3))
    assert "inside main_process_first" in f.message and "152,000 of 412,000" in f.message
    assert f.waiting[0].line == 7 and "do that work once before the job starts" in f.advice


ROCM = """[2031-03-02 09:00:02 TP2 EP2] Decode batch.
{error}
GPU core dump failed
Fatal Python error: Aborted

Thread 0x00007f0a2d7fe640 (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 359 in wait

Current thread 0x00007f1f4d5fb080 (most recent call first):
  File "/w/aiter/fused_moe.py", line 218 in fused_moe_
  File "/w/sglang/managers/scheduler.py", line 1712 in run_batch
[2031-03-02 09:00:07] Child process unexpectedly failed with exitcode=-6. pid=4127
[2031-03-02 09:00:07] Child process unexpectedly failed an exit code -6. name=sglang::scheduler_TP2_EP2
Killed
"""


@pytest.mark.parametrize(
    "error",
    ["Memory access fault by GPU node-4 (Agent handle: 0x5) on address 0x7. Reason: Page not present.", ":0:rocdevice.cpp:3586: Queue 0x7 aborting with error : HSA_STATUS_ERROR_EXCEPTION: x"],
)  # fmt: skip
def test_a_fault_is_of_the_child_that_its_parent_names_at_the_line_where_it_aborted(tmp_path: Path, error: str) -> None:
    f = only(diagnose(tmp_path, ROCM.format(error=error)))
    assert f.message.startswith("sglang::scheduler_TP2_EP2 had a GPU error")
    assert f.message.endswith("at fused_moe.py:218 in fused_moe_") and "AMD_SERIALIZE_KERNEL=3" in f.advice


def test_the_rank_that_a_worker_of_ray_prints_is_that_of_its_pid(tmp_path: Path) -> None:
    actor = "\tclass_name: W\n\tactor_id: 5066\n\tpid: 8768\n\tname: q1WorkerDict_0:3\n\tip: 10.9.4.5\n"
    end = "The actor is dead because its worker process has died. Worker exit type: NODE_OUT_OF_MEMORY Worker exit detail: Task was killed due to the node running low on memory.\n"
    f = only(diagnose(tmp_path, "(WorkerDict pid=8768) [Rank 3] Before sleep, memory (GB): 21.4\n" + actor + end))
    assert about(f)[:3] == ("rank_lost", "killed", (3,)) and "on 10.9.4.5" in f.message


def test_a_symbol_of_nccl_that_is_missing_leads_to_the_library_that_is_loaded_first(tmp_path: Path) -> None:
    what = "ImportError: /e/libtorch_cuda.so: undefined symbol: ncclCommWindowRegister"
    text = "0: LD_LIBRARY_PATH=\n4: LD_LIBRARY_PATH=/opt/nccl-2.18.5/lib\n"
    f = only(diagnose(tmp_path, text + "".join(raised(q, what, prefix="{}: ") for q in (4, 5))))
    assert "the log shows LD_LIBRARY_PATH=/opt/nccl-2.18.5/lib there" in f.message
    assert "an older libnccl is loaded" in f.advice
