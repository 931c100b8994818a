"""Where a collective was called: the line, and for a helper that many lines call, its callers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from distdiag.diagnosis.model.snapshot import lines_of
from distdiag.diagnosis.text.phrases import at, places_text
from distdiag.monitor.ranks.decode import PageDecoder
from distdiag.page.reader import PageReader
from distdiag.page.writer import PageWriter
from distdiag.recorder import frames
from distdiag.recorder.state import Recorder

HERE = str(Path(__file__).resolve())
Call = Callable[[], None]


def helper(call: Call) -> None:
    call()


def helped(call: Call) -> None:
    helper(call)


def looping(call: Call) -> None:
    for _ in range(2):
        call()


def long(call: Call) -> None:
    a = [0]
    a.append(1)
    a.append(2)
    a.append(3)
    a.append(4)
    a.append(5)
    a.append(6)
    a.append(7)
    a.append(8)
    a.append(9)
    a.append(10)
    a.append(11)
    a.append(12)
    a.append(13)
    a.append(14)
    call()


def from_a_loop(call: Call) -> None:
    for each in (helper, helped):
        each(call)


def test_a_site_has_the_callers_of_a_helper(tmp_path: Path) -> None:
    writer = PageWriter(tmp_path / "rank_0.page")
    recorder, offsets = Recorder(writer), []

    def call() -> None:
        offsets.append(recorder.call_site(sys._getframe(1)))

    for user in (looping, long, from_a_loop):
        user(call)
    writer.publish()
    decoder = PageDecoder(PageReader(writer.path), 0)
    sites = [decoder.site(offset) for offset in offsets]
    names = [[frame.function for frame in site.path] for site in sites if site]
    assert names[:4] == [["looping"], ["looping"], ["long"], ["helper", "from_a_loop"]]
    assert names[4] == ["helper", "helped", "from_a_loop"] and len(names) == 5
    assert offsets[0] == offsets[1] and len({site.key for site in sites if site}) == 4  # a helper's site is its path
    last = sites[4]
    assert last is not None and all(frame.file == HERE for frame in last.path)
    lines = [frame.line for frame in last.path]
    assert lines_of(last.key) == [(HERE, line) for line in lines]
    name = Path(HERE).name
    called = f"(called at {name}:{lines[1]} in helped, from {name}:{lines[2]} in from_a_loop)"
    assert at(last) == f" at {name}:{lines[0]} in helper {called}"
    assert places_text(last.key) == f"{name}:{lines[0]}, called at {name}:{lines[1]}, called at {name}:{lines[2]}"


def test_a_full_cache_is_emptied_before_the_next_entry() -> None:
    cache: dict[int, int] = {}
    for n in range(frames.MOST_KEPT + 1):
        assert frames.kept(cache, n, 2 * n) == 2 * n
    assert cache == {frames.MOST_KEPT: 2 * frames.MOST_KEPT}
