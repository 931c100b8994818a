"""Measure the time that FSDP's collectives block the host: exposed communication, on a backend that blocks."""

from __future__ import annotations

import time
from typing import Any

from torch import nn


class BlockedTime:
    """Seconds in which this rank was inside FSDP's all_gathers and reduce_scatters since the last `take`.

    Attributes:
        known: False once a collective returned before it was complete: its wait is elsewhere.
    """

    def __init__(self) -> None:
        self.known = True
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        self._seconds += seconds

    def take(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def watch(network: nn.Module) -> BlockedTime | None:
    """Time the collectives of all FSDP modules in `network`; None if this torch has no hook for that."""
    try:
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

        gather, scatter = collectives.DefaultAllGather, collectives.DefaultReduceScatter
        blocked = BlockedTime()
        for module in network.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_timed(gather, blocked))
                module.set_custom_reduce_scatter(_timed(scatter, blocked))
    except (ImportError, AttributeError):
        return None
    return blocked


def _timed(kind: Any, blocked: BlockedTime) -> Any:
    class Timed(kind):  # type: ignore[misc]
        def __call__(self, *args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            work = super().__call__(*args, **options)
            blocked.add(time.perf_counter() - began)
            blocked.known = blocked.known and work is None
            return work

    return Timed()
