"""Reads a few elements of the job's tensors at low cost, and writes the results into the page as samples.

It never waits for a GPU: values are copied to pinned memory and read once the copy is done.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from distdiag.recorder import state
from distdiag.recorder.fast.accounts import GradientWords, Ledger
from distdiag.recorder.unseen import has_memory

_FLOAT32, PLAIN = torch.float32, (torch.Tensor, torch.nn.Parameter)


def capturing() -> bool:
    """True during a CUDA graph capture: an operation of ours would become part of the graph, or break the capture."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def gradient(p: Any) -> Any:
    """Return the gradient of a tensor, None if it has none: torch warns where that of a computed tensor is read, as clones of MAML are."""
    return p.grad if p.is_leaf or p.retains_grad else None


def sum_of(t: torch.Tensor) -> float:
    """Return the sum of all elements, and of both their parts if they are complex: not finite if one of them is not."""
    found = t.detach().sum().item()  # a gradient may have a graph
    return found.real + found.imag


def own_part(g: Any) -> Any:
    """Return this rank's part of a sharded gradient (DTensor), or another gradient itself; None if it has no readable memory."""
    part = getattr(g, "_local_tensor", g)
    return part if has_memory(type(part)) else None


def sampled(t: torch.Tensor, most: int) -> list[float] | None:
    """Return up to `most` elements of `t`, evenly spread in memory; None unless it is a plain, dense float32 tensor on the CPU.

    Reads memory directly: one torch operator takes longer than reading all of them.
    """
    if not t.is_cpu or t.dtype is not _FLOAT32 or type(t) not in PLAIN:
        return None
    if not (t.is_contiguous() or (t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last))):
        return None
    n, at = t.numel(), t.data_ptr()
    if not n or not at:
        return None
    return (ctypes.c_float * n).from_address(at)[:: max(1, n // most)][:most]


class Gradients(GradientWords):
    """Reads a few elements of a parameter's gradients in as few calls as possible.

    A gradient has the memory layout of its parameter (autograd keeps it so), and the next one typically reuses the address of the
    last. Asking torch for this each time takes longer than everything else the recorder does in a step: caches are cold here.
    """

    def __init__(self, p: torch.Tensor) -> None:
        super().__init__()
        self.n = n = p.numel()
        self.stride = 1 if n <= 64 else n // 16 if n < 100_000 else n // 64
        self._type = ctypes.c_float * n if sampled(p.detach(), 1) is not None else None
        self.plain = self._type is not None and p.is_contiguous()
        self._memory: tuple[int, Any] = (0, ())  # address, and the memory there

    def sum(self, g: torch.Tensor) -> float:
        """Return the sum of some elements: not finite if one of them is not; 0 if they cannot be read."""
        if not g.is_cpu or g.layout is not torch.strided:
            return 0.0
        if self._type is None or g.dtype is not _FLOAT32:
            n = g.numel()
            few = g if n <= 4096 else (g.view(-1) if g.is_contiguous() else g[0].reshape(-1))[:: n // 64]
            return sum_of(few)
        at = g.data_ptr()
        if not at:
            return 0.0
        if at != self._memory[0]:
            self._memory = at, memoryview(self._type.from_address(at)).cast("B").cast("f")
        memory, total = self._memory[1], 0.0
        for i in range(0, self.n, self.stride):
            total += memory[i]
        return total


class Samples:
    """Writes samples into the page. Values on a device are written once their copy is on the host."""

    def __init__(self, recorder: state.Recorder, ledger: Ledger) -> None:
        self.page, self.write, self.user_site = recorder.page, recorder.page.write_sample, recorder.user_site
        self._later = ledger.later  # (event, copy on the host, callback that gets the copy)

    def when_copied(self, t: torch.Tensor, then: Any) -> None:
        if len(self._later) > 16 or t.device.type != "cuda":
            return
        # explicit: the job may have another default device
        host = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True)
        with torch.cuda.device(t.device):
            host.copy_(t, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._later.append((event, host, then))

    def poll(self) -> None:
        """Read the copies that have arrived from the device; never waits."""
        while self._later and not capturing() and self._later[0][0].query():
            _, host, then = self._later.pop(0)
            then(host)
