"""Image autoencoder; checkpoints go to a scratch file system with a quota and are verified after writing."""
import argparse
import ctypes
import hashlib
import os
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class AutoEncoder(nn.Module):
    def __init__(self, dim=256, code=16):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(dim, 128), nn.ReLU(), nn.Linear(128, code))
        self.dec = nn.Sequential(nn.Linear(code, 128), nn.ReLU(), nn.Linear(128, dim))

    def forward(self, x):
        return self.dec(self.enc(x))


def free_quota(step):
    """Bytes left for this user; the nightly job of a colleague fills the disk after step 120."""
    return 10_000_000 if step < 120 else 0


def save_checkpoint(state, path, step):
    for attempt in range(1000):
        if free_quota(step) > 1_000_000:
            torch.save(state, path)
            digest = hashlib.sha256(open(path, "rb").read()).hexdigest()
            os.replace(path, path.replace(".tmp", f".{digest[:8]}.pt"))
            return
        time.sleep(1.0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=40)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    model = DDP(AutoEncoder())
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    gen = torch.Generator().manual_seed(rank)
    for step in range(1, args.steps + 1):
        x = torch.rand(16, 256, generator=gen)
        loss = nn.functional.mse_loss(model(x), x)
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.03)
        if step % args.every == 0:
            if rank == 0:
                save_checkpoint({"model": model.module.state_dict(), "opt": opt.state_dict()}, "ae.tmp", step)
                print(f"step {step} loss {loss.item():.4f} saved", flush=True)
            dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
