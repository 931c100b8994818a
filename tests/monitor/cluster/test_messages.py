"""Messages between monitors: everything that arrives is checked before it is used."""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distdiag.diagnosis.model.snapshot import Call, Group, RankState, Snapshot
from distdiag.monitor.cluster import messages
from distdiag.monitor.cluster.clock import WINDOW_NS, Offset
from distdiag.monitor.cluster.messages import BURST, Answer, Ask, BadMessage, Order, Receipt, Report
from distdiag.monitor.node_states import NodeState
from distdiag.monitor.nodes import Nodes

REPORT = Report(incarnation=1, number=1, sent_ns=5, state=b"-state")


def test_each_side_takes_only_what_the_other_sends() -> None:
    receipt = Receipt(number=1, report_sent_ns=1, received_ns=2, sent_ns=3)
    for message, to_first in (
        (REPORT, True),
        (Answer(number=1), True),
        (receipt, False),
        (Ask(number=1, timeout_s=5), False),
    ):
        data = messages.encode(message)
        assert messages.decode(data, to_first) == message
        with pytest.raises(BadMessage):
            messages.decode(data, not to_first)


@pytest.mark.parametrize(
    "changed",
    [{"number": -1}, {"number": 1 << 60}, {"number": 1.5}, {"sent_ns": -1}, {"incarnation": None}, {"state": "text"},
     {"offset_ns": 1 << 62}, {"version": messages.VERSION + 1}, {"type": "other"}],
)  # fmt: skip
def test_a_field_out_of_range_is_refused(changed: dict[str, object]) -> None:
    fields = msgspec.msgpack.decode(messages.encode(REPORT)) | changed
    with pytest.raises(BadMessage):
        messages.decode(msgspec.msgpack.encode(fields), to_first=True)


@given(st.binary(max_size=2000))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    for to_first in (True, False):
        try:
            messages.decode(data, to_first)
        except BadMessage:
            pass
    try:
        messages.unpack(data)
    except BadMessage:
        pass


@pytest.mark.parametrize("data", [b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff", b"x" * (messages.MOST_BYTES + 1)])
def test_deep_and_large_messages_are_refused(data: bytes) -> None:
    with pytest.raises(BadMessage):
        messages.decode(data, to_first=True)


def test_a_state_is_packed_if_it_is_large() -> None:
    for data in (b"", b"short", b"long" * 5000):
        packed = messages.pack(data)
        assert messages.unpack(packed) == data and len(packed) <= 4100
    bomb = b"z" + zlib.compress(bytes(messages.MOST_BYTES + 1))
    with pytest.raises(BadMessage, match="too long"):
        messages.unpack(bomb)
    with pytest.raises(BadMessage):
        messages.unpack(b"z not compressed")


def test_old_and_repeated_messages_change_nothing() -> None:
    order = Order()
    order.admit(Report(incarnation=1, number=5, sent_ns=0), 1.0)
    for incarnation, number in ((1, 5), (1, 4), (0, 99)):  # a replay, an older one, an earlier monitor
        with pytest.raises(BadMessage, match="old"):
            order.admit(Report(incarnation=incarnation, number=number, sent_ns=0), 1.0)
    order.admit(Report(incarnation=2, number=1, sent_ns=0), 1.0)  # another monitor of this node counts from 1


def test_the_largest_number_does_not_lock_a_node_out() -> None:
    order = Order()
    order.admit(Report(incarnation=1, number=1 << 53, sent_ns=0), 1.0)
    order.admit(Report(incarnation=2, number=1, sent_ns=0), 1.0)
    with pytest.raises(BadMessage):  # no larger one can be sent, so none wraps
        messages.decode(messages.encode(Report(incarnation=1, number=(1 << 53) + 1, sent_ns=0)), to_first=True)


def test_a_node_that_floods_is_slowed_down() -> None:
    order, admitted = Order(), 0
    for n in range(1000):
        try:
            order.admit(Report(incarnation=1, number=n + 1, sent_ns=0), 10.0)
            admitted += 1
        except BadMessage:
            pass
    assert admitted == BURST
    order.admit(Report(incarnation=1, number=2000, sent_ns=0), 11.0)


def test_the_offset_of_the_clocks_is_that_of_the_shortest_round_trip() -> None:
    ms, offset = 1_000_000, Offset()
    offset.add(0, 1000 * ms, 1000 * ms, 40 * ms)  # all of it on the way there: 20 ms wrong, and said so
    assert offset.applied == (980 * ms, 20 * ms)
    offset.add(50 * ms, 1051 * ms, 1052 * ms, 53 * ms)  # 3 ms, of which 1 ms at the other end
    assert offset.applied == (1000 * ms, 1 * ms)
    offset.add(60 * ms, 1075 * ms, 1075 * ms, 80 * ms)  # a slow one tells nothing
    offset.add(
        90 * ms, 1090 * ms + 600_000, 1090 * ms + 600_000, 91 * ms + 200_000
    )  # not better by half: equal times stay equal
    assert offset.applied == (1000 * ms, 1 * ms)


def test_a_clock_that_was_stepped_is_followed_once_the_old_round_trips_are_too_old() -> None:
    ms, offset = 1_000_000, Offset()
    offset.add(0, 1000 * ms, 1000 * ms, 2 * ms)
    later = WINDOW_NS + 10 * ms
    offset.add(later, later + 5000 * ms, later + 5000 * ms, later + 2 * ms)
    assert offset.applied is not None and offset.applied.offset_ns == 4999 * ms


@pytest.mark.parametrize(
    "times", [(5, 1, 1, 4), (0, 9, 8, 20), (0, 0, 100, 50), (0, 1 << 62, 1 << 62, 5), (-1, 0, 0, 1)]
)
def test_impossible_times_are_no_exchange(times: tuple[int, int, int, int]) -> None:
    offset = Offset()
    offset.add(*times)
    assert offset.applied is None


def state(**changed: object) -> NodeState:
    fields: dict[str, object] = {
        "node": 1, "number": 1, "started_unix_s": 100.0, "written_unix_s": 100.0, "closed": True, "local_world_size": 2,
        "ranks": {2: RankState(rank=2), 3: RankState(rank=3)}, "groups": {},
    }  # fmt: skip
    return NodeState(**(fields | changed))  # type: ignore[arg-type]


BAD_CALL = Call(op="all_reduce", group="default_pg", seq=1, entered_s=math.inf)


@pytest.mark.parametrize(
    "bad",
    [
        state(ranks={0: RankState(rank=0)}),  # a rank of node 0
        state(ranks={7: RankState(rank=7)}),  # beyond the world
        state(ranks={-1: RankState(rank=-1)}),
        state(ranks={2: RankState(rank=3)}),
        state(ranks={q: RankState(rank=q) for q in (1, 2, 3)}),  # more than the node has
        state(local_world_size=0),
        state(local_world_size=1 << 40),
        state(ranks={2: RankState(rank=2, ended_s=math.nan)}),
        state(ranks={2: RankState(rank=2, blocked=BAD_CALL)}),
        state(ranks={2: RankState(rank=2, memory=((1e300, 5),))}),
        state(started_unix_s=math.nan),
        state(written_unix_s=math.inf),
        state(groups={str(i): Group(name=str(i), ranks=()) for i in range(5000)}),
    ],
)
def test_a_state_with_ranks_or_times_that_cannot_be_is_not_used(bad: NodeState, tmp_path: Path) -> None:
    here = Nodes(tmp_path, 0, tmp_path)
    own = Snapshot(t_s=5.0, world_size=4, expected=2, ranks={q: RankState(rank=q) for q in (0, 1)}, groups={})
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes/1.state").write_bytes(msgspec.msgpack.encode(bad))
    assert set(here.merged(own, 100.0)[0].ranks) == {0, 1}
    assert "the state of node 1 is not used" in (here.failed or "")
    (tmp_path / "nodes/1.state").write_bytes(msgspec.msgpack.encode(state(number=2)))
    assert set(here.merged(own, 100.0)[0].ranks) == {0, 1, 2, 3}


def test_a_rank_belongs_to_the_node_that_reported_it_first(tmp_path: Path) -> None:
    here = Nodes(tmp_path, 0, tmp_path)
    own = Snapshot(t_s=5.0, world_size=4, expected=1, ranks={0: RankState(rank=0)}, groups={})
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes/1.state").write_bytes(msgspec.msgpack.encode(state()))
    here.merged(own, 100.0)
    thief = state(node=2, ranks={3: RankState(rank=3, life="killed")}, local_world_size=1)
    (tmp_path / "nodes/2.state").write_bytes(msgspec.msgpack.encode(thief))
    assert here.merged(own, 100.0)[0].ranks[3].life == "running"
    assert "the state of node 2 is not used: node 1 reports rank 3, too" in (here.failed or "")
    (tmp_path / "nodes/2.state").write_bytes(msgspec.msgpack.encode(state(node=2, ranks={0: RankState(rank=0)})))
    here.merged(own, 100.0)
    assert "node 0 reports rank 0, too" in (here.failed or "")


def test_a_state_that_is_not_used_claims_no_rank(tmp_path: Path) -> None:
    here = Nodes(tmp_path, 0, tmp_path)
    own = Snapshot(t_s=5.0, world_size=4, expected=1, ranks={0: RankState(rank=0)}, groups={})
    (tmp_path / "nodes").mkdir()
    bad = state(node=2, ranks={3: RankState(rank=3), 0: RankState(rank=0)}, local_world_size=2)
    (tmp_path / "nodes/2.state").write_bytes(msgspec.msgpack.encode(bad))
    assert set(here.merged(own, 100.0)[0].ranks) == {0}
    (tmp_path / "nodes/1.state").write_bytes(msgspec.msgpack.encode(state()))
    assert set(here.merged(own, 100.0)[0].ranks) == {0, 2, 3}
