"""Halo exchange around a ring of tiles; the tiles are placed anew as the load changes."""
import ctypes
import signal

import torch
import torch.distributed as dist


def neighbours(rank, world, sweep, load):
    left, right = (rank - 1) % world, (rank + 1) % world
    if sweep >= 40 and load[rank] > 2.0:
        left, right = right, left
    return left, right


def pass_on(edge, rank, left, right):
    halo = torch.empty_like(edge)
    if rank % 2 == 0:
        dist.send(edge, right)
        dist.recv(halo, left)
    else:
        dist.recv(halo, left)
        dist.send(edge, right)
    return halo


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    load = [2.5, 1.0, 1.0, 1.0]
    tile = torch.full((64,), float(rank))
    for sweep in range(90):
        left, right = neighbours(rank, world, sweep, load)
        tile = 0.5 * (tile + pass_on(tile, rank, left, right))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
