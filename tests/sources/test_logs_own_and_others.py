"""What a rank or host did itself, before what others report of it. All texts are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from distdiag.sources.logs.verdict import diagnose_logs
from tests.sources.test_logs import counters, diagnose, only, raised, timeout

REMOTE = "torch.distributed.DistBackendError: NCCL error in: U.hpp:8, remote process exited or there was a network error, NCCL version 2.21.5"
SYSTEM = "torch.distributed.DistBackendError: NCCL error in: U.hpp:8, unhandled system error, NCCL version 2.21.5"
RESET = "[rank{0}]: Last error:\n[rank{0}]: socketProgress: Call to recv from 10.9.0.7<41> failed : Connection reset by peer\n"
OWN = "[rank3]: Last error:\n[rank3]: Call to ibv_create_cq failed with error Cannot allocate memory\n"
WARNS = "k7:31:52 [1] misc/ibvwrap.cc:9 NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory\n"
LOSES = "".join(raised(r, REMOTE) + RESET.format(r) for r in (0, 1, 2))
TORCHRUN = "+ torchrun --nproc_per_node 4 {}fit.py\n"
TAKEN = "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29400, useIpv6: false, code: -98, name: EADDRINUSE\n"
KEY = "".join(raised(r, "KeyError: 'x'") for r in (1, 2))
STACK = (
    "MPIR_Init_thread(170)...: \nMPID_Init(1500).........: \nMPIDI_NM_init_hook(90)..: \nopen_domain(300)........: \n"
    "match_provider(301).....: OFI fi_getinfo() failed (No data available)\n"
)
ABORT = (
    "Abort(9) on node {0} (rank {0} in comm 0): Fatal error in internal_Init_thread: Other MPI error, error stack:\n"
    + STACK
)
ENDED = "=   RANK {} PID {} RUNNING AT {}\n=   KILLED BY SIGNAL: 9 (Killed)\n"


def _waits(*ranks: int, at: str = "E410 09:20:00.5") -> str:
    return "".join(timeout(r).replace("[E Process", f"[{at} Process", 1) for r in ranks)


BUILT = (
    "(W pid={pid}, ip=10.7.0.3) /tmp/t7/k.c:4:10: fatal error: Python.h: No such file or directory\n"
    "(W pid={pid}, ip=10.7.0.3) ERROR 04-10 09:01:00 [w.py:9] Traceback (most recent call last):\n"
    '(W pid={pid}, ip=10.7.0.3) ERROR 04-10 09:01:00 [w.py:9]   File "/w/build.py", line 50, in _build\n'
    "(W pid={pid}, ip=10.7.0.3) ERROR 04-10 09:01:00 [w.py:9] subprocess.CalledProcessError: Command '['/usr/bin/gcc', '/tmp/t7/k.c', '-O3']' returned non-zero exit status 1.\n"
)
IN_WORLD = "(W pid=71, ip=10.7.0.3) INFO [p.py:8] rank 2 in world size 3 is assigned as TP rank 2\n"


@pytest.mark.parametrize("ray", [True, False])
def test_a_compiler_that_failed_comes_before_the_timeouts_of_the_others(tmp_path: Path, ray: bool) -> None:
    """The exit code is the compiler's, not that of a process of the job."""
    built = BUILT.format(pid=71)
    text = IN_WORLD + built + _waits(0, 1) if ray else built.replace("(W pid=71, ip=10.7.0.3) ", "")
    f = only(diagnose(tmp_path, text))
    assert (f.kind, f.cause, f.culprits) == ("rank_lost", "crashed", (2,) if ray else ())
    assert "could not compile: Python.h: No such file" in f.message and "python3-dev" in f.advice
    assert "exit code" not in f.message and ("on 10.7.0.3" in f.message) is ray


NPU_ECC = "[W410 08:50:00.1 d.ts:1] Warning: NPU warning, error code is 507054[Error]:\n[Error]: An HBM multi-bit ECC error occurs.\nEE9999: [PID: 61] The error from device(chipId:2, dieId:0)\n    rtX execute failed, reason=[hbm Multi-bit ECC error]\n"


@pytest.mark.parametrize("silent", [(2,), (2, 3), ()])
def test_a_memory_error_of_an_npu_is_most_likely_of_the_one_rank_that_is_silent(
    tmp_path: Path, silent: tuple[int, ...]
) -> None:
    steps = "".join(f"[rank{r}] started\n" for r in range(5))
    f = only(diagnose(tmp_path, steps + NPU_ECC + _waits(*(r for r in range(5) if r not in silent))))
    assert (f.kind, f.cause, f.culprits) == ("gpu", "ecc", silent if len(silent) == 1 else ())
    assert f.certainty == "suspected" and ("probably rank 2" in f.message) is (len(silent) == 1)


def test_one_limit_of_a_host_is_one_finding(tmp_path: Path) -> None:
    warns = "".join(
        f"[1,{r}]<stdout>:k7:{90 + r}:95 [{r}] misc/ibvwrap.cc:9 NCCL WARN Call to {call} failed with error Cannot allocate memory\n"
        for r, call in ((4, "ibv_create_cq"), (5, "ibv_reg_mr_iova2"))
    )
    ucx = "[1,4]<stderr>:[1.8] [k7:94:0] ib_md.c:296 UCX  WARN  ibv_reg_mr(address=0x7f) failed: Cannot allocate memory : Please set max locked memory (ulimit -l) to 'unlimited' (current: 32 kbytes)\n"
    f = only(diagnose(tmp_path, warns + ucx + LOSES))
    assert f.culprits == (4, 5) and f.victims == (0, 1, 2) and "current: 32 kbytes" in f.message


NO_NAME = '{{"ts": "2031-04-10T08:0{n}:20Z", "level": "warning", "pod": "fit-w-{pod}", "msg": "[W410 08:01:20.5 socket.cpp:767] [c10d] The IPv6 network addresses of (fit-m-0, 29500) cannot be retrieved (gai error: {why})."}}\n'
JOINED = '{{"ts": "2031-04-10T08:16:00Z", "level": "error", "pod": "fit-w-0", "rank": {r}, "msg": "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 2/4 clients joined."}}\n'


def test_ranks_that_did_not_join_may_not_resolve_the_name_of_the_first_node(tmp_path: Path) -> None:
    """A node that came had no IPv6 address of it, which is harmless."""
    came = NO_NAME.format(n=0, pod=0, why="-2 - Name or service not known") + "".join(
        JOINED.format(r=r) for r in (0, 1)
    )
    (tmp_path / "w-0.jsonl").write_text(came)
    report = diagnose_logs([str(tmp_path)])
    assert report is not None and "resolve" not in only(report).message
    lost = "".join(NO_NAME.format(n=n, pod=1, why="-3 - Temporary failure in name resolution") for n in range(5))
    (tmp_path / "w-1.jsonl").write_text(lost)
    report = diagnose_logs([str(tmp_path)])
    assert report is not None and (f := only(report)).culprits == (2, 3)
    assert "on fit-w-1, the name fit-m-0 does not resolve (-3" in f.message and "CoreDNS" in f.advice


@pytest.mark.parametrize(("group", "culprits"), [("PG ID 0 PG GUID 0(default_pg)", (2, 3)), ("PG ID 2 PG GUID 5", ())])
def test_a_half_that_the_log_names_is_silent_only_where_all_ranks_are_members(
    tmp_path: Path, group: str, culprits: tuple[int, ...]
) -> None:
    nodes = (
        "n-b: [launch.py:175:main] global_rank_mapping=defaultdict(<class 'list'>, {'n-a': [0, 1], 'n-b': [2, 3]})\n"
    )
    f = only(diagnose(tmp_path, nodes + "".join(timeout(r) + counters(r, 40, 40, 39, group) for r in (0, 1))))
    assert f.culprits == culprits and "No other rank is known" not in f.message


def test_a_late_rank_that_compiles_has_its_own_advice(tmp_path: Path) -> None:
    tuned = (
        "[rank2]:SingleProcess AUTOTUNE benchmarking takes 18.4 seconds and 37.7 seconds precompiling for 20 choices\n"
    )
    f = only(diagnose(tmp_path, tuned + _waits(0, 1, 3) + tuned))
    assert f.culprits == (2,) and f.advice.startswith("if rank 2 was still compiling")


@pytest.mark.parametrize("text", [LOSES + WARNS + raised(3, SYSTEM) + OWN, WARNS + raised(3, SYSTEM) + OWN + LOSES])
def test_an_error_of_the_host_comes_before_the_connections_that_others_lost_by_it(tmp_path: Path, text: str) -> None:
    f = only(diagnose(tmp_path, text))
    assert (f.culprits, f.victims) == ((3,), (0, 1, 2))
    assert "rank 3 on k7 failed in NCCL" in f.message and "ibv_create_cq" in f.message
    assert "ulimit -l" in f.advice


@pytest.mark.parametrize("option", ["--master-port 29511 ", "--rdzv-endpoint=h1:29511 ", ""])
def test_a_second_command_for_the_same_job_is_another_run(tmp_path: Path, option: str) -> None:
    report = diagnose(tmp_path, TORCHRUN.format("") + TAKEN + TORCHRUN.format(option) + KEY)
    f = only(report)
    assert f.culprits == (1, 2) and "29400" not in f.message
    assert any("1 run before it" in note and "29400" in note for note in report.notes)


def test_the_command_of_another_node_is_of_the_same_run(tmp_path: Path) -> None:
    first, second = (TORCHRUN.format(f"--node-rank {n} ") for n in (0, 1))
    f = only(diagnose(tmp_path, first + raised(1, "KeyError: 'x'") + second + raised(3, "KeyError: 'x'")))
    assert f.culprits == (1, 3)


def test_what_hydra_kills_after_an_abort_follows_from_it(tmp_path: Path) -> None:
    ends = ENDED.format(2, 71, "m4") + ENDED.format(0, 70, "m3")
    f = only(diagnose(tmp_path, ABORT.format(2) + ABORT.format(3) + ends))
    assert f.culprits == (2, 3), f
    assert "internal_Init_thread: OFI fi_getinfo() failed (No data available)" in f.message
    assert "rank 2 ran on m4" in f.message and "FI_PROVIDER" in f.advice
    assert only(diagnose(tmp_path, ABORT.partition(": ")[2] + ends)).message.startswith("a process aborted MPI")


KEYED = '{0}: Traceback (most recent call last):\n{0}:   File "/j/fit.py", line 5, in <module>\n{0}: jaxlib.xla_extension.XlaRuntimeError: DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {1} and duration: 5m\n'
FALLS = "2: WARNING:2031-01-01 00:00:00,1:jax._src.xla_bridge: An NVIDIA GPU may be present on this machine, but a CUDA-enabled jaxlib is not installed. Falling back to cpu.\n"
PLUGIN = "2: W0101 JAX plugin jax_rocm60_plugin version 0.5.0 is installed, but it is not compatible with the installed jaxlib version 0.5.1, so it will not be used.\n"


@pytest.mark.parametrize(
    ("own", "words"), [("", "did not publish"), (FALLS, "Falling back to cpu"), (PLUGIN, "jax_rocm60_plugin")]
)
def test_the_process_that_jax_waits_for_is_suspected(tmp_path: Path, own: str, words: str) -> None:
    waits = "".join(KEYED.format(r, "cuda:global_topology/cuda/2") for r in (0, 1, 3))
    f = only(diagnose(tmp_path, own + waits + KEYED.format(2, "cpu:local_topology/cpu/0")))
    assert (f.kind, f.culprits, f.victims) == ("timeout", (2,), (0, 1, 3)), f
    assert words in f.message and f.certainty == "suspected"


def test_a_process_of_jax_without_an_accelerator_does_not_blame_the_others(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, FALLS + KEYED.format(2, "cpu:local_topology/cpu/0")))
    assert f.culprits == (2,) and "found no accelerator" in f.message


@pytest.mark.parametrize(
    "line",
    [
        "[TRT] [E] IRuntime::deserializeCudaEngine: Error Code 1: Serialization (Version tag does not match. Note: Current Version: 240, Serialized Engine Version: 236)\n",
        "[TRT] [E] 6: The engine plan file is not compatible with this version of TensorRT, expecting library version 10.3.0.26 got 10.1.0.27, please rebuild.\n",
    ],
)
def test_an_engine_of_another_version_is_one_finding_with_its_advice(tmp_path: Path, line: str) -> None:
    end = "RuntimeError: [TensorRT-LLM][ERROR] Assertion failed: Failed to deserialize cuda engine. (/t/a.cpp:1)\n"
    f = only(
        diagnose(
            tmp_path, "".join(f"[rank{r}]: {line}" for r in (0, 1)) + "".join(raised(r, end.strip()) for r in (0, 1))
        )
    )
    assert "TensorRT engine: " in f.message and ("Version" in f.message or "version" in f.message), f.message
    assert "build the engine again" in f.advice and {*f.culprits, *f.victims} == {0, 1}


@pytest.mark.parametrize(
    "error",
    [
        "botocore.exceptions.ClientError: An error occurred (InvalidAccessKeyId) when calling the GetObject operation: no such key",
        "botocore.exceptions.NoCredentialsError: Unable to locate credentials",
        "google.auth.exceptions.RefreshError: ('invalid_grant: Token has expired', {})",
    ],
)
def test_credentials_that_expired_have_their_own_advice(tmp_path: Path, error: str) -> None:
    assert "renew" in only(diagnose(tmp_path, raised(1, error))).advice


SHORT = "The node was low on resource: memory. Threshold quantity: 1, available: 0."
POD = f"$ kubectl describe pod sft-worker-4\nName:             sft-worker-4\nNode:             pool-b-k2/10.4.0.9\nStatus:           Failed\nMessage:          {SHORT}\n"
WORKER = "(TorchTrainer pid=9) - (node_id=a1, ip=10.9.1.{0}, pid=80{0}) world_rank={0}, local_rank=0, node_rank={0}\n"
DEAD = "(raylet) The node with node id: a1ff and address: 10.9.1.2 and node name: 10.9.1.2 has been marked dead because the detector has missed too many heartbeats from it.\n"


def test_the_evicted_pod_and_its_node_have_their_names(tmp_path: Path) -> None:
    report = diagnose(tmp_path, raised(0, REMOTE) + POD)
    assert "pod sft-worker-4 was evicted, its node pool-b-k2 was low on memory" in (report.state_text or "")


@pytest.mark.parametrize("draining", ["Node 10.9.1.2 is draining: ", ""])
def test_the_preempted_node_its_rank_and_the_advice_of_its_scheduler(tmp_path: Path, draining: str) -> None:
    notice = f"(autoscaler +9m1s) {draining}spot instance interruption notice received, deadline in 120 s\n"
    report = diagnose(tmp_path, "".join(map(WORKER.format, range(4))) + notice + DEAD + raised(1, REMOTE))
    assert "a preemption of node 10.9.1.2 (rank 2)" in (report.state_text or "")
    assert "max_failures" in report.notes[0] and "sbatch" not in report.notes[0]


def test_a_job_of_slurm_is_requeued_there(tmp_path: Path) -> None:
    line = "slurmstepd: error: *** JOB 81 ON n4 CANCELLED AT 2031-01-01T00:00:00 DUE TO PREEMPTION ***\n"
    assert "sbatch --requeue" in diagnose(tmp_path, "step 1 loss 2.0\n" + line).notes[0]


FULL = "$ kubectl describe pod hvd-w-3\n    State:          Terminated\n      Reason:       OOMKilled\n      Exit Code:    137\n"
DAEMON = "ORTE has lost communication with a remote daemon.\n  HNP daemon   : [[11,0],0] on node hvd-l\n  Remote daemon: [[11,0],2] on node {}\n"


@pytest.mark.parametrize(
    ("few", "many", "culprits"),
    [((5,), (*range(5), *range(6, 16)), (5,)), ((9, 3), (*range(3), *range(4, 9)), (3, 9)), ((0, 1), (2, 3), ())],
)
@pytest.mark.parametrize("late", [False, True])
def test_two_sides_of_horovods_ranks_wait_for_each_other(
    tmp_path: Path, few: tuple[int, ...], many: tuple[int, ...], culprits: tuple[int, ...], late: bool
) -> None:
    lines = [(q, "grad.0, grad.1") for q in few] + [(q, "epoch_loss") for q in many]
    text = "".join(f"[1,0]<stderr>:{q}: [{tensors}]\n" for q, tensors in sorted(lines))
    text = (
        f"[1,0]<stderr>:stall_inspector.cc:107] One or more tensors are waiting\n[1,0]<stderr>:Missing ranks:\n{text}"
    )
    if late:
        stalled = [(f"grad.{i}", few) for i in range(10)] + [("epoch_loss", many)]
        text = "".join(
            f"[1,0]<stderr>:{tensor} [missing ranks: {', '.join(map(str, sorted(ranks)))}]\n"
            for tensor, ranks in stalled
        )
    f = only(diagnose(tmp_path, text))
    assert f.culprits == culprits and ({*few, *many} - {*culprits}) == {*f.victims}
    assert "drop_last" in f.advice and (late or "(grad.0, grad.1)" in f.message)


STALL = "[1,0]<stderr>:Missing ranks:\n[1,0]<stderr>:" + "".join(f"[1,0]<stderr>:{r}: [grads.0]\n" for r in range(2, 9))


@pytest.mark.parametrize("text", [STALL + DAEMON.format("hvd-w-3") + FULL, FULL + STALL + DAEMON.format("hvd-w-3")])
def test_a_node_that_is_a_pod_without_memory_was_lost_by_that(tmp_path: Path, text: str) -> None:
    f = only(diagnose(tmp_path, text + "command terminated with exit code 137\n"))
    assert f.message.startswith("hvd-w-3 was killed: the host or its memory limit"), f.message
    assert "waited for ranks 2–8" in f.message and "timed out" not in f.message


def test_another_node_is_still_lost(tmp_path: Path) -> None:
    messages = [f.message for f in diagnose(tmp_path, DAEMON.format("hvd-w-1") + FULL).findings]
    assert any("node hvd-w-1 was lost" in message for message in messages), messages


LINK = "n6: [Thu Jan 16 05:22:{} 2031] mlx5_core 0000:86:00.0 ens3: Link {}\n"
THREAD = '[rank{0}]: Traceback (most recent call last):\n[rank{0}]:   File "/l/torch/utils/data/_utils/pin_memory.py", line 9, in loop\n[rank{0}]:     do()\n[rank{0}]: RuntimeError: received 0 items of ancdata\n[rank{0}]: OSError: [Errno 24] Too many open files\n'


def test_a_port_that_was_lost_again_is_not_only_active_again(tmp_path: Path) -> None:
    links = LINK.format(11, "down") + LINK.format(15, "up")
    once = diagnose(tmp_path, links + raised(1, REMOTE))
    assert any(note.endswith("active again on line 2") for note in once.notes), once.notes
    twice = diagnose(tmp_path, links + LINK.format(19, "down") + raised(1, REMOTE))
    assert not any(note.endswith("active again on line 2") for note in twice.notes), twice.notes


@pytest.mark.parametrize("ranks", [(3,), (3, 5)])
def test_the_error_of_the_system_after_an_exception_is_a_part_of_it(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    f = only(diagnose(tmp_path, "".join(map(THREAD.format, ranks)) + timeout(0) + timeout(1)))
    assert f.culprits == ranks and "also reported OSError: [Errno 24]" in f.message


@pytest.mark.parametrize(("ranks", "words"), [(range(1, 8), "rank 0 reported no timeout"), (range(4, 8), "")])
def test_the_few_ranks_without_a_timeout_are_named(tmp_path: Path, ranks: range, words: str) -> None:
    (tmp_path / "dmesg-k8.log").write_text("kernel: NVRM: Xid (PCI:0000:5e:00): 79, GPU has fallen off the bus.\n")
    (tmp_path / "job.log").write_text("".join(map(timeout, ranks)))
    report = diagnose_logs([str(tmp_path)])
    assert report is not None and report.findings[0].kind == "gpu"
    assert (words in report.findings[0].message) and ("reported no timeout" in report.findings[0].message) == bool(
        words
    )
