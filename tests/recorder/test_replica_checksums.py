"""Checksums of replicas are compared only for the same parameters of a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from distdiag.page.layout import SampleKind
from distdiag.recorder.hooks.replica_checksums import ReplicaChecksums


class Written:
    """The samples that one rank writes."""

    def __init__(self) -> None:
        self.of: dict[SampleKind, tuple[float, int]] = {}

    def write(self, kind: SampleKind, _step: int, value: float, key: int = 0) -> None:
        self.of[kind] = value, key


def parameters_of_rank(layers: slice) -> tuple[float, int]:
    """Return (checksum, key) of a rank whose optimizer has these layers of a model that DDP wraps."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    named = list(net.named_parameters())
    model = SimpleNamespace(
        trained=lambda: named, slot=SimpleNamespace(synced_backwards=3), buffer_places=[], ref=lambda: None
    )
    written: Any = Written()
    ledger: Any = SimpleNamespace(models={0: model}, averaged_by=None)
    ReplicaChecksums(ledger, written).after_optimizer(torch.optim.SGD(net[layers].parameters(), lr=0.1), 4)
    return written.of[SampleKind.PARAMETERS]


def test_the_shards_of_zero_are_not_compared_although_their_shapes_are_equal() -> None:
    first, second = parameters_of_rank(slice(0, 2)), parameters_of_rank(slice(2, 4))
    assert first[1] != second[1]


def test_equal_replicas_have_equal_keys() -> None:
    assert parameters_of_rank(slice(0, 4)) == parameters_of_rank(slice(0, 4))
