"""Runs the checks inside the rank, before and after the optimizer's step: non-finite values, unused parameters, replicas.

Each costs microseconds, runs rarely and adds no communication.
"""

from __future__ import annotations

from typing import Any

from distdiag.recorder import state
from distdiag.recorder.fast.accounts import Ledger
from distdiag.recorder.hooks.nonfinite import NonFinite
from distdiag.recorder.hooks.replica_checksums import ReplicaChecksums
from distdiag.recorder.hooks.tensor_samples import Samples, capturing
from distdiag.recorder.hooks.unused_parameters import UnusedParameters


class Checks:
    """Runs the scheduled checks before an optimizer step."""

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
