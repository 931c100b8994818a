"""The exception that the main thread is handling while it waits.

A collective in `finally:` or `except:` hides the exception that led there: its traceback is printed only after the collective,
which the other ranks never enter.
"""

from __future__ import annotations

import sys
from typing import Any

from distdiag.recorder import state
from distdiag.recorder.frames import USER, absolute, kind_of

NONE = (0, 0)
_SHOWN = 400  # characters
_FRAMES = 200  # of the traceback: a recursion may have thousands


def handled(recorder: state.Recorder) -> tuple[int, int]:
    """Return (text, site) of the exception that the main thread handles, as heap offsets; `NONE` if user code has no part in it."""
    found: Any = sys._current_exceptions().get(recorder.main_thread or 0)
    error = found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12
    if not isinstance(error, BaseException):
        return NONE
    raised, tb = None, error.__traceback__
    for _ in range(_FRAMES):
        if tb is None:
            break
        if kind_of(tb.tb_frame.f_code) == USER:
            raised = tb
        tb = tb.tb_next
    if raised is None:
        return NONE
    code = raised.tb_frame.f_code
    return recorder.page.text(_text(error)), recorder.page.site(
        absolute(code.co_filename), raised.tb_lineno, code.co_name
    )


def _text(error: BaseException) -> str:
    """Return `KeyError: 'device'`. No method of the exception is called: this thread must not run the job's code."""
    name, args = type(error).__name__, vars(BaseException)["args"].__get__(error)
    if len(args) != 1 or type(args[0]) not in (str, int, float):
        return name
    return f"{name}: {args[0]!r}"[:_SHOWN] if isinstance(error, KeyError) else f"{name}: {args[0]}"[:_SHOWN]
