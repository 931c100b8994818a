"""Click model over 'parquet' rows, decoded by loader workers."""
import argparse
import ctypes
import signal
import struct
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Rows(Dataset):
    FORMAT = "<8fB"

    def __init__(self, n):
        g = torch.Generator().manual_seed(1)
        self.blobs = [struct.pack(self.FORMAT, *torch.rand(8, generator=g).tolist(), i % 2) for i in range(n)]
        self.blobs[1000] = self.blobs[1000][:-3]  # the file was cut when the disk was full

    def __len__(self):
        return len(self.blobs)

    def __getitem__(self, i):
        time.sleep(0.001)
        *x, y = struct.unpack(self.FORMAT, self.blobs[i])
        return torch.tensor(x), float(y)


class FM(nn.Module):
    def __init__(self):
        super().__init__()
        self.v = nn.Parameter(torch.randn(8, 16) * 0.1)
        self.w = nn.Linear(8, 1)

    def forward(self, x):
        s = (x @ self.v).pow(2) - x.pow(2) @ self.v.pow(2)
        return self.w(x).squeeze(1) + 0.5 * s.sum(1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--epochs", type=int, default=3)
    args = ap.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    rows = Rows(2400)
    sampler = DistributedSampler(rows, shuffle=False)
    loader = DataLoader(rows, 8, sampler=sampler, num_workers=args.workers)
    torch.manual_seed(0)
    model = DDP(FM())
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    bce = nn.BCEWithLogitsLoss()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            loss = bce(model(x), y.float())
            opt.zero_grad()
            loss.backward()
            opt.step()
            time.sleep(0.04)
            if rank == 0 and i % 20 == 0:
                print(f"{epoch} {i}/{len(loader)} {loss.item():.4f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
