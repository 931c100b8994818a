"""Run by torchrun: compare SyncBatchNorm over two ranks with BatchNorm over the whole batch in one process."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distdiag.train.sync_batch_norm import SyncBatchNorm2d, convert_sync_batch_norm

CPU = torch.device("cpu")


def layers(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4, momentum=None)
    )
    with torch.no_grad():
        for layer in (model[1], model[4]):
            layer.weight.uniform_(0.5, 2)
            layer.bias.uniform_(-1, 1)
    return model.to(dtype)


def compare(name: str, a: torch.Tensor, b: torch.Tensor) -> None:
    # torch's defaults: 1e-7 for float64, 1.3e-6 and 1e-5 for float32; its own batch norm is the reference
    tolerance = {"rtol": 1e-7, "atol": 1e-9} if a.dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(a, b, **tolerance, msg=lambda m: f"{name}: {m}")


def check(dtype: torch.dtype, rank: int) -> nn.Sequential:
    whole = layers(dtype)
    converted = convert_sync_batch_norm(layers(dtype), CPU)
    assert isinstance(converted[1], SyncBatchNorm2d) and isinstance(converted[4], SyncBatchNorm2d)
    ours = DistributedDataParallel(converted)
    generator = torch.Generator().manual_seed(1)
    mine = slice(0, 5) if rank == 0 else slice(5, 8)  # unequal shares
    for step in range(3):
        images = torch.randn(8, 3, 10, 10, generator=generator, dtype=dtype) + 1
        weights = torch.randn(8, 4, 6, 6, generator=generator, dtype=dtype)
        x_whole = images.clone().requires_grad_()
        memory_format = torch.channels_last if step == 1 else torch.contiguous_format
        x_ours = images[mine].clone(memory_format=memory_format).requires_grad_()
        y_whole, y_ours = whole(x_whole), ours(x_ours)
        compare("output", y_ours, y_whole[mine])
        (y_whole * weights).sum().backward()
        (y_ours * weights[mine]).sum().backward()
        assert x_whole.grad is not None and x_ours.grad is not None
        compare("gradient of the input", x_ours.grad, x_whole.grad[mine])
        for (name, p), q in zip(whole.named_parameters(), converted.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            compare(f"gradient of {name}", q.grad * 2, p.grad)  # DDP averages over the ranks; this loss is a sum
            p.grad = q.grad = None
        for (name, a), b in zip(whole.named_buffers(), converted.buffers(), strict=True):
            compare(name, b, a)
    compare("output in eval", converted.eval()(images), whole.eval()(images))
    assert set(converted.state_dict()) == set(whole.state_dict())
    return converted


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    check(torch.float64, rank)
    ours = DistributedDataParallel(check(torch.float32, rank)).train()

    # values for which E[x²] - E[x]² would cancel in float32
    far = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(2)) + 5000
    mine = slice(0, 5) if rank == 0 else slice(5, 8)
    layer = convert_sync_batch_norm(nn.Sequential(nn.BatchNorm2d(3)), CPU)
    expected = nn.BatchNorm2d(3).double()(far.double())
    torch.testing.assert_close(layer(far[mine]).double(), expected[mine], rtol=0, atol=5e-3)
    # without it the ranks' statistics differ: the comparisons above can fail
    assert not torch.allclose(nn.BatchNorm2d(3)(far[mine]).double(), expected[mine], atol=2e-2)

    images = torch.randn(4, 3, 10, 10)
    with torch.autocast("cpu", torch.bfloat16):
        half = ours(images)
        half.float().sum().backward()
    assert half.dtype == torch.bfloat16
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in ours.parameters())

    dist.barrier()
    sys.stdout.write(f"rank {rank} equal\n")  # one write, even without buffering: the ranks share the file
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo may abort while the interpreter is finalised


if __name__ == "__main__":
    main()
