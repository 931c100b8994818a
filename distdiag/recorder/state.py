"""The recorder of this process: its page, its failures, and the small functions that every hook uses.

Nothing here may raise into the job: hooks are wrapped by `guarded`, which counts a failure in the page and continues.
Our own tests set DISTDIAG_RAISE=1: there a failure is raised.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import traceback
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

from distdiag import unpatched
from distdiag.errors import in_own_tests
from distdiag.page.layout import CALLERS
from distdiag.page.writer import PageWriter
from distdiag.recorder import unseen
from distdiag.recorder.frames import USER, absolute, in_helper, kept, kind_of, line_of, user_frame

P = ParamSpec("P")
R = TypeVar("R")

now_ns = unpatched.now_ns
RAISE = in_own_tests()
VARIABLE = "DISTDIAG"  # 1: record whatever joins a process group; 0: record nothing


class Recorder:
    """State of the recorder in this process; one instance at most, in `current`."""

    def __init__(self, writer: PageWriter) -> None:
        self.page = writer
        self.header = writer.header
        self.main_thread = unpatched.main_thread()
        # CUDA device of the job's parameters, set by the main thread: in any other thread the current device is 0
        self.device: int | None = None
        # by id of the code and instruction: a line number must be decoded, and hashing a code object is slow
        self._sites: dict[tuple[int, int], tuple[int, CodeType]] = {}
        self._helpers: dict[tuple[int, int], tuple[bool, CodeType]] = {}
        self._paths: dict[tuple[int, ...], tuple[int, tuple[CodeType, ...]]] = {}
        self.facts: dict[str, Any] = {}

    def site(self, frame: FrameType | None) -> int:
        """Return the heap offset of the site (file:line) of `frame`; 0 for None."""
        if frame is None:
            return 0
        code = frame.f_code
        key = (id(code), frame.f_lasti)
        known = self._sites.get(key)
        if known is None:
            off = self.page.site(absolute(code.co_filename), line_of(frame), code.co_name)
            known = kept(self._sites, key, (off, code))  # the code is kept, so that its id is not reused
        return known[0]

    def call_site(self, frame: FrameType | None) -> int:
        """Return the heap offset of the site of a collective call at `frame`, with the callers of a helper; 0 for None."""
        if frame is None or not self._in_helper(frame):
            return self.site(frame)
        frames, key = [frame], (id(frame.f_code), frame.f_lasti)
        while len(frames) <= CALLERS and self._in_helper(frames[-1]):
            caller = user_frame(frames[-1].f_back)
            if caller is None or kind_of(caller.f_code) != USER:
                break
            frames.append(caller)
            key += (id(caller.f_code), caller.f_lasti)
        known = self._paths.get(key)
        if known is None:
            path = ((absolute(f.f_code.co_filename), line_of(f), f.f_code.co_name) for f in frames)
            known = kept(self._paths, key, (self.page.site(*next(path), *path), tuple(f.f_code for f in frames)))
        return known[0]

    def _in_helper(self, frame: FrameType) -> bool:
        code = frame.f_code
        key = (id(code), frame.f_lasti)
        known = self._helpers.get(key)
        if known is None:
            known = kept(self._helpers, key, (in_helper(code, frame.f_lasti), code))
        return known[0]

    def user_site(self, frame: FrameType | None) -> int:
        """Return the heap offset of the innermost user site at or above `frame`."""
        if frame is not None:  # fast path: it is a user frame already
            known = self._sites.get((id(frame.f_code), frame.f_lasti))
            if known is not None and kind_of(frame.f_code) == USER:
                return known[0]
        return self.site(user_frame(frame))

    def note(self, **facts: Any) -> None:
        """Add facts about the job to the page; they are one JSON text, which is replaced as a whole."""
        self.facts.update(facts)
        self.header.facts = self.page.text(json.dumps(self.facts, default=str))

    def lacks(self, names: list[str]) -> None:
        """Note what distdiag uses and this torch does not have."""
        if names:
            known = [n for n in str(self.facts.get("unsupported", "")).split(", ") if n]
            self.note(unsupported=", ".join(dict.fromkeys([*known, *names])))

    def part(self, what: str, install: Callable[..., R], *args: Any) -> R | None:
        """Install a part of the hooks. One that fails, as on a torch that has other names, costs only what depends on it."""
        try:
            return install(*args)
        except Exception as e:
            failed(e)
            self.lacks([what])
            return None

    def failed(self, error: BaseException) -> None:
        """Count a failure of the recorder; readers show the count and the last text."""
        try:
            self.header.errors += 1
            last = traceback.extract_tb(error.__traceback__)
            where = f" at {os.path.basename(last[-1].filename)}:{last[-1].lineno}" if last else ""
            self.header.error = self.page.text(f"{type(error).__name__}: {str(error)[:200]}{where}")
        except Exception:  # the page itself is unusable: nothing is left to write to
            if RAISE:
                raise


current: Recorder | None = None


def failed(error: Exception) -> None:
    """Count a failure of the recorder in the page; raise it if `RAISE`, or if it is the job's own."""
    if RAISE or _of_handler(error):
        raise error
    if current is not None:
        current.failed(error)


def _of_handler(error: Exception) -> bool:
    """True if a signal's handler has raised `error` while a hook ran: a timeout of the job by SIGALRM."""
    handlers = [getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()]
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def guarded(f: Callable[P, R]) -> Callable[P, R | None]:
    """Decorator: an exception of `f` is counted and never reaches the job (unless `RAISE`); modes do not see its operations.

    Functions that run in every step need none: `fast_hook` guards them in C. With cold caches a second frame costs as much as the work.
    """

    @functools.wraps(f)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            if not unseen.function_modes() and not unseen.dispatch_modes():
                return f(*args, **kwargs)
            with unseen.unseen():
                return f(*args, **kwargs)
        except Exception as e:
            failed(e)
            return None

    return inner


def switched_off() -> bool:
    """True if DISTDIAG=0: nothing is recorded, whatever else asks for it."""
    return os.environ.get(VARIABLE) == "0"
