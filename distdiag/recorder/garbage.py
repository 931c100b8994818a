"""Records the time of full garbage collections: in them a rank does nothing else, and the others wait for it."""

from __future__ import annotations

import gc

from distdiag.page.layout import word
from distdiag.recorder import state

_OFF = word("gc_off")


def watch(recorder: state.Recorder) -> None:
    """Time the collections of the oldest generation from now on, if the hooks are compiled.

    A callback in Python would swallow a Ctrl-C that comes during a collection: see `c/module.c`.
    """
    from distdiag.recorder.fast import accounts  # imports torch

    timer = accounts.collection_timer(recorder.page)
    if timer is not None:
        gc.callbacks.append(timer)


def poll(recorder: state.Recorder) -> None:
    """Record whether collections are switched off; called by the pulse."""
    recorder.page.words[_OFF] = not gc.isenabled()
