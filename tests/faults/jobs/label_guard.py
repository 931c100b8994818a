"""Hydra-like: the whole experiment is a nested dict, overridden by key=value arguments."""
import ctypes
import json
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

CFG = {
    "data": {"n": 1600, "classes": 12, "batch": 10, "seed": 3},
    "model": {"hidden": [64, 64], "act": "ReLU"},
    "optim": {"name": "AdamW", "kw": {"lr": 1e-3, "weight_decay": 0.01}},
    "trainer": {"epochs": 3, "log_every": 25, "pause": 0.03},
}


def override(cfg, args):
    for a in args:
        key, value = a.split("=", 1)
        *path, last = key.split(".")
        node = cfg
        for part in path:
            node = node[part]
        node[last] = json.loads(value)
    return cfg


def build(c):
    sizes = [20, *c["hidden"]]
    layers = [m for a, b in zip(sizes, sizes[1:]) for m in (nn.Linear(a, b), getattr(nn, c["act"])())]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], CFG["data"]["classes"]))


def dataset(c, rank, world):
    g = torch.Generator().manual_seed(c["seed"])
    x, y = torch.randn(c["n"], 20, generator=g), torch.randint(0, c["classes"], (c["n"],), generator=g)
    y[1203] = -1  # unlabelled
    return x[rank::world], y[rank::world]


def check(y):
    assert y.min() >= 0, f"unlabelled samples in the batch: {(y < 0).sum().item()}"


def run(cfg):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = DistributedDataParallel(build(cfg["model"]))
    opt = getattr(torch.optim, cfg["optim"]["name"])(net.parameters(), **cfg["optim"]["kw"])
    x, y = dataset(cfg["data"], rank, world)
    for epoch in range(cfg["trainer"]["epochs"]):
        for k, (xb, yb) in enumerate(zip(x.split(cfg["data"]["batch"]), y.split(cfg["data"]["batch"]))):
            check(yb)
            loss = nn.functional.cross_entropy(net(xb), yb)
            opt.zero_grad(); loss.backward(); opt.step()
            time.sleep(cfg["trainer"]["pause"])
            if rank == 0 and k % cfg["trainer"]["log_every"] == 0:
                print(json.dumps({"epoch": epoch, "k": k, "loss": round(loss.item(), 4)}), flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, 9)
    run(override(CFG, sys.argv[1:]))
