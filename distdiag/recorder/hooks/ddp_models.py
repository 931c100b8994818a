"""The modules that are wrapped in DDP: the hooks' state for each, and its records before and after DDP's constructor."""

from __future__ import annotations

import ctypes
import json
import weakref
import zlib
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from distdiag.page.layout import MODELS, ModelSlot, Page
from distdiag.recorder.fast.accounts import LastCallSite, ModelWords
from distdiag.recorder.hooks.ddp_times import DdpTimes
from distdiag.recorder.hooks.device_clock import cuda_index
from distdiag.recorder.hooks.unused_parameters import NAMES_KEPT, FirstForward
from distdiag.recorder.state import guarded
from distdiag.recorder.unseen import unseen

if TYPE_CHECKING:
    from distdiag.recorder import state
    from distdiag.recorder.hooks.step_accounting import StepAccounting


class Model(ModelWords):
    """One DDP-wrapped module in this process."""

    def __init__(self, ddp: Any, slot: ModelSlot, recorder: state.Recorder) -> None:
        super().__init__()
        page = recorder.page
        self.ref = weakref.ref(ddp, self._gone)
        # its parameters and the owners of its buffers, once requested; freed with the module
        self.named: list[tuple[str, Any]] | None = None
        self.frozen: list[tuple[str, Any]] = []  # parameters that DDP left out, until one of them is trained
        self.frozen_next = self.frozen_forwards = 0
        self.buffer_places: list[tuple[Any, str]] | None = None
        self.slot = slot
        self.pg = ddp.process_group
        self.group_at = -1  # slot of its process group; -1: not registered
        self.forwards_at, self.synced_at = page.word_of(slot, "forwards"), page.word_of(slot, "synced_backwards")
        self.forward = LastCallSite(recorder)
        self.forward_site, self.forward_count = 0, -1  # site of the last forward, and the index of its count
        self.next_check = 0  # the step at which to check gradients again
        self.hook: Any = None
        self.first_forward: FirstForward | None = None
        self.unused_texts: set[str] = set()
        self.never: set[str] | None = None  # parameters without gradient at every check; None before the first check
        self.times: DdpTimes | None = None  # what its reducer measures

    @property
    def next_event(self) -> int:
        """Return the next step before whose optimizer there is something to read or to check."""
        return self.next_check if self.times is None else min(self.next_check, self.times.next_read)

    def trained(self) -> list[tuple[str, Any]]:
        """Return the parameters in DDP's order, without those that it ignores; cached."""
        ddp = self.ref()
        if ddp is None:
            return []
        if self.named is None:
            ignored = getattr(ddp, "parameters_to_ignore", None) or ()
            named = ddp.module.named_parameters()
            self.named = [(n, p) for n, p in named if p.requires_grad and n not in ignored]
        return self.named

    def _gone(self, _: object) -> None:
        self.named = self.buffer_places = None
        self.frozen = []


@guarded
def constructing(accounting: StepAccounting, module: Any, kwargs: dict, caller: FrameType) -> ModelSlot | None:
    """Record what is about to be wrapped, before DDP's constructor communicates."""
    site = accounting.recorder.user_site(caller)
    n = accounting.header.n_models
    if n >= MODELS:
        accounting.header.dropped += 1
        return None
    slot = accounting.page.page.models[n]
    slot.name = accounting.page.text(type(module).__name__)
    slot.site = site
    with unseen():
        shapes = [(name, tuple(p.shape)) for name, p in module.named_parameters() if p.requires_grad]
        slot.parameter_elements = sum(p.numel() for p in module.parameters() if p.requires_grad)
        frozen = [(name, p.numel()) for name, p in module.named_parameters() if not p.requires_grad]
    slot.parameters = len(shapes)
    slot.frozen = len(frozen)
    slot.frozen_names = accounting.page.text(json.dumps(frozen[:NAMES_KEPT])) if frozen else 0
    slot.shape_hash = hash_text(repr([s for _, s in shapes]))
    slot.group = 0xFFFFFFFF
    slot.find_unused = -1
    accounting.header.n_models = n + 1
    pg = kwargs.get("process_group") or torch.distributed.group.WORLD
    if pg is not None:
        accounting.collectives.mark_site("DDP", site)
        accounting.collectives.block_ddp(pg, site)
    return slot


@guarded
def constructed(accounting: StepAccounting, ddp: Any, slot: ModelSlot, by_library: bool) -> None:
    m = Model(ddp, slot, accounting.recorder)
    g = accounting.collectives.group(m.pg)
    if g is not None:
        slot.group = m.group_at = g.slot_index
    slot.find_unused = (2 if by_library else 1) if ddp.find_unused_parameters else 0
    slot.static_graph = int(bool(getattr(ddp, "static_graph", False)))
    slot.broadcast_buffers = int(bool(ddp.broadcast_buffers))
    accounting.ledger.models[id(ddp)] = m
    ignored = getattr(ddp, "parameters_to_ignore", None) or ()
    with unseen():
        m.trained()  # now: DDP numbers the parameters that require a gradient while it is built
        m.frozen = [(n, p) for n, p in ddp.module.named_parameters() if not p.requires_grad and n not in ignored]
        if accounting.recorder.device is None:
            accounting.recorder.device = cuda_index(ddp.module.parameters())
        first = next((p for p in ddp.module.parameters() if p.requires_grad and p.is_leaf), None)
        if first is not None:
            m.hook = accounting.watch_last_gradient(first)
            accounting.checks.nonfinite.local_gradients = True
    accounting.ledger.next_event = 0
    m.times = DdpTimes(ddp, index_of(accounting.page.page, slot), slot, m.synced_at)


def index_of(page: Page, slot: ModelSlot) -> int:
    """Return the index of a model's slot in the page."""
    return (ctypes.addressof(slot) - ctypes.addressof(page.models)) // ctypes.sizeof(ModelSlot)


def hash_text(s: str) -> int:
    raw = s.encode()
    return zlib.crc32(raw) << 32 | zlib.adler32(raw)
