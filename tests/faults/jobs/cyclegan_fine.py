"""Two generators and two discriminators, all wrapped in DDP, stepped in the same order everywhere."""
import ctypes
import itertools
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def net(i, o):
    return DDP(nn.Sequential(nn.Linear(i, 32), nn.LeakyReLU(0.2), nn.Linear(32, o)))




def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    g_ab, g_ba, d_a, d_b = net(4, 4), net(4, 4), net(4, 1), net(4, 1)
    g_opt = torch.optim.Adam(itertools.chain(g_ab.parameters(), g_ba.parameters()), 1e-3, betas=(0.5, 0.999))
    d_opt = torch.optim.Adam(itertools.chain(d_a.parameters(), d_b.parameters()), 1e-3, betas=(0.5, 0.999))
    mse, l1 = nn.MSELoss(), nn.L1Loss()
    gen = torch.Generator().manual_seed(rank)
    for it in range(140):
        a, b = torch.randn(12, 4, generator=gen), torch.randn(12, 4, generator=gen) + 2
        fake_b, fake_a = g_ab(a), g_ba(b)
        one = torch.ones(12, 1)
        loss_g = mse(d_b.module(fake_b), one) + mse(d_a.module(fake_a), one) + 5 * l1(fake_b, a + 2) + 5 * l1(fake_a, b - 2)
        g_opt.zero_grad()
        loss_g.backward()
        g_opt.step()
        loss_d = 0
        for d, real, fake in ((d_a, a, fake_a), (d_b, b, fake_b)):
            out = d(torch.cat([real, fake.detach()]))
            loss_d = loss_d + mse(out, torch.cat([one, 0 * one]))
        d_opt.zero_grad()
        loss_d.backward()
        d_opt.step()
        time.sleep(0.03)
        if it % 35 == 0 and rank == 0:
            print(f"{it} G {loss_g.item():.3f} D {loss_d.item():.3f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


main()
