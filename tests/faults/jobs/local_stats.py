"""Galaxy morphology with BatchNorm; broadcast_buffers was switched off because it 'costs a broadcast per step'."""
import argparse
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ConvBN(nn.Sequential):
    def __init__(self, i, o):
        super().__init__(nn.Conv2d(i, o, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())


def sky(rank, n, gen):
    """Each observatory (rank) has its own exposure."""
    x = torch.randn(n, 1, 24, 24, generator=gen) * (1 + rank) + 3 * rank
    return x, torch.randint(0, 3, (n,), generator=gen)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--buffers", action="store_true", help="broadcast BatchNorm statistics")
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(ConvBN(1, 12), ConvBN(12, 24), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 3))
    model = DDP(net, broadcast_buffers=args.buffers)
    opt = torch.optim.SGD(model.parameters(), 0.05)
    gen = torch.Generator().manual_seed(rank)
    for step in range(args.steps):
        x, y = sky(rank, 8, gen)
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.02)
        if rank == 0 and step % 40 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
