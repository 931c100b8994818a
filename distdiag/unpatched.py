"""Threads, locks, clocks and processes as the interpreter has them, whatever a script puts in their place.

gevent and eventlet replace the functions of `_thread`, `threading`, `time` and `os`: a thread is then a greenlet in the calling thread.
freezegun replaces clocks wherever a module has one, and debugpy replaces `os.posix_spawn`. So the thread functions are those of a second
copy of `_thread`, and the clocks are objects of our own, which no tool finds.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import posix
import signal
import threading
import time
from collections.abc import Callable
from importlib.machinery import BuiltinImporter
from typing import Any


def _copy_of_thread() -> Any:
    spec = BuiltinImporter.find_spec("_thread")
    if spec is None or spec.loader is None:  # no CPython
        return importlib.import_module("_thread")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_thread = _copy_of_thread()  # 50 µs
Lock, RLock = _thread.allocate_lock, _thread.RLock
get_ident, get_native_id = _thread.get_ident, _thread.get_native_id
posix_spawn, waitpid = posix.posix_spawn, posix.waitpid

now_ns = functools.partial(time.clock_gettime_ns, time.CLOCK_MONOTONIC)  # as time.monotonic_ns
now_s = functools.partial(time.clock_gettime, time.CLOCK_MONOTONIC)
wall_ns = functools.partial(time.clock_gettime_ns, time.CLOCK_REALTIME)  # as time.time_ns
wall_s = functools.partial(time.clock_gettime, time.CLOCK_REALTIME)
# a thread's own faults: where they are blocked, the process ends without a handler's traceback
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}


def start_new_thread(function: Callable[..., object], args: tuple[object, ...]) -> None:
    """Start a thread that takes no signal of the process: one that the script's threads block must stay pending."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)
        _thread.start_new_thread(function, args)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def sleep(seconds: float) -> None:
    """Block this thread; no other greenlet runs meanwhile."""
    lock = Lock()
    lock.acquire()
    lock.acquire(timeout=seconds)


def main_thread() -> int | None:
    """Return the ident of the main thread; for gevent, `threading.main_thread().ident` is that of a greenlet."""
    return get_ident() if get_native_id() == os.getpid() else threading.main_thread().ident
