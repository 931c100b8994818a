"""Weather nowcasting, DistributedSampler as in the documentation (almost)."""
import argparse
import ctypes
import logging
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

logger = logging.getLogger(__name__)


class Radar(Dataset):
    def __init__(self, frames):
        g = torch.Generator().manual_seed(8)
        self.film = torch.rand(frames + 4, 16, 16, generator=g)

    def __len__(self):
        return len(self.film) - 4

    def __getitem__(self, i):
        time.sleep(0.001)
        return self.film[i:i + 3], self.film[i + 4:i + 5]


class Nowcaster(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 1, 3, padding=1))

    def forward(self, past):
        return self.body(past) + past[:, -1:]


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=10)
    return parser.parse_args()


def main():
    args = parse_args()
    logging.basicConfig(level=logging.INFO)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    dataset = Radar(600)
    sampler = DistributedSampler(dataset, shuffle=True)
    dataloader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(Nowcaster())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(args.num_epochs):
        for past, future in dataloader:
            loss = nn.functional.mse_loss(model(past), future)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.02)
        if dist.get_rank() == 0:
            logger.info("epoch %d mse %.5f", epoch, loss.item())
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
