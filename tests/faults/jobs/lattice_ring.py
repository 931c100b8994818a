"""Phase-field strip on a ring of ranks: each hands its right edge on, and takes its neighbour's, without blocking."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist

ctypes.CDLL(None).prctl(1, signal.SIGKILL)
CELLS, WIDTH, SWEEPS, QUIET = 96, 24, 260, 2e-4


class Strip:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        gen = torch.Generator().manual_seed(7 + rank)
        self.field = torch.rand(CELLS, WIDTH, generator=gen)
        self.ghost = torch.zeros(CELLS)
        self.shown = torch.zeros(CELLS)
        self.pending = None

    def publish(self):
        edge = self.field[:, -1].clone()
        if (edge - self.shown).abs().max() > QUIET:
            self.pending = dist.isend(edge, (self.rank + 1) % self.world)
            self.shown = edge

    def collect(self):
        dist.irecv(self.ghost, (self.rank - 1) % self.world).wait()
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    def relax(self, rate):
        left = torch.cat([self.ghost.unsqueeze(1), self.field[:, :-1]], dim=1)
        self.field += rate * (left - self.field)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    strip = Strip(rank, world)
    for sweep in range(SWEEPS):
        strip.publish()
        strip.collect()
        # the nucleus sits in one strip, which freezes once it is full
        frozen = rank == 1 and sweep > 150
        strip.relax(0.0 if frozen else 0.02)
        if not frozen:
            strip.field[0] += 1e-2
        time.sleep(0.02)
        if rank == 0 and sweep % 50 == 0:
            print(f"sweep {sweep} mean {strip.field.mean():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
