"""Installs the hooks: wraps torch's DataLoader, DDP, autograd and optimizers.

Methods of `torch.Tensor` are not wrapped on any device, because compiled code calls them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.utils.data
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as loader_module
from torch.utils.data import distributed as distributed_module
from torch.utils.data import sampler as sampler_module

from distdiag.recorder import state
from distdiag.recorder.frames import PACKAGE, kind_of
from distdiag.recorder.hooks.bucket_rebuilds import BucketRebuilds
from distdiag.recorder.hooks.collectives import Collectives, note_caught
from distdiag.recorder.hooks.ddp_models import constructed, constructing
from distdiag.recorder.hooks.step import autograd_backward, ddp_forward, forward_waits, loader_next
from distdiag.recorder.hooks.step_accounting import StepAccounting
from distdiag.recorder.hooks.wrapping import around, settle, wraps
from distdiag.recorder.state import guarded, now_ns


def install(recorder: state.Recorder, collectives: Collectives) -> StepAccounting:
    """Wrap what a training step calls; called once per process."""
    accounting = StepAccounting(recorder, collectives)
    torch.autograd.backward = autograd_backward(accounting, torch.autograd.backward)
    register_optimizer_step_pre_hook(_in_eager_code(accounting.optimizer_begins))
    register_optimizer_step_post_hook(_in_eager_code(accounting.optimizer_ends))
    recorder.part("DDP", _wrap_ddp, accounting)
    recorder.part("loaders", _wrap_loader, accounting)
    recorder.part("uneven inputs", _wrap_join, accounting)
    return accounting


def _in_eager_code(hook: Any) -> Any:
    """Return a hook of every optimizer's step; a compiled step does not contain its call."""

    @wraps(_not_traced, traced=_not_traced)
    def call(optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            hook(optimizer, args, kwargs)
        except BaseException as e:
            e.__traceback__ = e.__traceback__.tb_next  # type: ignore[union-attr]
            settle(e)
            raise

    return call


def _not_traced(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Traced by torch.compile in place of a hook: does nothing."""


def _wrap_ddp(accounting: StepAccounting) -> None:
    rebuilds, searches_timed = BucketRebuilds(accounting), False

    @guarded
    def begins(ddp: Any, module: Any, *_args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        by_library = kind_of(sys._getframe(3).f_code) == PACKAGE  # the caller of DDP's constructor
        return ddp, constructing(accounting, module, kwargs, sys._getframe(1)), by_library

    @guarded
    def ends(began: tuple[Any, Any, bool], _out: None, error: BaseException | None) -> None:
        nonlocal searches_timed
        accounting.collectives.unblock()
        if error is not None:
            note_caught(accounting.recorder, error)
        elif began is not None and began[1] is not None:
            constructed(accounting, *began)
            rebuilds.watch(began[0])
            if began[1].find_unused > 0 and not searches_timed:
                searches_timed = True
                _time_searches(accounting)

    DDP.__init__ = around(DDP.__init__, begins, ends)  # type: ignore[method-assign]
    DDP.forward = ddp_forward(accounting, DDP.forward)  # type: ignore[method-assign]
    original_sync = getattr(DDP, "_sync_buffers", None)
    if original_sync is not None:
        DDP._sync_buffers = around(original_sync, *forward_waits(accounting))  # type: ignore[method-assign]


@guarded
def _time_searches(accounting: StepAccounting) -> None:
    """Time DDP's search for unused parameters. Hooked when a model asks for the search: every model's step calls this method."""

    def begins(_reducer: Any, tensors: Any) -> int:
        return now_ns() if tensors else 0  # only find_unused_parameters passes tensors to search from

    @guarded
    def ends(began: int, _out: None, error: BaseException | None) -> None:
        ns = now_ns() - began
        for m in accounting.ledger.models.values() if began and error is None else ():
            if m.slot.find_unused > 0:
                m.slot.search_ns += ns
                m.slot.searches += 1

    reducer = c10d.Reducer
    reducer.prepare_for_backward = around(reducer.prepare_for_backward, begins, ends, c_method=True)  # type: ignore[method-assign]


def _wrap_loader(accounting: StepAccounting) -> None:
    def starts(args: tuple[Any], iterator: Any, error: BaseException | None) -> None:
        if error is None:
            accounting.loaders.starts(args[0], iterator, sys._getframe(1))

    for module in (sampler_module, distributed_module):  # their name for Python's function
        module.len = around(len, ends=accounting.loaders.asked)  # type: ignore[attr-defined]
    base = loader_module._BaseDataLoaderIter
    DataLoader.__iter__ = around(DataLoader.__iter__, ends=starts)
    DataLoader.__len__ = around(DataLoader.__len__, ends=accounting.loaders.said)  # type: ignore[method-assign]
    base.__next__ = loader_next(accounting, base.__next__)  # type: ignore[method-assign]


def _wrap_join(accounting: StepAccounting) -> None:
    """Record for the rest of the job that torch's Join was used: it makes uneven inputs legal."""
    from torch.distributed.algorithms.join import Join

    Join.__enter__ = around(Join.__enter__, lambda _join: setattr(accounting.header, "in_join", 1))
