"""Check torch, in a subprocess, and the GPUs, with NVML."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from distdiag import nvml
from distdiag.doctor.check import Check, failed, passed, skipped, warned
from distdiag.doctor.torch_facts import Rendezvous, TorchFacts
from distdiag.probekit.measure import gpus as measure
from distdiag.terms.units import size_text

SOURCE = Path(__file__).resolve().parents[2]  # of a clone; site-packages once installed
TIMEOUT_S = 90.0  # torch from a cold network disk takes half a minute
OLDEST_TORCH = (2, 10)
SLOW_INIT_MS = 3000.0


def ask_torch(timeout_s: float = TIMEOUT_S) -> TorchFacts:
    """Return facts about torch from a subprocess, which is killed with its children after `timeout_s`."""
    with subprocess.Popen(
        [sys.executable, "-m", "distdiag.doctor.torch_facts"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"TORCH_CPP_LOG_LEVEL": "FATAL"}, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return TorchFacts(error=f"no answer within {timeout_s:g} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    try:
        return msgspec.json.decode(out.strip().splitlines()[-1], type=TorchFacts)
    except (IndexError, msgspec.DecodeError):
        last = (err.decode(errors="replace").strip().splitlines() or [""])[-1]
        return TorchFacts(error=f"ended with {process.returncode}: {last}"[:300])


def torch(facts: TorchFacts) -> list[Check]:
    """Check torch, its backends, what the recorder needs from it, and the rendezvous."""
    if facts.error or facts.version is None:
        return [failed("torch", facts.error or "no answer", "install it: https://pytorch.org/get-started/locally")]
    numbers = tuple(int(n) for n in re.findall(r"\d+", facts.version)[:2])
    build = f"{facts.version} ({f'CUDA {facts.cuda}' if facts.cuda else 'CPU build'})"
    checks = [
        passed("torch", build)
        if numbers >= OLDEST_TORCH
        else warned("torch", build, "install 2.10 or newer: distdiag cannot record all of an older one")
    ]
    if not facts.distributed:
        checks.append(failed("torch.distributed", "not in this build", "install a build with USE_DISTRIBUTED=1"))
        return checks
    backends = ", ".join(facts.backends) or "none"
    if "gloo" not in facts.backends:
        checks.append(warned("backends", backends, "without gloo no CPU tensors can be exchanged"))
    else:
        checks.append(passed("backends", backends + (f" (NCCL {facts.nccl})" if facts.nccl else "")))
    for name, present, without in (
        ("flight recorder", facts.flight_recorder, "only collectives called from Python are seen"),
        ("worker server", facts.worker_server, "stacks of a rank that holds the GIL cannot be read"),
    ):
        missing = warned(name, "not in this torch", f"{without}; a newer torch has it")
        checks.append(passed(name, "present") if present else missing)
    if facts.compiled_hooks:
        checks.append(passed("recorder", "its hooks are compiled"))
    elif facts.compiled_hooks is not None:
        found = "its hooks are not compiled: each step costs about 0.2 ms more"
        remedy = "install a C compiler and Python's headers (apt-get install gcc python3-dev), then reinstall distdiag"
        if (SOURCE / "setup.py").exists():
            remedy = f"this is the source in {SOURCE}, not the installed package: start jobs in another directory"
        checks.append(warned("recorder", found, remedy))
    if facts.rendezvous is not None:
        checks.append(_rendezvous(facts.rendezvous))
    return checks


def _rendezvous(r: Rendezvous) -> Check:
    if r.error is not None or r.init_ms is None or r.all_reduce_us is None:
        remedy = "see 'host name' and 'interfaces'; GLOO_SOCKET_IFNAME=lo is enough on one node"
        return failed("rendezvous", f"two local gloo ranks could not connect: {r.error}", remedy)
    found = f"two local gloo ranks connected in {r.init_ms:.0f} ms; all_reduce of 4 B {r.all_reduce_us:.0f} µs (median)"
    if r.init_ms > SLOW_INIT_MS:
        return warned("rendezvous", found, "slow name resolution? see 'host name'")
    return passed("rendezvous", found)


def gpus(facts: TorchFacts | None) -> list[Check]:
    """Check the GPUs, as NVML and torch report them; one check if there is no NVIDIA driver."""
    try:
        pynvml = nvml.load()
    except nvml.Unavailable:
        if facts is not None and facts.cuda:
            return [
                warned(
                    "GPU", f"no NVIDIA driver; torch is a build for CUDA {facts.cuda}", "jobs here run on CPU with gloo"
                )
            ]
        return [skipped("GPU", "no NVIDIA driver: jobs here run on CPU with gloo")]
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        found = [measure.facts(pynvml, i, {os.getpid()}) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as e:
        return [failed("GPU", f"NVML: {e}", "see nvidia-smi; after a driver update, reboot or reload the module")]
    finally:
        pynvml.nvmlShutdown()
    if not found:
        return [warned("GPU", f"driver {driver}, no device", "docker run --gpus all")]
    checks = [_as_torch_sees_them(facts, driver, found)] if facts is not None and facts.version else []
    return checks + [_one(g) for g in found]


def _as_torch_sees_them(facts: TorchFacts, driver: str, found: Sequence[measure.GpuFacts]) -> Check:
    text = f"driver {driver}, {len(found)} devices, torch sees {len(facts.gpus)}"
    if not facts.cuda:
        return failed("GPU", f"{text}: this torch is a CPU build", "install a CUDA build of torch")
    if facts.gpu_error or not facts.gpus:
        remedy = f"a driver for CUDA {facts.cuda} or newer; see `nvidia-smi` and CUDA_VISIBLE_DEVICES"
        return failed("GPU", f"{text}: {facts.gpu_error or 'CUDA is not available'}", remedy)
    if len(facts.gpus) < len(found):
        return warned("GPU", text, "CUDA_VISIBLE_DEVICES or MIG hides some")
    if "nccl" not in facts.backends:
        remedy = "gloo moves CUDA tensors through the host: install a build with NCCL"
        return warned("GPU", f"{text}; no NCCL in this torch", remedy)
    return passed("GPU", text)


def _one(g: measure.GpuFacts) -> Check:
    name = f"GPU {g.index}"
    text = f"{g.name}, {size_text(g.memory_total_bytes)}, {size_text(g.memory_used_bytes)} used"
    text += f" by {g.other_processes} processes" if g.other_processes else ""
    problems = [sentence.removeprefix(f"{name}: ") for fault, sentence in measure.complaints(g) if fault]
    if problems:
        return warned(name, f"{text}; {'; '.join(problems)}", "distdiag probe gpu")
    if g.other_processes:
        return warned(name, text, "another process uses it (see nvidia-smi): it costs memory and time")
    return passed(name, text)
