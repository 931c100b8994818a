"""One DDP-wrapped module of this process: the hooks' state for it."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from distdiag.page.layout import ModelSlot
from distdiag.recorder import state
from distdiag.recorder.fast.accounts import LastCallSite, ModelWords
from distdiag.recorder.hooks.ddp_times import DdpTimes
from distdiag.recorder.hooks.wrapping import around
from distdiag.recorder.state import guarded
from distdiag.recorder.unseen import named_modules, named_tensors


class EnteredModules:
    """Collects the modules whose forward is entered until `end()`, such as in the first training forward.

    An unused parameter's module was never called, or its output is not in the loss. A global hook of torch would take every call out of
    its fast path, which the tracebacks of the job's errors show.
    """

    def __init__(self) -> None:
        self.modules: dict[int, weakref.ref[Any]] = {}
        self._with_graph: set[int] = set()
        self.in_ddp: set[int] = set()  # those that the forward of a module in DDP calls
        if not _collecting:
            _replaced[:] = Module.__call__, around(Module.__call__, _enters)
            Module.__call__ = _replaced[1]  # type: ignore[method-assign]
        _collecting.append(self)

    def add(self, module: Any) -> None:
        self.modules[id(module)] = weakref.ref(module)
        if torch.is_grad_enabled():
            self._with_graph.add(id(module))
        if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
            self.in_ddp.add(id(module))

    def end(self) -> None:
        if self in _collecting:
            _collecting.remove(self)
            if not _collecting and Module.__call__ is _replaced[1]:  # else somebody has wrapped it meanwhile
                Module.__call__ = _replaced[0]  # type: ignore[method-assign]

    def never_called(self, model: Any, parameters: list[str]) -> list[str]:
        """Return the names of the modules of `model` that own one of `parameters` and were not entered."""
        return [name for name, module in _owners(model, parameters) if id(module) not in self.modules]

    def without_graph(self, model: Any, parameters: list[str]) -> bool:
        """True if the modules that own `parameters` were entered with gradients off only, as by a reentrant checkpoint."""
        owners = {id(module) for _, module in _owners(model, parameters)}
        return bool(owners) and owners <= self.modules.keys() - self._with_graph


@guarded
def _enters(module: Any, *_args: Any, **_kwargs: Any) -> None:
    for entered in _collecting:
        entered.add(module)


_collecting: list[EnteredModules] = []
_replaced: list[Any] = []  # the method, and what is in its place while some collect


def _owners(model: Any, parameters: list[str]) -> list[tuple[str, Any]]:
    """Return the modules of `model` that own `parameters`, with their names."""
    modules = dict(named_modules(model))
    names = dict.fromkeys(name.rpartition(".")[0] for name in parameters)
    return [(name, modules[name]) for name in names if name in modules]


def watch_forward() -> EnteredModules | None:
    """Start to record; return None if torch.compile is in use: its guards would notice the hook's removal."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None:
        backends = getattr(dynamo, "cached_backends", None)
        if backends is None or any(b is not None for b in backends.values()):
            return None
    return EnteredModules()


# Groups of modules that are gone, until the next module is wrapped. Who drops the last reference to a gloo group joins its thread without
# releasing the GIL, for which that thread may wait, to free the tensors of its last operation: so not in the moment in which DDP ends.
_parted: list[Any] = []


class Model(ModelWords):
    def __init__(self, ddp: Any, slot: ModelSlot, recorder: state.Recorder) -> None:
        super().__init__()
        page = recorder.page
        _parted.clear()
        self.ref = weakref.ref(ddp, self._gone)
        # its parameters and the owners of its buffers, once requested; freed with the module
        self.named: list[tuple[str, Any]] | None = None
        # ids of its parameters when DDP was built, also of those that it ignores or that were frozen: it gets no others
        self.built_with: frozenset[int] = frozenset()
        self.frozen: list[tuple[str, Any]] = []  # parameters that DDP left out, until one of them is trained
        self.frozen_next = self.frozen_forwards = 0
        # (name, parameter, its autograd node when DDP was built, which holds DDP's hook) of some parameters
        self.hooked: list[tuple[str, Any, Any]] = []
        self.buffer_places: list[tuple[Any, str, str]] | None = None  # (module, name, full name if it is saved)
        # the same of parameters that no gradient trains, once requested
        self.frozen_places: list[tuple[Any, str, str]] | None = None
        self.mode_layers: list[Any] | None = None  # those whose work depends on train() and eval(), once requested
        self.slot = slot
        self.pg = ddp.process_group
        self.group_at = -1  # slot of its process group; -1: not registered
        self.forwards_at, self.synced_at = page.word_of(slot, "forwards"), page.word_of(slot, "synced_backwards")
        self.forward = LastCallSite(recorder)
        self.forward_site, self.forward_count = 0, -1  # site of the last forward, and the index of its count
        self.next_check = 0  # the step at which to check gradients again
        self.first_forward: EnteredModules | None = None
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
            named = named_tensors(ddp.module)
            self.named = [(n, p) for n, p in named if p.requires_grad and n not in ignored]
        return self.named

    def _gone(self, _: object) -> None:
        _parted.append(self.pg)
        self.named = self.buffer_places = self.frozen_places = self.mode_layers = self.pg = None
        self.frozen, self.hooked, self.built_with = [], [], frozenset()
