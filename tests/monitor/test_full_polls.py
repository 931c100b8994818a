"""While a rank changes phases, the monitor and the rank's pulse read less; when it may be waiting, they read everything."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from distdiag.diagnosis.engine import Record
from distdiag.diagnosis.model.findings import Finding, Severity, State
from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.diagnosis.step_times import LIMITS
from distdiag.monitor.host.processes import CpuWatch
from distdiag.monitor.loop import CALM_POLL_S, FULL_POLL_S, UNREAD_POLL_S, Monitor
from distdiag.monitor.ranks.state import RankView
from distdiag.page.layout import SAMPLES, Blocked, LifeWord, Phase, SampleKind, page_path
from distdiag.page.writer import PageWriter
from distdiag.recorder.pulse import Pulse
from distdiag.recorder.state import Recorder

LONG_AGO_NS = 10**9


@pytest.fixture
def page(tmp_path: Path) -> PageWriter:
    page = PageWriter(page_path(tmp_path, 0))
    page.header.phase_since_ns = time.monotonic_ns() - LONG_AGO_NS
    page.publish()
    return page


@pytest.fixture
def view(page: PageWriter) -> Iterator[RankView]:
    view = RankView(page.path, 0)
    view.refresh(1.0)
    yield view
    view.reader.close()


def moves(page: PageWriter) -> int:
    page.header.phase_since_ns = now = time.monotonic_ns()
    return now


def test_a_rank_that_just_changed_phases_is_not_polled_fully(page: PageWriter, view: RankView) -> None:
    assert not view.history.moves_on(time.monotonic_ns(), lambda: None)
    now = moves(page)
    assert view.history.moves_on(now, lambda: None)
    assert not view.history.moves_on(now + LONG_AGO_NS, lambda: None)


@pytest.mark.parametrize(
    ("blocked", "idle", "still_s", "moves_on"),
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
def test_a_rank_that_uses_the_cpu_is_not_polled_fully(
    page: PageWriter, view: RankView, blocked: Blocked, idle: bool | None, still_s: float, moves_on: bool
) -> None:
    page.header.blocked = blocked
    assert view.history.moves_on(moves(page) + int(still_s * 1e9), lambda: idle) is moves_on


def raises(page: PageWriter) -> None:
    page.header.life, page.header.exception_ns = LifeWord.RAISED, 1


def fails(page: PageWriter) -> None:
    page.header.errors += 1


def calls_much(page: PageWriter) -> None:
    for _ in range(300):
        page.write_call(*range(1, 22), 5, 21)


def steps_much(page: PageWriter) -> None:
    page.header.n_steps += 200


def samples(page: PageWriter, kind: SampleKind, times: int = 1) -> None:
    for _ in range(times):
        record = page.page.samples[page.header.n_samples % SAMPLES]
        record.kind, record.number, record.step = kind, page.header.n_samples + 1, 2
        page.header.n_samples += 1


def loses_its_loss(page: PageWriter) -> None:
    samples(page, SampleKind.PARAMETERS)
    samples(page, SampleKind.NONFINITE_LOSS)
    samples(page, SampleKind.BUFFERS)


def samples_much(page: PageWriter) -> None:
    samples(page, SampleKind.PARAMETERS, SAMPLES // 2)


def test_checksums_are_read_at_the_next_full_poll(page: PageWriter, view: RankView) -> None:
    for _ in range(3):
        samples(page, SampleKind.PARAMETERS)
        samples(page, SampleKind.LEARNING_RATE)
        assert view.history.moves_on(moves(page), lambda: False)
    view.refresh(2.0)
    assert [s.kind for s in view.history.samples] == ["parameters", "learning_rate"] * 3


@pytest.mark.parametrize("happens", [raises, fails, calls_much, steps_much, loses_its_loss, samples_much])
def test_records_that_need_a_full_poll_trigger_one(
    happens: Callable[[PageWriter], None], page: PageWriter, view: RankView
) -> None:
    happens(page)
    assert not view.history.moves_on(moves(page), lambda: False)


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[Monitor]:
    monitor = Monitor(tmp_path / "run", tmp_path / "pages", node=0, quiet=True, keep_bytes=1 << 30)
    monitor.sampling.hosts.cores = 4
    monitor.sampling.cpu_pct = [20.0, 97.0, 95.0, 99.0, 92.0, 90.0]
    yield monitor
    monitor.close()


def warns(reported: bool, severity: Severity = Severity.WARNING) -> Record:
    return Record(Finding(kind="straggler", severity=severity), reported=reported)


@pytest.mark.parametrize(
    ("records", "now_s", "spare", "poll_s"),
    [
        ([], 60.0, False, CALM_POLL_S),
        ([], 10.0, False, FULL_POLL_S),
        ([], 60.0, True, FULL_POLL_S),  # a core is free: a poll takes nothing from the ranks
        ([], 200.0, True, FULL_POLL_S),
        ([], 200.0, False, UNREAD_POLL_S),
        ([warns(reported=False)], 60.0, False, FULL_POLL_S),  # a suspicion is polled until it can be reported
        ([warns(reported=False)], 200.0, False, FULL_POLL_S),
        ([warns(reported=True)], 60.0, False, CALM_POLL_S),
        ([warns(reported=False, severity=Severity.INFO)], 60.0, False, CALM_POLL_S),
    ],
)
def test_full_polls_are_rarer_on_a_busy_host_without_suspicion(
    records: list[Record], now_s: float, spare: bool, poll_s: float, monitor: Monitor
) -> None:
    monitor.diagnosis.records = {str(i): r for i, r in enumerate(records)}
    if spare:
        monitor.sampling.cpu_pct.append(70.0)
    assert monitor._poll_interval_s(now_s) == poll_s


@pytest.mark.parametrize(
    ("bytes_a_second", "poll_s"), [(0, UNREAD_POLL_S), (1 << 18, UNREAD_POLL_S), (4 << 20, CALM_POLL_S)]
)
@pytest.mark.parametrize("course", ["memory", "worker_memory", "device_memory"])
def test_growing_memory_is_sampled_more_often(
    course: str, bytes_a_second: int, poll_s: float, monitor: Monitor, view: RankView
) -> None:
    monitor.views = {0: view}
    for t in (100.0, 180.0, 188.0, 196.0):
        getattr(view.gauges, course).append((t, (1 << 30) + int(bytes_a_second * t)))
    assert monitor._poll_interval_s(200.0) == poll_s


def test_rows_are_written_more_often_while_a_reader_is_open(monitor: Monitor) -> None:
    reads = "import sys; from distdiag.store.reader import open_run; r = open_run(sys.argv[1]); print(r.meta, flush=True); input()"
    going_on = SimpleNamespace(
        ending=None,
        gauges=SimpleNamespace(growing=lambda: False),
        history=SimpleNamespace(moves_on=lambda *_: True, sample_site=lambda _: None),
    )
    monitor.views = {0: cast(RankView, going_on)}
    monitor.diagnosis.state, monitor._host_at, monitor._poll_s = State.RUNNING, monitor.now_s, UNREAD_POLL_S
    assert monitor._all_moving()
    with subprocess.Popen(
        [sys.executable, "-c", reads, str(monitor.run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as reader:
        assert reader.stdout is not None and reader.stdout.readline()
        monitor._host_at, monitor._readers_at = monitor.now_s, -10.0
        assert not monitor._all_moving()  # at once, before the next scheduled full poll
        assert monitor._all_moving()  # once
        assert monitor._poll_interval_s(200.0) == CALM_POLL_S
        reader.communicate(b"\n", timeout=30)
    assert monitor._poll_interval_s(200.0) == UNREAD_POLL_S
    monitor.views = {}


class Groups:
    def __init__(self) -> None:
        self.refreshed = 0

    def refresh_groups(self) -> None:
        self.refreshed += 1


@pytest.mark.parametrize(
    ("blocked", "moving", "counted", "stacks"),
    [
        (Blocked.NO, True, 2, 4),
        (Blocked.DDP, True, 2, 4),
        (Blocked.WAIT, True, 8, 8),
        (Blocked.NO, False, 8, 8),
        (Blocked.DDP, False, 8, 8),
    ],
)
def test_counters_and_frames_are_read_at_every_beat_while_the_rank_may_be_waiting(
    blocked: Blocked, moving: bool, counted: int, stacks: int, page: PageWriter
) -> None:
    pulse = Pulse(Recorder(page))
    pulse.collectives = groups = Groups()
    page.header.blocked = blocked
    for _ in range(8):
        if moving:
            moves(page)
        pulse.beat()
    assert (groups.refreshed, page.header.beats) == (counted, 8)
    assert 0 < page.header.counted_ns <= page.header.heartbeat_ns
    # read after the frames, so that the operation that they wait in is counted
    assert page.header.counted_ns > page.header.stack_ns or counted < stacks
    assert page.header.stack_depth and page.header.stack_version == 2 * stacks  # odd during a write


def test_lines_of_the_warm_up_do_not_outweigh_those_of_the_steps_that_are_judged(page: PageWriter) -> None:
    view, pulse = RankView(page.path, 0), Pulse(Recorder(page))

    def sampled(phase: Phase) -> dict[str, int]:
        page.header.phase = phase
        pulse.beat()
        view.history.sample_site(None)
        return {name: sum(n for _, n in sites) for name, sites in view.history.phases()["phase_sites"].items()}

    assert [sampled(Phase.INIT) for _ in range(2)] and sampled(Phase.OTHER)["other"] == 1
    for step in range(1, LIMITS.warm_up + 2):
        page.write_step(step, *(0,) * 16)
    view.refresh(1.0)
    assert sampled(Phase.FORWARD) == {"init": 2, "forward": 1}
    assert sampled(Phase.FORWARD) == {"init": 2, "forward": 2}, "once"
    view.reader.close()


@pytest.mark.parametrize("kept", [True, False], ids=["schedstat", "ticks alone"])
def test_computing_sleeping_and_stopped_processes_are_distinguished_by_proc(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = CpuWatch._read
    if not kept:  # as on a kernel without these statistics
        monkeypatch.setattr(CpuWatch, "_read", lambda *a: "0 0 0\n" if a[2] == "schedstat" else read(*a))
    script = "import sys, time\nfor line in sys.stdin:\n    end = time.monotonic() + float(line)\n    while time.monotonic() < end: pass"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, text=True, bufsize=1) as other:
        watch, end = CpuWatch(), time.monotonic() + 30
        try:
            assert other.stdin is not None
            assert watch.idle(other.pid)[0] is None  # nothing to compare with
            while watch.idle(other.pid) != (True, "S"):
                assert time.monotonic() < end
                time.sleep(0.05)
            other.stdin.write("60\n")
            while watch.idle(other.pid)[0] is not False:
                assert time.monotonic() < end
                time.sleep(0.05)
            before_ns = watch._cpu_ns(other.pid)
            while (
                watch._cpu_ns(other.pid) <= before_ns
            ):  # not by its state alone: a computing process may sleep at the moment of the poll
                assert time.monotonic() < end
                time.sleep(0.05)
            other.send_signal(signal.SIGSTOP)
            while watch.idle(other.pid) != (False, "T"):  # not asleep: it waits for nothing
                assert time.monotonic() < end
                time.sleep(0.05)
        finally:
            other.kill()
    assert watch.idle(other.pid) == (None, None)


def test_a_poll_that_takes_seconds_is_no_change_of_the_wall_clock(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor.recording, "write_facts", lambda *_: None)  # there are no ranks
    begun = Snapshot(t_s=monitor.now_s - 3.0, world_size=1, ranks={}, groups={})
    monitor._write(begun, [], over=True)
    assert monitor.own.found == []
    monitor.started_unix_s -= 3.0
    monitor._write(begun, [], over=True)
    assert [f.cause for f in monitor.own.found] == ["clock_skew"]
