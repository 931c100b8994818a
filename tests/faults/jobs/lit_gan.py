"""Two optimizers in one DDP module, with the trainer's own words for parameters that took no part."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 32))
        self.discriminator = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, z, real, turn):
        if turn == "d":
            return self.discriminator(real).mean() - self.discriminator(torch.zeros_like(real)).mean()
        return -self.discriminator(self.generator(z)).mean()


class Strategy:
    """Runs a training step as the trainer does, and explains what DDP says."""

    def __init__(self, module):
        self.model = DDP(module)

    def training_step(self, *args):
        try:
            return self.model(*args)
        except RuntimeError as error:
            if "Expected to have finished reduction" in str(error):
                raise RuntimeError(
                    "It looks like your LightningModule has parameters that were not used in producing the loss returned "
                    "by training_step. If this is intentional, you must enable the detection of unused parameters in DDP, "
                    "either by setting the string value `strategy='ddp_find_unused_parameters_true'` or by setting the "
                    "flag in the strategy with `strategy=DDPStrategy(find_unused_parameters=True)`."
                ) from error
            raise


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    strategy = Strategy(Gan())
    optimizer = torch.optim.Adam(strategy.model.parameters(), 1e-3)
    for step in range(40):
        turn = "d" if step % 2 == 0 else "g"
        loss = strategy.training_step(torch.randn(8, 8), torch.randn(8, 32), turn)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
