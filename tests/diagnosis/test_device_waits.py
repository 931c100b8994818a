"""Waits on a device backend: the host has issued an operation, and waits for its device elsewhere."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from distdiag.diagnosis.model.snapshot import Call, Group, Life, RankState, Site, Snapshot
from distdiag.diagnosis.rules import stall
from distdiag.diagnosis.waits.graph import build
from distdiag.monitor.ranks import device_queue
from distdiag.terms.backends import in_group_communicator
from tests.diagnosis.made import findings, proved

HOST = Site("/job/train.py", 99, "log")


def issued(op: str, seq: int | None, at_s: float, line: int, group: str = "default_pg", **more: Any) -> Call:
    return Call(
        **{
            "op": op,
            "group": group,
            "seq": seq,
            "site": Site("/job/train.py", line, "main"),
            "entered_s": at_s,
            "left_s": at_s + 0.001,
            "on_device": True,
            **more,
        }
    )


def rank(q: int, *open_calls: Call, waits: bool = True, done: dict[str, int] | None = None) -> RankState:
    """Return a rank whose device has these operations open, in the order of issue."""
    messages: dict[str, int] = {}
    for c in open_calls:
        if c.p2p:
            messages[f"{c.op}:{c.peer}:{c.tag}:{c.group}"] = c.nth or 1
    collective = [c for c in open_calls if not c.p2p]
    queued = device_queue.heads(
        open_calls,
        {c.group for c in collective},
        {c.group: c.seq or 0 for c in collective},
        {c.group: min((x.seq or 1) for x in collective if x.group == c.group) - 1 for c in collective},
        {},
    )
    return RankState(
        rank=q,
        current_site=HOST,
        user_stack=(HOST,),
        queued=queued,
        blocked=device_queue.waited_for(queued) if waits else None,
        host_wait="device" if waits else "no",
        calls=open_calls,
        enqueued={c.group: c.seq or 0 for c in collective} or {"default_pg": 6},
        completed=done or {"default_pg": 6, "a": 0, "b": 0},
        p2p_issued=messages,
    )


def job(*ranks: RankState) -> Snapshot:
    everyone = tuple(r.rank for r in ranks)
    groups = {n: Group(name=n, ranks=everyone, backend="nccl") for n in ("default_pg", "a", "b")}
    return Snapshot(t_s=100.0, world_size=len(ranks), ranks={r.rank: r for r in ranks}, groups=groups)


def test_different_collectives_of_two_hosts_that_wait_for_their_devices() -> None:
    s = job(rank(0, issued("all_reduce", 7, 90.0, 10)), rank(1, issued("broadcast", 7, 90.0, 14, root=1)))
    (found,) = proved(s)
    assert found.certainty == "proved" and {(w.rank, w.line) for w in (*found.where, *found.waiting)} >= {
        (0, 10),
        (1, 14),
    }


def test_a_host_that_computes_is_no_deadlock() -> None:
    s = job(rank(0, issued("all_reduce", 7, 90.0, 10)), rank(1, waits=False))
    graph = build(s)
    assert not graph.stuck and graph.sinks == (1,)
    assert proved(s) == []


def test_a_host_that_waits_for_a_long_kernel_is_no_deadlock() -> None:
    """Its device waits for no collective: it is busy with its own work."""
    late = replace(rank(1), host_wait="device", blocked=None)
    graph = build(job(rank(0, issued("all_reduce", 7, 90.0, 10)), late))
    assert not graph.stuck and graph.sinks == (1,)


def test_groups_in_opposite_order_although_both_hosts_have_issued_both() -> None:
    s = job(
        rank(0, issued("all_reduce", 1, 90.0, 10, "a"), issued("all_reduce", 1, 90.1, 11, "b")),
        rank(1, issued("all_reduce", 1, 90.0, 21, "b"), issued("all_reduce", 1, 90.1, 22, "a")),
    )
    (found,) = proved(s)
    assert (found.kind, found.cause) == ("deadlock", "group_cycle") and set(found.victims) == {0, 1}


def test_an_asynchronous_operation_blocks_nothing_before_its_wait() -> None:
    """Each is on its own communicator's stream: the order of issue is not the device's order."""
    s = job(
        rank(0, issued("all_reduce", 1, 90.0, 10, "a", left_s=None), issued("all_reduce", 1, 90.1, 11, "b")),
        rank(1, issued("all_reduce", 1, 90.0, 21, "b", left_s=None), issued("all_reduce", 1, 90.1, 22, "a")),
    )
    assert not build(s).stuck


def test_two_ranks_that_send_before_they_receive_are_a_cycle() -> None:
    def ends(q: int) -> tuple[Call, Call]:
        peer = 1 - q
        return (
            issued("send", None, 90.0, 30, peer=peer, nth=1),
            issued("recv", None, 90.1, 31, peer=peer, nth=1),
        )

    s = job(rank(0, *ends(0)), rank(1, *ends(1)))
    (found,) = proved(s)
    assert (found.kind, found.cause) == ("deadlock", "p2p_cycle")


def test_sends_and_receives_in_one_batch_are_no_cycle() -> None:
    def ends(q: int) -> tuple[Call, Call]:
        return (
            issued("send", None, 90.0, 30, peer=1 - q, nth=1),
            issued("recv", None, 90.0, 31, peer=1 - q, nth=1),
        )

    assert not build(job(rank(0, *ends(0)), rank(1, *ends(1)))).stuck


def test_late_counters_do_not_prove_a_wait() -> None:
    """Rank 1 has seen the all_reduce complete, so it is complete on rank 0, too, whose watchdog has not noticed."""
    s = job(
        rank(0, issued("all_reduce", 7, 90.0, 10), issued("all_reduce", 1, 90.1, 11, "a")),
        rank(1, issued("all_reduce", 1, 90.1, 11, "a"), done={"default_pg": 7, "a": 0}),
    )
    assert not build(s).stuck


def test_counters_decide_which_calls_are_open() -> None:
    calls = tuple(issued("all_reduce", k, float(k), 10, completed_s=k + 0.001) for k in range(1, 5))
    sent = tuple(issued("send", None, 5.0 + k, 30, peer=1, nth=k, completed_s=5.5 + k) for k in (1, 2, 3))
    now = device_queue.incomplete((*calls, *sent), {"default_pg": 2}, {("default_pg", "send", 1): 1})
    assert [c.seq or c.nth for c in now if c.completed_s is None] == [3, 4, 3]
    assert [(c.op, c.seq or c.nth) for c in device_queue.heads(now, ["default_pg"], {"default_pg": 4}, {"default_pg": 2}, {})] == [
        ("all_reduce", 3),
        ("send", 3),
    ]  # fmt: skip


def test_the_call_site_and_the_hosts_site_are_shown() -> None:
    (found,) = proved(
        job(rank(0, issued("all_reduce", 7, 90.0, 10)), rank(1, issued("broadcast", 7, 90.0, 14, root=1)))
    )
    assert [(w.rank, w.line, w.state) for w in (*found.where, *found.waiting) if w.rank == 0] == [
        (0, 10, "waiting"),
        (0, 99, "waits_for_device"),
    ]
    assert "the hosts of ranks 0, 1 wait for the device at train.py:99 in log" in found.message


def test_a_host_that_waits_at_the_line_of_its_call_is_not_mentioned_again() -> None:
    ranks = [rank(0, issued("all_reduce", 7, 90.0, 10)), rank(1, issued("broadcast", 7, 90.0, 14, root=1))]
    at_call = [replace(r, current_site=r.blocked and r.blocked.site) for r in ranks]
    (found,) = proved(job(*at_call))
    assert "wait for the device" not in found.message


def test_a_rank_missing_in_the_creation_of_a_communicator_is_named() -> None:
    """The host is inside the call, and the flight recorder has no entry yet."""
    first = issued("all_reduce", 1, 90.0, 10, "a", left_s=None)
    waiting = RankState(rank=0, blocked=first, calls=(first,), enqueued={"a": 1})
    other = issued("all_reduce", 1, 90.0, 20, "b", left_s=None)
    (found,) = proved(job(waiting, RankState(rank=1, blocked=other, calls=(other,), enqueued={"b": 1})))
    assert found.kind == "deadlock" and "ranks 0, 1 are creating the communicator of the group" in found.message


def test_a_collective_that_all_have_issued_and_that_does_not_complete() -> None:
    def both(since_s: float) -> Snapshot:
        first = replace(rank(0, issued("all_reduce", 7, since_s, 10)), step=5)
        return job(first, replace(rank(1, issued("all_reduce", 7, since_s, 10)), step=5))

    (found,) = findings(both(75.0), stall)
    assert (found.cause, found.certainty, found.culprits, found.victims) == ("unknown", "suspected", (), (0, 1))
    assert findings(both(90.0), stall) == []
    assert findings(replace(both(75.0), usual_step_s=9.0), stall) == []


def test_a_message_that_both_ends_have_issued_and_that_does_not_complete() -> None:
    """The sender's host is free: a send returns on a device once it is queued."""

    def both(since_s: float, life: str = Life.RUNNING, waits: bool = False) -> Snapshot:
        sent = issued("send", None, since_s, 31, peer=0, nth=3)
        sender = replace(rank(1, sent, waits=waits), life=life, step=5)
        return job(replace(rank(0, issued("recv", None, 60.0, 30, peer=1, nth=3)), step=5), sender)

    (found,) = findings(both(75.0), stall)
    assert (found.cause, found.certainty, found.culprits, found.victims) == ("unknown", "suspected", (), (0, 1))
    assert found.message.startswith(
        "rank 0 has issued recv from rank 1 at train.py:30 in main and rank 1 has issued send to"
    )
    assert findings(both(90.0), stall) == []
    assert findings(both(75.0, Life.FINISHED), stall) == []
    assert len(findings(both(75.0, waits=True), stall)) == 1


def test_a_rank_whose_own_device_is_busy_is_a_stall_of_its_device() -> None:
    late = replace(rank(1), host_wait="device", blocked=None, activity="device", step=5)
    (found,) = findings(job(rank(0, issued("all_reduce", 7, 75.0, 10)), late), stall)
    assert found.culprits == (1,) and "waits for its own device" in found.message
    assert [w.line for w in found.where] == [99]


def test_completing_another_operation_does_not_complete_the_others_collective() -> None:
    """The root of a reduce waits for all ranks; a rank that only sends its part does not."""
    through = rank(1, issued("reduce", 8, 91.0, 16, root=0), done={"default_pg": 7})
    through = replace(through, calls=(issued("reduce", 7, 90.0, 14, root=0), *through.calls))
    s = job(rank(0, issued("all_reduce", 7, 90.0, 10)), through)
    (found,) = proved(s)
    assert (found.kind, found.cause) == ("mismatch", "op")
    late = replace(through, calls=(issued("all_reduce", 7, 90.0, 14), *through.calls[1:]))
    assert proved(job(rank(0, issued("all_reduce", 7, 90.0, 10)), late)) == []


def test_a_small_send_is_complete_and_its_recv_has_another_size() -> None:
    """A device buffers a small send: the sender goes on, and the recv alone waits, for good."""
    sent = replace(issued("send", None, 70.0, 31, peer=0, nth=3), shape=(96,), bytes=384, dtype="float32")
    want = replace(issued("recv", None, 71.0, 30, peer=1, nth=3), shape=(1,), bytes=4, dtype="int32")

    def both(recv: Call) -> Snapshot:
        return job(rank(0, recv), replace(rank(1, sent, waits=False), calls=(replace(sent, completed_s=70.1),)))

    (found,) = proved(both(want))
    assert (found.kind, found.cause) == ("mismatch", "shape")
    assert "rank 0 is in recv of 1 element at" in found.message and "has completed send of 96 elements" in found.message
    assert "tensors of the same size" in found.advice
    # as many bytes of another type: a device does not compare types
    assert proved(both(replace(want, shape=(96,), bytes=384))) == []


def test_a_batched_message_never_matches_a_single_one_on_a_device() -> None:
    """A batch uses the group's communicator, a single message that of the two ranks."""
    batched = issued("send", None, 70.0, 31, peer=0, nth=3, tag=in_group_communicator(0))
    (found,) = proved(job(rank(0, issued("recv", None, 71.0, 30, peer=1, nth=3)), rank(1, batched)))
    assert (found.kind, found.cause) == ("deadlock", "p2p_cycle")
    assert "batch_isend_irecv at both ends" in found.advice and "tag" not in found.message


def test_batched_messages_complete_in_the_order_of_the_group() -> None:
    """Each rank's batch behind the other's: messages to other ranks wait behind the first one."""
    first = issued("recv", None, 70.0, 10, peer=1, nth=1, tag=in_group_communicator(0))
    second = issued("send", None, 70.1, 11, peer=2, nth=1, tag=in_group_communicator(0))
    assert device_queue.heads((first, second), (), {}, {}, {}) == (first,)
    single = replace(second, tag=0)
    assert device_queue.heads((first, single), (), {}, {}, {}) == (first, single)
