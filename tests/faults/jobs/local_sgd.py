"""Post-local SGD: all-reduce for the first steps, then only local gradients with periodic averaging of the weights."""
import argparse
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.distributed.algorithms.model_averaging.averagers as averagers
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


class TextCNN(nn.Module):
    def __init__(self, vocab=300, dim=24, classes=5):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.convs = nn.ModuleList(nn.Conv1d(dim, 16, k, padding=k // 2) for k in (3, 5))
        self.fc = nn.Linear(32, classes)

    def forward(self, ids):
        x = self.emb(ids).transpose(1, 2)
        return self.fc(torch.cat([torch.relu(c(x)).amax(2) for c in self.convs], 1))


def sample(g, n, topic_shift):
    y = torch.randint(0, 5, (n,), generator=g)
    ids = torch.randint(0, 300, (n, 30), generator=g)
    hint = torch.randint(0, 30, (n, 6), generator=g)
    ids.scatter_(1, hint, (y[:, None] * 12 + topic_shift).expand(-1, 6))
    return ids, y


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--warmup", type=int, default=120)
    p.add_argument("--period", type=int, default=10)
    p.add_argument("--steps", type=int, default=420)
    return p.parse_args()


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    args = parse()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own, _ = dist.new_subgroups(group_size=1)
    torch.manual_seed(0)
    model = DDP(TextCNN())
    model.register_comm_hook(PostLocalSGDState(process_group=None, subgroup=own, start_localSGD_iter=args.warmup), post_localSGD_hook)
    opt = PostLocalSGDOptimizer(
        optim=torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        averager=averagers.PeriodicModelAverager(period=args.period, warmup_steps=args.warmup))
    g = torch.Generator().manual_seed(rank)
    right = 0
    for step in range(1, args.steps + 1):
        time.sleep(0.012)
        ids, y = sample(g, 24, topic_shift=rank)
        out = model(ids)
        loss = nn.functional.cross_entropy(out, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        right += (out.argmax(1) == y).sum().item()
        if step % 70 == 0:
            acc = torch.tensor(right / (24 * 70))
            dist.all_reduce(acc)
            right = 0
            if rank == 0:
                print(f"step {step} acc {acc.item() / dist.get_world_size():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
