import os
import sys

import ray
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model


def train(config):
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(rank)
    for step in range(60):
        loss = model(torch.randn(4, 8, generator=g)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if config["fate"] == "hangs" and step == 30 and rank == 1:
            torch.distributed.barrier()  # HERE
    if rank == 0:
        with open(config["out"], "w") as out:
            out.write(f"loss {loss.item():.8f}")


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)
    out = os.path.abspath(f"loss-{os.getpid()}")  # a worker's stdout goes into a file of Ray
    given = {"fate": sys.argv[1], "out": out}
    TorchTrainer(train, train_loop_config=given, scaling_config=ScalingConfig(num_workers=2)).fit()
    with open(out) as written:
        print(written.read(), flush=True)
