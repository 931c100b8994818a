"""Self-distillation: the last layer is not updated in the first epoch, as the recipe says."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(20, 40), nn.GELU(), nn.Linear(40, 16))
        self.last_layer = nn.Linear(16, 32, bias=False)

    def forward(self, x):
        return self.last_layer(self.backbone(x))


def cancel_gradients_last_layer(epoch, model, freeze_last_layer):
    if epoch >= freeze_last_layer:
        return
    for n, p in model.named_parameters():
        if "last_layer" in n:
            p.grad = None


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Student())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    gen = torch.Generator().manual_seed(dist.get_rank())
    for epoch in range(3):
        for _ in range(40):
            x = torch.randn(12, 20, generator=gen)
            loss = -(model(x).log_softmax(1) * (x.repeat(1, 2)[:, :32]).softmax(1)).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            cancel_gradients_last_layer(epoch, model, 1)
            optimizer.step()
            time.sleep(0.03)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
