"""Run by torchrun: the same samples per step in one batch and in two, with a model without batch norm.

Usage: accumulate_job.py DATA DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from distdiag.train import batches, loop
from distdiag.train.__main__ import leave
from distdiag.train.config import TrainConfig
from distdiag.train.ranks import join_ranks
from distdiag.train.recording import NotRecorded


def main() -> None:
    loop.build_model = lambda _: nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
    batches.augment = lambda images, _: images  # drawn per batch, and so different in two halves of one
    ranks = join_ranks(TrainConfig())
    for batch_size, accumulate in ((8, 1), (4, 2), (4, 1)):
        config = TrainConfig(
            data=sys.argv[1],
            max_steps=4,
            amp="off",  # in bf16, half batches would add up to another sum
            batch_size=batch_size,
            accumulate=accumulate,
            validate_every=0,
            checkpoint_every=4,
            checkpoint_dir=str(Path(sys.argv[2]) / f"{batch_size}x{accumulate}"),
        )
        loop.Training(config, ranks, NotRecorded()).run()
    ranks.leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    leave(0)
