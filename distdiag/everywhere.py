"""`DISTDIAG=1`: record every process that joins a process group, whatever launched it; no command changes.

`import torch` calls `install` (by way of `_distdiag_autoload`). A process that never joins a group costs one wrapped function; the
recorder is imported in the first `init_process_group`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import Any

from distdiag.torch_modules import own_imports, replace

_MODULES = ("torch.distributed.run", "torch.distributed.launch")
NOT_ME = "DISTDIAG_NOT_PID"  # a process that starts recorded jobs, and may have its own group: pytest


def install() -> None:
    """Wrap `init_process_group` until its first call that succeeds."""
    if _is_torchrun():
        from distdiag import launcher

        launcher.note_unrecorded()
    private = sys.modules.get("torch.distributed.distributed_c10d")
    original = getattr(private, "init_process_group", None)
    if private is None or original is None or hasattr(original, "_distdiag"):
        return

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get(NOT_ME) == str(os.getpid()):
            return original(*args, **kwargs)
        replace(init_process_group, original)
        with own_imports():
            from distdiag.recorder import deferred, session

        if session.current is not None:  # recorded in another way, whose hooks are around this function
            return original(*args, **kwargs)
        session.of_test = NOT_ME in os.environ
        try:
            # a script that kept this function, and calls it for a second group, reaches the recorder's
            return deferred.enter_group(private, args, kwargs)
        except BaseException as e:
            replace(original, init_process_group)  # the script may try again
            e.__traceback__ = e.__traceback__.tb_next  # type: ignore[union-attr]
            raise

    init_process_group._distdiag = original  # type: ignore[attr-defined]
    replace(original, init_process_group)
    if os.environ.get(NOT_ME) == str(os.getpid()):
        os.register_at_fork(before=_import_recorder)


def _is_torchrun() -> bool:
    """True in the launcher itself: its ranks have its run's id."""
    command = sys.orig_argv[:3] + sys.argv[:1]
    named = any(os.path.basename(word) == "torchrun" or word in _MODULES for word in command)
    return named and "TORCHELASTIC_RUN_ID" not in os.environ


def _import_recorder() -> None:
    """Import what a forked rank needs, once for all that this process forks: it takes each of them 30 ms."""
    # what fails here fails in the rank again, which reports it
    with contextlib.suppress(Exception), own_imports():
        from distdiag.page import reader  # noqa: F401
        from distdiag.recorder import deferred, witness  # noqa: F401
        from distdiag.recorder.fast import accounts  # noqa: F401
        from distdiag.recorder.hooks import functional, install, process_groups  # noqa: F401
