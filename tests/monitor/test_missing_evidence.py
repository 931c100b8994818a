"""What cannot be judged about ranks on a device backend is reported, and only that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from distdiag.diagnosis.model.snapshot import Call, Group, Life, RankState, Snapshot
from distdiag.monitor.pages import Pages
from distdiag.monitor.ranks.state import RankView
from distdiag.monitor.self_check import SETTLED_BEATS, MissingEvidence
from distdiag.page.layout import page_path
from distdiag.page.writer import PageWriter


class Rank:
    """The page of a rank with one group of a device backend, and 100 collectives and steps between polls."""

    def __init__(self, pages: Path, backend: str = "nccl") -> None:
        self.page = PageWriter(page_path(pages, 0))
        h, slot = self.page.header, self.page.page.groups[0]
        slot.backend, slot.name, slot.ranks = (self.page.text(t) for t in (backend, "0", "0-1"))
        slot.completed = -1
        h.n_groups, h.trace_signal = 1, 60
        self.page.publish()
        self.native = Path(self.page.path).with_name("r0.native")
        self.native.write_bytes(b"")
        self.view = RankView(self.page.path, 0)
        self.sight = MissingEvidence()

    def poll(self, beats: int, completed: int) -> list[str]:
        slot = self.page.page.groups[0]
        self.page.header.beats += beats
        self.page.header.step += 100
        slot.enqueued += 100
        slot.completed = completed
        self.view.refresh(1.0)
        return [text for _, text, _ in self.sight.missing({0: self.view})]

    def close(self) -> None:
        self.view.reader.close()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    it = Rank(tmp_path / "pages")
    yield it
    it.close()


def test_missing_counters_are_reported_after_the_pulse_has_read_them_often_enough(rank: Rank) -> None:
    assert rank.poll(1, -1) == []
    assert [rank.poll(0, -1) for _ in range(100)] == [[]] * 100, "the pulse has not run meanwhile"
    text = rank.poll(SETTLED_BEATS, -1)[0]
    assert "no completed collectives are counted" in text and text.endswith("inferred from what all ranks have issued")


def test_a_watchdog_that_notices_nothing_is_reported(rank: Rank) -> None:
    assert rank.poll(1, 7) == []
    assert "no completion after #7 was noticed" in rank.poll(SETTLED_BEATS, 7)[0]


def test_counters_that_move_are_not_reported(rank: Rank) -> None:
    assert [rank.poll(SETTLED_BEATS, 50 * n) for n in range(1, 4)] == [[]] * 3


def test_without_the_compiled_module_host_waits_are_not_judged_and_that_is_reported(rank: Rank) -> None:
    rank.native.unlink()
    assert "native frames of rank 0 cannot be read" in rank.poll(1, 50)[0]


def test_gloo_needs_neither_counters_nor_native_frames(tmp_path: Path) -> None:
    gloo = Rank(tmp_path / "pages", "gloo")
    gloo.native.unlink()
    assert gloo.poll(1, -1) == gloo.poll(SETTLED_BEATS, -1) == []
    gloo.close()


def stuck(host: str | None, **more: object) -> Snapshot:
    """Return two ranks without progress for 20 s; rank 0 has a collective in flight, its host in a function `f`."""
    ranks = {
        q: RankState(rank=q, activity_since_s=80.0, host_wait=host, host_wait_in="f in libx.so", enqueued={"g": 7 - q})
        for q in (0, 1)
    }
    ranks[1] = msgspec.structs.replace(ranks[1], **more)
    return Snapshot(t_s=100.0, world_size=2, ranks=ranks, groups={"g": Group(name="g", ranks=(0, 1), backend="other")})


def test_a_job_without_progress_and_with_unknown_host_waits_is_reported() -> None:
    ((_, text, rank),) = MissingEvidence.unknown_hosts(stuck("no"))
    assert rank == 0 and "group g (other) in flight" in text and "f in libx.so" in text


@pytest.mark.parametrize(
    "s",
    [
        stuck("device"),
        stuck(None),
        stuck("no", activity_since_s=99.0),
        stuck("no", blocked=Call(op="new_group", group="g", seq=1)),
        stuck("no", life=Life.FINISHED),
    ],
)
def test_hosts_that_wait_or_make_progress_are_not_reported(s: Snapshot) -> None:
    assert list(MissingEvidence.unknown_hosts(s)) == []


def uncounted(backend: str = "nccl2", **more: object) -> Snapshot:
    """Return two ranks without progress for 80 s, whose devices have operations in flight that no counter shows."""
    ranks = {q: RankState(rank=q, activity_since_s=20.0, host_wait="device", enqueued={"g": 7}) for q in (0, 1)}
    ranks[1] = msgspec.structs.replace(ranks[1], **more)
    groups = {"g": Group(name="g", ranks=(0, 1), backend=backend)}
    return Snapshot(t_s=100.0, world_size=2, ranks=ranks, groups=groups)


def test_after_a_minute_without_progress_operations_that_no_counter_shows_are_reported() -> None:
    ((_, text, rank),) = MissingEvidence.unknown_operations(uncounted())
    assert rank == 0 and "no counter shows which operations of group g (nccl2) rank 0's device has completed" in text
    ((_, text, rank),) = MissingEvidence.unknown_operations(uncounted(activity_since_s=30.0, completed={"g": 6}))
    assert rank == 0, "the other's counter is known"


@pytest.mark.parametrize(
    "s",
    [
        uncounted("gloo"),
        uncounted(activity_since_s=50.0),
        uncounted(activity_since_s=None),
        msgspec.structs.replace(uncounted(), t_s=70.0),
        msgspec.structs.replace(uncounted(), groups={}),
    ],
)
def test_a_minute_has_not_passed_or_nothing_is_in_flight_on_a_device(s: Snapshot) -> None:
    assert list(MissingEvidence.unknown_operations(s)) == []


def test_a_rank_stuck_before_the_monitor_started_counts_from_the_first_poll(tmp_path: Path) -> None:
    """The run's time zero is known once the first page is open: until then the time is the monitor's own."""
    page = PageWriter(page_path(tmp_path, 0))
    page.publish()
    pages = Pages(tmp_path)
    try:
        pages.discover(0.1, lambda view: None)
        view = pages.views[0]
        view.refresh(60.0)
        assert view.history.still_since_s == 60.0
        view.refresh(61.0)
        assert view.history.still_since_s == 60.0
    finally:
        for view in pages.views.values():
            view.reader.close()
