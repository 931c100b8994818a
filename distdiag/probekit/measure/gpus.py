"""Read facts about every GPU from NVML, and compare with the published peaks.

NVML is asked one question at a time; a fact that a card does not offer is None (consumer cards have no ECC, older drivers no
NVLink counters).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from distdiag import nvml as library
from distdiag.errors import DistdiagError, ExitCode

# Bytes per second of one PCIe lane and direction, GB/s, by generation (after line coding).
PCIE_LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
# One NVLink, one direction, GB/s, by NVLink version.
NVLINK_GBPS = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 50.0}


@dataclass(frozen=True, slots=True)
class Peak:
    """Published peaks: dense TFLOP/s by element type, device memory GB/s."""

    tflops: dict[str, float]
    memory_gbps: float


# From the data sheets: dense (without sparsity), boost clock. The first entry contained in the device's name counts.
PEAKS: tuple[tuple[str, Peak], ...] = (
    ("B200", Peak({"float32": 80, "tf32": 1100, "bfloat16": 2250, "float16": 2250}, 8000)),
    ("H200", Peak({"float32": 67, "tf32": 494, "bfloat16": 989, "float16": 989}, 4800)),
    ("GH200", Peak({"float32": 67, "tf32": 494, "bfloat16": 989, "float16": 989}, 4000)),
    ("H100 PCIe", Peak({"float32": 51, "tf32": 378, "bfloat16": 756, "float16": 756}, 2000)),
    ("H100 NVL", Peak({"float32": 60, "tf32": 417, "bfloat16": 835, "float16": 835}, 3900)),
    ("H100", Peak({"float32": 67, "tf32": 494, "bfloat16": 989, "float16": 989}, 3350)),
    ("A100-PCIE-40GB", Peak({"float32": 19.5, "tf32": 156, "bfloat16": 312, "float16": 312}, 1555)),
    ("A100-SXM4-40GB", Peak({"float32": 19.5, "tf32": 156, "bfloat16": 312, "float16": 312}, 1555)),
    ("A100 80GB PCIe", Peak({"float32": 19.5, "tf32": 156, "bfloat16": 312, "float16": 312}, 1935)),
    ("A100", Peak({"float32": 19.5, "tf32": 156, "bfloat16": 312, "float16": 312}, 2039)),
    ("L40S", Peak({"float32": 91.6, "tf32": 183, "bfloat16": 362, "float16": 362}, 864)),
    ("L40", Peak({"float32": 90.5, "tf32": 90.5, "bfloat16": 181, "float16": 181}, 864)),
    ("L4", Peak({"float32": 30.3, "tf32": 60, "bfloat16": 121, "float16": 121}, 300)),
    ("A10G", Peak({"float32": 35, "tf32": 35, "bfloat16": 70, "float16": 70}, 600)),
    ("A10", Peak({"float32": 31.2, "tf32": 62.5, "bfloat16": 125, "float16": 125}, 600)),
    ("A40", Peak({"float32": 37.4, "tf32": 74.8, "bfloat16": 149.7, "float16": 149.7}, 696)),
    ("V100", Peak({"float32": 15.7, "float16": 125}, 900)),
    ("T4", Peak({"float32": 8.1, "float16": 65}, 320)),
    ("RTX 4090", Peak({"float32": 82.6, "tf32": 82.6, "bfloat16": 165, "float16": 165}, 1008)),
    ("RTX 3090", Peak({"float32": 35.6, "tf32": 35.6, "bfloat16": 71, "float16": 71}, 936)),
)


@dataclass(slots=True)
class GpuFacts:
    """Facts about one GPU; None: NVML does not report it."""

    index: int
    name: str
    uuid: str | None = None
    utilization_pct: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    throttle: list[str] = field(default_factory=list)
    ecc_uncorrected: int | None = None  # since boot
    retired_pages: int | None = None
    remapped_rows_pending: bool | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    nvlinks_active: int | None = None
    nvlinks_down: int | None = None
    nvlink_version: int | None = None
    persistence: bool | None = None
    other_processes: int | None = None


def peak_of(name: str) -> Peak | None:
    """Return the published peak of a device by NVML's or torch's name; None if it is not in the table."""
    words = name.replace("NVIDIA", "").replace("Tesla", "").strip()
    for key, peak in PEAKS:
        # "A10" must not match "A100", nor "L4" "L40S".
        at = words.find(key)
        if at >= 0 and (at + len(key) == len(words) or not words[at + len(key)].isalnum()):
            return peak
    return None


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    try:
        pynvml = library.load()
    except library.Unavailable as e:
        hint = (
            "pip install nvidia-ml-py"
            if "not installed" in str(e)
            else "this probe needs an NVIDIA GPU; `distdiag doctor` checks the rest"
        )
        raise DistdiagError(str(e), hint, ExitCode.NO_DATA, "no_gpu") from None
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def facts(n: Any, index: int, own_pids: set[int]) -> GpuFacts:
    """Return all facts about the GPU with NVML's `index`; `n` is pynvml, `own_pids` do not count as other processes."""

    card = n.nvmlDeviceGetHandleByIndex(index)

    def ask(question: Callable[..., Any], *args: Any) -> Any:
        return library.ask(n, question, card, *args)

    known = library.facts(n, card)
    known["name"] = known["name"] or "unknown GPU"
    use, persistence = ask(n.nvmlDeviceGetUtilizationRates), ask(n.nvmlDeviceGetPersistenceMode)
    pages = [p for cause in (0, 1) if (p := ask(n.nvmlDeviceGetRetiredPages, cause)) is not None]
    rows = ask(n.nvmlDeviceGetRemappedRows)  # corrected, uncorrected, pending, failure
    links, pids = library.links(n, card), library.process_ids(n, card)
    return GpuFacts(
        index,
        **known,
        utilization_pct=None if use is None else int(use.gpu),
        throttle=library.throttle_reasons(n, card) or [],
        retired_pages=sum(map(len, pages)) if pages else None,
        remapped_rows_pending=None if rows is None else bool(rows[2] or rows[3]),
        nvlinks_active=links.count(True) if links else None,
        nvlinks_down=links.count(False) if links else None,
        nvlink_version=ask(n.nvmlDeviceGetNvLinkVersion, 0) if links else None,
        persistence=None if persistence is None else bool(persistence),
        other_processes=None if pids is None else sum(pid not in own_pids for pid in pids),
    )


def topology(n: Any, count: int) -> list[list[str]]:
    """Return how each pair of GPUs is connected, in words; `X` on the diagonal."""
    levels = {0: "same board", 10: "one switch", 20: "switches", 30: "one CPU", 40: "one node", 50: "across CPUs"}
    cards = [*enumerate(map(n.nvmlDeviceGetHandleByIndex, range(count)))]

    def between(one: Any, other: Any) -> str:
        return levels.get(library.ask(n, n.nvmlDeviceGetTopologyCommonAncestor, one, other), "?")

    return [["X" if a == b else between(one, other) for b, other in cards] for a, one in cards]


def complaints(g: GpuFacts) -> list[tuple[bool, str]]:
    """Return (fault, sentence) for each problem; a fault fails the probe, other problems are notes.

    The PCIe generation is judged only under load: idle GPUs clock their links down.
    """
    found: list[tuple[bool, str]] = []
    who = f"GPU {g.index}"
    if g.ecc_uncorrected:
        errors = f"{g.ecc_uncorrected} uncorrected ECC errors since the driver was loaded"
        found.append((True, f"{who}: {errors}: replace it, or reset it and watch"))
    if g.remapped_rows_pending:
        found.append((True, f"{who}: memory rows wait for remapping: reset the GPU"))
    if g.retired_pages:
        found.append((False, f"{who}: {g.retired_pages} retired memory pages"))
    hard = [t for t in g.throttle if t != "power cap"]
    if hard:
        found.append((True, f"{who}: clocks lowered: {', '.join(hard)} ({g.temperature_c} C): check cooling and power"))
    elif g.throttle:
        watts = f" ({g.power_limit_w:g} W)" if g.power_limit_w else ""
        found.append((False, f"{who}: at its power cap{watts}"))
    if g.pcie_width and g.pcie_width_max and g.pcie_width < g.pcie_width_max:
        found.append(
            (True, f"{who}: PCIe x{g.pcie_width} where x{g.pcie_width_max} is possible: reseat the card or its riser")
        )
    if g.nvlinks_down:
        links = g.nvlinks_down + (g.nvlinks_active or 0)
        found.append((bool(g.nvlinks_active), f"{who}: {g.nvlinks_down} of {links} NVLinks are down"))
    if g.persistence is False:
        found.append((False, f"{who}: persistence mode is off: the first use takes seconds (nvidia-smi -pm 1)"))
    if g.other_processes:
        found.append((False, f"{who}: {g.other_processes} other process{'es' if g.other_processes > 1 else ''} on it"))
    return found


def link_ceilings(index: int) -> dict[str, float | None]:
    """Return the PCIe and NVLink rates of one GPU, one direction, in GB/s; None if NVML does not report them."""
    try:
        with nvml() as n:
            g = facts(n, index, {os.getpid()})
    except DistdiagError:
        return {"pcie_gbps": None, "nvlink_gbps": None}
    lane = PCIE_LANE_GBPS.get(g.pcie_generation_max or 0)
    per_link = NVLINK_GBPS.get(g.nvlink_version or 0)
    return {
        "pcie_gbps": lane * g.pcie_width if lane and g.pcie_width else None,
        "nvlink_gbps": per_link * g.nvlinks_active if per_link and g.nvlinks_active else None,
    }
