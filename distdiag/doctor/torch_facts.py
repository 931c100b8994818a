"""Print as one JSON object what torch can do here, with one real rendezvous of two processes over gloo.

Run as `python -m distdiag.doctor.torch_facts` with a timeout: a broken CUDA installation or a hanging rendezvous must not
hang the doctor, which itself does not import torch.
"""

from __future__ import annotations

import importlib
import os
import sys
import time

import msgspec


class Rendezvous(msgspec.Struct, kw_only=True):
    """Two processes of this host in one gloo group."""

    error: str | None = None
    init_ms: float | None = None  # to start, connect and end them
    all_reduce_us: float | None = None  # median of 4-byte all_reduces


class TorchFacts(msgspec.Struct, kw_only=True):
    """Facts about torch; None: not known."""

    error: str | None = None  # torch cannot be imported
    version: str | None = None
    cuda: str | None = None  # the CUDA version it was built with; None for CPU builds
    distributed: bool = False
    backends: tuple[str, ...] = ()
    nccl: str | None = None
    flight_recorder: bool | None = None
    worker_server: bool | None = None
    compiled_hooks: bool | None = None  # the recorder's, in C
    gpus: tuple[str, ...] = ()
    gpu_error: str | None = None
    rendezvous: Rendezvous | None = None


def gather() -> TorchFacts:
    """Import torch and return what it can do; never raises."""
    facts = TorchFacts()
    try:
        import torch
        import torch.distributed as dist
    except Exception as e:  # an ImportError, or an OSError from a library that does not load
        facts.error = f"{type(e).__name__}: {e}"
        return facts
    facts.version = str(torch.__version__)
    facts.cuda = torch.version.cuda
    facts.distributed = dist.is_available()
    if not facts.distributed:
        return facts
    available = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available,
                 "ucc": dist.is_ucc_available, "xccl": getattr(dist, "is_xccl_available", lambda: False)}  # fmt: skip
    facts.backends = tuple(name for name, ask in available.items() if ask())
    c10d = importlib.import_module("torch._C._distributed_c10d")
    facts.flight_recorder = hasattr(c10d, "_dump_fr_trace_json") or hasattr(c10d, "_dump_nccl_trace_json")
    facts.worker_server = hasattr(c10d, "_WorkerServer")
    facts.compiled_hooks = importlib.import_module("distdiag.recorder.fast.accounts").COMPILED
    if "gloo" in facts.backends:
        # before CUDA is initialised: a forked child cannot use it, and does not need it
        facts.rendezvous = rendezvous()
    try:
        if torch.cuda.is_available():
            facts.gpus = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
            if "nccl" in facts.backends:
                facts.nccl = ".".join(map(str, importlib.import_module("torch.cuda.nccl").version()))
    except Exception as e:
        facts.gpu_error = str(e).splitlines()[0]
    return facts


def rendezvous() -> Rendezvous:
    """Have two processes of this host form a group, and measure an all_reduce of 4 bytes for half a second."""
    from distdiag.errors import DistdiagError
    from distdiag.probekit.command.options import parse
    from distdiag.probekit.ranks.launch import launch

    options = parse(["allreduce", "--device", "cpu", "--min-bytes", "4", "--max-bytes", "4"])
    began = time.monotonic()
    try:
        (result,) = launch(options, 2, began + 0.5)
    except DistdiagError as e:
        return Rendezvous(error=f"{e.message} ({e.hint})")
    row = result.rows[0]
    if not row.correct:
        return Rendezvous(error=result.reasons[0])
    return Rendezvous(init_ms=(time.monotonic() - began - result.elapsed_s) * 1e3, all_reduce_us=row.time_us.p50)


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(gather()).decode() + "\n")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort the interpreter's shutdown
