"""Small decoder with FSDP2 on a cpu mesh; the main process saves a full checkpoint now and then."""
import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CONF = dict(layers=2, dim=64, heads=4, vocab=200, ctx=24, steps=160, save_every=50)


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.att = nn.MultiheadAttention(d, h, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        y = self.n1(x)
        mask = torch.triu(torch.ones(x.size(1), x.size(1), dtype=torch.bool), 1)
        x = x + self.att(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.n2(x))


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c["vocab"], c["dim"])
        self.blocks = nn.ModuleList(Block(c["dim"], c["heads"]) for _ in range(c["layers"]))
        self.out = nn.Linear(c["dim"], c["vocab"])

    def forward(self, t):
        x = self.emb(t)
        for b in self.blocks:
            x = b(x)
        return self.out(x)


def save_full(model, step):
    opts = StateDictOptions(full_state_dict=True, cpu_offload=True)
    if dist.get_rank() == 0:
        state = get_model_state_dict(model, options=opts)
        torch.save(state, f"step{step}.pt")
        print(f"saved step {step}", flush=True)


def main(c):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Decoder(c)
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), 3e-4)
    gen = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, c["steps"] + 1):
        t = torch.randint(0, c["vocab"], (4, c["ctx"] + 1), generator=gen)
        loss = nn.functional.cross_entropy(model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
        if step % c["save_every"] == 0:
            save_full(model, step)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main(CONF)
