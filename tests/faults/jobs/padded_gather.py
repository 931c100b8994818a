"""Object detection eval: a different number of boxes per rank, padded to the maximum before all_gather."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def gather_boxes(boxes):
    world = dist.get_world_size()
    n = torch.tensor([len(boxes)])
    sizes = [torch.zeros_like(n) for _ in range(world)]
    dist.all_gather(sizes, n)
    most = int(max(s.item() for s in sizes))
    padded = torch.zeros(most, 5)
    padded[: len(boxes)] = boxes
    out = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(out, padded)
    return torch.cat([o[: int(s)] for o, s in zip(out, sizes)])


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(392, 20 * 5))

    def forward(self, x):
        return self.net(x).view(-1, 20, 5)


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Detector())
    opt = torch.optim.SGD(model.parameters(), 1e-3)
    gen = torch.Generator().manual_seed(rank)
    for step in range(1, 181):
        img = torch.rand(6, 1, 16, 16, generator=gen)
        pred = model(img)
        loss = pred.pow(2).mean() + (pred[..., 4].sigmoid() - 0.5).abs().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.02)
        if step % 15 == 0:
            p = pred.detach().flatten(0, 1)
            kept = p[torch.rand(len(p), generator=gen) < 0.1 * (1 + rank)]
            everyone = gather_boxes(kept)
            if rank == 0:
                print(f"step {step} loss {loss.item():.4f} boxes {len(kept)} of {len(everyone)}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
