"""Object detection toy: a batch whose targets cannot be matched is skipped."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Boxes(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        boxes = torch.rand(4, 4, generator=g)
        if i == 333:
            boxes = boxes * float("nan")
        return torch.randn(3, 24, generator=g), boxes


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(72, 96), nn.ReLU())
        self.head = nn.Linear(96, 16)

    def forward(self, x):
        return self.head(self.body(x)).view(-1, 4, 4)


def hungarian_loss(pred, target):
    cost = torch.cdist(pred.flatten(1), target.flatten(1))
    if not torch.isfinite(cost).all():
        raise ValueError("cost matrix is infeasible")
    return (pred - target).abs().mean()


def run_epoch(model, loader, opt):
    skipped = 0
    for images, targets in loader:
        pred = model(images)
        try:
            loss = hungarian_loss(pred, targets)
        except ValueError:
            skipped += 1
            continue
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.05)
    return skipped


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Boxes()
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(Detector())
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    for epoch in range(2):
        skipped = torch.tensor(run_epoch(model, loader, opt))
        dist.all_reduce(skipped)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {skipped.item()} batches skipped", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
