"""A trainer whose `log_dir` looks like an attribute and is a broadcast; a hook that only rank 0 runs reads it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.global_rank = dist.get_rank()
        torch.manual_seed(self.global_rank)  # other data on each rank

    @property
    def log_dir(self) -> str:
        """The directory of this run: rank 0 chooses it and broadcasts it."""
        name = [f"version_{torch.randint(100, ()).item()}"]
        dist.broadcast_object_list(name, src=0)
        return f"lightning_logs/{name[0]}"

    def fit(self, module: nn.Module, hooks: list) -> None:
        model = DDP(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(80):
            loss = model(torch.randn(16, 32)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for hook in hooks:
                hook(self, step, loss)


def log_histogram(trainer: Trainer, step: int, loss: torch.Tensor) -> None:
    if trainer.global_rank != 0:
        return
    if step % 20 == 0 and step:
        print(f"{trainer.log_dir}/events: step {step} loss {loss.item():.3f}", flush=True)


def main() -> None:
    trainer = Trainer()
    trainer.fit(nn.Linear(32, 2), hooks=[log_histogram])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
