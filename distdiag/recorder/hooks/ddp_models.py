"""Records the modules that are wrapped in DDP, before and after DDP's constructor."""

from __future__ import annotations

import ctypes
import json
import zlib
from collections.abc import Collection, Iterable
from types import FrameType
from typing import Any

import torch

from distdiag.page.layout import MODELS, ModelSlot, word
from distdiag.recorder.frames import USER, frames_of, kind_of
from distdiag.recorder.hooks.ddp_times import DdpTimes
from distdiag.recorder.hooks.device_clock import cuda_index
from distdiag.recorder.hooks.lost_hooks import hooked
from distdiag.recorder.hooks.step_accounting import StepAccounting
from distdiag.recorder.hooks.unused_parameters import NAMES_KEPT
from distdiag.recorder.hooks.wrapped_model import Model
from distdiag.recorder.state import guarded
from distdiag.recorder.unseen import attributes, named_tensors, parameters, unseen
from distdiag.unpatched import get_ident


@guarded
def constructing(accounting: StepAccounting, module: Any, kwargs: dict, caller: FrameType) -> ModelSlot | None:
    """Record what is about to be wrapped, before DDP's constructor communicates."""
    _follow_this_thread(accounting)
    site = accounting.recorder.user_site(caller)
    n = _place(accounting)
    if n is None:
        accounting.header.dropped += 1
        return None
    slot = accounting.page.page.models[n % MODELS]
    slot.name = accounting.page.text(type(module).__name__)
    slot.site = site
    with unseen():
        named = [*named_tensors(module)]
        shapes = [(name, tuple(p.shape)) for name, p in named if p.requires_grad]
        slot.parameter_elements = sum(p.numel() for _, p in named if p.requires_grad)
        frozen = [(name, p.numel()) for name, p in named if not p.requires_grad]
        ignored = attributes(module).get("_ddp_params_and_buffers_to_ignore") or ()
        slot.parameter_order = _order(named, ignored)
        slot.buffer_order = _order(named_tensors(module, "_buffers"), ignored)
    slot.parameters, slot.frozen = len(shapes), len(frozen)
    slot.frozen_names = accounting.page.text(json.dumps(frozen[:NAMES_KEPT])) if frozen else 0
    raw = repr([s for _, s in shapes]).encode()
    slot.shape_hash = zlib.crc32(raw) << 32 | zlib.adler32(raw)
    slot.group = 0xFFFFFFFF
    slot.find_unused = -1
    accounting.header.n_models = n + 1
    pg = kwargs.get("process_group") or torch.distributed.group.WORLD
    if pg is not None:
        accounting.collectives.mark_site("DDP", site)
        accounting.collectives.block_ddp(pg, site)
    return slot


def _order(named: Iterable[tuple[str, Any]], ignored: Collection[str]) -> int:
    """Return `ModelSlot.parameter_order` of some tensors; 0 without any."""
    texts = [f"{name} {tuple(x.shape)}" for name, x in named if name not in ignored]
    return zlib.crc32("\n".join(sorted(texts)).encode()) << 32 | zlib.crc32("\n".join(texts).encode())


def _place(accounting: StepAccounting) -> int | None:
    """Return the number of the next module, and clear its slot, which a module that is gone may have had; None if all live."""
    page, models = accounting.page, accounting.ledger.models
    of_slot = {m.synced_at: (key, m) for key, m in models.items()}
    for n in range(accounting.header.n_models, accounting.header.n_models + MODELS):
        slot = page.page.models[n % MODELS]
        key, before = of_slot.get(page.word_of(slot, "synced_backwards"), (0, None))
        if before is None or before.ref() is None:
            models.pop(key, None)
            ctypes.memset(ctypes.addressof(slot), 0, ctypes.sizeof(slot))
            return n
    return None


def _follow_this_thread(accounting: StepAccounting) -> None:
    """Record this thread as the main one, if that has no line of the user's and has not trained: a worker of Ray Train runs tasks in
    its main thread, and the training in another.
    """
    recorder, ledger = accounting.recorder, accounting.ledger
    if get_ident() == recorder.main_thread or ledger.models or accounting.page.words[word("step")]:
        return
    if not any(kind_of(f.f_code) == USER for f in frames_of(recorder.main_thread)):
        recorder.main_thread = ledger.main_thread = get_ident()


@guarded
def constructed(accounting: StepAccounting, ddp: Any, slot: ModelSlot, by_library: bool) -> None:
    m = Model(ddp, slot, accounting.recorder)
    g = accounting.collectives.group(m.pg)
    if g is not None:
        slot.group = m.group_at = g.slot_index
        if not accounting.ledger.models and len(g.members) == accounting.header.world_size > 1:
            accounting.begin_again()
    slot.find_unused = (2 if by_library else 1) if ddp.find_unused_parameters else 0
    slot.static_graph = int(bool(getattr(ddp, "static_graph", False)))
    slot.broadcast_buffers = int(bool(ddp.broadcast_buffers))
    accounting.ledger.models[id(ddp)] = m
    ignored = getattr(ddp, "parameters_to_ignore", None) or ()
    with unseen():
        m.trained()  # now: DDP numbers the parameters that require a gradient while it is built
        m.built_with = frozenset(map(id, parameters(ddp.module)))
        m.frozen = [(n, p) for n, p in named_tensors(ddp.module) if not p.requires_grad and n not in ignored]
        m.hooked = hooked(ddp, m.trained())
        if accounting.recorder.device is None:
            accounting.recorder.device = cuda_index(parameters(ddp.module))
        first = next((p for p in parameters(ddp.module) if p.requires_grad and p.is_leaf), None)
        if first is not None:
            accounting.watch_last_gradient(first)
            accounting.checks.nonfinite.local_gradients = True
    accounting.ledger.next_event = 0
    at = ctypes.addressof(slot) - ctypes.addressof(accounting.page.page.models)
    m.times = DdpTimes(ddp, at // ctypes.sizeof(ModelSlot), slot, m.synced_at)
