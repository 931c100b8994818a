"""Results of a probe: plain records, the same in memory, in JSON (`distdiag.probe/1`) and in a baseline."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import re
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

SCHEMA = "distdiag.probe/1"


class Verdict(StrEnum):
    """Verdict of a probe, from best to worst; the worst wins."""

    PASS = "pass"
    INCONCLUSIVE = "inconclusive"  # the host was too noisy, or the budget too small, to decide
    FAIL = "fail"


def worst(verdicts: list[Verdict]) -> Verdict:
    """Return the verdict on several probes: fail if any failed, else inconclusive if any was."""
    order = list(Verdict)
    return max(verdicts, key=order.index, default=Verdict.INCONCLUSIVE)


@dataclass(slots=True)
class TimeUs:
    """Times of one operation on the slowest rank, microseconds; `ci95` is of the p50, by block bootstrap."""

    min: float
    p50: float
    p95: float
    max: float
    ci95: tuple[float, float]


@dataclass(slots=True)
class WrongValues:
    rank: int
    elements: int  # how many were wrong
    first: int  # position of the first one
    case: str  # the call: "exact size", "odd size", "in place"; with the root, if any
    source_rank: int | None = None  # rank of the wrong part, if the layout of the result shows it


@dataclass(slots=True)
class Row:
    bytes: int
    elements: int
    iterations: int
    time_us: TimeUs
    wire_us: float  # p50 from the last arrival to the last exit: without waiting for a late rank
    algbw_gbps: float | None
    busbw_gbps: float | None
    busbw_ci95_gbps: tuple[float, float] | None
    skew_us: float  # p50 of last arrival - first arrival
    late_rank: int | None  # the rank that is nearly always last
    late_share: float  # share of the iterations in which the most frequent last rank was last
    correct: bool
    wrong: list[WrongValues] = field(default_factory=list)
    modes: list[dict[str, float]] = field(default_factory=list)  # [{"time_us", "share"}], empty where unimodal
    foreign_cpus: float | None = None  # mean over the blocks, of the noisiest host
    noisy: bool = False  # too few clean blocks
    dropped_iterations: int = 0  # left out because others used the CPUs


@dataclass(slots=True)
class HostNoise:
    """CPU use of others on the hosts during the measurement."""

    foreign_cpus: float | None  # mean; None if the kernel does not report it
    cpus: int
    blocks: int
    noisy_blocks: int
    noisy: bool


@dataclass(slots=True)
class Measure:
    """One figure of a result for a baseline: independent repeats, lower is better."""

    key: str  # "1048576" (bytes), "workers=2 …", "ddp"
    unit: str
    values: list[float]


@dataclass(slots=True)
class Result:
    """The result of one probe. `rows` has the probe's own record type."""

    probe: str
    world_size: int
    backend: str
    device: str
    dtype: str | None = None
    verdict: Verdict = Verdict.PASS
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ceilings: dict[str, float | None] = field(default_factory=dict)
    host_noise: HostNoise | None = None
    rows: list[Any] = field(default_factory=list)
    fit: dict[str, Any] | None = None
    clock_error_us: float = 0.0
    elapsed_s: float = 0.0
    hosts: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)  # what only this probe has
    measures: list[Measure] = field(default_factory=list)  # for --save; not in the JSON
    comparison: list[dict[str, Any]] | None = None  # of --against

    def judge(self, verdict: Verdict, reason: str) -> None:
        """Add a reason. The verdict can only get worse."""
        self.verdict = worst([self.verdict, verdict])
        self.reasons.append(reason)

    def as_json(self) -> dict[str, Any]:
        """Return the public object: `schema` first, units in the names, null for not measured."""
        data = dataclasses.asdict(self)
        del data["measures"]
        if self.comparison is None:
            del data["comparison"]
        return _rounded({"schema": SCHEMA, **data})


def _rounded(value: Any) -> Any:
    """Return the value with floats at six significant digits; infinities and NaN become null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return value


def host_class() -> str:
    """Return what makes two hosts comparable: architecture, processor, number of CPUs."""
    model = None
    with suppress(OSError):
        model = re.search(r"^(?:model name|CPU part)\s*:(.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    name = model[1].strip() if model else platform.machine()
    return f"{platform.machine()} {name} x{os.cpu_count()}"
