"""How a training step is divided over ranks: one file for each way, chosen by `--strategy`."""

from __future__ import annotations

from distdiag.train.strategies.base import Setup, Strategy


def build_strategy(setup: Setup) -> Strategy:
    """Return the configured strategy. Collective: some strategies broadcast their weights."""
    name = setup.config.strategy
    if name == "auto":
        name = "single" if setup.ranks.control is None else "ddp"
    if name in ("ddp", "dp"):
        from distdiag.train.strategies.replicas import DataParallelThreads, DistributedDataParallelism

        return DistributedDataParallelism(setup) if name == "ddp" else DataParallelThreads(setup)
    if name == "fsdp":
        from distdiag.train.strategies.sharded import FullySharded

        return FullySharded(setup)
    if name in ("model", "pipeline"):
        from distdiag.train.strategies.stages import Stages

        return Stages(setup)
    return Strategy(setup)
