"""Messages in the wording of newer versions, and what they must not hide or repeat. All texts are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from distdiag.diagnosis.text.finding import finding_lines
from distdiag.sources.logs.verdict import diagnose_logs
from tests.sources.test_logs import counters, diagnose, only, raised, table, timeout

RETRY = "g{0}:7:9 [4] NCCL WARN NET/{1}: Got completion from peer 10.3.0.9<417> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_RDMA_WRITE(1) vendor_err=129\n"
NPU = "RuntimeError: npuSynchronizeDevice:x.ts:4 NPU function error: AclrtSynchronizeDeviceWithTimeout, error code is 507048"
MESH = "RuntimeError: Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144] no error"
NVLS = "g7:2:3 [1] transport/nvls.cc:254 NCCL WARN Cuda failure 401 'the operation cannot be performed in the present state'\n"
LISTEN = "The server socket has failed to listen on any local network address."
OF_TORCHRUN = '{0}: Traceback (most recent call last):\n{0}:   File "/e/torch/distributed/launcher/api.py", line 2, in launch_agent\n{0}:     result = agent.run()\n'
SIZES = "ZeRORuntimeException: The checkpoint being loaded used a DP world size of 12 but the current world size is 4."


@pytest.mark.parametrize("net", ["IB", "IB/GIN"])
def test_a_completion_whose_status_has_a_name(tmp_path: Path, net: str) -> None:
    f = only(diagnose(tmp_path, RETRY.format(3, net)))
    assert "10.3.0.9" in f.message and "status 12: no answer after all retries" in f.message
    assert "ibstat" in f.advice


def test_a_rank_whose_npu_waited_lost_no_connection(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, raised(2, "KeyError: 'id'") + raised(0, NPU) + raised(1, NPU)))
    assert f.culprits == (2,) and f.message.endswith("ranks 0, 1 then timed out waiting")


@pytest.mark.parametrize("first", [raised(0, MESH, prefix=""), timeout(0) + timeout(1)])
def test_a_shell_s_line_after_ranks_that_waited_in_vain_is_not_the_cause(tmp_path: Path, first: str) -> None:
    assert "SIGKILL" not in only(diagnose(tmp_path, f"{first}Killed\n")).message
    assert "SIGKILL" in only(diagnose(tmp_path, f"Killed\n{first}")).message


def test_the_pod_of_an_exit_code(tmp_path: Path) -> None:
    line = "48s  Warning  ExitedWithCode  pytorchjob/fit  Error pod fit-worker-2 container pytorch exitCode: 137 terminated message: \n"
    assert only(diagnose(tmp_path, line)).message.startswith("fit-worker-2 was killed by SIGKILL")


def test_launchers_that_take_each_others_port(tmp_path: Path) -> None:
    """A task of srun that runs torchrun is no rank; torch logs the failure without its port, and raises it with it."""
    text = "".join(
        f"{task}: [E131 11:40:14.1 socket.cpp:500] [c10d] {LISTEN}\n"
        + OF_TORCHRUN.format(task)
        + f"{task}: RuntimeError: {LISTEN} port: 29511, useIpv6: 0, code: -98, name: EADDRINUSE\n"
        for task in (1, 2)
    )
    f = only(diagnose(tmp_path, text))
    assert f.culprits == () and f.message == "task 1, task 2 could not listen: port 29511 is in use"
    assert "one launcher for each node" in f.advice


def test_who_it_is_where_no_line_names_a_rank(tmp_path: Path) -> None:
    """What a launcher, a node or a host meets is not told of a rank."""
    port = raised(
        0, f"DistNetworkError: {LISTEN} port: 29511, code: -98", prefix="", file="/e/torch/distributed/run.py"
    )
    assert only(diagnose(tmp_path, port)).message.startswith("torchrun could not listen: port 29511")
    for name, link in (("node-a.log", ""), ("node-b.log", "mlx5_core 0000:3b:00.0 ens3: Link down\n")):
        (tmp_path / name).write_text(link + raised(0, "RendezvousTimeoutError", prefix=""))
    both = [str(tmp_path / "node-a.log"), str(tmp_path / "node-b.log")]
    report = diagnose_logs(both)
    assert report is not None and only(report).message.startswith("the host of node-b.log lost a port")
    (tmp_path / "node-b.log").write_text(raised(0, "RendezvousTimeoutError", prefix=""))
    report = diagnose_logs(both)
    assert report is not None and only(report).message.startswith(
        "the nodes of node-a.log, node-b.log did not complete"
    )


@pytest.mark.parametrize("wanted", [2, 3])
def test_how_many_nodes_came_to_a_rendezvous(tmp_path: Path, wanted: int) -> None:
    text = "".join(
        f"  min_nodes        : {wanted}\nI9 rdzv.py:7] The node '{node}_71_0' attempts to join the next round of the rendezvous 'j'.\n"
        for node in ("h-a", "h-b", "h-a")
    )
    message = only(diagnose(tmp_path, text + raised(0, "RendezvousTimeoutError", prefix=""))).message
    assert ("of the 3 nodes that it needs, the log shows 2 that came: h-a, h-b" in message) is (wanted == 3)


@pytest.mark.parametrize(("second", "culprits"), [("09", (2,)), ("00", ())])
def test_an_exception_without_a_rank_is_probably_of_the_one_that_ended_first(
    tmp_path: Path, second: str, culprits: tuple[int, ...]
) -> None:
    ends = table(2, 1, "To enable traceback see: x") + "".join(
        table(r, 1, "To enable traceback see: x").replace(":00\n", f":{second}\n", 1) for r in (0, 1)
    )
    f = only(diagnose(tmp_path, raised(0, "KeyError: 'box'", prefix="") + ends))
    assert (f.culprits, f.certainty) == (culprits, "suspected")
    assert f.message.startswith("probably rank 2 raised KeyError") is bool(culprits)


def test_advice_on_nccls_own_calls_and_on_a_checkpoint_of_other_sizes(tmp_path: Path) -> None:
    assert "NCCL_NVLS_ENABLE=0" in only(diagnose(tmp_path, NVLS)).advice
    assert "NCCL_CUMEM_ENABLE=0" in only(diagnose(tmp_path, NVLS.replace("nvls", "shm"))).advice
    fault = NVLS.replace("nvls", "shm").replace("the operation cannot be performed", "an illegal memory access")
    assert "CUDA_LAUNCH_BLOCKING" in only(diagnose(tmp_path, fault)).advice
    assert "number of ranks" in only(diagnose(tmp_path, raised(0, SIZES) + raised(1, SIZES))).advice


def test_the_rank_that_the_others_wait_for_was_saving(tmp_path: Path) -> None:
    waits = "".join(timeout(r) for r in range(1, 4))
    last = "[rank0] 2031-03-02 09:00:00 INFO {}\n" + "[rank1] step 9\n"
    assert "longer timeout" in only(diagnose(tmp_path, last.format("wrote part-3.safetensors") + waits)).advice
    assert "longer timeout" not in only(diagnose(tmp_path, last.format("shuffled the index") + waits)).advice


PANIC = "2031-03-02T04:31:10.1+00:00 n7 kernel: {}\n"
MACHINE_CHECK = PANIC.format("mce: [Hardware Error]: CPU 44: Machine Check Exception: 5 Bank 13: bd80") + PANIC.format(
    "Kernel panic - not syncing: Fatal machine check"
)
PIPE = 'Traceback (most recent call last):\n  File "/w/serve.py", line 3, in <module>\n  File "/usr/lib/python3.11/multiprocessing/connection.py", line 383, in _recv\n    raise EOFError\nEOFError\n'
LOADED = "[2031-03-02 09:00:00 TP1] ValueError: TP rank 1 could finish the model loading, but there are other ranks that didn't finish loading.\n"
CACHE = (
    "InductorError: FileNotFoundError: [Errno 2] No such file or directory: '/tmp/torchinductor_u/triton/4/k.cubin.tmp'"
)


def test_a_host_whose_kernel_stopped_is_one_event_and_its_console_a_log(tmp_path: Path) -> None:
    (tmp_path / "n7-console.txt").write_text(MACHINE_CHECK)
    (tmp_path / "job.log").write_text(
        "n7:1:2 [0] NCCL INFO comm 0x1 rank 4 nranks 8 cudaDev 0 busId 1b000 - Init COMPLETE\ng1:7:9 [0] NCCL WARN socketProgress: Connection closed by remote peer n7<417>\n"
    )
    report = diagnose_logs([str(tmp_path)])
    assert report is not None
    f = only(report)
    assert f.message.startswith("host n7 (rank 4) was lost with all its processes: CPU 44: Machine Check Exception")
    assert f.culprits == (4,) and f.certainty == "suspected" and "hardware" in f.advice


def test_what_only_reports_another_process_is_no_failure(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, LOADED))
    assert (f.kind, f.culprits) == ("timeout", ()) and f.message.startswith("TP1 had loaded its part")
    fault = "Fatal Python error: Segmentation fault\n"
    assert "EOFError" not in only(diagnose(tmp_path, fault + PIPE)).message
    inner = "RuntimeError: target is longer than the input\n"
    text = raised(0, inner, prefix="") + "During handling of the above exception, another exception occurred:\n\n"
    text += raised(0, "DeadlockDetectedException: DeadLock detected from rank: 1 ", prefix="") + raised(
        0, inner, prefix=""
    )
    f = only(diagnose(tmp_path, text))
    assert f.culprits == (1,) and "target is longer" in f.message


def test_the_exception_with_its_own_remedy_counts_more_than_one_of_shapes(tmp_path: Path) -> None:
    again = "\nDuring handling of the above exception, another exception occurred:\n\n"
    shapes = "RuntimeError: Sizes of tensors must match except in dimension 0. Expected 12 but got 9\n"
    dispatch = "RuntimeError: You can't use batches of different size with `dispatch_batches=True`"
    f = only(diagnose(tmp_path, raised(0, shapes, prefix="") + again + raised(0, dispatch, prefix="")))
    assert f.message.startswith("a process raised RuntimeError: You can't use batches") and "because of" in f.message
    assert f.advice.startswith("pass dispatch_batches=False")
    f = only(
        diagnose(tmp_path, raised(0, shapes, prefix="") + again + raised(0, "RuntimeError: step failed", prefix=""))
    )
    assert f.message.startswith("a process raised RuntimeError: Sizes of tensors") and "max_length" in f.advice


def test_the_error_of_rays_driver_follows_that_of_its_worker(tmp_path: Path) -> None:
    driver = "ray.train.v2.api.exceptions.WorkerGroupError: Training failed due to worker errors:\n[Rank 3 Error Snippet]:\nray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"
    worker = "2 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed due to other reasons\n"
    f = only(diagnose(tmp_path, worker + raised(0, driver, prefix="")))
    assert (f.kind, f.cause) == ("rank_lost", "killed") and "WorkerGroupError" not in f.message


def test_who_waits_in_horovod_is_not_who_is_late(tmp_path: Path) -> None:
    missing = "[1,1]<stderr>:Missing ranks:\n[1,1]<stderr>:0: [broadcast.a, broadcast.b ...]\n"
    steps = "".join(f"[1,{q}]<stdout>:step {n} loss 0.3\n" for n in range(40) for q in (0, 1))
    (note,) = (n for n in diagnose(tmp_path, missing + steps + "Training finished\n").notes if "Horovod" in n)
    assert note.startswith("others waited in Horovod for rank 0 on line 2; the job went on") and "rank 1" not in note


def test_a_status_of_a_child_process_is_a_signal(tmp_path: Path) -> None:
    line = "[2031-03-02 09:00:00] Child process unexpectedly failed with an exit code 9. pid=7071\n"
    assert only(diagnose(tmp_path, line)).message == "process 7071 was killed by SIGKILL"


def test_the_source_in_a_traceback_is_no_progress(tmp_path: Path) -> None:
    what = "RuntimeError: Missing key in checkpoint state_dict: gate"
    text = "".join(raised(r, what).replace("step()", "load(step=1000)") for r in (0, 1))
    assert not any("went on" in note for note in diagnose(tmp_path, text + text).notes)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (raised(3, CACHE), "TRITON_CACHE_DIR"),
        (raised(3, "RuntimeError: Expected all tensors to be on the same device, but found cuda:3 and cuda:0"), "LOCAL_RANK"),
        ("*** An error occurred in MPI_Init\n", "srun"),
        (raised(3, "OSError: We couldn't connect to 'https://huggingface.co' to load the files"), "download once"),
        ("(autoscaler +1m) Warning: The following resource request cannot be scheduled right now: {'GPU': 1.0}. This is\n", "ray status"),
    ],
)  # fmt: skip
def test_more_advice_that_follows_the_cause(tmp_path: Path, text: str, word: str) -> None:
    assert word in only(diagnose(tmp_path, text)).advice


def test_nccls_own_line_says_more_than_the_exception_after_it(tmp_path: Path) -> None:
    warn = NVLS.replace("nvls.cc", "p2p.cc").replace(
        "the operation cannot be performed in the present state", "invalid device ordinal"
    )
    f = only(diagnose(tmp_path, warn + "[rank0]: Cuda failure 101 'invalid device ordinal'\n"))
    assert "NCCL_CUMEM_ENABLE=0" in f.advice


def test_ranks_that_wait_for_tokens_of_experts(tmp_path: Path) -> None:
    late = "RuntimeError: DeepEP error: timeout (dispatch CPU)"
    waited = "".join(raised(r, late) for r in range(4))
    f = only(diagnose(tmp_path, waited))
    assert (f.kind, f.culprits, f.victims) == ("stall", (), (0, 1, 2, 3)) and "NVSHMEM" in f.advice
    assert [line for line in finding_lines(f) if "where" in line] and not any("waiting:" in x for x in finding_lines(f))
    f = only(diagnose(tmp_path, f"{waited}[rank4]: compiled\n"))
    assert f.culprits == (4,) and "rank 4 reported no timeout" in f.message


def test_megatron_names_the_rank_whose_numbers_are_not_finite(tmp_path: Path) -> None:
    line = "ERROR:megatron.core.rerun_state_machine:Unexpected result {} on rank 3 at iteration #30 invocation #2 (message='found NaN in local {}')\n"
    ended = table(3, 16, "To enable traceback see: x")
    f = only(diagnose(tmp_path, line.format("nan", "grad norm for bucket #0 in backward pass") + ended))
    assert (f.kind, f.cause, f.culprits) == ("nonfinite", "gradient", (3,)) and "iteration 30" in f.message
    assert only(diagnose(tmp_path, line.format("nan", "forward loss calculation") + ended)).cause == "loss"
    assert diagnose(tmp_path, line.format("7.31", "x") + "step 31 loss 2.1\n").findings == ()


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("RuntimeError: Rank 3, node n1, device 3, iteration 30: Unexpected result nan (message='found NaN in local grad norm for bucket #0')", "gradient"),
        ("RuntimeError: Rank 3, node n1, device 3, iteration 30: Unexpected result nan (message='found NaN in local forward loss')", "loss"),
        ("AssertionError: Rank 3: found NaN in local grad norm in backward pass before data-parallel communication collective. Device: 3, node: n1", "gradient"),
    ],
)  # fmt: skip
def test_an_exception_of_megatron_names_the_rank_that_is_not_finite(tmp_path: Path, what: str, cause: str) -> None:
    f = only(diagnose(tmp_path, raised(3, what)))
    assert (f.kind, f.cause, f.culprits) == ("nonfinite", cause, (3,)) and f.message.startswith("rank 3 found a ")


HF = "{{'loss': {}, 'grad_norm': {}, 'learning_rate': 1e-05, 'epoch': 0.{}}}\n"
SUMMARY = "{'train_runtime': 24.7, 'train_loss': 0.17, 'epoch': 2.8}\nSaving model checkpoint to o\n"


@pytest.mark.parametrize(("loss", "words"), [("0.0", "0, and the norm of the gradient NaN"), ("nan", "NaN")])
@pytest.mark.parametrize("end", ["", SUMMARY])
def test_a_trainer_that_leaves_nan_out_of_its_loss(tmp_path: Path, loss: str, words: str, end: str) -> None:
    first = HF.format("1.7", "2.2", 1)
    f = only(diagnose(tmp_path, first + "".join(HF.format(loss, "nan", n) for n in range(2, 30)) + end))
    assert f.kind == "nonfinite" and f"the loss is {words}, from line 2 " in f.message
    healthy = "".join(HF.format("0.0", "0.01", n) + HF.format("1.2", "nan", n) for n in range(9))
    assert diagnose(tmp_path, first + healthy + end).findings == ()


def test_a_store_whose_address_means_the_host_itself(tmp_path: Path) -> None:
    what = "torch.distributed.DistNetworkError: The client socket has timed out after 300000ms while trying to connect to (0.0.0.0, 51216)."
    f = only(diagnose(tmp_path, raised(0, what)))
    assert "nobody listens there on its own host" in f.message and "rank 0, or torchrun" not in f.message


def test_the_pod_in_the_command_that_describes_it(tmp_path: Path) -> None:
    text = "$ kubectl -n ml describe pod fit-worker-1 | tail -3\n  Warning  FailedScheduling  12m  default-scheduler  0/5 nodes are available: 5 Insufficient nvidia.com/gpu.\n"
    assert "did not start on fit-worker-1: 0/5 nodes" in only(diagnose(tmp_path, text)).message
    labelled = text.replace("describe pod fit-worker-1", "describe pods -l app=fit")
    assert "-l" not in only(diagnose(tmp_path, labelled)).message


def test_the_launcher_of_deepspeed_is_no_rank(tmp_path: Path) -> None:
    what = "RuntimeError: Using hostfile at h but host=10.1.1.2 was not reachable via ssh. If you are running"
    f = only(diagnose(tmp_path, raised(0, what, file="/e/deepspeed/launcher/runner.py", prefix="")))
    assert f.message.startswith("deepspeed raised RuntimeError") and "without a password" in f.advice


def test_a_process_that_lost_its_gpu(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, raised(2, "torch.AcceleratorError: CUDA error: unknown error")))
    assert "a container loses its GPUs" in f.advice


def test_a_pipe_to_a_child_is_no_connection_of_ranks(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, PIPE + raised(0, "RuntimeError: Pin memory thread exited unexpectedly", prefix="")))
    assert "the other end of a pipe" in f.message and "NCCL" not in f.advice and "num_workers=0" in f.advice


NODE = "(worker1, rank=1, pid=4122, ip=10.1.0.3) "
OMP = "W0404 08:00:00.1 60 torch/distributed/run.py:766] Setting OMP_NUM_THREADS environment variable for each process to be 1\n"
FULL = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def test_the_number_of_a_launchers_node_in_front_of_each_line_is_no_rank(tmp_path: Path) -> None:
    failed = raised(0, FULL, prefix=NODE)
    f = only(diagnose(tmp_path, NODE + OMP + failed))
    assert f.culprits == () and f.message.startswith("worker1 ran out of GPU memory")
    ended = "".join(NODE + line + "\n" for line in table(11, 1, "To enable traceback see: x").splitlines())
    assert only(diagnose(tmp_path, NODE + OMP + failed + ended)).culprits == (11,)
    assert only(diagnose(tmp_path, NODE + OMP + raised(11, FULL, prefix=NODE + "[rank{}]: "))).culprits == (11,)
    assert only(diagnose(tmp_path, failed)).culprits == (1,)  # without torchrun each process has its own


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("failed       37  : qmaster enforced h_rt, h_cpu, or h_vmem limit\n", "qmaster enforced"),
        ("771.0 kim Error from slot1@n3: Job has gone over memory limit of 819 megabytes. Peak usage: 821 megabytes.\n", "over memory limit of 819"),
    ],
)  # fmt: skip
def test_limits_of_sge_and_htcondor(tmp_path: Path, line: str, words: str) -> None:
    report = diagnose(tmp_path, "[rank0] step 1 loss 2.1\n" + line)
    assert report.findings == () and words in (report.state_text or "")
    assert any("more host memory" in note for note in report.notes)


@pytest.mark.parametrize("level", ["ERROR\t2031-03-01 10:55:48 +0000\t{}\t", "ERROR 2031-03-01 10:55:48 +0000 {} ", ""])
@pytest.mark.parametrize(
    ("end", "text"),
    [
        ("of 137. Termination reason: OOMKilled. See the logs: https://x\n", "its memory limit ran out of memory"),
        ("of 137. See the logs: https://x\n", "replica workerpool1-0 was killed by SIGKILL"),
    ],
)
def test_how_a_replica_ended_comes_before_the_connection_that_its_peer_lost(
    tmp_path: Path, level: str, end: str, text: str
) -> None:
    def line(of: str, what: str) -> str:
        return level.format(of) + what

    bar = line("workerpool0-0", "Epoch 0:  18%|#8        | 1082/6012 [20:01<1:31:10,  1.11s/it]\n")
    lost = line(
        "workerpool0-0",
        "torch.distributed.DistBackendError: NCCL error in: ../NCCLUtils.hpp:9, remote process exited\n",
    )
    lost += line("workerpool0-0", "Last error:\n") + line(
        "workerpool0-0", "socketProgress: Call to recv from 10.9.0.3<47> failed : Connection reset by peer\n"
    )
    lost += line(
        "workerpool0-0",
        "torch.distributed.elastic.multiprocessing.api: [ERROR] failed (exitcode: 1) local_rank: 1 (pid: 64) of binary: python\n",
    )
    found = only(
        diagnose(
            tmp_path, bar + lost + line("service", "The replica workerpool1-0 exited with a non-zero status " + end)
        )
    )
    assert found.cause == "killed" and text in found.message and "replica workerpool1-0" in found.message
    found = only(diagnose(tmp_path, bar + lost, "of_the_peer.log"))
    assert "10.9.0.3" in found.message and "no progress" not in found.cost


def test_replicas_and_instances_of_clouds(tmp_path: Path) -> None:
    memory = "The replica workerpool1-0 ran out-of-memory and exited with a non-zero status of 137(SIGKILL).\n"
    f = only(diagnose(tmp_path, memory))
    assert f.cause == "killed" and f.message.startswith("replica workerpool1-0 was killed: the host or its memory")
    lost = "job 4f#1 FAILED statusReason: Host EC2 (instance i-0a1b) terminated.\n"
    assert only(diagnose(tmp_path, lost)).message.startswith("node i-0a1b was lost")


def test_errors_of_triton_are_those_of_the_gpu(tmp_path: Path) -> None:
    fault = "RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered"
    assert "had a CUDA error: an illegal memory access" in only(diagnose(tmp_path, raised(2, fault))).message
    full = fault.replace("an illegal memory access was encountered", "out of memory")
    assert "ran out of GPU memory" in only(diagnose(tmp_path, raised(2, full))).message


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("config: DeepEP buffer: dispatch timeout=100 s, combine timeout=100 s\n", ""),
        ("attempt 1: FAILED statusReason: Host EC2 (instance i-0abc) terminated., will be retried\n", "node i-0abc was lost"),
        ("ERROR:megatron.core.rerun_state_machine:Unexpected result nan on rank 1 at iteration #60 invocation #1 (message='NaN in local loss')\n", "rank 1 found"),
    ],
)  # fmt: skip
def test_what_a_job_survived_is_at_most_a_note(tmp_path: Path, text: str, note: str) -> None:
    steps = "".join(f"[rank{n % 2}] step {n} loss 2.1\n" for n in range(60)) + "[rank0] training finished\n"
    report = diagnose(tmp_path, text + steps)
    assert report.findings == () and report.state_text is None
    past = [n for n in report.notes if "went on or ended well" in n]
    assert [n.startswith(note) for n in past] == ([True] if note else [])


def test_a_server_that_goes_on_after_a_child_was_started_again(tmp_path: Path) -> None:
    child = "[2031-05-05 10:00:00] Child process unexpectedly failed with an exit code 9. pid=7071\n"
    served = "".join(f"[2031-05-05 10:{n}:10 TP0] Decode batch. #running-req: {n}\n" for n in range(10, 59))
    assert diagnose(tmp_path, child + served).findings == ()
    assert diagnose(tmp_path, served + child).findings != ()


def test_one_process_with_two_names_is_named_once(tmp_path: Path) -> None:
    what = "CUDA error: out of memory"
    text = f"(Worker pid=71, ip=10.1.1.3) {what}\nray.exceptions.RayTaskError(RuntimeError): ray::Worker.run() (pid=71, ip=10.1.1.3, actor_id=7, repr=<W>)\n"
    f = only(diagnose(tmp_path, text + f'  File "/a/d.py", line 8, in step\n    raise x\nRuntimeError: {what}\n'))
    assert f.message.startswith("Worker pid=71 on 10.1.1.3 ran out of GPU memory")


def test_counters_with_the_work_that_was_started_between_them(tmp_path: Path) -> None:
    started = ", last started work: 41 (_ALLGATHER_BASE), last completed"
    text = "".join(counters(r, 41, 44, 40).replace(", last completed", started) for r in (0, 1))
    text += counters(2, 39, 39, 38).replace(", last completed", started)
    assert (
        only(diagnose(tmp_path, text)).message
        == only(diagnose(tmp_path, text.replace(started, ", last completed"))).message
    )


def test_a_nan_loss_is_noted_next_to_a_timeout(tmp_path: Path) -> None:
    steps = "".join(f"step {n} loss/train/total={'nan' if n > 3 else '0.2'}\n" for n in range(9))
    report = diagnose(tmp_path, steps + timeout(32) + timeout(33))
    assert only(report).kind == "timeout"
    assert any("the last loss that it shows is NaN (since line 5)" in note for note in report.notes)


def test_the_exception_that_another_one_was_raised_from(tmp_path: Path) -> None:
    text = (
        raised(0, "OSError: [Errno 28] No space left on device")
        + "[rank0]: \n[rank0]: The above exception was the direct cause of the following exception:\n"
    )
    f = only(
        diagnose(tmp_path, text + raised(0, "DatasetGenerationError: An error occurred while generating the dataset"))
    )
    assert "generating the dataset, because of OSError: [Errno 28] No space left on device" in f.message
    assert "make room" in f.advice


def test_an_answer_of_a_server_only_reports_its_failure(tmp_path: Path) -> None:
    full = "(Engine pid=44, ip=10.0.0.3) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB.\n"
    echo = raised(
        0,
        "requests.exceptions.HTTPError: 500 Server Error: Internal Server Error for url: http://10.0.0.3:1/u",
        prefix="(Actor pid=50, ip=10.0.0.2) ",
    )
    assert only(diagnose(tmp_path, full + echo)).message.startswith("Engine pid=44")


def test_a_limit_too_short_to_show_anything(tmp_path: Path) -> None:
    text = "".join(timeout(r, seq=1).replace("600000", "1000").replace("600020", "1090") for r in range(4))
    f = only(diagnose(tmp_path, text + "".join(counters(r, 1, 1, 0) for r in range(4))))
    assert "too short" in f.message and "timedelta" in f.advice


def test_the_list_of_failures_is_read_whatever_its_spacing(tmp_path: Path) -> None:
    listed = table(3, -9, "Signal 9 (SIGKILL) received by PID 903")
    for text in (listed, listed.replace(" (pid", "  (pid").replace(" (local_rank", "   (local_rank")):
        assert only(diagnose(tmp_path, text)).culprits == (3,)


def test_a_job_that_its_nan_ended_has_lost_no_training_since(tmp_path: Path) -> None:
    losses = "step 1 loss: 2.1\nstep 2 loss: nan\n"
    assert only(diagnose(tmp_path, losses + "step 3 loss: nan\n")).cost == "what was trained since then is lost"
    ended = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n" + table(
        0, 1, "To enable traceback see: https://pytorch.org"
    )
    assert only(diagnose(tmp_path, losses + ended)).cost == ""


@pytest.mark.parametrize(
    ("error", "gpu"),
    [
        ("jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.", False),
        ("RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 3; 61.0 GiB total capacity)", False),
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB.", True),
    ],
)  # fmt: skip
def test_only_a_log_that_names_a_gpu_is_said_to_be_of_one(tmp_path: Path, error: str, gpu: bool) -> None:
    f = only(diagnose(tmp_path, raised(2, error)))
    assert f.message.startswith(f"rank 2 ran out of {'GPU' if gpu else 'device'} memory")
    assert ("nvidia-smi" in f.advice) is gpu


def test_gloo_connects_to_a_name_of_the_host_itself(tmp_path: Path) -> None:
    what = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:799] connect [127.0.1.1]:4884: Connection refused"
    f = only(diagnose(tmp_path, raised(1, what)))
    assert (f.kind, f.cause) == ("rank_lost", "configuration") and "127.0.1.1" in f.message
    assert "/etc/hosts" in f.advice and "GLOO_SOCKET_IFNAME" in f.advice


_GLOO = "[rank{}]:[E602 10:14:36.3 ProcessGroupGloo.cpp:143] Gloo connectFullMesh failed with [/b/gloo/transport/tcp/pair.cc:{}] {}\n"


def test_ranks_that_gloo_could_not_connect_and_those_whose_connections_were_closed(tmp_path: Path) -> None:
    refused = "timed out connecting: SO_ERROR: Connection refused, remote=[{}]:17182"
    closed = "".join(_GLOO.format(r, 547, "Connection closed by peer [10.6.0.11]:41102") for r in (4, 5))
    inside = "".join(_GLOO.format(r, 144, refused.format("127.0.1.1")) for r in (0, 1))
    f = only(diagnose(tmp_path, inside + closed))
    assert (f.kind, f.cause, f.culprits, f.victims) == ("rank_lost", "configuration", (4, 5), (0, 1))
    assert "gloo on ranks 0, 1 could not connect to a rank at 127.0.1.1" in f.message and "getent hosts" in f.advice
    assert only(diagnose(tmp_path, inside)).culprits == ()
    f = only(diagnose(tmp_path, _GLOO.format(0, 144, refused.format("10.6.0.12")) + closed))
    assert f.message.startswith("gloo on rank 0 could not connect") and "remote=[10.6.0.12]:17182" in f.message
    assert "ranks 4, 5" in only(diagnose(tmp_path, closed)).message


def test_a_full_dev_shm_of_nccl_is_no_matter_of_loaders(tmp_path: Path) -> None:
    line = "n1:5:7 [1] misc/shmutils.cc:129 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-Ab1 (size 9637888), error: No space left on device (28)\n"
    f = only(diagnose(tmp_path, line))
    assert "nccl-*" in f.advice and "DataLoader" not in f.advice


@pytest.mark.parametrize(
    ("end", "well"), [("after 90 iterations", True), ("at iteration 90", True), ("after receiving SIGTERM.", False)]
)
def test_megatron_reports_its_end(tmp_path: Path, end: str, well: bool) -> None:
    report = diagnose(
        tmp_path, f" iteration 90/ 90 | lm loss: 1.5 |\n[exiting program {end}] datetime: 2031-03-20 18:12:03\n"
    )
    assert any("ended well" in note for note in report.notes) is well


@pytest.mark.parametrize(
    ("bar", "well"),
    [
        ("Training progress: 100%|##########| 12/12 [10:01<00:00, 50.1s/it]", True),
        ("Training progress:  92%|#########2| 11/12 [09:11<00:50, 50.1s/it]", False),
        ("Tokenizing: 100%|##########| 12/12 [10:01<00:00, 50.1s/it]", False),
    ],
)
def test_errors_before_the_full_bar_of_a_training_did_not_end_it(tmp_path: Path, bar: str, well: bool) -> None:
    failed = 'Traceback (most recent call last):\n  File "answer_7.py", line 3, in solve\nIndexError: list index out of range\n'
    log = "".join(f"step:{n} - reward:0.{n}\n" for n in range(1, 12)) + failed + f"step:12 - reward:0.5\n{bar}\n"
    report = diagnose(tmp_path, log)
    assert any("ended well" in note for note in report.notes) is well
    assert not (well and report.findings)
