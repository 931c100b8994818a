"""Measures the phases of a training step, by hooks on the DataLoader, DDP, autograd and the optimizers.

A step is an optimizer step (of the leading optimizer: the first that is seen to step), so gradient accumulation and `no_sync` need
no special case: the times of their micro-batches are added. Everything between the phases is "other": the user's own code. The
time that a rank waits for others is subtracted where it can be measured: inside `Work.wait`, in DDP's buffer broadcast, and in
backward from the moment its last gradient is ready to the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from distdiag.page.layout import Phase, word
from distdiag.recorder import state
from distdiag.recorder.fast.accounts import LastCallSite, Ledger, fast_hook
from distdiag.recorder.hooks.collectives import Collectives
from distdiag.recorder.hooks.device_clock import DeviceClock, Write, cuda_index
from distdiag.recorder.hooks.loaders import Loaders
from distdiag.recorder.hooks.nonfinite import NonFinite
from distdiag.recorder.hooks.replica_checksums import ReplicaChecksums
from distdiag.recorder.hooks.tensor_samples import Gradients, Samples, capturing
from distdiag.recorder.hooks.unused_parameters import UnusedParameters
from distdiag.recorder.state import guarded, now_ns
from distdiag.recorder.unseen import unseen
from distdiag.unpatched import get_ident

# Plain numbers and words of the header: they are written many times a step, in the cheapest way.
_PHASE, _SINCE, _STEP = word("phase"), word("phase_since_ns"), word("step")
_DEVICE_BYTES, _EPOCH = word("device_bytes"), word("epoch")
OPTIMIZER = int(Phase.OPTIMIZER)
# by the name that a job gives it
PHASES = {p.name.lower(): p for p in Phase if p is not Phase.COLLECTIVE} | {"validation": Phase.VALIDATE}


class Checks:
    """The checks inside the rank, before and after the optimizer's step. Each costs microseconds, runs rarely, adds no communication."""

    def __init__(self, recorder: state.Recorder, ledger: Ledger) -> None:
        self.page, self.ledger = recorder.page, ledger
        self.samples = Samples(recorder, ledger)
        self.nonfinite = NonFinite(recorder, ledger, self.samples)
        self.unused = UnusedParameters(recorder.header, self.samples)
        self.replicas = ReplicaChecksums(ledger, self.samples)

    def before_optimizer(self, optimizer: Any, step: int) -> None:
        ledger, nonfinite = self.ledger, self.nonfinite
        models = ledger.models
        self.replicas.reduced, ledger.reduced_elements = ledger.reduced_elements, 0
        nonfinite.before_optimizer(optimizer, step)
        if step == 1:
            self.replicas.before_first_step(optimizer)
        elif step == 2:
            self.replicas.begins(optimizer)
        for m in models.values():
            if step >= m.next_check and m.slot.forwards:
                self.unused.check(m, step)
            if m.times is not None and step >= m.times.next_read and not capturing():
                ddp = m.ref()
                if ddp is None:
                    m.times = None
                else:
                    m.times.read(ddp, self.page, step)
        ledger.next_event = min((m.next_event for m in models.values()), default=0)
        ledger.always = bool(nonfinite.suspects or self.replicas.reduced or not nonfinite.local_gradients)


class StepAccounting:
    def __init__(self, recorder: state.Recorder, collectives: Collectives) -> None:
        self.recorder, self.header, self.page, self.collectives = recorder, recorder.header, recorder.page, collectives
        self.words, self.ledger = recorder.page.words, collectives.ledger
        self.loaders = Loaders(recorder, self.ledger)
        self.checks = Checks(recorder, self.ledger)
        collectives.shapes = self.checks.replicas.shapes
        self.device: DeviceClock | None = None  # on CUDA, from the first forward on
        self.backward = LastCallSite(recorder)
        self._watcher: Callable[[int], None] | None = None
        self._ended: Callable[[], Any] = lambda: None  # the optimizer whose step ended last
        self.optimizer_begins = fast_hook(self.ledger, "optimizer_begins", self._optimizer_begins)
        self.optimizer_ends = fast_hook(self.ledger, "optimizer_ends", self._optimizer_ends)

    def poll(self) -> None:
        """Record what changes without a call of a hook; called by the pulse."""
        self.loaders.poll_workers()
        self._poll_models()

    @guarded
    def _poll_models(self) -> None:
        """Record whether models are in eval mode: a rank that validates alone uses the module that DDP wraps."""
        for m in list(self.ledger.models.values()):
            ddp = m.ref()
            if ddp is not None:
                m.slot.evaluating = int(ddp._modules["module"].__dict__.get("training") is False)

    # -- phase word ---------------------------------------------------------------------------------

    def enter(self, phase: int) -> int:
        """Set the phase shown; return the time in ns, for the caller's accounting."""
        words = self.words
        words[_PHASE] = phase
        words[_SINCE] = t = now_ns()
        return t

    def leave(self) -> int:
        """Return to the phase between the named ones; return the time in ns."""
        return self.enter(self.ledger.idle)

    # -- the end of a step ----------------------------------------------------------------------------

    def _optimizer_begins(self, optimizer: Any, _args: Any = None, _kwargs: Any = None) -> None:
        ledger, words = self.ledger, self.words
        if get_ident() != ledger.main_thread:
            return
        words[_PHASE] = OPTIMIZER
        words[_SINCE] = ledger.optimizer_start_ns = now_ns()
        if self.device is not None:
            self.device.begin(Phase.OPTIMIZER)
        step = words[_STEP] + 1
        if step >= ledger.next_event or ledger.always or ledger.reduced_elements:
            with unseen():
                self.checks.before_optimizer(optimizer, step)

    def _optimizer_ends(self, optimizer: Any, _args: Any = None, _kwargs: Any = None) -> None:
        ledger, words = self.ledger, self.words
        if get_ident() != ledger.main_thread:
            return
        # its step contains another's, which has ended: ZeroRedundancyOptimizer then broadcasts what each rank has stepped
        encloses = not ledger.optimizer_start_ns
        if not encloses:
            self._ended = weakref.ref(optimizer)
            if self.device is not None:
                self.device.end(Phase.OPTIMIZER)
            words[_PHASE] = ledger.idle
            words[_SINCE] = t = now_ns()
            ledger.optimizer_ns += t - ledger.optimizer_start_ns
            ledger.optimizer_start_ns = 0
        elif ledger.lead is not None and ledger.lead() is self._ended():  # its step is the job's, from the next one on
            ledger.lead = weakref.ref(optimizer)
            return
        else:
            t = now_ns()
        if (ledger.lead is not None and ledger.lead() is optimizer) or self._leads(optimizer):
            ledger.lead_misses = 0
            self.close_step(t)
            step = words[_STEP]
            if step < 64 or step & 31 == 0:  # `checksum_due` is true for some of them; a call is expensive here
                with unseen():
                    self.checks.replicas.after_optimizer(optimizer, step)

    def _leads(self, optimizer: Any) -> bool:
        ledger = self.ledger
        if ledger.lead is None or ledger.lead() is None:
            ledger.lead = weakref.ref(optimizer)
            if self.recorder.device is None:
                self.recorder.device = cuda_index(p for group in optimizer.param_groups for p in group["params"])
            return True
        self.checks.replicas.others[id(optimizer)] = optimizer
        ledger.lead_misses += 1
        if ledger.lead_misses > 32:  # the leading optimizer is no longer used
            ledger.lead = weakref.ref(optimizer)
            ledger.lead_misses = 0
        return False

    def close_step(self, t: int) -> None:
        """End the step and begin the next one; its record is written now, or once the device has finished it."""
        ledger, words = self.ledger, self.words
        if self.device is None:
            ledger.close_step(t)
        else:
            step = words[_STEP] + 1
            self.device.close(self._step_of_device(step, t))
            words[_STEP] = step
            ledger.begin_step(t)
        watcher = self._watcher
        if watcher is not None:
            watcher(words[_STEP])

    def watch_steps(self, watcher: Callable[[int], None] | None) -> None:
        """Call `watcher` with the number of each step when it ends; None stops that.

        Meanwhile steps take the slow path, which sees each end.
        """
        self._watcher = watcher
        self.ledger.on_device = watcher is not None or self.device is not None

    def _step_of_device(self, step: int, t: int) -> Write:
        """Return a function that writes the record of the step that ends now, with the device's times in place of the host's."""
        ledger = self.ledger
        start_ns, data_ns, wait_ns, loss = ledger.step_start_ns, ledger.data_ns, ledger.wait_ns, ledger.loss
        of_host = {
            Phase.FORWARD: ledger.forward_ns, Phase.BACKWARD: ledger.backward_ns, Phase.OPTIMIZER: ledger.optimizer_ns
        }  # fmt: skip
        samples, batch = ledger.samples, ledger.batch
        epoch, device_bytes = self.words[_EPOCH], self.words[_DEVICE_BYTES]
        waits = ledger.forward_wait_ns, ledger.arrived_ns, ledger.optimizer_wait_ns, ledger.elements
        ready = ledger.ready_ns or ledger.last_ready_ns
        ready = ready if ready > start_ns else 0

        def write(of_device: dict[Phase, int], step_ns: int | None) -> None:
            of = of_host | of_device
            begun_ns = start_ns if step_ns is None else t - min(step_ns, t)
            self.page.write_step(
                step, epoch, begun_ns, t, data_ns, 0, of[Phase.FORWARD], of[Phase.BACKWARD], of[Phase.OPTIMIZER], wait_ns,
                ready, samples, batch, loss, device_bytes, *waits,
            )  # fmt: skip

        return write

    # -- backward ---------------------------------------------------------------------------------------

    def watch_last_gradient(self, parameter: Any) -> None:
        """Register a hook on the parameter whose gradient is typically the last: the rest of backward is waiting."""
        gradients, nonfinite, ledger = Gradients(parameter), self.checks.nonfinite, self.ledger

        def ready(p: Any) -> None:
            ledger.ready_ns = now_ns()
            with unseen():
                g = p.grad
                if g is None:
                    return
                total = gradients.sum(g)
            if total - total:  # NaN if it is not finite
                nonfinite.local_gradient(p, total, self.backward.site)

        parameter.register_post_accumulate_grad_hook(fast_hook(ledger, "gradient_is_ready", ready, gradients))
