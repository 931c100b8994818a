"""Full garbage collections are timed in the rank, and only those."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distdiag.page.layout import word
from distdiag.page.writer import PageWriter
from distdiag.recorder.fast import accounts
from distdiag.recorder.pulse import Pulse
from distdiag.recorder.state import Recorder

compiled = pytest.mark.skipif(not accounts.COMPILED, reason="the hooks were not compiled at the install")


@contextmanager
def watched() -> Iterator[Any]:
    """Yield the words of a page into which collections are timed."""
    words = memoryview(bytearray(8 * (word("gc_off") + 1))).cast("Q")
    page: Any = SimpleNamespace(words=words)
    before = list(gc.callbacks)
    try:
        accounts.time_collections(page)
        yield words
    finally:
        gc.callbacks[:] = before


@compiled
def test_the_time_of_full_collections_is_summed() -> None:
    with watched() as words:
        gc.collect(0)
        gc.collect(1)
        assert words[word("gc_count")] == 0
        gc.collect()
        gc.collect()
        assert words[word("gc_count")] == 2 and words[word("gc_ns")] > 0


@compiled
def test_collections_of_a_forked_child_are_not_those_of_its_rank() -> None:
    with watched() as words:
        child = os.fork()
        if child == 0:
            gc.collect()
            os._exit(words[word("gc_count")])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


INTERRUPTED = """
import gc, os, signal, threading, time
from tests.recorder.test_garbage import watched
keep = [[{"a": [i]}] for i in range(100_000)]

def job():
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    while time.monotonic() - began < 20:
        gc.collect()
    return "not interrupted"

with watched():
    gc.collect()
    try:
        print(job())
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_a_signal_during_a_collection_reaches_the_job() -> None:
    """Python prints and drops what a callback of the collector raises."""
    run = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60, check=False)
    assert (run.stdout, run.stderr) == ("interrupted\n", "")


def test_it_is_recorded_whether_collections_are_off(tmp_path: Path) -> None:
    page = PageWriter(tmp_path / "r0.page")
    gc.disable()
    try:
        Pulse(Recorder(page)).beat()
        assert page.words[word("gc_off")] == 1
    finally:
        gc.enable()
    page.words[word("beats")] = 0  # it is checked in every fourth
    Pulse(Recorder(page)).beat()
    assert page.words[word("gc_off")] == 0
