"""gpu: every GPU of this host: its health from NVML, and whether it reaches its published peak.

Matrix products per element type, device memory bandwidth, copies from and to the host and between GPUs. A GPU with healthy
counters and low rates slows down the whole job.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from distdiag.errors import DistdiagError, ExitCode
from distdiag.probekit.command.main import run_script
from distdiag.probekit.measure import gpus
from distdiag.probekit.measure.probe import Column, Probe, shown
from distdiag.probekit.ranks.job import Job
from distdiag.probekit.verdict.result import Measure, Result, Verdict, host_class
from distdiag.terms.units import counted, size_text

LOW_MATMUL = 0.50  # share of the published peak; healthy cards reach 70 to 90 %
LOW_MEMORY = 0.70  # the same for memory bandwidth; healthy cards reach 85 to 95 %
LOW_PCIE = 0.55  # share of the link's rate, pinned; healthy hosts reach 80 to 90 %
_COPIED_BYTES = 2**28
_ELEMENT_TYPES = ("float32", "tf32", "bfloat16", "float16")


@dataclass(slots=True)
class GpuRow:
    """One GPU. Rates are medians; GB = 10^9 bytes; memory counts bytes read and written."""

    facts: dict[str, Any]
    tflops: dict[str, float] = field(default_factory=dict)
    tflops_of_peak: dict[str, float | None] = field(default_factory=dict)
    memory_gbps: float | None = None
    memory_of_peak: float | None = None
    host_to_device_gbps: dict[str, float] = field(default_factory=dict)  # pinned, pageable
    device_to_host_gbps: dict[str, float] = field(default_factory=dict)
    device_to_device_gbps: dict[int, float] = field(default_factory=dict)  # by the other GPU's index
    pcie_generation_loaded: int | None = None


class Gpu(Probe):
    name = "gpu"
    min_ranks = 1
    default_ranks = 1
    share_in_all = 2.0
    columns = (
        Column("gpu", lambda row: str(row.facts["index"])),
        Column("name", lambda row: row.facts["name"], left=True),
        Column("memory", lambda row: size_text(row.facts["memory_total_bytes"] or None)),
        Column("C", lambda row: shown(row.facts["temperature_c"], ".0f")),
        Column("W", lambda row: shown(row.facts["power_w"], ".0f")),
        Column("SM MHz", lambda row: shown(row.facts["sm_clock_mhz"], ".0f")),
        Column("fp32", lambda row: shown(row.tflops.get("float32"), ".0f")),
        Column("tf32", lambda row: shown(row.tflops.get("tf32"), ".0f")),
        Column("bf16", lambda row: shown(row.tflops.get("bfloat16"), ".0f")),
        Column("fp16 TFLOP/s", lambda row: shown(row.tflops.get("float16"), ".0f")),
        Column("of peak", lambda row: shown(row.tflops_of_peak.get("bfloat16") or None, ".0%")),
        Column("mem GB/s", lambda row: shown(row.memory_gbps or None, ".0f")),
        Column("of peak", lambda row: shown(row.memory_of_peak or None, ".0%")),
        Column("h2d", lambda row: shown(row.host_to_device_gbps.get("pinned"), ".1f")),
        Column("d2h GB/s", lambda row: shown(row.device_to_host_gbps.get("pinned"), ".1f")),
    )

    def run(self, job: Job) -> Result | None:
        absent = None
        try:
            with gpus.nvml():
                pass
        except DistdiagError as e:
            absent = e.message
        # all ranks must agree before rank 0 measures alone
        if any(job.gather_all(absent, "gpu: looking for a driver")):
            hint = "this probe needs an NVIDIA GPU; the others run without"
            raise DistdiagError(absent or "no GPU", hint, ExitCode.NO_DATA, "no_gpu")
        seconds = max(1.0, job.left_s() * 0.9)
        return job.while_others_wait(lambda: self._measure(job, seconds), seconds + 30, "gpu probe on rank 0")

    def _measure(self, job: Job, seconds: float) -> Result:
        result = Result(self.name, job.world_size, job.backend, "gpu", versions={"torch": str(torch.__version__)})
        result.details["host_class"] = host_class()
        with gpus.nvml() as n:
            count = n.nvmlDeviceGetCount()
            usable = torch.cuda.device_count()
            result.versions["driver"] = str(n.nvmlSystemGetDriverVersion())
            if count > 1:
                result.details["topology"] = gpus.topology(n, count)
            share = seconds / max(1, count)
            for index in range(count):
                g = gpus.facts(n, index, {os.getpid()})
                row = GpuRow(asdict(g))
                for fault, text in gpus.complaints(g):
                    if fault:
                        result.judge(Verdict.FAIL, text)
                    else:
                        result.notes.append(text)
                if index < usable and torch.cuda.is_available():
                    # NVML and CUDA use the same numbers only in PCI order without CUDA_VISIBLE_DEVICES; compare names
                    self._rates(row, index, usable, share, lambda i=index: gpus.facts(n, i, set()).pcie_generation)
                    self._judge_rates(result, row, g)
                else:
                    result.notes.append(f"GPU {index}: torch {torch.__version__} cannot use it; only NVML was asked")
                result.rows.append(row)
        result.device = ", ".join(dict.fromkeys(r.facts["name"] for r in result.rows))
        if result.verdict is Verdict.PASS:
            healthy = f"{counted(len(result.rows), 'GPU')} healthy, no clock lowered by a fault"
            result.reasons.insert(0, healthy)
        for row in result.rows:
            for dtype, rate in row.tflops.items():
                result.measures.append(Measure(f"gpu {row.facts['index']} {dtype}", "us per TFLOP", [1e6 / rate]))
        return result

    def _rates(
        self, row: GpuRow, index: int, usable: int, seconds: float, generation: Callable[[], int | None]
    ) -> None:
        device = torch.device("cuda", index)
        peak = gpus.peak_of(row.facts["name"])
        each = seconds / 8
        with torch.cuda.device(device):
            for dtype in _ELEMENT_TYPES:
                rate = matmul_tflops(device, dtype, each)
                if rate is None:
                    continue
                row.tflops[dtype] = rate
                published = peak.tflops.get(dtype) if peak else None
                row.tflops_of_peak[dtype] = rate / published if published else None
            row.memory_gbps = memory_gbps(device, each)
            row.memory_of_peak = row.memory_gbps / peak.memory_gbps if peak else None
            for kind, pinned in (("pinned", True), ("pageable", False)):
                row.host_to_device_gbps[kind] = copy_gbps(device, pinned, True, each / 2)
                if pinned:
                    row.pcie_generation_loaded = generation()
                row.device_to_host_gbps[kind] = copy_gbps(device, pinned, False, each / 2)
            for other in range(usable):
                if other != index:
                    row.device_to_device_gbps[other] = peer_gbps(device, torch.device("cuda", other), each / usable)

    def _judge_rates(self, result: Result, row: GpuRow, g: gpus.GpuFacts) -> None:
        """A rate below what healthy cards reach is a failure, or inconclusive if other processes use the GPU."""

        def low(text: str) -> None:
            contention = " while other processes use it" if g.other_processes else ""
            verdict = Verdict.INCONCLUSIVE if g.other_processes else Verdict.FAIL
            result.judge(verdict, f"GPU {g.index}: {text}{contention}")

        for dtype, share in row.tflops_of_peak.items():
            if share is not None and share < LOW_MATMUL and dtype in ("bfloat16", "float16"):
                rate = f"{row.tflops[dtype]:.0f} TFLOP/s"
                low(f"{dtype} matrix products reach {rate}, {share:.0%} of the published peak")
        if row.memory_of_peak is not None and row.memory_of_peak < LOW_MEMORY:
            low(f"memory reaches {row.memory_gbps:.0f} GB/s, {row.memory_of_peak:.0%} of the published peak")
        lane = gpus.PCIE_LANE_GBPS.get(row.pcie_generation_loaded or 0)
        if lane and g.pcie_width:
            pinned, link = row.host_to_device_gbps.get("pinned", 1e9), lane * g.pcie_width
            if pinned < LOW_PCIE * link:
                low(f"pinned copies to it reach {pinned:.1f} of PCIe's {link:.0f} GB/s")
        if row.pcie_generation_loaded and g.pcie_generation_max and row.pcie_generation_loaded < g.pcie_generation_max:
            result.notes.append(
                f"GPU {g.index}: PCIe generation {row.pcie_generation_loaded} under load, {g.pcie_generation_max} is possible"
            )
        if row.tflops and not any(row.tflops_of_peak.values()):
            result.notes.append(
                f"GPU {g.index}: {g.name} is not in the table of published peaks; its rates were not judged"
            )

    def headline(self, result: Result) -> str:
        rows: list[GpuRow] = result.rows
        rates = [r.tflops["bfloat16"] for r in rows if "bfloat16" in r.tflops]
        text = f"{len(rows)} x {rows[0].facts['name']}"
        return text + (f", bf16 {min(rates):.0f}–{max(rates):.0f} TFLOP/s" if rates else "")


def _median_seconds(device: torch.device, work: Callable[[], object], seconds: float) -> float:
    """Return the median time of `work` by CUDA events, on the device's own clock, over about `seconds`."""
    for _ in range(3):  # warm-up
        work()
    torch.cuda.synchronize(device)
    times: list[float] = []
    end = time.monotonic() + seconds
    while len(times) < 5 or (time.monotonic() < end and len(times) < 200):
        begin, finish = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        finish.record()
        finish.synchronize()
        times.append(begin.elapsed_time(finish) / 1e3)
    return sorted(times)[len(times) // 2]


def matmul_tflops(device: torch.device, dtype: str, seconds: float) -> float | None:
    """Return the TFLOP/s (10^12) of an n x n product: 2 n^3 / t. Random data: zeros draw less power and run faster.

    `tf32` is float32 with TensorFloat-32 allowed; the other types are torch's.
    """
    kind = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    if dtype in ("tf32", "bfloat16") and torch.cuda.get_device_capability(device)[0] < 8:
        return None
    n = 4096 if dtype == "float32" else 8192
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        a = torch.randn(n, n, device=device).to(kind)
        b = torch.randn(n, n, device=device).to(kind)
        out = torch.empty_like(a)
        return 2 * n**3 / _median_seconds(device, lambda: torch.mm(a, b, out=out), seconds) / 1e12
    finally:
        torch.set_float32_matmul_precision(before)


def memory_gbps(device: torch.device, seconds: float) -> float:
    """Return the device memory bandwidth, GB/s, of a copy on the device: bytes read and written."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * 2**30 / _median_seconds(device, lambda: target.copy_(source), seconds) / 1e9


def copy_gbps(device: torch.device, pinned: bool, to_device: bool, seconds: float) -> float:
    """Return the rate of a host-to-device or device-to-host copy, GB/s, from page-locked or pageable memory."""
    host = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=pinned)
    there = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    source, target = (host, there) if to_device else (there, host)
    return _COPIED_BYTES / _median_seconds(device, lambda: target.copy_(source, non_blocking=pinned), seconds) / 1e9


def peer_gbps(source: torch.device, target: torch.device, seconds: float) -> float:
    """Return the rate of a copy from one GPU to another, GB/s."""
    a = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=source)
    b = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=target)
    return _COPIED_BYTES / _median_seconds(source, lambda: b.copy_(a, non_blocking=True), seconds) / 1e9


PROBE = Gpu()

if __name__ == "__main__":
    run_script(PROBE)
