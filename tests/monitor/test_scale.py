"""What a poll costs grows no faster than the number of ranks, and a fault among many simulated ranks is named."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from distdiag.diagnosis.model.snapshot import Call, RankState
from distdiag.monitor.node_states import Incomplete, NodeState, Readings, Sender
from distdiag.monitor.nodes import SILENT_S, STALE_S, Nodes
from distdiag.monitor.pace import Pace
from distdiag.monitor.rows import _median_low_of_others
from distdiag.monitor.windows import Windows
from tests.simulated import Job, Simulation, simulated

SMALL, LARGE = 32, 256


def poll_cpu_s(s: Simulation, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the CPU seconds per second of the job, with polls as often as those of a small one."""
    monkeypatch.setattr(s.monitor, "_tick_s", lambda _: 0.5)
    s.run(8)
    passed, used, _ = s.run(10)
    return used / passed


def test_the_cost_grows_no_faster_than_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cost = {}
    for world in (SMALL, LARGE):
        with simulated(Job(world, 8), tmp_path / str(world)) as s:
            cost[world] = poll_cpu_s(s, monkeypatch)
            assert s.monitor.diagnosis.open() == [] and len(s.monitor.diagnosis.records) == 0
    # fixed costs make it less than the ratio of the ranks, 8; quadratic cost makes it 64
    assert cost[LARGE] < 1.5 * LARGE / SMALL * cost[SMALL]


def test_a_large_job_costs_a_bounded_share_of_a_core(tmp_path: Path) -> None:
    with simulated(Job(16, 8), tmp_path) as s:
        s.run(2)
        assert s.monitor._tick_s(0.001) == pytest.approx(0.25)
        assert s.monitor._tick_s(0.15) == pytest.approx(1.0)
        assert s.monitor._tick_s(60.0) == pytest.approx(6.0)
        s.monitor.diagnosis.suspects = lambda: True  # type: ignore[method-assign]
        assert s.monitor._tick_s(0.2) == pytest.approx(0.25)


@pytest.mark.parametrize(("sent", "lost_s"), [(False, STALE_S), (True, SILENT_S)])
def test_faults_among_many_ranks_are_named(tmp_path: Path, sent: bool, lost_s: float) -> None:
    with simulated(Job(128, 8, sent=sent), tmp_path) as s:
        s.run(12)
        assert s.monitor.diagnosis.state == "running" and s.monitor.diagnosis.open() == []
        s.lost = {7}
        passed, _, found = s.run(30, lambda: s.not_heard_of(7))
        assert found and passed < lost_s + 1
        assert s.found("deadlock") == []
        s.lost = set()
        s.run(6)
        s.hang()
        passed, _, found = s.run(10, lambda: bool(s.found("deadlock")))
        assert found and passed < 5
        (finding,) = s.found("deadlock")
        assert finding.culprits == (s.odd,) and finding.certainty == "proved" and len(finding.victims) == 127


def test_a_rank_that_begins_to_wait_ends_a_long_rest_now_and_then() -> None:
    pace = Pace()
    pace.poll_at = 1004.0
    assert pace.rests(1000.0, lambda: False)
    assert not pace.rests(1000.5, lambda: True) and not pace.rests(1002.0, lambda: False)
    pace.poll_at = 1010.0
    assert pace.rests(1006.0, lambda: True)  # a job whose ranks often wait costs no more than a bounded share
    assert not pace.rests(1010.0, lambda: False)
    pace.poll_at = 1100.0
    assert not pace.rests(1050.0, lambda: True, lambda: True)  # each kind of news has its own haste
    assert not pace.rests(1065.0, lambda: True)  # a hang after another long wait


def test_what_is_known_of_a_history_is_not_decoded_again_and_a_changed_item_is() -> None:
    sent, readings = sends(), Readings()
    one, two, three = (Call(op="barrier", group="g", seq=k, entered_s=float(k)) for k in (1, 2, 3))
    first = readings.heard(sent(one, two), 10.0).ranks[5].calls
    left = msgspec.structs.replace(two, completed_s=2.5)
    second = readings.heard(sent(one, left, three), 10.0).ranks[5].calls
    assert second[0] is first[0] and (second[1].completed_s, second[2].entered_s) == (12.5, 13.0)
    third = readings.heard(sent(left, three), 10.0).ranks[5].calls
    assert len(third) == 2 and third[0] is second[1] and third[1] is second[2]
    assert readings.heard(sent(left), 20.0).ranks[5].calls[0].completed_s == 22.5
    assert readings.heard(sent(), 20.0).ranks[5].calls == ()


def sends() -> Callable[..., NodeState]:
    """Return what makes a node's next state, of a rank with these calls, for a node 0 that has read the state `known`."""
    sender, windows, numbers = Sender(), Windows(), itertools.count(1)

    def sent(*calls: Call, known: int = 0) -> NodeState:
        found = sender.parts(next(numbers), {5: RankState(rank=5, calls=calls)}, {}, windows, known)
        return NodeState(node=1, started_unix_s=0.0, written_unix_s=0.0, local_world_size=1, **found)

    return sent


def test_what_node_0_has_read_is_not_sent_again_unless_it_must_be() -> None:
    sent, readings = sends(), Readings()
    one, two, three = (Call(op="barrier", group="g", seq=k, entered_s=float(k)) for k in (1, 2, 3))
    first = readings.heard(sent(one, two), 10.0).ranks[5].calls
    sent(one, two, three, known=1)  # lost on its way
    new = sent(two, three, known=1)
    assert new.histories[5]["calls"].items == msgspec.msgpack.encode(three)
    second = readings.heard(new, 10.0).ranks[5].calls
    assert second[0] is first[1] and second[1].entered_s == 13.0
    assert sent(two, three, known=3).histories[5]["calls"].items == b""
    before = readings.heard(sent(two, three, known=3), 10.0).ranks[5].calls
    after = readings.heard(sent(two, three, known=4), 20.0).ranks[5].calls  # the clocks are compared better now
    assert [(c.seq, c.entered_s) for c in after] == [(c.seq, (c.entered_s or 0.0) + 10.0) for c in before]
    another = Readings()  # of another monitor of node 0
    with pytest.raises(Incomplete):
        another.heard(sent(two, three, known=3), 10.0)
    assert [c.seq for c in another.heard(sent(two, three), 10.0).ranks[5].calls] == [2, 3]


def test_a_node_whose_state_lacks_what_is_not_known_sends_the_next_one_whole(tmp_path: Path) -> None:
    with simulated(Job(32, 8, sent=True), tmp_path) as s:
        s.run(10)
        assert all(s.inbox.known.values()) and s.monitor.nodes.failed is None
        s.monitor.nodes._readings = Readings()  # as a new monitor has
        s.run(3)
        assert all(s.inbox.known.values()) and s.monitor.nodes.failed is None and not s.monitor.nodes._silent_s()


def test_a_rank_of_another_node_that_becomes_slow_is_named_while_polls_are_far_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with simulated(Job(64, 8, sent=True), tmp_path) as s:
        monkeypatch.setattr("distdiag.monitor.loop.stretched_s", lambda _: 6.0)
        s.run(14)
        while s.monitor.pace.poll_at - time.monotonic() < 5.5:  # a poll has just been
            s.run(0.25)
        s.late_ms = 60.0
        passed, _, found = s.run(10, lambda: bool(s.found("straggler")))
        assert found and passed < 5.5
        assert s.found("straggler")[0].culprits == (s.odd,)


def test_a_state_that_is_read_again_is_not_moved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    with simulated(Job(32, 8), tmp_path) as s:
        s.run(10)
        nodes: Nodes = s.monitor.nodes
        snapshot = s.monitor.snapshot(s.monitor.now_s)
        first, _ = nodes.merged(snapshot, s.monitor.started_unix_s)
        monkeypatch.setattr("distdiag.monitor.node_states.shifted", lambda r, by_s: moved.append(r.rank) or r)
        again, _ = nodes.merged(snapshot, s.monitor.started_unix_s)
    assert moved == [] and all(again.ranks[q] is first.ranks[q] for q in range(8, 32))


@pytest.mark.parametrize(
    "values", [[1.0, 2.0], [3.0, 1.0, 2.0], [5.0, 5.0, 1.0, 9.0], [2.0] * 5, [4.0, 4.0, 7.0, 1.0, 3.0]]
)
def test_the_median_of_the_others_is_theirs(values: list[float]) -> None:
    for i, own in enumerate(values):
        others = values[:i] + values[i + 1 :]
        assert _median_low_of_others(sorted(values), own) == statistics.median_low(others)
    assert _median_low_of_others([1.0], 1.0) is None
