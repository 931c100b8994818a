"""Errors of torch, of frameworks and of the system whose cause is known: one row per message, for runs and for logs.

A row holds for every job: the message has one cause, or the recorder knows which of several it is. The first row that fits counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from distdiag.diagnosis.model.snapshot import RankState
from distdiag.diagnosis.text.phrases import at
from distdiag.diagnosis.training_data import short_last_batch
from distdiag.terms.untrusted import bounded


def _last_batch(state: RankState) -> str:
    """Return that the rank is in the last batch of a loader, and that this one is smaller; empty if it is not."""
    for loader in state.loaders:
        if (found := short_last_batch(loader)) is not None:
            return f"the last batch of the loader{at(loader.site)} has {found[0]:,} of {found[1]:,} samples"
    return ""


def _search(state: RankState) -> str:
    """Return the flags of its wrapped modules that make DDP visit parameters more than once."""
    unused, static = any(m.find_unused for m in state.models), any(m.static_graph for m in state.models)
    return f"find_unused_parameters={unused}, static_graph={static}" if state.models else ""


def _forwards(state: RankState) -> str:
    """Return that a wrapped module ran several forwards since its last backward, each of which broadcasts buffers."""
    ahead = max((m.forwards - m.synced_backwards for m in state.models if m.broadcast_buffers), default=0)
    text = f"the wrapped module has run {ahead} forwards since its last backward, with broadcast_buffers=True"
    return text if ahead > 1 else ""


class Known(NamedTuple):
    """A message, and what to do.

    Attributes:
        shows: What the rank's page knows about it; empty if nothing.
        only_if_shown: The message has other causes, too: without that fact, as in a log, the row is not used.
    """

    message: re.Pattern[str]
    do: str
    shows: Callable[[RankState], str] | None = None
    only_if_shown: bool = False


FULL_GPU = "lower the batch or sequence length of the largest batch, or use checkpointing; other processes on that GPU: `nvidia-smi` (`rocm-smi`, `npu-smi`, `xpu-smi`)"
FULL_SHM = "give the container more shared memory (docker --shm-size, a Memory emptyDir at /dev/shm), or use fewer DataLoader workers"
LOADER_KILLED = "if it was killed for memory (`dmesg -T | grep -i oom`), use fewer workers or less prefetch"
LOADER_FAULT = "a library of the dataset failed in native code, most often a decoder: find the sample (print its path in __getitem__), read it alone, leave it out or upgrade that library; the worker's stack shows the call (`python -X faulthandler`)"
TAKEN_PORT = "end the process that holds the port (`ss -ltnp` there shows it), or give this job another --master-port or --rdzv-endpoint (accelerate: --main_process_port)"
NO_CUDA = "CUDA cannot start there, or lost its GPU (a container loses its GPUs when systemd reloads: start it again): see `nvidia-smi`, `dmesg -T | grep -i nvrm`, whether nvidia-uvm is loaded, and CUDA_VISIBLE_DEVICES; reboot the node if its driver was updated"
OTHER_DRIVER = "reboot that host, or unload and load the nvidia modules, and start without it until then (--exclude); hold the driver's packages (apt-mark hold, no unattended upgrades); in a container, use the host's libcuda, not one of the image (compat)"
FULL_DISK = "make room on that node's disk (`df -h`, old sessions in /tmp/ray), or let Ray spill to a larger one (object_spilling_config, --temp-dir); a global shuffle and a large object store spill most"
NO_WANDB = "give that rank its key (export WANDB_API_KEY where the launcher starts the ranks: sbatch --export, docker -e, a Kubernetes secret; or `wandb login` for the job's user on that node), or run without the service: WANDB_MODE=offline"
NO_KEY = "give that service's client its key or token on that rank (an environment variable that the launcher passes on to all nodes), or switch that service off for this job"
NO_ACCESS = "the job has no access to it: log in there (HF_TOKEN, `huggingface-cli login`), accept the licence, or use a local copy"
EXPIRED = "the credentials for that storage have expired, or are wrong or lack the right there: renew them before the job starts, or use a role that renews itself (instance profile, IRSA, workload identity) with a session longer than the job; then resume from the last whole checkpoint"
SIZES = "correct the numbers that it names: the parallel sizes (tensor, pipeline, context, data) multiply to the number of ranks and divide the model's and the batch's; see that all nodes were launched"
PARALLEL_SIZES = f"{SIZES}; layers that the pipeline does not divide need its own options (Megatron: --decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers)"
# of a client of a service: its settings are the cause, not the data or the code
OF_SERVICE = (NO_WANDB, NO_KEY, NO_ACCESS, EXPIRED)
OF_SHAPES = "the shapes do not fit: if one rank alone raised it, look at its batch (a longer sample, a smaller last batch): truncate or pad (max_length=), check collate_fn, drop_last=True"  # of many causes
INSTALL = "install it in the environment of all nodes"
OTHER_VERSION = "what it reads was written by a process that has that module: install the same packages, in the same versions, on all nodes, and use the same code (`pip freeze` of each node, of the host that wrote it, too)"
DAMAGED = "that file is cut off or damaged there: delete it and fetch it again (was the disk full?), and compare its size with another node's"
DAMAGED_SHARD = "a file of the checkpoint that it loads is cut off or damaged: most often a stop, or a full disk, hit its save; resume from the checkpoint before that one, delete the damaged one, and mark a checkpoint as the newest only after all ranks have written theirs"
BUS_ERROR = "most often /dev/shm is full (`df -h /dev/shm`), or a mapped file was truncated; give the container more shared memory"

# of an HTTP client
_NO_ANSWER = r"Max retries|[Cc]ouldn't connect to .{0,2}https?:|Could not connect to the endpoint|Too Many Requests|429 Client|ConnectTimeout|ReadTimeout"
ROWS = (
    Known(bounded(r"FileExistsError: .{0,40}'(?:\./)?reports'"),
          "let it pass `exist_ok=True`, or start the job with DISTDIAG_RUN_DIR: distdiag has made that directory, for its runs",
          lambda r: "distdiag keeps its runs in a directory of that name", only_if_shown=True),
    Known(bounded(r"mark a variable ready only once|marked as ready twice"),
          "pass use_reentrant=False to torch.utils.checkpoint, and leave out find_unused_parameters=True: with it DDP counts the "
          "parameters of a reentrant checkpoint twice; a module that is used twice in one forward needs static_graph=True", _search),
    Known(bounded(r"batches of different size with .dispatch_batches"),
          "pass dispatch_batches=False or split_batches=True to Accelerator, as its dispatcher concatenates one batch for each rank on "
          "rank 0; or make the batches equal: pad to one length (max_length=), drop a smaller last batch (drop_last=True)", _last_batch),
    Known(bounded(r"Expecting \d+ \w+_mbs but got \d+"),
          "give the pipeline's schedule a batch that splits into as many micro-batches as it was built for: drop_last=True, or pad "
          "the last batch", _last_batch),
    Known(bounded(r"modified by an inplace operation"),
          "run one forward for both inputs (concatenate them), or pass broadcast_buffers=False: DDP writes the buffers (BatchNorm) in "
          "every forward, in place, and the first forward's graph still needs them", _forwards, only_if_shown=True),
    Known(bounded(r"does not require grad and does not have a grad_fn"),
          "let the loss depend on a parameter in every step, also where a batch has nothing to learn (add 0 times the output): the "
          "other ranks wait for this rank's gradients"),
    Known(bounded(r"(Missing|Unexpected) key\(s\) in state_dict.{0,400}module\."),
          "save and load `model.module.state_dict()`: the names begin with `module.` because DDP's own state was saved"),
    Known(bounded(r"Forward order differs across ranks"),
          "let every rank call the same submodules in the same order: a branch on data, or a module that only some ranks have, changes "
          "what FSDP gathers"),
    Known(bounded(r"Global rank \d+ is not part of group|Group rank \d+ is not part of group"),
          "give src and dst as ranks of the whole job (dist.get_global_rank(group, 0)), or pass group_src or group_dst: they number the "
          "members of the group"),
    Known(bounded(r"Incorrect (input|output) list size"),
          "give the list one entry for each rank of the group, in every case: pad it with empty entries"),
    Known(bounded(r"allgather\w*: invalid tensor size at index"),
          "give every tensor in the list the shape of the input: gloo compares them on the rank itself"),
    Known(bounded(r"EADDRINUSE|[Aa]ddress already in use|server socket has failed to listen"), TAKEN_PORT),
    Known(bounded(r"/dev/shm/nccl-"), "make room in /dev/shm on that host (`df -h /dev/shm`): delete what ended jobs have left there (nccl-*), and in a container give it more (docker --shm-size, a Memory emptyDir); NCCL_SHM_DISABLE=1 does without it, slower"),
    Known(bounded(r"unable to write to file </torch_|No space left on device.{0,40}(/dev/shm|torch_)|unable to mmap|insufficient shared memory|workers are out of shared memory"), FULL_SHM),
    Known(bounded(r"Too many open files: '"), "close what is opened and no longer needed (`with open`, a cache with a limit; `ls -l /proc/PID/fd` shows what stays open), or raise the limit (`ulimit -n`)"),
    Known(bounded(r"received 0 items of ancdata|Too many open files"), "raise the limit (`ulimit -n`), or torch.multiprocessing.set_sharing_strategy('file_system'); keep no batches of the loader alive, and close files that are no longer needed"),
    Known(bounded(r"'status': '(?:NOT_AVAILABLE|INFLIGHT)'"), "ZeRO-3 gathers parameters in the order of its first step: every rank must run the same modules in the same order (no branch on the data, mixture of experts: set_z3_leaf_modules)"),
    Known(bounded(r"exhausted (?:all )?inputs"), "the ranks have different numbers of batches: use drop_last=True or a sampler that pads (DistributedSampler), or Join without throw_on_early_termination"),
    Known(bounded(r"No module named 'numpy\._core"), "numpy 2 wrote what numpy 1 cannot read there: install one version of numpy on all nodes (`pip freeze` of each)"),
    Known(bounded(r"Can't get attribute .{1,200} on <module '(?!__(?:mp_)?main__)"), OTHER_VERSION),
    Known(bounded(r"No module named|cannot import name"), INSTALL),
    Known(bounded(r"system not yet initialized"), "start NVIDIA's fabric manager on that host (`systemctl status nvidia-fabricmanager`); its version must be the driver's"),
    Known(bounded(r"\bError 803\b|unsupported display driver / cuda driver"), f"the libraries and the loaded kernel module of the NVIDIA driver have different versions there: {OTHER_DRIVER}"),
    Known(bounded(r"No CUDA GPUs are available|no CUDA-capable device"), "see what the process may use: CUDA_VISIBLE_DEVICES, --gpus of the container, the scheduler's GPUs; `nvidia-smi` there"),
    Known(bounded(r"driver on your system is too old"), "that node's NVIDIA driver is older than its torch needs: update the driver there, or take the node out; compare `nvidia-smi` on all nodes"),
    Known(bounded(r"environment variable \w+ expected"), "start it with torchrun (or srun, mpirun with these variables set): python alone sets no RANK, WORLD_SIZE, MASTER_ADDR"),
    Known(bounded(r"unable to lock file|No locks available"), "another process has locked that file, or its file system has no locks: open it read-only in all ranks and workers (h5py.File(path, 'r')), let one rank alone write it, or set HDF5_USE_FILE_LOCKING=FALSE if nobody writes"),
    Known(bounded(r"can't start new thread|pthread_create failed|(?i:thread|fork|clone|spawn).{0,200}Resource temporarily unavailable"), "the limit of processes and threads is reached: `ulimit -u`, pids.max of the container; set OMP_NUM_THREADS=1 and use fewer DataLoader workers"),
    Known(bounded(r"\b(?:ExpiredToken(?:Exception)?|RequestExpired|InvalidAccessKeyId|InvalidClientTokenId|UnrecognizedClient\w*|SignatureDoesNotMatch|NoCredentials\w*|TokenRetrievalError|DefaultCredentialsError|RefreshError|AuthenticationFailed|ExpiredAuthenticationToken)\b|Unable to locate credentials|(?:[Cc]redentials?|[Tt]oken) (?:has|have|is|are) expired|provided token has expired|\bAccess ?Denied\b.{0,80}operation|when calling the \w+ operation: (?:Forbidden|Unauthorized|Access Denied)|\b(?:401|403)\b.{0,40}(?:storage\.googleapis|amazonaws|blob\.core|gs://|s3://)"),
          EXPIRED),
    Known(bounded(r"(?i:\bapi_key not configured \(|\bwandb\b.{0,99}\b(?:log[ -]?in|api[_ ]?key)\b|\bapi[_ ]?key\b.{0,99}\bwandb\b)"), NO_WANDB),
    Known(bounded(r"(?i:\b(?:api|access|auth)[_ ](?:key|token)\b.{0,40}\b(?:not (?:configured|set|found|provided|valid)|missing|invalid|expired|required|incorrect)|\b(?:invalid|incorrect|missing|no) (?:api|access|auth)[_ ](?:key|token)\b)"), NO_KEY),
    Known(bounded(r"/dev/(?:accel\d|vfio/)|TPU is already in use|libtpu.{0,60}(?:already in use|lockfile)"), "another process holds the TPU, or this user may not open it: see `lsof /dev/accel* /dev/vfio/*`, end the process that an earlier run left (then remove /tmp/libtpu_lockfile), and see the rights of the device (a container needs --privileged)"),
    Known(bounded(r"gated repo|40[13] Client Error|Invalid (?:username or password|credentials)"), NO_ACCESS),
    Known(bounded(r"Unable to find address for"), "no interface has the name in GLOO_SOCKET_IFNAME there, or it has no address: compare it with `ip -br addr` on that host"),
    Known(bounded(r"peer access is not supported"), "these GPUs cannot reach each other's memory: NCCL_P2P_DISABLE=1; see `nvidia-smi topo -p2p r`"),
    Known(bounded(r"CUDA unknown error|initialization error"), NO_CUDA),
    Known(bounded(r"number of tasks per node configured|SLURM .{0,40}does not match"), "make the two numbers equal: devices= and num_nodes= of the Trainer, --ntasks-per-node and --nodes of sbatch"),
    Known(bounded(r"Input type \(\S+\) and (?:weight|bias) type \(\S+\) should be the same|mat1 and mat2 must have the same dtype|expected m1 and m2 to have the same dtype|expected scalar type (?:B?Float(?:16)?|Half|Double) but found (?:B?Float(?:16)?|Half|Double)"),
          "the input and the module have different types: cast the input in the dataset or collate_fn (NumPy makes float64: `.float()`), or the module (`.to(dtype)`), "
          "or run both under autocast; if the two differ in `cuda`, move the batch to the module's device"),
    Known(bounded(r"size of tensor|[Ss]izes of tensors must match|stack expects each tensor to be equal size|must match the existing size|is invalid for input of size"), OF_SHAPES, _last_batch),
    Known(bounded(r"[Nn]o available memory for the cache blocks|KV cache .{0,80}(?:larger than|needed)"), "nothing is left for the KV cache after the weights: a higher gpu_memory_utilization, a smaller max_model_len or max_num_seqs, more GPUs (tensor parallel), or quantized weights"),
    Known(bounded(r"ibv_(?:reg_mr|create)\w* failed.{0,40}annot allocate memory"), "the limit of locked memory is too low on that host: `ulimit -l` in the job, then limits.conf, LimitMEMLOCK of slurmd or the container (--ulimit memlock=-1)"),
    Known(bounded(r"\b(?:_Array)?MemoryError|Cannot allocate memory"), "the host's memory, or the job's limit of it, is used up: give the job more (--mem, resources.limits.memory), use fewer DataLoader workers, load less per rank"),
    Known(bounded(r"native code: Bus error"), BUS_ERROR),
    Known(bounded(r"CUDAMismatchException|CUDA version .{0,30}(?:does not match|mismatches) the version .{0,60}compile"), "extensions are compiled with the CUDA toolkit of that host, which must be of torch's CUDA version: compare `nvcc --version` and CUDA_HOME there with torch.version.cuda; install that toolkit, set CUDA_HOME to it, or use one image on all hosts"),
    Known(bounded(r"Error building extension"), "the compiler failed: read its first `error:` above (`unsupported GNU version`: gcc is too new for that nvcc, so set CC and CXX to an older one); other ranks then only miss the .so; use an image whose gcc and nvcc fit torch's CUDA version, or prebuilt extensions, and delete torch_extensions in the cache"),
    Known(bounded(r"image file is truncated|broken data stream when reading image"), "the message does not name the image: find it (open all with PIL and call load(), or print the path in __getitem__ when it fails), and fetch it again; to go on without it, return another sample there, or set PIL.ImageFile.LOAD_TRUNCATED_IMAGES = True"),
    Known(bounded(r"MetadataIncompleteBuffer|deserializing header|central directory|invalid load key|Ran out of input|unexpected EOF|DataLossError|[Cc]orrupted record|[Tt]runcated record"), DAMAGED),
    Known(bounded(r"Free memory on device .{0,80}less than desired|memory capacity is unbalanced"), "something else holds memory of that GPU: see who with `nvidia-smi`, end it or use another GPU; or lower the share of memory (gpu_memory_utilization, mem-fraction-static)"),
    Known(bounded(r"busy or unavailable"), "another process holds that GPU, in exclusive mode (`nvidia-smi -q -d COMPUTE`), or two ranks use one: check CUDA_VISIBLE_DEVICES and LOCAL_RANK"),
    Known(bounded(r"Check batch related parameters"), "make the three numbers of DeepSpeed's config fit: train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks, or leave one of them out; see that all ranks were launched"),
    Known(bounded(r"[Cc]an't (?:pickle|get local object)|[Cc]annot pickle"), "what is passed to spawned processes and loaders' workers must be importable: a function of a module instead of a lambda or a local one"),
    Known(bounded(r"IpcGetMemHandle|IpcOpenMemHandle"), "memory cannot be shared between the GPUs of that host: start the container with --ipc=host, compare the driver and HSA_ENABLE_IPC_MODE_LEGACY (ROCm), and run once with NCCL_P2P_DISABLE=1"),
    Known(bounded(r"not reachable via ssh"), "the launcher starts the ranks by ssh: let it log in there without a password (keys, port, known_hosts: `ssh HOST hostname`), or start one launcher on each node (torchrun, --no_ssh)"),
    Known(bounded(r"re-initialize CUDA in forked subprocess"), "let the dataset and collate_fn return tensors of the CPU, and move them in the training loop; or give the DataLoader multiprocessing_context='spawn'"),
    Known(bounded(r"File exists: '/\d{6}_\w+'"), "shared memory of that name is left from another run on that host, or two ranks made it at once: streaming.base.util.clean_stale_shared_memory() before the dataset; one job of a user on a host at a time"),
    Known(bounded(r"Unresponsive receiver"), "if it fails from the first transfers on: EFA needs a security group with an inbound and an outbound rule `All traffic` whose other side is that group itself (0.0.0.0/0 is not enough, and ping and TCP do not show it), the same group on all nodes, and one subnet; else see how the peer ended"),
    Known(bounded(r"fi_getinfo\(\) failed|find_provider|No (?:available )?(?:OFI )?provider"), "libfabric has no provider there that fits: compare `fi_info -l` and FI_PROVIDER (I_MPI_OFI_PROVIDER, FI_PROVIDER_PATH) with a host where MPI starts; mlx and verbs need UCX or the RDMA driver (`ibv_devinfo`); FI_PROVIDER=tcp does without"),
    Known(bounded(r"MPI_Init\b"), "MPI could not start: use the mpirun of the same MPI, or give srun the PMI that this MPI was built with (`srun --mpi=list`, --mpi=pmix); in a container, its PMIx must fit the host's"),
    Known(bounded(r"^(?=.*(?:No such file|File exists|Stale file|resource busy))(?=.*(?:torchinductor_|[/.]triton/))"), "processes take each other's files of the compiler's cache: give each rank, or at least each node, its own local directory (TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR), not one on a shared file system, and start again"),
    Known(bounded(r"Expected all tensors to be on the same device|Inconsistent compute device and"), "a tensor or a module is on another GPU than that of its rank (a plain .cuda(), a fixed cuda:0): call torch.cuda.set_device(LOCAL_RANK) first, and move all of them with .to(device)"),
    Known(bounded(r"ibv_modify_qp failed"), "RDMA could not connect the two hosts: compare `show_gids` and NCCL_IB_GID_INDEX on both (22: that GID does not fit), and the route between their RDMA networks (110: `rping`, ARP, VLAN); NCCL_IB_HCA chooses the ports, NCCL_IB_DISABLE=1 does without"),
    Known(bounded(r"only supports \w+ GPUs or newer"), "the GPUs of that host are too old for this kernel: use hosts with one kind of GPU, or another implementation (attn_implementation='sdpa')"),
    Known(bounded(r"Device acquire failed"), "the devices are in use or not visible there: see `hl-smi`, end what holds them, and check HABANA_VISIBLE_DEVICES of the container"),
    Known(bounded(r"transport/nvls\.cc"), "NCCL could not set up multicast over the NVSwitches (NVLS): see `nvidia-smi -q | grep -A 3 Fabric`, and restart nvidia-fabricmanager or reset the GPUs; until then run with NCCL_NVLS_ENABLE=0"),
    Known(bounded(r"NCCL WARN .{0,20}Cuda failure (?:\d{1,4} )?'(?!an illegal|unspecified|device-side|misaligned|out of memory)"), "it is a call of NCCL's own: see the GPU with `nvidia-smi` and `dmesg -T | grep -i xid`, and whether that host's driver is as new as NCCL's CUDA; then run once each with NCCL_CUMEM_ENABLE=0, NCCL_NVLS_ENABLE=0, NCCL_P2P_DISABLE=1"),
    Known(bounded(r"CUDA error: unknown error"), NO_CUDA),
    Known(bounded(r"CUDNN_STATUS_(?:INTERNAL|EXECUTION)"), "most often the GPU's memory is full, or cuDNN, driver and torch do not fit: `nvidia-smi` there, once with torch.backends.cudnn.benchmark=False, once with CUDA_LAUNCH_BLOCKING=1"),
    Known(bounded(r"No such file or directory: .{0,300}/tmp-checkpoint-\d{1,9}' -> "), "each rank or node of transformers 4.36 renames that directory, and another one was first: upgrade transformers (from 4.37 on, one rank renames it), or give each node a local output_dir; the checkpoint that is there may lack files of the ranks that failed"),
    Known(bounded(r"No such file or directory: .{1,300} -> "), "the first path was gone, or the second one's directory does not exist: where ranks or nodes share a folder, most often another rank renamed it first, so let one rank rename it (`save_on_each_node` and the like are for local disks only), while the others wait at a barrier"),
    Known(bounded(r"Parent directory .{1,300} does not exist"), "that directory was never made there, or was gone by then: where ranks share a folder, most often another rank renamed or deleted it while this one still wrote: let one rank do that, after a barrier at which all have written"),
    Known(bounded(r"No such file or directory"), "check that this path exists on that node: a mount that is missing there, or data that is not copied to all nodes"),
    Known(bounded(r"STATUS_ALLOC_FAILED|STATUS_NOT_INITIALIZED"), "most often the GPU's memory is full: lower the batch or sequence length; other processes on that GPU: `nvidia-smi`"),
    Known(bounded(r"undefined symbol: nccl"), "an older libnccl is loaded before the one that torch was built for: unset LD_LIBRARY_PATH and LD_PRELOAD there, or take that NCCL out of them (`ldconfig -p | grep nccl`, `LD_DEBUG=libs` show which one is loaded); else install the nvidia-nccl package that this torch requires, on all nodes"),
    Known(bounded(r"undefined symbol|GLIBC"), "that library was built for another version of torch, CUDA, the GPU or the system: install the one that fits, on all nodes"),
    Known(bounded(r"no kernel image|invalid device function"), "torch, or the extension whose kernel it is, was not built for that GPU: compare `torch.cuda.get_arch_list()` with `nvidia-smi --query-gpu=name,compute_cap --format=csv`, and install a build that has it, on all nodes"),
    Known(bounded(r"NVLink"), "it is the hardware: see `dmesg -T | grep -i xid` and `nvidia-smi nvlink -e` on that host, and take the node out"),
    Known(bounded(r"device-side assert"), "most often an index out of range (labels, embeddings: new tokens need resize_token_embeddings): check the inputs of that step; a kernel fails later than its call, so run once with CUDA_LAUNCH_BLOCKING=1 for the right line"),
    Known(bounded(r"\b(?:NaN|nan|Inf)\b|not finite"), "the numbers diverged on that rank: look at its batch and the loss before, lower the learning rate, clip gradients; if a restart from the same checkpoint passes, test that GPU"),
    Known(bounded(r"Permission denied|Read-only file system"), "check the rights on that path for the job's user, on all nodes"),
    Known(bounded(r"No space left on device"), "make room there; if it is /dev/shm, give the container more shared memory"),
    Known(bounded(r"Disk quota exceeded"), "the user's or project's quota is used up, of bytes or of files: see `quota -s` (`lfs quota` on Lustre), delete old checkpoints, or write elsewhere"),
    Known(bounded(r"inline_container|PytorchStreamWriter"), "the file could not be written whole: look for space and quota where checkpoints go (`df -h`, `quota -s`, `lfs quota`)"),
    Known(bounded(r"DataLoader timed out"), "a worker of the loader did not deliver in time: take the workers' stacks while it waits (`py-spy dump --pid`), look at the storage; the loader's timeout= is the limit"),
    Known(bounded(r"peer mapping resources exhausted"), "a GPU can map the memory of eight others at most: on hosts with more GPUs use NCCL_P2P_LEVEL=PIX, or NCCL_P2P_DISABLE=1"),
    Known(bounded(r"DataLoader worker .{0,80}is killed by signal: Killed"), LOADER_KILLED),
    Known(bounded(r"DataLoader worker .{0,80}is killed by signal: (?:Segm|Abort|Illegal|Float)"), LOADER_FAULT),
    Known(bounded(r"DataLoader worker .{0,80}(?:exited unexpectedly|is killed)"), "a DataLoader worker died: read what it printed before it ended; see `dmesg -T | grep -i oom` and /dev/shm; run once with num_workers=0 to see its exception"),
    Known(bounded(r"(?i:(?:global shape|size) mismatch.{0,300}(?:word_embeddings|embed_tokens|output_layer|lm_head))"), "if only the rows differ, it is the padded vocabulary: Megatron pads it to a multiple of make-vocab-size-divisible-by times the tensor parallel size: give both as they were when it was saved, or convert the checkpoint; else use the same tokenizer, with the same added tokens (resize_token_embeddings)"),
    Known(bounded(r"Missing key.{0,200}(?:rank|worker)_?\d"), "that state was saved for each rank, and not for this one: resume with as many ranks as saved it, or leave it out (the loader's position), and let each rank begin anew with it"),
    Known(bounded(r"loading (?:the )?(?:model )?state_dict|size mismatch for|Missing key|[Cc]heckpoint.{0,60}\bworld size|[Gg]lobal shape mismatch"), "the checkpoint does not fit this model or this number of ranks: check its configuration, and the parallel sizes it was saved with; for other sizes convert it first (DeepSpeed: ds_to_universal.py; torch.distributed.checkpoint splits again)"),
    Known(bounded(rf"^(?=.*(?:huggingface|HfHub|\bhf\.co\b))(?=.*(?:{_NO_ANSWER}))"), "download once before the job starts (HF_HUB_OFFLINE=1), or on one rank only, with retries"),
    Known(bounded(_NO_ANSWER), "that server did not answer, or refused: ask it again a few times, with a short time limit; for training data, keep a local copy, or skip that sample on all ranks alike"),
    Known(bounded(r"loss scale already at minimum"), "fp16 gradients overflow in every step: look for NaN in the loss and the data, lower the learning rate, or train in bf16"),
    Known(bounded(r"%(?:veth|docker|cni|br-)|Connect to (?:fe80:|172\.17\.)"), "NCCL took an interface of a container or of this host alone: set NCCL_SOCKET_IFNAME (and GLOO_SOCKET_IFNAME) to the one that the nodes share: `ip -br addr`"),
    Known(bounded(r"no socket interface found"), "no interface has the name in NCCL_SOCKET_IFNAME there, or none has an address: compare it with `ip -br addr` on that host"),
    Known(bounded(r"OutOfDiskError|[Ll]ocal disk is full"), FULL_DISK),
    Known(bounded(r"(?i:batch.{0,80}(?:not|be) divisible by .{0,30}(?:world|ranks|gpus|replicas|processes))"), "give a batch that the number of ranks divides; an elastic job starts again with fewer ranks after it has lost a node: let each number that --nnodes MIN:MAX allows divide it, or raise MIN"),
    Known(bounded(r"(?i:\b(?:\w{0,40}_)?(?:layers|heads|experts|world[_ ]?size)\b.{0,80}(?:not|be) divisible by|(?:not|be) divisible by.{0,40}(?:parallel|pipeline))"), PARALLEL_SIZES),
    Known(bounded(r"(?:not|be) divisible by|not a multiple of"), SIZES),
    Known(bounded(r"world[_ ]size|nproc|invalid device ordinal|MASTER_ADDR|LOCAL_RANK", re.IGNORECASE), "check how the ranks are started: as many per node as it has GPUs"),
    Known(bounded(r"Stale file handle"), "the file was deleted or replaced on its server while this rank had it open, or that file system was exported anew: mount it again on that node if `ls` fails there, too, and start again; do not rewrite files that a job reads"),
    Known(bounded(r"Input/output error|[Tt]ransport endpoint"), "the file system failed: ask who runs it, and see other jobs of that node"),
    Known(bounded(r"Default process group has not been initialized"), "call init_process_group before it, on every rank"),
    Known(bounded(r"out of memory"), FULL_GPU),
    Known(bounded(r" \(in a DataLoader worker\)$"), "find the sample on which that line fails: with num_workers=0 it runs in the training process, where `breakpoint()` stops; let the line handle such a sample, or clean the data"),
)  # fmt: skip


def known(state: RankState) -> tuple[str, str] | None:
    """Return (what the rank's page shows, what to do) about the exception that a rank ended by; None if it is not in the table."""
    for row in ROWS:
        if row.message.search(state.exception or ""):
            shown = row.shows(state) if row.shows is not None else ""
            if shown or not row.only_if_shown:
                return shown, row.do
    return None


def remedy(text: str, otherwise: str) -> str:
    """Return what to do about an error, by its text alone."""
    return next((row.do for row in ROWS if not row.only_if_shown and row.message.search(text)), otherwise)
