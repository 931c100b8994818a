"""GAN with two DDP models; the ranks publish their scores and the learning rate every 100 iterations."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def mlp(*sizes):
    mods = []
    for a, b in zip(sizes, sizes[1:]):
        mods += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*mods[:-1])


class Gan:
    def __init__(self, z=8):
        torch.manual_seed(0)
        self.z = z
        self.gen, self.disc = DDP(mlp(z, 64, 64, 2)), DDP(mlp(2, 64, 64, 1))
        self.g_opt = torch.optim.Adam(self.gen.parameters(), 1e-3, betas=(0.5, 0.9))
        self.d_opt = torch.optim.Adam(self.disc.parameters(), 1e-3, betas=(0.5, 0.9))

    def d_step(self, real):
        fake = self.gen.module(torch.randn(len(real), self.z)).detach()
        score = self.disc(torch.cat([real, fake]))
        y = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
        loss = F.binary_cross_entropy_with_logits(score, y)
        self.d_opt.zero_grad()
        loss.backward()
        self.d_opt.step()
        return loss.item()

    def g_step(self, n):
        score = self.disc.module(self.gen(torch.randn(n, self.z)))
        loss = F.softplus(-score).mean()
        self.g_opt.zero_grad()
        loss.backward()
        self.g_opt.step()
        return loss.item()


class Bulletin:
    """What the ranks tell each other now and then; each begins elsewhere, so that not all talk at once."""

    def __init__(self, rank):
        self.rank = rank
        self.scores = [None] * dist.get_world_size()
        self.lr = torch.tensor([1e-3])

    def share_scores(self, d, g):
        dist.all_gather_object(self.scores, (round(d, 3), round(g, 3)))

    def share_lr(self, d, g):
        dist.broadcast(self.lr, src=0)

    def meet(self, d, g):
        dist.barrier()

    def publish(self, d, g):
        parts = [self.share_scores, self.share_lr, self.meet]
        for part in parts[self.rank:] + parts[:self.rank]:
            part(d, g)
        return self.scores


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    gan, bulletin = Gan(), Bulletin(rank)
    torch.manual_seed(rank)
    for it in range(1, 500):
        t = torch.rand(32) * 6.28
        real = torch.stack([t.cos(), t.sin()], 1) + 0.05 * torch.randn(32, 2)
        d, g = gan.d_step(real), gan.g_step(32)
        time.sleep(0.03)
        if it % 100 == 0:
            scores = bulletin.publish(d, g)
            if rank == 0:
                print(it, scores, flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
