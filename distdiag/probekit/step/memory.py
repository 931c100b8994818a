"""Memory of one rank: by formula, and measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from distdiag.probekit.command.paper import PerParameter
from distdiag.probekit.step.possible import STAGED

FLOAT32_SGD = PerParameter(4, 4, 4)  # of the measured comparison: SGD with momentum


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes that stay in memory from step to step, on one rank.

    Args:
        gradients: Between backward and the optimizer step.
    """

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def expected_state(
    strategy: str, ranks: int, parameters: int, largest_stage: int | None = None, per: PerParameter = FLOAT32_SGD
) -> StateBytes | None:
    """Return the state by formula: bytes for each parameter that the rank keeps.

    fsdp divides parameters, gradients and optimizer state by the number of ranks. With stages a rank has those of its
    layers. All others keep everything. The buckets of DDP, the copies of DataParallel, gathered layers of FSDP and
    activations are not in it.

    Args:
        parameters: Of the whole model.
        largest_stage: Parameters of the largest stage; None (unknown): no formula for stages.
    """
    own = float(parameters)
    if strategy == "fsdp":
        own = parameters / ranks
    elif strategy in STAGED:
        if largest_stage is None:
            return None
        own = float(largest_stage)
    return StateBytes(*(round(own * size) for size in (per.weights, per.gradients, per.optimizer)))


def measured_state(parameters: Iterable[nn.Parameter], gradients: int, optimizer: torch.optim.Optimizer) -> StateBytes:
    """Return the bytes of this rank's tensors; for a sharded tensor, of its shard."""
    own = list(parameters)
    slots = [v for p in own for v in optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
    return StateBytes(sum(map(local_bytes, own)), gradients, sum(map(local_bytes, slots)))


def gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes of the gradients that exist now."""
    return sum(local_bytes(p.grad) for p in parameters if p.grad is not None)


def local_bytes(tensor: torch.Tensor) -> int:
    """Return the tensor's bytes on this rank; for a sharded tensor, of its shard."""
    return getattr(tensor, "_local_tensor", tensor).nbytes


class HostPeak:
    """The largest resident memory of this process since `reset`, above its value at creation.

    Only meaningful in a process that has not trained before: freed memory may stay with the process.
    """

    def __init__(self) -> None:
        self._before = _status("VmRSS")
        self._counts = False

    def reset(self) -> None:
        """Forget earlier peaks (`proc(5)`, clear_refs); without the permission nothing is measured."""
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
            self._counts = True

    def bytes(self) -> int | None:
        peak = _status("VmHWM")
        if not self._counts or peak is None or self._before is None:
            return None
        return max(0, peak - self._before)


def _status(name: str) -> int | None:
    """Return a size of /proc/self/status in bytes."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
