"""The training job from its first line to its last, communication in sight."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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
from distdiag.train.ranks import Ranks, join_ranks
from distdiag.train.recording import Recording, start_recording
from distdiag.train.shared_memory import SharedPixels, TensorImages
from distdiag.train.sync_batch_norm import convert_sync_batch_norm


def train(config: TrainConfig) -> None:
    """Train as `config` says, on this rank and with all others; returns when all are done.

    Raises:
        DistdiagError: bad input, the same error on every rank.
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


def _train(config: TrainConfig, ranks: Ranks, recorder: Recording) -> None:
    device, world_size = ranks.device, ranks.world_size
    faults = Faults(config.inject, ranks.rank, world_size)

    with recorder.phase("init"):
        amp = ranks.together(lambda: resolve_amp(config.amp, device))
        pixels, origin = share_pixels(config, ranks)
        per_epoch = batches_per_epoch(len(pixels.train), world_size, config.batch_size, config.accumulate)
        if not per_epoch:
            share = -(-len(pixels.train) // world_size)
            raise DistdiagError(
                f"{share} samples per rank are fewer than one step takes ({config.batch_size} x {config.accumulate})",
                f"--batch-size {max(1, share // config.accumulate)} works",
            )
        steps_per_epoch = per_epoch // config.accumulate
        total_steps = min(config.max_steps or math.inf, config.epochs * steps_per_epoch)

        torch.manual_seed(config.seed)  # the same initial weights on every rank
        network = build_model(config.model)
        if config.channels_last:
            network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if config.sync_bn and ranks.control is not None:
            network = convert_sync_batch_norm(network, device)
        network = faults.apply_to_model(network).to(device)
        model: nn.Module = torch.compile(network) if config.compile else network  # type: ignore[assignment]
        if ranks.control is not None:
            # broadcasts rank 0's weights and buffers; its hooks average the gradients over the ranks during backward
            model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)

        optimizer = torch.optim.SGD(
            model.parameters(),
            lr=config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            nesterov=config.momentum > 0,
        )
        faults.apply_to_optimizer(optimizer)
        probe = InTrainingProbe(catalog.parse_collectives(config.probe), config.probe_every, recorder.run_dir)
        schedule = WarmupCosine(min(config.warmup_steps, int(total_steps) // 5), int(total_steps))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        scaler = torch.amp.GradScaler(device.type, enabled=amp == "fp16")
        source = _source(config, ranks, pixels.train, faults.batches(per_epoch), faults)

        torch.manual_seed(derived_seed(config.seed, ranks.rank))  # from here on (dropout) every rank draws its own
        step = 0
        if config.resume:
            step = resume(config, ranks, pixels, network, optimizer, scheduler, scaler)

    checkpoints = Checkpoints(checkpoint_directory(config, recorder), config.keep_checkpoints, ranks)
    progress = Progress(config, ranks, recorder, device)
    progress.begin(origin, pixels, network, why_amp(config.amp, amp, device), step, int(total_steps))
    recorder.meta(
        data=pixels.address.name,
        data_source=origin.source if origin else "rank 0 of the node",
        model=type(network).__name__,
        parameters=count_parameters(network),
        amp=amp,
        batch_size=config.batch_size,
        max_steps=int(total_steps),
        **({"resumed_from_step": step} if step else {}),
        **({"injected": ", ".join(f.spec for f in config.inject)} if config.inject else {}),
    )

    def save() -> None:
        with recorder.phase("checkpoint"), progress.paused():
            checkpoints.save(
                {
                    "world_size": world_size,
                    "options": options_of(config),
                    "data": pixels.address.fingerprint,
                    "model": network.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "scaler": scaler.state_dict(),
                },
                step,
            )

    for epoch in range(step // steps_per_epoch, config.epochs):
        if step >= total_steps:
            break
        recorder.epoch(epoch)
        model.train()
        start = (step - epoch * steps_per_epoch) * config.accumulate
        batches = source.epoch(epoch, start)
        if config.loader == "batched":  # a DataLoader is seen by itself
            batches = recorder.batches(batches, length=faults.batches(per_epoch) - start)

        for position, (images, labels) in enumerate(batches, start):
            if position % config.accumulate == 0:
                faults.before_step(step + 1)
            images = normalise(images.to(device, non_blocking=True))
            labels = labels.to(device, non_blocking=True)
            images = faults.on_batch(step + 1, images)

            completes_step = position % config.accumulate == config.accumulate - 1
            # gradients of the step's earlier batches stay local; the last backward exchanges the sums
            with nullcontext() if completes_step or ranks.control is None else model.no_sync():  # type: ignore[union-attr]
                with autocast(amp, device):
                    outputs = model(images)
                    loss = F.cross_entropy(outputs, labels)
                scaler.scale(loss / config.accumulate).backward()  # communication: all_reduce, bucket by bucket
            progress.add(loss, outputs, labels)
            if not completes_step:
                continue

            if config.clip > 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
            step += 1

            if step % config.log_every == 0 or step == total_steps:
                progress.report(
                    epoch, step, float(scheduler.get_last_lr()[0])
                )  # communication: one all_reduce of 3 numbers
            if config.checkpoint_every > 0 and step % config.checkpoint_every == 0:
                save()  # communication: gather of random states, barrier
            probe.maybe_run(step)  # communication: with --probe, now and then, on a group of its own
            if step >= total_steps:
                break

        ended = step >= total_steps
        if config.validate_every and (ended or (epoch + 1) % config.validate_every == 0):
            with recorder.phase("validate"), progress.paused():
                if ranks.control is not None:
                    dist.barrier(group=ranks.control)  # communication: every rank has ended the epoch
                broadcast_buffers(network, ranks)  # communication: rank 0's running statistics to all
                test_loss, accuracy = validate(config, ranks, network, pixels.test, amp)
            progress.validated(epoch, step, test_loss, accuracy)
        if config.checkpoint_every == 0 or (config.checkpoint_every > 0 and ended and step % config.checkpoint_every):
            save()
        if ended:
            break
    progress.end(step, checkpoints.newest)


@dataclass(frozen=True)
class WarmupCosine:
    """Factor on the learning rate: linear up to 1 within `warmup` steps, then half a cosine down to 0 at `total`."""

    warmup: int
    total: int

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / max(1, self.total - self.warmup)))


def share_pixels(config: TrainConfig, ranks: Ranks) -> tuple[SharedPixels, Origin | None]:
    """The data set in memory, one copy per node: local rank 0 finds, checks and publishes it, the others map it.

    Collective. The second value is None on ranks that did not look for the data themselves.

    Raises:
        DistdiagError: missing or damaged data, the same error on every rank.
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
        except OSError:  # /proc closed to us: a copy of one's own costs memory, nothing else
            own = SharedPixels.publish(find_data(config.data, show_progress=False).data)
    fingerprints = set(ranks.gather(own.address.fingerprint))
    if len(fingerprints) > 1:
        raise DistdiagError("the nodes found different data sets", "name the same one on every node with --data DIR")
    return own, published[1] if published else None


def _source(
    config: TrainConfig, ranks: Ranks, images: TensorImages, batches: int, faults: Faults
) -> BatchedInput | WorkersInput:
    if config.loader == "workers":
        pin = ranks.device.type == "cuda"
        return WorkersInput(
            images, config.batch_size, ranks.rank, ranks.world_size, config.seed, batches, config.workers, pin, faults
        )
    return BatchedInput(
        images, config.batch_size, ranks.rank, ranks.world_size, config.seed, batches, config.channels_last, faults
    )


def resume(
    config: TrainConfig,
    ranks: Ranks,
    pixels: SharedPixels,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    scaler: torch.amp.GradScaler,
) -> int:
    """Put everything into the state of a checkpoint, on every rank; returns the steps done. Collective.

    Raises:
        DistdiagError: no checkpoint, a damaged one, or one of a run that this is not.
    """

    def load() -> dict[str, Any]:
        state = load_checkpoint(find_checkpoint(config.resume), ranks.device)
        check_fits(state, config, ranks, pixels.address.fingerprint)
        try:
            network.load_state_dict(state["model"])
        except RuntimeError:
            raise DistdiagError(
                "the checkpoint's model is not this one", "use the same --model and --inject as then"
            ) from None
        optimizer.load_state_dict(state["optimizer"])
        return state

    state = ranks.together(load)
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


def broadcast_buffers(network: nn.Module, ranks: Ranks) -> None:
    """Rank 0's running statistics to all: between steps every rank has its own, and the checkpoint holds rank 0's."""
    if ranks.control is not None:
        for buffer in network.buffers():
            dist.broadcast(buffer, src=0)


@torch.no_grad()
def validate(
    config: TrainConfig, ranks: Ranks, network: nn.Module, images: TensorImages, amp: str
) -> tuple[float, float]:
    """Mean loss and accuracy (0 to 1) on the test set, every image counted once. Collective: one all_reduce at the end.

    The bare network is used, not its DDP wrapper: its forward would broadcast buffers, and ranks may have unequal shares.
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


class Progress:
    """What a person reads, printed by rank 0; sums stay on the device until a line is due."""

    def __init__(self, config: TrainConfig, ranks: Ranks, recorder: Recording, device: torch.device) -> None:
        self._config, self._ranks, self._recorder = config, ranks, recorder
        self._window = torch.zeros(3, device=device)  # loss x samples, correct, samples
        self._begun = self._since = time.monotonic()
        self._samples = 0
        self._total_steps = 0
        self._loss: float | None = None
        self._accuracy: float | None = None

    def _say(self, text: str, always: bool = False) -> None:
        if self._ranks.rank == 0 and (always or not self._config.quiet):
            print(text, flush=True)

    def begin(
        self, origin: Origin | None, pixels: SharedPixels, network: nn.Module, amp: str, step: int, total_steps: int
    ) -> None:
        config, ranks = self._config, self._ranks
        if origin and origin.notice:
            self._say(origin.notice, always=True)
        layout = ", channels_last" if config.channels_last else ""
        accumulate = f" x {config.accumulate} accumulated" if config.accumulate > 1 else ""
        self._say(
            f"{type(network).__name__} ({count_parameters(network):,} parameters) on {pixels.address.name} "
            f"({pixels.address.train_images:,} + {pixels.address.test_images:,} images): {ranks.world_size} "
            f"{'rank' if ranks.world_size == 1 else 'ranks'} x {config.batch_size} samples{accumulate}, "
            f"{ranks.device.type} ({ranks.backend}), amp {amp}{layout}, {total_steps - step:,} steps",
            always=True,
        )
        if step:
            self._say(f"resumed after step {step} from {find_checkpoint(config.resume)}", always=True)
        self._total_steps = total_steps
        self._begun = self._since = time.monotonic()

    def add(self, loss: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        """One batch; no transfer from the device, hence no wait for it."""
        with torch.no_grad():
            count = len(labels)
            self._window[0] += loss.detach() * count
            self._window[1] += (outputs.argmax(1) == labels).sum()
            self._window[2] += count

    def report(self, epoch: int, step: int, lr: float) -> None:
        """Loss and accuracy of all ranks since the last report. Collective; reads the device, which waits for it."""
        own_loss = float(self._window[0] / self._window[2].clamp(min=1))
        loss, correct, count = self._ranks.sum(self._window).tolist()
        now = time.monotonic()
        rate = count / max(now - self._since, 1e-9)
        self._window.zero_()
        self._since = now
        self._samples += int(count)
        mean_loss = self._loss = loss / max(count, 1)
        accuracy = correct / max(count, 1)
        self._recorder.log(
            loss=own_loss, mean_loss=mean_loss, train_accuracy=accuracy, learning_rate=lr, samples_per_s=rate
        )
        self._say(
            f"epoch {epoch + 1}  step {step}/{self._total_steps}  loss {mean_loss:.4f}  accuracy {accuracy:6.2%}  "
            f"lr {lr:.4f}  {rate:,.0f} samples/s"
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While something else than training goes on: a rate is of training alone."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._since += time.monotonic() - began

    def validated(self, epoch: int, step: int, loss: float, accuracy: float) -> None:
        self._accuracy = accuracy
        self._recorder.log(test_loss=loss, test_accuracy=accuracy)
        self._say(
            f"epoch {epoch + 1}  step {step}/{self._total_steps}  test loss {loss:.4f}  test accuracy {accuracy:.2%}"
        )

    def end(self, step: int, checkpoint: Path | None) -> None:
        seconds = time.monotonic() - self._begun
        accuracy = "" if self._accuracy is None else f", test accuracy {self._accuracy:.2%}"
        loss = "" if self._loss is None else f", loss {self._loss:.4f}"
        written = f"; checkpoint {checkpoint}" if checkpoint else ""
        self._say(f"done: {step:,} steps in {seconds:.1f} s{loss}{accuracy}{written}", always=True)
        sys.stdout.flush()
