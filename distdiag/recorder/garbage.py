"""Records the time of full garbage collections: in them a rank does nothing else, and the others wait for it."""

from __future__ import annotations

import gc
from typing import Any

from distdiag.page.layout import word
from distdiag.recorder import state
from distdiag.recorder.state import now_ns

_NS, _COUNT, _OFF = word("gc_ns"), word("gc_count"), word("gc_off")


def watch(recorder: state.Recorder) -> None:
    """Time the collections of the oldest generation from now on. Younger ones are short: they cost one comparison."""
    words, began = recorder.page.words, 0

    def collects(phase: str, info: dict[str, Any]) -> None:
        nonlocal began
        if info["generation"] < 2:
            return
        if phase == "start":
            began = now_ns()
        elif began:
            words[_NS] += now_ns() - began
            words[_COUNT] += 1

    gc.callbacks.append(collects)


def poll(recorder: state.Recorder) -> None:
    """Record whether collections are switched off; called by the pulse."""
    recorder.page.words[_OFF] = not gc.isenabled()
