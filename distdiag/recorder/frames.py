"""Distinguishes user frames from library frames, and finds the line of user code that the main thread is in.

A frame is the user's unless its file belongs to Python's own library, to torch, to a package in site-packages, or to
distdiag itself (its reference training job and its probes count as user code: they are what is being watched).
The files of a process group written in Python are the backend's (`backend_files`), wherever they lie.
If all frames are in packages (a console script of an installed trainer), the innermost frame outside torch and the
standard library is used.
"""

from __future__ import annotations

import dis
import gc
import os
import sys
import threading
from collections.abc import Collection
from types import CodeType, FrameType
from typing import Any, TypeVar

from distdiag.terms.frames import LIBRARY, PACKAGE, USER, owner
from distdiag.unpatched import get_ident

_native: Any = None
if os.environ.get("DISTDIAG_PURE") != "1" and "t" not in sys.abiflags:
    try:
        from distdiag.recorder.fast import _native  # type: ignore[no-redef]
    except ImportError:  # not compiled, or for another Python
        pass

BACKEND, BOOTSTRAP = -1, -2  # and the owners of `terms.frames`
# outside of this function are the frames of a forked child's parent
_BOOTSTRAP = f"{os.sep}multiprocessing{os.sep}process.py", "_bootstrap"
# Packages, or parts, that run tasks of others in a worker: while a worker waits for the next one, none of the job's code runs.
_RUNNERS = tuple(f"-packages{os.sep}{name}{os.sep}" for name in (f"ray{os.sep}_private", "execnet", "ipykernel"))
HELPER_LINES = 15  # of a helper, at most
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_WATCHED = (
    os.path.join(_OURS, "train") + os.sep,
    os.path.join(_OURS, "probes") + os.sep,
    os.path.join(os.path.dirname(os.path.dirname(_OURS)), "probes") + os.sep,  # an editable install
)
# as `sysconfig` has them, which would read a file of 1,000 variables
_LIBRARY = os.path.join(sys.platlibdir, os.path.basename(os.path.dirname(os.__file__)))
_STDLIB = tuple(
    path + os.sep
    for folder in {
        os.path.dirname(os.__file__),
        *(os.path.join(p, _LIBRARY) for p in (sys.base_prefix, sys.exec_prefix)),
    }
    for path in {folder, os.path.realpath(folder)}
)
# By id: hashing a code object hashes its contents, which takes longer than the rest. The object is kept, so its id is not reused.
_kinds: dict[int, tuple[int, CodeType]] = {}
MOST_KEPT = 16_384  # entries of one cache: code objects created in every step must not pile up
_files: dict[str, str] = {}
_backend: set[str] = set()  # files of process groups written in Python
_backend_folders: tuple[str, ...] = ()
K = TypeVar("K")
V = TypeVar("V")


def kept(cache: dict[K, V], key: K, value: V) -> V:
    """Return a value that is kept in a cache from now on; a full cache is emptied first."""
    if len(cache) >= MOST_KEPT:
        cache.clear()
    cache[key] = value
    return value


def backend_files(file: str, package: str | None) -> None:
    """Treat the file of a process group as backend code, and the rest of its package, unless the user's code is in that."""
    global _backend_folders
    path = os.path.abspath(file)
    if path in _backend or kind_of_file(path) == LIBRARY:
        return
    _backend.add(path)
    top = path
    for _ in (package or "").split(".") if package else ():
        top = os.path.dirname(top)
    if top != path and os.path.dirname(top) not in (os.path.abspath(sys.path[0]), os.getcwd()):
        _backend_folders = (*_backend_folders, top + os.sep)
    _kinds.clear()


def backend_paths() -> list[str]:
    """Return the files, and the folders with their separator, that `backend_files` treats as backend code."""
    return sorted({*_backend, *_backend_folders})


def is_users(file: str, backend: Collection[str]) -> bool:
    """True if a file is the user's, for a process that knows another's `backend_paths` only."""
    return kind_of_file(file) == USER and not os.path.abspath(file).startswith(tuple(backend))


def kind_of_file(file: str) -> int:
    """Return USER, PACKAGE, LIBRARY or BACKEND for a code object's file name."""
    if file.startswith("<"):  # <frozen …>, <string>, generated code
        return LIBRARY
    path = os.path.abspath(file)
    if path in _backend or path.startswith(_backend_folders):
        return BACKEND
    if path.startswith(_WATCHED):
        return USER
    if path.startswith(_OURS):
        return LIBRARY
    whose = owner(path)
    if whose == PACKAGE:
        return LIBRARY if any(part in path for part in _RUNNERS) else PACKAGE
    return LIBRARY if path.startswith(_STDLIB) else whose


def kind_of(code: CodeType) -> int:
    known = _kinds.get(id(code))
    if known is None:
        first = code.co_name == _BOOTSTRAP[1] and code.co_filename.endswith(_BOOTSTRAP[0])
        known = kept(_kinds, id(code), (BOOTSTRAP if first else kind_of_file(code.co_filename), code))
    return known[0]


def absolute(file: str) -> str:
    """Return the absolute path of a code object's file, cached: the job may change its working directory later."""
    path = _files.get(file)
    if path is None:
        path = _files[file] = os.path.abspath(file)
    return path


def line_of(frame: FrameType) -> int:
    """Return the line of a frame; of an instruction that has none (the compiler's own), that of the last one before it which has."""
    if frame.f_lineno:
        return frame.f_lineno
    code = frame.f_code
    before = [line for start, _, line in code.co_lines() if line and start <= frame.f_lasti]
    return before[-1] if before else code.co_firstlineno


def frames_of(thread: int | None) -> list[FrameType]:
    """Return the frames of another thread, innermost first; empty if it has none.

    On Python 3.11, asking for them in any other way may crash the job: see `frames_of` in fast/c/native.c.
    """
    if _native is not None:
        return _native.frames_of(thread or 0)
    collects = sys.version_info < (3, 12) and gc.isenabled()
    if collects:
        gc.disable()
    try:
        out, frame = [], sys._current_frames().get(thread or 0)
        while frame is not None:
            out.append(frame)
            frame = frame.f_back
        return out
    finally:
        if collects:
            gc.enable()


def user_frame(start: FrameType | None) -> FrameType | None:
    """Return the innermost user frame at or above `start`, else the innermost frame of an installed package."""
    f = start
    package: FrameType | None = None
    kinds = _kinds
    while f is not None:
        known = kinds.get(id(f.f_code))
        k = known[0] if known is not None else kind_of(f.f_code)
        if k == USER:
            return f
        if k == PACKAGE and package is None:
            package = f
        f = f.f_back if k != BOOTSTRAP else None
    return package


def user_stack(start: FrameType | None, depth: int) -> list[FrameType]:
    """Return up to `depth` user frames, innermost first; frames of packages only if there are no others."""
    out: list[FrameType] = []
    packages: list[FrameType] = []
    f = start
    kinds = _kinds
    while f is not None and len(out) < depth:
        code = f.f_code
        known = kinds.get(id(code))
        k = known[0] if known is not None else kind_of(code)
        if k == USER:
            out.append(f)
        elif k == PACKAGE and len(packages) < depth:
            packages.append(f)
        f = f.f_back if k != BOOTSTRAP else None
    return out or packages


def other_threads(main: int | None) -> dict[int, threading.Thread]:
    """Return the Python threads but the main one and this one, by their idents.

    `threading.enumerate()` would take a lock, which a fork could copy while it is held.
    """
    active = list(threading._active.items())  # type: ignore[attr-defined]
    return {ident: thread for ident, thread in active if ident not in (main, get_ident())}


def other_thread_works(main: int | None) -> bool:
    """True if a thread other than this one has a frame of the user's or of a package."""
    return any(frames and user_stack(frames[0], 1) for frames in map(frames_of, other_threads(main)))


def in_helper(code: CodeType, instruction: int) -> bool:
    """True if a call is in a short function, but in none of its loops: its callers say more than it does."""
    if code.co_name == "<module>" or max(n or 0 for _, _, n in code.co_lines()) - code.co_firstlineno > HELPER_LINES:
        return False
    jumps = (i for i in dis.get_instructions(code) if i.opcode in _JUMPS and i.offset > instruction)
    return not any(isinstance(i.argval, int) and i.argval <= instruction for i in jumps)  # none jumps back over it


def raw_name(frame: FrameType) -> str:
    """Return module stem and function of the innermost Python frame: `queue.get` for a frame in queue.py."""
    stem = os.path.splitext(os.path.basename(frame.f_code.co_filename))[0]
    return f"{stem}.{frame.f_code.co_name}"


def in_backend(frame: FrameType | None) -> bool:
    """True if the frame is a backend's, or a function of the standard library (`Event.wait`) that a backend called."""
    if not _backend:
        return False
    while frame is not None:
        kind, path = kind_of(frame.f_code), os.path.abspath(frame.f_code.co_filename)
        if kind != LIBRARY or not path.startswith(_STDLIB) or "-packages" + os.sep in path:
            return kind == BACKEND
        frame = frame.f_back
    return False
