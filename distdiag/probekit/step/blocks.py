"""Measure one strategy: build it, take steps, and return the times of the slowest rank."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from distdiag.errors import DistdiagError
from distdiag.probekit.measure.noise import BlockNoise, read_cpu
from distdiag.probekit.measure.sampling import cpu_used, noisiest_host
from distdiag.probekit.measure.thread_data_parallel import ThreadDataParallel
from distdiag.probekit.ranks.job import Job
from distdiag.probekit.ranks.user_object import find_function
from distdiag.probekit.step.memory import (
    HostPeak,
    SavedBytes,
    StateBytes,
    expected_state,
    gradient_bytes,
    measured_state,
)
from distdiag.probekit.step.possible import LABELS, Case, micro_batches
from distdiag.train.config import TrainConfig
from distdiag.train.faults import Faults
from distdiag.train.models import MODELS, build_model, count_parameters
from distdiag.train.ranks import Ranks
from distdiag.train.strategies import build_strategy
from distdiag.train.strategies.base import Setup, Strategy
from distdiag.train.strategies.stages import Stages

WARM_UP_STEPS = 1
LEAST_STEPS = 2
MOST_STEPS = 200
BATCH = 32  # with `distdiag probe all`; the option's default with `probe step`
_TRAINED_AS = {"single-threads": "single", "dataparallel": "dp"}  # name in the training job
_QUIET_EVERY = 3  # of three DDP steps one is without communication, so that both see the same noise

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class Block:
    """Consecutive steps of one case in one set of processes: on one rank, then (`merged`) on all."""

    case: Case
    label: str
    ranks: int
    threads: int
    times_ms: list[float] = field(default_factory=list)  # of each step after the warm-up, on the slowest rank
    quiet_ms: list[float] = field(default_factory=list)  # the same of steps without communication; DDP only
    parts_ms: dict[str, float] = field(default_factory=dict)
    state: StateBytes = field(default_factory=lambda: StateBytes(0, 0, 0))  # of the rank that has most
    expected: StateBytes | None = None
    peak_host_bytes: int | None = None  # of the rank with the highest; None if the process is not fresh
    peak_device_bytes: int | None = None
    # of the step, in which stages had nothing to compute, mean of the ranks; on the CPU
    idle_share: float | None = None
    expected_idle_share: float | None = None
    noise: BlockNoise | None = None
    # activations saved for backward in the first step, of the rank that has most; None: in threads
    saved_bytes: int | None = None
    # time in FSDP's collectives in each step, on the rank that waits least; where they block the host
    blocked_ms: list[float] = field(default_factory=list)


def make_batch(job: Job) -> Batch:
    """Return the global batch: random images in CIFAR-10's shape, and labels; equal on every rank."""
    size = job.options.batch_size if job.options.name == "step" else BATCH
    check_batch(size, job.world_size)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(size, 3, 32, 32, generator=generator)
    return images.to(job.device), torch.randint(0, 10, (size,), generator=generator).to(job.device)


def check_batch(size: int, ranks: int) -> None:
    if size % ranks:
        text = f"--batch-size {size} cannot be divided by {ranks} ranks"
        raise DistdiagError(text, f"--batch-size {size // ranks * ranks or ranks}")


def make_model(name: str | None) -> nn.Module:
    """Return the user's model, or one of the training job's; the same weights on every rank."""
    torch.manual_seed(0)
    if name is None or name in MODELS:
        return build_model(name or "simple")
    model = find_function("--model", name)()
    if not isinstance(model, nn.Module):
        hint = "return an nn.Module that takes (n, 3, 32, 32) images"
        raise DistdiagError(f"--model {name} returned a {type(model).__name__}", hint)
    return model


def measure(job: Job, case: Case, batch: Batch, seconds: float, fresh: bool) -> Block | None:
    """Measure one case within `seconds`; return the block on rank 0, None elsewhere.

    In a `fresh` process, which has measured nothing before, the peak of memory is the case's.
    """
    if case.processes > 1:
        return _Measurement(job, case, batch, fresh).run(seconds)
    alone = _Measurement(job, case, batch, fresh, alone=True)
    return job.while_others_wait(lambda: alone.run(seconds), seconds + 60, f"step: {case} on rank 0")


class _Measurement:
    """One block on one rank. `alone`: only rank 0 computes, whatever the number of ranks."""

    def __init__(self, job: Job, case: Case, batch: Batch, fresh: bool, alone: bool = False) -> None:
        self.job, self.case, self.alone, self.fresh = job, case, alone, fresh
        self.size = len(batch[0])
        self.threads = torch.get_num_threads()
        world_size = 1 if alone else job.world_size
        control, group = (None, None) if alone else (job.control, job.group)
        rank = 0 if alone else job.rank
        self.ranks = Ranks(rank, job.local_rank, world_size, "", job.device, job.backend, control, group)
        self.batch = batch
        self.own = Block(case, "", 1 if case.strategy in ("single", "single-threads") else case.ranks, self.threads)
        self.parts: list[dict[str, float]] = []  # of ThreadDataParallel, for each step
        self.gradients = 0
        self.blocked: list[float] | None = None

    def run(self, seconds: float) -> Block | None:
        if self.case.strategy == "single-threads":
            torch.set_num_threads(self.threads * self.case.ranks)
        wrapped: nn.Module | None = None
        try:
            host = HostPeak() if self.fresh else None
            network = make_model(self.job.options.model)
            parameters = count_parameters(network)
            with self.job.step(f"step: {self.case} is built"):
                strategy = self._build(network)
            wrapped = strategy.model
            if self.case.strategy == "fsdp" and self.job.device.type == "cpu":
                self.blocked = watch_collectives(strategy.network)
            del network
            self.own.threads = torch.get_num_threads()
            self.own.label = label_of(self.case, self.job.device.type, self.own.threads)
            before = read_cpu()
            self._take_steps(strategy, seconds, host)
            if not self.alone or self.job.world_size == 1:
                self.own.noise = noisiest_host(self.job, cpu_used(before, read_cpu()), f"step: {self.case}, CPU use")
            largest_stage = max(strategy.parameters_by_rank) if isinstance(strategy, Stages) else None
            self.own.expected = expected_state(self.case.strategy, self.case.ranks, parameters, largest_stage)
            all_own = [self.own] if self.alone else self.job.gather_all(self.own, f"step: {self.case}, collecting")
            return merged(all_own) if self.job.rank == 0 else None
        finally:
            torch.set_num_threads(self.threads)
            if isinstance(wrapped, ThreadDataParallel):
                wrapped.close()

    def _build(self, network: nn.Module) -> Strategy:
        name = self.case.strategy
        shares = name in ("ddp", "fsdp")
        config = TrainConfig(
            strategy=_TRAINED_AS.get(name, name),
            batch_size=self.size // self.case.ranks if shares else self.size,
            micro_batches=micro_batches(self.case.ranks),
            channels_last=False,  # FSDP cannot shard NHWC parameters: equal for all
        )
        setup = Setup(config, self.ranks, network, "off", Faults((), 0, 1), copies=self.case.ranks)
        strategy = build_strategy(setup)
        self.optimizer = torch.optim.SGD(strategy.network.parameters(), lr=1e-3, momentum=0.9)
        strategy.model.train()
        return strategy

    def _take_steps(self, strategy: Strategy, seconds: float, host: HostPeak | None) -> None:
        job, own = self.job, self.own
        part = self.size // strategy.data_ranks
        mine = slice(strategy.data_rank * part, (strategy.data_rank + 1) * part)
        images, labels = (t[mine] for t in self.batch)
        quiet_steps = self.case.strategy == "ddp"
        busy_s = step_s = 0.0
        start, turn = time.monotonic(), 0
        while True:
            quiet = quiet_steps and turn % _QUIET_EVERY == _QUIET_EVERY - 1
            first = turn < WARM_UP_STEPS
            if turn == WARM_UP_STEPS:
                start = time.monotonic()
                if host is not None:
                    host.reset()
                if job.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(job.device)
                if self.blocked is not None:
                    self.blocked.clear()  # of the warm-up
                busy_s = strategy.busy_s() if isinstance(strategy, Stages) else 0.0
            with job.step(f"step: {self.case}, step {turn}"):
                ms = self._step(strategy, images, labels, not quiet, first)
            if not first:
                (own.quiet_ms if quiet else own.times_ms).append(ms)
                if self.blocked is not None:
                    own.blocked_ms.append(sum(self.blocked) * 1e3)
                    self.blocked.clear()
                step_s += ms / 1e3
                if isinstance(strategy.model, ThreadDataParallel):
                    self.parts.append(strategy.model.times_s)
            turn += 1
            enough = len(own.times_ms) >= LEAST_STEPS and (bool(own.quiet_ms) or not quiet_steps)
            over = enough and (time.monotonic() - start > seconds or turn >= MOST_STEPS)
            if over if self.alone else job.agree([float(over)], f"step: {self.case}, another")[0]:
                break
        own.state = measured_state(strategy.network.parameters(), self.gradients, self.optimizer)
        if any(map(math.isnan, own.blocked_ms)):
            own.blocked_ms = []
        own.peak_host_bytes = host.bytes() if host else None
        if job.device.type == "cuda":
            own.peak_device_bytes = int(torch.cuda.max_memory_allocated(job.device))
        if isinstance(strategy, Stages) and job.device.type == "cpu":
            own.idle_share = max(0.0, 1 - (strategy.busy_s() - busy_s) / step_s)
        own.expected_idle_share = strategy.expected_bubble() if isinstance(strategy, Stages) else None
        own.parts_ms = {n: float(np.median([p[n] for p in self.parts])) * 1e3 for n in next(iter(self.parts), ())}

    def _step(
        self, strategy: Strategy, images: torch.Tensor, labels: torch.Tensor, exchange: bool, first: bool
    ) -> float:
        """Take one step; return its milliseconds, with the device's work."""
        self.job.synchronize()
        begin = time.perf_counter()
        saved = SavedBytes()
        with saved.counting(strategy.network, images, labels) if first else nullcontext():
            strategy.backward(images, labels, completes_step=exchange)
        if first:  # not timed: afterwards the gradients are dropped
            threads = isinstance(strategy.model, ThreadDataParallel | nn.DataParallel)  # not counted there
            self.own.saved_bytes = None if threads else saved.peak
            self.gradients = gradient_bytes(strategy.network.parameters())
        strategy.optimize(self.optimizer)
        self.job.synchronize()
        return (time.perf_counter() - begin) * 1e3


def merged(blocks: list[Block]) -> Block:
    """Return what all ranks measured, from what each did; the rest is rank 0's."""
    idle = [b.idle_share for b in blocks if b.idle_share is not None]
    return replace(
        blocks[0],
        times_ms=np.max([b.times_ms for b in blocks], axis=0).tolist(),
        quiet_ms=np.max([b.quiet_ms for b in blocks], axis=0).tolist(),
        state=max((b.state for b in blocks), key=lambda s: s.total),
        peak_host_bytes=_highest([b.peak_host_bytes for b in blocks]),
        peak_device_bytes=_highest([b.peak_device_bytes for b in blocks]),
        idle_share=float(np.mean(idle)) if idle else None,
        blocked_ms=np.min([b.blocked_ms for b in blocks], axis=0).tolist(),
        saved_bytes=_highest([b.saved_bytes for b in blocks]),
    )


def _highest(values: list[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return max(known) if len(known) == len(values) else None


def label_of(case: Case, device: str, threads: int) -> str:
    more = {
        "single-threads": f", {threads} threads",
        "dataparallel": "" if device == "cuda" else " (threads)",
        "pipeline": f", {micro_batches(case.ranks)} micro-batches",
    }
    return LABELS[case.strategy] + more.get(case.strategy, "")


def watch_collectives(network: nn.Module) -> list[float] | None:
    """Return a list that gets the seconds of each all_gather and reduce_scatter of FSDP modules in `network`.

    NaN: it returned before it was complete, so its wait is elsewhere. None: this torch has no hook for that.
    """
    try:
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

        gather, scatter = collectives.DefaultAllGather, collectives.DefaultReduceScatter
        blocked: list[float] = []
        for module in network.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_timed(gather, blocked))
                module.set_custom_reduce_scatter(_timed(scatter, blocked))
    except (ImportError, AttributeError):
        return None
    return blocked


def _timed(kind: Any, blocked: list[float]) -> Any:
    class Timed(kind):  # type: ignore[misc]
        def __call__(self, *args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            work = super().__call__(*args, **options)
            blocked.append(time.perf_counter() - began if work is None else math.nan)
            return work

    return Timed()
