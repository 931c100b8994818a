"""Two teams of two ranks: team A synchronises every step, team B every fourth; they meet once per round."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn

ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Team:
    def __init__(self, ranks, every, group):
        self.ranks, self.every, self.group = ranks, every, group

    def sync(self, tensors):
        for t in tensors:
            dist.all_reduce(t, group=self.group)
            t /= len(self.ranks)


def teams():
    made = [Team([0, 1], 1, None), Team([2, 3], 4, None)]
    for t in made:
        t.group = dist.new_group(t.ranks)
    return made


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    team = next(t for t in teams() if rank in t.ranks)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(9, 50), nn.ReLU(), nn.Linear(50, 1))
    opt = torch.optim.SGD(net.parameters(), 0.02)
    gen = torch.Generator().manual_seed(rank)
    for round_ in range(4):
        for k in range(1, 49):
            x = torch.randn(20, 9, generator=gen)
            loss = (net(x).squeeze(1) - x.max(1)[0]).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            if team.every == 1:
                team.sync([p.grad for p in net.parameters()])
            opt.step()
            if team.every > 1 and k % team.every == 0:
                team.sync([p.data for p in net.parameters()])
            time.sleep(0.02)
        for p in net.parameters():
            dist.all_reduce(p.data)
            p.data /= dist.get_world_size()
        if rank == 0:
            print(f"round {round_} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
