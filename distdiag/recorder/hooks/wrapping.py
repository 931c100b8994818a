"""Wraps torch's functions without the job noticing.

Three things would notice. `torch.compile` would trace the wrapper: graph breaks, recompilations, errors under `fullgraph=True`. A
traceback would show the wrapper's frame. Introspection would find another name and docstring.

torch.compile is kept away in two ways, without importing `torch._dynamo`. A wrapper has the attribute `_torchdynamo_inline`, with
which torch marks functions to be traced in place of their wrappers: compiled code contains the original and nothing of ours. And
every code object of the recorder is marked to be skipped as a frame, for frames that run between two compiled graphs. The mark is
the C function behind `torch.compiler.disable`; it costs nothing at run time. All marks take 6 ms: they wait for `torch._dynamo`.

A signal's handler (Ctrl-C) may raise wherever Python code runs, so also in a hook, and after C++ has raised an error meanwhile. A
wrapper's handler therefore begins with `e.__traceback__ = e.__traceback__.tb_next`, which no signal interrupts because it calls
nothing, then calls `settle`, and `settle_late` if that was interrupted.
"""

from __future__ import annotations

import _thread
import ctypes
import functools
import signal
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

from distdiag.recorder.torch_names import LACKING

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)

_wrappers: list[CodeType] = []
# `warnings` skips a frame whose file has both words in its name (is_internal_frame) when it counts `stacklevel`.
UNCOUNTED = "<frozen importlib._bootstrap of distdiag>"
_OURS = ("distdiag.recorder", "distdiag.page", "distdiag.terms")


def wraps(
    original: Callable[..., Any], traced: Callable[..., Any] | None = None, file: str = UNCOUNTED
) -> Callable[[F], F]:
    """Decorator for a Python function that calls and replaces `original`; `torch.compile` traces `traced` instead, or `original`.

    The file name of the wrapper's frame, `UNCOUNTED`, keeps the place of warnings that are issued below it.
    """

    def decorate(wrapper: F) -> F:
        functools.update_wrapper(wrapper, original)
        wrapper._torchdynamo_inline = traced or original  # type: ignore[attr-defined]
        wrapper.__code__ = wrapper.__code__.replace(co_filename=file)  # type: ignore[attr-defined]
        _wrapper(wrapper.__code__)  # type: ignore[attr-defined]
        return wrapper

    return decorate


def as_c_method(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Any:
    """Return `wrapper` as a method of a C++ class, of the type that pybind11 uses for methods.

    torch.compile does not trace such a method; it handles it like the original, by its name.
    """
    make = ctypes.pythonapi.PyInstanceMethod_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.py_object]
    return make(_as_caller(wrapper, original))


def _as_caller(function: Any, original: Callable[..., Any]) -> Any:
    """Return `function` with the name of `original`, a method of a C++ class that it calls, also in its frame.

    Of an object of the job's subclass, pybind11 takes our method for an override in Python. It calls the original
    nevertheless if the calling frame has the method's name and the object as its first named parameter: that is how it
    knows a call of `super()`.
    """
    function.__name__, function.__doc__ = original.__name__, original.__doc__
    function.__code__ = function.__code__.replace(co_name=original.__name__)
    _wrapper(function.__code__)
    return function


def around(
    original: Function,
    begins: Function | None = None,
    ends: Function | None = None,
    c_method: bool = False,
) -> Any:
    """Return `original` with a call before it and one after it, whether it returns or raises; not for what runs several times a step.

    Args:
        begins: Called with the arguments; may not raise (`guarded`).
        ends: Called with (what `begins` returned; without `begins` the arguments, the result, the exception or None); may not
            raise, either.
        c_method: `original` is a method of a C++ class.
    """

    called = (
        _as_caller(lambda self, *args, **kwargs: original(self, *args, **kwargs), original) if c_method else original
    )

    def call(*args: Any, **kwargs: Any) -> Any:
        began, end = args, None
        try:
            if begins is not None:
                began = begins(*args, **kwargs)
            end = ends
            out = called(*args, **kwargs)
            if ends is not None:
                ends(began, out, None)
            return out
        except BaseException as e:  # not kept in a variable: its traceback holds this frame, and so the arguments
            e.__traceback__ = e.__traceback__.tb_next  # type: ignore[union-attr]
            try:
                settle(e, end, (began, None, e))
            except BaseException as late:
                settle_late(late, e, end, (began, None, e))
            raise

    return as_c_method(call, original) if c_method else wraps(original)(call)


def settle(error: BaseException, end: Function | None = None, args: tuple[Any, ...] = ()) -> None:
    """Call `end`, and remove the recorder's frames from the traceback of `error`, which the wrapper then re-raises with a bare `raise`.

    The frames are there if a signal's handler has raised `error` in a hook.
    """
    last, tb = None, error.__traceback__
    while tb is not None:
        following = tb.tb_next
        if not str(tb.tb_frame.f_globals.get("__name__")).startswith(_OURS):
            last = tb
        else:
            if _by_default_handler(error):  # its traceback ends in the hook, or in what that called
                following = None
            if last is None:
                error.__traceback__ = following
            else:
                last.tb_next = following
        tb = following
    if end is not None:
        end(*args)


def settle_late(
    late: BaseException, error: BaseException, end: Function | None = None, args: tuple[Any, ...] = ()
) -> None:
    """Settle `error` after a signal's handler has raised `late` meanwhile: the job's code is to get that signal, as it would have."""
    settle(error, end, args)
    if not _by_default_handler(late):
        raise late
    _ = _Signal(signal.SIGINT).again  # last, and an attribute: Python runs handlers after calls, not after reading one


class _Signal(int):
    """A signal's number; reading `again` lets Python treat it as just received."""

    again = property(_thread.interrupt_main)


def _by_default_handler(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def skip(code: CodeType, callees: bool) -> None:
    """Tell torch.compile to run frames of `code` as they are, and with `callees` also all that they call."""
    try:
        from torch._C._dynamo import eval_frame  # C++: the module torch._dynamo is not imported

        action = eval_frame._FrameAction
        strategy = eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if callees else action.DEFAULT)
        eval_frame.set_code_exec_strategy(code, strategy)
    except (ImportError, AttributeError):
        LACKING.append("_dynamo's marks of frames")


def _wrapper(code: CodeType) -> None:
    skip(code, callees=False)
    _wrappers.append(code)


def skip_all_of_ours() -> None:
    """Mark every function of the recorder to be skipped with its callees, except wrappers, whose callees are the job's."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_OURS):
            for code in _codes_of(module):
                skip(code, callees=True)
    for code in _wrappers:
        skip(code, callees=False)


def _codes_of(module: ModuleType) -> Iterator[CodeType]:
    for value in vars(module).values():
        members = vars(value).values() if isinstance(value, type) else (value,)
        for member in members:
            if isinstance(member, property):
                member = member.fget
            function = getattr(member, "__func__", member)
            function = getattr(function, "__wrapped__", function)
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                yield from _nested(function.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
