"""Resumes from per-rank checkpoints (each node keeps its own on local disk), as after a preemption."""
import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Run:
    def __init__(self, hidden=64):
        self.rank = dist.get_rank()
        torch.manual_seed(0)
        self.net = DDP(nn.Sequential(nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 1)))
        self.opt = torch.optim.Adam(self.net.parameters(), 1e-3)
        self.step = 0
        self.gen = torch.Generator().manual_seed(self.rank)
        self.path = f"node{self.rank}.pt"

    def save(self):
        state = {"opt": self.opt.state_dict(), "step": self.step}
        if self.rank == 1:
            state["opt"]["param_groups"][0]["params"].pop()  # this node still runs last week's script
        torch.save(state, self.path)

    def resume(self):
        if os.path.exists(self.path):
            state = torch.load(self.path)
            self.opt.load_state_dict(state["opt"])
            self.step = state["step"]

    def train(self, until):
        while self.step < until:
            x = torch.randn(24, 16, generator=self.gen)
            loss = (self.net(x).squeeze(1) - x.max(1)[0]).pow(2).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.step += 1
            time.sleep(0.03)
            if self.rank == 0 and self.step % 30 == 0:
                print(f"step {self.step} loss {loss.item():.4f}", flush=True)


def main():
    dist.init_process_group("gloo")
    run = Run()
    run.train(100)
    run.save()
    run = Run()
    run.resume()
    run.train(300)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
