# minimal data-parallel training without DDP (after the "Writing Distributed Applications" tutorial)
import ctypes
import os
import time
from math import ceil

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ctypes.CDLL(None).prctl(1, 9)


class Partition:
    def __init__(self, data, index):
        self.data, self.index = data, index

    def batches(self, bsz):
        for k in range(0, len(self.index), bsz):
            yield self.data[self.index[k:k + bsz]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(25, 60)
        self.l2 = nn.Linear(60, 5)

    def forward(self, x):
        return F.log_softmax(self.l2(F.relu(self.l1(x))), dim=1)


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def run(rank, size):
    g = torch.Generator().manual_seed(1234)
    data = torch.randn(1800, 25, generator=g)
    index = torch.randperm(1800, generator=g).tolist()
    part = Partition(data, index[rank::size])
    torch.manual_seed(1234 + rank)  # different dropout on every rank
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    num_batches = ceil(len(part.index) / 12)
    for epoch in range(4):
        epoch_loss = 0.0
        for x in part.batches(12):
            optimizer.zero_grad()
            loss = F.nll_loss(model(x), x[:, :5].argmax(1))
            epoch_loss += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()
            time.sleep(0.03)
        print("Rank ", rank, ", epoch ", epoch, ": ", epoch_loss / num_batches, flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.destroy_process_group()
    time.sleep(0.5)
