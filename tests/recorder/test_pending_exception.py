"""The exception that the main thread handles while it waits, as the pulse writes it into the page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from distdiag.page.layout import Blocked
from distdiag.page.reader import PageReader
from distdiag.page.writer import PageWriter
from distdiag.recorder import frames
from distdiag.recorder.pulse import Pulse
from distdiag.recorder.state import Recorder, now_ns

SWALLOWS = "def get(then):\n    try:\n        {}['key']\n    except KeyError:\n        then()\n"


@pytest.fixture
def page(tmp_path: Path) -> PageWriter:
    writer = PageWriter(tmp_path / "page")
    writer.publish()
    writer.header.blocked = Blocked.WAIT
    return writer


def read() -> None:
    raise KeyError("device")


class Strange(Exception):
    def __str__(self) -> str:
        raise AssertionError("this thread must not run the job's code")


def beaten(page: PageWriter) -> tuple[str, str | None]:
    """Return (exception, function that raised it) after one beat of the pulse."""
    Pulse(Recorder(page)).beat()
    reader = PageReader(page.path)
    h = reader.header()
    site = reader.site(h.handling_site)
    found = reader.text(h.handling), site[0][2] if site else None
    reader.close()
    return found


def test_an_exception_is_known_while_it_is_handled(page: PageWriter) -> None:
    try:
        read()
    except KeyError:
        assert beaten(page) == ("KeyError: 'device'", "read")
    assert beaten(page) == ("", None)

    def clean_up() -> None:
        try:
            read()
        finally:
            assert beaten(page) == ("KeyError: 'device'", "read")

    with pytest.raises(KeyError):
        clean_up()


def test_the_text_of_an_exception_is_made_without_its_methods(page: PageWriter) -> None:
    for error, text in ((Strange("a"), "Strange: a"), (Strange(page), "Strange"), (ValueError(3, 4), "ValueError")):
        try:
            raise error
        except Exception:
            assert beaten(page)[0] == text


def test_a_rank_that_moves_on_handles_nothing_and_is_not_asked(page: PageWriter) -> None:
    page.header.blocked = Blocked.NO
    page.header.phase_since_ns = now_ns() + 10**10  # it has just changed its phase
    try:
        read()
    except KeyError:
        assert beaten(page) == ("", None)


def test_an_exception_inside_a_library_is_its_own(page: PageWriter) -> None:
    names: dict[str, Callable[[Callable[[], None]], None]] = {}
    exec(compile(SWALLOWS, frames._STDLIB[0] + "cache.py", "exec"), names)
    found: list[tuple[str, str | None]] = []
    names["get"](lambda: found.append(beaten(page)))
    assert found == [("", None)]
