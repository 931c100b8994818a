"""The messages of torch, NCCL, launchers, Slurm and the kernel that show what happened to a job: one table.

Each row is a fixed format of a library, with the fields that a rule uses. Wording differs between versions of torch
(1.9 to 2.10); where it does, one row matches all. `role` says what such a line means for the rank that wrote it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

from distdiag.terms.untrusted import bounded


class Role(StrEnum):
    CAUSE = "cause"  # this rank, or its device, failed by itself
    WAIT = "wait"  # this rank waited for others until a timeout
    VICTIM = "victim"  # another process ended first, or the network did
    START = "start"  # the ranks did not find each other
    STOP = "stop"  # stopped from outside
    EXIT = "exit"  # how a process ended, by its launcher
    FACT = "fact"  # not an error: which process is which rank
    HINT = "hint"  # what went wrong below an exception


@dataclass(frozen=True, slots=True)
class Pattern:
    """One message format.

    Attributes:
        name: Name used by the rules.
        needle: A literal part of every such line, by which most lines are dismissed.
        regex: Searched in the line; its named groups are the event's fields.
    """

    name: str
    role: Role
    needle: str
    regex: re.Pattern[str] = field(repr=False)


def _row(name: str, role: Role, needle: str, regex: str) -> Pattern:
    return Pattern(name, role, needle, bounded(regex))


C, W, V, S, X, E, F, H = (
    Role.CAUSE, Role.WAIT, Role.VICTIM, Role.START, Role.STOP, Role.EXIT, Role.FACT, Role.HINT,
)  # fmt: skip
_UNIQUE_ID = r"\[(?P<waiter>\d+)\] is setting up NCCL communicator and retr\w+ ncclUniqueId from \[(?P<awaited>\d+)\].{0,200}?got error: "
_PEER = r"(?P<peer>[^\s<>\]]+?)(?:<\d+>|\]?:\d+|\s|$)"

TABLE: tuple[Pattern, ...] = (
    # -- collectives that timed out: ProcessGroupNCCL.cpp
    _row("timeout", W, "Watchdog caught", r"Watchdog caught collective operation timeout: Work\w+\((?:SeqNum=(?P<seq>\d+), )?"
         r"OpType=(?P<op>\w+)(?:, TensorShape=\[(?P<shape>[^\]]{0,99})\])?(?:, NumelIn=(?P<nin>\d+), NumelOut=(?P<nout>\d+))?"
         r", Timeout\(ms\)=(?P<limit>\d+)\) ran for (?P<ran>\d+) milliseconds"),
    _row("timeout_cut", W, "Watchdog caught", r"Watchdog caught coll[^)]{0,200}$"),
    _row("counters", W, "last enqueued", r"(?:detected by watchdog at work(?: sequence id)?|Timeout at NCCL work): (?P<at>\d+).{0,40}?"
         r"last enqueued (?:NCCL )?work: (?P<enq>-?\d+).{0,160}?last completed (?:NCCL )?work: (?P<done>-?\d+)"),
    _row("dump_signal", W, "Received a dump signal", r"Received a dump signal due to a collective timeout from\s+(?:this local rank|rank (?P<first>\d+))"
         r".{0,99}?Last enqueued (?:NCCL )?work: (?P<enq>-?\d+),.{0,160}? last completed (?:NCCL )?work: (?P<done>-?\d+)"),
    _row("stuck_watchdog", W, "Heartbeat monitor timed out", r"Heartbeat monitor timed out"),
    _row("engine_watchdog", W, "watchdog_timeout=", r"[Ww]atchdog timeout \(self\.watchdog_timeout=(?P<stuck_s>\d+)"),
    _row("stuck_watchdog", W, "watchdog got stuck", r"watchdog got stuck for (?P<stuck_s>\d+) seconds"),
    _row("gloo_timeout", W, "Timed out waiting", r"\[[^\]]{0,120}gloo/transport/[^\]]{0,80}\] Timed out waiting (?P<limit>\d+)ms for (?P<what>send|recv) operation"),
    _row("gloo_timeout", W, "Application timeout caused pair closure", r"Application timeout caused pair closure"),
    _row("store_wait", W, "wait timeout after", r"(?<!error: )wait timeout after (?P<limit>\d+)ms, keys: (?P<key>\S{1,200})"),
    _row("jax_key", W, "GetKeyValue() timed out", r"GetKeyValue\(\) timed out with key: (?P<key>\S{1,200}/(?P<awaited>\d{1,6}))\b"),
    _row("jax_barrier", W, "Barrier timed out", r"Barrier timed out\. (?:Barrier_id|Id): ?(?P<barrier>\w+)"),
    _row("jax_backend", H, "so it will not be used", r"\b(?P<what>JAX plugin \S{1,80} version .{1,200}not compatible.{1,200}), so it will not be used"),
    _row("jax_backend", H, "alling back to cpu", r"(?P<what>(?:[A-Z][^.]{1,200}\. )?Falling back to cpu)"),
    _row("ep_timeout", W, "DeepEP ", r"DeepEP (?:error: (?:timeout|CPU recv timeout)|timeout check failed|(?:dispatch|combine) .{0,40}?\btimeout(?:, \w| \())"),
    _row("npu_task", W, "reason=[task timeout]", r"execute failed, reason=\[task timeout\]"),
    _row("load_wait", W, "ranks that didn", r"could finish the model loading, but there are other ranks that didn't finish loading"),
    _row("npu_task", W, "ynchroniz", r"(?i:synchroniz\w{0,20} (?:failed|error))\W{1,3}(?:ret|error code)(?: is|:|=)? ?\[?(?:507046|507048|107020)\b"),
    _row("npu_task", W, "rror code is ", r"Synchronize\w+, error code is (?:507046|507048|107020)\b"),  # timeouts of a stream, of a task
    _row("hccl_socket", W, "Getting socket times out", r"Getting socket times out"),
    _row("hccl_wait", W, "from remote rank", r"has not received the Notify record from remote rank:? ?\[(?P<awaited>\d+)\](?:.{0,120}?tag\[(?P<tag>[A-Za-z]+))?(?:.{0,600}?\bgroup:\[(?P<group>(?!hccl_world)[\w.-]{1,120})\])?"),
    _row("hccl_heartbeat", H, "Heartbeat Lost", r"Location\[IP/ID\]:\[(?P<host>[\w.:]{1,60})/(?P<device>\d+)\]"),
    _row("hccl_wait", W, "wait socket establish timeout", r"wait socket establish timeout, role\[\d\] rank\[(?P<awaited>\d+)\]"),
    _row("hccl_wait", W, "dst_rank[", r"\brank\[(?P<own>\d+)\]-.{0,160}?\bdst_rank\[(?P<awaited>\d+)\]"),
    _row("analyzer", H, "Culprit rank", r"Culprit rank \d{1,6}; (?P<what>Error type: (?P<error>SIZE_OR_SYNTAX|COLLECTIVE_TYPE|COLLECTIVE_DTYPE)_MISMATCH\b.{0,200})"),
    # -- the communicator could not be created
    _row("unique_id", V, "ncclUniqueId from", _UNIQUE_ID + r"(?P<reason>.{0,99}(?:[Rr]eset by peer|[Bb]roken [Pp]ipe|[Gg]ot 0 bytes|[Cc]onnection closed).*)"),
    _row("unique_id", W, "ncclUniqueId from", _UNIQUE_ID + r"(?P<reason>.*)"),
    _row("barrier_late", W, "failed to pass monitoredBarrier", r"Ranks? (?P<ranks>\d+(?:, \d+)*) failed to pass monitoredBarrier in (?P<limit>\d+) ms"),
    # a report of NCCL's RAS: of each communicator that differs the counts, and the few ranks that have one of them
    _row("ras", F, "Job summary", r"^Job summary\s*$"),
    _row("world", F, "RUNNING", r"^\s*\d{1,6}(?:\s{1,12}\d{1,7}){3}\s{1,12}(?P<world>\d{1,7})\s{1,12}\d{1,7}\s{1,12}RUNNING\s"),
    _row("ras_group", S, ") MISMATCH", r"^#\d{1,6}-\d{1,6} \([0-9a-f]{1,32}\) MISMATCH"),
    _row("ras_count", S, "launched up to operation", r"^\s*(?P<number>\d{1,7}) ranks? ha(?:s|ve) launched up to operation (?P<seq>\d{1,18})\s*$"),
    _row("ras_rank", S, " managed by process", r"^\s*Rank (?P<member>\d{1,6}) -- GPU \S{1,40} managed by process (?P<pid>\d{1,9}) on node (?P<host>[\w.:-]{1,253})"),
    _row("rpc_late", W, "RPC ", r"RPC (?:call to (?P<what>\S{1,80}) timed out|ran for more than set timeout)"),
    _row("message_size", W, "op.preamble.length", r"op\.preamble\.length <= op\.nbytes\. (?P<got>\d+) vs (?P<has>\d+)"),
    _row("message_size", W, "essage truncated", r"[Mm]essage truncated ?: received (?P<got>\d+) bytes instead of (?P<has>\d+)"),
    _row("net_size", W, "ollective mismatch error", r"\bpeer (?P<peer>[^\s<]+).{0,200}?collective mismatch error, local size (?P<has>\d+) remote size (?P<got>\d+)"),
    _row("net_size", W, "essage truncated", r"\bpeer (?P<peer>[^\s<]+).{0,60}? message truncated ?: receiving (?P<got>\d+) bytes instead of (?P<has>\d+)"),
    _row("rank_count", W, "mismatch in rank count", r"Bootstrap Root ?: mismatch in rank count from procs (?P<has>\d+) : (?P<got>\d+)"),
    _row("horovod_late", W, "[missing ranks:", r"\[missing ranks: (?P<ranks>\d+(?:, ?\d+)*)(?:, \.\.\.)?\](?:.{0,20}?\[ready ranks: (?P<ready>\d+(?:, ?\d+)*))?"),
    _row("barrier_reached", W, "successfully reached monitoredBarrier", r"Rank (?P<waiter>\d+) successfully reached monitoredBarrier"),
    _row("clients", S, " joined", r"Timed out after (?P<after>\d+) seconds waiting for (?:clients|workers)\. (?P<joined>\d+)/(?P<expected>\d+) (?:clients|workers) joined"),
    _row("store_barrier", S, "in store based barrier", r"Timed out.{0,99}store based barrier(?:.{0,40}? rank: (?P<waiter>\d+))?.{0,200}?\(world_size=(?P<expected>\d+), "
         r"(?:worker_count|num_workers_joined)=(?P<joined>\d+)"),
    _row("store_waiting", S, "in store based barrier", r"Waiting.{0,99}store based barrier(?:.{0,40}? rank: (?P<waiter>\d+))?.{0,200}?\(world_size=(?P<expected>\d+), "
         r"(?:worker_count|num_workers_joined)=(?P<joined>\d+)"),
    _row("master", F, "--master", r"(?P<option>--master[-_]addr)[= ](?P<addr>[\w.:-]{2,253})"),
    _row("master", F, "master_addr=", r"^\W*master_addr=(?P<addr>[\w.:-]{2,253})"),
    _row("master", F, "MASTER_ADDR", r"\bMASTER_ADDR[=:] ?['\"]?(?P<addr>[\w.:-]{2,253})"),
    _row("master", F, "--rdzv", r"--rdzv[-_]endpoint[= ](?P<addr>[\w.-]{2,253})(?::(?P<endpoint>\d{1,5})\b)?"),
    _row("master", F, "--master", r"--master[-_]port[= ](?P<port>\d{1,5})\b"),
    _row("master", F, "MASTER_PORT", r"\bMASTER_PORT[=:] ?['\"]?(?P<port>\d{1,5})\b"),
    _row("first_rank", F, "node_rank=", r"num_local_procs=(?P<local>\d+), node_rank=(?P<node>\d+)"),
    _row("gpus", F, "n_gpus_per_node", r"\bn_gpus_per_node\W{1,4}(?P<n>\d{1,3})\b"),
    _row("first_rank", F, "global_ranks=[", r"^\W*global_ranks=\[(?P<node>\d+)"),
    _row("no_name", F, "cannot be retrieved", r"network addresses of \((?P<peer>[^,)\s]+), ?\d+\) cannot be retrieved \(gai error: (?P<why>.{1,60}?)\)"),
    _row("no_answer", F, "failed to connect to [", r"client socket has failed to connect to \[(?P<peer>[^\]\s]+)\]:(?P<port>\d+) \(errno: \d+ - (?P<why>[^)]{1,60})\)"),
    _row("store_connect", S, "trying to connect", r"client socket has timed out after (?P<after>\w+) while trying to connect to \((?P<peer>[^,)]+), ?(?P<port>\d+)\)"),
    _row("store_connect", S, "failed to connect to any network address", r"client socket has failed to connect to any network address of \((?P<peer>[^,)]+), ?(?P<port>\d+)\)"),
    _row("coordination", V, "stopped sending heartbeats", r"The following tasks are unhealthy \(stopped sending heartbeats\): (?:\w{1,9}: )?(?P<node>\S{1,200}[\w)])"),
    _row("coordination", V, " heartbeat timeout", r"\bTask (?P<node>/job:\S{1,200}) heartbeat timeout"),
    _row("keep_alive", V, "keep-alive heartbeat", r"The node '(?P<node>[^']{1,200})' has failed to send a keep-alive heartbeat to the rendezvous"),
    _row("rendezvous", S, "Rendezvous", r"\b(?P<what>Rendezvous(?:Timeout|Connection|Closed)Error)\b"),
    _row("not_started", S, "ssh exited with exit code", r"(?P<what>\S+: ssh exited with exit code 255)"),
    _row("not_started", S, "can't open file", r"python[\d.]{0,9}: (?P<what>can't open file '.{1,300}?': \[Errno \d+\] [\w ]{1,40})"),
    _row("not_started", S, "Unable to create step", r"srun: error: (?P<what>Unable to create step for job .+)"),
    _row("not_started", S, "ask launch for", r"Task launch for \S{1,40} failed on node (?P<host>[\w.-]{1,253}?): (?P<what>.+)"),
    _row("not_started", S, "unable to reliably start", r"(?P<what>ORTE was unable to reliably start one or more daemons)"),
    _row("not_started", S, "not enough slots", r"(?P<what>There are not enough slots available .+)"),
    _row("not_started", S, "execve(): ", r"slurmstepd: error: execve\(\): (?P<what>.+)"),
    _row("not_started", S, "nodes are available: ", r"(?:\bpod[/=]\W?(?:[\w.-]{1,63}/)?(?P<pod>[\w.-]{1,253})\W.{0,60}?)?(?P<what>\d+/\d+ nodes are available: .+)"),
    _row("not_scheduled", S, "resource request cannot be scheduled", r"(?P<what>The following resource request cannot be scheduled right now: .{1,120}?\})"),
    _row("not_started", S, "WorkerGroupStartupTimeoutError", r"WorkerGroupStartupTimeoutError: (?P<what>The worker group startup timed out after \S{1,20} seconds waiting for \d{1,9} workers)"),
    _row("not_scheduled", S, "No available node types", r"(?P<what>No available node types can fulfill .+)"),
    _row("not_started", S, "pull", r"(?:\bpod/(?P<pod>[\w.-]{1,253})\W.{0,40}?)?(?P<what>Failed to pull image .{1,160}|Back-off pulling image .{1,160})"),
    _row("ray_head", V, "Failed to connect to GCS", r"Failed to connect to GCS within"),
    _row("no_host", S, "Could not resolve hostname", r"ssh: Could not resolve hostname (?P<peer>[\w.-]{1,253})"),
    _row("name", S, "not known", r"(?:host not found: )?Name or service not known"),
    _row("name", S, "name resolution", r"Temporary failure in name resolution"),
    _row("rank_twice", C, "has already checked in", r"rank (?P<a>\d+) of (?P<world>\d+) ranks has already checked in"),
    _row("port_in_use", C, "server socket has failed to listen", r"(?:The )?server socket has failed to listen on any local network address(?:(?:\. port: |.{0,120}?to bind to \S{1,60}:)(?P<port>\d{1,5}))?"),
    _row("port_in_use", C, "and specific port[", r"listen on ip\[\S{1,60}\] and specific port\[(?P<port>\d+)\] fail"),
    _row("port_in_use", C, "EADDRINUSE", r"EADDRINUSE"),
    _row("loopback", H, "Using the loopback address", r"Unable to resolve hostname to a .{0,9}address\. Using the loopback address"),
    _row("full_mesh", S, "connectFullMesh failed", r"[Gg]loo connectFullMesh failed with (?P<reason>.*)"),
    # -- calls that differ: ProcessGroupWrapper.cpp, DDP's reducer, NCCL
    _row("fingerprints", C, "Detected mismatch between collectives", r"Detected mismatch between collectives on ranks\. Rank (?P<a>\d+) is running (?:inconsistent )?collective: "
         r"CollectiveFingerPrint\((?P<fa>.*?)\)?(?:, but Rank (?P<b>\d+) is running (?:inconsistent )?collective: CollectiveFingerPrint\((?P<fb>.*))?$"),
    _row("process_shape", C, "- Process ", r"^(?:\[[^\]]*\]:? ?){0,9}\s{0,9}- Process (?P<a>\d{1,6}): (?P<shape>\[[\d, \[\]]{0,200}\])\s*$"),
    _row("ddp_params", C, "DDP expects same model", r"DDP expects same model across all ranks, but Rank (?P<a>\d+) has (?P<na>\d+) params, while rank (?P<b>\d+) has inconsistent (?P<nb>-?\d+) params"),
    _row("ddp_shape", C, "appears not to match", r"\[(?P<a>\d+)\]: params\[(?P<index>\d+)\] in this process with (?P<what>sizes|strides) (?P<sa>\[[^\]]{0,99}\]) appears not to match (?:sizes|strides) of the same param in process (?P<b>\d+)"),
    _row("ddp_unused", C, "did not receive grad for rank", r"Parameters which did not receive grad for rank (?P<r>\d+): (?P<names>.+)"),
    _row("ddp_unused_index", C, "did not receive grad for rank", r"Parameter indices which did not receive grad for rank (?P<r>\d+): (?P<indices>[\d ]+)"),
    _row("usage", C, ".py: error: ", r"^(?:\[[^\]]*\]:? ?){0,9}[\w./-]{1,200}\.py: error: (?P<what>.{1,160})"),
    _row("nccl_mismatch", C, "Mismatched collective", r"NCCL WARN Mismatched collective detected.{0,80}rank (?P<near>\d+)"),
    _row("nccl_version", C, "ismatched NCCL version", r"[Mm]ismatched NCCL version detected ?: rank (?P<a>\d+) version (?P<va>\d+) rank (?P<b>\d+) version (?P<vb>\d+)"),
    _row("duplicate_gpu", C, "Duplicate GPU detected", r"Duplicate GPU detected ?: rank (?P<a>\d+) and rank (?P<b>\d+) both on CUDA device (?P<bus>\w+)"),
    # -- numbers
    _row("nan_gradient", C, "Unexpected result", r"Unexpected result -?(?:nan|inf) (?:on rank (?P<r>\d+)|at \S{1,300} line \d+, invo[ck]ation #\d+) at iteration #(?P<step>\d+) .{0,40}?\(message='(?P<what>[^']{0,80}\bgrad[^']{0,120})'"),
    _row("nan_loss", C, "Unexpected result", r"Unexpected result -?(?:nan|inf) (?:on rank (?P<r>\d+)|at \S{1,300} line \d+, invo[ck]ation #\d+) at iteration #(?P<step>\d+) .{0,40}?\(message='(?P<what>[^']{1,160})'"),
    _row("loss_scale", C, "loss scale already at minimum", r"[Ll]oss scale already at minimum"),
    _row("rerun", H, ", device ", r"\b[Rr]ank (?P<r>\d+), node (?P<host>[\w.-]{1,253}), device (?P<device>\d+), iteration #(?P<step>\d+): .{0,300}?[Pp]ossible (?P<what>transient|persistent|Application) error"),
    # -- devices
    _row("ecc", C, "cudaErrorECCUncorrectable", r"cudaErrorECCUncorrectable"),
    _row("ecc", C, "uncorrectable ECC error", r"CUDA (?:error|failure).{0,20}uncorrectable ECC error"),
    _row("xid", C, "caused by previous Xid", r"NVRM: Xid \(PCI:(?P<pci>[\w:.]+)\): \d+.{0,120}caused by previous Xid (?P<xid>\d+)"),
    _row("xid", C, "NVRM: Xid", r"NVRM: Xid \(PCI:(?P<pci>[\w:.]+)\): (?P<xid>(?!43\b|45\b)\d+)(?:, pid='?(?P<pid>\d+))?(?:.{0,40}?, (?P<text>[A-Z].{0,80}))?"),
    _row("torn_down", F, "NVRM: Xid", r"NVRM: Xid \(PCI:(?P<pci>[\w:]+)(?:\.\d)?\): 4[35], pid='?(?P<pid>\d{1,9})"),
    _row("device_lost", C, "has fallen off the bus", r"(?:NVRM: GPU (?P<pci>[\w:.]+): )?GPU has fallen off the bus"),
    _row("amd_fault", C, "GPU reset begin", r"amdgpu (?P<pci>[\w:.]+): (?:amdgpu: )?(?P<what>GPU reset) begin"),
    _row("amd_fault", C, "uncorrectable hardware error", r"amdgpu (?P<pci>[\w:.]+): .{0,60}?(?<!\b0 )(?<!\b0 new )(?P<what>uncorrectable hardware error)"),
    _row("amd_fault", C, " timeout, signaled", r"amdgpu (?P<pci>[\w:.]+): (?:amdgpu: )?(?P<what>ring \S{1,30} timeout)"),
    _row("device_ecc", C, "habanalabs", r"habanalabs (?P<pci>\S{1,40}): (?P<what>(?=.{0,200}(?:uncorrectable|\bDERR\b(?!=0))).{1,100})"),
    _row("device_fault", C, "habanalabs", r"habanalabs (?P<pci>\S{1,40}): (?P<what>(?=.{0,200}(?i:going to (?:hard )?reset|critical|heartbeat failed)).{1,100})"),
    _row("torn_down", F, "illing user process", r"habanalabs (?P<pci>[\w:!]{1,40}?)(?:\.\d)?: [Kk]illing user process (?:\S{1,40} )?pid[ =](?P<pid>\d{1,9})"),
    _row("device_critical", C, "device critical error", r"detected a (?P<what>device critical error)(?:.{0,120}?(?P<why>\[[^\]]{1,60}\]))?"),
    _row("device_critical", C, "MULTI BIT ECC", r"(?P<what>HBM MULTI BIT ECC ERROR)"),
    _row("device_critical", C, "UCE ERROR", r"\b(?P<what>UCE ERROR)\b"),
    _row("hip_error", C, "page fault (", r"amdgpu (?P<what>[\w:.]+: (?:amdgpu: )?\[\w+\] (?:\w[\w-]{1,12} )?page fault) \(.{0,60}?for process (?P<comm>\S{1,20}) pid (?P<pid>[1-9]\d*)"),
    _row("gpu_init", C, "RmInitAdapter failed", r"NVRM: GPU (?P<pci>[\w:.]+): RmInitAdapter failed"),
    _row("sxid", C, "SXid (PCI:", r"SXid \(PCI:(?P<pci>[\w:.]+)\): (?P<xid>\d+), Fatal, (?P<text>.{1,80})"),
    _row("cuda_oom", C, "CUDA out of memory", r"CUDA out of memory\. ?(?P<what>(?:(?!CUDA out of memory).){0,900})"),
    _row("cuda_oom", C, " out of memory. Tried", r"\b(?:HIP|XPU) out of memory\. ?(?P<what>.{0,600})"),
    _row("device_oom", C, " out of memory. Tried", r"\bNPU out of memory\."),
    _row("cuda_oom", C, "OUT_OF_DEVICE_MEMORY", r"\b(?:ZE|UR)_RESULT_ERROR_OUT_OF_DEVICE_MEMORY\b"),
    _row("device_oom", C, "ut of memory", r"(?:RESOURCE_EXHAUSTED: |Resource exhausted: |(?<=: ))(?:Out of memory while trying to allocate|Ran out of memory in memory space)"),
    _row("cuda_oom", C, "Cuda failure", r"Cuda failure (?:\d+ )?'out of memory'"),
    _row("cuda_oom", C, "rror: out of memory", r"CUDA [Ee]rror: out of memory"),
    _row("xpu_lost", C, "DEVICE_LOST", r"\b(?P<what>(?:ZE|UR)_RESULT_ERROR_DEVICE_LOST)\b"),
    _row("npu_busy", C, "Failed to initialize the HCCP process", r"Failed to initialize the HCCP process"),
    _row("hip_error", C, "aborting with error : HSA_", r"(?:\bpid:(?P<pid>\d+).{0,80})?aborting with error : (?P<what>HSA_STATUS_ERROR\w*)"),
    _row("hip_error", C, " by GPU node-", r"(?P<what>(?:HW Exception|Memory access fault) by GPU node-\d+)"),
    _row("cuda_oom", C, "Triton Error [CUDA]", r"Triton Error \[CUDA\]: out of memory"),
    _row("cuda_error", C, "Triton Error [CUDA]", r"Triton Error \[CUDA\]: (?P<what>[^\n]{1,120})"),
    _row("cuda_error", C, "CUDA error: ", r"CUDA error: (?P<what>(?!uncorrectable ECC)[^\n]{1,120})"),
    _row("cuda_error", C, "Cuda failure", r"Cuda failure (?:\d+ )?'(?P<what>(?!out of memory)[^']{1,120})'"),
    # -- memory and signals of the host
    _row("host_fault", C, "Kernel panic", r"(?P<what>Kernel panic - not syncing: .{1,100})"),
    _row("host_fault", C, "Machine Check Exception", r"mce: \[Hardware Error\]: (?P<what>CPU \d+: Machine Check Exception)"),
    _row("host_memory", F, "Memory:  used", r"\bCPU Virtual Memory: {1,3}used = (?P<gb>\d{1,6}(?:\.\d{1,6})?) GB\b"),
    _row("host_memory", F, "/cpu_memory_used_gb", r"\bperf/cpu_memory_used_gb\W{1,3}(?P<gb>\d{1,6}(?:\.\d{1,6})?)\b"),
    # what failures of the ranks on a host may follow from: `hosts.py`
    _row("host_report", H, "Driver/library version mismatch", r"NVML: (?P<driver>Driver/library version mismatch)"),
    _row("host_report", H, "API mismatch", r"NVRM: (?P<driver>API mismatch: the client has (?:the )?version [\w.]{1,40})"),
    _row("host_report", H, "initialize NVML: Unknown Error", r"Failed to initialize NVML: (?P<nvml>Unknown Error)"),
    _row("host_report", H, "IO_PAGE_FAULT", r"(?:nvidia|amdgpu) (?P<iommu>[\da-f:.]{7,12}): AMD-Vi: Event logged \[IO_PAGE_FAULT"),
    _row("host_report", H, "IO_PAGE_FAULT", r"AMD-Vi: Event logged \[IO_PAGE_FAULT device=(?P<iommu>(?P<device>[\da-f:.]{7,12}))"),
    _row("host_report", H, "DMAR: ", r"DMAR: \[DMA (?:Read|Write).{0,40}\] Request device \[(?P<iommu>(?P<device>[\da-f:.]{7,12}))\].{0,40} fault addr"),
    _row("host_report", H, "client was evicted", r"Lustre(?:Error)?: .{0,200}?client was evicted by (?P<evicted>[\w.-]{1,200})"),
    _row("host_report", H, " mds", r"\bceph: (?:\[[^\]]{1,80}\]: ?)?(?P<evicted>mds\d{1,4}) (?:reconnect denied|rejected session)"),
    _row("host_report", H, "/O error, dev ", r"I/O error, dev (?P<disk>(?!sr\d|fd\d|loop)\w{2,40})"),
    _row("host_report", H, "XFS (", r"XFS \((?P<disk>[\w-]{2,80})\): .{0,120}?(?i:shutting down filesystem|forced shutdown)"),
    _row("host_report", H, "emounting filesystem read-only", r"EXT4-fs \((?P<disk>[\w-]{2,80})\): Remounting filesystem read-only"),
    _row("host_report", H, "% full, available space", r"(?:\braylet, ip=(?P<host>[\w.:]{3,60})\).{0,200}?)?: (?P<full>/\S{1,300}) is over (?P<percent>\d{1,3})% full, available space"),
    *(_row("host_report", H, f"{unit}* ", r"^\s{0,99}(?P<quota>/\S{0,200})\s{1,40}\d[\d.]{0,12}[kMGTP]\*(?:\s{1,40}\d[\d.]{0,12}[kMGTP]?){2}\s") for unit in "MGTP"),
    _row("host_report", H, "not responding", r"\bnfs4?: server (?P<nfs>\S{1,253}) not responding"),
    _row("host_report", H, " was lost", r"Lustre(?:Error)?: .{0,200}?Connection to (?P<lustre>[\w.-]{1,200})(?: \(at \S{1,200}\))? was lost"),
    _row("host_report", H, "blocked for more than", r"\btask (?P<task>\S{1,60}):(?P<pid>\d{1,9}) blocked for more than (?P<s>\d{1,6}) seconds"),
    _row("storage_back", F, "nfs", r"\bnfs4?: server (?P<nfs>\S{1,253}) OK\b"),
    _row("storage_back", F, "Connection restored to", r"Lustre(?:Error)?: .{0,200}?Connection restored to (?P<lustre>[\w.-]{1,200})"),
    _row("storage_back", F, "Connection restored to", r"Lustre: (?P<lustre>[\w-]{1,100}-(?:OST|MDT)[\da-f]{4})-(?:osc|mdc)-\w{1,40}: Connection restored to"),
    _row("fatal", C, "Signal: ", r"\] Signal: (?P<what>Segmentation fault|Bus error|Floating point exception|Illegal instruction) \(\d+\)"),
    _row("fatal", C, "Fatal Python error: ", r"Fatal Python error: (?P<what>(?!Aborted)[^\n]{1,80})"),
    _row("fatal", C, "Segfault encountered", r"!!! (?P<what>Segfault) encountered !!!"),
    _row("fatal", C, "(): ", r"(?P<what>(?:malloc|free|realloc|munmap_chunk)\(\): (?:invalid|corrupted|unaligned|memory) .{3,40})"),
    _row("fatal", C, "double free or corruption", r"(?P<what>double free or corruption)"),
    _row("engine_file", C, "erialized Engine Version", r"(?P<what>Version tag does not match.{0,60}Serialized Engine Version: \d+)"),
    _row("engine_file", C, "engine plan file is", r"(?P<what>(?:[Tt]he )?(?:engine plan file is not compatible with this version|engine plan file is generated on an incompatible device).{0,120})"),
    _row("engine_file", C, "deserialize", r"(?P<what>[Ff]ailed to deserialize (?:the )?(?:cuda|TensorRT|TRT) engine)"),
    _row("bad_alloc", C, "std::bad_alloc", r"what\(\):\s+std::bad_alloc"),
    _row("nccl_host", C, "all to ", r"(?:NCCL WARN |^(?:\[[^\]]{0,60}\]:? ?){0,3})(?P<what>Call to (?:ibv_(?:reg_mr|create|alloc)\w*|pthread_create|posix_memalign|mmap) failed.{0,100})"),
    _row("shm_full", C, "creating shared memory segment", r"(?:NCCL WARN |^(?:\[[^\]]{0,60}\]:? ?){0,3})Error while creating shared memory segment"),
    _row("shm_full", C, "insufficient shared memory", r"insufficient shared memory \(shm\)"),
    _row("shm_full", C, "out of shared memory", r"DataLoader worker \(pid[^)]{0,20}\) is killed by signal: Bus error"),
    _row("loader_killed", C, "is killed by signal", r"DataLoader worker \(pid[^)]{0,20}\) is killed by signal: (?P<signal>(?!Bus)\w[\w ]*)"),
    _row("host_oom", E, "oom_kill event", r"[1-9]\d* oom_kill event"),
    _row("host_oom", E, "oom-kill event", r"[1-9]\d* oom-kill event"),
    _row("host_oom", E, "emory limit", r"slurmstepd: error: .{0,60}[Ee]xceeded (?:job |step )?memory limit"),
    _row("host_oom", E, "job killed: ", r"PBS: job killed: p?v?mem .{0,40}exceeded limit"),
    _row("host_oom", E, "TERM_MEMLIMIT", r"TERM_MEMLIMIT"),
    _row("host_oom", E, "killed due to memory pressure", r"(?<!\b0) Workers \(tasks / actors\) killed due to memory pressure(?:.{0,200}?\bIP: (?P<host>[\w.:]{1,60})\))?"),
    _row("host_oom", E, "Task was killed due to the node", r"Task was killed due to the node running low on memory"),
    _row("host_oom", E, "ran out-of-memory and exited", r"The (?P<label>replica [\w.-]{1,99}) ran out-of-memory and exited"),
    _row("host_oom", E, "OOMKilled", r"The (?P<label>replica [\w.-]{1,99}) exited with a non-zero status of \d{1,3}\. Termination reason: OOMKilled"),
    _row("host_oom", E, "Killed process", r"(?:(?P<all>[Oo]ut of memory)|Memory cgroup out of memory): Killed process (?P<pid>\d+)(?: \((?P<comm>[^)]{1,60})\))?"),
    _row("host_oom", E, "memory used=", r"(?:\(IP: (?P<host>[\w.:]{1,60}),.{0,99}?)?where the task \([^)]{0,200}?(?:\bname=\w{1,60}_(?P<nth_node>\d{1,6}):(?P<on_node>\d{1,4}):\S{1,80}, )?\bpid=(?P<pid>\d+), memory used=.{0,300}exceeds the memory usage threshold"),
    _row("host_oom", E, "OOMKilled", r"^(?P<pod>[\w.-]{1,253})\s{1,40}\d+/\d+\s{1,40}OOMKilled\b"),
    _row("host_oom", E, "OOMKilled", r"(?:^|[^\s\w,] ?|\s{2})OOMKilled\b|\bOOMKilled(?:[.!]?\s*$|[ ,]{1,2}\(?exit|.{0,20}\b137\b)"),
    # -- launchers: torchrun, DeepSpeed, mpirun, multiprocessing, Slurm
    _row("exit", E, "failed (exitcode", r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\)"),
    _row("exit", E, "Child process with PID", r"\[rank: (?P<r>\d+)\] Child process with PID (?P<pid>\d+) terminated with code (?P<code>-?\d+)"),
    _row("exit", E, "exited with code", r"Global rank (?P<r>\d+) \(PID (?P<pid>\d+)\) exited with code (?P<code>-?\d+)"),
    _row("exit", E, "unexpectedly failed with", r"Child process unexpectedly failed with an exit ?code (?P<signal>[4-9]|11)\. pid=(?P<pid>\d+)"),  # its status
    _row("exit", E, " died, exit code: ", r"Worker \w+ pid (?P<pid>\d+) died, exit code: (?P<code>-?\d+)"),
    _row("lost_worker", E, "its worker process has died", r"The actor is dead because its worker process has died"),
    _row("lost_worker", E, "died unexpectedly, shutting down", r"Worker proc \w+?-(?P<r>\d+) died unexpectedly, shutting down"),
    _row("lost_worker", E, "died unexpectedly, shutting down", r"Engine core proc (?P<label>\w{1,80}) died unexpectedly, shutting down"),
    _row("mpi_abort", E, "MPI_ABORT was invoked", r"MPI_ABORT was invoked on rank (?P<r>\d+)"),
    _row("mpi_abort", E, " in comm ", r"Abort\(\d+\) on node \d+ \(rank (?P<r>\d+) in comm \d+\): (?P<how>.{1,160})"),
    _row("mpi_abort", E, "An error occurred in MPI_", r"\*\*\* (?P<how>An error occurred in MPI_\w+)"),
    _row("node_lost", C, "Remote daemon: ", r"Remote daemon: \[\S{1,200}\] on node (?P<node>\S+)"),
    _row("node_lost", C, "its node has died", r"(?:The actor )?died because its node has died\. Node Id: (?P<node>\w{1,12})"),
    _row("node_lost", C, "has been marked dead", r"The node with node id: \w+ and address: (?P<node>[\w.:-]+).{0,120} has been marked dead"),
    _row("node_lost", C, "  pod/", r"(?:NodeNotReady|TaintManagerEviction)\s{1,20}pod/(?P<pod>\S+)"),
    _row("node_lost", C, "Host EC", r"Host EC2 \(instance (?P<node>i-\w{1,40})\) terminated"),
    _row("node_lost", C, "Node failure on", r"srun: error: Node failure on (?P<node>\S+)"),
    _row("exit_unnamed", E, "died with <Signals", r"died with <Signals\.(?P<signal>SIG\w+): \d+>"),
    _row("exit_unnamed", E, "non-zero exit status", r"CalledProcessError: Command .{1,400} returned non-zero exit status (?P<code>\d+)"),
    _row("exit_unnamed", E, "exits with return code", r"exits with return code = (?P<code>-?\d+)"),
    _row("exit", E, "noticed that process rank", r"noticed that process rank (?P<r>\d+) with PID \d+ on node (?P<host>\S+) exited on signal (?P<signal>\d+)"),
    _row("exit", E, " died from signal ", r"^(?P<host>[\w.-]{1,253}): rank (?P<r>\d+) died from signal (?P<signal>\d+)"),
    _row("exit", E, ": rank ", r"^(?P<host>[\w.-]{1,253}): rank (?P<r>\d+) exited with code (?P<code>[1-9]\d*)"),
    _row("exit", E, " terminated with ", r"(?:ProcessExitedException|Exception): process (?P<r>\d+) terminated with (?:signal (?P<signal>\w+)|exit code (?P<code>\d+))"),
    _row("lost_worker", E, "A worker died or was killed", r"A worker died or was killed while executing a task by an unexpected system error"
         r"(?:.{0,400}?Worker IP address: (?P<host>\S+).{0,60}?Worker PID: (?P<pid>\d+))?"),
    _row("exit_tasks", E, "srun: error: ", r"(?:^|[\d\]>|Z]:? )srun: error: (?P<host>[\w.-]+): tasks? (?P<tasks>[\d,\[\]-]+): (?P<how>Out Of Memory|Killed|Segmentation fault|Bus error|Aborted|Terminated|Exited with exit code \d+)"),
    _row("exit_unnamed", E, "xit code ", r"(?:terminated|exited|failed|died|returned)\b.{0,30} exit code (?P<code>13[4-9])\b"),
    _row("exit_unnamed", E, "xitCode: ", r"(?:\bpod (?P<label>[\w.-]{1,253}) container \S{1,63} )?exitCode: (?P<code>13[4-9])\b"),
    _row("exit_unnamed", E, "exited with a non-zero status", r"The (?P<label>replica [\w.-]{1,99}) exited with a non-zero status of (?P<code>13[4-9])\b"),
    _row("exit_unnamed", E, "exited with code", r"^(?P<host>[\w.-]+) exited with code (?P<code>13[4-9])\b"),
    _row("exit_unnamed", E, "core dumped)", r"^(?P<how>Segmentation fault|Bus error|Aborted|Illegal instruction|Floating point exception) \(core dumped\)\s*$"),
    _row("exit_unnamed", E, "Killed", r"^(?P<how>Killed)\s*$"),
    _row("exit_shell", E, "segfault at ", r"\w\[(?P<pid>\d+)\]: (?P<how>segfault) at "),
    _row("exit_shell", E, ": line ", r": line \d+:\s+(?P<pid>\d+) (?P<how>Killed|Segmentation fault|Bus error|Aborted)\b"),
    _row("cancelled", X, "CANCELLED AT", r"(?:STEP|JOB) (?P<job>[\w.]+) ON (?P<host>\S+) CANCELLED AT (?P<when>\S+)(?: DUE TO (?P<why>[A-Z][A-Z ]+[A-Z]))?"),
    _row("limit", X, "job killed: ", r"PBS: (?P<what>job killed: (?:walltime|cput) .{1,60})"),
    _row("limit", X, "qmaster enforced", r"failed\s{1,9}\d+\s{1,9}: (?P<what>qmaster enforced .{1,60})"),
    _row("limit", X, "gone over memory limit", r"(?P<what>Job has gone over memory limit of \d+ \w+\. Peak usage: \d+ \w+)"),
    _row("limit", X, "TERM_", r"(?P<what>TERM_(?:RUNLIMIT|CPULIMIT|OWNER|ADMIN|PREEMPT|FORCE_OWNER|REQUEUE_\w+): .{1,80})"),
    _row("limit", X, "DeadlineExceeded", r"^Reason: {1,40}(?P<what>DeadlineExceeded)|(?:Job|Pod) was active on the node longer than the specified deadline"),
    _row("evicted_pod", X, "victed", r"\bEvicted\b.{0,80}?\bpod/(?P<pod>[\w.-]{1,253})\W{1,20}(?!The node was low)(?P<what>[A-Z].{1,160}?)\.?\s*$"),
    _row("evicted", X, "The node was low on resource", r"(?:\bpod/(?P<pod>[\w.-]{1,253})\W.{0,40}?)?The node was low on resource: (?P<what>[\w-]+)"),
    _row("pod_begun", F, "Successfully assigned ", r"Successfully assigned (?:[\w.-]{1,63}/)?(?P<pod>[\w.-]{1,253}) to "),
    _row("pod_begun", F, "Successfully pulled image", r"(?:\bpod/(?P<pod>[\w.-]{1,253})\W.{0,60}?)?(?P<pulled>Successfully pulled image)"),
    _row("pod_node", F, "Node:  ", r"^Node:\s{2,40}(?P<node>[A-Za-z\d][\w.-]{0,252})(?:/|\s*$)"),
    _row("preempted", X, "Preempted by ", r"(?P<what>Preempted by .{1,60})"),
    _row("preempted", X, "node was preempted", r"(?P<what>node was preempted(?:: .{1,80})?)"),
    _row("preempted", X, "nterruption notice", r"(?:\bNode (?P<node>[\w.:-]{3,253}) is draining: .{0,40}?)?(?P<what>[Ss]pot (?:instance )?interruption notice)"),
    _row("preempted", X, "preempt", r"(?P<what>instance (?:is being|was|has been|will be) preempted|[Pp]reemption notice)"),
    _row("terminated", X, "death signal", r"Received (?:Signals\.(?P<name>SIG\w+)|(?P<signal>\d+)) death signal"),
    _row("terminated", X, "Received SIG", r"Received (?P<name>SIG\w+): \d+"),
    _row("terminated", X, "got signal: ", r"SignalException: Process \d+ got signal: (?P<signal>\d+)"),
    _row("interrupted", X, "KeyboardInterrupt", r"^(?:.*[\]:)|] ?)?KeyboardInterrupt\s*$"),
    # -- connections
    _row("port_active", F, "ort active", r"NCCL WARN NET/\w+ ?: (?:(?P<dev>\S{1,40}) )?Got async event : port active"),
    _row("port_active", F, "ink ", r"\b(?:mlx|bnxt|ice|ixgbe|i40e|ib|en|et|bond)\w* .{0,40}?(?P<dev>[\w.]{2,40}): (?:Port: \d+ |NIC )?Link (?:is )?(?:ACTIVE|[Uu]p)\b"),
    _row("port_error", C, "ink ", r"\b(?P<what>(?:mlx|bnxt|ice|ixgbe|i40e|ib|en|et|bond)\w* .{0,40}?(?P<dev>[\w.]{2,40}): (?:Port: \d+ |NIC )?Link (?:is )?(?:DOWN|[Dd]own))\b"),
    _row("port_error", C, "Got async event", r"NCCL WARN NET/\w+ ?: (?P<what>(?:(?P<dev>\S{1,40}) )?Got async event : .{0,60}(?:port error|down|catastrophic|fatal).*)"),
    _row("ib", V, "Got completion", r"NET/\w+(?:/\w+)? ?: ?Got (?:async event|completion) from peer (?P<peer>[^\s<]+)(?:<\d+>)? with (?:status=|error )(?:\w+\()?(?P<status>\d+)"),
    _row("efa", V, "Peer host id", r"NET/OFI .{0,120}Error: \d+ \((?P<what>[A-Z].{1,160}?)\.? My (?:host id|EFA addr).{0,200}?Peer host id: (?P<peer>[\w.-]+)"),
    _row("ib_setup", V, "ibv_modify_qp failed", r"Call to ibv_modify_qp failed with (?:error )?(?P<what>\d{1,4} [A-Z][\w ]{1,60}).{0,20}?\bon dev (?P<dev>[\w.-]{1,40})(?:.{0,120}?\blocal GID index (?P<index>\d{1,4}), local GID (?P<own>[\da-f:.]{2,60}), remote GID (?P<remote>[\da-f:.]{2,60}))?"),
    _row("nccl_error", V, "|CCL_ERROR|", r"\|CCL_ERROR\| (?P<what>.{1,160})"),
    _row("nccl_error", V, "oneCCL: ", r"(?P<what>oneCCL: .{1,160})"),
    _row("closed", V, "losed by", r"Connection closed by (?:remote )?peer \[?" + _PEER),
    _row("closed", V, "Peer host:", r"Peer host:\s{1,9}(?P<peer>\S+)"),
    _row("lost", V, "Failed to meet rendezvous", r"Failed to meet rendezvous"),
    _row("lost", V, "Horovod has been shut down", r"Horovod has been shut down"),
    _row("closed", V, "Call to ", r"^(?!.*retrying).*Call to \w+ (?:from|to) " + _PEER + r".{0,30}?failed ?: (?P<reason>.*)"),
    _row("closed", V, "onnect to ", r"^(?!.*retrying).*NCCL WARN .{0,40}[Cc]onnect to " + _PEER + r".{0,30}?(?:failed ?: |returned (?:\d{1,3}\()?)(?P<reason>[^),]*)"),
    _row("closed", V, "returned Connection refused", r"^(?!.*retrying).*NCCL WARN .{0,60}returned (?P<reason>Connection refused)"),
    _row("closed", V, "Connection reset by peer", r"gloo/transport/.{0,120}\] (?:Read|Write) error \[?" + _PEER + r".{0,20}Connection reset by peer"),
    _row("closed", V, "onnection timed out", r"gloo/transport/.{0,120}\] (?:Read|Write) error \[?" + _PEER + r".{0,20}Connection timed out"),
    _row("nccl_error", V, ", error code is ", r"(?P<what>(?:Hccl|[Aa]cl)\w+, error code is \d+)"),
    _row("nccl_error", V, "NCCL Error ", r"NCCL Error \d+: (?P<what>(?!unhandled cuda|invalid)[^,]{1,120})"),
    _row("own_error", H, "NCCL Error ", r"NCCL Error \d+: (?P<what>(?:unhandled cuda|invalid)[^,]{1,120})"),
    _row("nccl_error", V, "communicator was aborted", r"(?P<what>NCCL communicator was aborted)"),
    _row("nccl_error", V, "NCCL error", r"NCCL error(?: in)?: ?(?:\S+\.[ch]pp:\d+, |(?!\s*\S+\.[ch]pp:))(?P<what>(?!unhandled cuda|invalid|\{|$)[^,]{1,120})"),
    _row("own_error", H, "NCCL error", r"NCCL error(?: in)?: ?(?:\S+\.[ch]pp:\d+, |(?!\s*\S+\.[ch]pp:))(?P<what>(?:unhandled cuda|invalid)[^,]{1,120})"),
    _row("own_error", H, "Error: ", r"\b(?P<what>nccl(?:UnhandledCuda|InvalidUsage|InvalidArgument)\w*)\b"),
    _row("nccl_error", V, "Error: ", r"^.*?\b(?P<what>nccl(?:Remote|System|Internal)Error)\b"),
    _row("store_lost", V, "TCPStore", r"(?:Connection reset by peer|Broken pipe|failed to recv, got 0 bytes).{0,200}TCPStore|TCPStore.{0,200}(?:Connection reset by peer|Broken pipe|failed to recv, got 0 bytes)"),
    _row("nccl_warning", H, "NCCL WARN", r"NCCL WARN (?!\[(?:Proxy|Service|Rem Allocator)|Socket recv failed while polling|Failed to CUDA calloc)(?P<what>.{1,200})"),
    _row("nccl_warning", H, "<warn> err: ", r"libfabric:.{1,160}<warn> err: \d{1,6}, message: (?P<what>.{1,200})"),
    # -- how fast the ranks are, by Megatron
    _row("iteration", F, "elapsed time per iteration", r"\biteration\s{1,12}(?P<step>\d{1,12})/.{0,200}?elapsed time per iteration \(ms\): (?P<ms>\d{1,12}(?:\.\d{1,6})?)(?:.{0,200}?global batch size:\s{1,9}(?P<batch>\d{1,9}))?"),
    _row("straggler_report", F, "MxRtt/Rnk: ", r"MnRtt/Rnk: (?P<least_ms>\d{1,9}(?:\.\d{1,6})?)ms/\d+ \| MxRtt/Rnk: (?P<most_ms>\d{1,9}(?:\.\d{1,6})?)ms/(?P<r>\d{1,7})\b(?:.{0,200}?MxTmp/Rnk: (?P<temperature>\d{1,3}(?:\.\d{1,3})?)C/(?P<hot>\d{1,7}))?"
         r"(?:.{0,200}?MnClk/Rnk: (?P<clock>\d{1,6}(?:\.\d{1,3})?)MHz/(?P<low>\d{1,7}) \| MxClk/Rnk: (?P<clocks>\d{1,6}))?.{0,200}?MnEtpt/Rnk: \d{1,9}(?:\.\d{1,6})?TF/(?P<least>\d{1,7})"),
    # -- which process is which rank
    _row("nccl_rank", F, " in world size ", r"\brank (?P<r>\d+) in world size (?P<world>\d+)"),
    _row("nccl_rank", F, "world_size=", r"\brank=(?P<r>\d+)\b,? world_size=(?P<world>\d+)"),
    _row("world", F, "world_size=", r"\bworld_size=(?P<world>\d{1,7}),? n(?:um_)?nodes=\d"),
    _row("nccl_runs", F, "NCCL version ", r"(?:^|NCCL INFO |[\])>|:] ?)NCCL version (?P<version>\d{1,3}\.\d{1,3}\.\d{1,3})"),
    _row("nccl_setting", F, " set by environment to ", r"NCCL INFO (?P<key>NCCL_(?:PROTO|ALGO|NTHREADS|\w+NCHANNELS|\w*BUFFSIZE)) set by environment to (?P<value>[^\s.]{1,80})"),
    _row("interface", F, "NCCL INFO Bootstrap", r"NCCL INFO Bootstrap ?: Using (?:\[0\])?(?P<dev>[\w.-]{1,40}):(?P<addr>[\w.:]{3,60})<\d+>"),
    _row("interface", F, "NCCL INFO NET/Socket", r"NCCL INFO NET/Socket ?: Using \[0\](?P<dev>[\w.-]{1,40}):(?P<addr>[\w.:]{3,60})<\d+>"),
    _row("interface", F, "OOB ", r"NCCL INFO NET/\w+ ?: Using .{0,400}\bOOB (?P<dev>[\w.-]{1,40}):(?P<addr>[\w.:]{3,60})<\d+>"),
    _row("joined", F, "to store for rank", r"Added key: \S{1,80} to store for rank: (?P<r>\d+)"),
    _row("env", F, "RANK=", r"(?<![_\w])RANK=(?P<r>\d+)\b(?:.{0,200}?\bWORLD_SIZE=(?P<world>\d+))?"),
    _row("env", F, "RANK: ", r"^\s{2,99}RANK:\s{1,40}(?P<r>\d+)\s*$"),
    _row("spawned", F, " spawned with command", r"process (?P<pid>\d+) spawned with command.{0,4000}?--local[_-]rank[= ](?P<local>\d+)"),
    _row("nccl_rank", F, " nranks ", r"\brank (?P<r>\d+) nranks (?P<world>\d+)(?:.{0,60}?\bbusId (?P<bus>[\da-f]{1,12})\b)?"),
    _row("own_rank", F, "world size: ", r"(?:^|[^\w ] ?|\bProcess |\b[Gg]lobal )[Rr]ank: (?P<r>\d+), world size: (?P<world>\d+)"),
    _row("world", F, "dist_world_size=", r"\bdist_world_size=(?P<world>\d{1,7})\b"),
    _row("own_rank", F, "MEMBER: ", r"GLOBAL_RANK: (?P<r>\d+), MEMBER: \d+/(?P<world>\d+)"),
    _row("own_rank", F, "global_rank=", r"JobEnvironment\(.{0,400}\bglobal_rank=(?P<r>\d+)\((?P<world>\d+)\)"),
    _row("own_rank", F, "distributed init (rank ", r"\bdistributed init \(rank (?P<r>\d+)\)"),
    _row("tasks", F, "--ntasks", r"(?:^#SBATCH|\bsrun\b.{0,200}?) --ntasks[= ](?P<n>\d{1,6})\b"),
    _row("torchrun", F, "distributed/elastic", r"torch/distributed/elastic"),
    _row("torchrun", F, "distributed.elastic", r"torch\.distributed\.elastic"),
    _row("torchrun", F, "Setting OMP_NUM_THREADS", r"Setting OMP_NUM_THREADS environment variable for each process"),
    _row("launch", F, "Setting OMP_NUM_THREADS", r"Setting OMP_NUM_THREADS environment variable for each process"),
    _row("launch", F, "distributed/run.py", r"torch/distributed/run\.py:\d{1,5}\] \*{20}"),
    *(_row("command", F, name, rf"^(?:\+{{1,3}}|\S{{0,80}}[$#]) (?P<command>.{{0,400}}\b{name}.{{1,1000}})") for name in ("torchrun ", "accelerate launch ", "mpirun ", "deepspeed ")),
    _row("launch", F, "WORLD INFO DICT", r"WORLD INFO DICT"),
    _row("launch", F, "Initializing distributed: GLOBAL_RANK", r"Initializing distributed: GLOBAL_RANK: 0,"),
    _row("requeued", F, "SLURM_RESTART_COUNT", r"\bSLURM_RESTART_COUNT\W{1,3}[1-9]"),
    _row("requeued", F, "allocated resources", r"\bjob \d+ has been allocated resources"),
    _row("closing", F, " closing signal", r"Sending process (?P<pid>\d+) closing signal"),
    _row("nodes_wanted", F, "min_nodes", r"\bmin_nodes\s{1,20}: (?P<nodes>\d{1,6})\b"),
    _row("node_came", F, "attempts to join the next", r"The node '(?P<node>[^']{1,200}?)_\d{1,9}_\d{1,9}' attempts to join the next"),
    _row("restart", F, "estarting worker group", r"[Rr]estarting worker group"),
    _row("again", F, "esum", r"\b[Rr]esum(?:ing|ed) (?:training |run )?(?:from|at)\b"),
    _row("again", F, "etry", r"\b[Rr]etrying\b|\b[Rr]etry (?:#|attempt )?\d"),
    _row("again", F, "batch size", r"\b(?:[Dd]ecreas|[Rr]educ|[Ll]ower|[Tt]ry)ing batch size"),
    _row("again", F, "tarted training worker group", r"\bStarted training worker group\b"),
    _row("again", F, "equeue", r"\b[Rr]equeued?\b"),
    _row("again", F, "estart", r"\b[Rr]estart(?:ing|ed)\b.{0,40}\b(?:actor|pod|worker|container|task|job|training|attempt|process)"),
    _row("restart", F, "will restart worker group", r"will restart worker group"),
)  # fmt: skip

# Lines that the collector reads itself: tables and tracebacks of several lines.
_BEGINS = ("Traceback (most recent call last)", "ray::", "│ /", 'File "', 'File \\"', "Stack trace of the failed")
_MORE = (
    "Root Cause", "error stack:", "exitcode", "local_rank:", "Missing ranks:", "Name:  ", "describe pod", "State:  ", "Process name: [[", "Exit code:", " RUNNING AT ", "EXIT CODE:", "KILLED BY SIGNAL:",
    "terminated with the following error", " global rank ", "==> ", "RankID:", "/task:",
    "actor_id: ", "namespace: ", "rank      :", "host      :", "time      :", "traceback :", "Last error:", "Exception ignored in", "[distdiag] ", "(most recent call first)",
)  # fmt: skip
# They matter near a traceback only; far from one, such a line is shown if nothing else is found.
_WEAK = ("Error", "Exception", " from /", "above exception", "Interrupt", "Expired", "Exit", "frame #")
_WORDS = tuple(dict.fromkeys((*(p.needle for p in TABLE), *_BEGINS, *_MORE, *_WEAK)))
NEEDLES: tuple[bytes, ...] = tuple(word.encode() for word in _WORDS)
WEAK = frozenset(word.encode() for word in _WEAK)
BEGINS = frozenset(word.encode() for word in _BEGINS)
# the next lines belong to it, whatever they contain
HEADS = (
    b'File "', b'File \\"', b"Last error:", b"noticed that process rank", b"traceback :", b"actor_id: ",
    b"stopped sending heartbeats", b"namespace: ",
)  # fmt: skip
