"""Activations: what autograd saves for backward, by formula and measured.

Both count the same: the memory of all tensors that autograd has saved and not released yet, at their maximum; each
piece of memory once, without parameters, buffers and the batch itself. By formula, the forward runs on the meta device, where tensors have
shapes and no memory. What a kernel allocates and frees within one operation is in neither.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from distdiag.probekit.step.possible import micro_batches
from distdiag.train.strategies.split import Cut, Stage

_SHARED = ("ddp", "fsdp")  # each rank has a part of the batch


class SavedBytes:
    """Bytes that autograd keeps for backward between `counting`'s begin and end, in the thread that opens it."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._users: dict[int, int] = {}  # by address of the storage

    @contextmanager
    def counting(self, module: nn.Module, *batch: torch.Tensor) -> Iterator[None]:
        """Count what is saved within the context, without the parameters and buffers that `module` has at that time.

        Args:
            batch: Images and labels, which are not counted either. What a stage receives from another is.
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
    """Return the bytes that one forward of `module` (on the meta device) saves.

    Args:
        samples: In the batch.
        shape: Of one sample.
        first: The inputs are the batch, which is not counted.
        last: The module's outputs go into a cross entropy.
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
    """Return the activations by formula, on the rank that has most.

    ddp and fsdp: of the rank's part of the batch. model: of the whole batch in the rank's stage. pipeline (1F1B): stage i
    of n holds n - i micro-batches at once. All others: of the whole batch.

    Args:
        network: On the meta device, as are the modules of `stages`.
        stages: With model and pipeline; stage i is on rank i.
    """
    if stages is None:
        samples = -(-batch // ranks) if strategy in _SHARED else batch
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
