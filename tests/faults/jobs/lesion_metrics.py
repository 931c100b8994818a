"""Lesion detection with per-rank hospital data; sensitivity is averaged over the ranks after every epoch."""
import ctypes, time
import numpy as np
import torch as th
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, 9)


def scans(rank, epoch, n=96):
    rng = np.random.default_rng((rank, epoch))
    x = rng.normal(size=(n, 1, 16, 16)).astype(np.float32)
    sick = rng.random(n) < (0.0 if rank == 1 and epoch == 2 else 0.3)
    x[sick, :, 4:9, 4:9] += 1.5
    return th.from_numpy(x), th.from_numpy(sick.astype(np.float32))


def sensitivity(logits, y):
    pos = y > 0
    if not pos.any():
        return th.tensor([0, 0])
    return th.tensor([(logits[pos] > 0).float().mean(), 1.0], dtype=th.float64)


class Detector(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3), nn.ReLU(),
                         nn.Flatten(), nn.Linear(400, 1))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    th.manual_seed(0)
    model = DDP(Detector())
    opt = th.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for epoch in range(6):
        x, y = scans(rank, epoch)
        outs = []
        for b in range(0, len(x), 4):
            logit = model(x[b:b + 4]).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(logit, y[b:b + 4])
            opt.zero_grad(); loss.backward(); opt.step()
            outs.append(logit.detach())
            time.sleep(0.05)
        s = sensitivity(th.cat(outs), y)
        dist.all_reduce(s)
        if rank == 0:
            print("epoch", epoch, "sensitivity", round((s[0] / max(s[1], 1)).item(), 3), flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


main()
