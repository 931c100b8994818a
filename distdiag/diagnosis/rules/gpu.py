"""gpu: errors that a card's driver reports, a slowed card, and one that is idle while the job runs or busy while it hangs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from distdiag.diagnosis import kinds
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Finding, Severity
from distdiag.diagnosis.model.snapshot import GpuState, Life, Snapshot
from distdiag.diagnosis.text.phrases import NO_PROGRESS
from distdiag.diagnosis.text.template import Template

kind = kinds.GPU


@dataclass(frozen=True)
class Limits:
    idle_pct: float = 2.0
    """Utilization in per cent; a card with only a display server stays below it."""
    still_s: float = 60.0
    """Seconds that a card is idle, or that no rank makes a step."""
    still_steps: float = 5.0
    """The same in normal step times, if that is longer."""
    idle_steps: int = 10
    """Steps that a rank made in that time."""
    busy_pct: float = 95.0
    """Utilization in per cent that a spinning kernel reaches."""
    throttled_share: float = 0.5
    """Share of the last minute's samples that were throttled."""


limits = Limits()
# The driver's error numbers, by what they mean for the card: NVIDIA's list of Xid errors.
XIDS = {
    13: "an exception in the program's kernel", 31: "an access of the program outside its memory", 32: "a corrupted command",
    43: "the program's channel was reset", 45: "the program was torn down after an earlier error", 48: "a double-bit memory error",
    62: "the card's controller has halted", 63: "a memory row was remapped", 64: "a memory row could not be remapped",
    74: "an NVLink error", 79: "the card has fallen off the bus", 92: "many single-bit memory errors",
    94: "a contained memory error", 95: "an uncontained memory error", 119: "the card's system processor does not answer",
    120: "the card's system processor failed",
}  # fmt: skip
XIDS_OF_PROGRAM = {13, 31, 32, 43, 45}
_row = partial(Template, kind, proved=True)
_warning = partial(_row, severity=Severity.WARNING)
_info = partial(_row, severity=Severity.INFO)
_DRAIN_LOG = "drain the node; the kernel log (`dmesg | grep Xid`, closed in containers) has the driver's text"
TEXTS = {
    "idle": _warning("idle", "{culprits} make steps, but their GPUs were below {pct:.0f} % use for a minute",
                     "the steps run on the CPU", "move the model and its inputs to the device"),
    "busy": _warning("busy_without_progress", "GPUs show over {pct:.0f} % use, but no rank made a step for {still_s:time}: "
                     "kernels spin in a collective", NO_PROGRESS, "run `distdiag dump` to see where every rank is"),
    "lost": _row("lost", "{card}: the driver has lost the card", "its rank fails or hangs at its next CUDA call",
                 "drain the node and reset the card; `nvidia-smi` and the kernel log name the reason"),
    "links_down": _row("nvlink", "{card}: {g.nvlink_active} of {g.nvlink_before} NVLinks are left; the others went down during "
                       "the run", "slower or hanging collectives", "drain the node; `nvidia-smi nvlink -s` shows the links"),
    "links_retrained": _warning("nvlink", "{card}: its NVLinks were retrained {g.nvlink_recoveries} times in the last minute",
                                "collectives wait for the link each time",
                                "watch the card; `nvidia-smi nvlink -e` counts errors by link"),
    "shared": _info("shared", "{card}: {g.others} other process{g.others:|es} on it",
                    "they take time and memory of the card", "`nvidia-smi` lists them"),
    "xid": _row("xid", "{card}: the driver reported Xid {errors}", "the process that used it fails, or has failed", "{do}"),
    "ecc_new": _row("ecc", "{card}: {new} uncorrected memory errors during this run", "wrong results, or the next crash",
                    "drain the node and have the card replaced"),
    "ecc_old": _info("ecc", "{card}: {g.ecc_uncorrected} uncorrected memory errors before this run, none since",
                     "none so far", "have the card checked: such errors tend to return"),
    "throttled": _warning("throttled", "{card}: throttled ({g.throttle}) in {g.throttled_share:.0%} of the last minute",
                          "lower clocks on a rank that all others wait for", "check cooling and power of that node"),
    "pcie": _warning("pcie_degraded", "{card}: PCIe x{g.pcie_width} of x{g.pcie_width_max}",
                     "slower copies to and from the host",
                     "reseat the card, or check the riser; `distdiag probe gpu` measures the copies"),
}  # fmt: skip


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    """Yield findings about GPUs, from NVML's readings and the job's own progress."""
    s = facts.snapshot
    if not s.gpus:
        yield Abstained("no GPU found")
        return
    for card in s.gpus:
        yield from _card(card)
    idle = [g.rank for g in s.gpus if g.rank is not None and _idle(s, g)]
    if idle:
        yield TEXTS["idle"](culprits=idle, pct=limits.idle_pct)
    still_s = max(limits.still_s, limits.still_steps * (s.usual_step_s or 0.0))
    stuck = [r for r in s.ranks.values() if r.activity_since_s is not None and s.t_s - r.activity_since_s > still_s]
    busy = [g.rank for g in s.gpus if g.rank is not None and (g.utilization_pct or 0) > limits.busy_pct]
    if stuck and busy and len(stuck) == len(s.ranks) and len(busy) >= len(s.ranks):
        yield TEXTS["busy"](culprits=busy, pct=limits.busy_pct, still_s=still_s)


def _card(g: GpuState) -> Iterator[Finding]:
    who = () if g.rank is None else (g.rank,)
    new = (g.ecc_uncorrected or 0) - (g.ecc_before or 0)
    down = g.nvlink_active is not None and g.nvlink_before is not None and g.nvlink_active < g.nvlink_before
    narrow = g.pcie_width and g.pcie_width_max and g.pcie_width < g.pcie_width_max
    card = f"GPU {g.gpu} of node {g.node}" + (f" (rank {g.rank})" if who else "")
    errors = ", ".join(f"{x} ({XIDS.get(x, 'see the list of Xid errors')})" for x in sorted(set(g.xids)))
    by_program = set(g.xids) <= XIDS_OF_PROGRAM
    do = "run again with CUDA_LAUNCH_BLOCKING=1 to find the kernel" if by_program else _DRAIN_LOG
    for name, holds in {
        "lost": g.lost,
        "links_down": down,
        "links_retrained": g.nvlink_recoveries and not down,
        "shared": g.others,
        "xid": g.xids,
        "ecc_new": new > 0,
        "ecc_old": g.ecc_uncorrected and new <= 0,
        "throttled": g.throttle and (g.throttled_share or 0.0) > limits.throttled_share,
        "pcie": narrow,
    }.items():
        if holds:
            yield TEXTS[name](culprits=who, g=g, new=new, card=card, errors=errors, do=do)


def _idle(s: Snapshot, g: GpuState) -> bool:
    """True if a rank with memory on this card makes steps while the card has had nothing to do for a minute."""
    r = s.ranks.get(g.rank) if g.rank is not None else None
    if r is None or not r.device_bytes or g.most_used_pct is None or g.most_used_pct > limits.idle_pct:
        return False
    steps = [x for x in r.steps if s.t_s - x.end_s < limits.still_s]
    return r.life == Life.RUNNING and len(steps) >= limits.idle_steps and s.t_s - steps[-1].end_s < limits.still_s / 4
