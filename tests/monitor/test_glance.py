"""While a rank goes from phase to phase, the monitor and the rank's own pulse look less; when it may be waiting, as ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distdiag.monitor.ranks import RankView
from distdiag.recorder.layout import Blocked, LifeWord, page_path
from distdiag.recorder.page import PageWriter
from distdiag.recorder.pulse import Pulse
from distdiag.recorder.state import Recorder

LONG_AGO_NS = 10**9


@pytest.fixture
def page(tmp_path: Path) -> PageWriter:
    page = PageWriter(page_path(tmp_path, 0))
    page.h.phase_since_ns = time.monotonic_ns() - LONG_AGO_NS
    page.publish()
    return page


@pytest.fixture
def view(page: PageWriter) -> Iterator[RankView]:
    view = RankView.open(page.path, 0)
    view.refresh(1.0)
    yield view
    view.page = None
    view.reader.close()


def moves(page: PageWriter) -> int:
    page.h.phase_since_ns = now = time.monotonic_ns()
    return now


def test_a_rank_that_moved_a_moment_ago_goes_on(page: PageWriter, view: RankView) -> None:
    assert not view.goes_on(time.monotonic_ns(), None)
    page.h.step = 7
    now = moves(page)
    assert view.goes_on(now, None) and view.page is not None and view.page.header.step == 7
    assert not view.goes_on(now + LONG_AGO_NS, None)


@pytest.mark.parametrize(
    ("blocked", "idle", "still_s", "goes_on"),
    [
        (Blocked.NO, False, 0.4, True),  # a long forward
        (Blocked.DDP, False, 0.4, True),  # a long backward
        (Blocked.NO, False, 0.6, False),  # on a GPU it may spin
        (Blocked.NO, True, 0.4, False),
        (Blocked.DDP, True, 0.4, False),
        (Blocked.NO, None, 0.4, False),  # not known
        (Blocked.WAIT, False, 0.4, False),
        (Blocked.WAIT, False, 0.05, True),
    ],
)
def test_a_rank_that_computes_waits_for_nobody(
    page: PageWriter, view: RankView, blocked: Blocked, idle: bool | None, still_s: float, goes_on: bool
) -> None:
    page.h.blocked = blocked
    assert view.goes_on(moves(page) + int(still_s * 1e9), idle) is goes_on


def raises(page: PageWriter) -> None:
    page.h.life, page.h.exception_ns = LifeWord.RAISED, 1


def fails(page: PageWriter) -> None:
    page.h.errors += 1


def calls_much(page: PageWriter) -> None:
    for _ in range(300):
        page.write_call(*range(1, 21), 5, 21)


def steps_much(page: PageWriter) -> None:
    page.h.n_steps += 100


@pytest.mark.parametrize("happens", [raises, fails, calls_much, steps_much])
def test_what_a_full_look_must_see_is_not_passed_over(
    happens: Callable[[PageWriter], None], page: PageWriter, view: RankView
) -> None:
    happens(page)
    assert not view.goes_on(moves(page), False)


class Groups:
    def __init__(self) -> None:
        self.refreshed = 0

    def refresh_groups(self) -> None:
        self.refreshed += 1


@pytest.mark.parametrize(
    ("blocked", "moving", "counted"),
    [
        (Blocked.NO, True, 2),
        (Blocked.DDP, True, 2),
        (Blocked.WAIT, True, 8),
        (Blocked.NO, False, 8),
        (Blocked.DDP, False, 8),
    ],
)
def test_counters_are_read_at_every_beat_while_the_rank_may_be_waiting(
    blocked: Blocked, moving: bool, counted: int, page: PageWriter
) -> None:
    pulse = Pulse(Recorder(page))
    pulse.collectives = groups = Groups()
    page.h.blocked = blocked
    for _ in range(8):
        if moving:
            moves(page)
        pulse.beat()
    assert (groups.refreshed, page.h.beats) == (counted, 8)
    assert 0 < page.h.counted_ns <= page.h.heartbeat_ns
    assert page.h.stack_depth and page.h.stack_version == 16
