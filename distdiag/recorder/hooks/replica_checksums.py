"""Samples checksums of parameters and buffers after the same steps on all ranks, to compare the replicas."""

from __future__ import annotations

import sys
import weakref
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from operator import is_, mul
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed import distributed_c10d as dist
from torch.nn.modules import batchnorm, dropout

from distdiag.page.layout import SampleKind
from distdiag.recorder.fast.accounts import Ledger
from distdiag.recorder.hooks.flight_recorders import of_world
from distdiag.recorder.hooks.lost_hooks import lost
from distdiag.recorder.hooks.tensor_samples import Samples, capturing, gradient, own_part, sampled
from distdiag.recorder.hooks.wrapped_model import EnteredModules, watch_forward
from distdiag.recorder.torch_names import private
from distdiag.recorder.unseen import attributes, has_memory, named_modules, named_tensors, parameters, unseen
from distdiag.terms.ranks import fold_ranks

if TYPE_CHECKING:
    from distdiag.recorder.hooks.wrapped_model import Model

CHECKSUM_TENSORS, CHECKSUM_ELEMENTS, MODULES = 24, 32, 8
CHANGED = 1 << 32  # key: this averaging has changed the parameters, as earlier ones have not
NAMES = 4  # of parameters, in one sample
_NORM, _DROPOUT = private(batchnorm, "_NormBase"), private(dropout, "_DropoutNd")
OBSERVERS = ("observer", "fakequant", "fake_quant")  # in names of classes
LAYERS_MOST = 512  # parameters whose classes of layers are sampled, after these steps
LAYER_STEPS = (32, 64, 128)
# Of the elements of a parameter. A plain sum may stay equal while they change: cross entropy moves the rows of the last layer in sum by 0.
WEIGHTS = tuple(1.0 + j / CHECKSUM_ELEMENTS for j in range(CHECKSUM_ELEMENTS))


def checksum_due(step: int) -> bool:
    """True for steps 2, 4, 8, 16, 32, then every 32nd, from 256 on every 64th: the same on all ranks."""
    return step >= 2 and step & (step - 1) == 0 if step < 32 else step % (32 if step < 256 else 64) == 0


class _Compared(NamedTuple):
    """Parameters of one optimizer, or their numbers in it.

    Those that must be equal, their elements, a hash of their names, the ranks ("": all), and those that no DDP module
    had when it was built, or that FSDP does not shard.
    """

    params: list[Any]
    elements: int
    which: int
    ranks: str
    outside: list[Any]


class ReplicaChecksums:
    def __init__(self, ledger: Ledger, samples: Samples) -> None:
        self.ledger, self.samples = ledger, samples
        # the other optimizers that step, by id, in their order
        self.others: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.reduced = 0  # elements reduced over all ranks since the last step
        self.averaged_elements = 0  # maximum of elements all-reduced between a step and the next backward
        # checksum of the parameters after the newest step (the step: the sum), once they are averaged between steps; until that changes them
        self._stepped: dict[int, float] | None = None
        self._unwritten = 0  # averagings so far that have left the parameters as they were; -1: one has changed them
        self._began = False  # the parameters have been sampled before the first step
        self.shapes: set[tuple[int, ...]] = set()  # of the parameters that optimizers step
        self._summed: weakref.WeakSet[Any] = weakref.WeakSet()  # the optimizers whose parameters are in the next field
        self._sums: dict[int, float] = {}  # of each parameter before the first step, by id; for the layers
        self._constant: set[int] = set()  # those of which all sampled elements are equal then, as zeros are; on the CPU
        # by class, the modules that own those parameters, until they are sampled; no parameter is kept alive
        self._layers: dict[str, list[weakref.ref[Any]]] = {}
        self._left: list[float] = []  # newest checksums of parameters that no optimizer has
        self._calls: EnteredModules | None = None  # during the second step
        # modules outside DDP that the second step called, without a trained parameter; with the marks of the buffers of one without parameters
        self._untrained: list[tuple[weakref.ref[Any], list[tuple[int, int]]]] = []
        self._outer: list[weakref.ref[Any]] = []  # without DDP: the modules that it called, without those within others
        # modules that it called within DDP's forward and that are not of DDP's module, with parameters that no optimizer has
        self._loose: list[weakref.ref[Any]] = []
        # by optimizer, with the ids of its parameters and how many models there are; keeps no parameter alive
        self._parameters_of: weakref.WeakKeyDictionary[Any, tuple[Any, _Compared]] = weakref.WeakKeyDictionary()
        # of each optimizer: how many parameters it has, and the numbers of those without a gradient so far
        self._never: weakref.WeakKeyDictionary[Any, tuple[int, list[int]]] = weakref.WeakKeyDictionary()

    def begin_again(self) -> None:
        """Forget the steps so far: their optimizers and modules were not those of the training."""
        if self._calls is not None:
            self._calls.end()
        self.others.clear()
        self._stepped, self._calls, self._began, self._unwritten, self.averaged_elements = None, None, False, 0, 0

    def before_first_step(self, optimizer: Any) -> None:
        """Record a checksum of the parameters as the job begins with them; an optimizer within this one's step is not sampled."""
        compared = self._parameters(optimizer)
        if not self._began:
            self._outside_fsdp(compared.outside, 0)
        if not self._began and compared.params:
            self._began = True
            self._checksum(SampleKind.PARAMETERS, compared.params, 0, compared.which, name=compared.ranks)
        self.begins(optimizer)

    def begins(self, optimizer: Any) -> None:
        """Sum up each parameter of an optimizer before its first step, for the classes of layers; once the leading one has stepped, those
        of others.
        """
        if self.ledger.models or optimizer in self._summed:
            return
        self._summed.add(optimizer)
        each = [p for p in self._parameters(optimizer).params if has_memory(type(p))][: LAYERS_MOST - len(self._sums)]
        constant = (p for p in each if (some := sampled(p, CHECKSUM_ELEMENTS)) is not None and len({*some}) == 1)
        self._constant.update(map(id, constant))
        self._sum(each, False, lambda values: self._sums.update(zip(map(id, each), values, strict=True)))

    def averaged(self, elements: int, step: int) -> None:
        """Note that elements were reduced over all ranks before a backward pass; if as many as the parameters have, between two steps, see
        whether that has changed them.
        """
        self.averaged_elements = max(self.averaged_elements, elements)
        lead = self.ledger.lead() if self.ledger.lead is not None else None
        if (
            lead is None or self._unwritten < 0 or self.ledger.backward_ns
        ):  # the last: of an earlier pass, whose gradients they may be
            return
        kept = self._parameters_of.get(lead)
        if kept is not None and elements < kept[1].elements:  # as a loss: listing the parameters costs time
            return
        with unseen():
            compared = self._parameters(lead)
            if compared.params and not compared.ranks and compared.elements <= elements <= 1.05 * compared.elements:
                self._stepped = self._stepped or {}
                self._sum(_spread(compared.params), False, partial(self._as_stepped, compared.which, step))

    def _as_stepped(self, which: int, step: int, values: list[float]) -> None:
        """Record the checksum of parameters that an averaging after a step has left as they were, after the first few such and then fewer."""
        total = _total(values)
        stepped = (self._stepped or {}).get(step)
        if stepped is not None and self._unwritten >= 0:
            before = self._unwritten
            self._unwritten = n = before + 1 if stepped == total else -1
            if n & (n - 1) == 0 if n > 0 else before > 0:
                self.samples.write(SampleKind.NOT_WRITTEN_BACK, step, total, which if n > 0 else CHANGED)

    def after_optimizer(self, optimizer: Any, step: int) -> None:
        """Record checksums of a few elements of a few parameters, after the same steps on all ranks."""
        if self._stepped is not None and self._unwritten >= 0:
            some = _spread(self._parameters(optimizer).params)
            self._sum(some, False, lambda values: setattr(self, "_stepped", {step: _total(values)}))
        if step == 1 or self._calls is not None:
            self._watch_second_step(optimizer, step)
        if not checksum_due(step):
            return
        params, elements, which, ranks, outside = self._parameters(optimizer)
        own = _params(optimizer)
        if type(optimizer).__module__.startswith("torch.optim."):  # others may have the gradients elsewhere
            self._without_gradient(optimizer, own, step)
        if any(m.slot.synced_backwards for m in self.ledger.models.values()):
            self._not_stepped(optimizer, step)
            self._hooks_lost(step)
            if any(map(is_, params, outside)):  # the optimizer has none of DDP's: they are no replicas of one model
                params = []
            self._outside_ddp(outside, step)
        if self.reduced or params:
            # only parameters that are trained now: many jobs leave frozen ones in the optimizer
            every = params if params and not ranks else own
            trained = sum(p.numel() for p in every if gradient(p) is not None) if self.reduced else 0
            self.samples.write(SampleKind.REDUCED, step, self.reduced / trained if trained else 0.0, self.reduced)
        self._rate(optimizer, params, step)
        self._outside_fsdp(outside, step)
        if not params:
            return
        if self.averaged_elements:
            self.samples.write(SampleKind.AVERAGED, step, self.averaged_elements / elements if elements else 0.0)
        if gradients := [g for p in params if (g := gradient(p)) is not None and not g.is_sparse]:
            self._checksum(SampleKind.GRADIENTS, gradients, step, which, name=ranks)
        self._checksum(SampleKind.PARAMETERS, params, step, which, name=ranks)
        if step in LAYER_STEPS:
            self._sample_layers(step)
        if (counted := _counted(optimizer, params)) is not None:
            self.samples.write(SampleKind.OPTIMIZER_STEPS, step, counted)
        self._sample_models([*self.ledger.models.values()], step)

    def _sample_models(self, models: list[Model], step: int) -> None:
        """Record checksums of what no optimizer steps in DDP's modules, and how many of their layers are in eval mode."""
        buffers = [x for m in models for x in self._buffers(m)]
        if buffers:
            self._checksum(SampleKind.BUFFERS, [b for b, _ in buffers], step)
        kept = [(b, name) for b, name in buffers if name]
        if kept:
            self._checksum(SampleKind.STATE, [b for b, _ in kept], step, name=_one_of([name for _, name in kept]))
        if frozen := [x for m in models for x in _untrained(m)]:
            self._checksum(SampleKind.FROZEN, [p for p, _ in frozen], step, name=_one_of([name for _, name in frozen]))
        layers = [layer for m in models for layer in _mode_layers(m)]
        if layers:
            self.samples.write(SampleKind.EVAL_MODE, step, sum(not layer.training for layer in layers), len(layers))

    def _rate(self, optimizer: Any, params: list[Any], step: int) -> None:
        """Record the learning rate of an optimizer whose parameters are compared, or are sharded over the ranks."""
        groups = optimizer.param_groups
        rates = [g.get("lr") for g in groups]
        known = all(type(rate) in (int, float) for rate in rates)  # it may be a tensor on a device
        sharded = any(map(_sharded, _params(optimizer)))
        if known and (params or sharded) and (any(rates) or not self.others):  # else other optimizers train for now
            written = sum(p._version for p in params[:: max(1, len(params) // CHECKSUM_TENSORS)])
            alike = zlib.crc32(repr([len(g["params"]) for g in groups]).encode()) >> 1 << 33
            key = written & 0xFFFFFFFF | sharded << 32 | alike
            site = self.samples.user_site(sys._getframe(1))
            self.samples.write(SampleKind.LEARNING_RATE, step, next(filter(None, rates), 0.0), key, site=site)

    def _watch_second_step(self, optimizer: Any, step: int) -> None:
        """Find the modules that the second step calls: those outside DDP, or without DDP all."""
        if step == 1:
            self._calls = watch_forward()
        elif self._calls is not None:
            self._calls.end()
            if self.ledger.models:
                self._untrained, self._loose = self._without_optimizer(self._calls, optimizer)
            else:
                self._layers, self._outer = self._by_class(self._calls), _outermost(self._calls)
            self._calls = None

    def _outside_ddp(self, outside: list[Any], step: int) -> None:
        """Record checksums of the parameters that optimizers train, and of modules that nothing trains, outside DDP."""
        outside = [p for p in outside if gradient(p) is not None]
        for other in self.others.values():  # what its step contains may be the lead: then it has the same
            known = set(map(id, outside))
            outside += [
                p
                for p in self._parameters(other).outside
                if id(p) not in known and (gradient(p) is not None or _state(other, p))
            ]
        if outside:
            self._checksum(SampleKind.OUTSIDE_DDP, outside, step, name=_shapes(outside))
        # buffers that have changed since may be each rank's own: sums, metrics
        of = [(module, mark) for ref, mark in self._untrained if (module := ref()) is not None]
        if found := [module for module, mark in of if not mark or mark == _marks(_constants(module))]:
            names = ", ".join(dict.fromkeys(type(module).__name__ for module in found))
            tensors = [t for module in found for t in [*parameters(module)] or _constants(module)]
            self._checksum(SampleKind.UNTRAINED, tensors, step, name=names)

    def _outside_fsdp(self, outside: list[Any], step: int) -> None:
        """Record a checksum of the parameters that FSDP does not shard; one without a gradient is not trained."""
        trained = [] if self.ledger.models else [p for p in outside if gradient(p) is not None]
        if trained:
            named = self._named()
            names = [named[id(p)][0] for p in trained if id(p) in named]
            self._checksum(SampleKind.OUTSIDE_FSDP, trained, step, name=_shapes(trained, names))

    def _named(self) -> dict[int, tuple[str, Any]]:
        """Return (name, parameter) by id of those of the modules that the second step called, without DDP."""
        modules = [module for ref in self._outer if (module := ref()) is not None]
        return {id(p): (name, p) for module in modules for name, p in named_tensors(module)}

    def _sample_layers(self, step: int) -> None:
        """Record a checksum of each class of layers; first also from before the first step."""
        for name, modules in self._layers.items():
            if not (owned := [p for module in modules for p in self._summed_up(module())]):
                continue
            sparse = all((g := gradient(p)) is not None and g.is_sparse for p in owned)
            elements = min(sum(p.numel() for p in owned), (1 << 30) - 1)
            key = len(owned) | all(map(self._began_constant, owned)) << 32 | sparse << 33 | elements << 34
            if step == LAYER_STEPS[0]:
                self._write_layers(name, 0, key, [self._sums[id(p)] for p in owned])
            self._sum(owned, False, partial(self._write_layers, name, step, key))
        if step == LAYER_STEPS[-1]:
            self._layers.clear()

    def _began_constant(self, p: Any) -> bool:
        """True for a parameter that began with one value in all its elements; on a device only if that is known of zeros and ones."""
        ones = sum(WEIGHTS[: p.numel()])
        return id(p) in self._constant or self._sums[id(p)] in (0.0, ones)

    def _not_stepped(self, lead: Any, step: int) -> None:
        """Record how many of DDP's parameters have a gradient and are in no optimizer that has stepped.

        Or parameters of modules that DDP's forward calls and DDP's module does not have: they are in a list or dict; bit 32 of the key.
        The key is how many parameters of the optimizers no DDP module has, and no backward reaches: those of a layer that was replaced.
        Others with gradients may be copies, in another precision, of those that are left: then nothing is known.
        """
        models = self.ledger.models.values()
        own = {id(p): p for optimizer in (lead, *self.others.values()) for p in _params(optimizer)}
        modules = [module for ref in self._loose if (module := ref()) is not None]
        named = [(f"{type(module).__name__}.{name}", p) for module in modules for name, p in named_tensors(module)]
        loose, inside = (
            [(name, p) for name, p in of if gradient(p) is not None and id(p) not in own]
            for of in (named, [x for m in models for x in m.trained()])
        )
        if found := loose or inside:
            built_with = frozenset().union(*(m.built_with for m in models))
            stale = [] if loose else [p for i, p in own.items() if i not in built_with]
            if all(gradient(p) is None for p in stale):
                key = len(stale) | bool(loose) << 32
                found.sort(key=lambda x: -x[1].numel())
                names = ", ".join([*dict.fromkeys(name for name, _ in found)][:NAMES])
                some = _spread([p for _, p in found])
                self._sum(some, False, partial(self._unchanged, step, len(found), key, names))

    def _replaced(self, lead: Any, lacking: list[Any], step: int) -> None:
        """Without DDP: record how many parameters of the modules that the forward calls have a gradient and are in no optimizer.

        If the leading optimizer has some without a gradient that these modules do not have, and of each there is one of its shape,
        but for the first dimension, among those: so they were replaced after it was built.
        """
        named = self._named()
        stale = [p for p in lacking if id(p) not in named]
        if not stale:
            return
        own = {id(p) for optimizer in (lead, *self.others.values()) for p in _params(optimizer)}
        left = [of for i, of in named.items() if i not in own and gradient(of[1]) is not None]
        if Counter(map(_row, stale)) <= Counter(_row(p) for _, p in left):
            names = ", ".join([name for name, _ in left[:NAMES]])
            some = [part for _, p in _spread(left) if (part := own_part(p)) is not None]
            self._sum(some, False, partial(self._unchanged, step, len(left), len(stale), names))

    def _hooks_lost(self, step: int) -> None:
        names, n = lost([*self.ledger.models.values()])
        if names:
            self.samples.write(SampleKind.HOOKS_LOST, step, len(names), n, names[0])

    def _unchanged(self, step: int, n: int, key: int, name: str, values: list[float]) -> None:
        """Record `n` parameters that no optimizer of this rank has, unless something else has changed them: a script, or another rank's."""
        before, self._left = self._left, values
        if values == before:
            self.samples.write(SampleKind.NOT_STEPPED, step, n, key, name)

    def _write_layers(self, name: str, step: int, key: int, values: list[float]) -> None:
        self.samples.write(SampleKind.LAYERS, step, sum(values), key, name)

    def _by_class(self, calls: EnteredModules) -> dict[str, list[weakref.ref[Any]]]:
        """Return the modules that own a parameter that was sampled before the first step, by their class."""
        found: dict[str, list[weakref.ref[Any]]] = {}
        for ref in calls.modules.values():
            if self._summed_up(module := ref()):
                found.setdefault(type(module).__name__, []).append(ref)
        return dict([*found.items()][:MODULES])

    def _summed_up(self, module: Any) -> list[Any]:
        """Return a module's parameters that were sampled before the first step; none if it exists no more."""
        return [p for p in module._parameters.values() if id(p) in self._sums] if module is not None else []

    def _without_optimizer(
        self, calls: EnteredModules, lead: Any
    ) -> tuple[list[tuple[weakref.ref[Any], list[tuple[int, int]]]], list[weakref.ref[Any]]]:
        """Return the modules outside DDP that `calls` has seen and whose parameters no optimizer has; none that is part of another.

        First those that no gradient trains, also without parameters, then those that DDP's forward calls and a gradient could train.
        """
        models = self.ledger.models.values()
        known = {id(p) for optimizer in (lead, *self.others.values()) for p in _params(optimizer)}.union(
            *(m.built_with for m in models)
        )
        inside = {id(x) for m in models if (ddp := m.ref()) is not None for _, x in named_modules(ddp.module)}
        untrained, loose = [], []
        for i, ref in calls.modules.items():
            params = [*parameters(module)] if (module := ref()) is not None else []
            constants = [] if params or module is None or i in inside else _constants(module)
            params = params or constants
            if not params or any(id(p) in known for p in params):
                continue
            if not any(p.requires_grad for p in params):
                untrained.append((ref, _marks(constants)))
            elif i in calls.in_ddp:
                loose.append(ref)
            else:
                continue
            known.update(map(id, params))
        return untrained[:MODULES], loose[:MODULES]

    def _without_gradient(self, optimizer: Any, own: list[Any], step: int) -> None:
        """Record how many of an optimizer's parameters have had no gradient at any sampled step, or that all lack one now.

        Under DDP only the latter: `UnusedParameters` checks and names those that a backward pass leaves out. A parameter without
        elements has no part on this rank (FSDP with `use_orig_params`).
        """
        trained = [i for i, p in enumerate(own) if p.requires_grad and p.numel()]
        kept = self._never.get(optimizer)
        before = kept[1] if kept is not None and kept[0] == len(own) else trained
        lacking = [i for i in trained if gradient(own[i]) is None]
        if len(lacking) < len(trained):
            if self.ledger.models:
                return
            now = set(lacking)
            lacking = [i for i in before if i in now]
            self._never[optimizer] = len(own), lacking
            self._replaced(optimizer, [own[i] for i in lacking], step)
        elif self.ledger.models and self.ledger.averaged_by is None:
            return
        if lacking or (before and kept is not None):  # the last: none lacks one any longer
            share = sum(own[i].numel() for i in lacking) / max(1, sum(own[i].numel() for i in trained))
            key = len(trained) | round(share * 1e6) << 32
            self.samples.write(
                SampleKind.NO_GRADIENTS, step, len(lacking), key, _shape(own[lacking[0]]) if lacking else ""
            )

    def _parameters(self, optimizer: Any) -> _Compared:
        """Return what to compare of an optimizer; cached while its parameters are the same.

        With DDP: the parameters that DDP wraps (layers that it ignores, such as experts, differ by design), and apart from them those
        that no DDP module had when it was built. If some are sharded (DTensor): those that are whole on each rank of a dimension of
        their mesh; shards differ by design. The names matter where each rank's optimizer has other parameters of equal shapes:
        ZeroRedundancyOptimizer gives the layers of a model to different ranks.
        """
        own, models = _params(optimizer), self.ledger.models.values()
        mark = (*map(id, own), len(models))
        kept = self._parameters_of.get(optimizer)
        if kept is None or kept[0] != mark:
            self.shapes |= {tuple(x.shape) for p in own for x in (p, own_part(p)) if x is not None}
            params = [p for p in own if type(p) in (torch.nn.Parameter, torch.Tensor)]
            if len(params) == len(own):
                names = {id(p): f"{i}.{name}" for i, m in enumerate(models) for name, p in m.trained()}
                inside = frozenset().union(*(m.built_with for m in models))
                outside = [p for p in params if id(p) not in inside] if inside else []
                params = [p for p in params if id(p) in names] or outside or params
                which = zlib.crc32(repr([names.get(id(p)) for p in params]).encode())
                compared = _Compared(params, sum(p.numel() for p in params), which, "", outside)
            else:
                tensors, ranks = ([], "") if models else _replicated(optimizer)
                compared = _Compared(tensors, sum(t.numel() for t in tensors), 0, ranks, [])
            if not models:
                compared = compared._replace(outside=_beside_fsdp(optimizer))
            numbers = {i: k for k, i in enumerate(mark[:-1])}
            params, outside = ([numbers[id(p)] for p in of] for of in (compared.params, compared.outside))
            kept = self._parameters_of[optimizer] = mark, compared._replace(params=params, outside=outside)
        params, outside = ([own[k] for k in of] for of in (kept[1].params, kept[1].outside))
        return kept[1]._replace(params=params, outside=outside)

    def _buffers(self, m: Model) -> list[tuple[torch.Tensor, str]]:
        """Return (floating-point buffer, its name if it is saved with the model and no running statistic, else empty) of a model.

        Their owners are cached: there are many modules, and buffers get replaced.
        """
        ddp = m.ref()
        if ddp is None or hasattr(ddp, "buffer_hook"):  # the job's own way to make them equal
            return []
        if m.buffer_places is None:
            m.buffer_places = [
                (x, name, full if _saved(x, name) else "")
                for x, name, full in _places(ddp, "_buffers")
            ]  # fmt: skip
        found = [(x._buffers.get(name), kept) for x, name, kept in m.buffer_places]
        return [(b, kept) for b, kept in found if b is not None and b.is_floating_point()]

    def _checksum(self, kind: SampleKind, tensors: list[Any], step: int, which: int = 0, name: str = "") -> None:
        tensors = [part for t in tensors if (part := own_part(t)) is not None]
        chosen = _spread(tensors)
        synced = sum(m.slot.synced_backwards for m in self.ledger.models.values())
        m = self.ledger.averaged_by
        group = of_world("pg_names", {}).get(m.pg, "") if m is not None else ""
        what = repr([group, len(tensors), which, *(tuple(t.shape) for t in chosen)])
        key = zlib.crc32(what.encode()) | (synced & 0xFFFFFFFF) << 32
        magnitudes = kind in (SampleKind.BUFFERS, SampleKind.GRADIENTS)
        self._sum(chosen, magnitudes, lambda values: self.samples.write(kind, step, _total(values), key=key, name=name))

    def _sum(self, chosen: list[Any], magnitudes: bool, then: Callable[[list[float]], None]) -> None:
        """Call `then` with a weighted sum of some elements of each tensor, or of their magnitudes: now, or once they are on the host."""
        values = []
        if not all(has_memory(type(t)) for t in chosen):
            return
        for t in chosen:
            some = sampled(t, CHECKSUM_ELEMENTS)
            if some is None:
                break
            values.append(sum(map(abs, some) if magnitudes else map(mul, some, WEIGHTS)))
        else:
            return then(values)
        if capturing():
            return
        with torch.no_grad():
            parts = []
            for t in chosen:
                flat = t.detach().reshape(-1) if t.is_contiguous() else t.detach().flatten()[:CHECKSUM_ELEMENTS]
                some = flat[:: max(1, flat.numel() // CHECKSUM_ELEMENTS)][:CHECKSUM_ELEMENTS]
                if some.is_complex():
                    some = torch.view_as_real(some.resolve_conj()).reshape(-1)
                weighted = torch.arange(len(some), dtype=torch.float64, device=some.device) / CHECKSUM_ELEMENTS + 1.0
                parts.append((some.double().abs() if magnitudes else some.double() * weighted).sum())
            if not parts:
                return
            sums = torch.stack(parts)
        if sums.device.type == "cpu":
            then(sums.tolist())
        else:
            self.samples.when_copied(sums, lambda copied: then(copied.tolist()))


def _total(values: list[float]) -> float:
    return sum(value * (1.0 + i / 16) for i, value in enumerate(values))


def _outermost(calls: EnteredModules) -> list[weakref.ref[Any]]:
    """Return the modules that were entered, without those that are within another one."""
    found, known = [], set()
    for i, ref in calls.modules.items():
        if i not in known and (module := ref()) is not None:
            found.append(ref)
            known.update(id(x) for _, x in named_modules(module))
    return found


def _row(p: Any) -> tuple[int, tuple[int, ...]]:
    return p.dim(), tuple(p.shape[1:])


def _spread(tensors: list[Any]) -> list[Any]:
    return tensors[:: max(1, len(tensors) // CHECKSUM_TENSORS)][:CHECKSUM_TENSORS]


def _params(optimizer: Any) -> list[Any]:
    return [p for g in optimizer.param_groups for p in g["params"]]


def _sharded(p: Any) -> bool:
    """True if each rank steps its own part of a parameter: FSDP's, or of a DTensor."""
    placements = getattr(p, "placements", ())
    return any(x.is_shard() for x in placements) if placements else getattr(p, "_fsdp_flattened", False)


def _beside_fsdp(optimizer: Any) -> list[Any]:
    """Return the parameters of an optimizer that FSDP over all ranks leaves to each of them, beside those that it shards."""
    params = _params(optimizer)
    sharded = [p for p in params if _sharded(p)]
    plain = [p for p in params if type(p) in (torch.nn.Parameter, torch.Tensor) and not _sharded(p)]
    if not sharded or not plain:
        return []
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fully_shard")
    meshes = {mesh for p in sharded if (mesh := getattr(p, "device_mesh", None)) is not None}
    partly = any(mesh.ndim > 1 or mesh.size() < dist.get_world_size() for mesh in meshes)
    return plain if not partly and (not meshes or getattr(fsdp, "cls_to_fsdp_cls", None)) else []


def _places(ddp: Any, held: str) -> list[tuple[Any, str, str]]:
    """Return (module, name in it, full name) of what the modules in DDP hold (`_buffers`, `_parameters`), without what DDP ignores."""
    ignored = getattr(ddp, "parameters_to_ignore", None) or ()
    named = ((x, name, f"{of}.{name}".lstrip(".")) for of, x in named_modules(ddp.module) for name in getattr(x, held))
    return [x for x in named if x[2] not in ignored]


def _untrained(m: Model) -> list[tuple[Any, str]]:
    """Return (parameter, name) of some of a model's that no gradient trains: frozen, or put there by the script since DDP was built.

    The owners are cached, as those of buffers. They are of the rarest kinds of layers: a codebook that the script updates is one of
    few, while a frozen backbone has many equal layers.
    """

    def untrained(place: tuple[Any, str, str]) -> bool:
        p = place[0]._parameters.get(place[1])
        # some put a computed tensor in a parameter's place
        return (
            p is not None and p.is_leaf and gradient(p) is None and (not p.requires_grad or id(p) not in m.built_with)
        )

    ddp = m.ref()
    if ddp is None:
        return []
    if m.frozen_places is None:
        places = [*filter(untrained, _places(ddp, "_parameters"))]
        kinds = Counter((type(x), name) for x, name, _ in places)
        m.frozen_places = sorted(places, key=lambda x: kinds[type(x[0]), x[1]])[:CHECKSUM_TENSORS]
    return [(x._parameters[name], full) for x, name, full in filter(untrained, m.frozen_places)]


def _mode_layers(m: Model) -> list[Any]:
    """Return the dropout and batch-norm layers of a model; cached."""
    ddp = m.ref()
    if ddp is None:
        return []
    if m.mode_layers is None:
        m.mode_layers = [x for _, x in named_modules(ddp.module) if isinstance(x, (_DROPOUT, _NORM))]
    return m.mode_layers


def _state(optimizer: Any, p: Any) -> Any:
    """Return what an optimizer has kept of a parameter, None if nothing; its class may compute `state`."""
    state = attributes(optimizer).get("state")
    return dict.get(state, p) if isinstance(state, dict) else None


def _counted(optimizer: Any, params: list[Any]) -> float | None:
    """Return how many steps the state of a parameter has counted, as Adam's does; None if there is no count, or it is on a device."""
    state = next((found for p in params if (found := _state(optimizer, p)) is not None), None)
    count: Any = state.get("step") if isinstance(state, dict) else None
    if isinstance(count, torch.Tensor):
        return float(count) if type(count) is torch.Tensor and count.is_cpu and count.numel() == 1 else None
    return float(count) if type(count) in (int, float) else None


def _statistics(module: Any, name: str) -> bool:
    """True for buffers that batches of any rank estimate well enough: those of batch norm, of observers of quantisation, and what is named so."""
    observes = any(word in x.__name__.lower() for x in type(module).__mro__ for word in OBSERVERS)
    return observes or isinstance(module, _NORM) or name.startswith(("running_", "min_val", "max_val"))


def _saved(module: Any, name: str) -> bool:
    """True for a buffer that is saved with the model and is no running statistic."""
    return not _statistics(module, name) and name not in module._non_persistent_buffers_set


def _constants(root: Any) -> list[Any]:
    """Return such buffers of a module, with floating-point numbers."""
    named = ((x, *of) for _, x in named_modules(root) for of in x._buffers.items())
    return [b for x, name, b in named if b is not None and b.is_floating_point() and _saved(x, name)]


def _marks(buffers: list[Any]) -> list[tuple[int, int]]:
    """Return what changes once a buffer is written or replaced."""
    return [(id(b), 0 if b.is_inference() else b._version) for b in buffers]


def _one_of(names: list[str]) -> str:
    """Return the name of the only tensor of a checksum, or of how many one differs: a checksum does not tell which."""
    last = [*dict.fromkeys(name.rpartition(".")[2] for name in names)]
    kinds = ", ".join(last[:NAMES]) + (", …" if len(last) > NAMES else "")
    return names[0] if len(names) == 1 else f"one or more of {len(names)}: {kinds}"


def _shape(p: Any) -> str:
    return "one element" if p.numel() == 1 else " x ".join(map(str, p.shape))


def _shapes(params: list[Any], names: list[str] | None = None) -> str:
    """Return how many these are and the shape of the first, or names if all have one: "2 parameters (the first of 20 x 32)"."""
    n, first = len(params), _shape(params[0])
    if names and len(names) == n:
        first = ", ".join(names[:NAMES]) + (", …" if n > NAMES else "")
    elif n > 1:
        first = f"the first of {first}"
    return f"1 parameter ({first})" if n == 1 else f"{n} parameters ({first})"


def _replicated(optimizer: Any) -> tuple[list[Any], str]:
    """Return (parameters, ranks): those of an optimizer with sharded ones (DTensor) that are whole on each of these ranks.

    Along one dimension of a mesh a DTensor is sharded or replicated; one of a mesh without that dimension has equal parts along it (FSDP
    beside tensor parallelism). Plain parameters are replicated, too, if the dimension splits modules (tensor parallelism); under FSDP
    they are not its own, and may differ by design.
    """
    module = sys.modules.get("torch.distributed.tensor")
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fully_shard")
    params = _params(optimizer)
    sharded = [p for p in params if module is not None and isinstance(p, module.DTensor)]
    meshes = {p.device_mesh for p in sharded}
    plain = [p for p in params if type(p) in (torch.nn.Parameter, torch.Tensor)]
    mesh = max(meshes, key=lambda m: m.ndim, default=None)
    if mesh is None or len(sharded) + len(plain) < len(params):
        return [], ""
    names = mesh.mesh_dim_names or ()
    of_mesh = {m: m.mesh_dim_names or ("",) for m in meshes if m != mesh}
    if any(not {*of} < {*names} for of in of_mesh.values()):
        return [], ""
    alone = mesh.ndim > 1 or bool(getattr(fsdp, "cls_to_fsdp_cls", None))
    best: tuple[list[Any], str] = [], ""
    for dim in range(mesh.ndim):
        found = [] if alone else [*plain]
        for p in sharded:
            of = of_mesh.get(p.device_mesh)
            if names[dim] not in of if of is not None else p.placements[dim].is_replicate():
                found.append(p)
        if len(found) > len(best[0]):
            best = found, fold_ranks(dist.get_process_group_ranks(mesh.get_group(dim)))
    return best
