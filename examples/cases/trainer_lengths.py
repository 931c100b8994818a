"""Evaluation gathers the predictions of all ranks; each rank pads its texts to its own longest one."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def pad(texts: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=0)


def texts(rank: int, step: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randint(1, 64, (int(n),), generator=g) for n in torch.randint(5, 30, (8,), generator=g)]


def evaluate(model: nn.Module, rank: int) -> torch.Tensor:
    ids = pad(texts(rank, 99_999))
    with torch.no_grad():
        predicted = model(ids).argmax(-1)
    gathered = [torch.empty_like(predicted) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, predicted)
    return torch.cat(gathered)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, 61):
        ids = pad(texts(rank, step))
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            evaluate(model.module, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
