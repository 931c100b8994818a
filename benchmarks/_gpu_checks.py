"""The checks of `gpu_check.py`: each a function that returns an `Outcome` or raises `NotPossible`."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PASS, FAIL, NOT_POSSIBLE = "pass", "fail", "not possible here"
OVERHEAD_ALLOWED = 1.02


@dataclass
class Outcome:
    """What one check says."""

    word: str
    text: str
    data: dict[str, Any] = field(default_factory=dict)


class NotPossible(Exception):
    """This machine has not what the check needs; the text says what."""


@dataclass(frozen=True)
class Check:
    name: str
    about: str
    limit_s: float
    run: Callable[[], Outcome]


def need_gpu() -> Any:
    """torch, where it sees a GPU."""
    try:
        import torch
    except ImportError:
        raise NotPossible("torch is not installed") from None
    version = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
    if version < (2, 10):
        raise NotPossible(f"torch {torch.__version__} is older than 2.10")
    if not torch.cuda.is_available():
        raise NotPossible(f"torch {torch.__version__} sees no GPU")
    return torch


def need(*modules: str) -> None:
    missing = [m for m in modules if importlib.util.find_spec(m) is None]
    if missing:
        raise NotPossible(f"not installed: {', '.join(missing)}")


# ---------------------------------------------------------------------- device


def device_facts() -> Outcome:
    torch = need_gpu()
    p = torch.cuda.get_device_properties(0)
    from torch.cuda import nccl

    data = {
        "name": p.name,
        "count": torch.cuda.device_count(),
        "capability": f"{p.major}.{p.minor}",
        "memory_bytes": p.total_memory,
        "multiprocessors": p.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl.version())) if torch.distributed.is_nccl_available() else None,
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
    from distdiag.probekit.command import catalog
    from distdiag.probekit.measure import gpus

    probe = _module(catalog.load("gpu"))
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
    from distdiag.probekit.command import catalog
    from distdiag.probekit.measure import gpus

    probe = _module(catalog.load("gpu"))
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
    from distdiag.probekit.command import catalog

    probe = _module(catalog.load("gpu"))
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
    from distdiag.probekit.measure.patterns import Pattern, Segment, wrong_elements
    from distdiag.probekit.measure.renamed import all_gather_single

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
    from torch.cuda import nccl

    version = nccl.version()
    if torch.cuda.device_count() >= 2:
        return probe("allreduce", "--nproc", "2", "--device", "cuda", "--backend", "nccl", "--budget", "25")
    if version < (2, 30):
        raise NotPossible(f"one GPU, and NCCL {'.'.join(map(str, version))}: two ranks on one GPU need 2.30")
    # Experimental there, off by default; few CTAs so that both ranks' kernels fit side by side.
    env = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8"}
    return probe(
        "allreduce", "--nproc", "2", "--device", "cuda", "--backend", "nccl", "--share-gpus", "--budget", "25", env=env
    )


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
    """A probe of the command line; inconclusive (a busy host) passes here: what counts is that it runs and is correct."""
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


# ---------------------------------------------------------------------- the recorder

JOB = """
import json, os, sys, time, torch, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
record, steps, out = sys.argv[1] == "record", int(sys.argv[2]), sys.argv[3]
if record:
    import distdiag
    distdiag.attach(sys.argv[4])
torch.cuda.set_device(0)
dist.init_process_group("nccl")
torch.manual_seed(0)
layers = []
for i, o in ((3, 64), (64, 128), (128, 256), (256, 256)):
    layers += [torch.nn.Conv2d(i, o, 3, padding=1), torch.nn.BatchNorm2d(o), torch.nn.ReLU()]
net = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(4096, 10)).cuda()
ddp = DistributedDataParallel(net, device_ids=[0])
sgd = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
x, y = torch.rand(256, 3, 32, 32, device="cuda"), torch.randint(0, 10, (256,), device="cuda")
events, host = [], []
for i in range(steps):
    t = time.perf_counter()
    e = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    e[0].record(); loss = F.cross_entropy(ddp(x), y); e[1].record()
    loss.backward(); e[2].record()
    sgd.step(); sgd.zero_grad(set_to_none=True); e[3].record()
    if i % 10 == 9: loss.item()
    events.append(e); host.append(time.perf_counter() - t)
torch.cuda.synchronize()
keep = events[20:]
p50 = lambda a, b: sorted(e[a].elapsed_time(e[b]) for e in keep)[len(keep) // 2]
total = keep[0][0].elapsed_time(keep[-1][3]) / len(keep)
time.sleep(1.5 if record else 0)
json.dump({"step_ms": total, "forward_ms": p50(0, 1), "backward_ms": p50(1, 2), "optimizer_ms": p50(2, 3)}, open(out, "w"))
dist.destroy_process_group()
sys.stdout.flush()
time.sleep(0.3)
"""


def job(record: bool, steps: int, scratch: Path) -> tuple[dict[str, float], Path]:
    """One run of JOB on one rank; (its own CUDA event times, run directory)."""
    script, out, run_dir = scratch / "job.py", scratch / "times.json", scratch / f"run-{time.monotonic_ns()}"
    script.write_text(JOB)
    out.unlink(missing_ok=True)
    env = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    command = [sys.executable, str(script), "record" if record else "plain", str(steps), str(out), str(run_dir)]
    code, _, err = finished(command, 90, env)
    if not out.exists():
        raise RuntimeError(f"the job ended with {code}: {err.strip().splitlines()[-1][:300] if err.strip() else ''}")
    return json.loads(out.read_text()), run_dir


def recorder_events() -> Outcome:
    """The recorder's step, forward and backward times against CUDA events of the job's own."""
    torch = need_gpu()
    need("msgspec", "psutil")
    if not torch.distributed.is_nccl_available():
        raise NotPossible("this torch has no NCCL")
    with tempfile.TemporaryDirectory() as folder:
        own, run_dir = job(True, 400, Path(folder))
        rows, gpus = read_run(run_dir)
    if not rows:
        return Outcome(FAIL, "the recorder wrote no step", {"own": own})
    columns = ("step_ms", "forward_ms", "backward_ms", "optimizer_ms")
    recorded = {
        c: statistics.median(v) if (v := [r[i] for r in rows[20:] if r[i] is not None]) else None
        for i, c in enumerate(columns)
    }
    memory = [r[4] for r in rows if r[4] is not None]
    problems = []
    step = recorded["step_ms"]
    if step is None or not 0.8 <= step / own["step_ms"] <= 1.25:
        problems.append(f"step {step} ms recorded, {own['step_ms']:.2f} by the job's own events")
    for part in ("forward_ms", "backward_ms"):
        value = recorded[part]
        if value is None or not 0.6 <= value / own[part] <= 1.6:
            problems.append(f"{part} {value} recorded, {own[part]:.2f} by the job's own events")
    if not memory or max(memory) <= 0:
        problems.append("no device memory recorded")
    if not gpus:
        problems.append("no row in table gpu")
    text = (
        "; ".join(problems)
        or f"step {step:.2f} ms recorded against {own['step_ms']:.2f}, forward {recorded['forward_ms']:.2f} against {own['forward_ms']:.2f}, backward {recorded['backward_ms']:.2f} against {own['backward_ms']:.2f}"
    )
    return Outcome(FAIL if problems else PASS, text, {"recorded": recorded, "own": own, "steps": len(rows)})


def read_run(run_dir: Path) -> tuple[list[tuple[Any, ...]], int]:
    """Step rows and the number of gpu rows, once the monitor has closed the run."""
    deadline = time.monotonic() + 30
    rows: list[tuple[Any, ...]] = []
    gpus = 0
    while time.monotonic() < deadline:
        try:
            con = sqlite3.connect(f"file:{run_dir / 'run.db'}?mode=ro", uri=True)
            try:
                rows = con.execute(
                    "SELECT step_ms, forward_ms, backward_ms, optimizer_ms, device_bytes FROM step ORDER BY step"
                ).fetchall()
                gpus = con.execute("SELECT count(*) FROM gpu").fetchone()[0]
                if con.execute(
                    "SELECT 1 FROM meta WHERE key IN ('ended_s', 'monitor_ended') AND value IS NOT NULL"
                ).fetchone():
                    break
            finally:
                con.close()
        except sqlite3.Error:
            pass  # not there yet
        time.sleep(0.2)
    return rows, gpus


def overhead() -> Outcome:
    """Steps recorded against steps plain, in turns, by the job's own CUDA events."""
    torch = need_gpu()
    need("msgspec", "psutil")
    if not torch.distributed.is_nccl_available():
        raise NotPossible("this torch has no NCCL")
    plain: list[float] = []
    recorded: list[float] = []
    end = time.monotonic() + 110
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(5):
            for record in (False, True) if turn % 2 == 0 else (True, False):
                (recorded if record else plain).append(job(record, 1000, Path(folder))[0]["step_ms"])
            if time.monotonic() > end and turn >= 1:
                break
    ratios = [r / p for p, r in zip(plain, recorded, strict=True)]
    ratio = statistics.median(ratios)
    text = f"recorded / plain {ratio:.4f} (median of {len(ratios)} pairs, {min(ratios):.4f} to {max(ratios):.4f}; step {statistics.median(plain):.2f} ms; allowed {OVERHEAD_ALLOWED})"
    return Outcome(
        PASS if min(ratios) <= OVERHEAD_ALLOWED and ratio <= OVERHEAD_ALLOWED else FAIL,
        text,
        {"plain_ms": plain, "recorded_ms": recorded, "ratio": ratio},
    )


def training_job() -> Outcome:
    """The reference job on the GPU, mixed precision as it chooses."""
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


CHECKS = (
    Check("device", "torch sees the GPU", 60, device_facts),
    Check("nvml", "NVML's facts and health", 30, nvml_facts),
    Check("matmul", "matrix products against the published peak", 60, matmul),
    Check("memory", "device memory and copies against the peak", 60, memory_and_copies),
    Check("device-to-device", "copies between two GPUs", 40, device_to_device),
    Check("nccl-1", "NCCL with one rank", 60, nccl_one_rank),
    Check("nccl-2", "NCCL with two ranks", 60, nccl_two_ranks),
    Check("gloo-cuda", "gloo with CUDA tensors, two ranks on one GPU", 120, gloo_on_cuda),
    Check("probe-gpu", "the gpu probe", 70, gpu_probe),
    Check("probe-dataloader", "the dataloader probe with pinned transfers", 60, dataloader_probe),
    Check("probe-step", "the step probe", 70, step_probe),
    Check("recorder", "the recorder's times against CUDA events", 90, recorder_events),
    Check("overhead", "what recording costs GPU steps", 160, overhead),
    Check("training", "the reference job on the GPU", 100, training_job),
)


# ---------------------------------------------------------------------- processes


def finished(
    command: list[str], limit_s: float, env: dict[str, str] | None = None, cwd: Path | None = None
) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command in a session of its own, which is killed at the limit with all its children."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "DISTDIAG_", "SLURM_", "OMPI_")
    environment = (
        {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        | (env or {})
    )
    p = subprocess.Popen(
        command,
        env=environment,
        cwd=cwd or ROOT,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = p.communicate(timeout=limit_s)
        return p.returncode, out, err
    except subprocess.TimeoutExpired:
        return 124, "", f"no end within {limit_s:g} s"
    finally:
        try:
            os.killpg(p.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        p.communicate()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
