"""Population based training: every rank has its own hyper-parameters; the best one's weights go to everybody."""
import ctypes
import random
import time

import torch
import torch.distributed as dist


class Worker:
    def __init__(self, rank):
        self.rank = rank
        self.rng = random.Random(rank)
        self.lr = 10 ** self.rng.uniform(-3, -1)
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(10, 200), torch.nn.Tanh(), torch.nn.Linear(200, 1))
        self.gen = torch.Generator().manual_seed(rank)
        self.loss = float("inf")

    def train(self, steps):
        opt = torch.optim.SGD(self.net.parameters(), self.lr)
        for _ in range(steps):
            x = torch.randn(64, 10, generator=self.gen)
            loss = (self.net(x).squeeze(1) - x.sin().sum(1)).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            self.loss = loss.item()
            time.sleep(0.03)

    def best(self, scores, slack):
        """Rank of the best worker; one that is about as good as we are is not worth the copy."""
        order = sorted(range(len(scores)), key=scores.__getitem__)
        return self.rank if scores[self.rank] <= slack * scores[order[0]] else order[0]

    def exploit(self, slack):
        scores = [None] * dist.get_world_size()
        dist.all_gather_object(scores, self.loss)
        src = self.best(scores, slack)
        for p in self.net.parameters():
            dist.broadcast(p.data, src=src)
        if src != self.rank:
            self.lr *= self.rng.choice([0.8, 1.25])
        return src


def main():
    ctypes.CDLL(None).prctl(1, 9)
    dist.init_process_group("gloo")
    w = Worker(dist.get_rank())
    for generation in range(12):
        w.train(30)
        src = w.exploit(slack=1 + 0.1 * generation)
        print(f"gen {generation} rank {w.rank} loss {w.loss:.3f} lr {w.lr:.4f} copies {src}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
