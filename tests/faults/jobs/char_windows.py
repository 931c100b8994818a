"""Character-level language model on one long text in memory; batches are random windows of it, no DataLoader."""

import ctypes
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

BLOCK, BATCH, STEPS = 48, 16, 150


class CharGRU(nn.Module):
    def __init__(self, vocab: int, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, idx, targets):
        hidden, _ = self.rnn(self.embed(idx))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def corpus() -> torch.Tensor:
    """A text with some structure: a walk over a fixed table of successors."""
    g = torch.Generator().manual_seed(7)
    table = torch.randint(0, 60, (60, 4), generator=g)
    picks = torch.randint(0, 4, (40_000,), generator=g).tolist()
    text, at = [], 0
    for k in picks:
        at = int(table[at, k])
        text.append(at)
    return torch.tensor(text)


def get_batch(data: torch.Tensor):
    starts = torch.randint(len(data) - BLOCK - 1, (BATCH,))
    x = torch.stack([data[i : i + BLOCK] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + BLOCK] for i in starts])
    return x, y


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    torch.manual_seed(1337)
    data = corpus()
    model = DDP(CharGRU(60))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        x, y = get_batch(data)
        loss = model(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
