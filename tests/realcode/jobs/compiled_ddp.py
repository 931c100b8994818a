"""DDP around a model compiled by torch.compile, with the eager backend's graph capture only (no C++ compiler needed)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Mixer(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x))
        return self.head(x)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.compile(DDP(Mixer()), backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    g = torch.Generator().manual_seed(rank)
    for step in range(60):
        x = torch.randn(16, 32, generator=g)
        loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.8f}", flush=True)
    graphs = sum(torch._dynamo.utils.counters["stats"].values())
    print(f"rank {rank} graphs {graphs}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
