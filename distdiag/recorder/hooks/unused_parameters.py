"""Checks which parameters of a DDP model get no gradient, and which frozen ones get one."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from distdiag.page.layout import Header, SampleKind
from distdiag.recorder.hooks.lost_hooks import replaced
from distdiag.recorder.hooks.tensor_samples import Samples, gradient
from distdiag.recorder.state import guarded

if TYPE_CHECKING:
    from torch import Tensor

    from distdiag.recorder.hooks.wrapped_model import Model

    Named = list[tuple[str, Tensor]]  # parameters with their names

NAMES_KEPT = 200
UNUSED_TEXTS = 16
# Parameters checked per step for a gradient, while the model is new and later; if there are more, they take turns.
CHECKED, CHECKED_LATER, NEW_CHECKS = 64, 2, 128
LATER_STEPS = 8  # minimum between two later checks
_INDICES = re.compile(r"did not receive grad for rank \d+:\s*([\d\s]+)")


class UnusedParameters:
    """The parameters of this rank's models without a gradient."""

    def __init__(self, h: Header, samples: Samples) -> None:
        self.header, self.samples = h, samples

    def check(self, m: Model, step: int) -> None:
        if m.frozen:
            self._unfrozen(m, step)
        named = m.trained()
        slot = m.slot
        slot.unused_checks = checks = slot.unused_checks + 1
        each = 1 if checks < 4 else len(named) // (CHECKED if checks < NEW_CHECKS else CHECKED_LATER)
        m.next_check = step + max(1 if checks < NEW_CHECKS else LATER_STEPS, each)
        for _, p in named:  # fast path: all have a gradient
            if gradient(p) is None:
                if slot.find_unused == 0 and not slot.static_graph:
                    # A script may drop a gradient itself before the step. If backward left one out, DDP refuses the next forward and
                    # names it: that is the proof. Until then it is unknown whether all have gradients.
                    slot.unused_checks = checks - 1
                    return
                without = [(n, p) for n, p in named if gradient(p) is None]
                if len(without) < len(named):
                    self._write_unused(m, without, step)
                    self._write_never(m, without)
                return
        if m.never is None or m.never:
            self._write_never(m, [])

    def _unfrozen(self, m: Model, step: int) -> None:
        """Report parameters that were frozen when DDP was built and have a gradient now: DDP does not average them."""
        forwards = m.slot.forwards
        if forwards == m.frozen_forwards:
            return  # no longer in use: the module may have been wrapped again
        m.frozen_forwards = forwards
        frozen, at = m.frozen, m.frozen_next
        m.frozen_next = at + CHECKED if at + CHECKED < len(frozen) else 0
        if any(p.requires_grad and gradient(p) is not None for _, p in frozen[at : at + CHECKED]):
            names = [n for n, p in frozen if p.requires_grad and gradient(p) is not None]
            m.frozen = []
            self.samples.write(SampleKind.UNFROZEN, step, float(len(names)), name=names[0], site=m.slot.site)

    def _write_unused(self, m: Model, without: Named, step: int) -> None:
        m.slot.unused_hits += 1
        m.slot.unused_step = step
        m.slot.frozen_later = not any(p.requires_grad for _, p in without)
        names = _names_and_sizes(without)
        if names not in m.unused_texts:
            if len(m.unused_texts) >= UNUSED_TEXTS:
                return  # layers dropped at random: new sets of names in every step would fill the heap
            m.unused_texts.add(names)
        m.slot.unused = self.samples.page.text(names)
        ddp = m.ref()
        if step <= 1 and m.first_forward is not None and ddp is not None:  # the model may take another branch later
            parameters = [name for name, _ in without]
            never = m.first_forward.never_called(ddp.module, parameters)
            m.slot.without_graph = m.first_forward.without_graph(ddp.module, parameters)
            m.slot.never_called = self.samples.page.text(json.dumps(never[:NAMES_KEPT]))

    def _write_never(self, m: Model, without: Named) -> None:
        now = {n for n, _ in without}
        never = now if m.never is None else m.never & now
        if never != m.never:
            m.never = never
            m.slot.never_trained = self.samples.page.text(_names_and_sizes([x for x in without if x[0] in never]))

    @guarded
    def forward_failed(self, m: Model, error: BaseException, site: int) -> None:
        """Record the parameters that DDP's error lists. The message has their indices, the module their names."""
        found, named = _INDICES.search(str(error)), m.trained()
        without = [named[i] for i in map(int, found[1].split()) if i < len(named)] if found else []
        m.slot.unused_site = site
        m.unused_texts.clear()  # already reported
        if without:
            self._write_unused(m, without, self.header.step)
            listed = {name for name, _ in without}
            checked = [x for x in m.hooked if x[0] in listed]
            n = len(checked)
            # they have gradients, and DDP does not see them
            if checked and all(replaced(p, node) for _, p, node in checked):
                self.samples.write(SampleKind.HOOKS_LOST, self.header.step, n, n, checked[0][0])


def _names_and_sizes(named: Named) -> str:
    return json.dumps([(n, p.numel()) for n, p in named[:NAMES_KEPT]])
