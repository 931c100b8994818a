"""A critic that grows; when the images get larger, all workers build the larger critic and go on."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Critic(nn.Module):
    def __init__(self, pixels):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(pixels, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, image):
        return self.body(image.flatten(1))


def build(side):
    torch.manual_seed(side)
    critic = DDP(Critic(side * side))
    return critic, torch.optim.Adam(critic.parameters(), 2e-4)


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    critic, optimizer = build(8)
    for step in range(60):
        side = 8 if step < 30 else 16
        image = torch.rand(16, 1, side, side)
        try:
            loss = critic(image).mean()
        except RuntimeError as problem:
            print("larger images:", str(problem)[:40], flush=True)
            critic, optimizer = build(side)
            loss = critic(image).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
