"""Speaker embeddings; the sampler keeps utterances in order of length and strides over the ranks."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler


class Utterances(Dataset):
    def __init__(self, n):
        self.lengths = [20 + (7 * i) % 31 for i in range(n)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        time.sleep(0.001)
        return torch.randn(self.lengths[i], 8, generator=torch.Generator().manual_seed(i)), i % 6


class ByLength(Sampler):
    def __init__(self, data, rank, world):
        self.order = sorted(range(len(data)), key=data.lengths.__getitem__)[rank::world]

    def __iter__(self):
        return iter(self.order)

    def __len__(self):
        return len(self.order)


def pad(batch):
    xs, ys = zip(*batch)
    return nn.utils.rnn.pad_sequence(xs, batch_first=True), torch.tensor(ys)


class XVector(nn.Module):
    def __init__(self):
        super().__init__()
        self.tdnn = nn.Sequential(nn.Conv1d(8, 32, 3, padding=1), nn.ReLU(), nn.Conv1d(32, 32, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(64, 6)

    def forward(self, x):
        h = self.tdnn(x.transpose(1, 2))
        return self.head(torch.cat([h.mean(2), h.std(2)], 1))


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Utterances(1601)
    loader = DataLoader(data, batch_size=8, sampler=ByLength(data, rank, world), collate_fn=pad)
    torch.manual_seed(0)
    model = DDP(XVector())
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for epoch in range(3):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            time.sleep(0.05)
        print(f"rank {rank} epoch {epoch} loss {loss.item():.3f}", flush=True)
        dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
