"""Memory of one rank, by formula and measured: state, activations, the peak of the process.

Activations are what autograd saves for backward. Formula and measurement count the same: the memory of all tensors that
autograd has saved and not released yet, at their maximum; each piece of memory once, without parameters, buffers and the
batch itself. By formula, the forward runs on the meta device, where tensors have shapes and no memory. What a kernel
allocates and frees within one operation is in neither.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from distdiag.probekit.command.paper import PerParameter
from distdiag.probekit.step.possible import STAGED, micro_batches
from distdiag.train.strategies.split import Cut, Stage

FLOAT32_SGD = PerParameter(4, 4, 4)  # of the measured comparison: SGD with momentum
_SHARES_BATCH = ("ddp", "fsdp")  # each rank has a part of it


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes that stay in memory from step to step, on one rank; gradients from backward to the optimizer step."""

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
    layers: None if the parameters of the largest stage are not known. All others keep everything. The buckets of DDP,
    the copies of DataParallel, gathered layers of FSDP and activations are not in it.
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


class SavedBytes:
    """Bytes that autograd keeps for backward between `counting`'s begin and end, in the thread that opens it."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._users: dict[int, int] = {}  # by address of the storage

    @contextlib.contextmanager
    def counting(self, module: nn.Module, *batch: torch.Tensor) -> Iterator[None]:
        """Count what is saved within the context, without the parameters and buffers that `module` has at that time.

        Images and labels (`batch`) are not counted either. What a stage receives from another is.
        """
        given = {t.untyped_storage()._cdata for t in batch}

        def pack(tensor: torch.Tensor) -> _Saved:
            kept = [*module.parameters(), *module.buffers()]
            own = {getattr(t, "_local_tensor", t).untyped_storage()._cdata for t in kept}
            storage = tensor.untyped_storage()._cdata
            return _Saved(self, tensor, storage not in own and storage not in given)

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            yield

    def add(self, storage: int, size: int) -> None:
        users = self._users.get(storage, 0)
        self._users[storage] = users + 1
        if not users:
            self.now += size
            self.peak = max(self.peak, self.now)

    def release(self, storage: int, size: int) -> None:
        self._users[storage] -= 1
        if not self._users[storage]:
            del self._users[storage]
            self.now -= size


class _Saved:
    """A saved tensor; autograd drops it when its operation's backward has run."""

    def __init__(self, count: SavedBytes, tensor: torch.Tensor, counted: bool) -> None:
        self.tensor, self._count = tensor, count if counted else None
        self._storage, self._bytes = tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()
        if self._count is not None:
            self._count.add(self._storage, self._bytes)

    def __del__(self) -> None:
        if self._count is not None:
            self._count.release(self._storage, self._bytes)


def saved_by_forward(
    module: nn.Module, samples: int, shape: tuple[int, ...], first: bool, last: bool, dtype: torch.dtype = torch.float32
) -> int:
    """Return the bytes that one forward of `module` (on the meta device) saves, for `samples` of this `shape`.

    If it is `first`, its inputs are the batch, which is not counted; if `last`, its outputs go into a cross entropy.
    """
    count = SavedBytes()
    inputs = torch.empty(samples, *shape, device="meta", dtype=dtype)
    module.train()
    labels = torch.zeros(samples, dtype=torch.long, device="meta")
    with count.counting(module, labels, *([inputs] if first else [])):
        outputs = module(inputs)
        if last:
            F.cross_entropy(outputs, labels)
    return count.peak


def expected_activations(
    strategy: str, ranks: int, network: nn.Module, batch: int, shape: tuple[int, ...], stages: Cut | None = None,
    dtype: torch.dtype = torch.float32,
) -> int:  # fmt: skip
    """Return the activations by formula, on the rank that has most; all modules are on the meta device.

    ddp and fsdp: of the rank's part of the batch. model: of the whole batch in the rank's stage. pipeline (1F1B): stage
    i of n holds n - i micro-batches at once. All others: of the whole batch.
    """
    if stages is None:
        samples = -(-batch // ranks) if strategy in _SHARES_BATCH else batch
        return saved_by_forward(network, samples, shape, True, True, dtype)
    parts = micro_batches(ranks) if strategy == "pipeline" else 1
    count = len(stages.stages)
    return max(
        min(parts, count - i)
        * saved_by_forward(Stage(pieces), -(-batch // parts), stages.shapes[i], i == 0, i == count - 1, dtype)
        for i, pieces in enumerate(stages.stages)
    )


def on_meta(network: nn.Module) -> nn.Module:
    """Return a copy of the model without memory; the copy is never in memory either."""
    memo: dict[int, object] = {}
    for p in network.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    return copy.deepcopy(network, memo).to("meta")
