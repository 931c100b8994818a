"""The training job from start to end. Every line that communicates has a comment."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distdiag.errors import DistdiagError
from distdiag.probekit.command import catalog
from distdiag.probekit.in_job.probe import InTrainingProbe
from distdiag.train.batches import BatchedInput, WorkersInput, batches_per_epoch, derived_seed, normalise, test_batches
from distdiag.train.checkpoint import (
    Checkpoints,
    check_fits,
    find_checkpoint,
    load_checkpoint,
    options_of,
    restore_random_state,
)
from distdiag.train.config import TrainConfig
from distdiag.train.faults import Faults
from distdiag.train.find_data import Origin, find_data
from distdiag.train.models import build_model, count_parameters
from distdiag.train.precision import autocast, resolve_amp, why_amp
from distdiag.train.progress import Progress
from distdiag.train.ranks import Ranks, join_ranks
from distdiag.train.recording import Recording, start_recording
from distdiag.train.shared_memory import SharedPixels, TensorImages
from distdiag.train.strategies import build_strategy
from distdiag.train.strategies.base import Setup, Strategy


def train(config: TrainConfig) -> None:
    """Train on this rank together with all others; return when all are done.

    Raises:
        DistdiagError: bad input; the same error on every rank.
    """
    recorder = start_recording(config)
    try:
        ranks = join_ranks(config)
        _train(config, ranks, recorder)
        ranks.leave()
    except DistdiagError as e:
        recorder.meta(error=e.message)
        raise
    recorder.detach()


@dataclass
class _Job:
    """The state of the training on this rank."""

    config: TrainConfig
    ranks: Ranks
    recorder: Recording
    faults: Faults
    amp: str
    pixels: SharedPixels
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    source: BatchedInput | WorkersInput
    probe: InTrainingProbe
    checkpoints: Checkpoints
    progress: Progress
    batches_per_epoch: int
    total_steps: int
    step: int

    @property
    def steps_per_epoch(self) -> int:
        return self.batches_per_epoch // self.config.accumulate

    @property
    def ended(self) -> bool:
        return self.step >= self.total_steps


def _train(config: TrainConfig, ranks: Ranks, recorder: Recording) -> None:
    job = _prepare(config, ranks, recorder)
    for epoch in range(job.step // job.steps_per_epoch, config.epochs):
        if job.ended:
            break
        recorder.epoch(epoch)
        _train_epoch(job, epoch)
        if config.validate_every and (job.ended or (epoch + 1) % config.validate_every == 0):
            _validate(job, epoch)
        every = config.checkpoint_every
        if every == 0 or (every > 0 and job.ended and job.step % every):
            _save(job)
    job.progress.end(job.step, job.checkpoints.newest)
    job.progress.lines(job.strategy.summary())


def _prepare(config: TrainConfig, ranks: Ranks, recorder: Recording) -> _Job:
    device = ranks.device
    faults = Faults(config.inject, ranks.rank, ranks.world_size)
    with recorder.phase("init"):
        amp = ranks.together(lambda: resolve_amp(config.amp, device))
        pixels, origin = share_pixels(config, ranks)
        torch.manual_seed(config.seed)  # the same initial weights on every rank
        network = build_model(config.model)
        model_name, parameters = type(network).__name__, count_parameters(network)
        strategy = build_strategy(Setup(config, ranks, network, amp, faults))
        per_epoch = _batches_per_epoch(config, strategy, len(pixels.train))
        total_steps = int(min(config.max_steps or math.inf, config.epochs * (per_epoch // config.accumulate)))
        optimizer = torch.optim.SGD(
            strategy.network.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay,
            nesterov=config.momentum > 0,
        )  # fmt: skip
        faults.apply_to_optimizer(optimizer)
        probe = InTrainingProbe(catalog.parse_collectives(config.probe), config.probe_every, recorder.run_dir)
        schedule = WarmupCosine(min(config.warmup_steps, total_steps // 5), total_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        source = _source(config, strategy, pixels.train, faults.batches(per_epoch), faults)
        torch.manual_seed(derived_seed(config.seed, ranks.rank))  # from here on, dropout differs between ranks
        step = resume(config, strategy, pixels, optimizer, scheduler) if config.resume else 0

    checkpoints = Checkpoints(checkpoint_directory(config, recorder), config.keep_checkpoints, ranks)
    progress = Progress(config, ranks, recorder, device)
    about = f"{model_name} ({parameters:,} parameters)"
    progress.begin(origin, pixels, about, why_amp(config.amp, amp, device), step, total_steps, strategy.data_ranks)
    progress.lines(strategy.about())
    recorder.meta(
        data=pixels.address.name,
        data_source=origin.source if origin else "rank 0 of the node",
        model=model_name,
        parameters=parameters,
        strategy=config.strategy,
        amp=amp,
        batch_size=config.batch_size,
        max_steps=total_steps,
        **({"resumed_from_step": step} if step else {}),
        **({"injected": ", ".join(f.spec for f in config.inject)} if config.inject else {}),
    )
    return _Job(config, ranks, recorder, faults, amp, pixels, strategy, optimizer, scheduler, source, probe, checkpoints, progress,
                per_epoch, total_steps, step)  # fmt: skip


def _train_epoch(job: _Job, epoch: int) -> None:
    config, strategy, faults, progress, device = job.config, job.strategy, job.faults, job.progress, job.ranks.device
    strategy.model.train()
    start = (job.step - epoch * job.steps_per_epoch) * config.accumulate
    batches = job.source.epoch(epoch, start)
    if config.loader == "batched":  # the recorder hooks a DataLoader itself
        batches = job.recorder.batches(batches, length=faults.batches(job.batches_per_epoch) - start)

    for position, (images, labels) in enumerate(batches, start):
        if position % config.accumulate == 0:
            faults.before_step(job.step + 1)
        images = normalise(images.to(device, non_blocking=True))
        labels = labels.to(device, non_blocking=True)
        images = faults.on_batch(job.step + 1, images)

        completes_step = position % config.accumulate == config.accumulate - 1
        # communication: the step's last batch exchanges the gradients; with stages, messages between neighbours
        result = strategy.backward(images, labels, completes_step)
        if result is not None:
            progress.add(*result, labels)
        if not completes_step:
            continue
        strategy.optimize(job.optimizer)
        job.scheduler.step()
        job.step += 1

        if job.step % config.log_every == 0 or job.ended:
            # communication: one all_reduce of 3 numbers
            progress.report(epoch, job.step, float(job.scheduler.get_last_lr()[0]))
        if config.checkpoint_every > 0 and job.step % config.checkpoint_every == 0:
            _save(job)  # communication: gather of random states, barrier
        job.probe.maybe_run(job.step)  # communication: with --probe, sometimes, on its own group
        if job.ended:
            break


def _save(job: _Job) -> None:
    with job.recorder.phase("checkpoint"), job.progress.paused():
        job.checkpoints.save(
            {
                "world_size": job.ranks.world_size,
                "options": options_of(job.config),
                "data": job.pixels.address.fingerprint,
                **job.strategy.state(job.optimizer),  # communication: fsdp and stages gather theirs
                "scheduler": job.scheduler.state_dict(),
                "scaler": job.strategy.scaler.state_dict(),
            },
            job.step,
        )


def _validate(job: _Job, epoch: int) -> None:
    with job.recorder.phase("validate"), job.progress.paused():
        if job.ranks.control is not None:
            dist.barrier(group=job.ranks.control)  # communication: every rank has ended the epoch
        # communication: rank 0's running statistics to all; sharded weights to all
        network = job.strategy.whole_network()
        test_loss, accuracy = validate(job.config, job.ranks, network, job.pixels.test, job.amp)
    job.progress.validated(epoch, job.step, test_loss, accuracy)


def _batches_per_epoch(config: TrainConfig, strategy: Strategy, images: int) -> int:
    """Return the number of batches that this rank loads in an epoch.

    Raises:
        DistdiagError: a rank has too few samples for one step.
    """
    parts = strategy.data_ranks
    batches = batches_per_epoch(images, parts, config.batch_size, config.accumulate)
    if not batches:
        share = -(-images // parts)
        raise DistdiagError(
            f"{share} samples per rank are fewer than one step takes ({config.batch_size} x {config.accumulate})",
            f"--batch-size {max(1, share // config.accumulate)} works",
        )
    return batches


@dataclass(frozen=True)
class WarmupCosine:
    """Factor of the learning rate: linear up to 1 within `warmup` steps, then half a cosine down to 0 at `total`."""

    warmup: int
    total: int

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / max(1, self.total - self.warmup)))


def share_pixels(config: TrainConfig, ranks: Ranks) -> tuple[SharedPixels, Origin | None]:
    """Return the data set in memory, one copy per node: local rank 0 finds, checks and publishes it, the others map it.

    Collective. The second value is None on the other ranks.

    Raises:
        DistdiagError: missing or damaged data; the same error on every rank.
    """

    def publish() -> tuple[SharedPixels, Origin] | None:
        if ranks.local_rank != 0:
            return None
        found = find_data(config.data, show_progress=ranks.rank == 0)
        return SharedPixels.publish(found.data), found.origin

    published = ranks.together(publish)
    addresses = ranks.gather((ranks.node, published[0].address if published else None))
    if published:
        own: SharedPixels = published[0]
    else:
        address = next((a for node, a in addresses if a is not None and node == ranks.node), None)
        try:
            if address is None:
                raise OSError("no local rank 0 on this node")
            own = SharedPixels.open(address)
        except OSError:  # no access to /proc: use a private copy
            own = SharedPixels.publish(find_data(config.data, show_progress=False).data)
    fingerprints = set(ranks.gather(own.address.fingerprint))
    if len(fingerprints) > 1:
        raise DistdiagError("the nodes found different data sets", "name the same one on every node with --data DIR")
    return own, published[1] if published else None


def _source(
    config: TrainConfig, strategy: Strategy, images: TensorImages, batches: int, faults: Faults
) -> BatchedInput | WorkersInput:
    part, parts = strategy.data_rank, strategy.data_ranks
    if config.loader == "workers":
        pin = strategy.ranks.device.type == "cuda"
        return WorkersInput(images, config.batch_size, part, parts, config.seed, batches, config.workers, pin, faults)
    return BatchedInput(images, config.batch_size, part, parts, config.seed, batches, config.channels_last, faults)


def resume(
    config: TrainConfig,
    strategy: Strategy,
    pixels: SharedPixels,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
) -> int:
    """Restore the training from a checkpoint, on every rank; return the steps done. Collective.

    Raises:
        DistdiagError: no checkpoint, a damaged one, or one of another run.
    """
    ranks, scaler = strategy.ranks, strategy.scaler

    def read() -> dict[str, Any]:
        state = load_checkpoint(find_checkpoint(config.resume), ranks.device)
        check_fits(state, config, ranks, pixels.address.fingerprint)
        return state

    state = ranks.together(read)  # before the load, which is a collective with fsdp

    def load() -> None:
        try:
            strategy.load(state, optimizer)
        except RuntimeError:
            raise DistdiagError(
                "the checkpoint is of another model", "use the same --model and --inject as in that run"
            ) from None

    ranks.together(load)
    scheduler.load_state_dict(state["scheduler"])
    if scaler.is_enabled() and state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    restore_random_state(state["random"][ranks.rank])
    return int(state["step"])


def checkpoint_directory(config: TrainConfig, recorder: Recording) -> Path:
    if config.checkpoint_dir:
        return Path(config.checkpoint_dir).expanduser()
    run_dir = recorder.run_dir or config.run_dir or os.environ.get("DISTDIAG_RUN_DIR")
    return Path(run_dir or ".") / "checkpoints"


@torch.no_grad()
def validate(
    config: TrainConfig, ranks: Ranks, network: nn.Module, images: TensorImages, amp: str
) -> tuple[float, float]:
    """Return mean loss and accuracy (0 to 1) on the test set; every image counts once. Collective: one all_reduce.

    Uses the bare network: DDP's forward would broadcast buffers, and ranks may have unequal shares.
    """
    network.eval()
    sums = torch.zeros(3, device=ranks.device)
    for pixels, labels in test_batches(
        images, max(config.batch_size, 250), ranks.rank, ranks.world_size, config.channels_last
    ):
        labels = labels.to(ranks.device)
        with autocast(amp, ranks.device):
            outputs = network(normalise(pixels.to(ranks.device)))
        sums[0] += F.cross_entropy(outputs.float(), labels, reduction="sum")
        sums[1] += (outputs.argmax(1) == labels).sum()
        sums[2] += len(labels)
    loss, correct, count = ranks.sum(sums).tolist()
    return loss / count, correct / count
