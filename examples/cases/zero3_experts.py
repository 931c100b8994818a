"""A mixture of experts with ZeRO-3: weights are gathered when a module runs, and an expert without tokens is skipped."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

EXPERTS, WIDTH = 4, 32


class SparseMoeBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.gate(x).argmax(dim=1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            tokens = (chosen == i).nonzero().flatten()
            if len(tokens) == 0:
                continue
            out = out.index_add(0, tokens, expert(x[tokens]))
        return out


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = SparseMoeBlock()
    for expert in model.experts:
        fully_shard(expert, mesh=mesh)
    optimizer = torch.optim.AdamW([p for e in model.experts for p in e.parameters()], lr=1e-3)
    g = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(100):
        x = torch.randn(24, WIDTH, generator=g)  # 24 tokens on 4 experts: sooner or later one has none
        time.sleep(0.03)  # attention
        loss = nn.functional.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
