"""Sampled checks inside the rank: unused parameters, non-finite values, replica checksums.

Each check costs microseconds, runs rarely and adds no communication. The GPU is never waited for: values are copied to
pinned memory and read once the copy is done.
"""

from __future__ import annotations

import ctypes
import json
import re
import weakref
import zlib
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch

from distdiag.page.layout import SampleKind
from distdiag.recorder import state
from distdiag.recorder.fast.accounts import GradientWords, Ledger
from distdiag.recorder.state import guarded, now_ns
from distdiag.recorder.unseen import has_memory, unseen

if TYPE_CHECKING:
    from distdiag.recorder.hooks.ddp_models import Model

CHECKSUM_TENSORS, CHECKSUM_ELEMENTS = 24, 32
NONFINITE_REPORTS = 4
NAMES_KEPT = 200
UNUSED_TEXTS = 16
BAD_LOSSES = 8  # one after the other, none of them followed by a step: more than a scaler needs to settle
# Parameters checked per step for a gradient, while the model is new and later; if there are more, they take turns.
LOOKED_AT, LOOKED_AT_LATER, NEW_LOOKS = 64, 2, 128
LATER_STEPS = 8  # at least, between two later checks
_FLOAT32, _PLAIN = torch.float32, (torch.Tensor, torch.nn.Parameter)
_INDICES = re.compile(r"did not receive grad for rank \d+:\s*([\d\s]+)")


def checksum_due(step: int) -> bool:
    """True for steps 2, 4, 8, … 64, then every 64th: the same on all ranks."""
    return step % 64 == 0 or (step < 64 and step >= 2 and step & (step - 1) == 0)


def _capturing() -> bool:
    """True during a CUDA graph capture: an operation of ours would become part of the graph, or break the capture."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _own_part(g: Any) -> Any:
    """Return this rank's part of a sharded gradient (DTensor), any other gradient itself; None if there is no memory to read."""
    part = getattr(g, "_local_tensor", g)
    return part if has_memory(type(part)) else None


def sampled(t: torch.Tensor, most: int) -> list[float] | None:
    """Return up to `most` elements of `t`, evenly spread in memory; None unless it is a plain, dense float32 tensor on the CPU.

    Read straight from memory: one torch operator takes longer than reading all of them.
    """
    if not t.is_cpu or t.dtype is not _FLOAT32 or type(t) not in _PLAIN:
        return None
    if not (t.is_contiguous() or (t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last))):
        return None
    n, at = t.numel(), t.data_ptr()
    if not n or not at:
        return None
    return (ctypes.c_float * n).from_address(at)[:: max(1, n // most)][:most]


class Gradients(GradientWords):
    """Reads a few elements of a parameter's gradients in as few calls as possible.

    A gradient has the memory layout of its parameter (autograd keeps it so), and the next one mostly reuses the address of the
    last. Asking torch for this each time takes longer than all else that we do in a step: caches are cold here.
    """

    def __init__(self, p: torch.Tensor) -> None:
        super().__init__()
        self.n = n = p.numel()
        self.stride = 1 if n <= 64 else n // 16 if n < 100_000 else n // 64
        self._type = ctypes.c_float * n if sampled(p.detach(), 1) is not None else None
        self.plain = self._type is not None and p.is_contiguous()
        self._memory: tuple[int, Any] = (0, ())  # address, and what lies there

    def sum(self, g: torch.Tensor) -> float:
        """Return the sum of some elements: not finite if one of them is not; 0 if they cannot be read."""
        if not g.is_cpu or g.layout is not torch.strided:
            return 0.0
        if self._type is None or g.dtype is not _FLOAT32:
            n = g.numel()
            few = g if n <= 4096 else (g.view(-1) if g.is_contiguous() else g[0].reshape(-1))[:: n // 64]
            return float(few.sum())
        at = g.data_ptr()
        if not at:
            return 0.0
        if at != self._memory[0]:
            self._memory = at, memoryview(self._type.from_address(at)).cast("B").cast("f")
        memory, total = self._memory[1], 0.0
        for i in range(0, self.n, self.stride):
            total += memory[i]
        return total


class Checks:
    def __init__(self, r: state.Recorder, ledger: Ledger) -> None:
        self.r, self.h, self.page, self.ledger = r, r.h, r.page, ledger
        self.later, self._models = ledger.later, ledger.models  # (event, copy on the host, callback that gets the copy)
        self._nonfinite = 0
        self._suspects: list[tuple[SampleKind, int, float, Any, int]] = []  # kind, step, value, parameter, site
        self._reduced = 0
        self.averaged_elements = 0  # the most that were all-reduced between a step and the next backward
        self._grad_probe: tuple[Any, list[Any]] | None = None
        self._parameters_of: weakref.WeakKeyDictionary[Any, tuple[tuple[int, int], list[Any], int]] = (
            weakref.WeakKeyDictionary()
        )
        self.local_gradients = False  # gradients are checked before they are averaged

    def sample(self, kind: SampleKind, step: int, value: float, key: int = 0, name: str = "", site: int = 0) -> None:
        self.page.write_sample(int(kind), step, value, key, name, site, now_ns())

    # -- loss and gradients ----------------------------------------------------------------------------

    def loss(self, tensors: Any, site: int, micro_step: int) -> float | None:
        """Return the scalar that backward is called on; None if it is no scalar or on a device."""
        t = tensors[0] if type(tensors) in (tuple, list) and len(tensors) == 1 else tensors
        if type(t) is torch.Tensor:
            return self._loss(t, site, micro_step)
        if not isinstance(t, torch.Tensor) or not has_memory(type(t)):
            return None
        with unseen():
            return self._loss(t, site, micro_step)

    def _loss(self, t: torch.Tensor, site: int, micro_step: int) -> float | None:
        if t.dim() and t.numel() != 1:
            return None
        if t.is_cpu:
            read = sampled(t, 1)  # from memory: an operator would show in the profile of the job
            value = t.item() if read is None else read[0]
            if self.ledger.bad_losses or value - value:  # NaN if it is not finite
                self._loss_value(value, site, BAD_LOSSES)
            return value
        if micro_step % 8 == 0 and not _capturing():
            self._when_copied(t.detach().float().reshape(1), lambda v, s=site: self._loss_value(v[0].item(), s, 2))
        self.poll()
        return None

    def _loss_value(self, value: float, site: int, at_most: int) -> None:
        """Note a loss; report it if it is not finite and the optimizer makes its step, or after `at_most` such losses.

        A scaler drops the step of such a loss, and then it does no harm.
        """
        if isfinite(value):
            self.ledger.bad_losses = 0
            return
        self.ledger.bad_losses += 1
        if self.ledger.bad_losses == 1:
            self._suspect(SampleKind.NONFINITE_LOSS, value, None, site)
            self._look_at_input(site)
        elif self.ledger.bad_losses == at_most:
            self._convict()

    def _look_at_input(self, site: int) -> None:
        """True if the batch itself holds NaN: then the NaN began there, whatever else the loss depends on."""
        if _capturing():
            return
        t, step = self.ledger.newest and self.ledger.newest(), self.h.step + 1
        # plain tensors only: reading a tensor that is sharded over ranks is a collective
        if t is None or type(t) not in _PLAIN or not t.is_floating_point() or t.layout is not torch.strided:
            return
        found = torch.isnan(t.detach()).any()
        if not t.is_cpu:
            self._when_copied(found.float().reshape(1), lambda v: v[0] and self.sample(SampleKind.NAN_INPUT, step, 1.0))
        elif found:
            self.sample(SampleKind.NAN_INPUT, step, float("nan"), site=site)

    def _suspect(self, kind: SampleKind, value: float, p: Any, site: int) -> None:
        self.ledger.always = True
        if len(self._suspects) < NONFINITE_REPORTS:
            self._suspects.append((kind, self.h.step + 1, value, p, site))

    def _convict(self) -> None:
        for kind, step, value, p, site in self._suspects:
            if self._nonfinite < NONFINITE_REPORTS:
                self._nonfinite += 1
                self.sample(kind, step, value, name="" if p is None else self._name_of(p), site=site)
        self._suspects.clear()

    def _judge(self, optimizer: Any) -> None:
        """Check the gradients that the optimizer is about to use, or those after a step that was dropped."""
        skipped = getattr(optimizer, "found_inf", None)  # GradScaler sets it to make a fused optimizer drop the step
        looked = [p for _, _, _, p, _ in self._suspects if p is not None] or (self._grad_probe or (None, []))[1]
        found = (_own_part(p.grad) for p in looked)
        gradients = [g for g in found if g is not None and g.is_cpu and g.layout is torch.strided]
        if skipped is None and not all(isfinite(float(g.sum())) for g in gradients):
            self._convict()
        # a loss that stays NaN is reported even if the gradients are finite
        self._suspects = [x for x in self._suspects if self.ledger.bad_losses and x[0] is SampleKind.NONFINITE_LOSS]

    def _when_copied(self, t: torch.Tensor, then: Any) -> None:
        if len(self.later) > 16 or t.device.type != "cuda":
            return
        host = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True)  # whatever the job's default device
        with torch.cuda.device(t.device):
            host.copy_(t, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self.later.append((event, host, then))

    def poll(self) -> None:
        """Read the copies that have arrived from the device; never waits."""
        while self.later and not _capturing() and self.later[0][0].query():
            _, host, then = self.later.pop(0)
            then(host)

    def before_optimizer(self, optimizer: Any, step: int) -> None:
        models = self._models
        self._reduced, self.ledger.reduced_elements = self.ledger.reduced_elements, 0
        if not self.local_gradients:  # else this rank's own gradient was checked already
            self._gradients(optimizer, step)
        if self._suspects:
            self._judge(optimizer)
        for m in models.values():
            if step >= m.next_check and m.slot.forwards:
                self._unused(m, step)
            if m.times is not None and step >= m.times.next_read and not _capturing():
                ddp = m.ref()
                if ddp is None:
                    m.times = None
                else:
                    m.times.read(ddp, self.page, step)
        self.ledger.next_look = min((m.next_event for m in models.values()), default=0)
        self.ledger.always = bool(self._suspects or self._reduced or not self.local_gradients)

    def _gradients(self, optimizer: Any, step: int) -> None:
        probe = self._grad_probe
        if probe is None or probe[0]() is not optimizer:
            if probe is not None and step % 16:
                return
            params = [p for g in optimizer.param_groups for p in g["params"] if p.numel() <= 65536]
            params.sort(key=lambda p: p.numel())
            probe = self._grad_probe = (weakref.ref(optimizer), params[:1])
        if self._nonfinite >= NONFINITE_REPORTS:
            return
        for p in probe[1]:
            g = _own_part(p.grad)
            if g is None or g.is_sparse or g.device.type != "cpu":
                continue
            # one pass over a small gradient: a sum is finite only if no element is NaN (or inf, but for +inf -inf)
            total = float(g.sum())
            if not isfinite(total) and getattr(optimizer, "found_inf", None) is None:
                self._nonfinite += 1
                self.sample(SampleKind.NONFINITE_GRADIENT, step, total, name=self._name_of(p))
                return

    def local_gradient(self, p: Any, total: float, site: int) -> None:
        """Report the last gradient before it is averaged if it is not finite: that began on this rank.

        Backward carries NaN down to the first layers, so the gradient that comes last has seen them all.
        """
        if self._nonfinite < NONFINITE_REPORTS:
            self._suspect(SampleKind.NONFINITE_LOCAL_GRADIENT, total, p, site)

    def _name_of(self, p: Any) -> str:
        for m in self._models.values():
            for name, q in self._named(m):
                if q is p:
                    return name
        return ""

    def _named(self, m: Model) -> list[tuple[str, Any]]:
        """Return the parameters in DDP's order, without those that it ignores."""
        ddp = m.ref()
        if ddp is None:
            return []
        named = m.named
        if named is None:
            ignored = getattr(ddp, "parameters_to_ignore", None) or ()
            named = [(n, p) for n, p in ddp.module.named_parameters() if p.requires_grad and n not in ignored]
            m.named = named
        return named

    # -- unused parameters ------------------------------------------------------------------------------

    def _unused(self, m: Model, step: int) -> None:
        if m.frozen:
            self._unfrozen(m, step)
        named = self._named(m)
        slot = m.slot
        slot.unused_checks = looks = slot.unused_checks + 1
        each = 1 if looks < 4 else len(named) // (LOOKED_AT if looks < NEW_LOOKS else LOOKED_AT_LATER)
        m.next_check = step + max(1 if looks < NEW_LOOKS else LATER_STEPS, each)
        for _, p in named:  # mostly all have a gradient
            if p.grad is None:
                if slot.find_unused == 0 and not slot.static_graph:
                    # A script may drop a gradient itself before the step. If backward left one out, DDP refuses the next
                    # forward and names it: that is the proof. Until then it is unknown whether all have gradients.
                    slot.unused_checks = looks - 1
                    return
                missing = [(n, p.numel()) for n, p in named if p.grad is None]
                if len(missing) < len(named):
                    self._write_unused(m, missing, step)
                    self._write_never(m, missing)
                return
        if m.never is None or m.never:
            self._write_never(m, [])

    def _unfrozen(self, m: Model, step: int) -> None:
        """Report parameters that were frozen when DDP was built and have a gradient now: DDP averages none of them."""
        forwards = m.slot.forwards
        if forwards == m.frozen_forwards:
            return  # not in use any more: the module may have been wrapped again
        m.frozen_forwards = forwards
        frozen, at = m.frozen, m.frozen_next
        m.frozen_next = at + LOOKED_AT if at + LOOKED_AT < len(frozen) else 0
        if any(p.requires_grad and p.grad is not None for _, p in frozen[at : at + LOOKED_AT]):
            names = [n for n, p in frozen if p.requires_grad and p.grad is not None]
            m.frozen = []
            self.sample(SampleKind.UNFROZEN, step, float(len(names)), name=names[0], site=m.slot.site)

    def _write_unused(self, m: Model, missing: list[tuple[str, int]], step: int) -> None:
        m.slot.unused_hits += 1
        m.slot.unused_step = step
        names = json.dumps(missing[:NAMES_KEPT])
        if names not in m.unused_texts:
            if len(m.unused_texts) >= UNUSED_TEXTS:
                return  # layers dropped at random: new sets of names in every step would fill the heap
            m.unused_texts.add(names)
        m.slot.unused = self.page.text(names)
        ddp = m.ref()
        if step <= 1 and m.first_forward is not None and ddp is not None:  # the model may take another branch later
            never = m.first_forward.never_called(ddp.module, [name for name, _ in missing])
            m.slot.never_called = self.page.text(json.dumps(never[:NAMES_KEPT]))

    def _write_never(self, m: Model, missing: list[tuple[str, int]]) -> None:
        now = {n for n, _ in missing}
        never = now if m.never is None else m.never & now
        if never != m.never:
            m.never = never
            m.slot.never_trained = self.page.text(json.dumps([x for x in missing if x[0] in never][:NAMES_KEPT]))

    @guarded
    def crashed_unused(self, m: Model, error: BaseException, site: int) -> None:
        """Record the parameters that DDP names in its error: the message has the indices, the module the names."""
        found = _INDICES.search(str(error))
        named = self._named(m)
        missing: list[tuple[str, int]] = []
        if found:
            indices = [int(i) for i in found.group(1).split()]
            missing = [(named[i][0], named[i][1].numel()) for i in indices if i < len(named)]
        m.slot.unused_site = site
        m.unused_texts.clear()  # reported
        if missing:
            self._write_unused(m, missing, self.h.step)

    # -- replicas ----------------------------------------------------------------------------------------

    def after_optimizer(self, optimizer: Any, step: int) -> None:
        """Record checksums of a few elements of a few parameters, after the same steps on all ranks."""
        if not checksum_due(step):
            return
        params, elements = self._parameters(optimizer)
        if not params:
            return
        # only parameters that are trained now: many jobs leave frozen ones in the optimizer
        trained = sum(p.numel() for p in params if p.grad is not None) if self._reduced else 0
        self.sample(SampleKind.REDUCED, step, self._reduced / trained if trained else 0.0)
        if self.averaged_elements:
            self.sample(SampleKind.AVERAGED, step, self.averaged_elements / elements if elements else 0.0)
        self._checksum(SampleKind.PARAMETERS, params, step)
        rates = [g.get("lr") for g in optimizer.param_groups]
        if all(type(rate) in (int, float) for rate in rates):  # it may be a tensor on a device
            self.sample(SampleKind.LEARNING_RATE, step, rates[0], zlib.crc32(repr(rates).encode()))
        buffers = [b for m in self._models.values() for b in self._buffers(m)]
        if buffers:
            self._checksum(SampleKind.BUFFERS, buffers, step)

    def _parameters(self, optimizer: Any) -> tuple[list[Any], int]:
        """Return (parameters, elements) of an optimizer that must be equal on all ranks; cached while their number stays.

        With DDP: those that DDP wraps (layers that it ignores, such as experts, differ by design). None if some are sharded
        (DTensor), as shards differ by design.
        """
        n = sum(len(g["params"]) for g in optimizer.param_groups)
        mark = (n, len(self._models))
        kept = self._parameters_of.get(optimizer)
        if kept is None or kept[0] != mark:
            params = [
                p for g in optimizer.param_groups for p in g["params"] if type(p) in (torch.nn.Parameter, torch.Tensor)
            ]
            whole = len(params) == n
            wrapped = {id(p) for m in self._models.values() for _, p in self._named(m)}
            params = [p for p in params if id(p) in wrapped] or params
            kept = (mark, params if whole else [], sum(p.numel() for p in params) if whole else 0)
            self._parameters_of[optimizer] = kept
        return kept[1], kept[2]

    def _buffers(self, m: Model) -> list[torch.Tensor]:
        """Return the floating-point buffers of a model. Their owners are cached: there are many modules, and buffers get replaced."""
        ddp = m.ref()
        if ddp is None:
            return []
        if m.buffer_places is None:
            m.buffer_places = [(x, name) for x in ddp.module.modules() for name in x._buffers]
        found = [x._buffers.get(name) for x, name in m.buffer_places]
        return [b for b in found if b is not None and b.is_floating_point()]

    def _checksum(self, kind: SampleKind, tensors: list[Any], step: int) -> None:
        tensors = [t for t in tensors if has_memory(type(t))]
        chosen = tensors[:: max(1, len(tensors) // CHECKSUM_TENSORS)][:CHECKSUM_TENSORS]
        synced = sum(m.slot.synced_backwards for m in self._models.values())
        m = self.ledger.averaged_by
        group = str(m.pg.group_name) if m is not None else ""
        what = repr([group, len(tensors), *(tuple(t.shape) for t in chosen)])
        key = zlib.crc32(what.encode()) | (synced & 0xFFFFFFFF) << 32
        buffers = kind is SampleKind.BUFFERS
        value = 0.0
        for i, t in enumerate(chosen):
            some = sampled(t, CHECKSUM_ELEMENTS)
            if some is None:
                break
            value += sum(map(abs, some) if buffers else some) * (1.0 + i / 16)
        else:
            return self.sample(kind, step, value, key=key)
        if _capturing():
            return
        with torch.no_grad():
            parts = []
            for i, t in enumerate(chosen):
                flat = t.detach().reshape(-1) if t.is_contiguous() else t.detach().flatten()[:CHECKSUM_ELEMENTS]
                some = flat[:: max(1, flat.numel() // CHECKSUM_ELEMENTS)][:CHECKSUM_ELEMENTS]
                parts.append((some.double().abs() if buffers else some.double()).sum() * (1.0 + i / 16))
            if not parts:
                return
            total = torch.stack(parts).sum()
        if total.device.type == "cpu":
            self.sample(kind, step, float(total), key=key)
        else:
            self._when_copied(total.reshape(1), lambda v, k=kind, s=step, x=key: self.sample(k, s, v[0].item(), key=x))
