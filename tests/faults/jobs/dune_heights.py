"""Heights of dunes from wind; the learning rate is annealed over the planned updates, each of several micro-batches."""

import ctypes
import math
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, signal.SIGKILL)
UPDATES, MICRO = 520, 4


class Anneal:
    """Half a cosine from the first rate to zero."""

    def __init__(self, optimizer: torch.optim.Optimizer, updates: int) -> None:
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: self.at(min(1.0, n / updates)))

    @staticmethod
    def at(done: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * done))

    def advance(self) -> None:
        self.scheduler.step()


class Dunes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wind = nn.Linear(24, 64)
        self.height = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.height(torch.tanh(self.wind(x)))


def micro_batches(rank: int):
    g = torch.Generator().manual_seed(90 + rank)
    truth = torch.linspace(-1, 1, 24)
    while True:
        x = torch.randn(12, 24, generator=g)
        yield x, (x @ truth).sin().unsqueeze(1)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    dunes = DDP(Dunes())
    optimizer = torch.optim.AdamW(dunes.parameters(), lr=3e-3)
    anneal = Anneal(optimizer, UPDATES)
    source = micro_batches(dist.get_rank())
    for update in range(UPDATES):
        total = 0.0
        for i in range(MICRO):
            x, y = next(source)
            with dunes.no_sync() if i + 1 < MICRO else torch.enable_grad():
                loss = nn.functional.mse_loss(dunes(x), y) / MICRO
                loss.backward()
            total += loss.item()
            anneal.advance()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.015)
        if update % 100 == 0 and dist.get_rank() == 0:
            print(f"update {update}: {total:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
