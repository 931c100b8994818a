"""Phases of a training step, by hooks on the DataLoader, DDP, autograd and the optimizers.

A step is an optimizer step (of the optimizer that leads: the first seen to step), so gradient accumulation and `no_sync`
need nothing special: their micro-batches add up. Everything between the phases is "other": the user's own code.
The time a rank waits for others is taken off where it can be seen: inside `Work.wait`, in DDP's buffer broadcast, and in
backward from the moment its last gradient is ready to the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

from torch import float32

from distdiag.recorder import state
from distdiag.recorder.checks import Checks, Gradients
from distdiag.recorder.collectives import Collectives
from distdiag.recorder.device_clock import DeviceClock
from distdiag.recorder.layout import LifeWord, Phase, word
from distdiag.recorder.loaders import Loaders
from distdiag.recorder.models import Model
from distdiag.recorder.state import LastPlace, failed, now_ns

# Plain numbers and words of the header: what is written many times a step is written the cheapest way there is.
_PHASE, _SINCE, _STEP = word("phase"), word("phase_since_ns"), word("step")
_DEVICE_BYTES, _LIFE, _EPOCH = word("device_bytes"), word("life"), word("epoch")
OPTIMIZER = int(Phase.OPTIMIZER)
_STARTING, _RUNNING = int(LifeWord.STARTING), int(LifeWord.RUNNING)


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
        self.backward = LastPlace(r)
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
                if step < 64 or step & 63 == 0:  # some of them; a call costs much here
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
        optimizer_ns, wait_ns, samples, batch = self.optimizer_ns, self.col.wait_ns, self.samples, self.batch
        loss, epoch, device_bytes = self.loss, self.words[_EPOCH], self.words[_DEVICE_BYTES]

        def write(device: dict[Phase, int] | None) -> None:
            of = device or {}  # None: it did not say
            self.page.write_step(
                step, epoch, start_ns, t, data_ns, of.get(Phase.H2D, 0), of.get(Phase.FORWARD, forward_ns),
                of.get(Phase.BACKWARD, backward_ns), of.get(Phase.OPTIMIZER, optimizer_ns), wait_ns, ready, samples, batch,
                loss, device_bytes,
            )  # fmt: skip

        return write

    # -- backward ---------------------------------------------------------------------------------------

    def watch_last_gradient(self, parameter: Any) -> Any:
        """Be called when the parameter that is usually the last has its gradient: what follows in backward is waiting."""
        gradients, checks = Gradients(parameter), self.checks

        def ready(p: Any) -> None:
            try:
                self.ready_ns = now_ns()
                g = p.grad
                if g is None:
                    return
                if gradients.at and g.dtype is float32 and g.data_ptr() == gradients.at:
                    memory, total = gradients.memory, 0.0
                    for i in gradients.elements:
                        total += memory[i]
                else:
                    total = gradients.sum(g)
                if total - total:  # NaN where it is not finite
                    checks.local_gradient(p, total, self.backward.site)
            except Exception as e:
                failed(e)

        return parameter.register_post_accumulate_grad_hook(ready)
