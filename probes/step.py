"""step: the time of one training step under each strategy, on one model and one global batch.

What does a second rank buy? Single process, DataParallel, DDP and FSDP take the same step: speed-up, efficiency,
memory per rank, and how much of the step is communication that nothing hides. On the CPU, where torch's DataParallel
silently runs one process, replicas on threads stand in, and are labelled so.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distdiag.errors import DistdiagError
from distdiag.probekit.command.main import main
from distdiag.probekit.command.options import Options
from distdiag.probekit.measure.probe import Probe, Table
from distdiag.probekit.measure.sampling import NoiseMeter
from distdiag.probekit.measure.thread_data_parallel import ThreadDataParallel
from distdiag.probekit.ranks.job import Job
from distdiag.probekit.ranks.user_object import find_function
from distdiag.probekit.verdict import decide
from distdiag.probekit.verdict.collective_result import new_result
from distdiag.probekit.verdict.result import Measure, Result, Verdict
from distdiag.terms.statistics import interval_of_median
from distdiag.terms.units import size_text

STRATEGIES = ("single", "single-threads", "dataparallel", "ddp", "fsdp")
_WARM_UP_STEPS = 1
_LEAST_STEPS = 2
_MOST_STEPS = 200
_LEAST_SECONDS = 0.2
_BATCH = 32  # in `all`; as options.parse has it for this probe


@dataclass(slots=True)
class StepRow:
    """One strategy; times are those of the slowest rank."""

    strategy: str
    label: str
    ranks: int  # that compute
    threads: int  # per rank
    step_ms: float
    ci95_ms: tuple[float, float]
    steps: int
    samples_per_s: float
    speed_up: float | None = None  # against single
    efficiency: float | None = None  # speed-up per device or core in use
    state_bytes: int = 0  # parameters, gradients and optimizer state on one rank
    peak_bytes: int | None = None  # the allocator's peak; CUDA only
    exposed_ms: float | None = None  # communication that computing does not hide
    parts_ms: dict[str, float] = field(default_factory=dict)
    times_ms: list[float] = field(default_factory=list)


class Step(Probe):
    name = "step"
    summary = "step time of single process, DataParallel, DDP and FSDP on one model and global batch"
    min_ranks = 1
    default_ranks = 2
    share_in_all = 4.0

    def preload(self) -> None:
        import torch._dynamo  # noqa: F401  # by DDP and torch.optim at their first use: two seconds of CPU

    def check(self, options: Options) -> None:
        unknown = [s for s in options.strategies if s not in STRATEGIES]
        if unknown:
            raise DistdiagError(f"--strategies: no '{unknown[0]}'", "of " + ", ".join(STRATEGIES))
        if options.model:
            find_function("--model", options.model)

    def run(self, job: Job) -> Result | None:
        began = time.monotonic()
        batch = batch_of(job)
        wanted = job.options.strategies or list(STRATEGIES)
        plan = [s for s in wanted if possible(s, job) is None]
        noise = NoiseMeter(job)
        rows: list[StepRow] = []
        unmeasured: list[str] = []
        for i, strategy in enumerate(plan):
            seconds = job.agree([job.left_s() * 0.85 / (len(plan) - i)], "step: next strategy")[0]
            if seconds < _LEAST_SECONDS and i:
                unmeasured = plan[i:]
                break
            seconds = max(_LEAST_SECONDS, seconds)
            row = measure(job, strategy, batch, seconds)
            if row is not None:
                rows.append(row)
        host_noise = noise.stop("step")
        if job.rank != 0 or host_noise is None:
            return None
        result = new_result(job, self.name)
        result.host_noise = host_noise
        result.rows = rows
        result.details |= {"model": job.options.model or "SimpleCNN", "global_batch": len(batch[0])}
        result.notes += [f"{s}: not possible here: {why}" for s in wanted if (why := possible(s, job))]
        for row in rows:
            result.measures.append(
                Measure(
                    row.strategy,
                    "ms",
                    [float(np.median(p)) for p in np.array_split(row.times_ms, min(8, max(1, len(row.times_ms) // 2)))],
                )
            )
        judge(result)
        if unmeasured:
            result.judge(
                Verdict.INCONCLUSIVE, f"the budget ended before {', '.join(unmeasured)}: give more with --budget"
            )
        result.elapsed_s = time.monotonic() - began
        return result

    def table(self, result: Result, ascii_only: bool = False) -> Table:
        none = "-" if ascii_only else "–"
        table = Table(
            [
                "strategy",
                "ranks",
                "threads",
                "step ms",
                "95 % interval",
                "samples/s",
                "speed-up",
                "efficiency",
                "state/rank",
                "exposed ms",
                "of step",
            ],
            left={0},
        )
        rows: list[StepRow] = result.rows
        for r in rows:
            table.rows.append(
                [
                    r.label,
                    str(r.ranks),
                    str(r.threads),
                    f"{r.step_ms:,.1f}",
                    f"{r.ci95_ms[0]:,.1f} .. {r.ci95_ms[1]:,.1f}",
                    f"{r.samples_per_s:,.0f}",
                    f"{r.speed_up:.2f}" if r.speed_up else none,
                    f"{r.efficiency:.0%}" if r.efficiency else none,
                    size_text(r.peak_bytes or r.state_bytes),
                    f"{r.exposed_ms:.1f}" if r.exposed_ms is not None else none,
                    f"{r.exposed_ms / r.step_ms:.0%}" if r.exposed_ms is not None else none,
                ]
            )
        return table

    def drawing(self, result: Result, ascii_only: bool = False) -> list[str]:
        """Bars of the step time; the last part of a bar is exposed communication."""
        rows: list[StepRow] = result.rows
        longest = max(r.step_ms for r in rows)
        full, light = ("#", "=") if ascii_only else ("█", "░")
        width = max(len(r.label) for r in rows)
        lines = [f"{result.details['model']}, global batch {result.details['global_batch']}:"]
        for r in rows:
            exposed = round(40 * max(0.0, r.exposed_ms or 0.0) / longest)
            cells = max(1, round(40 * r.step_ms / longest))
            lines.append(
                f"{r.label:<{width}}  {full * (cells - min(exposed, cells))}{light * min(exposed, cells)} {r.step_ms:.1f} ms"
            )
        if any(r.exposed_ms for r in rows):
            lines.append(f"{'':<{width}}  {light} exposed communication: the step against the same step without it")
        return lines

    def headline(self, result: Result) -> str:
        rows: list[StepRow] = result.rows
        return ", ".join(
            f"{r.strategy} {r.step_ms:.0f} ms"
            + (f" ({r.speed_up:.2f}x)" if r.speed_up and r.strategy != "single" else "")
            for r in rows
        )


def possible(strategy: str, job: Job) -> str | None:
    """None where the strategy can run here, else why not."""
    cuda = job.device.type == "cuda"
    if strategy in ("ddp", "fsdp") and job.world_size < 2:
        return "it needs two ranks"
    if strategy == "single-threads" and (cuda or job.world_size < 2):
        return "on a GPU one process uses it whole" if cuda else "one rank has one thread"
    if strategy == "dataparallel" and cuda and torch.cuda.device_count() < 2:
        return "one GPU"
    if strategy == "dataparallel" and not cuda and job.world_size < 2:
        return "one rank: there is nothing to divide the batch by"
    if strategy == "fsdp":
        try:
            from torch.distributed.fsdp import fully_shard  # noqa: F401
        except ImportError:
            return f"torch {torch.__version__} has no fully_shard"
        if cuda and job.backend == "gloo":
            return "FSDP on CUDA wants NCCL"
    return None


def judge(result: Result) -> None:
    """Speed-ups; a verdict other than pass only for noise."""
    decide.host_noise(result)
    rows: list[StepRow] = result.rows
    single = next((r for r in rows if r.strategy == "single"), None)
    for r in rows:
        if single is not None:
            r.speed_up = single.step_ms / r.step_ms
            r.efficiency = r.speed_up / (r.ranks * r.threads)
    ddp = next((r for r in rows if r.strategy == "ddp"), None)
    fastest = min(rows, key=lambda r: r.step_ms)
    text = f"fastest: {fastest.label}, {fastest.step_ms:.1f} ms a step"
    if ddp is not None and ddp.speed_up is not None and single is not None:
        text += f"; DDP on {ddp.ranks} ranks is {ddp.speed_up:.2f} times one process"
        threads = next((r for r in rows if r.strategy == "single-threads"), None)
        if threads is not None:
            text += f", and {threads.step_ms / ddp.step_ms:.2f} times one process with as many threads"
    result.reasons.append(text)


def batch_of(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch: random images in CIFAR-10's shape and labels, the same on every rank.

    Raises:
        DistdiagError: it cannot be divided among the ranks.
    """
    size = job.options.batch_size if job.options.name == "step" else _BATCH
    if size % job.world_size:
        raise DistdiagError(
            f"--batch-size {size} cannot be divided by {job.world_size} ranks",
            f"--batch-size {size // job.world_size * job.world_size or job.world_size}",
        )
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(size, 3, 32, 32, generator=generator)
    return images.to(job.device), torch.randint(0, 10, (size,), generator=generator).to(job.device)


def make_model(job: Job) -> nn.Module:
    """The user's model, or the reference job's SimpleCNN; the same weights on every rank."""
    torch.manual_seed(0)
    if job.options.model:
        model = find_function("--model", job.options.model)()
        if not isinstance(model, nn.Module):
            raise DistdiagError(
                f"--model {job.options.model} returned a {type(model).__name__}",
                "return an nn.Module that takes (n, 3, 32, 32) images",
            )
        return model.to(job.device)
    from distdiag.train.models import SimpleCNN

    return SimpleCNN().to(job.device)


def measure(job: Job, strategy: str, batch: tuple[torch.Tensor, torch.Tensor], seconds: float) -> StepRow | None:
    """One strategy within `seconds`; the row on rank 0."""
    if strategy in ("ddp", "fsdp"):
        return measure_ranks(job, strategy, batch, seconds)
    return job.while_others_wait(
        lambda: measure_alone(job, strategy, batch, seconds), seconds + 60, f"step: {strategy} on rank 0"
    )


def measure_alone(job: Job, strategy: str, batch: tuple[torch.Tensor, torch.Tensor], seconds: float) -> StepRow:
    """single, single-threads, dataparallel: rank 0 takes the whole batch."""
    threads = torch.get_num_threads()
    model = make_model(job)
    label, ranks = "single process", 1
    wrapped: nn.Module = model
    if strategy == "dataparallel":
        if job.device.type == "cuda":
            ranks, label = torch.cuda.device_count(), "DataParallel"
            wrapped = nn.DataParallel(model)
        else:
            ranks, label = job.world_size, "DataParallel (threads stand in)"
            wrapped = ThreadDataParallel(model, job.world_size)
    if strategy == "single-threads":
        torch.set_num_threads(threads * job.world_size)
        label = f"single process, {threads * job.world_size} threads"
    try:
        take, state = step_function(wrapped, *batch)
        parts: list[dict[str, float]] = []

        def timed() -> float:
            t = one_step(job, take)
            if isinstance(wrapped, ThreadDataParallel):
                parts.append({k: v * 1e3 for k, v in asdict(wrapped.times).items()})
            return t

        times = list(repeat(timed, seconds))
        row = make_row(strategy, label, ranks, torch.get_num_threads(), times, len(batch[0]), state(), job)
        if parts:
            row.parts_ms = {
                k.removesuffix("_s"): float(np.median([p[k] for p in parts[_WARM_UP_STEPS:]])) for k in parts[0]
            }
            row.exposed_ms = row.parts_ms["scatter"] + row.parts_ms["replicate"] + row.parts_ms["gather"]
        return row
    finally:
        torch.set_num_threads(threads)
        if isinstance(wrapped, ThreadDataParallel):
            wrapped.close()


def measure_ranks(job: Job, strategy: str, batch: tuple[torch.Tensor, torch.Tensor], seconds: float) -> StepRow | None:
    """ddp, fsdp: every rank takes its part of the batch."""
    part = len(batch[0]) // job.world_size
    mine = slice(job.rank * part, (job.rank + 1) * part)
    with job.step(f"step: {strategy} is set up"):
        if strategy == "ddp":
            model: nn.Module = DistributedDataParallel(
                make_model(job),
                device_ids=[job.device.index] if job.device.type == "cuda" else None,
                process_group=job.group,
            )
        else:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            model = make_model(job)
            fully_shard(model, mesh=init_device_mesh(job.device.type, (job.world_size,)))  # in place
    take, state = step_function(model, batch[0][mine], batch[1][mine])
    synced: list[float] = []
    alone: list[float] = []
    start = time.monotonic()
    turn = 0
    while True:
        # Of three DDP steps one is without communication, in turn, so that both see the same noise.
        without = strategy == "ddp" and turn % 3 == 2
        quiet = model.no_sync() if without and isinstance(model, DistributedDataParallel) else contextlib.nullcontext()
        with job.step(f"step: {strategy}, step {turn}"), quiet:
            (alone if without else synced).append(one_step(job, take))
        turn += 1
        enough = len(synced) >= _LEAST_STEPS + _WARM_UP_STEPS and (bool(alone) or strategy != "ddp")
        over = enough and (time.monotonic() - start > seconds or turn >= _MOST_STEPS)
        if job.agree([float(over)], f"step: {strategy}, another")[0]:
            break
    medians = job.gather_all(
        (float(np.median(synced[_WARM_UP_STEPS:])), float(np.median(alone)) if alone else None, synced),
        f"step: {strategy}, collecting",
    )
    state_bytes = state()
    del model, take
    if job.rank != 0:
        return None
    slowest = max(medians, key=lambda m: m[0])
    label = "DDP" if strategy == "ddp" else "FSDP (fully_shard)"
    row = make_row(
        strategy, label, job.world_size, torch.get_num_threads(), slowest[2], len(batch[0]), state_bytes, job
    )
    if slowest[1] is not None:
        row.exposed_ms = max(0.0, row.step_ms - slowest[1])
    return row


def step_function(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor
) -> tuple[Callable[[], None], Callable[[], int]]:
    """(take one step, bytes of parameters, gradients and optimizer state on this rank)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def take() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    def state_bytes() -> int:
        total = 0
        for p in model.parameters():
            kept = [p, p.grad, *optimizer.state.get(p, {}).values()]
            total += sum(local_bytes(t) for t in kept if isinstance(t, torch.Tensor))
        return total

    return take, state_bytes


def local_bytes(tensor: torch.Tensor) -> int:
    """Bytes on this rank: of a sharded tensor its own shard."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local.nbytes


def one_step(job: Job, take: Callable[[], None]) -> float:
    """Milliseconds of one step, the device's work included."""
    job.synchronize()
    begin = time.perf_counter()
    take()
    job.synchronize()
    return (time.perf_counter() - begin) * 1e3


def repeat(timed: Callable[[], float], seconds: float) -> Iterator[float]:
    """Times of steps for about `seconds`; at least a few."""
    start = time.monotonic()
    taken = 0
    while taken < _LEAST_STEPS + _WARM_UP_STEPS or (time.monotonic() - start < seconds and taken < _MOST_STEPS):
        yield timed()
        taken += 1


def make_row(
    strategy: str, label: str, ranks: int, threads: int, times_ms: list[float], batch: int, state_bytes: int, job: Job
) -> StepRow:
    """A row without its comparison to the others."""
    kept = np.array(times_ms[_WARM_UP_STEPS:])
    interval = interval_of_median(kept)
    p50 = float(np.median(kept))
    peak = None
    if job.device.type == "cuda":
        peak = int(torch.cuda.max_memory_allocated(job.device))
        torch.cuda.reset_peak_memory_stats(job.device)
    return StepRow(
        strategy, label, ranks, threads, p50, (interval.low, interval.high), len(kept), batch / p50 * 1e3,
        state_bytes=state_bytes, peak_bytes=peak, times_ms=kept.tolist(),
    )  # fmt: skip


PROBE = Step()

if __name__ == "__main__":
    sys.exit(main(name=PROBE.name))
