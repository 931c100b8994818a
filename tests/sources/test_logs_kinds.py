"""Logs of further launchers and libraries, runs appended to one file, and lines that only talk of errors: who and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distdiag.sources.logs.patterns import NEEDLES
from distdiag.sources.logs.verdict import diagnose_logs
from tests.sources.test_logs import diagnose, only, raised, table, timeout

STEPS = "".join(f"2031-03-02 09:00:00 INFO step {n} loss 2.1\n" for n in range(80))
REMOTE = "torch.distributed.DistBackendError: NCCL error in: U.hpp:8, remote process exited or there was a network error, NCCL version 2.21.5"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
NO_TRACE = "To enable traceback see: x"
HYDRA = "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   {who}PID 42 RUNNING AT {host}\n=   {how}\n"
HCCL = "RuntimeError: [ERROR] HCCL error in: torch_npu/csrc/ProcessGroupHCCL.cpp:64"
HCCL_SOCKET = "[rank{}]: Create dest error! createLink para:rank[{}]-localUserrank[1], dst_rank[6]-remoteUserrank[6]\n"
RAY_DIED = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer.\n"
DCP = raised(0, "CheckpointException: CheckpointException ranks:dict_keys([3])") + (
    '[rank0]: Traceback (most recent call last): (RANK 3)\n[rank0]:   File "/w/fs.py", line 5, in write\n[rank0]:     f.write(x)\n'
    "[rank0]: OSError: [Errno 28] No space left on device\n"
)
SLURM = "slurmstepd: error: *** STEP 7.0 ON g1 CANCELLED AT 2031-03-02T09:00:00{why} ***\n"
RICH = "╭──── Traceback (most recent call last) ────╮\n│ /w/run.py:61 in main                      │\n│ ❱ 61     step(batch)                      │\n╰───────────────────────────────────────────╯\nValueError: bad crop\n"
SERVER = "[2031-03-02 08:19:00] server_args=ServerArgs(model_path='m', tp_size=8, dp_size={}, nnodes={}, node_rank=0)\n"
TP = '[2031-03-02 08:19:45 TP3] Scheduler hit an exception: Traceback (most recent call last):\n  File "/w/cache.py", line 2, in make\n    torch.zeros(\n'
LAUNCH = "W0302 08:00:00.1 9 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment variable for each process to be 1\n"


def ends(*rows: tuple[int, int, str]) -> str:
    """Return torchrun's table of (rank, exit code, time of day)."""
    return "".join(table(r, code, NO_TRACE).replace("00:00:00", at) for r, code, at in rows)


@pytest.mark.parametrize(
    ("text", "kind", "culprits", "words"),
    [
        # launchers
        (HYDRA.format(who="RANK 3 ", host="n7", how="KILLED BY SIGNAL: 9 (Killed)") + HYDRA.format(who="RANK 0 ", host="n6", how="KILLED BY SIGNAL: 15 (Terminated)"), "rank_lost/killed", (3,), "SIGKILL n7"),
        (HYDRA.format(who="RANK 3 ", host="n7", how="KILLED BY SIGNAL: 9 (Killed)") + HYDRA.format(who="RANK 0 ", host="n6", how="KILLED BY SIGNAL: 11 (Segmentation fault)"), "rank_lost/killed", (0,), "SIGSEGV n6"),
        (HYDRA.format(who="RANK 3 ", host="n7", how="KILLED BY SIGNAL: 9 (Killed)") + HYDRA.format(who="RANK 0 ", host="n6", how="KILLED BY SIGNAL: 6 (Aborted)"), "rank_lost/killed", (0,), "SIGABRT n6"),
        (HYDRA.format(who="RANK 3 ", host="n7", how="KILLED BY SIGNAL: 9 (Killed)") * 2, "rank_lost/killed", (3,), "SIGKILL n7"),
        (HYDRA.format(who="", host="n2", how="EXIT CODE: 9"), "rank_lost/killed", (), "SIGKILL n2"),
        ("Abort(1090319) on node 5 (rank 5 in comm 0): Fatal error in PMPI_Init: Other MPI error\n", "rank_lost/crashed", (5,), "PMPI_Init"),
        ("MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD\n", "rank_lost/crashed", (2,), "MPI_Abort"),
        ("  HNP daemon   : [[9,0],0] on node a\n  Remote daemon: [[9,0],2] on node wk-2\ncommand terminated with exit code 137\n", "rank_lost/silent", (), "wk-2"),
        ("srun: error: Node failure on g14\n" + SLURM.format(why=" DUE TO NODE FAILURE"), "rank_lost/silent", (), "g14"),
        ("2031-03-02 09:00:00,4\tWARNING worker.py:7 -- The node with node id: ab12 and address: 10.3.0.9 and node name: x has been marked dead because of heartbeats\n" + raised(1, REMOTE), "rank_lost/silent", (), "10.3.0.9"),
        ("The actor is dead because its node has died. Node Id: c1ff\n" + raised(1, REMOTE), "rank_lost/silent", (), "node c1ff"),
        ("(65) |CCL_ERROR| fd.cpp:1 init: condition dir failed\n" + raised(1, "RuntimeError: oneCCL: fd.cpp:1 init: EXCEPTION: opendir failed"), "rank_lost/crashed", (), "rank 1 opendir"),
        ("The node with node id: ab12 and address: 10.3.0.9 and node name: x has been marked dead because of heartbeats\n" + raised(1, REMOTE), "rank_lost/silent", (), "10.3.0.9"),
        ("[rank: 2] Child process with PID 42 terminated with code -9. Forcefully terminating all other processes\n", "rank_lost/killed", (2,), "SIGKILL"),
        ("ERROR Worker proc VllmWorker-1 died unexpectedly, shutting down executor.\n", "rank_lost/crashed", (1,), "lost"),
        (RAY_DIED, "rank_lost/crashed", (), "was lost: killed, or crashed"),
        ("-----Begin global rank 2 STDERR----------\n" + raised(2, "ValueError: bad token", prefix="") + "-----End global rank 2 STDERR----------\n", "rank_lost/crashed", (2,), "bad token"),
        ("==> out/rank_5/stderr.log <==\n" + raised(5, "KeyError: 'x'", prefix="") + "\n==> out/rank_0/stderr.log <==\n", "rank_lost/crashed", (5,), "KeyError"),
        ("srun: error: g2: task 4: Exited with exit code 1\nsrun: error: g1: tasks 0-3: Killed\n", "rank_lost/crashed", (4,), "exit code"),
        (raised(4, "KeyError: 'z'", prefix="{}: ") + SLURM.format(why=" DUE TO TASK FAILURE"), "rank_lost/crashed", (4,), "KeyError"),
        (ends((2, 1, "10:00:00"), (0, -9, "10:00:31")), "rank_lost/crashed", (2,), "exit code"),  # the launcher killed rank 0
        (raised(3, "IndexError: 9", prefix="[default{}]:") + ends((11, 1, "10:00:00")), "rank_lost/crashed", (11,), "IndexError"),
        ("PRTE has lost communication with a remote daemon.\n\n  Remote daemon: [prterun-a-9@0,1] on node wk-2\n", "rank_lost/silent", (), "wk-2"),
        ("prterun noticed that process rank 2 with PID 91 on node wk-7 exited on\nsignal 9 (Killed).\n", "rank_lost/killed", (2,), "SIGKILL wk-7"),
        ("ERROR [core_client.py:564] Engine core proc EngineCore_DP1 died unexpectedly, shutting down client.\n" + raised(0, "EngineDeadError: EngineCore failed. See stack trace (above) for the root cause.", prefix=""), "rank_lost/crashed", (), "EngineCore_DP1 lost"),
        ("(raylet) A worker died or was killed while executing a task by an unexpected system error. Worker IP address: 10.0.0.8 Worker port: 1 Worker PID: 90 x\n(W pid=92, ip=10.0.0.9) " + raised(1, REMOTE).splitlines()[-1] + "\n", "rank_lost/crashed", (), "process 90 10.0.0.8 lost"),
        ("wk-0-1-q7w2a    0/1     OOMKilled   0          41m\n", "rank_lost/killed", (), "pod wk-0-1-q7w2a"),
        # one event, one finding
        (raised(0, "ValueError: negative", prefix="(WorkerDict pid=70, ip=10.0.0.2) ") + raised(0, "ValueError: negative", line=61, prefix=""), "rank_lost/crashed", (), "pid=70"),
        (raised(2, OOM, prefix="(VllmWorker rank={} pid=8) ") + raised(0, "RuntimeError: Engine core initialization failed. See root cause above.", prefix=""), "rank_lost/crashed", (2,), "GPU memory"),
        (raised(1, "ValueError: Caught ValueError in DataLoader worker process 2.") + raised(1, "ValueError: row 9 is empty", line=20), "rank_lost/crashed", (1,), "row 9"),
        (DCP, "rank_lost/crashed", (3,), "No space"),
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.\nNVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.\n", "gpu/xid", (), "79"),
        (raised(1, "ValueError: truncated jpeg") + raised(1, "KeyError: 'y'").replace("in main", "in <module>"), "rank_lost/crashed", (1,), "KeyError"),
        (raised(3, OOM) + "Exception ignored in: <function Loader.__del__ at 0x7f>\n" + raised(0, "AttributeError: pool", prefix=""), "rank_lost/crashed", (3,), "GPU memory"),
        ("3m  Warning  NodeNotReady  pod/fit-3  Node is not ready\n" + raised(1, REMOTE), "rank_lost/silent", (), "fit-3"),
        (raised(2, "ValueError: bad batch") + raised(3, "BrokenPipeError: [Errno 32] Broken pipe"), "rank_lost/crashed", (2,), "bad batch"),
        # devices, libraries, networks
        (":0:rocdevice.cpp:3586: 74 us: [pid:81 tid:0x7] Callback: Queue 0x7f aborting with error : HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation. code: 0x1016\nE0302 08:00:00.1 8 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: -6) local_rank: 5 (pid: 81) of binary: p\n", "rank_lost/crashed", (), "local rank 5 HSA_STATUS_ERROR_EXCEPTION"),
        ("[rank2]: torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB.\n", "rank_lost/crashed", (2,), "GPU memory"),
        ("2031:03:02-09:16:18:(65) |CCL_ERROR| worker.cpp:338 ccl_worker_func: ze error at zeQueue, code: ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY\n", "rank_lost/crashed", (), "GPU memory"),
        (raised(1, "RuntimeError: level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"), "gpu/lost", (1,), "lost its GPU"),
        ("EJ0001: 2031-03-02-11:57:54 Failed to initialize the HCCP process. Reason: Maybe the last training process is running.\n", "rank_lost/crashed", (), "still holds the NPU"),
        ("worker-1: rtDeviceSynchronize execute failed, reason=[task timeout][FUNC:FuncErrorReason]\n", "stall/unknown", (), "NPU in time"),
        ("Exception in device=TPU:6: mesh_service.cc:294 : Failed to meet rendezvous 'x': Socket closed (14)\nException in device=TPU:0: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes\n", "rank_lost/crashed", (), "TPU:0 ran out"),
        ("".join(f"[2031-03-02 00:57:15 TP{i}] Watchdog timeout (self.watchdog_timeout=300)\n" for i in (1, 0)), "stall/unknown", (), "TP1 TP0 no progress 5 minutes"),
        ("NVRM: GPU 0000:5e:00.0: RmInitAdapter failed! (0x26:0x56:1482)\n", "gpu/lost", (), "0000:5e:00"),
        ("nvidia-nvswitch3: SXid (PCI:0000:c4:00.0): 20034, Fatal, Link 32 LTSSM Fault Up\n", "gpu/nvlink", (), "20034"),
        ("g7:2:3 [4] NCCL WARN NET/IB : mlx5_3:1 Got async event : port error\n" + timeout(0), "rank_lost/silent", (), "port error"),
        ("2031-03-02T08:00:00+00:00 n7 kernel: mlx5_core 0000:5e:00.0 mlx5_2: Port: 1 Link DOWN\n" + raised(1, REMOTE), "rank_lost/silent", (), "n7 mlx5_2"),
        ("[  9.1] bnxt_en 0000:3b:00.0 eth2: NIC Link is Down\n", "rank_lost/silent", (), "eth2"),
        ("[327.1] amdgpu 0000:65:00.0: amdgpu: [gfxhub] page fault (src_id:0 ring:24 vmid:8 pasid:3, for process python3 pid 71 thread python3 pid 71)\nMemory access fault by GPU node-4\n" + table(2, -6, NO_TRACE).replace("pid: 902", "pid: 71"), "rank_lost/crashed", (2,), "0000:65:00.0 page fault"),
        ("h1:7:8 [0] misc/socket.cc:495 NCCL WARN socketStartConnect: Connect to 10.3.0.22<43117> failed : No route to host\n", "rank_lost/configuration", (), "10.3.0.22 firewall"),
        (raised(1, OOM) + "(EngineCore pid=9) RuntimeError: Worker failed with error 'CUDA out of memory'\n", "rank_lost/crashed", (1,), "GPU memory"),
        ("[E707 09:12:33.1 socket.cpp:496] [c10d] The server socket has failed to listen on any local network address.\n" + raised(0, "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, code: -98, name: EADDRINUSE", prefix=""), "rank_lost/configuration", (), "port 29500"),
        ("[rank3]: EI0002: The Notify register has not received the Notify record from remote rank [7].\n", "timeout/late_rank", (7,), "rank 3 HCCL"),
        ("[rank3]: EI0006: Getting socket times out. Reason: Remote Rank did not send the data in time.\n", "timeout/late_rank", (), "HCCL connection"),
        (raised(1, HCCL) + HCCL_SOCKET.format(1, 1), "timeout/late_rank", (6,), "rank 1 HCCL"),
        (raised(1, "RuntimeError: HCCL error", file="/v/torch/distributed/distributed_c10d.py") + HCCL_SOCKET.format(1, 1), "timeout/late_rank", (6,), "rank 1 HCCL"),
        (raised(1, HCCL) + HCCL_SOCKET.format(1, 0), "timeout/late_rank", (), "HCCL"),
        (raised(6, "KeyError: 'chat'") + raised(1, HCCL) + HCCL_SOCKET.format(1, 1), "rank_lost/crashed", (6,), "KeyError failed HCCL"),
        (raised(1, "RuntimeError: oneCCL: atl_ofi.cpp:133 recv: EXCEPTION: recv failed"), "rank_lost/crashed", (), "oneCCL"),
        ("2 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed due to other reasons\n", "rank_lost/killed", (), "memory"),
        ("python[51]: segfault at 8 ip 00007f1c sp 00007ffd error 4 in libtorch_cuda.so\n", "rank_lost/killed", (), "51 SIGSEGV"),
        (TP + OOM + "\n", "rank_lost/crashed", (), "TP3 GPU"),
        (SERVER.format(1, 1) + TP + OOM + "\n", "rank_lost/crashed", (3,), "rank 3 GPU"),
        (SERVER.format(2, 1) + TP + OOM + "\n", "rank_lost/crashed", (), "TP3 GPU"),
        (SERVER.format(1, 2) + TP + OOM + "\n", "rank_lost/crashed", (), "TP3 GPU"),
        (RICH, "rank_lost/crashed", (), "crop run.py:61"),
        # who writes, and when
        ("".join(timeout(r) for r in range(3)) + "[rank3]: epoch 3 done\n", "timeout/late_rank", (3,), "#40"),
        (raised(1, "RuntimeError: CUDA error: an illegal memory access", prefix="2031-03-02 10:00:09 [rank{}]: ") + raised(6, "ValueError: x", prefix="2031-03-02 10:00:01 [rank{}]: "), "rank_lost/crashed", (6,), "ValueError"),
        (LAUNCH + raised(2, OOM) + LAUNCH + "".join(timeout(r) for r in (0, 1, 3)), "timeout/late_rank", (2,), "#40"),
        (raised(1, "ValueError: x") + "[default] Worker group FAILED. 3/3 attempts left; will restart worker group\n" + raised(3, OOM), "rank_lost/crashed", (3,), "GPU memory"),
        # what did not start
        ("pdsh@head: gpu-b: ssh exited with exit code 255\n", "rank_lost/silent", (), "gpu-b"),
        ("0/8 nodes are available: 8 Insufficient nvidia.com/gpu.\n", "rank_lost/configuration", (), "nvidia.com/gpu"),
        ("slurmstepd: error: execve(): /e/python: No such file or directory\nsrun: error: g1: tasks 0-3: Exited with exit code 2\n", "rank_lost/silent", (), "/e/python"),
    ],
)  # fmt: skip
def test_who_failed_and_why(tmp_path: Path, text: str, kind: str, culprits: tuple[int, ...], words: str) -> None:
    report = diagnose(tmp_path, text)
    f = report.findings[0]
    assert (f"{f.kind}/{f.cause}", f.culprits) == (kind, culprits), f
    assert all(word in f.message for word in words.split()), f.message
    assert len(report.findings) == 1 or "10:00:09" in text, report.findings


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Normal   Preempted  3m   default-scheduler  Preempted by pod 5fa1 on node n3\n", "preemption"),
        ("Spot interruption notice received: instance i-0 ends at 10:02\n", "preemption"),
        (
            "Warning  Evicted  12m  kubelet  The node was low on resource: memory. Threshold quantity: 100Mi\n",
            "evicted memory",
        ),
        ("[rank: 0] Received SIGTERM: 15\n", "SIGTERM"),
        ("api.py:719] Received Signals.SIGHUP death signal, shutting down workers\n", "SIGHUP tmux"),
        (SLURM.format(why=" DUE TO TIME LIMIT"), "Slurm time limit"),
    ],
)
def test_what_stops_a_job_from_outside_comes_before_what_follows(tmp_path: Path, text: str, words: str) -> None:
    report = diagnose(tmp_path, STEPS + text + raised(1, "RuntimeError: CUDA error: driver shutting down"))
    assert report.findings == () and all(word in (report.state_text or "") for word in words.split()), report


def test_a_signal_to_all_ranks_is_a_stop(tmp_path: Path) -> None:
    report = diagnose(tmp_path, ends((0, -15, "10:00:00"), (1, -15, "10:00:00")))
    assert report.findings == () and "SIGTERM" in (report.state_text or "")


SAMPLE = {
    "text": 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\nRuntimeError: CUDA out of memory. Tried'
}


@pytest.mark.parametrize(
    "text",
    [
        "WARNING batch-size search: CUDA out of memory. Tried to allocate 8.00 GiB; retrying with 32\n" + STEPS,
        json.dumps(SAMPLE) + "\n" + STEPS,
        "User: my job says NCCL error: unhandled system error, what do I do?\n",
        'Assistant: "Connection closed by peer [10.0.0.1]" comes after "CUDA error: x"\n',
        raised(0, "ConnectionError: Max retries exceeded", prefix="") + STEPS,
        '+    raise RuntimeError("CUDA error: boom")\n',
        "error_patterns: ['NCCL error: unhandled', 'CUDA out of memory']\n",
        "last exit code 137 (previous attempt)\n",
        "Reference: srun: error: n1: task 3: Out Of Memory\n",
        "checks: has fallen off the bus: no; oom-kill events: 0\n",
        "[default] Detected 1 new nodes from group_rank=0; will restart worker group\n" + STEPS,
        "(raylet) 0 Workers (tasks / actors) killed due to memory pressure\n",
        "nvidia-nvswitch3: SXid (PCI:0000:c4:00.0): 22013, Non-fatal, Link 01 Minion Link DLREQ interrupt\n",
    ],
)  # fmt: skip
def test_what_only_talks_of_errors_is_no_evidence(tmp_path: Path, text: str) -> None:
    report = diagnose(tmp_path, STEPS + text)
    assert report.findings == () and report.state_text is None
    assert any("py-spy dump" in note for note in report.notes)  # what to collect instead


@pytest.mark.parametrize(
    ("what", "word"),
    [
        ("RuntimeError: Error 802: system not yet initialized", "fabric manager"),
        ("AssertionError: found NaN in local grad norm", "learning rate"),
        ("RuntimeError: [enforce fail at inline_container.cc:603] . unexpected pos 704 vs 596", "quota"),
        ("RuntimeError: DataLoader worker (pid(s) 8) exited unexpectedly", "num_workers=0"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "memory is full"),
        ("ImportError: /x.so: undefined symbol: _Z3", "built for another version"),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "get_arch_list"),
        ("wandb.errors.UsageError: api_key not configured (no-tty). call wandb.login(key=[k])", "WANDB_MODE=offline"),
        ("wandb.errors.AuthenticationError: No API key configured. Use `wandb login` to log in.", "WANDB_API_KEY"),
        ("neptune.MissingApiTokenException: access token is missing", "key or token on that rank"),
        (
            "RuntimeError: size mismatch for lm_head.weight: copying a param with shape [32000, 8]",
            "resize_token_embeddings",
        ),
        ("RuntimeError: TPU initialization failed: open(/dev/accel0): Operation not permitted", "lsof /dev/accel*"),
        ("HfHubHTTPError: 429 Client Error: Too Many Requests", "download once"),
    ],
)
def test_the_advice_follows_the_cause(tmp_path: Path, what: str, word: str) -> None:
    assert word in only(diagnose(tmp_path, raised(1, what))).advice


@pytest.mark.parametrize(
    ("what", "cause"),
    [("UsageError: api_key not configured (no-tty)", "configuration"), ("ValueError: bad key", "crashed")],
)
def test_an_exception_of_a_service_for_its_settings_is_configuration(tmp_path: Path, what: str, cause: str) -> None:
    f = only(diagnose(tmp_path, raised(0, what) + timeout(1)))
    assert (f.kind, f.cause, f.culprits) == ("rank_lost", cause, (0,))


def test_a_checkpoint_exception_lists_all_ranks_that_failed(tmp_path: Path) -> None:
    text = "".join(
        line.replace("[rank0]", f"[rank{q}]")
        for q in range(4)
        for line in DCP.replace("[3]", "[0, 1, 2, 3]").splitlines(keepends=True)
    )
    f = only(diagnose(tmp_path, text))
    assert f.message.startswith("all 4 ranks") and f.culprits == () and f.certainty == "suspected"


def test_an_exception_that_was_passed_on_is_not_its_own_cause(tmp_path: Path) -> None:
    what = "RuntimeError: the device could not be opened by this process, as the driver reports it; errno 1"
    text = (
        raised(0, f"{what}; mode 7", prefix="")
        + "\nThe above exception was the direct cause of the following exception:\n\n"
    )
    f = only(diagnose(tmp_path, text + raised(0, what, prefix="")))
    assert "because of" not in f.message and "reports it, errno 1" in f.message


@pytest.mark.parametrize(
    "line",
    [
        "{q}: [gpu-{q}] rank {q}/6 local_rank 0\n",
        "INFO train.py rank={q} local_rank=0 device=x ready\n",
        "Process index: {q}\nLocal process index: 0\n",
    ],
)
def test_ranks_that_only_announce_themselves_are_seen(tmp_path: Path, line: str) -> None:
    assert diagnose(tmp_path, "".join(line.format(q=q) for q in range(6)) + raised(2, OOM)).ranks_seen == 6


def test_the_writer_of_a_json_line_is_its_pod(tmp_path: Path) -> None:
    lines = raised(0, OOM, prefix="").splitlines()
    text = "".join(json.dumps({"kubernetes": {"pod_name": "fit-3"}, "log": line}) + "\n" for line in lines)
    assert only(diagnose(tmp_path, text)).message.startswith("fit-3 ran out of GPU memory")


def test_the_kernel_and_the_launcher_tell_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "dmesg.log").write_text("Out of memory: Killed process 905 (python) total-vm:9kB\n")
    (tmp_path / "job.log").write_text(table(5, -9, "Signal 9 (SIGKILL) received by PID 905"))
    report = diagnose_logs([str(tmp_path)])
    assert report is not None
    f = only(report)
    assert f.culprits == (5,) and "out of memory" in f.message


def test_an_exception_after_many_others_of_its_rank_is_read(tmp_path: Path) -> None:
    noise = "".join(raised(1, f"ValueError: no image {n}", prefix="") for n in range(30))
    last = raised(1, "KeyError: 'x'", line=9, prefix="") + STEPS[:60]
    assert any("KeyError" in f.message for f in diagnose(tmp_path, noise + last).findings)


def test_no_needle_has_a_digit() -> None:
    """A line is judged without its digits."""
    assert not [needle for needle in NEEDLES if any(48 <= byte < 58 for byte in needle)]


RAS = """NCCL version 2.27.3 compiled with CUDA 12.8

Job summary
===========

      2          8            1         16       16

    0         1         2         8        16        16   RUNNING  {status}
    1         2         1         8         8        16   RUNNING  OK

"""
RAS_OK = RAS.format(status="OK")
RAS_BEHIND = (
    RAS.format(status="MISMATCH")
    + """#0-0 (1c9a40bb17a3f001) MISMATCH
  Communicator ranks have different AllReduce operation counts
  14 ranks have launched up to operation {most}
  2 ranks have launched up to operation {least}
  Rank 5 -- GPU 5 managed by process 611 on node 10.0.0.8
  Rank 9 -- GPU 1 managed by process 622 on node 10.0.0.9
"""
)
CANCELLED = "slurmstepd: error: *** STEP 9.0 ON n1 CANCELLED AT 2031-01-02T03:04:05 ***\n"


@pytest.mark.parametrize("end", ["", CANCELLED])
def test_the_ranks_that_nccls_ras_reports_to_be_behind_are_named(tmp_path: Path, end: str) -> None:
    behind = RAS_BEHIND.format(most=412, least=411)
    f = only(diagnose(tmp_path, "step 3 loss 0.5\n" + RAS_OK + 12 * behind + end))
    assert f.culprits == (5, 9) and "process 611 on node 10.0.0.8, process 622 on node 10.0.0.9" in f.message
    assert "up to number 411 only" in f.message and "py-spy dump --pid 611` on 10.0.0.8" in f.advice
    of_a_part = diagnose(tmp_path, behind.replace("14 ranks have", "6 ranks have") + end)
    assert only(of_a_part).culprits == () and "of a communicator of 8 ranks" in only(of_a_part).message


@pytest.mark.parametrize(
    "text",
    [
        RAS_OK,
        RAS_BEHIND.format(most=412, least=411) + "step 9 loss 0.5\n" + RAS_OK,  # reports are not of one moment
        RAS_BEHIND.format(most=412, least=413),  # these two are ahead
    ],
)
def test_a_report_of_ras_in_which_no_rank_stays_behind_is_no_finding(tmp_path: Path, text: str) -> None:
    report = diagnose(tmp_path, text)
    assert report.findings == () and not any("does not look like" in note for note in report.notes)
