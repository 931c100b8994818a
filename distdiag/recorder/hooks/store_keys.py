"""Hooks on the methods of a store (TCPStore, FileStore, PrefixStore, …): the key that the main thread waits for, and the one it set last.

A thread that asks for one key again and again waits for it, too.
"""

from __future__ import annotations

import sys
from typing import Any

from torch._C import _distributed_c10d as c10d

from distdiag.page.layout import KEY_BYTES
from distdiag.recorder.frames import kind_of
from distdiag.recorder.hooks.wrapping import around
from distdiag.recorder.state import Recorder, guarded, now_ns
from distdiag.terms.frames import LIBRARY
from distdiag.unpatched import get_ident

_WAIT = ("get", "wait", "multi_get", "queue_pop", "barrier")
_SET = ("set", "add", "append", "compare_set", "multi_set", "queue_push")
_MIDDLE = b"..."
_ASKED = 8  # times that a key was not there when it was asked for


def install(recorder: Recorder) -> None:
    """Wrap the methods of all stores that are written in C++; called once per process."""
    hooks = _Hooks(recorder)
    for names, begins, ends in (
        (_WAIT, hooks.waits, hooks.waited), (_SET, hooks.sets, None), (("check",), hooks.asks, hooks.asked),
    ):  # fmt: skip
        for name in names:
            original = getattr(c10d.Store, name, None)
            if original is not None:  # some are of newer torch
                setattr(c10d.Store, name, around(original, begins, ends, c_method=True))


class _Hooks:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.header = recorder, recorder.header
        self.absent: tuple[bytes, int] = b"", 0  # the key that was asked for last, and how often it was not there

    @guarded
    def waits(self, _store: Any, *args: Any, **kwargs: Any) -> bool:
        if get_ident() != self.recorder.main_thread:
            return False
        self.header.store_key = _name(args, kwargs)
        self.header.store_asked_ns = 0
        return True

    @guarded
    def waited(self, began: bool | None, _out: Any, error: BaseException | None) -> None:
        if began and error is None:
            self._done()
        elif began:  # it may try again
            self.header.store_key = b""

    @guarded
    def asks(self, _store: Any, *args: Any, **kwargs: Any) -> bytes | None:
        caller = sys._getframe(3)  # of `around` and `guarded`
        known = get_ident() == self.recorder.main_thread and kind_of(caller.f_code) != LIBRARY
        return _name(args, kwargs) if known else None

    @guarded
    def asked(self, key: bytes | None, there: Any, _error: BaseException | None) -> None:
        if key is None:
            return
        if there:
            self._done()
            return
        before, times = self.absent
        self.absent = key, times + 1 if key == before else 1
        if self.absent[1] >= _ASKED:
            self.header.store_key = key
            self.header.store_asked_ns = now_ns()

    def _done(self) -> None:
        self.header.store_key, self.absent = b"", (b"", 0)
        self.header.n_store += 1

    @guarded
    def sets(self, _store: Any, *args: Any, **kwargs: Any) -> None:
        """Note the key unless torch, or the recorder itself, sets it."""
        caller = sys._getframe(3)  # of `around` and `guarded`
        if get_ident() == self.recorder.main_thread and kind_of(caller.f_code) != LIBRARY:
            self.header.store_set_site = self.recorder.user_site(caller)
            self.header.store_set = _name(args, kwargs)
            self._done()


def _name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return the key, or the keys, of a call, without the middle of a long name: names often differ at the end only."""
    key = args[0] if args else kwargs.get("key", kwargs.get("keys", ""))
    raw = (key if isinstance(key, str) else ", ".join(map(str, key))).encode("utf-8", "replace")
    half = (KEY_BYTES - len(_MIDDLE)) // 2
    return raw if len(raw) <= KEY_BYTES else raw[:half] + _MIDDLE + raw[-half:]
