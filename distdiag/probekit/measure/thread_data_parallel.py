"""DataParallel on CPU threads, where torch's own silently passes its input to the one module.

It does what `nn.DataParallel` does on GPUs: scatter the batch, replicate the module, apply the replicas in threads,
gather the outputs; backward adds the replicas' gradients on the root. It shows the semantics and the cost of
replicating, but not a GPU's timing: torch runs the backward of CPU tensors on one thread.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import nn


def replicate(module: nn.Module, replicas: int) -> list[nn.Module]:
    """Return copies of `module`; autograd adds their gradients up in the module's own parameters.

    As in torch, the first replica shares the module's buffers, so batch norm's running statistics come from the first
    part of the batch; the others get copies, which are lost.
    """
    modules = list(module.modules())
    position = {m: i for i, m in enumerate(modules)}
    parameters = list(module.parameters())
    index = {p: i for i, p in enumerate(parameters)}
    copies = [p.clone() for _ in range(replicas) for p in parameters]
    roots: list[nn.Module] = []
    for r in range(replicas):
        # A shallow copy without parameters, children and buffers; the hooks stay.
        copied = [m._replicate_for_data_parallel() for m in modules]
        for original, copy in zip(modules, copied, strict=True):
            for name, child in original._modules.items():
                copy._modules[name] = None if child is None else copied[position[child]]
            for name, p in original._parameters.items():
                if p is None:
                    copy._parameters[name] = None
                else:
                    setattr(copy, name, copies[r * len(parameters) + index[p]])
            for name, b in original._buffers.items():
                copy._buffers[name] = b if r == 0 or b is None else b.clone()
        roots.append(copied[0])
    return roots


def _draw_apart(copies: Sequence[nn.Module]) -> None:
    """Give the dropouts of each replica a generator, seeded from the process's.

    The CPU has one generator for all threads: the order of the replicas would depend on the scheduler, and training would
    not be reproducible. On GPUs each device has a generator.
    """
    for copy in copies:
        active = [m for m in copy.modules() if type(m) is nn.Dropout and m.training and 0 < m.p < 1]
        if active:
            generator = torch.Generator()
            generator.manual_seed(int(torch.randint(2**62, ()).item()))
            for module in active:
                module.forward = partial(_dropout, module.p, generator)  # type: ignore[method-assign]


def _dropout(p: float, generator: torch.Generator, x: torch.Tensor) -> torch.Tensor:
    """Zero elements with probability `p`, and scale the others up, as nn.Dropout does."""
    return x * torch.empty_like(x).bernoulli_(1 - p, generator=generator).div_(1 - p)


class ThreadDataParallel(nn.Module):
    """`module` (it takes and returns one tensor) applied to `replicas` parts of the batch by as many threads.

    `times_s` has the seconds of the four parts of the last forward.
    """

    def __init__(self, module: nn.Module, replicas: int) -> None:
        super().__init__()
        self.module = module
        self.replicas = replicas
        self.times_s: dict[str, float] = {}
        self._threads = ThreadPoolExecutor(replicas, thread_name_prefix="replica")

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        parts = [part.clone() for part in batch.chunk(self.replicas)]
        scattered = time.perf_counter()
        copies = replicate(self.module, len(parts))
        _draw_apart(copies)
        replicated = time.perf_counter()
        # new threads start with torch's defaults
        grad = torch.is_grad_enabled()
        amp, amp_type = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

        def apply(i: int) -> torch.Tensor:
            with torch.set_grad_enabled(grad), torch.autocast("cpu", amp_type, enabled=amp):
                return copies[i](parts[i])

        outputs = list(self._threads.map(apply, range(len(parts))))
        applied = time.perf_counter()
        output = torch.cat(outputs)
        end = time.perf_counter()
        moments = itertools.pairwise((start, scattered, replicated, applied, end))
        self.times_s = {
            n: b - a for n, (a, b) in zip(("scatter", "replicate", "apply", "gather"), moments, strict=True)
        }
        return output

    def close(self) -> None:
        self._threads.shutdown()
