"""PPO: ranks generate until they have enough answers. Empty answers are dropped, so ranks need different rounds."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ROLLOUTS = 24


def generate(g: torch.Generator) -> list[torch.Tensor]:
    lengths = torch.randint(0, 12, (8,), generator=g)
    return [torch.randn(int(n), 16, generator=g) for n in lengths]


def make_experience(g: torch.Generator) -> list[torch.Tensor]:
    kept: list[torch.Tensor] = []
    while len(kept) < ROLLOUTS:
        answers = [a for a in generate(g) if len(a) > 0]
        score = torch.tensor([float(len(answers))])
        dist.all_reduce(score)  # running mean of the reward over all ranks
        kept += answers
    return kept[:ROLLOUTS]


def main() -> None:
    dist.init_process_group("gloo")
    policy = DDP(nn.Linear(16, 4))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    g = torch.Generator().manual_seed(11 + dist.get_rank())
    for _ in range(30):
        experience = make_experience(g)
        for answer in experience[:6]:
            loss = policy(answer).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
