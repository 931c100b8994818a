"""The measuring loop: blocks of back-to-back operations, stamped on every rank, until the interval is narrow enough.

The loop itself only takes an entry and an exit stamp on every rank, on one clock. Between blocks rank 0 checks the interval
and the foreign CPU, and decides how many iterations follow. There is no barrier before the stamps: it would hide a late
rank, and a training step has none either.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from distdiag.probekit.measure.noise import BlockNoise, CpuReading, foreign_cpus, over_blocks, read_cpu, usable_cpus
from distdiag.probekit.ranks.clock import clock_ns
from distdiag.probekit.verdict.result import HostNoise
from distdiag.terms.statistics import interval_of_median

if TYPE_CHECKING:
    from distdiag.probekit.ranks.job import Job

BLOCK_S = 0.1  # long enough to see foreign CPU in /proc/stat, short enough for five blocks a size
_MOST_PER_BLOCK = 2_000
_LEAST_SAMPLES = 11  # below, a median's 95 % interval is the whole range
_MOST_STAMPS = 400_000  # iterations of all ranks together that rank 0 keeps in memory, 16 bytes each


@dataclass(slots=True)
class Stamped:
    """The samples of one size, on rank 0."""

    entered_us: NDArray[np.float64]  # (ranks, iterations), rank 0's clock
    left_us: NDArray[np.float64]
    block: NDArray[np.int64]  # (iterations,) index of the block
    noise: list[BlockNoise] = field(default_factory=list)  # per block, of the noisiest host

    @property
    def clean(self) -> NDArray[np.bool_]:
        """Return a mask of the iterations in blocks in which others did not use our CPUs."""
        return ~np.array([n.noisy for n in self.noise], dtype=bool)[self.block]


def sample(job: Job, call: Callable[[], None], label: str, seconds: float, precision: float) -> Stamped | None:
    """Run `call` on all ranks for about `seconds`, or until the p50's 95 % half-width is `precision` of it.

    On a busy host, up to half as much time again is spent on waiting for clean blocks. The stamps are on rank 0, None
    on the others.
    """
    start_s = time.monotonic()
    # every rank's operation takes as long as the latest rank's
    per_call_s = _pilot(job, call, label) + max((i.delay_s for i in job.options.inject), default=0.0)
    entered: list[int] = []
    left: list[int] = []
    block_of: list[int] = []
    noises: list[BlockNoise] = []
    most = max(50, min(10_000, _MOST_STAMPS // job.world_size))
    delay = job.injected("delay")
    late_s = delay.delay_s if delay else 0.0
    while True:
        planned = 0.0
        if job.rank == 0 and not _enough(entered, left, block_of, noises, time.monotonic() - start_s, seconds, precision, most):  # fmt: skip
            room_s = seconds * 1.5 - (time.monotonic() - start_s)
            fitting = max(1, int(min(BLOCK_S, room_s) / max(per_call_s, 1e-7)))
            planned = float(min(fitting, most - len(entered), _MOST_PER_BLOCK))
        iterations = int(job.agree([planned], f"{label}: next block")[0])
        if iterations == 0:
            break
        noise = _block(job, call, label, iterations, late_s, entered, left)
        block_of += [len(noises)] * iterations
        noises.append(noise)
        if job.rank == 0:
            per_call_s = max(1e-7, (left[-1] - entered[-iterations]) / iterations / 1e9)
    stamps = job.gather_array(np.array([entered, left], dtype=np.int64), f"{label}: collecting stamps")
    if stamps is None:
        return None
    stamps = stamps - np.asarray(job.clock_offsets_ns, dtype=np.int64)[:, None, None]
    # relative to the first, as float: 2^53 ns are 104 days
    us = (stamps - stamps.min()) / 1e3
    return Stamped(us[:, 0], us[:, 1], np.array(block_of), noises)


def _pilot(job: Job, call: Callable[[], None], label: str) -> float:
    """Return the seconds of one call, from three after a warm-up, which opens connections and touches buffers."""
    with job.step(f"{label}: warm-up"):
        call()
        start = clock_ns()
        for _ in range(3):
            call()
        return (clock_ns() - start) / 3e9


def _block(
    job: Job, call: Callable[[], None], label: str, iterations: int, late_s: float, entered: list[int], left: list[int]
) -> BlockNoise:
    """Stamp `iterations` calls; return the CPU that others used meanwhile, on rank 0."""
    now = clock_ns
    with job.step(label, counter=entered):
        call()  # aligns the ranks after the control traffic; not a sample
        before = read_cpu()
        for _ in range(iterations):
            if late_s:
                _be_late(late_s)
            entered.append(now())
            call()
            left.append(now())
        after = read_cpu()
    noise = noisiest_host(job, cpu_used(before, after), f"{label}: collecting CPU use")
    return noise or BlockNoise(None, usable_cpus(), 1)


class NoiseMeter:
    """Measures the foreign CPU during a probe without blocks; every rank creates one and calls `stop`.

    With `children`, the ranks' child processes (a DataLoader's workers) are our own use.
    """

    def __init__(self, job: Job, children: bool = False) -> None:
        self._job = job
        self._children = children
        self._before = read_cpu(children)

    def stop(self, label: str) -> HostNoise | None:
        """Return the CPU that others used since the start, on the noisiest host; None on all ranks but 0."""
        used = cpu_used(self._before, read_cpu(self._children))
        noise = noisiest_host(self._job, used, f"{label}: collecting CPU use")
        return noise and over_blocks([noise])


def cpu_used(before: CpuReading, after: CpuReading) -> np.ndarray:
    """Return (busy, own, wall) seconds between two readings; busy is NaN if the kernel does not report it."""
    busy = after.busy_s - before.busy_s if after.busy_s is not None and before.busy_s is not None else np.nan
    return np.array([busy, after.own_s - before.own_s, after.at_s - before.at_s])


def noisiest_host(job: Job, used: np.ndarray, label: str) -> BlockNoise | None:
    """Return the foreign CPU of the noisiest host, from this rank's (busy, own, wall) seconds; None on all ranks but 0."""
    use = job.gather_array(used, label)
    if use is None:
        return None
    hosts: list[BlockNoise] = []
    for key in dict.fromkeys(job.host_keys):
        ranks = [r for r, k in enumerate(job.host_keys) if k == key]
        busy = float(use[ranks[0], 0])
        foreign = None if np.isnan(busy) else foreign_cpus(busy, float(use[ranks, 1].sum()), float(use[ranks[0], 2]))
        hosts.append(BlockNoise(foreign, usable_cpus(), len(ranks)))
    return max(hosts, key=lambda h: h.foreign_cpus or 0.0)


def _be_late(seconds: float) -> None:
    # sleep for most of it, spin for the rest: a sleep alone may take a scheduler tick longer
    end = clock_ns() + int(seconds * 1e9)
    if seconds > 0.002:
        time.sleep(seconds - 0.001)
    while clock_ns() < end:
        pass


def _enough(
    entered: list[int], left: list[int], block_of: list[int], noises: list[BlockNoise], elapsed_s: float, seconds: float,
    precision: float, most: int,
) -> bool:  # fmt: skip
    """True if rank 0 should stop after this block."""
    count = len(entered)
    if count >= most or (elapsed_s >= 1.5 * seconds and count >= 1):
        return True
    clean = np.array([not noises[b].noisy for b in block_of], dtype=bool)
    enough_clean = clean.sum() >= max(_LEAST_SAMPLES, count / 2)
    if elapsed_s >= seconds and count >= 1 and (enough_clean or count < _LEAST_SAMPLES):
        return True
    if not enough_clean or len(noises) < 2:
        return False
    times = (np.array(left) - np.array(entered))[clean].astype(np.float64)
    interval = interval_of_median(times[-1000:], replicates=60)
    return (interval.high - interval.low) / 2 <= precision * float(np.median(times))
