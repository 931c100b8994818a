"""The training job from start to end. Every line that communicates has a comment."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distdiag.errors import DistdiagError
from distdiag.train.batches import (
    BatchedInput,
    Share,
    WorkersInput,
    batches_per_epoch,
    derived_seed,
    normalise,
    test_batches,
)
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
from distdiag.train.find_data import find_data
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
        Training(config, ranks, recorder).run()
        ranks.leave()
    except DistdiagError as e:
        recorder.meta(error=e.message)
        raise
    recorder.detach()


class Training:
    def __init__(self, config: TrainConfig, ranks: Ranks, recorder: Recording) -> None:
        self.config, self.ranks, self.recorder, device = config, ranks, recorder, ranks.device
        self.faults = Faults(config.inject, ranks.rank, ranks.world_size)
        with recorder.phase("init"):
            self.amp = ranks.together(lambda: resolve_amp(config.amp, device))
            self.pixels = share_pixels(config, ranks)
            torch.manual_seed(config.seed)  # the same initial weights on every rank
            network = build_model(config.model)
            name, parameters = type(network).__name__, count_parameters(network)
            self.strategy = build_strategy(Setup(config, ranks, network, self.amp, self.faults))
            self.batches = _batches_per_epoch(config, self.strategy, len(self.pixels.train))
            self.steps_per_epoch = self.batches // config.accumulate
            self.total_steps = int(min(config.max_steps or math.inf, config.epochs * self.steps_per_epoch))
            self.optimizer = torch.optim.SGD(
                self.strategy.network.parameters(), lr=config.lr, momentum=config.momentum,
                weight_decay=config.weight_decay, nesterov=config.momentum > 0,
            )  # fmt: skip
            self.faults.apply_to_optimizer(self.optimizer)
            factor = WarmupCosine(min(config.warmup_steps, self.total_steps // 5), self.total_steps)
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
            self.source = self._source()
            torch.manual_seed(derived_seed(config.seed, ranks.rank))  # from here on, dropout differs between ranks
            self.step = self._resume() if config.resume else 0
        run_dir = recorder.run_dir or config.run_dir or os.environ.get("DISTDIAG_RUN_DIR") or "."
        kept_in = Path(config.checkpoint_dir).expanduser() if config.checkpoint_dir else Path(run_dir, "checkpoints")
        self.checkpoints = Checkpoints(kept_in, config.keep_checkpoints, ranks)
        self.progress = Progress(config, ranks, recorder, device)
        about = f"{name} ({parameters:,} parameters)"
        amp = why_amp(config.amp, self.amp, device)
        self.progress.begin(self.pixels, about, amp, self.step, self.total_steps, self.strategy.data_ranks)
        self.progress.lines(self.strategy.about())
        recorder.meta(
            data=self.pixels.address.name, data_source=self.pixels.source, model=name, parameters=parameters,
            strategy=config.strategy, amp=self.amp, batch_size=config.batch_size, max_steps=self.total_steps,
            **({"resumed_from_step": self.step} if self.step else {}),
            **({"injected": ", ".join(f.spec for f in config.inject)} if config.inject else {}),
        )  # fmt: skip

    @property
    def ended(self) -> bool:
        return self.step >= self.total_steps

    def run(self) -> None:
        config = self.config
        for epoch in range(self.step // self.steps_per_epoch, config.epochs):
            if self.ended:
                break
            self.recorder.epoch(epoch)
            self._train_epoch(epoch)
            if config.validate_every and (self.ended or (epoch + 1) % config.validate_every == 0):
                self._validate(epoch)
            every = config.checkpoint_every
            if every == 0 or (every > 0 and self.ended and self.step % every):
                self._save()
        self.progress.end(self.step, self.checkpoints.newest)
        self.progress.lines(self.strategy.summary())

    def _train_epoch(self, epoch: int) -> None:
        config, strategy, faults, device = self.config, self.strategy, self.faults, self.ranks.device
        strategy.model.train()
        start = (self.step - epoch * self.steps_per_epoch) * config.accumulate
        batches = self.source.epoch(epoch, start)
        if config.loader == "batched":  # the recorder hooks a DataLoader itself
            batches = self.recorder.batches(batches, length=faults.batches(self.batches) - start)

        for position, (images, labels) in enumerate(batches, start):
            if position % config.accumulate == 0:
                faults.before_step(self.step + 1)
            images = normalise(images.to(device, non_blocking=True))
            labels = labels.to(device, non_blocking=True)
            images = faults.on_batch(self.step + 1, images)

            completes_step = position % config.accumulate == config.accumulate - 1
            # communication: the step's last batch exchanges the gradients; with stages, messages between neighbours
            result = strategy.backward(images, labels, completes_step)
            if result is not None:
                self.progress.add(*result, labels)
            if not completes_step:
                continue
            strategy.optimize(self.optimizer)
            self.scheduler.step()
            self.step += 1

            if self.step % config.log_every == 0 or self.ended:
                # communication: one all_reduce of 3 numbers
                self.progress.report(epoch, self.step, float(self.scheduler.get_last_lr()[0]))
            if config.checkpoint_every > 0 and self.step % config.checkpoint_every == 0:
                self._save()  # communication: gather of random states, barrier
            if self.ended:
                break

    def _save(self) -> None:
        with self.recorder.phase("checkpoint"), self.progress.paused():
            state = {
                "world_size": self.ranks.world_size,
                "options": options_of(self.config),
                "data": self.pixels.address.fingerprint,
                **self.strategy.state(self.optimizer),  # communication: fsdp and stages gather theirs
                "scheduler": self.scheduler.state_dict(),
                "scaler": self.strategy.scaler.state_dict(),
            }
            self.checkpoints.save(state, self.step)

    def _validate(self, epoch: int) -> None:
        with self.recorder.phase("validate"), self.progress.paused():
            self.ranks.barrier()  # communication: every rank has ended the epoch
            # communication: rank 0's running statistics to all; sharded weights to all
            network = self.strategy.whole_network()
            loss, accuracy = validate(self.config, self.ranks, network, self.pixels.test, self.amp)
        self.progress.validated(epoch, self.step, loss, accuracy)

    def _source(self) -> BatchedInput | WorkersInput:
        config, strategy = self.config, self.strategy
        batches = self.faults.batches(self.batches)
        rank, ranks = strategy.data_rank, strategy.data_ranks
        share = Share(self.pixels.train, config.batch_size, rank, ranks, config.seed, batches)
        if config.loader == "workers":
            return WorkersInput(share, config.workers, self.ranks.device.type == "cuda", self.faults)
        return BatchedInput(share, config.channels_last, self.faults)

    def _resume(self) -> int:
        """Restore the training from a checkpoint, on every rank; return the steps done. Collective."""
        ranks, scaler = self.ranks, self.strategy.scaler

        def read() -> dict[str, Any]:
            state = load_checkpoint(find_checkpoint(self.config.resume), ranks.device)
            check_fits(state, self.config, ranks, self.pixels.address.fingerprint)
            return state

        state = ranks.together(read)  # before the load, which is a collective with fsdp

        def load() -> None:
            try:
                self.strategy.load(state, self.optimizer)
            except RuntimeError:
                hint = "use the same --model and --inject as in that run"
                raise DistdiagError("the checkpoint is of another model", hint) from None

        ranks.together(load)
        self.scheduler.load_state_dict(state["scheduler"])
        if scaler.is_enabled() and state["scaler"]:
            scaler.load_state_dict(state["scaler"])
        restore_random_state(state["random"][ranks.rank])
        return int(state["step"])


def _batches_per_epoch(config: TrainConfig, strategy: Strategy, images: int) -> int:
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


def share_pixels(config: TrainConfig, ranks: Ranks) -> SharedPixels:
    """Return the data set in memory, one copy per node: local rank 0 finds, checks and publishes it, the others map it.

    Collective.
    """

    def publish() -> SharedPixels | None:
        if ranks.local_rank != 0:
            return None
        return SharedPixels.publish(find_data(config.data, show_progress=ranks.rank == 0))

    own = ranks.together(publish)
    addresses = ranks.gather((ranks.node, own.address if own else None))
    if own is None:
        address = next((a for node, a in addresses if a is not None and node == ranks.node), None)
        try:
            if address is None:
                raise OSError("no local rank 0 on this node")
            own = SharedPixels.open(address)
        except OSError:  # no access to /proc: use a private copy
            own = SharedPixels.publish(find_data(config.data, show_progress=False))
    if len(set(ranks.gather(own.address.fingerprint))) > 1:
        raise DistdiagError("the nodes found different data sets", "name the same one on every node with --data DIR")
    return own


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
