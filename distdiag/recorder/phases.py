"""Phases of a training step, by hooks on the DataLoader, DDP, autograd and the optimizers.

A step is an optimizer step (of the optimizer that leads: the first seen to step), so gradient accumulation and `no_sync`
need nothing special: their micro-batches add up. Everything between the phases is "other": the user's own code.
The time a rank waits for others is taken off where it can be seen: inside `Work.wait`, in DDP's buffer broadcast, and in
backward from the moment its last gradient is ready to the end.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

import torch
from torch import is_grad_enabled

from distdiag.recorder import first_forward, state
from distdiag.recorder.checks import Checks, Gradients, checksum_due
from distdiag.recorder.collectives import Collectives, note_caught
from distdiag.recorder.device_clock import DeviceClock
from distdiag.recorder.layout import Blocked, LifeWord, Phase, word
from distdiag.recorder.loaders import Loaders
from distdiag.recorder.models import Model
from distdiag.recorder.state import LastPlace, failed, now_ns

# Plain numbers and words of the header: what is written many times a step is written the cheapest way there is.
_PHASE, _SINCE, _STEP, _MICRO_STEPS = word("phase"), word("phase_since_ns"), word("step"), word("micro_steps")
_DEVICE_BYTES, _LIFE, _EPOCH = word("device_bytes"), word("life"), word("epoch")
_BLOCKED, _BLOCKED_AT, _BLOCKED_SITE = word("blocked"), word("blocked_at"), word("blocked_site")
_BLOCKED_SINCE, _DDP = word("blocked_since_ns"), int(Blocked.DDP)
DATA, FORWARD, BACKWARD, OPTIMIZER = int(Phase.DATA), int(Phase.FORWARD), int(Phase.BACKWARD), int(Phase.OPTIMIZER)
_CUDA = torch.version.cuda is not None  # this build knows CUDA
_VALIDATE, _STARTING, _RUNNING = int(Phase.VALIDATE), int(LifeWord.STARTING), int(LifeWord.RUNNING)


class Phases:
    """Step accounting of the main thread."""

    def __init__(self, r: state.Recorder, col: Collectives) -> None:
        self.r, self.h, self.page, self.col = r, r.h, r.page, col
        self.words = r.page.words
        self.main_thread = r.main_thread
        self.loaders = Loaders(r)
        self.checks = Checks(r, col, lambda: self.loaders.newest and self.loaders.newest())
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
        self._backward = LastPlace(r)
        self._backward_site, self._backward_count = 0, -1  # of the last synchronised backward, and where it is counted
        self.pending: list[Model] = []  # forward has run with gradients wanted, and no backward that averages them
        self.idle = int(Phase.OTHER)  # what the phase falls back to: OTHER, or what the job named

    # -- phase word ---------------------------------------------------------------------------------

    def enter(self, phase: int) -> int:
        """Set the phase shown; returns the time, for the caller's accounting."""
        words = self.words
        words[_PHASE] = phase
        words[_SINCE] = t = now_ns()
        return t

    def leave(self) -> int:
        """Back to what lies between the phases; returns the time."""
        return self.enter(self.idle)

    def user_phase(self, name: str) -> int:
        """Number of a phase that the job names; OTHER for a name of its own."""
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

    def given(self, iterator: Any, batch: Any, started_ns: int) -> None:
        """A loader handed out a batch that was asked for at `started_ns`."""
        try:
            # first what the rest of the step stands on: a batch of an unheard-of kind may not be looked into
            words = self.words
            words[_PHASE] = self.idle
            words[_SINCE] = t = now_ns()
            self.data_ns += t - started_ns
            n = self.loaders.gives(iterator, batch, t)
            self.samples += n
            if not self.batch:
                self.batch = n
        except Exception as e:
            failed(e)

    # -- the end of a step ----------------------------------------------------------------------------

    def optimizer_begins(self, optimizer: Any, _args: Any = None, _kwargs: Any = None) -> None:
        try:
            if get_ident() != self.main_thread:
                return
            words, checks = self.words, self.checks
            words[_PHASE] = OPTIMIZER
            words[_SINCE] = self._optimizer_start_ns = now_ns()
            if self.device is not None:
                self.device.begin(Phase.OPTIMIZER)
            step = words[_STEP] + 1
            if step >= checks.next_look or checks.always or self.col.reduced_elements:
                checks.before_optimizer(optimizer, self.models, step)
        except Exception as e:
            failed(e)

    def optimizer_ends(self, optimizer: Any, _args: Any = None, _kwargs: Any = None) -> None:
        try:
            if not self._optimizer_start_ns or get_ident() != self.main_thread:
                return
            if self.device is not None:
                self.device.end(Phase.OPTIMIZER)
            words = self.words
            words[_PHASE] = self.idle
            words[_SINCE] = t = now_ns()
            self.optimizer_ns += t - self._optimizer_start_ns
            self._optimizer_start_ns = 0
            if (self.lead is not None and self.lead() is optimizer) or self._leads(optimizer):
                self.lead_misses = 0
                self.close_step(t)
                step = words[_STEP]
                if (step < 64 or step & 63 == 0) and checksum_due(step):
                    self.checks.after_optimizer(optimizer, step)
        except Exception as e:
            failed(e)

    def _leads(self, optimizer: Any) -> bool:
        lead = self.lead() if self.lead is not None else None
        if lead is None:
            self.lead = weakref.ref(optimizer)
            return True
        self.lead_misses += 1
        if self.lead_misses > 32:  # the first one is not used any more
            self.lead = weakref.ref(optimizer)
            self.lead_misses = 0
        return False

    def close_step(self, t: int) -> None:
        """End the step and begin the next one; its record is written now, or once the device has done it."""
        col, words = self.col, self.words
        ready = self.ready_ns or col.last_ready_ns
        if ready <= self.step_start_ns:
            ready = 0
        step = words[_STEP] + 1
        if self.device is None:
            self.page.write_step(
                step, words[_EPOCH], self.step_start_ns, t, self.data_ns, 0, self.forward_ns, self.backward_ns,
                self.optimizer_ns, col.wait_ns, ready, self.samples, self.batch, self.loss, words[_DEVICE_BYTES],
            )  # fmt: skip
        else:
            self.device.close(self._step_of_device(step, t, ready))
        words[_STEP] = step
        self.step_start_ns = t
        self.data_ns = self.forward_ns = self.backward_ns = self.optimizer_ns = 0
        self.samples = self.batch = 0
        col.wait_ns = 0
        self.ready_ns = 0
        self.loss = None
        if words[_LIFE] == _STARTING:
            words[_LIFE] = _RUNNING

    def _step_of_device(self, step: int, t: int, ready: int) -> Callable[[dict[Phase, int] | None], None]:
        """What writes the step that ends now, once the device's times are known: they stand in for the host's."""
        start_ns, data_ns, forward_ns, backward_ns = self.step_start_ns, self.data_ns, self.forward_ns, self.backward_ns
        optimizer_ns, wait_ns, samples, batch, loss = (
            self.optimizer_ns,
            self.col.wait_ns,
            self.samples,
            self.batch,
            self.loss,
        )
        epoch, device_bytes = self.words[_EPOCH], self.words[_DEVICE_BYTES]

        def write(device: dict[Phase, int] | None) -> None:
            of = device or {}  # None: it did not say
            self.page.write_step(
                step, epoch, start_ns, t, data_ns, of.get(Phase.H2D, 0), of.get(Phase.FORWARD, forward_ns),
                of.get(Phase.BACKWARD, backward_ns), of.get(Phase.OPTIMIZER, optimizer_ns), wait_ns, ready, samples, batch,
                loss, device_bytes,
            )  # fmt: skip

        return write

    # -- forward and backward --------------------------------------------------------------------------

    def backward_begins(self, tensors: Any) -> int:
        """Time of the beginning; 0 where it is not followed."""
        try:
            if get_ident() != self.main_thread:
                return 0
            words, col = self.words, self.col
            site = self._backward.look()
            micro_step = words[_MICRO_STEPS]
            self.loss = self.checks.loss(tensors, site, micro_step)
            words[_MICRO_STEPS] = micro_step + 1
            loaders = self.loaders
            if loaders.last is not loaders.trained:
                loaders.trains()
            if col.reduced_elements:  # since the last step: parameters, averaged by hand
                self.checks.averaged_elements = max(self.checks.averaged_elements, col.reduced_elements)
                col.reduced_elements = 0
            self.ready_ns = 0
            if self.device is not None:
                self.device.begin(Phase.BACKWARD)
            for m in self.pending:
                ddp = m.ref()
                if ddp is not None and ddp.require_backward_grad_sync:
                    self._syncs(m, site)
                    break
            words[_PHASE] = BACKWARD
            words[_SINCE] = t = now_ns()
            return t
        except Exception as e:
            failed(e)
            return 0

    def backward_ends(self, started_ns: int, error: BaseException | None) -> None:
        try:
            if self.device is not None:
                self.device.end(Phase.BACKWARD)
            t = now_ns()
            words = self.words
            words[_PHASE] = self.idle
            words[_BLOCKED] = 0
            words[_SINCE] = t
            self.backward_ns += t - started_ns
            if self.ready_ns > started_ns:
                self.col.wait_ns += t - self.ready_ns
            if error is not None:
                note_caught(self.r, error)
        except Exception as e:
            failed(e)

    def _syncs(self, m: Model, site: int) -> None:
        """A backward begins in which DDP averages the gradients of a model."""
        self.pending.remove(m)
        words = self.words
        if site == self._backward_site and self._backward_count >= 0:
            words[self._backward_count] += 1
        else:
            self._backward_site, self._backward_count = site, self.col.mark_site("backward", site)
        words[m.synced_at] += 1
        self.checks.averaged_by = m
        if m.group_at >= 0:
            words[_BLOCKED_AT] = m.group_at
            words[_BLOCKED_SITE] = site
            words[_BLOCKED_SINCE] = now_ns()
            words[_BLOCKED] = _DDP

    def watch_last_gradient(self, parameter: Any) -> Any:
        """Be called when the parameter that is usually the last has its gradient: what follows in backward is waiting."""
        total_of, checks = Gradients(parameter).sum, self.checks

        def ready(p: Any) -> None:
            try:
                self.ready_ns = now_ns()
                g = p.grad
                if g is not None:
                    total = total_of(g)
                    if total - total:  # NaN where it is not finite
                        checks.local_gradient(p, total, self._backward.site)
            except Exception as e:
                failed(e)

        return parameter.register_post_accumulate_grad_hook(ready)


def forward_begins(ph: Phases, ddp: Any, inputs: tuple) -> tuple[int, Model | None, bool] | None:
    """(time, model, whether gradients are wanted) of a forward on the main thread."""
    try:
        if get_ident() != ph.main_thread:
            return None
        m = ph.models.get(id(ddp))
        training = is_grad_enabled()
        first = False
        if m is not None:
            site = m.forward.look()
            words = ph.words
            # buffers are broadcast in C++ before the module runs, whether gradients are wanted or not
            if site == m.forward_site and m.forward_count >= 0:
                words[m.forward_count] += 1
            else:
                m.forward_site, m.forward_count = site, ph.col.mark_site("forward", site)
            if training:
                words[m.forwards_at] = n = words[m.forwards_at] + 1
                first = n == 1
                if inputs and ph.device is not None and isinstance(inputs[0], torch.Tensor):
                    ph.loaders.newest = weakref.ref(inputs[0])  # the loader's own is gone when it has been copied
                if not ph.batch and inputs:  # batches from no DataLoader: the first dimension of the first tensor
                    ph.batch = ph.loaders.fed(ddp, inputs, site)
                    ph.samples += ph.batch
                if ph.checks.later:
                    ph.checks.poll()
        if training:
            if ph.device is None and _CUDA and torch.cuda.is_initialized():
                ph.device = DeviceClock(lambda: torch.cuda.Event(enable_timing=True))
            if ph.device is not None:
                ph.device.begin(Phase.FORWARD)
        words = ph.words
        words[_PHASE] = FORWARD if training else _VALIDATE
        words[_SINCE] = t = now_ns()
        if first and m is not None:
            m.first_forward, m.in_first_forward = (
                first_forward.watch(),
                True,
            )  # last: what it begins, `forward_ends` ends
        return t, m, training
    except Exception as e:
        failed(e)
        return None


def buffers_begin(ph: Phases, ddp: Any) -> int:
    """DDP is about to broadcast its buffers, in its forward: the time, 0 where the wait in it is not counted."""
    try:
        m = ph.models.get(id(ddp))
        if m is None or m.group_at < 0 or get_ident() != ph.main_thread:
            return 0
        words = ph.words
        words[_BLOCKED_AT] = m.group_at
        words[_BLOCKED_SITE] = m.forward_site
        words[_BLOCKED_SINCE] = t = now_ns()
        words[_BLOCKED] = _DDP
        return t
    except Exception as e:
        failed(e)
        return 0


def buffers_end(ph: Phases, began_ns: int) -> None:
    try:
        ph.words[_BLOCKED] = 0
        ph.col.wait_ns += now_ns() - began_ns
    except Exception as e:
        failed(e)


def forward_ends(ph: Phases, began: tuple[int, Model | None, bool], error: BaseException | None) -> None:
    try:
        started_ns, m, training = began
        t = now_ns()
        words = ph.words
        words[_PHASE] = ph.idle
        words[_BLOCKED] = 0
        words[_SINCE] = t
        if training:
            ph.forward_ns += t - started_ns
            if ph.device is not None:
                ph.device.end(Phase.FORWARD)
        if m is not None:
            if m.in_first_forward:
                m.in_first_forward = False
                if m.first_forward is not None:
                    m.first_forward.end()
            if training and m not in ph.pending:
                ph.pending.append(m)
        if error is not None:
            note_caught(ph.r, error)
            if m is not None and "finished reduction in the prior iteration" in str(error):
                ph.checks.crashed_unused(m, error, m.forward_site)
    except Exception as e:
        failed(e)


def batches(ph: Phases, iterable: Any, length: int | None) -> Iterator[Any]:
    """Watch an iterator of batches that is no DataLoader; yields what it yields."""
    key = object()
    ph.loaders.starts_plain(key, iterable, length, sys._getframe(1))
    it = iter(iterable)
    while True:
        t = ph.enter(DATA)
        try:
            batch = next(it)
        except StopIteration:
            ph.loaders.ends(key)
            ph.leave()
            return
        ph.given(key, batch, t)
        yield batch
