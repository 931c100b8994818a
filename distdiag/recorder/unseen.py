"""Hides the recorder's own reads of tensors and modules from the user's modes, tensor subclasses, overrides and profilers.

A `TorchFunctionMode` or `TorchDispatchMode` of the script, and a tensor subclass with `__torch_function__`, are called for every
operation on a tensor, even for reading its shape; `torch.profiler` records each. They must see only the job's operations: flop
counters depend on it. The guards cost about a microsecond, so they are entered only if a mode is active or a tensor is of a subclass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import TracebackType
from typing import Any

from distdiag.recorder.torch_names import private

# Number of modes active in this thread; torch's own functions once it is imported. `int()` is 0.
function_modes: Any = int
dispatch_modes: Any = int
_disable_functions: Any = None
_disable_dispatch: Any = None
_enable_profiler: Any = None  # for this thread: False hides operations from torch.profiler and ExecutionTraceObserver
_NO_DISPATCH: Any = None  # `__torch_dispatch__` of a class that does not override it


class unseen:
    """Context in which operations reach no mode of this thread, no `__torch_function__` of a subclass and no profiler."""

    __slots__ = ("_dispatch", "_functions")

    def __enter__(self) -> None:
        self._functions, self._dispatch = _disable_functions(), _disable_dispatch()
        self._functions.__enter__()
        self._dispatch.__enter__()
        _enable_profiler(False)

    def __exit__(self, *raised: type[BaseException] | BaseException | TracebackType | None) -> None:
        _enable_profiler(True)
        self._dispatch.__exit__(*raised)
        self._functions.__exit__(*raised)


def install() -> None:
    """Use torch's functions; called when torch has been imported."""
    global function_modes, dispatch_modes, _disable_functions, _disable_dispatch, _enable_profiler, _NO_DISPATCH
    from torch import _C, Tensor

    _disable_functions = private(_C, "DisableTorchFunction", nullcontext)
    _disable_dispatch = private(_C, "_DisableTorchDispatch", nullcontext)
    _NO_DISPATCH = getattr(Tensor, "__torch_dispatch__", None)
    _enable_profiler = getattr(getattr(_C, "_autograd", None), "_enable_record_function", bool)
    function_modes = private(_C, "_len_torch_function_stack", int)
    dispatch_modes = private(_C, "_len_torch_dispatch_stack", int)


def has_memory(cls: type) -> bool:
    """False for a tensor class with a `__torch_dispatch__` (DTensor, FakeTensor): reading one may be a collective or crash."""
    return getattr(cls, "__torch_dispatch__", _NO_DISPATCH) is _NO_DISPATCH


def named_modules(root: Any) -> Iterator[tuple[str, Any]]:
    """Yield what torch's method of this name yields, without a call of the script's own, which may be in its place."""
    todo, known = [("", root)], set[int]()
    while todo:
        name, module = todo.pop()
        if id(module) not in known:
            known.add(id(module))
            yield name, module
            inner = [(f"{name}.{key}".lstrip("."), x) for key, x in module._modules.items() if x is not None]
            todo += reversed(inner)


def named_tensors(root: Any, held: str = "_parameters") -> Iterator[tuple[str, Any]]:
    """Yield what torch's `named_parameters` yields, or `named_buffers` (`_buffers`), in the same way."""
    known = set[int]()
    for of, module in named_modules(root):
        for key, x in getattr(module, held).items():
            if x is not None and id(x) not in known:
                known.add(id(x))
                yield f"{of}.{key}".lstrip("."), x


def parameters(root: Any) -> Iterator[Any]:
    """Yield the parameters of a module and of those in it, in the same way."""
    return (p for _, p in named_tensors(root))


def attributes(x: object) -> dict[str, Any]:
    """Return the attributes that an object itself has, without a call of its class."""
    try:
        return object.__getattribute__(x, "__dict__")
    except AttributeError:
        return {}
