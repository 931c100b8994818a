"""Run by torchrun: train every strategy on the same global batches from the same weights, and save what came out.

Usage: strategies_job.py DIRECTORY STRATEGY[:SCHEDULE]…

Batch norm uses its stored statistics: those of a part of the batch would differ between strategies by design.
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


def run(name: str, ranks: Ranks) -> dict[str, object]:
    kind, _, schedule = name.partition(":")
    parts = ranks.world_size if kind in ("ddp", "fsdp") else 1
    size = GLOBAL_BATCH // parts
    config = TrainConfig(
        strategy=kind, schedule=schedule or "1f1b", batch_size=size // 2, accumulate=2, micro_batches=4, clip=1.0
    )
    torch.manual_seed(3)
    strategy = build_strategy(Setup(config, ranks, SimpleCNN(dropout=0.0), "off", Faults((), ranks.rank, 1)))
    optimizer = torch.optim.SGD(strategy.network.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(STEPS):
        images = torch.randn(GLOBAL_BATCH, 3, 32, 32, generator=data)
        labels = torch.randint(10, (GLOBAL_BATCH,), generator=data)
        own = range(strategy.data_rank, GLOBAL_BATCH, strategy.data_ranks)
        strategy.model.train()
        freeze_statistics(strategy)
        total = torch.zeros(2)
        for half in range(2):
            part = list(own)[half * config.batch_size : (half + 1) * config.batch_size]
            result = strategy.backward(images[part], labels[part], completes_step=half == 1)
            if result is not None:
                total += torch.tensor([float(result[0]), 1.0])
        strategy.optimize(optimizer)
        ranks.sum(total)
        losses.append(float(total[0] / total[1]))
    saved = copy.deepcopy(strategy.state(optimizer))
    weights = {k: v.clone() for k, v in strategy.whole_network().state_dict().items()}
    if kind not in ("single", "dp"):  # what was saved restores the same optimizer state, from other weights
        dist.broadcast_object_list(box := [saved], src=0, group=ranks.control)
        with torch.no_grad():
            for p in strategy.network.parameters():
                p.zero_()
        strategy.load(box[0], optimizer)
        again = strategy.whole_network().state_dict()
        assert all(torch.equal(again[k], v) for k, v in weights.items()), name
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
