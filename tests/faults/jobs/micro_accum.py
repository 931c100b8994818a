"""Trainer with gradient accumulation (no_sync) and gradient clipping, config from a dict."""
import ctypes
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

cfg = {"accum": 5, "micro_batch": 6, "updates": 40, "clip": 1.0, "lr": 3e-3, "width": 96}


class Trainer:
    def __init__(self, cfg):
        self.cfg, self.rank = cfg, dist.get_rank()
        torch.manual_seed(1)
        w = cfg["width"]
        self.net = DistributedDataParallel(nn.Sequential(nn.Linear(30, w), nn.Mish(), nn.Linear(w, w), nn.Mish(), nn.Linear(w, 1)))
        self.opt = torch.optim.NAdam(self.net.parameters(), cfg["lr"])
        self.gen = torch.Generator().manual_seed(self.rank)

    def micro_batch(self):
        x = torch.randn(self.cfg["micro_batch"], 30, generator=self.gen)
        time.sleep(0.02)
        return x, x.sin().mean(1, keepdim=True)

    def backward(self):
        x, y = self.micro_batch()
        loss = (self.net(x) - y).pow(2).mean() / self.cfg["accum"]
        loss.backward()
        return loss.item()

    def update(self):
        total = 0.0
        with self.net.no_sync():
            for _ in range(self.cfg["accum"] - 1):
                total += self.backward()
        total += self.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), self.cfg["clip"])
        self.opt.step()
        self.opt.zero_grad()
        return total

    def run(self):
        for n in range(self.cfg["updates"]):
            loss = self.update()
            if self.rank == 0 and n % 10 == 0:
                print(f"update {n} loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, 9)
    dist.init_process_group("gloo")
    Trainer(cfg).run()
    dist.destroy_process_group()
    time.sleep(0.5)
