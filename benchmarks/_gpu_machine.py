"""Checks of the machine, of communication, and of the probes on a GPU."""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _gpu_base import FAIL, PASS, ROOT, NotPossible, Outcome, finished, nccl_version, need, need_gpu
from _gpu_recorder import two_ranks


def device_facts() -> Outcome:
    torch = need_gpu()
    p = torch.cuda.get_device_properties(0)
    version = nccl_version()
    data = {
        "name": p.name,
        "count": torch.cuda.device_count(),
        "capability": f"{p.major}.{p.minor}",
        "memory_bytes": p.total_memory,
        "multiprocessors": p.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, version)) if version else None,
        "python": platform.python_version(),
    }
    return Outcome(
        PASS, f"{data['count']} x {data['name']}, torch {data['torch']}, CUDA {data['cuda']}, NCCL {data['nccl']}", data
    )


def nvml_facts() -> Outcome:
    need_gpu()
    need("pynvml")
    from distdiag.errors import DistdiagError
    from distdiag.probekit.measure import gpus

    try:
        with gpus.nvml() as n:
            found = [gpus.facts(n, i, {os.getpid()}) for i in range(n.nvmlDeviceGetCount())]
            topology = gpus.topology(n, len(found))
    except DistdiagError as e:
        return Outcome(FAIL, e.message)
    missing = [k for k, v in asdict(found[0]).items() if v is None]
    faults = [text for g in found for fault, text in gpus.complaints(g) if fault]
    essential = [k for k in ("uuid", "memory_total_bytes", "temperature_c", "sm_clock_mhz") if k in missing]
    text = f"{len(found)} GPUs read; not offered: {', '.join(missing) or 'nothing'}" + (
        f"; {'; '.join(faults)}" if faults else ""
    )
    return Outcome(
        FAIL if faults or essential else PASS, text, {"gpus": [asdict(g) for g in found], "topology": topology}
    )


def matmul() -> Outcome:
    torch = need_gpu()
    from distdiag.probekit.measure import gpus
    from distdiag.probekit.measure.probe import load_probe

    probe = _module(load_probe("gpu"))
    name = torch.cuda.get_device_name(0)
    peak = gpus.peak_of(name)
    rates = {
        t: r
        for t in ("float32", "tf32", "bfloat16", "float16")
        if (r := probe.matmul_tflops(torch.device("cuda", 0), t, 3.0)) is not None
    }
    shares = {t: r / peak.tflops[t] for t, r in rates.items() if peak and t in peak.tflops}
    text = ", ".join(
        f"{t} {r:.0f} TFLOP/s" + (f" ({shares[t]:.0%} of the published peak)" if t in shares else "")
        for t, r in rates.items()
    )
    low = [t for t in ("bfloat16", "float16") if shares.get(t, 1.0) < probe.LOW_MATMUL]
    beyond = [t for t, s in shares.items() if s > 1.05]
    if beyond:
        text += f"; above the peak: {', '.join(beyond)}: the table of peaks or the timing is wrong"
    if not shares:
        text += f"; {name} is not in the table of peaks"
    return Outcome(FAIL if low or beyond else PASS, text, {"tflops": rates, "of_peak": shares})


def memory_and_copies() -> Outcome:
    torch = need_gpu()
    from distdiag.probekit.measure import gpus
    from distdiag.probekit.measure.probe import load_probe

    probe = _module(load_probe("gpu"))
    device = torch.device("cuda", 0)
    peak = gpus.peak_of(torch.cuda.get_device_name(0))
    memory = probe.memory_gbps(device, 2.0)
    data = {"memory_gbps": memory, "memory_of_peak": memory / peak.memory_gbps if peak else None}
    for kind, pinned in (("pinned", True), ("pageable", False)):
        data[f"host_to_device_{kind}_gbps"] = probe.copy_gbps(device, pinned, True, 1.5)
        data[f"device_to_host_{kind}_gbps"] = probe.copy_gbps(device, pinned, False, 1.5)
    share = data["memory_of_peak"]
    of = f" ({share:.0%} of the published peak)" if share else ""
    text = f"memory {memory:.0f} GB/s{of}; to the device {data['host_to_device_pinned_gbps']:.1f} GB/s pinned, {data['host_to_device_pageable_gbps']:.1f} pageable"
    return Outcome(FAIL if share is not None and not probe.LOW_MEMORY <= share <= 1.05 else PASS, text, data)


def device_to_device() -> Outcome:
    torch = need_gpu()
    if torch.cuda.device_count() < 2:
        raise NotPossible("one GPU")
    from distdiag.probekit.measure.probe import load_probe

    probe = _module(load_probe("gpu"))
    rate = probe.peer_gbps(torch.device("cuda", 0), torch.device("cuda", 1), 2.0)
    return Outcome(PASS if rate > 1 else FAIL, f"GPU 0 to GPU 1: {rate:.1f} GB/s", {"gbps": rate})


def _module(probe: Any) -> Any:
    return sys.modules[type(probe).__module__]


# ---------------------------------------------------------------------- communication


def nccl_one_rank() -> Outcome:
    torch = need_gpu()
    import torch.distributed as dist

    if not dist.is_nccl_available():
        raise NotPossible("this torch has no NCCL")
    from distdiag.probekit.measure.collective import all_gather_single
    from distdiag.probekit.measure.patterns import Pattern, Segment, wrong_elements

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        pattern = Pattern(torch.float32, 1)
        x = torch.empty(1_000_001, device="cuda")
        pattern.write(x, 0)
        dist.all_reduce(x)
        out = torch.empty_like(x)
        all_gather_single(out, x)
        torch.cuda.synchronize()
        wrong = wrong_elements(out, Segment(pattern.total(), 0, len(out)), 0)
        times = []
        for _ in range(200):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            dist.all_reduce(x)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
    finally:
        dist.destroy_process_group()
    p50 = statistics.median(times)
    return Outcome(
        FAIL if wrong else PASS,
        f"all_reduce of 4 MB on a group of one: {p50:.0f} us, values {'WRONG' if wrong else 'right'}",
        {"p50_us": p50},
    )


def nccl_two_ranks() -> Outcome:
    torch = need_gpu()
    env = two_ranks(torch)
    shared = ["--share-gpus"] if env else []
    return probe(
        "allreduce", "--nproc", "2", "--device", "cuda", "--backend", "nccl", *shared, "--budget", "25", env=env
    )


def nccl_tests() -> Outcome:
    """Compare our all_reduce with that of nccl-tests on the GPUs of this machine, at the same sizes."""
    torch = need_gpu()
    binary = shutil.which("all_reduce_perf")
    if binary is None:
        raise NotPossible("nccl-tests (all_reduce_perf) is not in PATH")
    count = torch.cuda.device_count()
    if count < 2:
        raise NotPossible("one GPU")
    code, out, err = finished([binary, "-b", "1M", "-e", "64M", "-f", "64", "-g", str(count)], 60)
    theirs = {int(c[0]): float(c[7]) for line in out.splitlines() if (c := line.split()) and c[0].isdigit()}
    ours = probe("allreduce", "--nproc", str(count), "--device", "cuda", "--backend", "nccl", "--min-bytes", "1M",
                 "--max-bytes", "64M", "--factor", "64", "--budget", "20")  # fmt: skip
    rates = {r["bytes"]: r["busbw_gbps"] for r in ours.data.get("rows", [])}
    both = {b: (rates[b], theirs[b]) for b in rates if b in theirs}
    if not both:
        return Outcome(FAIL, f"no size in common; nccl-tests ended with {code}: {err.strip()[-200:]}", ours.data)
    apart = [b for b, (a, t) in both.items() if not 0.8 <= a / t <= 1.25]
    text = ", ".join(f"{b >> 20} MiB: {a:.1f} GB/s, nccl-tests {t:.1f}" for b, (a, t) in both.items())
    return Outcome(FAIL if apart else PASS, text, {"rows": both})


def gloo_on_cuda() -> Outcome:
    need_gpu()
    worst: list[Outcome] = []
    data: dict[str, Any] = {}
    for name in ("allreduce", "broadcast", "allgather", "reducescatter", "alltoall"):
        outcome = probe(
            name,
            "--nproc",
            "2",
            "--device",
            "cuda",
            "--backend",
            "gloo",
            "--share-gpus",
            "--max-bytes",
            "4M",
            "--factor",
            "64",
            "--budget",
            "15",
        )
        data[name] = outcome.data
        if outcome.word == FAIL:
            worst.append(Outcome(FAIL, f"{name}: {outcome.text}"))
    text = (
        "; ".join(o.text for o in worst) or "CUDA tensors of two ranks on one GPU: five collectives, every value right"
    )
    return Outcome(FAIL if worst else PASS, text, data)


def probe(name: str, *arguments: str, env: dict[str, str] | None = None) -> Outcome:
    """Run a probe command; inconclusive (a busy host) passes here: it must run and be correct."""
    command = [sys.executable, str(ROOT / "probes" / f"{name}.py"), *arguments, "--no-record", "--json"]
    code, out, err = finished(command, 100, env)
    try:
        data = json.loads(out)
    except ValueError:
        return Outcome(FAIL, f"exit code {code}: {err.strip().splitlines()[-1][:300] if err.strip() else 'no output'}")
    if "error" in data:
        return Outcome(FAIL, data["error"]["message"], data)
    text = "; ".join(data["reasons"][:2])
    return Outcome(FAIL if data["verdict"] == "fail" else PASS, text, data)


def gpu_probe() -> Outcome:
    need_gpu()
    need("pynvml")
    return probe("gpu", "--budget", "40")


def dataloader_probe() -> Outcome:
    need_gpu()
    outcome = probe("dataloader", "--nproc", "1", "--device", "cuda", "--workers", "0,2,4", "--budget", "30")
    transfers = {r["setting"]["transfer"] for r in outcome.data.get("rows", [])}
    if outcome.word == PASS and "non_blocking" not in transfers:
        return Outcome(FAIL, f"no non_blocking transfer was measured ({transfers})", outcome.data)
    return outcome


def step_probe() -> Outcome:
    torch = need_gpu()
    ranks = "2" if torch.cuda.device_count() >= 2 else "1"
    outcome = probe("step", "--nproc", ranks, "--device", "cuda", "--batch-size", "256", "--budget", "40")
    rows = outcome.data.get("rows", [])
    if outcome.word == PASS and not all(r["peak_bytes"] for r in rows):
        return Outcome(FAIL, "no allocator peak in a row", outcome.data)
    return outcome


def training_job() -> Outcome:
    """Run the reference job on the GPU, with the mixed precision that it chooses."""
    need_gpu()
    if not (ROOT / "distdiag" / "train" / "__main__.py").exists():
        raise NotPossible("the training job is not in this checkout")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "distdiag.train",
            "--device",
            "cuda",
            "--data",
            "generated",
            "--max-steps",
            "120",
            "--checkpoint-every",
            "-1",
            "--validate-every",
            "0",
        ]
        code, out, err = finished(command, 100, cwd=Path(folder))
    last = (out.strip() or err.strip()).splitlines()[-1:] or [""]
    if "ModuleNotFoundError" in err:
        raise NotPossible(err.strip().splitlines()[-1])
    return Outcome(PASS if code == 0 else FAIL, f"exit code {code}: {last[0][:200]}")
