"""Numbers that are not finite, and devices that failed."""

from __future__ import annotations

from distdiag.diagnosis.known_errors import FULL_GPU
from distdiag.sources.logs.message import C, F, H, Meaning, message

NOT_FINITE = "look at that rank's batch and the loss before it, lower the learning rate, clip gradients; if a restart from the same checkpoint passes, or another GPU has another result, test that GPU"
_CUDA = "run once with CUDA_LAUNCH_BLOCKING=1: the line that fails may be an earlier one than the log shows"
_DEVICE = "it is the device, not the code in the traceback: see `dmesg -T` and the vendor's tool there (`hl-smi`, `npu-smi info`): a memory error (ECC, HBM, UCE) is the hardware, so take the node out and replace it; else reset it, and take it out if only this one has it"

MESSAGES = (
    message("nan_gradient", C, ("Unexpected result", r"Unexpected result -?(?:nan|inf) (?:on rank (?P<r>\d+)|at \S{1,300} line \d+, invo[ck]ation #\d+) at iteration #(?P<step>\d+) .{0,40}?\(message='(?P<what>[^']{0,80}\bgrad[^']{0,120})'"),
       meaning=Meaning("nonfinite", "gradient", "found a gradient that is not finite in iteration {step} ({what})", NOT_FINITE), about=("r",)),
    message("nan_loss", C, ("Unexpected result", r"Unexpected result -?(?:nan|inf) (?:on rank (?P<r>\d+)|at \S{1,300} line \d+, invo[ck]ation #\d+) at iteration #(?P<step>\d+) .{0,40}?\(message='(?P<what>[^']{1,160})'"),
       meaning=Meaning("nonfinite", "loss", "found a result that is not finite in iteration {step} ({what})", NOT_FINITE), about=("r",)),
    message("loss_scale", C, ("loss scale already at minimum", r"(?:Current )?[Ll]oss scale already at minimum"),
       meaning=Meaning("nonfinite", "gradient", "got gradients that overflow fp16, until the loss scale was at its minimum", "look for NaN in the loss and the data, lower the learning rate, or train in bf16")),
    message("throttled", H, ("Slowdown", r"^\s{4,99}(?P<what>HW (?:Thermal |Power Brake )?Slowdown)\s{1,99}: Active\s*$")),
    message("reran", F, ("First rerun: ", r"\b[Rr]ank (?P<r>\d{1,6}), node (?P<host>[\w.-]{1,253}), device (?P<device>\d{1,4}), iteration #(?P<step>\d{1,18}): First rerun: unexpected result is reproducible\b")),
    message("rerun", H, (", device ", r"\b[Rr]ank (?P<r>\d+), node (?P<host>[\w.-]{1,253}), device (?P<device>\d+), iteration #(?P<step>\d+): .{0,300}?(?:(?P<transient>(?i:transient) error|First rerun: unexpected result is not reproducible)|(?P<persistent>(?i:persistent) error|not reproducible on a different GPU)|(?P<application>(?i:application) error|(?<!not )reproducible on a different GPU))")),
    message("ecc", C, ("cudaErrorECCUncorrectable", r"cudaErrorECCUncorrectable"),
       ("uncorrectable ECC error", r"CUDA (?:error|failure).{0,20}uncorrectable ECC error"),
       meaning=Meaning("gpu", "ecc", "has a GPU with an uncorrectable memory error (ECC)", "it is the hardware: take the node out, reset or replace the GPU; `nvidia-smi -q -d ECC`"), own=True, of_process=True),
    message("xid", C, ("caused by previous Xid", r"NVRM: Xid \(PCI:(?P<pci>[\w:.]+)\): \d+.{0,120}caused by previous Xid (?P<xid>\d+)"),
       ("NVRM: Xid", r"NVRM: Xid \(PCI:(?P<pci>[\w:.]+)\): (?P<xid>(?!43\b|45\b)\d+)(?:, pid='?(?P<pid>\d+))?(?:.{0,40}?, (?P<text>[A-Z].{0,80}))?"),
       meaning=Meaning("gpu", "xid", "has a GPU with Xid {xid} at PCI {pci}{text}", "look the Xid up in NVIDIA's list; 48, 63, 64, 74, 79, 94, 95 are hardware: take the node out"), own=True, of_node=True, of_driver=True),
    message("torn_down", F, ("NVRM: Xid", r"NVRM: Xid \(PCI:(?P<pci>[\w:]+)(?:\.\d)?\): 4[35], pid='?(?P<pid>\d{1,9})"),
       ("illing user process", r"habanalabs (?P<pci>[\w:!]{1,40}?)(?:\.\d)?: [Kk]illing user process (?:\S{1,40} )?pid[ =](?P<pid>\d{1,9})")),
    message("device_lost", C, ("has fallen off the bus", r"(?:NVRM: GPU (?P<pci>[\w:.]+): )?GPU has fallen off the bus"),
       meaning=Meaning("gpu", "lost", "has a GPU that fell off the bus", "it is the hardware: take the node out, reseat or replace the GPU"), own=True, of_node=True, of_process=True),
    message("amd_fault", C, ("GPU reset begin", r"amdgpu (?P<pci>[\w:.]+): (?:amdgpu: )?(?P<what>GPU reset) begin"),
       ("uncorrectable hardware error", r"amdgpu (?P<pci>[\w:.]+): .{0,60}?(?<!\b0 )(?<!\b0 new )(?P<what>uncorrectable hardware error)"),
       (" timeout, signaled", r"amdgpu (?P<pci>[\w:.]+): (?:amdgpu: )?(?P<what>ring \S{1,30} timeout)"),
       meaning=Meaning("gpu", "lost", "has a GPU of which the driver (amdgpu) reports, at PCI {pci}: {what}", "what ran on it is lost: see the lines before it in `dmesg -T` (a ring that timed out: a kernel that hangs; RAS: the memory), and `rocm-smi`; if only this GPU has it, take it out"), own=True, of_node=True, of_driver=True),
    message("device_ecc", C, ("habanalabs", r"habanalabs (?P<pci>\S{1,40}): (?P<what>(?=.{0,200}(?:uncorrectable|\bDERR\b(?!=0))).{1,100})"),
       meaning=Meaning("gpu", "ecc", "has a device ({pci}) with an uncorrectable memory error: {what}", "it is the hardware: take the node out, reset or replace that device; see `dmesg -T` and the vendor's tool there (`hl-smi`, `npu-smi info`)"), own=True, of_node=True, of_driver=True),
    message("device_fault", C, ("habanalabs", r"habanalabs (?P<pci>\S{1,40}): (?P<what>(?=.{0,200}(?i:going to (?:hard )?reset|critical|heartbeat failed)).{1,100})"),
       meaning=Meaning("gpu", "lost", "has a device ({pci}) of which its driver reports: {what}", _DEVICE), own=True, of_node=True, of_driver=True),
    message("device_critical", C, ("device critical error", r"detected a (?P<what>device critical error)(?:.{0,120}?(?P<why>\[[^\]]{1,60}\]))?"),
       ("MULTI BIT ECC", r"(?P<what>HBM MULTI BIT ECC ERROR)"),
       ("UCE ERROR", r"\b(?P<what>UCE ERROR)\b"),
       meaning=Meaning("gpu", "lost", "had a fatal error of its device: {what} {why}", _DEVICE), of_process=True),
    message("npu_ecc", C, ("ulti-bit ECC error", r"(?i:\bHBM multi-bit ECC error)"),
       meaning=Meaning("gpu", "ecc", "had an uncorrectable memory error (HBM, multi-bit ECC) of its NPU", "it is the hardware: take the node out, and reset or replace that NPU; `npu-smi info -t ecc -i ID`"), own=True, of_process=True),
    message("gpu_init", C, ("RmInitAdapter failed", r"NVRM: GPU (?P<pci>[\w:.]+): RmInitAdapter failed"),
       meaning=Meaning("gpu", "lost", "has a GPU that its driver could not start, at PCI {pci}", "it is the hardware or the driver: see `dmesg -T | grep NVRM`, take the node out, reset the GPU or reboot"), own=True, of_node=True),
    message("sxid", C, ("SXid (PCI:", r"SXid \(PCI:(?P<pci>[\w:.]+)\): (?P<xid>\d+), Fatal, (?P<text>.{1,80})"),
       meaning=Meaning("gpu", "nvlink", "has a fatal NVSwitch error: SXid {xid} at PCI {pci}: {text}", "it is the NVLink fabric: take the node out, and restart nvidia-fabricmanager; `nvidia-smi nvlink -e`"), own=True, of_node=True, of_driver=True),
    message("device_oom", C, (" out of memory. Tried", r"\bNPU out of memory\."),
       ("ut of memory", r"(?:RESOURCE_EXHAUSTED: |Resource exhausted: |(?<=: ))(?:Out of memory while trying to allocate|Ran out of memory in memory space)"),
       meaning=Meaning("rank_lost", "crashed", "ran out of device memory", "lower the batch or sequence length of that rank's largest batch, use checkpointing, or split the model over more devices; see whether another process holds memory there")),
    message("xpu_lost", C, ("DEVICE_LOST", r"\b(?P<what>(?:ZE|UR)_RESULT_ERROR_DEVICE_LOST)\b"),
       meaning=Meaning("gpu", "lost", "lost its GPU ({what})", "see `dmesg -T` on that host: the driver (xe, i915) reset the GPU because a job did not end, or the GPU failed; if only this GPU has it, take it out")),
    message("npu_busy", C, ("Failed to initialize the HCCP process", r"Failed to initialize the HCCP process"),
       meaning=Meaning("rank_lost", "crashed", "could not start HCCL; most often a process of the last run still holds the NPU", "end the processes of the last run on that host (`npu-smi info`), wait ten seconds, and start again"), own=True, by_left=True),
    message("hip_error", C, ("page fault (", r"amdgpu (?P<what>[\w:.]+: (?:amdgpu: )?\[\w+\] (?:\w[\w-]{1,12} )?page fault) \(.{0,60}?for process (?P<comm>\S{1,20}) pid (?P<pid>[1-9]\d*)"),
       ("aborting with error : HSA_", r"(?:\bpid:(?P<pid>\d+).{0,80})?aborting with error : (?P<what>HSA_STATUS_ERROR\w*)"),
       (" by GPU node-", r"(?P<what>(?:HW Exception|Memory access fault) by GPU node-\d+)"),
       meaning=Meaning("rank_lost", "crashed", "had a GPU error: {what}", "see `dmesg -T` and `rocm-smi` on that host: a hang is the GPU or its driver, an access fault most often a kernel of the program, which AMD_SERIALIZE_KERNEL=3 and HIP_LAUNCH_BLOCKING=1 show"), of_node=True, of_process=True, once="job"),
    message("oom_caught", H, ("CUDA out of memory", r"\bWARN(?:ING)?\b.{0,200}CUDA out of memory\..{0,80}?\bGPU (?P<gpu>\d{1,4})\b"),  # a warning of the program
       meaning=Meaning("rank_lost", "crashed", "ran out of memory on GPU {gpu}", "let an out-of-memory error end all ranks instead of skipping the batch on one, and lower the batch (--max-tokens, micro-batch, sequence length) until its largest one fits")),
    message("cuda_oom", C, ("CUDA out of memory", r"CUDA out of memory\. ?(?P<what>(?:(?!CUDA out of memory).){0,900})"),
       (" out of memory. Tried", r"\b(?:HIP|XPU) out of memory\. ?(?P<what>.{0,600})"),
       ("OUT_OF_DEVICE_MEMORY", r"\b(?:ZE|UR)_RESULT_ERROR_OUT_OF_DEVICE_MEMORY\b"),
       ("Cuda failure", r"Cuda failure (?:\d+ )?'out of memory'"),
       ("rror: out of memory", r"CUDA [Ee]rror: out of memory"),
       ("Triton Error [CUDA]", r"Triton Error \[CUDA\]: out of memory"),
       meaning=Meaning("rank_lost", "crashed", "ran out of GPU memory", FULL_GPU)),
    message("cuda_error", C, ("Triton Error [CUDA]", r"Triton Error \[CUDA\]: (?P<what>[^\n]{1,120})"),
       ("CUDA error: ", r"CUDA error: (?P<what>(?!uncorrectable ECC)[^\n]{1,120})"),
       ("Cuda failure", r"Cuda failure (?:\d+ )?'(?P<what>(?!out of memory)[^']{1,120})'"),
       meaning=Meaning("rank_lost", "crashed", "had a CUDA error: {what}", _CUDA), of_process=True, by_text=True),
)  # fmt: skip
