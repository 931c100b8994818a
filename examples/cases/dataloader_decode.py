"""Splatting: each step renders one view, and its photo is decoded by the DataLoader, again and again."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VIEWS, EPOCHS = 48, 10


def decode(view: int) -> torch.Tensor:
    time.sleep(0.04)  # a large PNG
    return torch.randn(3, 48, 48, generator=torch.Generator().manual_seed(view))


class Views(Dataset):
    def __len__(self) -> int:
        return VIEWS

    def __getitem__(self, i: int) -> torch.Tensor:
        return decode(i)


def main() -> None:
    dist.init_process_group("gloo")
    views = Views()
    sampler = DistributedSampler(views)
    loader = DataLoader(views, batch_size=1, sampler=sampler)
    model = DDP(nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for photo in loader:
            loss = nn.functional.mse_loss(model(photo), photo)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
