"""The monitor's record of a rank's visits to its call sites, read from the rank's own page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from distdiag.monitor.ranks.state import RankView
from distdiag.page.layout import CALLS, NO_GROUP, page_path
from distdiag.page.writer import PageWriter


@pytest.fixture
def page(tmp_path: Path) -> PageWriter:
    page = PageWriter(page_path(tmp_path, 0))
    group = page.page.groups[0]
    group.name, group.description = page.text("0"), page.text("default_pg")
    page.header.n_groups = 1
    page.publish()
    return page


@pytest.fixture
def view(page: PageWriter) -> Iterator[RankView]:
    view = RankView(page.path, 0)
    yield view
    view.reader.close()


def calls(page: PageWriter, line: int, seq: int, group: int = 0) -> None:
    site = page.site("/job/train.py", line, "main")
    page.write_call(page.text("barrier"), group, seq, 0, -1, 0, 0, site, -1, *[0] * 6, 0, -1, -1, seq, 0, seq, 0, 1)


def seen(view: RankView, line: int) -> tuple[int, ...]:
    view.refresh(1.0)
    return view.history.visits.known().get("default_pg", {}).get(f"/job/train.py:{line}", ())


def test_only_the_first_of_consecutive_calls_counts(page: PageWriter, view: RankView) -> None:
    for seq in (5, 6, 7, 20, 21):
        calls(page, 10, seq)
    calls(page, 30, 22)
    assert (seen(view, 10), seen(view, 30)) == ((5, 20), (22,))
    for seq in (40, 60, 80):
        calls(page, 10, seq)
    assert seen(view, 10) == (20, 40, 60, 80)  # as many as a rhythm needs


def test_calls_without_a_collective_are_no_visits(page: PageWriter, view: RankView) -> None:
    calls(page, 10, 1, group=NO_GROUP)  # init_process_group, new_group
    assert seen(view, 10) == () and view.history.visits.known() == {}


def test_missed_calls_invalidate_older_visits(page: PageWriter, view: RankView) -> None:
    calls(page, 10, 5)
    assert seen(view, 10) == (5,)
    for seq in range(6, CALLS + 20):
        calls(page, 30, seq)
    calls(page, 10, CALLS + 20)
    assert seen(view, 10) == (CALLS + 20,) and view.history.missed > 0
