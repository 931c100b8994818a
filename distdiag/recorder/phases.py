"""Phases of a training step, by hooks on the DataLoader, DDP, autograd and the optimizers.

A step is an optimizer step (of the optimizer that leads: the first seen to step), so gradient accumulation and `no_sync`
need nothing special: their micro-batches add up. Everything between the phases is "other": the user's own code.
The time a rank waits for others is taken off where it can be seen: inside `Work.wait`, in DDP's buffer broadcast, and in
backward from the moment its last gradient is ready to the end.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.utils.data
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as loader_module

from distdiag.recorder import state
from distdiag.recorder.checks import Checks
from distdiag.recorder.collectives import Collectives, note_caught
from distdiag.recorder.device_clock import DeviceClock
from distdiag.recorder.frames import user_frame
from distdiag.recorder.loaders import Loaders
from distdiag.recorder.page import MODELS, LifeWord, ModelSlot, Phase
from distdiag.recorder.state import guarded, now_ns


class _Closed(NamedTuple):
    """What the host knows of a step that has ended; times in ns."""

    step: int
    epoch: int
    start_ns: int
    end_ns: int
    data_ns: int
    forward_ns: int
    backward_ns: int
    optimizer_ns: int
    wait_ns: int
    ready_ns: int
    samples: int
    batch: int
    loss: float | None


class Phases:
    """Step accounting of the main thread."""

    def __init__(self, r: state.Recorder, col: Collectives) -> None:
        self.r, self.h, self.page, self.col = r, r.h, r.page, col
        self.loaders = Loaders(r)
        self.checks = Checks(r, col)
        self.models: dict[int, Model] = {}
        self.lead: Any = None
        self.lead_misses = 0
        self.step_start_ns = now_ns()
        self.data_ns = self.forward_ns = self.backward_ns = self.optimizer_ns = 0
        self.samples = self.batch = 0
        self.ready_ns = 0
        self.loss: float | None = None
        self.device: DeviceClock | None = None  # on CUDA, from the first forward on
        self._optimizer_start_ns = 0
        self._backward_site = 0
        self.idle = Phase.OTHER  # what the phase falls back to: OTHER, or what the job named

    # -- phase word ---------------------------------------------------------------------------------

    def enter(self, phase: Phase) -> int:
        """Set the phase shown; returns the time, for the caller's accounting."""
        t = now_ns()
        self.h.phase = phase
        self.h.phase_since_ns = t
        return t

    def user_phase(self, name: str) -> Phase:
        return {
            "init": Phase.INIT,
            "data": Phase.DATA,
            "h2d": Phase.H2D,
            "forward": Phase.FORWARD,
            "backward": Phase.BACKWARD,
            "optimizer": Phase.OPTIMIZER,
            "checkpoint": Phase.CHECKPOINT,
            "validate": Phase.VALIDATE,
            "validation": Phase.VALIDATE,
            "done": Phase.DONE,
        }.get(name, Phase.OTHER)

    # -- data -----------------------------------------------------------------------------------------

    def data_wait(self, started_ns: int, batch: Any) -> None:
        t = now_ns()
        self.data_ns += t - started_ns
        n = self.loaders.batch_length(batch)
        if n:
            self.samples += n
            if not self.batch:
                self.batch = n
        self.h.phase = self.idle
        self.h.phase_since_ns = t

    # -- the end of a step ----------------------------------------------------------------------------

    @guarded
    def optimizer_begins(self, optimizer: Any) -> None:
        if threading.get_ident() != self.r.main_thread:
            return
        self.checks.before_optimizer(optimizer, self.models)
        self._optimizer_start_ns = self.enter(Phase.OPTIMIZER)
        if self.device is not None:
            self.device.begin(Phase.OPTIMIZER)

    @guarded
    def optimizer_ends(self, optimizer: Any) -> None:
        if threading.get_ident() != self.r.main_thread or not self._optimizer_start_ns:
            return
        t = now_ns()
        if self.device is not None:
            self.device.end(Phase.OPTIMIZER)
        self.optimizer_ns += t - self._optimizer_start_ns
        self._optimizer_start_ns = 0
        self.h.phase = self.idle
        self.h.phase_since_ns = t
        if not self._leads(optimizer):
            return
        self.checks.after_optimizer(optimizer)
        self.close_step(t)

    def _leads(self, optimizer: Any) -> bool:
        lead = self.lead() if self.lead is not None else None
        if lead is None:
            self.lead = weakref.ref(optimizer)
            return True
        if lead is optimizer:
            self.lead_misses = 0
            return True
        self.lead_misses += 1
        if self.lead_misses > 32:  # the first one is not used any more
            self.lead = weakref.ref(optimizer)
            self.lead_misses = 0
        return False

    def close_step(self, t: int) -> None:
        """End the step and begin the next one; its record is written now, or once the device has done it."""
        h = self.h
        ready = self.ready_ns or self.col.last_ready_ns
        closed = _Closed(
            h.step + 1, h.epoch, self.step_start_ns, t, self.data_ns, self.forward_ns, self.backward_ns, self.optimizer_ns,
            self.col.wait_ns, ready if ready > self.step_start_ns else 0, self.samples, self.batch, self.loss,
        )  # fmt: skip
        h.step += 1
        self.step_start_ns = t
        self.data_ns = self.forward_ns = self.backward_ns = self.optimizer_ns = 0
        self.samples = self.batch = 0
        self.col.wait_ns = 0
        self.ready_ns = 0
        self.loss = None
        h.life = LifeWord.RUNNING if h.life == LifeWord.STARTING else h.life
        if self.device is None:
            self._write(closed, {})
        else:
            self.device.close(lambda times: self._write(closed, times))

    def _write(self, c: _Closed, device: dict[Phase, int]) -> None:
        """One step record; device times stand in for the host's where they are known."""
        h = self.h
        rec = self.page.next_step()
        number = h.n_steps + 1
        rec.number = 0
        rec.step, rec.epoch, rec.start_ns, rec.end_ns = c.step, c.epoch, c.start_ns, c.end_ns
        rec.data_ns = c.data_ns
        rec.h2d_ns = device.get(Phase.H2D, 0)
        rec.forward_ns = device.get(Phase.FORWARD, c.forward_ns)
        rec.backward_ns = device.get(Phase.BACKWARD, c.backward_ns)
        rec.optimizer_ns = device.get(Phase.OPTIMIZER, c.optimizer_ns)
        rec.wait_ns, rec.ready_ns = c.wait_ns, c.ready_ns
        rec.samples, rec.batch = c.samples, c.batch
        rec.loss_known = c.loss is not None
        rec.loss = c.loss if c.loss is not None else 0.0
        rec.device_bytes = h.device_bytes
        rec.number = number
        h.n_steps = number

    # -- forward and backward --------------------------------------------------------------------------

    @guarded
    def backward_begins(self, tensors: Any) -> tuple[int, int]:
        if threading.get_ident() != self.r.main_thread:
            return 0, 0
        frame = user_frame(sys._getframe(3))
        site = self.r.site(frame)
        model = self._syncing_model()
        if model is not None:
            self.col.mark_site("backward", site)
            self._backward_site = site
            self.col.block_ddp(model.pg, site)
            model.slot.synced_backwards += 1
        self.loss = self.checks.loss(tensors, site)
        self.loaders.trains()
        self.col.reduced_elements = 0
        self.h.micro_steps += 1
        self.ready_ns = 0
        if self.device is not None:
            self.device.begin(Phase.BACKWARD)
        return self.enter(Phase.BACKWARD), self.col.wait_ns

    @guarded
    def backward_ends(self, started_ns: int, error: BaseException | None) -> None:
        if not started_ns:
            return
        t = now_ns()
        if self.device is not None:
            self.device.end(Phase.BACKWARD)
        self.backward_ns += t - started_ns
        self.col.unblock()
        if self.ready_ns > started_ns:
            self.col.wait_ns += t - self.ready_ns
        self.h.phase = self.idle
        self.h.phase_since_ns = t
        if error is not None:
            note_caught(self.r, error)

    def _syncing_model(self) -> Model | None:
        for m in self.models.values():
            ddp = m.ref()
            if ddp is not None and m.forward_pending and ddp.require_backward_grad_sync:
                m.forward_pending = False
                return m
        return None

    def gradient_ready(self, parameter: Any) -> None:
        """The parameter that is usually the last has its gradient: what follows in backward is waiting."""
        self.ready_ns = now_ns()
        self.checks.local_gradient(parameter, self._backward_site)


class Model:
    """One DDP-wrapped module in this process."""

    def __init__(self, ddp: Any, slot: ModelSlot) -> None:
        self.ref = weakref.ref(ddp)
        self.slot = slot
        self.pg = ddp.process_group
        self.forward_pending = False
        self.last_check = 0
        self.check_every = 1  # steps between looks at who has a gradient; longer for many parameters
        self.hook: Any = None


@guarded
def _constructing(ph: Phases, module: Any, kwargs: dict, site: int) -> ModelSlot | None:
    """Before DDP's constructor talks to the others: what is about to be wrapped."""
    n = ph.h.n_models
    if n >= MODELS:
        ph.h.dropped += 1
        return None
    slot = ph.page.page.models[n]
    slot.name = ph.page.text(type(module).__name__)
    slot.site = site
    shapes = [(name, tuple(p.shape)) for name, p in module.named_parameters() if p.requires_grad]
    slot.parameters = len(shapes)
    slot.parameter_elements = sum(p.numel() for p in module.parameters() if p.requires_grad)
    slot.frozen = sum(1 for p in module.parameters() if not p.requires_grad)
    slot.shape_hash = hash_text(repr([s for _, s in shapes]))
    slot.group = 0xFFFFFFFF
    slot.find_unused = -1
    ph.h.n_models = n + 1
    pg = kwargs.get("process_group") or torch.distributed.group.WORLD
    if pg is not None:
        ph.col.mark_site("DDP", site)
        ph.col.block_ddp(pg, site)
    return slot


@guarded
def _constructed(ph: Phases, ddp: Any, slot: ModelSlot) -> None:
    m = Model(ddp, slot)
    g = ph.col.group(m.pg)
    slot.group = g.slot_index if g is not None else 0xFFFFFFFF
    slot.find_unused = int(bool(ddp.find_unused_parameters))
    slot.static_graph = int(bool(getattr(ddp, "static_graph", False)))
    slot.broadcast_buffers = int(bool(ddp.broadcast_buffers))
    ph.models[id(ddp)] = m
    first = next((p for p in ddp.module.parameters() if p.requires_grad and p.is_leaf), None)
    if first is not None:
        m.hook = first.register_post_accumulate_grad_hook(lambda p: ph.gradient_ready(p))


def hash_text(s: str) -> int:
    import zlib

    raw = s.encode()
    return zlib.crc32(raw) << 32 | zlib.adler32(raw)


@guarded
def _forward_begins(ph: Phases, ddp: Any, inputs: tuple) -> tuple[int, Model | None, int]:
    if threading.get_ident() != ph.r.main_thread:
        return 0, None, 0
    m = ph.models.get(id(ddp))
    site = ph.r.user_site(sys._getframe(3))
    training = torch.is_grad_enabled()
    if m is not None:
        # buffers are broadcast in C++ before the module runs, whether gradients are wanted or not
        ph.col.mark_site("forward", site)
        if training:
            m.slot.forwards += 1
            if not ph.batch and inputs:  # batches from no DataLoader: the first dimension of the first tensor
                ph.batch = ph.loaders.batch_length(inputs)
                ph.samples += ph.batch
            ph.checks.before_forward(m)
    if training:
        if ph.device is None and torch.version.cuda is not None and torch.cuda.is_initialized():
            ph.device = DeviceClock(lambda: torch.cuda.Event(enable_timing=True))
        if ph.device is not None:
            ph.device.begin(Phase.FORWARD)
    return ph.enter(Phase.FORWARD if training else Phase.VALIDATE), m, site


@guarded
def _forward_ends(ph: Phases, m: Model | None, started_ns: int, site: int, error: BaseException | None) -> None:
    if not started_ns:
        return
    t = now_ns()
    ph.col.unblock()
    if torch.is_grad_enabled():
        ph.forward_ns += t - started_ns
        if ph.device is not None:
            ph.device.end(Phase.FORWARD)
        if m is not None:
            m.forward_pending = True
    ph.h.phase = ph.idle
    ph.h.phase_since_ns = t
    if error is not None:
        note_caught(ph.r, error)
        if m is not None and "finished reduction in the prior iteration" in str(error):
            ph.checks.crashed_unused(m, error, site)


def install(r: state.Recorder, col: Collectives) -> Phases:
    """Hook torch's classes; called once per process."""
    ph = Phases(r, col)
    _wrap_ddp(ph)
    _wrap_backward(ph)
    _wrap_loader(ph)
    _wrap_join(ph)
    if torch.version.cuda is not None:
        _wrap_copies(ph)
    register_optimizer_step_pre_hook(lambda o, _a, _k: ph.optimizer_begins(o))
    register_optimizer_step_post_hook(lambda o, _a, _k: ph.optimizer_ends(o))
    return ph


def _wrap_ddp(ph: Phases) -> None:
    original_init, original_forward = DDP.__init__, DDP.forward

    def __init__(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        slot = _constructing(ph, module, kwargs, ph.r.user_site(sys._getframe(1)))
        try:
            original_init(self, module, *args, **kwargs)
        except BaseException as e:
            note_caught(ph.r, e)
            raise
        finally:
            ph.col.unblock()
        if slot is not None:
            _constructed(ph, self, slot)

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        began = _forward_begins(ph, self, inputs)
        error: BaseException | None = None
        try:
            return original_forward(self, *inputs, **kwargs)
        except BaseException as e:
            error = e
            raise
        finally:
            if began is not None:
                _forward_ends(ph, began[1], began[0], began[2], error)

    __init__.__doc__, forward.__doc__ = original_init.__doc__, original_forward.__doc__
    __init__.__wrapped__, forward.__wrapped__ = original_init, original_forward  # type: ignore[attr-defined]
    DDP.__init__, DDP.forward = __init__, forward  # type: ignore[method-assign]

    original_sync = getattr(DDP, "_sync_buffers", None)
    if original_sync is not None:

        def _sync_buffers(self: Any) -> Any:
            m = ph.models.get(id(self))
            main = threading.get_ident() == ph.r.main_thread
            if m is not None and main:
                ph.col.block_ddp(m.pg, ph.r.user_site(sys._getframe(1)))
            try:
                return original_sync(self)
            finally:
                if m is not None and main:
                    ph.col.wait_ns += ph.col.unblock()

        DDP._sync_buffers = _sync_buffers  # type: ignore[method-assign]
    reducer = c10d.Reducer
    original_prepare = reducer.prepare_for_backward

    def prepare_for_backward(self: Any, tensors: Any) -> None:
        t = now_ns()
        original_prepare(self, tensors)
        if tensors:  # only find_unused_parameters hands over tensors to search from
            _searched(ph, now_ns() - t)

    reducer.prepare_for_backward = prepare_for_backward  # type: ignore[method-assign]


@guarded
def _searched(ph: Phases, ns: int) -> None:
    for m in ph.models.values():
        if m.slot.find_unused == 1:
            m.slot.search_ns += ns
            m.slot.searches += 1


def _wrap_backward(ph: Phases) -> None:
    original = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        began = ph.backward_begins(tensors)
        error: BaseException | None = None
        try:
            return original(tensors, *args, **kwargs)
        except BaseException as e:
            error = e
            raise
        finally:
            if began is not None:
                ph.backward_ends(began[0], error)

    backward.__doc__ = original.__doc__
    backward.__wrapped__ = original  # type: ignore[attr-defined]
    torch.autograd.backward = backward


def _wrap_loader(ph: Phases) -> None:
    original_iter = DataLoader.__iter__
    base = loader_module._BaseDataLoaderIter
    original_next = base.__next__

    def __iter__(self: Any) -> Any:
        it = original_iter(self)
        ph.loaders.starts(self, it, user_frame(sys._getframe(1)))
        return it

    def __next__(self: Any) -> Any:
        main = threading.get_ident() == ph.r.main_thread
        t = ph.enter(Phase.DATA) if main else 0
        try:
            batch = original_next(self)
        except StopIteration:
            if main:
                ph.loaders.ends(self)
                ph.data_ns += now_ns() - t
                ph.enter(ph.idle)
            raise
        if main:
            ph.loaders.gives(self, batch)
            ph.data_wait(t, batch)
        return batch

    DataLoader.__iter__ = __iter__  # type: ignore[method-assign]
    base.__next__ = __next__  # type: ignore[method-assign]


def _wrap_copies(ph: Phases) -> None:
    """Copies from the host to a CUDA device, timed on the device; only in builds that know CUDA."""

    def wrap(name: str) -> None:
        original = getattr(torch.Tensor, name)

        def copy(self: Any, *args: Any, **kwargs: Any) -> Any:
            clock = ph.device
            if clock is None or self.device.type != "cpu" or threading.get_ident() != ph.r.main_thread:
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


def batches(ph: Phases, iterable: Any, length: int | None) -> Iterator[Any]:
    """Watch an iterator of batches that is no DataLoader; yields what it yields."""
    key = object()
    ph.loaders.starts_plain(key, iterable, length, user_frame(sys._getframe(1)))
    it = iter(iterable)
    while True:
        t = ph.enter(Phase.DATA)
        try:
            batch = next(it)
        except StopIteration:
            ph.loaders.ends(key)
            ph.enter(ph.idle)
            return
        ph.loaders.gives(key, batch)
        ph.data_wait(t, batch)
        yield batch
