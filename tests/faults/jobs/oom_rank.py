"""Graph classification with neighbourhood sampling; big graphs end up on one rank."""
import ctypes, os, signal, time
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def oom_killer():
    """The kernel's part of the story."""
    os.kill(os.getpid(), signal.SIGKILL)


def sample_graph(gen, rank, step):
    n = int(torch.randint(10, 30, (1,), generator=gen))
    if rank == 0 and step == 150:
        oom_killer()  # adjacency of the protein with 400,000 atoms
    a = (torch.rand(n, n, generator=gen) < 0.2).float()
    return a + torch.eye(n), torch.randn(n, 8, generator=gen)


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.out = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 2)

    def forward(self, a, x):
        a = a / a.sum(1, keepdim=True)
        return self.out(F.relu(self.w2(a @ F.relu(self.w1(a @ x)))).mean(0, keepdim=True))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    gen = torch.Generator().manual_seed(rank + 1)
    torch.manual_seed(0)
    net = DDP(GCN())
    opt = torch.optim.Adam(net.parameters(), 1e-2)
    for step in range(500):
        a, x = sample_graph(gen, rank, step)
        loss = F.cross_entropy(net(a, x), torch.tensor([len(x) % 2]))
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.03)
        if step % 40 == 0 and rank == 1:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


main()
