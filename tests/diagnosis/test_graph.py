"""The wait-for graph and its findings, on snapshots written by hand: one situation of a real job each."""

from __future__ import annotations

import time
from typing import Any

import pytest

from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import Call, Group, Life, RankState, Site, Snapshot
from distdiag.diagnosis.rules import RULES
from distdiag.diagnosis.waits import graph
from tests.diagnosis.made import findings, proved

TRAIN, EVAL, SAVE, SEND = (
    Site("/job/train.py", n, f) for n, f in ((88, "step"), (120, "evaluate"), (58, "save"), (40, "pass_on"))
)


def call(
    op: str = "all_reduce", seq: int | None = 7, site: Site | None = TRAIN, group: str = "default_pg", **more: Any
) -> Call:
    shape = more.pop("shape", None if op == "barrier" else (1024,))
    dtype = more.pop("dtype", None if op == "barrier" else "float32")
    return Call(op=op, group=group, seq=seq, site=site, shape=shape, dtype=dtype, **more)


def key(site: Site) -> str:
    return f"{site.file}:{site.line}"


def rank(r: int, blocked: Call | None = None, **more: Any) -> RankState:
    """A rank that waits in `blocked`; it has completed all before, and been at that site ten times."""
    enqueued: dict[str, int] = dict(more.pop("enqueued", {}))
    completed: dict[str, int] = dict(more.pop("completed", {}))
    if blocked is not None and blocked.seq is not None:
        enqueued.setdefault(blocked.group, blocked.seq)
        completed.setdefault(blocked.group, blocked.seq - 1)
    sites = more.pop("sites", {key(blocked.site): 10} if blocked is not None and blocked.site is not None else {})
    return RankState(rank=r, blocked=blocked, enqueued=enqueued, completed=completed, sites=sites, **more)


def snapshot(
    *ranks: RankState, groups: dict[str, tuple[int, ...]] | None = None, backend: str = "gloo", **more: Any
) -> Snapshot:
    members = {"default_pg": tuple(range(len(ranks))), **(groups or {})}
    return Snapshot(
        t_s=50.0,
        world_size=len(ranks),
        ranks={r.rank: r for r in ranks},
        groups={g: Group(name=g, ranks=m, backend=backend) for g, m in members.items()},
        stable_since_s=more.pop("stable_since_s", 49.0),
        **more,
    )


def only(s: Snapshot, **more: Any) -> Finding:
    found = proved(s, **more)
    assert len(found) == 1, found
    return found[0]


def said(f: Finding) -> tuple[str, str | None, tuple[int, ...], tuple[int, ...]]:
    return f.kind, f.cause, f.culprits, f.victims


# -- who waits, and for whom ------------------------------------------------------------------------------------------


def test_waiting_for_a_living_rank_is_no_deadlock() -> None:
    s = snapshot(rank(0, call()), rank(1, call()), rank(2, enqueued={"default_pg": 6}, completed={"default_pg": 6}))
    g = graph.build(s)
    assert g.stuck == frozenset()
    assert g.sinks == (2,)
    assert g.waits_on == {0: frozenset({2}), 1: frozenset({2})}
    assert g.victims_of(2) == {0, 1}
    assert proved(s, g) == []


def test_all_have_issued_it_so_nobody_waits() -> None:
    g = graph.build(snapshot(*(rank(r, call()) for r in range(4))))
    assert (g.stuck, g.sinks) == (frozenset(), ())


def test_waits_pass_on_through_others() -> None:
    """0 waits for 1 in a pair, 1 waits for 2 in another pair, 2 computes."""
    s = snapshot(
        rank(0, call(group="a", seq=1)), rank(1, call(group="b", seq=1)), rank(2), groups={"a": (0, 1), "b": (1, 2)}
    )
    g = graph.build(s)
    assert g.sinks == (2,)
    assert g.victims_of(2) == {0, 1}


def test_a_call_written_before_its_counter_counts_as_issued() -> None:
    s = snapshot(rank(0, call()), rank(1, call(), enqueued={"default_pg": 6}))
    assert graph.build(s).waits_on == {0: frozenset(), 1: frozenset()}


def test_a_call_already_completed_blocks_nobody() -> None:
    s = snapshot(rank(0, call(), completed={"default_pg": 7}), rank(1, life=Life.FINISHED))
    assert graph.build(s).stuck == frozenset()


def test_an_unknown_group_proves_nothing() -> None:
    s = snapshot(rank(0, call(group="?")), rank(1, life=Life.FINISHED))
    g = graph.build(s)
    assert (g.stuck, g.unknown, g.sinks) == (frozenset(), {0}, ())


def test_a_rank_not_heard_of_is_waited_for_and_proves_nothing() -> None:
    s = snapshot(rank(0, call()), rank(1, life=Life.MISSING))
    g = graph.build(s)
    assert (g.stuck, g.sinks) == (frozenset(), (1,))


# -- ranks that are gone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "cause", "words"),
    [
        ({"life": Life.FINISHED, "exit_code": 0}, "rank_finished", "ended normally"),
        ({"life": Life.FINISHED, "exit_code": 3}, "rank_exited", "exited with code 3"),
        ({"life": Life.CRASHED, "exception": "IndexError: x"}, "rank_exited", "IndexError: x"),
        ({"life": Life.KILLED, "signal": 9}, "rank_exited", "killed by signal 9"),
        ({"life": Life.STOPPED}, "rank_stopped", "SIGSTOP"),
    ],
)
def test_a_wait_on_a_rank_that_is_gone(end: dict[str, Any], cause: str, words: str) -> None:
    s = snapshot(rank(0, call()), rank(1, call()), rank(2, enqueued={"default_pg": 6}, place=EVAL, **end))
    f = only(s)
    assert said(f) == ("deadlock", cause, (2,), (0, 1))
    assert f.certainty == "proved" and f.severity == "error"
    assert words in f.message and "all_reduce #7" in f.message
    assert [(w.rank, w.line) for w in f.where] == [(2, 120)]
    assert [(w.rank, w.line) for w in f.waiting] == [(0, 88), (1, 88)]
    assert f.collective is not None and (f.collective.op, f.collective.seq) == ("all_reduce", 7)


def test_a_rank_that_is_reported_as_lost_is_not_a_deadlock_too() -> None:
    s = snapshot(rank(0, call()), rank(1, life=Life.KILLED, signal=9))
    assert [f.kind for f in findings(s, *RULES)] == ["rank_lost"]


def test_a_stopped_rank_moves_no_data_even_if_it_has_issued_the_call() -> None:
    s = snapshot(
        rank(0, call()), rank(1, None, life=Life.STOPPED, enqueued={"default_pg": 7}, completed={"default_pg": 6})
    )
    assert said(only(s)) == ("deadlock", "rank_stopped", (1,), (0,))


def test_the_echo_of_a_death_is_not_its_cause() -> None:
    s = snapshot(
        rank(0, call()),
        rank(1, life=Life.CRASHED, exception="RuntimeError: Connection closed by peer", ended_s=10.0),
        rank(2, life=Life.CRASHED, exception="IndexError: list index out of range", ended_s=10.2),
    )
    f = only(s)
    assert (f.culprits, f.victims) == ((2,), (0,))


def test_a_finished_rank_that_is_not_needed_is_no_incident() -> None:
    s = snapshot(
        rank(0),
        rank(1, call(group="g", seq=1)),
        rank(2, call(group="g", seq=1)),
        rank(3, life=Life.FINISHED),
        groups={"g": (1, 2)},
    )
    assert proved(s) == []


def test_a_rank_that_evaluated_alone_through_the_wrapped_model_waits_for_those_that_have_ended() -> None:
    """Its extra forward was paired with the others' next one, long ago; all others are done now."""
    s = snapshot(
        rank(0, call("broadcast", 41), sites={key(TRAIN): 40, key(EVAL): 1}),
        *(
            rank(r, life=Life.FINISHED, exit_code=0, enqueued={"default_pg": 40}, sites={key(TRAIN): 40})
            for r in (1, 2)
        ),
    )
    assert said(only(s)) == ("deadlock", "missing_rank", (0,), ())


def test_a_rank_that_left_early_is_to_blame_though_the_other_goes_on_to_new_places() -> None:
    s = snapshot(
        rank(0, call("all_reduce", 41, EVAL), sites={key(TRAIN): 40, key(EVAL): 1}),
        rank(1, life=Life.FINISHED, exit_code=0, enqueued={"default_pg": 40}, sites={key(TRAIN): 40}),
    )
    assert said(only(s)) == ("deadlock", "rank_finished", (1,), (0,))


# -- one collective, different calls ------------------------------------------------------------------------------------


def test_a_barrier_on_one_rank_only() -> None:
    """Rank 0 is in the barrier of its checkpoint, the others in the next step: majority, and history, say rank 0."""
    s = snapshot(
        rank(0, call("barrier", 7, SAVE), sites={key(SAVE): 1, key(TRAIN): 6}),
        *(rank(r, call("broadcast", 7, root=0), sites={key(TRAIN): 7}) for r in (1, 2)),
    )
    f = only(s)
    assert said(f) == ("deadlock", "missing_rank", (0,), (1, 2))
    assert [(w.rank, w.file, w.line, w.state) for w in f.where] == [(0, "/job/train.py", 58, "waiting")]
    assert "barrier" in f.message and "train.py:58" in f.message and "broadcast" in f.message


def test_two_ranks_history_decides() -> None:
    """GIVEN a tie, THEN the one at a site the other never had is the odd one."""
    s = snapshot(
        rank(0, call("barrier", 7, SAVE), sites={key(SAVE): 1, key(TRAIN): 6}),
        rank(1, call("all_reduce", 7, TRAIN), sites={key(TRAIN): 7}),
    )
    assert said(only(s)) == ("deadlock", "missing_rank", (0,), (1,))


def test_two_ranks_an_extra_call_paired_long_ago_decides() -> None:
    """Both stand where both have been; rank 1 has also been at a place that rank 0 never saw."""
    s = snapshot(
        rank(0, call("all_reduce", 9, TRAIN), sites={key(TRAIN): 5, key(SAVE): 4}),
        rank(1, call("barrier", 9, SAVE), sites={key(TRAIN): 4, key(SAVE): 4, key(EVAL): 1}),
    )
    assert said(only(s)) == ("deadlock", "missing_rank", (1,), (0,))


def test_opposite_order_blames_nobody() -> None:
    both = {key(SAVE): 4, key(TRAIN): 4}
    s = snapshot(
        rank(0, call("broadcast", 9, SAVE, root=0), sites=both),
        rank(1, call("all_reduce", 9, TRAIN, shape=(7,)), sites=both),
    )
    f = only(s)
    assert said(f) == ("deadlock", "order_mismatch", (), (0, 1))
    assert [(w.rank, w.line) for w in f.where] == [(0, 58), (1, 88)]


@pytest.mark.parametrize(("sent", "culprits"), [((146, 143), (2,)), ((146, 146), (0,)), ((146, 40), (0,))])
def test_a_message_that_one_of_several_senders_left_out(sent: tuple[int, int], culprits: tuple[int, ...]) -> None:
    """Rank 0 collects from ranks 1 and 2, then all meet in a broadcast; rank 2 came there with fewer messages sent, or not."""
    recv = Call(op="recv", group="default_pg", peer=2, nth=sent[1] + 1, site=SEND)
    s = snapshot(
        rank(0, recv, enqueued={"default_pg": 75}, completed={"default_pg": 75},
             p2p_issued={"recv:1:0:default_pg": sent[0], "recv:2:0:default_pg": sent[1] + 1}),
        *(rank(r, call("broadcast", 76, SAVE, root=0), p2p_issued={"send:0:0:default_pg": n}) for r, n in zip((1, 2), sent, strict=True)),
    )  # fmt: skip
    f = only(s)
    assert (f.kind, f.cause, f.culprits) == ("deadlock", "missing_rank", culprits)
    assert ("rank 2 has not sent what rank 0 waits for" in f.message) == (culprits == (2,))


BOTH = {key(SAVE): 3, key(TRAIN): 90}


def at_the_end_of_an_epoch(r: int, *visits: int) -> RankState:
    """Stands in the barrier that both ranks know, at the newest of these sequence numbers."""
    seen = {"default_pg": {key(SAVE): visits}}
    return rank(r, call("barrier", visits[-1], SAVE), sites=BOTH, visits=seen)


def in_the_loop(r: int, seq: int, *saved: int, trained: tuple[int, ...] = ()) -> RankState:
    """Stands in the step of its loop; was in the barrier at these numbers."""
    seen = {"default_pg": {key(SAVE): saved, key(TRAIN): trained}}
    return rank(r, call("all_reduce", seq, TRAIN, shape=(7,)), sites=BOTH, visits=seen)


@pytest.mark.parametrize(
    ("waits", "trains", "culprits", "words"),
    [
        ((61, 121, 160), (160, 61, 121), (1,), "after 39 collectives; earlier, all ranks got there after 60"),
        ((61, 121, 181), (181, 61, 121), (0,), "was due after 60"),
        ((1, 61, 121, 160), (160, 1, 61, 121), (1,), "after 39"),
        ((11, 61, 121, 160), (160, 11, 61, 121), (), "order"),  # no rhythm
        ((61, 121, 200), (200, 61, 121), (), "order"),  # later than usual tells nothing
        ((61, 121), (121, 61), (), "order"),  # one visit is no rhythm
        ((61, 121, 160), (160, 61, 120), (), "order"),  # their pasts do not agree
    ],
)
def test_two_ranks_that_know_both_places_the_rhythm_decides(
    waits: tuple[int, ...], trains: tuple[int, ...], culprits: tuple[int, ...], words: str
) -> None:
    f = only(snapshot(in_the_loop(0, *trains), at_the_end_of_an_epoch(1, *waits)))
    cause = "missing_rank" if culprits else "order_mismatch"
    assert said(f) == ("deadlock", cause, culprits, tuple(r for r in (0, 1) if r not in culprits))
    assert words in f.message


def test_the_longer_rhythm_counts() -> None:
    """Both came as they always do: but who runs through the end of an epoch is in the rhythm of its steps as well."""
    loop = in_the_loop(0, 181, 61, 121, trained=(177, 179, 181))
    end = rank(
        1,
        call("barrier", 181, SAVE),
        sites=BOTH,
        visits={"default_pg": {key(SAVE): (61, 121, 181), key(TRAIN): (175, 177, 179)}},
    )
    assert said(only(snapshot(loop, end))) == ("deadlock", "missing_rank", (0,), (1,))


def test_the_operation_was_exchanged_on_one_rank() -> None:
    near = Site("/job/train.py", 90, "step")
    s = snapshot(
        rank(0, call("reduce", 7, near, root=0), sites={key(near): 1, key(TRAIN): 6}),
        *(rank(r, call("all_reduce", 7), sites={key(TRAIN): 7}) for r in (1, 2)),
    )
    assert said(only(s)) == ("mismatch", "op", (0,), (1, 2))


def test_ranks_that_ran_out_of_batches_are_to_blame_even_if_they_are_many() -> None:
    s = snapshot(
        rank(0, call("all_reduce", 7), sites={key(TRAIN): 7}),
        *(rank(r, call("barrier", 7, SAVE), sites={key(TRAIN): 6, key(SAVE): 1}) for r in (1, 2)),
    )
    f = only(s, exhausted={1, 2})
    assert said(f) == ("deadlock", "missing_rank", (1, 2), (0,))
    assert "ran out of batches" in f.message


@pytest.mark.parametrize(
    ("odd", "cause"),
    [
        ({"shape": (2048,)}, "shape"),
        ({"dtype": "float64"}, "dtype"),
        ({"op": "broadcast", "root": 1}, "root"),
    ],
)
def test_arguments_differ(odd: dict[str, Any], cause: str) -> None:
    usual = {"op": "broadcast", "root": 0} if cause == "root" else {}
    s = snapshot(rank(0, call(**usual)), rank(1, call(**usual)), rank(2, call(**{**usual, **odd})))
    assert said(only(s)) == ("mismatch", cause, (2,), (0, 1))


def test_two_ranks_with_different_sizes_blame_nobody() -> None:
    s = snapshot(rank(0, call(shape=(4,))), rank(1, call(shape=(5,))))
    f = only(s)
    assert said(f) == ("mismatch", "shape", (), (0, 1))
    assert "4 elements" in f.message and "5 elements" in f.message


def test_the_rank_that_the_backend_aborted_tells_what_it_was_about_to_call() -> None:
    """gloo: SIGABRT on one rank within 0.1 s, "connection reset" on the others; last words decide."""
    last = (call(shape=(2048,)),)
    s = snapshot(
        rank(0, call()),
        rank(
            1,
            life=Life.CRASHED,
            exception="RuntimeError: Connection reset by peer",
            calls=(call(),),
            enqueued={"default_pg": 7},
        ),
        rank(2, life=Life.KILLED, signal=6, calls=last, enqueued={"default_pg": 7}),
    )
    f = only(s)
    assert (f.kind, f.cause, f.culprits) == ("mismatch", "shape", (2,))
    assert set(f.victims) == {0, 1}


def test_after_a_mismatch_ranks_ahead_are_its_victims() -> None:
    """Rank 3 issued the collective without waiting, and waits for the others in a group of its own."""
    s = snapshot(
        rank(0, call("barrier", 7, SAVE)),
        rank(1, call()),
        rank(2, call()),
        rank(
            3,
            call(group="g", seq=2),
            enqueued={"default_pg": 7},
            completed={"default_pg": 6},
            calls=(call(asynchronous=True),),
        ),
        groups={"g": (2, 3)},
    )
    f = only(s)
    assert (f.culprits, f.victims) == ((0,), (1, 2, 3))


def test_the_vote_waits_for_those_on_their_way() -> None:
    ranks = [rank(0, call("barrier", 7, SAVE)), rank(1, call()), *(rank(r, enqueued={"default_pg": 6}) for r in (2, 3))]
    assert proved(snapshot(*ranks)) == []
    settled = only(snapshot(*ranks, stable_since_s=1.0))
    assert settled.kind in ("deadlock", "mismatch")


PAIRS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gloo", {"op": "reduce_scatter_tensor"}, {"op": "all_reduce"}),  # gloo records one as the other
    ("nccl", {"op": "barrier"}, {"op": "all_reduce", "shape": (1,)}),  # NCCL's barrier is one
    ("gloo", {"op": "all_gather_into_tensor"}, {"op": "_all_gather_base"}),
    ("gloo", {"op": "gloo:all_reduce"}, {"op": "all_reduce"}),
    ("gloo", {"op": "something_new"}, {"op": "all_reduce"}),
    ("nccl", {"op": "coalesced"}, {"op": "all_gather"}),
    ("gloo", {"op": "all_to_all_single", "shape": (3,)}, {"op": "all_to_all_single", "shape": (9,)}),
    ("nccl", {"op": "all_gather", "shape": (3,)}, {"op": "all_gather", "shape": (9,)}),
    ("gloo", {"op": "broadcast", "shape": None}, {"op": "broadcast"}),
    ("gloo", {"shape": (4, 2)}, {"shape": (8,)}),
    ("gloo", {"dtype": "Float"}, {"dtype": "torch.float32"}),
    ("gloo", {"dtype": "complex64"}, {"dtype": "float32", "shape": (1024,)}),
    ("gloo", {"op": "broadcast", "root": None}, {"op": "broadcast", "root": 1}),
]


@pytest.mark.parametrize(("backend", "a", "b"), PAIRS)
def test_in_doubt_calls_fit(backend: str, a: dict[str, Any], b: dict[str, Any]) -> None:
    assert proved(snapshot(rank(0, call(**a)), rank(1, call(**b)), backend=backend)) == []


# -- cycles -------------------------------------------------------------------------------------------------------------


def test_groups_entered_in_different_order() -> None:
    s = snapshot(
        rank(0, call(group="a", seq=1, site=TRAIN)),
        rank(1, call(group="b", seq=1, site=EVAL)),
        rank(2, call(group="c", seq=1, site=SAVE)),
        groups={"a": (0, 1), "b": (1, 2), "c": (2, 0)},
    )
    f = only(s)
    assert said(f) == ("deadlock", "group_cycle", (), (0, 1, 2))
    assert {w.rank for w in f.where} == {0, 1, 2}


def test_one_rank_was_given_another_group() -> None:
    s = snapshot(
        *(rank(r, call(group="default_pg")) for r in (0, 1, 3)),
        rank(2, call(group="other", seq=1)),
        groups={"other": (0, 1, 2, 3)},
    )
    assert said(only(s)) == ("mismatch", "group", (2,), (0, 1, 3))


def test_one_rank_of_a_cycle_stands_where_nobody_has_ever_been() -> None:
    s = snapshot(
        rank(0, call(group="pair", seq=3, site=SAVE), sites={key(SAVE): 1, key(TRAIN): 6}),
        *(rank(r, call(), sites={key(TRAIN): 7}) for r in (1, 2, 3)),
        groups={"pair": (0, 1)},
    )
    assert said(only(s)) == ("deadlock", "missing_rank", (0,), (1, 2, 3))


def test_one_rank_of_a_cycle_left_a_call_out_that_all_others_made() -> None:
    """Pairs (0,1) and (2,3): rank 1 went on without the pair's call that 0, 2 and 3 have made 5 times."""
    s = snapshot(
        rank(0, call(group="a", seq=5, site=EVAL), sites={key(EVAL): 5, key(TRAIN): 6}),
        rank(1, call(), sites={key(EVAL): 4, key(TRAIN): 7}),
        *(rank(r, call(), sites={key(EVAL): 5, key(TRAIN): 7}) for r in (2, 3)),
        groups={"a": (0, 1), "b": (2, 3)},
    )
    assert said(only(s)) == ("deadlock", "missing_rank", (1,), (0, 2, 3))


def p2p(op: str, peer: int | None, nth: int = 1, site: Site = SEND, tag: int = 0) -> Call:
    return Call(op=op, group="default_pg", peer=peer, nth=nth, site=site, tag=tag, shape=(4,), dtype="float32")


def messaging(r: int, c: Call, **more: Any) -> RankState:
    peer = "any" if c.peer is None else c.peer
    return rank(r, c, p2p_issued={f"{c.op}:{peer}:{c.tag}:default_pg": c.nth or 1, **more.pop("issued", {})}, **more)


def test_a_ring_of_receives() -> None:
    s = snapshot(*(messaging(r, p2p("recv", (r - 1) % 4)) for r in range(4)))
    f = only(s)
    assert said(f) == ("deadlock", "p2p_cycle", (), (0, 1, 2, 3))
    assert f.collective is not None and f.collective.seq is None
    tagged = snapshot(*(messaging(r, p2p("recv", (r - 1) % 4, tag=r)) for r in range(4)))
    assert "never match" not in only(tagged).advice  # each may well be sent with its tag: nobody has sent yet


def test_tags_that_do_not_meet() -> None:
    s = snapshot(messaging(0, p2p("send", 1, tag=1)), messaging(1, p2p("recv", 0, tag=2)))
    assert said(only(s)) == ("deadlock", "p2p_cycle", (), (0, 1))
    assert "tags 1 and 2 never match" in only(s).advice


def test_a_message_that_has_met_its_other_end_waits_for_nobody() -> None:
    s = snapshot(messaging(0, p2p("send", 1, nth=3)), messaging(1, p2p("recv", 0, nth=3)))
    assert proved(s) == []


def test_a_receive_of_one_rank_against_a_barrier_of_the_others() -> None:
    s = snapshot(messaging(0, p2p("recv", 1)), *(rank(r, call("barrier", 3, SAVE)) for r in (1, 2, 3)))
    assert said(only(s)) == ("deadlock", "missing_rank", (0,), (1, 2, 3))


@pytest.mark.parametrize(("others", "stuck"), [({}, True), ({"send:0:0:default_pg": 1}, False)])
def test_receiving_from_any_source(others: dict[str, int], stuck: bool) -> None:
    """Stuck only if no one can send: rank 1 has ended; a message it had issued before is still there."""
    s = snapshot(messaging(0, p2p("recv", None)), rank(1, life=Life.FINISHED, p2p_issued=others))
    assert bool(graph.build(s).stuck) is stuck


def test_receiving_from_any_source_waits_for_the_living() -> None:
    s = snapshot(messaging(0, p2p("recv", None)), rank(1, life=Life.FINISHED), rank(2))
    g = graph.build(s)
    assert (g.stuck, g.sinks) == (frozenset(), (2,))


def test_two_incidents_are_two_findings() -> None:
    pair = {"a": (0, 1), "b": (0, 1), "c": (2, 3), "d": (2, 3)}
    s = snapshot(
        *(
            rank(r, call(group=g, seq=1, site=site))
            for r, (g, site) in enumerate(zip("abcd", (TRAIN, EVAL, TRAIN, EVAL), strict=True))
        ),
        groups=pair,
    )
    assert [f.victims for f in proved(s)] == [(0, 1), (2, 3)]


def test_a_cycle_has_those_behind_it_in_waiting() -> None:
    s = snapshot(
        rank(0, call(group="a", seq=1)), rank(1, call(group="b", seq=1, site=EVAL)), rank(2, call(site=SAVE)),
        groups={"a": (0, 1), "b": (0, 1)},
    )  # fmt: skip
    f = only(s)
    assert f.victims == (0, 1)
    assert [w.rank for w in f.waiting] == [2]


# -- size ---------------------------------------------------------------------------------------------------------------


def wide(n: int) -> Snapshot:
    return snapshot(
        rank(0, call("barrier", 7, SAVE)), *(rank(r, call()) for r in range(1, n // 2)),
        *(rank(r, call(group="g", seq=2)) for r in range(n // 2, n)), groups={"g": tuple(range(n))},
    )  # fmt: skip


def test_cost_grows_with_the_job_and_not_with_its_square() -> None:
    """1,024 ranks against 128: eight times the work, and room for noise; a square law would be 64 times."""
    cost = {}
    for n in (128, 1024):
        s = wide(n)
        best = float("inf")
        for _ in range(7):
            start = time.process_time()
            assert proved(s)
            best = min(best, time.process_time() - start)
        cost[n] = best
    assert cost[1024] < 24 * cost[128]


def test_two_calls_at_one_line_are_not_compared_with_each_other() -> None:
    both = [
        rank(r, call("all_reduce", 7, dtype=dtype), sites={key(TRAIN): 7}) for r, dtype in ((0, "Float"), (1, "Double"))
    ]
    f = only(snapshot(*both))
    assert (f.kind, f.cause, f.culprits) == ("mismatch", "dtype", ())
    assert "the ranks at train.py:88" in f.advice and f.advice.count("train.py:88") == 1
