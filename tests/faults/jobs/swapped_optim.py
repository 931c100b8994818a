"""Own optimizer with a preconditioner that lives on disk for the rank with little memory."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class OffloadedAdagrad(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05, offload=False):
        super().__init__(params, dict(lr=lr))
        self.offload = offload

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for k, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                s = self.fetch(p, k)
                s += p.grad.pow(2)
                p.addcdiv_(p.grad, s.sqrt().add_(1e-8), value=-group["lr"])
                self.keep(p, k, s)

    def fetch(self, p, k):
        if not self.offload:
            return self.state[p].setdefault("sum", torch.zeros_like(p))
        try:
            return torch.load(f"precond{k}.pt")
        except FileNotFoundError:
            return torch.zeros_like(p)

    def keep(self, p, k, s):
        if self.offload:
            torch.save(s, f"precond{k}.pt")
            time.sleep(0.012)  # flush of the spinning disk


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = DDP(nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 3)))
    opt = OffloadedAdagrad(net.parameters(), offload=rank == 0)
    gen = torch.Generator().manual_seed(rank)
    for step in range(170):
        x = torch.randn(20, 30, generator=gen)
        loss = nn.functional.mse_loss(net(x), x[:, :3].sin())
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.01)
        if step % 40 == 0 and rank == 1:
            print(f"{step} {loss.item():.4f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
