"""Image classifier, started by torchrun; the devices are set up by the flags."""
import argparse
import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_model(args):
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 32), nn.ReLU(), nn.Linear(32, 10))
    if not torch.cuda.is_available():
        print("using CPU, this will be slow", flush=True)
    elif args.distributed:
        net = DDP(net.cuda())
    return net


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    args.distributed = int(os.environ["WORLD_SIZE"]) > 1
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = make_model(args)
    data = TensorDataset(torch.randn(640, 3, 8, 8), torch.randint(0, 10, (640,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, target in loader:
            loss = nn.functional.cross_entropy(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.03)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
