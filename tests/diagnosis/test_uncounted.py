"""Waits on a backend that counts no completed operations: inferred from what all ranks have issued."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from distdiag.diagnosis.engine import Diagnosis
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained
from distdiag.diagnosis.model.snapshot import Call, Group, RankState, Site, Snapshot
from distdiag.diagnosis.rules import stall
from distdiag.diagnosis.waits.uncounted import resolved
from tests.diagnosis.made import findings, proved

HOST = Site("/job/train.py", 99, "log")


def issued(op: str, number: int, at_s: float, line: int, group: str = "default_pg", peer: int | None = None) -> Call:
    place: dict[str, Any] = {"peer": peer, "nth": number} if peer is not None else {"seq": number}
    return Call(
        op=op, group=group, site=Site("/job/train.py", line, "main"), entered_s=at_s, left_s=at_s, completed_s=at_s,
        on_device=True, shape=(4,), dtype="float32", **place,
    )  # fmt: skip


def rank(q: int, *calls: Call, host: str | None = "device") -> RankState:
    enqueued: dict[str, int] = {}
    messages: dict[str, int] = {}
    for c in calls:
        if c.p2p:
            messages[f"{c.op}:{c.peer}:{c.tag}:{c.group}"] = c.nth or 0
        else:
            enqueued[c.group] = c.seq or 0
    return RankState(
        rank=q,
        current_site=HOST,
        user_stack=(HOST,),
        host_wait=host,
        calls=calls,
        enqueued=enqueued,
        p2p_issued=messages,
    )


def job(*ranks: RankState, backend: str = "other") -> Snapshot:
    everyone = tuple(r.rank for r in ranks)
    groups = {n: Group(name=n, ranks=everyone, backend=backend) for n in ("default_pg", "a", "b")}
    return Snapshot(t_s=100.0, world_size=len(ranks), ranks={r.rank: r for r in ranks}, groups=groups)


COMMON = (issued("all_reduce", 1, 1.0, 10), issued("all_reduce", 2, 2.0, 10))


def test_an_extra_broadcast_on_one_rank_is_proved() -> None:
    s = job(rank(0, *COMMON, issued("all_reduce", 3, 3.0, 10)), rank(1, *COMMON, issued("broadcast", 3, 3.0, 14)))
    diagnosis = Diagnosis(source=lambda file: None)
    diagnosis.update(s)
    (found,) = diagnosis.update(replace(s, t_s=101.0))
    assert found.kind in ("deadlock", "mismatch") and {(w.rank, w.line) for w in (*found.where, *found.waiting)} >= {
        (0, 10),
        (1, 14),
    }


def test_groups_in_opposite_order_are_a_cycle() -> None:
    a, b = issued("all_reduce", 1, 3.0, 20, "a"), issued("all_reduce", 1, 3.0, 30, "b")
    (found,) = proved(resolved(job(rank(0, *COMMON, a), rank(1, *COMMON, b))))
    assert (found.kind, found.cause) == ("deadlock", "group_cycle")


def test_a_receive_without_its_send_is_a_wait() -> None:
    s = job(rank(0, issued("recv", 1, 1.0, 20, peer=1)), rank(1, issued("recv", 1, 1.0, 30, peer=0)))
    (found,) = proved(resolved(s))
    assert (found.kind, found.cause) == ("deadlock", "p2p_cycle")


def test_a_buffered_send_is_no_wait() -> None:
    sends = issued("send", 1, 1.0, 20, peer=1), issued("all_reduce", 1, 2.0, 10)
    s = resolved(job(rank(0, *sends), rank(1, host="no")))
    assert s.ranks[0].blocked is not None and s.ranks[0].blocked.op == "all_reduce"


def test_ranks_that_issued_the_same_calls_show_no_wait() -> None:
    s = job(rank(0, *COMMON), rank(1, *COMMON))
    assert resolved(s) is s


def test_a_host_that_computes_is_no_wait() -> None:
    s = job(rank(0, *COMMON, issued("all_reduce", 3, 3.0, 10)), rank(1, *COMMON, host="no"))
    assert resolved(s).ranks[1].blocked is None
    assert resolved(s).ranks[0].blocked is not None
    assert proved(resolved(s)) == []


def test_backends_with_counters_or_blocking_hosts_are_not_inferred() -> None:
    ahead = (*COMMON, issued("all_reduce", 3, 3.0, 10))
    s = job(rank(0, *ahead), rank(1, *COMMON, host="no"), backend="gloo")
    assert resolved(s) is s
    counted = job(replace(rank(0, *ahead), completed={"default_pg": 3}), rank(1, *COMMON))
    assert resolved(counted).ranks[0].blocked is None


def after_a_send(seen: bool, **more: Any) -> Snapshot:
    """Return two ranks that have issued the same all_reduce; rank 0 has sent before, and rank 1 has not received yet."""
    sends = rank(0, *COMMON, issued("send", 1, 3.0, 20, peer=1), issued("all_reduce", 3, 4.0, 10))
    late = replace(rank(1, *COMMON, issued("all_reduce", 3, 4.0, 10)), activity="device", step=5, **more)
    done = {"default_pg": 3} if seen else {}
    return resolved(job(replace(sends, step=5), replace(late, completed=done)))


def test_a_device_that_communication_may_hold_up_is_not_called_busy() -> None:
    s = after_a_send(seen=False)
    assert findings(s, stall) == []
    (why,) = (x for x in stall.evaluate(Facts(s)) if isinstance(x, Abstained) and not x.checked)
    assert "rank 1's host waits" in why.reason and "group default_pg (other)" in why.reason


def test_a_device_whose_operations_are_counted_and_a_host_that_computes_are() -> None:
    for s in (after_a_send(seen=True), after_a_send(seen=False, host_wait="no")):
        (found,) = findings(s, stall)
        assert found.culprits == (1,)
