"""The hooks: where torch's DataLoader, DDP, autograd and optimizers tell the phases that something begins or ends."""

from __future__ import annotations

import sys
from threading import get_ident
from typing import Any

import torch
import torch.utils.data
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as loader_module

from distdiag.page.layout import Phase
from distdiag.recorder import state
from distdiag.recorder.hooks.collectives import Collectives, note_caught
from distdiag.recorder.hooks.ddp_models import constructed, constructing
from distdiag.recorder.hooks.step import autograd_backward, ddp_forward, ddp_sync_buffers, loader_next
from distdiag.recorder.hooks.step_accounting import Phases
from distdiag.recorder.state import guarded, now_ns


def install(r: state.Recorder, col: Collectives) -> Phases:
    """Hook torch's classes; called once per process."""
    ph = Phases(r, col)
    _wrap_ddp(ph)
    _wrap_backward(ph)
    _wrap_loader(ph)
    _wrap_join(ph)
    if torch.version.cuda is not None:
        _wrap_copies(ph)
    register_optimizer_step_pre_hook(ph.optimizer_begins)
    register_optimizer_step_post_hook(ph.optimizer_ends)
    return ph


def _wrap_ddp(ph: Phases) -> None:
    original_init, original_forward = DDP.__init__, DDP.forward

    def __init__(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        slot = constructing(ph, module, kwargs, sys._getframe(1))
        try:
            original_init(self, module, *args, **kwargs)
        except BaseException as e:
            note_caught(ph.r, e)
            raise
        finally:
            ph.col.unblock()
        if slot is not None:
            constructed(ph, self, slot, sys._getframe(1))
            if slot.find_unused > 0:
                _time_searches(ph)

    forward = ddp_forward(ph, original_forward)
    __init__.__doc__, forward.__doc__ = original_init.__doc__, original_forward.__doc__
    __init__.__wrapped__, forward.__wrapped__ = original_init, original_forward  # type: ignore[attr-defined]
    DDP.__init__, DDP.forward = __init__, forward  # type: ignore[method-assign]

    original_sync = getattr(DDP, "_sync_buffers", None)
    if original_sync is not None:
        DDP._sync_buffers = ddp_sync_buffers(ph, original_sync)  # type: ignore[method-assign]


@guarded
def _time_searches(ph: Phases) -> None:
    """How long DDP looks for unused parameters: hooked when a model asks for it, for it is called in every step of all."""
    reducer = c10d.Reducer
    original = reducer.prepare_for_backward
    if hasattr(original, "__wrapped__"):
        return

    def prepare_for_backward(self: Any, tensors: Any) -> None:
        if not tensors:  # only find_unused_parameters hands over tensors to search from
            return original(self, tensors)
        t = now_ns()
        original(self, tensors)
        _searched(ph, now_ns() - t)
        return None

    prepare_for_backward.__wrapped__ = original  # type: ignore[attr-defined]
    reducer.prepare_for_backward = prepare_for_backward  # type: ignore[method-assign]


@guarded
def _searched(ph: Phases, ns: int) -> None:
    for m in ph.ledger.models.values():
        if m.slot.find_unused > 0:
            m.slot.search_ns += ns
            m.slot.searches += 1


def _wrap_backward(ph: Phases) -> None:
    original = torch.autograd.backward

    backward = autograd_backward(ph, original)
    backward.__doc__ = original.__doc__
    backward.__wrapped__ = original  # type: ignore[attr-defined]
    torch.autograd.backward = backward


def _wrap_loader(ph: Phases) -> None:
    original_iter = DataLoader.__iter__
    base = loader_module._BaseDataLoaderIter

    def __iter__(self: Any) -> Any:
        it = original_iter(self)
        ph.loaders.starts(self, it, sys._getframe(1))
        return it

    DataLoader.__iter__ = __iter__  # type: ignore[method-assign]
    base.__next__ = loader_next(ph, base.__next__)  # type: ignore[method-assign]


def _wrap_copies(ph: Phases) -> None:
    """Copies from the host to a CUDA device, timed on the device; only in builds that know CUDA."""

    def wrap(name: str) -> None:
        original = getattr(torch.Tensor, name)

        def copy(self: Any, *args: Any, **kwargs: Any) -> Any:
            clock = ph.device
            if clock is None or self.device.type != "cpu" or get_ident() != ph.ledger.main_thread:
                return original(self, *args, **kwargs)
            clock.begin(Phase.H2D)
            out = original(self, *args, **kwargs)
            clock.end(Phase.H2D) if out.device.type == "cuda" else clock.drop(Phase.H2D)
            return out

        copy.__doc__ = original.__doc__
        setattr(torch.Tensor, name, copy)

    wrap("to")
    wrap("cuda")


def _wrap_join(ph: Phases) -> None:
    """torch's Join makes uneven inputs legal; that it was used is kept for the rest of the job."""
    from torch.distributed.algorithms.join import Join

    original = Join.__enter__

    def __enter__(self: Any) -> Any:
        ph.h.in_join = 1
        return original(self)

    Join.__enter__ = __enter__  # type: ignore[method-assign]
