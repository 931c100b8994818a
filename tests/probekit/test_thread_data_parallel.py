"""DataParallel's semantics on threads: the single module's gradients, buffers from the first replica only."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from distdiag.probekit.measure.thread_data_parallel import ThreadDataParallel, replicate


def network(norm: bool) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1)]
    if norm:
        layers.append(nn.BatchNorm2d(8))
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5))


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(10, 3, 4, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_gradients_equal_those_of_the_single_module(replicas: int, images: torch.Tensor):
    alone, module = network(norm=False), network(norm=False)
    parallel = ThreadDataParallel(module, replicas)

    alone(images).square().mean().backward()
    parallel(images).square().mean().backward()
    parallel.close()

    for p, q in zip(alone.parameters(), module.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and q.is_leaf
        torch.testing.assert_close(p.grad, q.grad, atol=1e-7, rtol=1e-5)


def test_only_the_first_replica_writes_the_buffers(images: torch.Tensor):
    module = network(norm=True)
    norm = module[1]  # type: ignore[index]
    parallel = ThreadDataParallel(module, 2)
    parallel(images)
    parallel.close()

    first_part = network(norm=True)
    first_part(images[:5])
    assert int(norm.num_batches_tracked) == 1
    torch.testing.assert_close(norm.running_mean, first_part[1].running_mean)  # type: ignore[index]


def test_a_shared_parameter_stays_shared_and_an_unused_one_gets_zeros_or_none(images: torch.Tensor):
    layer = nn.Linear(48, 48)
    module = nn.Sequential(nn.Flatten(), layer, layer)
    a, b = replicate(module, 2)
    assert a[1].weight is a[2].weight and a[1].weight is not b[1].weight  # type: ignore[index]
    a(images).sum().backward()
    assert layer.weight.grad is not None


def test_without_gradients_nothing_is_recorded(images: torch.Tensor):
    parallel = ThreadDataParallel(network(norm=False), 2)
    with torch.no_grad():
        out = parallel(images)
    parallel.close()
    assert not out.requires_grad and parallel.times_s["apply"] > 0


def test_a_batch_smaller_than_the_number_of_replicas_works(images: torch.Tensor):
    parallel = ThreadDataParallel(network(norm=False), 4)
    out = parallel(images[:2])
    parallel.close()
    assert out.shape == (2, 5)


class InOrder(nn.Module):
    """Let the parts of the batch reach the dropout one after another, in the order of `first`."""

    def __init__(self, first: float) -> None:
        super().__init__()
        self.first, self.passed = first, threading.Event()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x[0, 0]) != self.first:
            assert self.passed.wait(60)
        out = self.drop(x)
        self.passed.set()
        return out


def test_dropout_does_not_depend_on_which_thread_is_first() -> None:
    batch = torch.tensor([1.0, 2.0])[:, None].expand(2, 256).contiguous()
    outputs = []
    for first in (1.0, 2.0):
        torch.manual_seed(5)
        model = ThreadDataParallel(InOrder(first), 2)
        outputs.append(model(batch))
        model.close()
    assert torch.equal(outputs[0], outputs[1])
    kept = (outputs[0] != 0).float().mean(1)
    assert not torch.equal(outputs[0][0] != 0, outputs[0][1] != 0), "each part has its own mask"
    assert all(0.3 < float(share) < 0.7 for share in kept) and set(outputs[0][0].tolist()) == {0.0, 2.0}
