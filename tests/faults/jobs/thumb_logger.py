"""Super resolution toy; the main process also renders a preview after every step."""
import argparse
import ctypes
import signal
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def preview(net, lr_img):
    """PNG-like preview; zlib level 9 of an upscaled image."""
    with torch.no_grad():
        img = F.interpolate(net(lr_img[:1]).clamp(0, 1), scale_factor=6, mode="bilinear")
    raw = (img[0] * 255).byte().numpy().tobytes()
    packed = b"".join(zlib.compress(raw, 9) for _ in range(3))
    time.sleep(0.04)  # upload
    return len(packed)


def get_args():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=170)
    ap.add_argument("--lr", type=float, default=1e-3)
    return ap.parse_args()


def main():
    args = get_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 12, 3, padding=1), nn.PixelShuffle(2))
    ddp = DDP(net)
    opt = torch.optim.Adam(ddp.parameters(), args.lr)
    gen = torch.Generator().manual_seed(rank)
    sizes = []
    for step in range(args.steps):
        hr = torch.rand(4, 3, 32, 32, generator=gen)
        lr_img = F.avg_pool2d(hr, 2)
        loss = F.l1_loss(ddp(lr_img), hr)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            sizes.append(preview(net, lr_img))
        if rank == 0 and step % 40 == 0:
            print(f"step {step} loss {loss.item():.4f} preview {sizes[-1]}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
