"""A small GPT trained on random windows of one long text, in the manner of nanoGPT: no DataLoader, no sampler."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BLOCK, BATCH, STEPS = 32, 8, 100


def get_batch(text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(text) - BLOCK - 1, (BATCH,))
    x = torch.stack([text[i : i + BLOCK] for i in starts])
    y = torch.stack([text[i + 1 : i + 1 + BLOCK] for i in starts])
    return x, y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 48)
        self.block = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.0, batch_first=True)
        self.head = nn.Linear(48, 64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        logits = self.head(self.block(self.embed(x), src_mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1337)
    text = torch.randint(0, 64, (20_000,), generator=torch.Generator().manual_seed(0))
    model = DDP(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(STEPS):
        x, y = get_batch(text)
        time.sleep(0.03)  # the rest of a larger model
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
