"""DDP with torchmetrics on uneven evaluation data, an EMA copy, and early stopping that all ranks decide together."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAccuracy


def batches(n, rank, seed):
    g = torch.Generator().manual_seed(seed * 10 + rank)
    for _ in range(n):
        x = torch.randn(12, 18, generator=g)
        yield x, (x.sum(1) > 0).float()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(18, 36), nn.ReLU(), nn.Dropout(0.1), nn.Linear(36, 1)))
    average = copy.deepcopy(model.module)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    accuracy, mean = BinaryAccuracy(), MeanMetric()
    best, bad = 0.0, 0
    for epoch in range(6):
        for x, y in batches(20, rank, epoch):
            loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean.update(loss.detach())
            with torch.no_grad():
                for a, p in zip(average.parameters(), model.module.parameters(), strict=True):
                    a.lerp_(p, 0.1)
        average.eval()
        with torch.no_grad():
            for x, y in batches(3 + rank, rank, 77):
                accuracy.update(average(x).squeeze(1).sigmoid(), y)
        value, average_loss = accuracy.compute().item(), mean.compute().item()
        accuracy.reset(), mean.reset()
        if rank == 0:
            print(f"epoch {epoch} loss {average_loss:.7f} accuracy {value:.6f}", flush=True)
        best, bad = (value, 0) if value > best else (best, bad + 1)
        if bad >= 4:
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
