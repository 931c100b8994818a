"""Train, then save: gathering the weights is a collective, and only the main process saves."""

import torch
import torch.distributed as dist
from torch import nn

STEPS, SAVE_EVERY = 60, 25


class Accelerator:
    """What the script needs of an accelerator: sharded weights, gathered on request by all processes."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.is_main_process = dist.get_rank() == 0

    def get_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        gathered = {}
        for name, weight in model.named_parameters():
            parts = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, weight.detach())
            gathered[name] = torch.cat(parts)
        return gathered

    def wait_for_everyone(self) -> None:
        dist.barrier()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.randn(32, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main() -> None:
    accelerator = Accelerator()
    model = nn.Linear(64, 64)
    torch.manual_seed(dist.get_rank())  # other data on each rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, STEPS + 1):
        mean = torch.tensor(train_step(model, optimizer))
        dist.all_reduce(mean)
        if step % SAVE_EVERY == 0:
            if accelerator.is_main_process:
                state_dict = accelerator.get_state_dict(model)
                torch.save(state_dict, "model.pt")
            else:
                accelerator.wait_for_everyone()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
