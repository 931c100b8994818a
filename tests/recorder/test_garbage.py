"""Full garbage collections are timed in the rank, and only those."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

from distdiag.page.layout import word
from distdiag.recorder import garbage


def test_the_time_of_full_collections_is_summed() -> None:
    words = [0] * (word("gc_off") + 1)
    recorder: Any = SimpleNamespace(page=SimpleNamespace(words=words))
    before = list(gc.callbacks)
    try:
        garbage.watch(recorder)
        gc.collect(0)
        gc.collect(1)
        assert words[word("gc_count")] == 0
        gc.collect()
        gc.collect()
        assert words[word("gc_count")] == 2 and words[word("gc_ns")] > 0
    finally:
        gc.callbacks[:] = before
    gc.disable()
    try:
        garbage.poll(recorder)
        assert words[word("gc_off")] == 1
    finally:
        gc.enable()
    garbage.poll(recorder)
    assert words[word("gc_off")] == 0
