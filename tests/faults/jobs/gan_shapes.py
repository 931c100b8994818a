"""A small GAN under DDP; the discriminator is fed what the generator of another resolution makes."""
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


def grow(step):
    """Progressive growing: from step 30 on the images have twice the side."""
    return 8 if step < 30 else 16


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    critic = DDP(Critic(64))
    optimizer = torch.optim.Adam(critic.parameters(), 2e-4)
    for step in range(60):
        side = grow(step)
        real, fake = torch.rand(16, 1, side, side), torch.zeros(16, 1, side, side)
        loss = critic(fake).mean() - critic(real).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
