"""fp16 autocast with dynamic loss scaling; the scale grows until the gradients overflow, that step is dropped."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Scaler:
    def __init__(self, scale=2.0 ** 22, grow=2.0, back=0.5, interval=20):
        self.scale, self.grow, self.back, self.interval = scale, grow, back, interval
        self.good = self.dropped = 0

    def unscale_(self, params):
        bad = torch.zeros(1)
        for p in params:
            p.grad.div_(self.scale)
            bad += (~torch.isfinite(p.grad)).any().float()
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        return bad.item() > 0

    def step(self, opt, params):
        if self.unscale_(params):
            self.scale *= self.back
            self.good = 0
            self.dropped += 1
            return False
        nn.utils.clip_grad_norm_(params, 2.0)
        opt.step()
        self.good += 1
        if self.good >= self.interval:
            self.scale *= self.grow
            self.good = 0
        return True


class Tagger(nn.Module):
    def __init__(self, feats=40, width=96, tags=9):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(feats, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, tags))

    def forward(self, x):
        return self.net(x)


def stream(seed, n=64):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(40, 9, generator=torch.Generator().manual_seed(0))
    while True:
        time.sleep(0.01)
        x = torch.randn(n, 40, generator=g)
        yield x, (x @ w + 0.5 * torch.randn(n, 9, generator=g)).argmax(1)


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Tagger())
    params = list(model.parameters())
    opt = torch.optim.Adam(params, 1e-3)
    scaler = Scaler()
    for step, (x, y) in enumerate(stream(rank)):
        if step == 520:
            break
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        opt.zero_grad()
        (loss * scaler.scale).backward()
        scaler.step(opt, params)
        if step % 80 == 0 and rank == 0:
            print(f"{step} loss {loss.item():.4f} scale 2^{torch.tensor(scaler.scale).log2().int()} dropped {scaler.dropped}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
