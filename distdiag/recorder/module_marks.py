"""Marks in a profile's trace for the forward of each module, by its qualified name, so that a collective can be given its module.

Global hooks of `torch.nn.Module` are installed for the profiled steps only: a mark costs some ten microseconds per module. If
anything was compiled, there are no marks: Dynamo guards on global hooks, so installing them could compile the job again.
"""

from __future__ import annotations

import sys
from typing import Any

from distdiag.recorder.state import failed
from distdiag.recorder.unseen import named_modules
from distdiag.unpatched import get_ident

PREFIX = "module: "
ROOT = "(root)"
MOST_NAMES = 100_000


class ModuleMarks:
    """The marks of one thread, the one that makes this object."""

    def __init__(self) -> None:
        self._thread = get_ident()
        self._names: dict[int, str] = {}
        # the modules in whose forward the thread is, with their marks and, if they have hooks of their own, our last hook
        self._open: list[tuple[int, Any, Any]] = []
        self._hooks: list[Any] = []

    def start(self) -> None:
        """Install the hooks, unless the job has compiled code."""
        if _compiles():
            return
        from torch.nn.modules import module

        self._hooks = [
            module.register_module_forward_pre_hook(self._enters),
            module.register_module_forward_hook(self._leaves, always_call=True),
        ]

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        while self._open:
            self._close()
        self._names = {}

    def _enters(self, module: Any, inputs: Any) -> None:
        try:
            if get_ident() != self._thread:
                return
            name = self._names.get(id(module))
            if name is None:
                self._learn(module)
                name = self._names.get(id(module), type(module).__name__)
            from torch.autograd.profiler import record_function

            # Global hooks run before those of the module, and tensor parallelism communicates in the latter.
            last = module.register_forward_hook(self._ends, always_call=True) if module._forward_hooks else None
            mark = record_function(PREFIX + name)
            mark.__enter__()
            self._open.append((id(module), mark, last))
        except Exception as e:
            failed(e)

    def _leaves(self, module: Any, inputs: Any, output: Any) -> None:
        newest = next((last for of, _, last in reversed(self._open) if of == id(module)), None)
        if newest is None:
            self._ends(module, inputs, output)

    def _ends(self, module: Any, inputs: Any, output: Any) -> None:
        try:
            if get_ident() != self._thread or all(of != id(module) for of, *_ in self._open):
                return
            while self._close() != id(module):  # one that was left by an exception is closed with the module around it
                pass
        except Exception as e:
            failed(e)

    def _close(self) -> int:
        """Close the innermost mark and return its module."""
        of, mark, last = self._open.pop()
        if last is not None:
            last.remove()
        mark.__exit__(None, None, None)
        return of

    def _learn(self, module: Any) -> None:
        """Learn the names below the outermost module of a forward, as in the wrapped module if it is a wrapper of DDP."""
        if self._open or len(self._names) > MOST_NAMES:
            return
        wrapped = getattr(module, "module", None)
        if type(module).__name__ == "DistributedDataParallel" and wrapped is not None:
            self._names[id(module)] = ROOT
            module = wrapped
        for name, of in named_modules(module):
            self._names.setdefault(id(of), name or ROOT)


def _compiles() -> bool:
    """True if Dynamo has seen any frame of the job, or that is not known."""
    convert = sys.modules.get("torch._dynamo.convert_frame")
    return convert is not None and getattr(convert, "FRAME_COUNTER", 1) > 0
