"""Texts on failures that depend on more than their message, and what to do; what a message means is in its record, in
`distdiag.sources.logs.messages`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from distdiag.diagnosis.known_errors import BUS_ERROR, FULL_GPU, PARALLEL_SIZES, TAKEN_PORT
from distdiag.sources.logs.message import Meaning
from distdiag.terms.untrusted import bounded

FULL_HOST = Meaning(
    "rank_lost",
    "killed",
    "was killed: the host itself ran out of memory, not a limit of the job",
    "no limit of the job (--mem, resources.limits.memory) was reached: let the ranks of that host hold less (offload to the CPU, copies of the model while it loads, pinned memory, DataLoader workers, checkpoints in /dev/shm), give it fewer ranks or more memory, or see what else holds memory there",
)
BY_RAY = Meaning(
    "rank_lost",
    "killed",
    "was killed by Ray's memory monitor: the host ran out of memory",
    "let the workers of that host hold less of its memory (CPU offload, buffers of the rollout, a leak), start fewer of them there, give it more host memory, or raise RAY_memory_usage_threshold; `dmesg` does not show it, as Ray kills before the kernel does",
)
OF_EARLIER_LOG = "the GPU that this rank had in the run before, whose log names node and device"
RERUN_ELSEWHERE = "resume from the checkpoint that Megatron has saved, with that rank on another GPU, as its log asks: another result there shows a fault of this GPU (test it: `dcgmi diag -r 3`); the same one, the program or its data (that rank's batch, learning rate, clipping)"
# what Megatron found when it ran an iteration again, and what to do
RERUNS: Mapping[str, tuple[str, str]] = MappingProxyType({
    "transient": ("run again on the same GPU (node {host}, device {device}), it got another result: probably a fault of that GPU", "test that GPU (`dcgmi diag -r 3`), take its node out if it fails or if this comes back, and resume from a checkpoint before that iteration, not from the one that Megatron saves when it stops: data and program are probably right"),
    "persistent": ("run again on another GPU (node {host}, device {device}), it got another result: probably a fault of the GPU that it had before", f"take out {OF_EARLIER_LOG}, and test it (`dcgmi diag -r 3`); resume from the last checkpoint"),
    "application": ("run again on another GPU (node {host}, device {device}), it got the same result: not a fault of the GPU", "look at that rank's batch and the loss before it, lower the learning rate, clip gradients"),
})  # fmt: skip
OF_BATCH = "; a last, smaller batch is the most common reason: drop_last=True, pad it, or exchange the sizes first"
AFTER_CAUGHT = "mend what raised it (filter that sample, or skip it on all ranks alike); a rank that catches an exception must still make the calls that the others make"
_OF_ENGINE = "lower the engine's share of memory (gpu_memory_utilization, mem-fraction-static)"
_OTHERS = "something else holds memory of that GPU: see who with `nvidia-smi`, end it, or keep this job off that GPU (CUDA_VISIBLE_DEVICES, one process fewer)"
_OTHER_RANKS = "let each rank use its own GPU only: call torch.cuda.set_device(LOCAL_RANK) before anything uses CUDA, and load checkpoints with map_location='cpu' or the rank's own device (torch.load puts tensors on the GPU from which they were saved)"
_LEFT = "end the processes of the earlier attempt before a restart (`nvidia-smi` names them, `kill -9 PID`), and see why that attempt failed: neither the batch nor the model is the cause"
# by whether an inference engine ran out of it, and who else holds a part
FULL_GPUS: Mapping[tuple[bool, str], str] = MappingProxyType({
    (False, ""): FULL_GPU,
    (False, "others"): _OTHERS,
    **dict.fromkeys(((False, "ranks"), (True, "ranks")), _OTHER_RANKS),
    **dict.fromkeys(((False, "left"), (True, "left")), _LEFT),
    (True, ""): f"{_OF_ENGINE}, the number of requests (max_num_seqs, max-running-requests) or the context length, or use more GPUs (tensor parallel); other processes on that GPU: `nvidia-smi`",
    (True, "others"): f"{_OTHERS}; or {_OF_ENGINE}",
})  # fmt: skip
_TAKE_OUT = "take the node out (drain it), keep `nvidia-bug-report.sh`"
# errors of the hardware, or of the driver's own processor
XIDS: Mapping[str, str] = MappingProxyType({
    **dict.fromkeys(("48", "64", "94", "95"), f"it is the GPU's memory: {_TAKE_OUT}; reset the GPU, see `nvidia-smi -q -d ECC,ROW_REMAPPER`, replace it if it comes back"),
    "74": f"it is an NVLink: {_TAKE_OUT}; see `nvidia-smi nvlink -e` and the fabric manager's log, reseat or replace the GPU or switch",
    "79": f"it is the hardware (bus, power or GPU): {_TAKE_OUT}; power-cycle the node, reseat or replace the GPU",
    **dict.fromkeys(("119", "120"), f"the GPU's own firmware (GSP) does not answer: {_TAKE_OUT}; reboot it, update the driver, or switch GSP off where NVIDIA supports that; a longer timeout does not help"),
})  # fmt: skip
PROGRAM_XIDS = ("13", "31", "43", "45", "69")
OF_PROGRAM = "such an Xid is most often a fault of the program (a kernel reads or writes out of bounds): run once with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer; if only this GPU has it, test the GPU"
# signals that stopped the job from outside
STOPS: Mapping[str, str] = MappingProxyType({
    "SIGINT": "Ctrl-C (SIGINT)",
    "SIGHUP": "SIGHUP: its terminal or ssh session was closed; start it in tmux, with setsid or by the scheduler (nohup does not help with torchrun, which handles SIGHUP itself)",
})  # fmt: skip
_AFTER_STOP = (
    (bounded(r"over memory limit|h_vmem"), "give the job more host memory (request_memory, h_vmem), or use fewer DataLoader workers"),
    (bounded(r"RUNLIMIT"), "give the job more time (bsub -W), or save a checkpoint before the limit (bsub -wa USR1 -wt 2 sends that signal two minutes before it) and submit it again"),
    (bounded(r"[Dd]eadline"), "give the job more time (activeDeadlineSeconds), and resume from its newest checkpoint"),
    (bounded(r"walltime"), "give the job more time (qsub -l walltime=), or save a checkpoint before the limit and submit it again"),
    (bounded(r"h_rt"), "give the job more time (qsub -l h_rt=), or save a checkpoint before the limit (qsub -notify, -l s_rt=) and submit it again"),
    (bounded(r"(?<!LSF run )time limit"), "give the job more time (--time), or save a checkpoint before the limit (sbatch --signal=USR1@120) and requeue it"),
    (bounded(r"preempt|PREEMPT|interruption"), "a preempted job is not faulty: {again}, and let it resume from its newest checkpoint"),
    (bounded(r"was low on|exceeds the (?:total )?limit"), "give the pods a request and a limit of what ran out (resources.requests), or use less of it: caches and checkpoints on a volume"),
)  # fmt: skip
KILLED = "the kernel kills for memory: `dmesg -T | grep -i oom`, memory.events of the cgroup; else a person or the scheduler did"
SIGNALS: Mapping[str, str] = MappingProxyType({
    "SIGKILL": KILLED,
    "SIGSEGV": "a fault in native code: run with faulthandler (`python -X faulthandler`), and check that torch, CUDA and extensions fit each other",
    "SIGBUS": BUS_ERROR,
    "SIGABRT": "an assertion in native code, or torch's watchdog: see the lines above in this rank's log",
    "SIGILL": "the binary is built for a different CPU from this node's",
    "SIGFPE": "a division by zero in native code: run with faulthandler",
})  # fmt: skip
STOPS_EARLY = "let one rank decide when the training stops early, and tell all (all_reduce or broadcast of a flag, before each rank leaves the loop): {who} may have left it alone; else "
GOES_FIRST = (
    "do that work once before the job starts (download, tokenize, cache), or give the process group a longer timeout (timeout= of "
    "init_process_group, InitProcessGroupKwargs, ddp_timeout); if it takes seconds as a rule, see why {who} did not leave {where}"
)
GOES_ON = "do that work before the job starts (tokenize, download), with several processes (num_proc, preprocessing_num_workers), or on all ranks; or give the group a longer timeout (init_process_group, ddp_timeout)"
SURVIVED = "mend that error ({own}): {who} went on after it, most likely on another way than the others; a rank that catches an error must still make the calls that the others make, or raise it on all ranks; else "
PREPARING = (
    "if {who} was still preparing data: do that once before the job starts (build the index, tokenize, download), or give the group a longer "
    "timeout (init_process_group, ddp_timeout, --distributed-timeout-minutes); else "
)
SAVING = (
    "if {who} was still saving: give the group a longer timeout (init_process_group), or let each rank save its own part, asynchronously or to "
    "faster storage; else "
)
COMPILING = (
    "if {who} was still compiling: most likely its inputs had another shape than before (TORCH_LOGS=recompiles names it): pad them to a few sizes or "
    "mark that dimension as dynamic (torch._dynamo.mark_dynamic), and warm up all ranks before the first collective; else "
)
SHARED_PORT = (
    "a port has one listener: if some of these processes are on one host, start one launcher for each node, not for each GPU (srun: "
    "--ntasks-per-node=1); else " + TAKEN_PORT
)
IN_COLLECTIVE = "it was raised inside a collective, where a rank fails after another, too: read the others' logs first"
AFTER_THE_WORK = "read its traceback; if the work was done by then, it is of what follows (an upload, a clean-up, a check of the launcher): what was saved before it is not affected"
SAME_EVERYWHERE = "the cause is not one rank: correct the program or the environment"
# Lightning's call that waits for all ranks although it only logs, and the functions by which a stack shows it
LOG, LOGS = "self.log(sync_dist=True)", {"sync_ddp", "_sync_ddp", "sync_ddp_if_available", "_sync_ddp_if_available"}
LOG_ON_ALL = (
    f"call {LOG} on all ranks, outside of any `if rank == 0`, or log there with rank_zero_only=True and sync_dist=False"
)
FIRST = "read what that rank printed before it first: the others may only have failed after it"
OF_ONE_HOST = "only the ranks of {host} have it: compare that host with the others: driver, packages (`pip freeze`), environment variables, mounts and data; if they are equal, start without it"
OF_ALL = (SAME_EVERYWHERE, PARALLEL_SIZES)  # about an exception that ranks not in the log have, too
# about an exception of no, one or more ranks, if its text says nothing
GENERAL = (
    "read its traceback",
    "read its traceback; if no other rank raised it, compare that rank's data with theirs",
    SAME_EVERYWHERE,
)
SEE_LOG = "see that rank's own log (torchrun keeps it with --log-dir DIR --tee 3); @record of torch.distributed.elastic on main puts the traceback into torchrun's table"
# the same, by the launcher that reports the end of a rank
OWN_LOGS: Mapping[str, str] = MappingProxyType({
    **dict.fromkeys(("mpi", "mpirun"), "see what that rank printed before it (mpirun --output-filename DIR keeps its lines apart; Hydra: -prepend-rank)"),
    "srun": "see that rank's own log (srun --output=NAME-%t.log keeps its lines apart)",
})  # fmt: skip
IB_STATUS: Mapping[str, str] = MappingProxyType({
    "12": "no answer after all retries: a link, switch or port is down, or the peer's process ended",
    "5": "flushed: the connection was broken before",
    "1": "local length error",
    "2": "local queue pair error",
    "4": "local protection error: a memory registration is invalid",
    "9": "the peer refused the request as invalid",
    "10": "remote access error",
    "13": "receiver not ready, after all retries",
})  # fmt: skip
LOCAL = ("1", "2", "4")  # of these: errors of the host that reports them


# by whose lines the log has: how it starts a job again
_AGAIN = (
    (bounded(r"\bSlurm\b|slurmstepd|\bsrun: "), "requeue it (sbatch --requeue)"),
    (bounded(r"\b[Rr]aylet\b|\(autoscaler |\bray[.:]|RayTrainWorker|RayActor|\bactor\b"), "let Ray Train start it again (RunConfig(failure_config=FailureConfig(max_failures=…))) on nodes that are left or come back"),
    (bounded(r"\bpod/|kube|Evict"), "let its controller start it again (backoffLimit, restartPolicy, runPolicy)"),
    (bounded(r""), "requeue it (Slurm: sbatch --requeue; Ray Train: FailureConfig(max_failures=…); Kubernetes: backoffLimit)"),
)  # fmt: skip


def advice_on_stop(text: str, lines: str) -> list[str]:
    """Return what to do after something outside stopped the job, by what the log says of it, and whose lines it has."""
    again = next(advice for regex, advice in _AGAIN if regex.search(f"{text}\n{lines}"))
    return [advice.replace("{again}", again) for regex, advice in _AFTER_STOP if regex.search(text)]
