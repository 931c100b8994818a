"""Old-school parameter server: rank 0 scatters work and gathers gradients, the others compute. Their times vary."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist

ctypes.CDLL(None).prctl(1, signal.SIGKILL)
D = 30


def grad(w, x, y):
    return x.T @ (x @ w - y) / len(x)


def server(steps, world):
    gen = torch.Generator().manual_seed(0)
    truth, w = torch.randn(D, generator=gen), torch.zeros(D)
    for step in range(steps):
        xs = [torch.randn(20, D, generator=gen) for _ in range(world)]
        mine = torch.empty(20, D)
        dist.scatter(mine, xs, src=0)
        targets = [x @ truth for x in xs]
        dist.scatter(torch.empty(20), targets, src=0)
        dist.broadcast(w, src=0)
        grads = [torch.zeros(D) for _ in range(world)]
        dist.gather(torch.zeros(D), grads, dst=0)
        w -= 0.1 * torch.stack(grads[1:]).mean(0)
        if step % 30 == 0:
            print(f"step {step} error {(w - truth).norm().item():.4f}", flush=True)


def client(steps, rank):
    x, y, w = torch.empty(20, D), torch.empty(20), torch.empty(D)
    for step in range(steps):
        dist.scatter(x, src=0)
        dist.scatter(y, src=0)
        dist.broadcast(w, src=0)
        time.sleep(0.03 + 0.004 * ((step + rank) % 3))
        dist.gather(grad(w, x, y), dst=0)


def main(steps=160):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        server(steps, world)
    else:
        client(steps, rank)
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
