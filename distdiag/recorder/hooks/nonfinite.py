"""Checks losses and gradients for NaN and inf, and reports them once the optimizer is about to use them."""

from __future__ import annotations

import weakref
from math import isfinite, isinf
from typing import Any

import torch

from distdiag.page.layout import SampleKind
from distdiag.recorder import state
from distdiag.recorder.fast.accounts import Ledger
from distdiag.recorder.hooks.tensor_samples import PLAIN, Samples, capturing, gradient, own_part, sampled, sum_of
from distdiag.recorder.unseen import has_memory, unseen

REPORTS = 4
BAD_LOSSES = 8  # consecutive losses without an optimizer step: more than a GradScaler needs to find its scale
DROPPED = 4  # losses that are NaN, with finite updates after them: one bad batch is no fault


class NonFinite:
    """The losses and gradients of this rank that are NaN or inf."""

    def __init__(self, recorder: state.Recorder, ledger: Ledger, samples: Samples) -> None:
        self.header, self.ledger, self.samples = recorder.header, ledger, samples
        self._reported = self._dropped = 0
        self.suspects: list[tuple[SampleKind, int, float, Any, int]] = []  # kind, step, value, parameter, site
        self._harmless = False  # the gradients of the suspected losses are finite
        self.local_gradients = False  # gradients are checked before they are averaged
        # (optimizer, (group, number) of parameters whose gradient is checked): keeps no parameter alive
        self._probe: tuple[Any, list[tuple[int, int]]] = (lambda: None), []

    def loss(self, tensors: Any, site: int, micro_step: int) -> float | None:
        """Return the scalar that backward is called on; None if it is no scalar or on a device."""
        t = tensors[0] if type(tensors) in (tuple, list) and len(tensors) == 1 else tensors
        read = sampled(t, 1) if type(t) is torch.Tensor and t.numel() == 1 else None
        value = read[0] if read is not None else None
        if read is None and isinstance(t, torch.Tensor) and has_memory(type(t)):
            with unseen():  # an operator would appear in the job's profile
                value = self._loss(t, site, micro_step)
        if value is not None and (self.ledger.bad_losses or value - value):  # NaN if it is not finite
            with unseen():
                self._loss_value(value, site, BAD_LOSSES)
        return value

    def _loss(self, t: torch.Tensor, site: int, micro_step: int) -> float | None:
        if t.numel() != 1:
            return None
        if t.is_cpu:
            return sum_of(t)
        if micro_step % 8 == 0 and not capturing():
            self.samples.when_copied(
                t.detach().float().reshape(1), lambda v, s=site: self._loss_value(v[0].item(), s, 2)
            )
        self.samples.poll()
        return None

    def _loss_value(self, value: float, site: int, at_most: int) -> None:
        """Suspect a loss that is not finite; report it when the optimizer steps, or after `at_most` such losses in a row.

        A scaler drops the step of such a loss, which is then harmless.
        """
        if isfinite(value):
            self.ledger.bad_losses = 0
            return
        self.ledger.bad_losses += 1
        if self.ledger.bad_losses == 1:
            self._harmless = False
            self._suspect(SampleKind.NONFINITE_LOSS, value, None, site)
            self._check_input(site)
        elif self.ledger.bad_losses == at_most:
            self._report_suspects()

    def _check_input(self, site: int) -> None:
        """Record a batch that contains NaN itself, or what the script made of it: the NaN began there, whatever else the loss depends on."""
        if capturing():
            return
        step, ledger = self.header.step + 1, self.ledger
        # of several models one may have had the output of another
        tensors = [get() for get in (ledger.newest, ledger.entered if len(ledger.models) == 1 else None) if get]
        # plain tensors only: reading a tensor that is sharded over ranks is a collective
        plain = [t for t in tensors if t is not None and type(t) in PLAIN and t.layout is torch.strided]
        found = [torch.isnan(t.detach()).any() for t in plain if t.is_floating_point() and t.grad_fn is None]
        if any(bool(x) for x in found if x.is_cpu):
            self.samples.write(SampleKind.NAN_INPUT, step, float("nan"), site=site)
        on_device = next((x for x in found if not x.is_cpu), None)
        if on_device is not None:
            self.samples.when_copied(
                on_device.float().reshape(1), lambda v: v[0] and self.samples.write(SampleKind.NAN_INPUT, step, 1.0)
            )

    def _suspect(self, kind: SampleKind, value: float, p: Any, site: int) -> None:
        self.ledger.always = True
        if len(self.suspects) < REPORTS:
            self.suspects.append((kind, self.header.step + 1, value, p, site))

    def _report_suspects(self) -> None:
        for kind, step, value, p, site in self.suspects:
            if kind is SampleKind.NONFINITE_LOSS and self._harmless and isinf(value):
                kind = SampleKind.INFINITE_LOSS
            if self._reported < REPORTS:
                self._reported += 1
                self.samples.write(kind, step, value, name="" if p is None else self._name_of(p), site=site)
        self.suspects.clear()

    def before_optimizer(self, optimizer: Any, step: int) -> None:
        if not self.local_gradients:  # else this rank's own gradient was checked already
            self._check_gradient(optimizer, step)
        if self.suspects:
            self._judge(optimizer)

    def _judge(self, optimizer: Any) -> None:
        """Check the gradients that the optimizer is about to use, or those after a step that was dropped."""
        skipped = getattr(optimizer, "found_inf", None)  # GradScaler sets it to make a fused optimizer drop the step
        checked = [p for _, _, _, p, _ in self.suspects if p is not None] or self._probed()
        found = (own_part(gradient(p)) for p in checked)
        gradients = [g for g in found if g is not None and g.is_cpu and g.layout is torch.strided]
        finite = all(isfinite(sum_of(g)) for g in gradients)
        # A scale can overflow in the loss alone: a loss that is inf harms only if its gradients are not finite.
        self._harmless = finite and bool(gradients or self.local_gradients)
        if skipped is None and not finite:
            self._report_suspects()
        elif not self.ledger.bad_losses:
            self._drop()
        # a loss that is never finite again is reported even if its gradients are
        self.suspects = [x for x in self.suspects if self.ledger.bad_losses and x[0] is SampleKind.NONFINITE_LOSS]

    def _drop(self) -> None:
        """Count a loss that was NaN and has left the gradients finite, or whose step was dropped; report the fourth."""
        lost = next((x for x in self.suspects if x[0] is SampleKind.NONFINITE_LOSS and x[2] != x[2]), None)
        self._dropped += lost is not None
        if lost is not None and self._dropped == DROPPED:
            self.samples.write(SampleKind.DROPPED_LOSS, lost[1], lost[2], site=lost[4])

    def _check_gradient(self, optimizer: Any, step: int) -> None:
        probed, places = self._probe
        if probed() is not optimizer:
            if places and step % 16:
                return
            groups = [g["params"] for g in optimizer.param_groups]
            small = [(p.numel(), i, k) for i, g in enumerate(groups) for k, p in enumerate(g) if p.numel() <= 65536]
            self._probe = weakref.ref(optimizer), [(i, k) for _, i, k in sorted(small)[:1]]
        if self._reported >= REPORTS:
            return
        for p in self._probed():
            g = own_part(gradient(p))
            if g is None or g.is_sparse or g.device.type != "cpu":
                continue
            # one pass over a small gradient: a sum is finite only if no element is NaN (or inf, but for +inf -inf)
            total = sum_of(g)
            if not isfinite(total) and getattr(optimizer, "found_inf", None) is None:
                self._reported += 1
                self.samples.write(SampleKind.NONFINITE_GRADIENT, step, total, name=self._name_of(p))
                return

    def _probed(self) -> list[Any]:
        groups = getattr(self._probe[0](), "param_groups", ())
        return [p for i, k in self._probe[1] for g in groups[i : i + 1] for p in g["params"][k : k + 1]]

    def local_gradient(self, p: Any, total: float, site: int) -> None:
        """Report the last gradient before it is averaged if it is not finite: the NaN began on this rank.

        Backward propagates NaN to the first layers, so the gradient that is computed last shows it.
        """
        if self._reported < REPORTS:
            self._suspect(SampleKind.NONFINITE_LOCAL_GRADIENT, total, p, site)

    def _name_of(self, p: Any) -> str:
        for m in self.ledger.models.values():
            for name, q in m.trained():
                if q is p:
                    return name
        return ""
