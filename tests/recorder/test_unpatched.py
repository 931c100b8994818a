"""What the recorder runs on is the interpreter's own: gevent, eventlet and freezegun do not reach it."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest

from distdiag import recorder, unpatched

PATCHED = re.compile(
    r"\b_thread\.(?:start_new|allocate_lock|RLock|get_)|\bthreading\.(?:R?Lock|Event|Condition|Thread|get_ident)\(|from (?:threading|time) import"
    r"|\btime\.(?:sleep|time|time_ns|monotonic|monotonic_ns|perf_counter|perf_counter_ns)\b|\bos\.(?:posix_spawn|waitpid)\("
)


def test_the_recorder_uses_nothing_that_tools_replace() -> None:
    folder = Path(recorder.__file__).parent
    found = [
        f"{path.name}:{number}: {line.strip()}"
        for path in [*folder.rglob("*.py"), folder.parent / "page" / "writer.py"]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PATCHED.search(line)
    ]
    assert found == []


def test_the_clocks_are_those_of_time() -> None:
    for ours, theirs in ((unpatched.now_ns, time.monotonic_ns), (unpatched.wall_ns, time.time_ns)):
        before = theirs()
        assert before <= ours() <= theirs() and ours is not theirs
    assert unpatched.now_s() <= time.monotonic() <= unpatched.now_s()
    before = time.monotonic()
    unpatched.sleep(0.01)
    assert time.monotonic() - before >= 0.01


def test_a_thread_is_another_one_and_has_the_real_ident(monkeypatch: pytest.MonkeyPatch) -> None:
    ident = threading.get_ident()
    monkeypatch.setattr(threading, "get_ident", lambda: 1)
    assert unpatched.main_thread() == ident
    done, found = unpatched.Lock(), []
    done.acquire()

    def run() -> None:
        found.extend((unpatched.get_native_id(), unpatched.main_thread()))
        done.release()

    unpatched.start_new_thread(run, ())
    assert done.acquire(timeout=10)
    assert found[0] != unpatched.get_native_id() and found[1] == ident
