"""Run by torchrun: train every strategy on the same global batches from the same weights, and save the results.

Usage: strategies_job.py DIRECTORY STRATEGY[:SCHEDULE]…

Batch norm uses its stored statistics: batch statistics of a part of the batch would differ between strategies by design.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from distdiag.train.__main__ import leave
from distdiag.train.config import TrainConfig
from distdiag.train.faults import Faults
from distdiag.train.models import SimpleCNN
from distdiag.train.ranks import Ranks, join_ranks
from distdiag.train.strategies import build_strategy
from distdiag.train.strategies.base import Setup, Strategy

GLOBAL_BATCH, STEPS = 16, 3


def freeze_statistics(strategy: Strategy) -> None:
    for module in strategy.network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def built(name: str, ranks: Ranks) -> tuple[Strategy, torch.optim.Optimizer]:
    kind, _, schedule = name.partition(":")
    parts = ranks.world_size if kind in ("ddp", "fsdp") else 1
    size = GLOBAL_BATCH // parts // 2
    config = TrainConfig(
        strategy=kind, schedule=schedule or "1f1b", batch_size=size, accumulate=2, micro_batches=4, clip=1.0
    )
    torch.manual_seed(3)
    strategy = build_strategy(Setup(config, ranks, SimpleCNN(dropout=0.0), "off", Faults((), ranks.rank, 1)))
    return strategy, torch.optim.SGD(strategy.network.parameters(), lr=0.05, momentum=0.9)


def train_step(strategy: Strategy, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Return the loss of the global batch of `step`, which all strategies share."""
    data = torch.Generator().manual_seed(step)
    images = torch.randn(GLOBAL_BATCH, 3, 32, 32, generator=data)
    labels = torch.randint(10, (GLOBAL_BATCH,), generator=data)
    own = list(range(strategy.data_rank, GLOBAL_BATCH, strategy.data_ranks))
    size = strategy.setup.config.batch_size
    strategy.model.train()
    freeze_statistics(strategy)
    total = torch.zeros(2)
    for half in range(2):
        part = own[half * size : (half + 1) * size]
        result = strategy.backward(images[part], labels[part], completes_step=half == 1)
        if result is not None:
            total += torch.tensor([float(result[0]), 1.0])
    strategy.optimize(optimizer)
    strategy.ranks.sum(total)
    return float(total[0] / total[1])


def weights_of(strategy: Strategy) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in strategy.whole_network().state_dict().items()}


def run(name: str, ranks: Ranks) -> dict[str, object]:
    """Train; then repeat the last step from the state that was saved before it."""
    strategy, optimizer = built(name, ranks)
    losses = [train_step(strategy, optimizer, step) for step in range(STEPS - 1)]
    saved = [copy.deepcopy(strategy.state(optimizer))]  # complete on rank 0
    losses.append(train_step(strategy, optimizer, STEPS - 1))
    weights = weights_of(strategy)

    dist.broadcast_object_list(saved, src=0, group=ranks.control)
    resumed, optimizer = built(name, ranks)
    resumed.load(saved[0], optimizer)
    train_step(resumed, optimizer, STEPS - 1)
    for key, value in weights_of(resumed).items():
        # not bit by bit: a kernel may add in another order if a buffer has another address
        torch.testing.assert_close(value, weights[key], rtol=1e-4, atol=1e-4, msg=f"{name} {key}")
    return {"losses": losses, "weights": weights, "about": strategy.about(), "summary": strategy.summary()}


def main() -> None:
    ranks = join_ranks(TrainConfig(device="cpu"))
    for name in sys.argv[2:]:
        done = run(name, ranks)
        if ranks.rank == 0:
            torch.save(done, Path(sys.argv[1]) / f"{name.replace(':', '-')}.pt")
    ranks.leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    leave(0)
