"""Compares the defaults of the training job with a naive loop, interleaved step by step in one job.

Usage: torchrun --standalone --nproc-per-node 2 benchmarks/train_speed.py [--rounds N] [--data DIR] [--write]

Naive: per-sample Python transforms in a DataLoader without workers, float32, NCHW, `loss.item()` every step. Defaults:
`TrainConfig()` unchanged (batched input, channels_last, amp auto). Model, optimizer, batch size and DDP are the same. A third variant
forces the other choice of amp, to show the effect of `auto`. Each round runs every variant for a few steps, in an order that rotates;
ratios are computed within a round, so that load of other users cancels if it lasts longer than a round. Output: seconds per step
(wall, CPU) and ratios with Student's t interval over the logarithms of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from distdiag.train.__main__ import leave
from distdiag.train.batches import MEAN, STD, BatchedInput, Share, batches_per_epoch, normalise
from distdiag.train.config import TrainConfig
from distdiag.train.faults import Faults
from distdiag.train.loop import share_pixels
from distdiag.train.models import build_model
from distdiag.train.precision import autocast, resolve_amp
from distdiag.train.ranks import Ranks, join_ranks
from distdiag.train.shared_memory import TensorImages

RESULT = Path(__file__).with_name("results") / "train_speed.md"

Step = Callable[[], None]


class PerSample(Dataset):
    """Pad, crop, mirror, scale and normalise one image at a time, as in a first version of a project."""

    def __init__(self, data: TensorImages) -> None:
        self.images = data.images.permute(0, 3, 1, 2)
        self.labels = data.labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = F.pad(self.images[i].float() / 255, (4, 4, 4, 4))
        top, left = torch.randint(9, (2,)).tolist()
        image = image[:, top : top + 32, left : left + 32]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return (image - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1), self.labels[i]


def _model(ranks: Ranks, config: TrainConfig, channels_last: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    network = build_model(config.model).to(ranks.device)
    if channels_last:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = DistributedDataParallel(network) if ranks.control is not None else network
    return model, torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=config.momentum, weight_decay=config.weight_decay, nesterov=True
    )


def naive(ranks: Ranks, config: TrainConfig, data: TensorImages) -> Step:
    model, optimizer = _model(ranks, config, channels_last=False)
    sampler = DistributedSampler(PerSample(data), ranks.world_size, ranks.rank)
    loader = DataLoader(PerSample(data), config.batch_size, sampler=sampler, drop_last=True)
    batches = _forever(lambda: iter(loader))

    def step() -> None:
        images, labels = next(batches)
        loss = F.cross_entropy(model(images.to(ranks.device)), labels.to(ranks.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def shipped(ranks: Ranks, config: TrainConfig, data: TensorImages, amp: str) -> Step:
    model, optimizer = _model(ranks, config, config.channels_last)
    count = batches_per_epoch(len(data), ranks.world_size, config.batch_size, 1)
    share = Share(data, config.batch_size, ranks.rank, ranks.world_size, 0, count)
    source = BatchedInput(share, config.channels_last, Faults((), ranks.rank, 1))
    batches = _forever(lambda: iter(source.epoch(0)))

    def step() -> None:
        images, labels = next(batches)
        images = normalise(images.to(ranks.device))
        with autocast(amp, ranks.device):
            loss = F.cross_entropy(model(images), labels.to(ranks.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _forever(epoch: Callable[[], Iterator]) -> Iterator:
    while True:
        yield from epoch()


def measure(ranks: Ranks, step: Step, steps: int) -> tuple[float, float]:
    """Return seconds per step of the job: wall time (the ranks start together) and CPU time of all ranks."""
    ranks.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    ranks.barrier()
    times = torch.tensor(
        [time.perf_counter() - wall, time.process_time() - cpu], dtype=torch.float64, device=ranks.device
    )
    total = ranks.sum(times)
    return float(total[0]) / ranks.world_size / steps, float(total[1]) / steps


# two-sided 95 % quantiles of Student's t for 1 … 30 degrees of freedom, then every tenth
_T95 = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13,
        2.12, 2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04]  # fmt: skip


def ratio_interval(a: list[float], b: list[float]) -> tuple[float, float, float]:
    """Return the geometric mean of a/b over the rounds and its 95 % interval.

    Raises:
        ValueError: fewer than 3 rounds.
    """
    if len(a) < 3:
        raise ValueError("an interval takes 3 rounds")
    logs = [math.log(x / y) for x, y in zip(a, b, strict=True)]
    mean = statistics.fmean(logs)
    half = _T95[min(len(logs) - 1, 30) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def report(
    config: TrainConfig, ranks: Ranks, amp: str, times: dict[str, list[tuple[float, float]]], steps: int, load: str
) -> str:
    samples = config.batch_size * ranks.world_size
    rounds = len(times["naive"])
    device = torch.cuda.get_device_name() if ranks.device.type == "cuda" else f"{_cpu_name()}, {os.cpu_count()} cores"
    lines = [
        "# Speed of the training job: defaults and the naive loop",
        "",
        f"- machine: {device}; torch {torch.__version__}, Python {platform.python_version()}; {load}",
        (
            f"- {ranks.world_size} ranks ({ranks.backend}), {config.model}, {config.batch_size} samples per rank and step, "
            f"{torch.get_num_threads()} thread(s) per rank; amp auto = {amp} here"
        ),
        f"- {rounds} rounds of {steps} steps of each variant, interleaved in one job; two warm-up steps of each before",
        (
            "- command: `OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node "
            f"{ranks.world_size} benchmarks/train_speed.py --rounds {rounds} --steps {steps} --write`"
        ),
        "",
        "| variant | wall ms/step | CPU ms/sample | samples/s | speed-up by CPU time (95 % interval) | by wall time (95 % interval) |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in times.items():
        wall, cpu = [r[0] for r in rows], [r[1] for r in rows]
        base_wall, base_cpu = [r[0] for r in times["naive"]], [r[1] for r in times["naive"]]
        by_cpu, by_wall = (
            ("1", "1") if name == "naive" else tuple("{:.2f} ({:.2f} to {:.2f})".format(*ratio_interval(a, b)) for a, b in ((base_cpu, cpu), (base_wall, wall)))
        )  # fmt: skip
        lines.append(
            f"| {name} | {statistics.median(wall) * 1e3:.0f} | {statistics.median(cpu) * 1e3 / samples:.2f} | "
            f"{samples / statistics.median(wall):.0f} | {by_cpu} | {by_wall} |"
        )
    lines += [
        "",
        "naive: per-sample transforms in the training process, float32, NCHW, `loss.item()` every step. Medians over the",
        "rounds; speed-ups are geometric means of the rounds' ratios. CPU time is of all ranks and is valid whatever else the",
        "machine does; wall time does not.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="rounds, at least 3 (default: 12)")
    parser.add_argument("--steps", type=int, default=4, help="steps of each variant in a round (default: 4)")
    parser.add_argument("--data", default="generated", help="data set, as for the training job (default: generated)")
    parser.add_argument(
        "--model", default="simple", choices=("simple", "resnet18", "resnet34"), help="(default: simple)"
    )
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name} next to this file's results")
    options = parser.parse_args()
    if options.rounds < 3 or options.steps < 1:
        parser.error("--rounds must be at least 3 and --steps at least 1")
    config = TrainConfig(data=options.data, model=options.model)
    ranks = join_ranks(config)
    pixels = share_pixels(config, ranks)
    amp = resolve_amp("auto", ranks.device)
    other = "off" if amp == "bf16" else "bf16"
    variants: dict[str, Step] = {
        "naive": naive(ranks, config, pixels.train),
        f"shipped (amp {amp})": shipped(ranks, config, pixels.train, amp),
        f"shipped, but amp {other}": shipped(ranks, config, pixels.train, other),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for step in variants.values():
        measure(ranks, step, 2)
    load = [os.getloadavg()[0]]
    for round_number in range(options.rounds):
        order = list(variants)
        for name in order[round_number % 3 :] + order[: round_number % 3]:
            times[name].append(measure(ranks, variants[name], options.steps))
        if ranks.rank == 0:
            shown = ", ".join(f"{name} {rows[-1][0] * 1e3:.0f} ms" for name, rows in times.items())
            print(f"round {round_number + 1}/{options.rounds}: {shown}", file=sys.stderr, flush=True)
        load.append(os.getloadavg()[0])
    if ranks.rank == 0:
        text = report(config, ranks, amp, times, options.steps, f"load average {min(load):.1f} to {max(load):.1f}")
        print(text, end="")
        if options.write:
            RESULT.parent.mkdir(exist_ok=True)
            RESULT.write_text(text)
    ranks.leave()


if __name__ == "__main__":
    main()
    leave(0)
