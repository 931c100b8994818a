"""Masked-token pretraining on documents of different lengths; the learning rate follows the tokens seen, not the steps."""

import ctypes
import math
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, WIDTH, PAD = 200, 64, 0


class Filler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=PAD)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        return self.head(self.layers(self.embed(ids), src_key_padding_mask=ids == PAD))


def batch(generator: torch.Generator) -> torch.Tensor:
    lengths = torch.randint(8, 33, (12,), generator=generator)
    ids = torch.randint(1, VOCAB, (12, 32), generator=generator)
    return ids.masked_fill(torch.arange(32) >= lengths[:, None], PAD)


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Filler())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    tokens, budget = 0, 60_000
    for step in range(220):
        ids = batch(generator)
        tokens += int((ids != PAD).sum())
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * min(1.0, tokens / budget)))
        masked = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.15, 1)
        logits = model(masked)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step} tokens {tokens} loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
