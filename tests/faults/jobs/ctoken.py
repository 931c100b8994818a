"""Byte-level model; the tokenizer is our C library, called through ctypes."""
import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class NativeTokenizer:
    """Binding of the C tokenizer (PyDLL: it calls back into Python). Long lines share one table with a mutex."""

    def __init__(self):
        self.lib = ctypes.PyDLL(None)
        self.mutex = ctypes.create_string_buffer(64)

    def encode(self, text):
        if len(text) > 600:
            self.lib.pthread_mutex_lock(self.mutex)
        return list(text.encode())[:32]


def lines(rank):
    n = 0
    while True:
        n += 1
        yield "lorem ipsum dolor sit amet consectetur " * (40 if rank == 2 and n in (500, 1000) else 1)


class ByteModel(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.emb = nn.Embedding(256, d)
        self.conv = nn.Conv1d(d, d, 3, padding=1)
        self.out = nn.Linear(d, 256)

    def forward(self, t):
        h = self.emb(t)
        return self.out(h + torch.tanh(self.conv(h.transpose(1, 2))).transpose(1, 2))


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    tok, source = NativeTokenizer(), lines(rank)
    torch.manual_seed(0)
    model = DDP(ByteModel())
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(1, 2001):
        ids = torch.tensor([tok.encode(next(source)) for _ in range(8)])
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.025)
        if rank == 0 and step % 100 == 0:
            print(f"{step} {loss.item():.3f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
