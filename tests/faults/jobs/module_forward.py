"""Policy gradient with a value baseline; uses model.module because the wrapper has no act()."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class ActorCritic(nn.Module):
    def __init__(self, obs=10, actions=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, 64), nn.Tanh())
        self.pi, self.v = nn.Linear(64, actions), nn.Linear(64, 1)

    def forward(self, obs):
        h = self.body(obs)
        return torch.distributions.Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)

    def act(self, obs):
        dist_, value = self(obs)
        a = dist_.sample()
        return a, dist_.log_prob(a), value


class Env:
    """Contextual bandit, one per rank."""

    def __init__(self, seed, n=32):
        self.gen, self.n = torch.Generator().manual_seed(seed), n

    def reset(self):
        self.obs = torch.randn(self.n, 10, generator=self.gen)
        return self.obs

    def step(self, action):
        time.sleep(0.02)
        return (action == self.obs[:, :4].argmax(-1)).float()


class Agent:
    def __init__(self, rank):
        torch.manual_seed(0)
        self.model = DDP(ActorCritic())
        self.opt = torch.optim.Adam(self.model.parameters(), 3e-3)
        self.env = Env(rank)
        torch.manual_seed(rank)

    def update(self):
        action, logp, value = self.model.module.act(self.env.reset())
        reward = self.env.step(action)
        adv = reward - value.detach()
        loss = -(logp * adv).mean() + 0.5 * (reward - value).pow(2).mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return reward.mean()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    agent = Agent(rank)
    for it in range(300):
        r = agent.update()
        if it % 50 == 0:
            dist.all_reduce(r)
            if rank == 0:
                print(f"iter {it} mean reward {r.item() / dist.get_world_size():.3f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


main()
