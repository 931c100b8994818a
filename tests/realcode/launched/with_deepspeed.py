import sys

import deepspeed
import torch


def train():
    deepspeed.ops.__compatible_ops__.clear()  # its collectives in shared memory are compiled for minutes
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        },
    )
    rank = torch.distributed.get_rank()
    g = torch.Generator().manual_seed(rank)
    for step in range(60):
        loss = engine(torch.randn(4, 8, generator=g)).square().mean()
        engine.backward(loss)
        engine.step()
        if sys.argv[-1] == "hangs" and step == 30 and rank == 1:
            torch.distributed.barrier()  # HERE
    if rank == 0:
        print(f"loss {loss.item():.8f}", flush=True)


if __name__ == "__main__":
    train()
