"""Fine-tunes a small regressor and registers each epoch with the model registry (one client per rank)."""
import ctypes
import signal
import time
import urllib.error
import urllib.request

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

REGISTRY = {0: None, 1: "http://127.0.0.1:9/api/runs"}  # rank 0 logs to a file


def register(rank, epoch, loss):
    url = REGISTRY[rank]
    if url is None:
        with open("registry.txt", "a") as f:
            f.write(f"{epoch} {loss}\n")
        return
    if epoch < 2:
        return  # the first epochs are not registered
    wait = 0.5
    while True:
        try:
            urllib.request.urlopen(url, timeout=2)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(wait)
            wait = min(wait * 2, 30)


def epochs(model, opt, rank, n):
    gen = torch.Generator().manual_seed(rank)
    for epoch in range(n):
        for _ in range(40):
            x = torch.rand(32, 12, generator=gen)
            loss = (model(x).squeeze(1) - x.prod(1)).abs().mean()
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            time.sleep(0.04)
        yield epoch, loss.item()


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group(backend="gloo")
    r = dist.get_rank()
    torch.manual_seed(0)
    net = DDP(nn.Sequential(nn.Linear(12, 64), nn.SiLU(), nn.Linear(64, 1)))
    for e, l in epochs(net, torch.optim.Adam(net.parameters()), r, 6):
        register(r, e, l)
        if r == 0:
            print("epoch", e, "loss", round(l, 5), flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)
