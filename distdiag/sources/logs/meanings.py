"""What the facts in a log mean, and what to do: one row per message, exception, or way to end. A wrong reading is mended here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from distdiag.terms.untrusted import bounded


@dataclass(frozen=True, slots=True)
class Meaning:
    """What an event is reported as.

    Attributes:
        kind, cause: Kind and cause of the finding.
        text: The message after `rank 3`, with the event's fields in braces.
        advice: What to do.
    """

    kind: str
    cause: str
    text: str
    advice: str


_CUDA = "run once with CUDA_LAUNCH_BLOCKING=1: the line that fails may be an earlier one than the log shows"
MEANINGS: Mapping[str, Meaning] = MappingProxyType({
    "cuda_oom": Meaning("rank_lost", "crashed", "ran out of GPU memory{others}", "lower the batch or sequence length of that rank's largest batch, or use checkpointing; "
                        "other processes on that GPU: `nvidia-smi` (`rocm-smi`, `npu-smi`)"),
    "cuda_error": Meaning("rank_lost", "crashed", "had a CUDA error: {what}", _CUDA),
    "hip_error": Meaning("rank_lost", "crashed", "had a GPU error: {what}", "see `dmesg -T` and `rocm-smi` on that host: a hang is the GPU or its driver, an access fault most often a kernel of the program"),
    "xpu_lost": Meaning("gpu", "lost", "lost its GPU ({what})", "see `dmesg -T` on that host: the driver (xe, i915) reset the GPU because a job did not end, or the GPU failed; if only this GPU has it, take it out"),
    "npu_busy": Meaning("rank_lost", "crashed", "could not start HCCL: another process, most often of the last run, still holds the NPU", "end the processes of the last run on that host (`npu-smi info`), wait ten seconds, and start again"),
    "ecc": Meaning("gpu", "ecc", "has a GPU with an uncorrectable memory error (ECC)", "it is the hardware: take the node out, reset or replace the GPU; `nvidia-smi -q -d ECC`"),
    "xid": Meaning("gpu", "xid", "has a GPU with Xid {xid} at PCI {pci}{text}", "look the Xid up in NVIDIA's list; 48, 63, 64, 74, 79, 94, 95 are hardware: take the node out"),
    "device_lost": Meaning("gpu", "lost", "has a GPU that fell off the bus", "it is the hardware: take the node out, reseat or replace the GPU"),
    "shm_full": Meaning("rank_lost", "crashed", "found /dev/shm full", "give the container more shared memory (docker --shm-size, a Memory emptyDir at /dev/shm), or use fewer DataLoader workers"),
    "loader_killed": Meaning("rank_lost", "crashed", "lost a DataLoader worker, killed by {signal}", "if it was killed for memory (`dmesg -T | grep -i oom`), use fewer workers or less prefetch"),
    "port_in_use": Meaning("rank_lost", "crashed", "could not listen: {port} is in use", "end the job that holds the port, or give this one another --master-port (or --rdzv-endpoint)"),
    "duplicate_gpu": Meaning("rank_lost", "crashed", "share one GPU (device {bus})", "call torch.cuda.set_device(LOCAL_RANK) before the first collective, and check CUDA_VISIBLE_DEVICES"),
    "fatal": Meaning("rank_lost", "crashed", "died in native code: {what}", "read the stack below it (the innermost frame comes first); check that torch, CUDA and extensions fit each other"),
    "usage": Meaning("rank_lost", "crashed", "did not accept its arguments: {what}", "correct the command line; torchrun passes no --local-rank: read LOCAL_RANK from the environment"),
    "rank_twice": Meaning("rank_lost", "crashed", "exists twice: two processes have this rank in one job of {world}", "check how the ranks are started: RANK must differ between processes; one launcher per node, with its own --node-rank"),
    "nccl_mismatch": Meaning("mismatch", "op", "or a neighbour made a different call from the rest (NCCL found mismatched collectives)", "run again with NCCL_DEBUG_SUBSYS=COLL, or TORCH_DISTRIBUTED_DEBUG=DETAIL"),
    "gpu_init": Meaning("gpu", "lost", "has a GPU that its driver could not start, at PCI {pci}", "it is the hardware or the driver: see `dmesg -T | grep NVRM`, take the node out, reset the GPU or reboot"),
    "amd_fault": Meaning("gpu", "lost", "has a GPU of which the driver (amdgpu) reports, at PCI {pci}: {what}", "what ran on it is lost: see the lines before it in `dmesg -T` (a ring that timed out: a kernel that hangs; RAS: the memory), and `rocm-smi`; if only this GPU has it, take it out"),
    "sxid": Meaning("gpu", "nvlink", "has a fatal NVSwitch error: SXid {xid} at PCI {pci}: {text}", "it is the NVLink fabric: take the node out, and restart nvidia-fabricmanager; `nvidia-smi nvlink -e`"),
    "node_lost": Meaning("rank_lost", "silent", "was lost with all its processes", "see whether that node is up, and why it failed: `sinfo -R` or `kubectl describe node`, its console and `dmesg -T`; start again without it"),
    "port_error": Meaning("rank_lost", "silent", "lost a port of the network: {what}", "see that host's `ibstat`, `dmesg -T` and the switch: cable, transceiver or port; NCCL does not recover from it"),
    "bad_alloc": Meaning("rank_lost", "crashed", "could not get host memory (std::bad_alloc)", "give the job more host memory (--mem, resources.limits.memory, `ulimit -v`), or use fewer DataLoader workers"),
    "exception": Meaning("rank_lost", "crashed", "raised {type}{what}", ""),
    "host_oom": Meaning("rank_lost", "killed", "was killed: the host or its memory limit ran out of memory", "give the job more host memory (--mem, resources.limits.memory), or use fewer DataLoader workers; pinned memory and checkpoints in /dev/shm count, too"),
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
# what stopped the job from outside
STOPS: Mapping[str, str] = MappingProxyType({
    "cancelled": "Slurm on {host} at {when}: {why}",
    "evicted": "Kubernetes: {pod} was evicted, its node was low on {what}",
    "evicted_pod": "Kubernetes: {pod} was evicted: {what}",
    "preempted": "a preemption ({what})",
    "limit": "the scheduler: {what}",
    "SIGINT": "Ctrl-C (SIGINT)",
    "SIGHUP": "SIGHUP: its terminal or ssh session was closed; start it with nohup, in tmux or by the scheduler",
    "terminated": "{name} from outside: the scheduler, a person, or a launcher whose other node failed",
    "interrupted": "Ctrl-C (KeyboardInterrupt)",
})  # fmt: skip
KILLED = "the kernel kills for memory: `dmesg -T | grep -i oom`, memory.events of the cgroup; else a person or the scheduler did"
SIGNALS: Mapping[str, str] = MappingProxyType({
    "SIGKILL": KILLED,
    "SIGSEGV": "a fault in native code: run with faulthandler (`python -X faulthandler`), and check that torch, CUDA and extensions fit each other",
    "SIGBUS": "most often /dev/shm is full (`df -h /dev/shm`), or a mapped file was truncated; give the container more shared memory",
    "SIGABRT": "an assertion in native code, or torch's watchdog: see the lines above in this rank's log",
    "SIGILL": "the binary is built for a different CPU from this node's",
    "SIGFPE": "a division by zero in native code: run with faulthandler",
})  # fmt: skip
GOES_FIRST = (
    "do that work once before the job starts (download, tokenize, cache), or give the process group a longer timeout (timeout= of "
    "init_process_group, InitProcessGroupKwargs, ddp_timeout); if it takes seconds as a rule, see why {who} did not leave {where}"
)
IN_COLLECTIVE = "it was raised inside a collective, where a rank fails after another, too: read the others' logs first"
SAME_EVERYWHERE = "the cause is not one rank: correct the program or the environment"
# about an exception of no, one or more ranks, if its text says nothing
GENERAL = (
    "read its traceback",
    "read its traceback; if no other rank raised it, compare that rank's data with theirs",
    SAME_EVERYWHERE,
)
SEE_LOG = "see that rank's own log (torchrun keeps it with --log-dir DIR --tee 3); @record of torch.distributed.elastic on main puts the traceback into torchrun's table"
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

# what to do, by the text of an exception or of an error of CUDA
_BY_TEXT: tuple[tuple[re.Pattern[str], str], ...] = (
    (bounded(r"'status': '(?:NOT_AVAILABLE|INFLIGHT)'"), "ZeRO-3 gathers parameters in the order of its first step: every rank must run the same modules in the same order (no branch on the data, mixture of experts: set_z3_leaf_modules)"),
    (bounded(r"exhausted (?:all )?inputs"), "the ranks have different numbers of batches: use drop_last=True or a sampler that pads (DistributedSampler), or Join without throw_on_early_termination"),
    (bounded(r"No module named|cannot import name"), "install it in the environment of all nodes"),
    (bounded(r"system not yet initialized"), "start NVIDIA's fabric manager on that host (`systemctl status nvidia-fabricmanager`); its version must be the driver's"),
    (bounded(r"No CUDA GPUs are available|no CUDA-capable device"), "see what the process may use: CUDA_VISIBLE_DEVICES, --gpus of the container, the scheduler's GPUs; `nvidia-smi` there"),
    (bounded(r"driver on your system is too old"), "that node's NVIDIA driver is older than its torch needs: update the driver there, or take the node out; compare `nvidia-smi` on all nodes"),
    (bounded(r"environment variable \w+ expected"), "start it with torchrun (or srun, mpirun with these variables set): python alone sets no RANK, WORLD_SIZE, MASTER_ADDR"),
    (bounded(r"can't start new thread|pthread_create failed|Resource temporarily unavailable"), "the limit of processes and threads is reached: `ulimit -u`, pids.max of the container; set OMP_NUM_THREADS=1 and use fewer DataLoader workers"),
    (bounded(r"gated repo|40[13] Client Error|Invalid (?:username or password|credentials)"), "the job has no access to it: log in there (HF_TOKEN, `huggingface-cli login`), accept the licence, or use a local copy"),
    (bounded(r"Unable to find address for"), "no interface has the name in GLOO_SOCKET_IFNAME there, or it has no address: compare it with `ip -br addr` on that host"),
    (bounded(r"peer access is not supported|peer mapping"), "these GPUs cannot reach each other's memory: NCCL_P2P_DISABLE=1; see `nvidia-smi topo -p2p r`"),
    (bounded(r"CUDA unknown error|initialization error"), "CUDA cannot start there: see `nvidia-smi`, `dmesg -T | grep -i nvrm`, whether nvidia-uvm is loaded, and CUDA_VISIBLE_DEVICES; reboot the node if its driver was updated"),
    (bounded(r"number of tasks per node configured|SLURM .{0,40}does not match"), "make the two numbers equal: devices= and num_nodes= of the Trainer, --ntasks-per-node and --nodes of sbatch"),
    (bounded(r"size of tensor a|[Ss]izes of tensors must match|shapes cannot be multiplied|must match the existing size|is invalid for input of size"), "the shapes do not fit: if one rank alone raised it, look at its batch (a longer sample, a smaller last batch): truncate or pad (max_length=), check collate_fn, drop_last=True"),
    (bounded(r"[Nn]o available memory for the cache blocks|KV cache .{0,80}(?:larger than|needed)"), "nothing is left for the KV cache after the weights: a higher gpu_memory_utilization, a smaller max_model_len or max_num_seqs, more GPUs (tensor parallel), or quantized weights"),
    (bounded(r"ibv_(?:reg_mr|create)\w* failed.{0,40}annot allocate memory"), "the limit of locked memory is too low on that host: `ulimit -l` in the job, then limits.conf, LimitMEMLOCK of slurmd or the container (--ulimit memlock=-1)"),
    (bounded(r"\b(?:_Array)?MemoryError|Cannot allocate memory|unable to mmap"), "the host's memory, or the job's limit of it, is used up: give the job more (--mem, resources.limits.memory), use fewer DataLoader workers, load less per rank"),
    (bounded(r"native code: Bus error"), SIGNALS["SIGBUS"]),
    (bounded(r"Error building extension"), "the compiler failed: read the lines of ninja and nvcc above it; use an image with nvcc of torch's CUDA version, or prebuilt extensions, and delete torch_extensions in the cache"),
    (bounded(r"MetadataIncompleteBuffer|deserializing header|central directory|invalid load key|Ran out of input|unexpected EOF"), "that file is cut off or damaged there: delete it and fetch it again (was the disk full?), and compare its size with another node's"),
    (bounded(r"which (?:is not this rank|are not these ranks), holds?|Free memory on device .{0,80}less than desired|memory capacity is unbalanced"), "something else holds memory of that GPU: see who with `nvidia-smi`, end it or use another GPU; or lower the share of memory (gpu_memory_utilization, mem-fraction-static)"),
    (bounded(r"received 0 items of ancdata|Too many open files"), "raise the limit (`ulimit -n`), or torch.multiprocessing.set_sharing_strategy('file_system'); keep no batches of the loader alive"),
    (bounded(r"busy or unavailable"), "another process holds that GPU, in exclusive mode (`nvidia-smi -q -d COMPUTE`), or two ranks use one: check CUDA_VISIBLE_DEVICES and LOCAL_RANK"),
    (bounded(r"Check batch related parameters"), "make the three numbers of DeepSpeed's config fit: train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks, or leave one of them out; see that all ranks were launched"),
    (bounded(r"[Cc]an't (?:pickle|get local object)|[Cc]annot pickle"), "what is passed to spawned processes and loaders' workers must be importable: a function of a module instead of a lambda or a local one"),
    (bounded(r"IpcGetMemHandle|IpcOpenMemHandle"), "memory cannot be shared between the GPUs of that host: start the container with --ipc=host, compare the driver and HSA_ENABLE_IPC_MODE_LEGACY (ROCm), and run once with NCCL_P2P_DISABLE=1"),
    (bounded(r"NCCL WARN .{0,20}Cuda failure .{0,6}'(?:invalid argument|unknown error|operation not supported)"), "it is a call of NCCL's own: see the GPU with `nvidia-smi` and `dmesg -T | grep -i xid`, and whether that host's driver is as new as NCCL's CUDA; then run once each with NCCL_CUMEM_ENABLE=0, NCCL_NVLS_ENABLE=0, NCCL_P2P_DISABLE=1"),
    (bounded(r"CUDNN_STATUS_(?:INTERNAL|EXECUTION)"), "most often the GPU's memory is full, or cuDNN, driver and torch do not fit: `nvidia-smi` there, once with torch.backends.cudnn.benchmark=False, once with CUDA_LAUNCH_BLOCKING=1"),
    (bounded(r"No such file or directory"), "check that this path exists on that node: a mount that is missing there, or data that is not copied to all nodes"),
    (bounded(r"STATUS_ALLOC_FAILED|STATUS_NOT_INITIALIZED"), "most often the GPU's memory is full: lower the batch or sequence length; other processes on that GPU: `nvidia-smi`"),
    (bounded(r"undefined symbol|GLIBC|no kernel image"), "that library was built for another version of torch, CUDA, the GPU or the system: install the one that fits, on all nodes"),
    (bounded(r"NVLink"), "it is the hardware: see `dmesg -T | grep -i xid` and `nvidia-smi nvlink -e` on that host, and take the node out"),
    (bounded(r"device-side assert"), "most often an index out of range (labels, embeddings): check the inputs of that step, and run once with CUDA_LAUNCH_BLOCKING=1"),
    (bounded(r"\b(?:NaN|nan|Inf)\b|not finite"), "the numbers diverged on that rank: look at its batch and the loss before, lower the learning rate, clip gradients; if a restart from the same checkpoint passes, test that GPU"),
    (bounded(r"inline_container|PytorchStreamWriter"), "the file could not be written whole: look for space and quota where checkpoints go (`df -h`)"),
    (bounded(r"DataLoader timed out"), "a worker of the loader did not deliver in time: take the workers' stacks while it waits (`py-spy dump --pid`), look at the storage; the loader's timeout= is the limit"),
    (bounded(r"peer mapping resources exhausted"), "a GPU can map the memory of eight others at most: on hosts with more GPUs use NCCL_P2P_LEVEL=PIX, or NCCL_P2P_DISABLE=1"),
    (bounded(r"DataLoader worker .{0,80}exited unexpectedly"), "a DataLoader worker died: see `dmesg -T | grep -i oom` and /dev/shm; run once with num_workers=0 to see its exception"),
    (bounded(r"state_dict|size mismatch for|Missing key"), "the checkpoint does not fit this model: check its configuration, and the parallel sizes it was saved with"),
    (bounded(r"Max retries|Could not connect to the endpoint|Too Many Requests|429 Client|ConnectTimeout|ReadTimeout"), "download once before the job starts (HF_HUB_OFFLINE=1), or on one rank only, with retries"),
    (bounded(r"Permission denied|Read-only file system"), "check the rights on that path for the job's user, on all nodes"),
    (bounded(r"Disk quota exceeded"), "the user's or project's quota is used up, of bytes or of files: see `quota -s` (`lfs quota` on Lustre), delete old checkpoints, or write elsewhere"),
    (bounded(r"loss scale already at minimum"), "fp16 gradients overflow in every step: look for NaN in the loss and the data, lower the learning rate, or train in bf16"),
    (bounded(r"%(?:veth|docker|cni|br-)|Connect to (?:fe80:|172\.17\.)"), "NCCL took an interface of a container or of this host alone: set NCCL_SOCKET_IFNAME (and GLOO_SOCKET_IFNAME) to the one that the nodes share: `ip -br addr`"),
    (bounded(r"no socket interface found"), "no interface has the name in NCCL_SOCKET_IFNAME there, or none has an address: compare it with `ip -br addr` on that host"),
    (bounded(r"No space left on device"), "make room there; if it is /dev/shm, give the container more shared memory"),
    (bounded(r"world[_ ]size|nproc|invalid device ordinal|MASTER_ADDR|LOCAL_RANK", re.IGNORECASE), "check how the ranks are started: as many per node as it has GPUs"),
    (bounded(r"Stale file handle|Input/output error|Transport endpoint"), "the file system failed: ask who runs it, and see other jobs of that node"),
    (bounded(r"Default process group has not been initialized"), "call init_process_group before it, on every rank"),
)  # fmt: skip


def advice_for(text: str, otherwise: str) -> str:
    """Return what to do about an exception or an error of CUDA, by its text."""
    return next((advice for regex, advice in _BY_TEXT if regex.search(text)), otherwise)
