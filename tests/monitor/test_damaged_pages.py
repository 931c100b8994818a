"""A damaged page costs its own rank only: random changes of a page, from a seed."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from distdiag import procfs
from distdiag.monitor.evidence import dump
from distdiag.monitor.loop import Monitor
from distdiag.page import directories
from distdiag.page.layout import PAGE_BYTES, Header, LifeWord, Page, page_path
from distdiag.page.writer import PageWriter

HEADER = Page.header.offset, Page.header.offset + Header.heartbeat_ns.offset
TIMES, SEED = 150, 20260101
LIMIT_S = 5.0  # of CPU, for one poll


def a_page(pages: Path, rank: int) -> PageWriter:
    """Return the page of a rank with calls, steps, a group and texts."""
    page = PageWriter(page_path(pages, rank))
    h = page.header
    h.pid, h.rank, h.world_size, h.local_world_size = os.getpid(), rank, 2, 2
    h.process_start_ticks = procfs.start_ticks(os.getpid()) or 0
    h.started_mono_ns, h.started_wall_ns, h.heartbeat_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
    h.life, h.facts = LifeWord.RUNNING, page.text('{"torch": "2.9"}')
    slot = page.page.groups[0]
    slot.name, slot.description, slot.ranks = page.text("0"), page.text("default_pg"), page.text("0-1")
    h.n_groups, slot.enqueued, slot.completed = 1, 3, 3
    site = page.site("/job/train.py", 7, "main")
    h.stack[0], h.stack_depth, h.raw_innermost = site, 1, page.text("queue.get")
    now = time.monotonic_ns()
    for k in range(1, 4):
        page.write_call(page.text("all_reduce"), 0, k, k, -1, 0, page.text("float32"), site, 1, 4, 0, 0, 0, 0, 0, 4, 16, -1, now, 5, now + 9, 0, 1)  # fmt: skip
        page.write_step(k, 0, now, now + 10**6, 1, 0, 2, 3, 4, 1, now, 8, 8, 0.5, 0, 0, now)
    h.step = 3
    page.publish()
    return page


def changed(whole: bytes, rng: random.Random) -> bytes:
    """Return a copy of a page with one to eight words overwritten, half of them in the header."""
    data = bytearray(whole)
    for _ in range(rng.randint(1, 8)):
        low, high = HEADER if rng.random() < 0.5 else (0, PAGE_BYTES - 8)
        at = rng.randrange(low, high)
        word = rng.choice([rng.randbytes(8), rng.randbytes(1), b"\xff" * 8, b"\0" * 8, (2**40).to_bytes(8, "little")])
        data[at : at + len(word)] = word
    return bytes(data)


@pytest.fixture
def pages(tmp_path: Path) -> tuple[Path, PageWriter, PageWriter]:
    directory = tmp_path / "pages"
    return directory, a_page(directory, 0), a_page(directory, 1)


def test_a_damaged_page_costs_only_its_rank(
    tmp_path: Path, pages: tuple[Path, PageWriter, PageWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # rules count their failures, as in a real monitor
    directory, _, second = pages
    rng, whole = random.Random(SEED), bytes(second._map)
    given_up = 0
    monitor = Monitor(tmp_path / "run", directory, node=0, quiet=True, keep_bytes=1 << 30)
    try:
        for k in range(TIMES):
            second._map[:] = whole  # a new monitor's view of a valid page …
            monitor.views.clear()
            monitor.pages.damaged.clear()
            monitor.pages._listed_s = -10.0
            assert not monitor._survive(monitor.tick) and set(monitor.views) == {0, 1}, (SEED, k)
            second._map[:] = changed(whole, rng)  # … which is damaged during the read
            for _ in range(2):
                began_s = time.process_time()
                monitor._survive(lambda: not monitor._all_moving() and monitor.tick())
                assert time.process_time() - began_s < LIMIT_S, (SEED, k)
            assert 0 in monitor.views, (SEED, k)
            given_up += 1 not in monitor.views
            if 1 not in monitor.views:
                monitor._survive(monitor.tick)
                assert {f.cause for f in monitor.own.found} >= {"damaged_page"}
        assert monitor._failed_polls == 0
        assert TIMES / 10 < given_up < TIMES  # some changes are harmless, many are not
    finally:
        second._map[:] = whole
        monitor.close()


@pytest.mark.parametrize("size", [0, 100, PAGE_BYTES - 1])
def test_a_truncated_or_empty_page_is_reported(
    tmp_path: Path, pages: tuple[Path, PageWriter, PageWriter], size: int
) -> None:
    directory, _, second = pages
    page_path(directory, 1).write_bytes(bytes(second._map)[:size])
    monitor = Monitor(tmp_path / "run", directory, node=0, quiet=True, keep_bytes=1 << 30)
    try:
        monitor.tick()
        assert set(monitor.views) == {0}
        assert [f.cause for f in monitor.own.found if f.kind == "recorder"] == ["damaged_page"]
    finally:
        monitor.close()


def test_a_damaged_page_does_not_make_the_job_larger(
    tmp_path: Path, pages: tuple[Path, PageWriter, PageWriter]
) -> None:
    second = pages[2]
    second.header.world_size = second.header.local_world_size = 60_000
    monitor = Monitor(tmp_path / "run", pages[0], node=0, quiet=True, keep_bytes=1 << 30)
    try:
        monitor.tick()
        snapshot = monitor.snapshot(monitor.now_s)
        assert (snapshot.world_size, snapshot.expected, set(snapshot.ranks)) == (2, 2, {0, 1})
    finally:
        monitor.close()


def test_a_page_with_another_rank_than_in_its_name_is_damaged(
    tmp_path: Path, pages: tuple[Path, PageWriter, PageWriter]
) -> None:
    pages[2].header.rank = 60_000
    monitor = Monitor(tmp_path / "run", pages[0], node=0, quiet=True, keep_bytes=1 << 30)
    try:
        monitor.tick()
        assert set(monitor.views) == {0} and [f.cause for f in monitor.own.found] == ["damaged_page"]
    finally:
        monitor.close()


def test_no_dump_asks_a_rank_whose_page_has_another_ranks_name(
    tmp_path: Path, pages: tuple[Path, PageWriter, PageWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of the file to which its signal handler writes the stacks comes from the page's name."""
    monkeypatch.setattr(directories, "of_run", lambda run_dir: {0: [pages[0]]})
    assert [view.rank for view in dump.living(tmp_path)] == [0, 1]
    pages[2].header.rank = 0
    assert [view.rank for view in dump.living(tmp_path)] == [0]
