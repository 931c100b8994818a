"""GRPO in the manner of a small RL repository: the policy is in DDP, and the loss is computed through `.module`."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    policy = DDP(nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 6)))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    unwrapped = policy.module  # to generate with
    g = torch.Generator().manual_seed(1 + dist.get_rank())
    for step in range(200):
        prompts = torch.randn(16, 24, generator=g)
        with torch.no_grad():
            actions = unwrapped(prompts).argmax(-1)
            time.sleep(0.03)  # many tokens
        advantage = torch.randn(16, generator=g)
        log_probs = unwrapped(prompts).log_softmax(-1)
        loss = -(log_probs.gather(1, actions[:, None]).squeeze(1) * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {mean.item() / dist.get_world_size():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
