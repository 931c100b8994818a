"""Print as one JSON object what torch can do here, with one real rendezvous of two processes over gloo.

Run as `python -m distdiag.doctor.torch_facts` with a timeout: a broken CUDA installation or a hanging rendezvous must not
hang the doctor, which itself does not import torch.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from torch.distributed import Store

RENDEZVOUS_TIMEOUT_S = 10
ROUNDS = 200


class Rendezvous(msgspec.Struct, kw_only=True):
    """Two processes of this host in one gloo group."""

    error: str | None = None
    init_ms: float | None = None  # init_process_group on the later of the two
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
    """Form a group of two processes as torchrun does (a TCP store, then gloo's own connections) and time it."""
    from torch.distributed import TCPStore

    limit = timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
    try:
        store = TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=limit, wait_for_workers=False)
    except Exception as e:
        return Rendezvous(error=_one_line(e))
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            _meet(1, TCPStore("127.0.0.1", store.port, 2, is_master=False, timeout=limit))
        finally:
            os._exit(0)
    try:
        return _meet(0, store)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _meet(rank: int, store: Store) -> Rendezvous:
    import torch
    import torch.distributed as dist

    limit = timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
    try:
        began = time.perf_counter()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
        init_ms = (time.perf_counter() - began) * 1e3
        one = torch.ones(1)
        dist.all_reduce(one)
        if one.item() != 2:
            return Rendezvous(error=f"all_reduce of two ones gave {one.item():g}")
        times = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            dist.all_reduce(one)
            times.append(time.perf_counter() - began)
        dist.barrier()
        return Rendezvous(init_ms=init_ms, all_reduce_us=sorted(times)[ROUNDS // 2] * 1e6)
    except Exception as e:
        return Rendezvous(error=_one_line(e))


def _one_line(e: Exception) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:300]


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(gather()).decode() + "\n")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort the interpreter's shutdown
