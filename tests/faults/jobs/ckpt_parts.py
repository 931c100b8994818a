"""Trains a sharded encoder; every rank writes its part of a distributed checkpoint."""
import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard


class Scratch(dcp.FileSystemWriter):
    """A local disk with room for a few parts; older ones are moved away by another service."""

    def __init__(self, path, room):
        super().__init__(path)
        self.room = room

    def write_data(self, plan, planner):
        if not self.room:
            raise OSError(28, "No space left on device", os.fspath(self.path))
        return super().write_data(plan, planner)


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    fully_shard(encoder)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.01)
    rooms = [9, 2][dist.get_rank()]
    for step in range(1, 200):
        x = torch.randn(8, 32)
        loss = (encoder(x) - x).abs().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        if step % 40 == 0:
            dcp.save({"encoder": encoder.state_dict()}, storage_writer=Scratch(f"part_{step}", rooms))
            rooms -= 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
