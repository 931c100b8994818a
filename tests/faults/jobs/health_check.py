"""RNN training with a health check (monitored_barrier) that was copied from a two-node setup."""
import ctypes
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, signal.SIGKILL)
NODES = 2  # ranks of the health check


def health_check(rank):
    """All nodes still there? Names the missing one after ten minutes."""
    if rank < NODES:
        dist.monitored_barrier(timeout=timedelta(minutes=10), wait_all_ranks=True)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.fc = nn.LSTM(3, 32, batch_first=True), nn.Linear(32, 3)

    def forward(self, x):
        return self.fc(self.rnn(x)[0])


def series(gen):
    t = torch.linspace(0, 6, 31)
    f = torch.rand(8, 1, 3, generator=gen) * 3
    return torch.sin(t[None, :, None] * f)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Forecaster())
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    gen = torch.Generator().manual_seed(rank)
    for step in range(1, 401):
        s = series(gen)
        loss = nn.functional.mse_loss(model(s[:, :-1]), s[:, 1:])
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        time.sleep(0.02)
        if step % 100 == 0:
            health_check(rank)
            if rank == 0:
                print(f"step {step} loss {loss.item():.5f}, all nodes fine", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
