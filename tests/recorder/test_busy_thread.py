"""A thread that computes is recorded with its line; one that waits is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distdiag.page.reader import PageReader
from distdiag.page.writer import PageWriter
from distdiag.recorder import busy_thread
from distdiag.recorder.busy_thread import BusyThread
from distdiag.recorder.frames import line_of
from distdiag.recorder.state import Recorder


def compute(over: threading.Event) -> None:
    while not over.is_set():
        sum(range(1000))


def wait(over: threading.Event) -> None:
    over.wait()


def recorded(tmp_path: Path, work: Callable[[threading.Event], None], name: str = "metrics") -> tuple[float, str, str]:
    """Return (share, name, function) of what is recorded while a thread does this work."""
    page = PageWriter(tmp_path / "page")
    page.publish()
    recorder = Recorder(page)
    recorder.main_thread = threading.get_ident()
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), name=name)
    thread.start()
    try:
        busy = BusyThread(recorder)
        busy.poll()
        time.sleep(0.5)
        busy.poll()
    finally:
        over.set()
        thread.join()
    reader = PageReader(page.path)
    try:
        h = page.header
        return (
            h.thread_permille / 1000,
            reader.text(h.thread),
            reader.site(h.thread_site)[0][2] if h.thread_site else "",
        )
    finally:
        reader.close()


def test_a_thread_that_computes_is_recorded(tmp_path: Path) -> None:
    share, name, function = recorded(tmp_path, compute)
    assert (name, function) == ("metrics", "compute") and busy_thread.LEAST < share <= 1.0


def test_a_thread_that_waits_is_not(tmp_path: Path) -> None:
    assert recorded(tmp_path, wait) == (0.0, "", "")


def rarely(over: threading.Event) -> None:
    """Compute 6 % of the time."""
    while not over.wait(0.01):
        began = time.thread_time()
        while time.thread_time() - began < 6e-4:
            pass


@pytest.mark.parametrize(("main_computes", "named"), [(False, "metrics"), (True, "")])
def test_on_a_busy_host_a_threads_share_of_its_process_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main_computes: bool, named: str
) -> None:
    if main_computes:
        used = iter((0, 10**9))
        monkeypatch.setattr(time, "process_time_ns", lambda: next(used, 2 * 10**9))
    monkeypatch.setattr(busy_thread, "LEAST", 1.0)
    assert recorded(tmp_path, rarely)[1] == named


def test_names_of_ever_new_threads_do_not_fill_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_thread, "NAMES", 0)
    assert recorded(tmp_path, compute, "Thread-123 (flush)")[1] == "Thread"


def test_more_threads_than_can_be_read_are_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_thread, "MOST", 0)
    assert recorded(tmp_path, compute)[0] == 0.0


def test_an_instruction_without_a_line_has_that_of_the_one_before_it() -> None:
    import sys
    from types import SimpleNamespace
    from typing import Any

    code = compile("a = 1\nb = 2\n", "x.py", "exec")
    starts = [start for start, _, line in code.co_lines() if line == 2]
    frame: Any = SimpleNamespace(f_lineno=None, f_code=code, f_lasti=starts[-1])
    assert line_of(frame) == 2
    assert line_of(sys._getframe()) == sys._getframe().f_lineno
