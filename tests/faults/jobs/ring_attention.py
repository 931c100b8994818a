"""Ring attention on toy sequences: key/value blocks travel around the ring with batch_isend_irecv."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist

ctypes.CDLL(None).prctl(1, signal.SIGKILL)
HEADS, BLOCK, DIM = 4, 64, 32


class Ring:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def neighbours(self, reverse):
        if reverse:  # gradients go the other way round
            return (self.rank - 1) % self.world, (self.rank - 1) % self.world
        return (self.rank + 1) % self.world, (self.rank - 1) % self.world

    def rotate(self, kv, reverse=False):
        dst, src = self.neighbours(reverse)
        out = torch.empty_like(kv)
        ops = [dist.P2POp(dist.isend, kv, dst), dist.P2POp(dist.irecv, out, src)]
        for req in dist.batch_isend_irecv(ops):
            req.wait()
        return out


def attend(q, kv, ring):
    num = torch.zeros_like(q)
    den = torch.zeros(HEADS, BLOCK, 1)
    for _ in range(ring.world):
        k, v = kv.unbind(0)
        w = (q @ k.transpose(1, 2) / DIM**0.5).exp()
        num += w @ v
        den += w.sum(-1, keepdim=True)
        kv = ring.rotate(kv)
    return num / den


def run(steps=200, backward_from=120):
    ring = Ring()
    gen = torch.Generator().manual_seed(ring.rank)
    for step in range(steps):
        q = torch.randn(HEADS, BLOCK, DIM, generator=gen)
        kv = torch.randn(2, HEADS, BLOCK, DIM, generator=gen)
        out = attend(q, kv, ring)
        if step >= backward_from:
            grad = ring.rotate(torch.stack([out, out]), reverse=True)
            kv = kv - 1e-3 * grad
        time.sleep(0.02)
        if step % 40 == 0 and ring.rank == 0:
            print(f"step {step} norm {out.norm().item():.2f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run()
    dist.destroy_process_group()
    time.sleep(0.5)
