"""Wraps the methods of torch's `ProcessGroup` and `Work` so that every collective is recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch._C import _distributed_c10d as c10d

from distdiag.recorder import state
from distdiag.recorder.hooks.collectives import METHODS, Collectives
from distdiag.recorder.hooks.wrapping import around, as_c_method, settle, settle_late, wraps
from distdiag.recorder.torch_names import LACKING, private

local = threading.local()  # `inside`: a recorded call runs, and what it calls is not recorded


def install(recorder: state.Recorder) -> Collectives:
    """Wrap torch's classes and return the recorder of their calls. Called once per process."""
    collectives = Collectives(recorder)
    collectives.wrap_subclass = lambda cls: _wrap_subclass(collectives, cls)
    pg_class, found = c10d.ProcessGroup, set[str]()
    for method, (op, _) in METHODS.items():
        original = getattr(pg_class, method, None)
        if original is not None:
            found.add(op)
            setattr(pg_class, method, as_c_method(_wrap(collectives, method, original), original))
    LACKING.extend(f"ProcessGroup's {op}" for op in sorted({op for op, _ in METHODS.values()} - found))
    for method, begins, ends in (
        ("_start_coalescing", None, collectives.coalescing_begins),
        ("_end_coalescing", collectives.coalescing_ends, collectives.coalesced),
    ):
        if (original := private(pg_class, method, None)) is not None:
            setattr(pg_class, method, around(original, begins, ends, c_method=True))
    work_class = c10d.Work
    work_class.wait = as_c_method(wrap_wait(collectives, work_class.wait, collectives.wait_begins), work_class.wait)  # type: ignore[method-assign]
    collectives.wrap_work = lambda cls: _wrap_python_wait(collectives, cls)
    return collectives


def wrap_wait(collectives: Collectives, original: Any, begins: Callable[[Any], tuple[int, bool] | None]) -> Any:
    """Return `original`, the method `wait` of a class of Work or `wait_tensor`, with the wait recorded."""
    wait_ends = collectives.wait_ends

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = None
        try:
            began = begins(self)
            done = original(self, *args, **kwargs)
            if began is not None and began[0]:
                wait_ends(*began, None)
            return done
        except BaseException as e:  # not kept in a variable: its traceback holds this frame, and so the tensors
            e.__traceback__ = e.__traceback__.tb_next  # type: ignore[union-attr]
            try:
                settle(e, wait_ends if began else None, (*(began or ()), e))
            except BaseException as late:
                settle_late(late, e, wait_ends if began else None, (*(began or ()), e))
            raise

    return wait


def _wrap_python_wait(collectives: Collectives, cls: type) -> None:
    """Wrap `wait` of a Work class written in Python, which overrides that of torch's."""
    for base in cls.__mro__:
        if base is c10d.Work:
            return
        original = base.__dict__.get("wait")
        if isinstance(original, FunctionType) and not hasattr(original, "__wrapped__"):
            base.wait = wraps(original)(wrap_wait(collectives, original, collectives.wait_begins))  # type: ignore[attr-defined]


def _wrap_subclass(collectives: Collectives, cls: Any) -> None:
    """Wrap the methods that a process group class written in Python overrides."""
    for method in METHODS:
        original = cls.__dict__.get(method)
        if callable(original) and not hasattr(original, "__wrapped__"):
            setattr(cls, method, wraps(original)(_wrap(collectives, method, original)))


def _wrap(collectives: Collectives, method: str, original: Any) -> Any:
    failed = collectives.failed

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        inside, began = True, None
        try:
            inside = getattr(local, "inside", False)
            if inside:  # a binding that calls another binding
                return original(self, *args, **kwargs)
            began = collectives.begin(self, method, args, kwargs)
            local.inside = True
            work = original(self, *args, **kwargs)
            local.inside = False
            if began is not None:
                collectives.issued(*began, work, method)
            return work
        except BaseException as e:
            if not inside:
                local.inside = False
            e.__traceback__ = e.__traceback__.tb_next  # type: ignore[union-attr]
            try:
                settle(e, failed if began else None, (*(began or ())[:2], method, e))
            except BaseException as late:
                settle_late(late, e, failed if began else None, (*(began or ())[:2], method, e))
            raise

    return call
