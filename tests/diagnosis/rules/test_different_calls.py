"""mismatch and deadlock: different calls in one collective, on hand-written snapshots of one situation of a real job each."""

from __future__ import annotations

from typing import Any

import pytest

from distdiag.diagnosis.model.snapshot import (
    Call,
    Life,
    RankState,
    Site,
)
from tests.diagnosis.made import proved
from tests.diagnosis.test_rank_condition import FILE, places
from tests.diagnosis.waits import EVAL, SAVE, SEND, TRAIN, call, key, only, rank, snapshot, summary


def test_a_barrier_on_one_rank_only_names_that_rank() -> None:
    """Rank 0 is in the barrier of its checkpoint, the others in the next step: majority and history name rank 0."""
    s = snapshot(
        rank(0, call("barrier", 7, SAVE), sites={key(SAVE): 1, key(TRAIN): 6}),
        *(rank(r, call("broadcast", 7, root=0), sites={key(TRAIN): 7}) for r in (1, 2)),
    )
    f = only(s)
    assert summary(f) == ("deadlock", "missing_rank", (0,), (1, 2))
    assert [(w.rank, w.file, w.line, w.state) for w in f.where] == [(0, "/job/train.py", 58, "waiting")]
    assert "barrier" in f.message and "train.py:58" in f.message and "broadcast" in f.message


def test_of_two_ranks_the_one_at_a_new_site_is_the_culprit() -> None:
    """In a tie the rank at a site that the other never visited is the culprit."""
    s = snapshot(
        rank(0, call("barrier", 7, SAVE), sites={key(SAVE): 1, key(TRAIN): 6}),
        rank(1, call("all_reduce", 7, TRAIN), sites={key(TRAIN): 7}),
    )
    assert summary(only(s)) == ("deadlock", "missing_rank", (0,), (1,))


def test_an_extra_call_that_paired_with_another_earlier_is_found() -> None:
    """Both are at sites that both have visited; rank 1 has also been at a site that rank 0 never visited."""
    s = snapshot(
        rank(0, call("all_reduce", 9, TRAIN), sites={key(TRAIN): 5, key(SAVE): 4}),
        rank(1, call("barrier", 9, SAVE), sites={key(TRAIN): 4, key(SAVE): 4, key(EVAL): 1}),
    )
    assert summary(only(s)) == ("deadlock", "missing_rank", (1,), (0,))


def test_opposite_order_blames_nobody() -> None:
    both = {key(SAVE): 4, key(TRAIN): 4}
    s = snapshot(
        rank(0, call("broadcast", 9, SAVE, root=0), sites=both),
        rank(1, call("all_reduce", 9, TRAIN, shape=(7,)), sites=both),
    )
    f = only(s)
    assert summary(f) == ("deadlock", "order_mismatch", (), (0, 1))
    assert [(w.rank, w.line) for w in f.where] == [(0, 58), (1, 88)]


@pytest.mark.parametrize(("sent", "culprits"), [((146, 143), (2,)), ((146, 146), ()), ((146, 40), ())])
def test_the_sender_that_skipped_its_message_is_named(sent: tuple[int, int], culprits: tuple[int, ...]) -> None:
    """Rank 0 collects from ranks 1 and 2, then all enter a broadcast; rank 2 arrives with fewer messages sent, or nobody knows."""
    recv = Call(op="recv", group="default_pg", peer=2, nth=sent[1] + 1, site=SEND)
    s = snapshot(
        rank(0, recv, enqueued={"default_pg": 75}, completed={"default_pg": 75},
             p2p_issued={"recv:1:0:default_pg": sent[0], "recv:2:0:default_pg": sent[1] + 1}),
        *(rank(r, call("broadcast", 76, SAVE, root=0), p2p_issued={"send:0:0:default_pg": n}) for r, n in zip((1, 2), sent, strict=True)),
    )  # fmt: skip
    f = only(s)
    assert (f.kind, f.cause, f.culprits) == ("deadlock", "missing_rank" if culprits else "p2p_cycle", culprits)
    assert ("rank 2 has not sent what rank 0 waits for" in f.message) == (culprits == (2,))


def test_the_last_message_that_only_one_worker_left_out_is_named_with_the_return_before_it() -> None:
    """A coordinator waits for the stop message of every worker."""
    text, at = places("""
        def work(rows):
            for row in rows:
                if not row.isfinite():
                    return
                send(gradient(row), 0)  # G
            send(STOP, 0)  # S

        def main():
            work(rows)
            barrier()  # B
    """)
    gradient, stop, end = (Site(FILE, at[m], f) for m, f in (("G", "work"), ("S", "work"), ("B", "main")))

    def worker(r: int, *sent: Site) -> RankState:
        sends = enumerate(sent, 1)
        calls = tuple(Call(op="send", group="default_pg", peer=0, nth=n, site=x, completed_s=9.0) for n, x in sends)
        issued = {"send:0:0:default_pg": len(sent)}
        return rank(r, call("barrier", 1, end), calls=calls, p2p_issued=issued, sites={x.key: 1 for x in sent})

    any_of = Call(op="recv", group="default_pg", peer=None, nth=12, site=SEND)
    first = rank(0, any_of, enqueued={}, completed={}, p2p_issued={"recv:any:0:default_pg": 12})
    workers = (worker(r, *[gradient] * 3, stop) for r in (1, 3))
    f = only(snapshot(first, *workers, worker(2, *[gradient] * 3)), source={FILE: text}.get)
    assert (f.kind, f.culprits) == ("deadlock", (2,))
    assert f.message.startswith(
        "rank 2 left out its send (train.py:6) to rank 0: `if not row.isfinite()` (train.py:3); rank 2"
    )
    assert "see that rank 2 sends its message to rank 0, too" in f.advice


BOTH = {key(SAVE): 3, key(TRAIN): 90}


def at_the_end_of_an_epoch(r: int, *visits: int) -> RankState:
    """Return a rank in the barrier of both ranks, with the sequence numbers of its visits there; the newest is this one."""
    seen = {"default_pg": {key(SAVE): visits}}
    return rank(r, call("barrier", visits[-1], SAVE), sites=BOTH, visits=seen)


def in_the_loop(r: int, seq: int, *saved: int, trained: tuple[int, ...] = ()) -> RankState:
    """Return a rank in a training step. `saved` are the sequence numbers of its visits to the barrier."""
    seen = {"default_pg": {key(SAVE): saved, key(TRAIN): trained}}
    return rank(r, call("all_reduce", seq, TRAIN, shape=(7,)), sites=BOTH, visits=seen)


@pytest.mark.parametrize(
    ("waits", "trains", "culprits", "words"),
    [
        ((61, 121, 160), (160, 61, 121), (1,), "again after 39 collectives; until now, all ranks made it every 60"),
        ((61, 121, 181), (181, 61, 121), (0,), "all ranks made that call every 60 collectives"),
        ((1, 61, 121, 160), (160, 1, 61, 121), (1,), "after 39"),
        ((11, 61, 121, 160), (160, 11, 61, 121), (), "order"),  # no rhythm
        ((61, 121, 200), (200, 61, 121), (), "order"),  # a longer interval is no evidence
        ((61, 121), (121, 61), (), "order"),  # one visit is no rhythm
        ((61, 121, 160), (160, 61, 120), (), "order"),  # their earlier visits differ
    ],
)
def test_if_both_ranks_know_both_sites_the_rhythm_decides(
    waits: tuple[int, ...], trains: tuple[int, ...], culprits: tuple[int, ...], words: str
) -> None:
    f = only(snapshot(in_the_loop(0, *trains), at_the_end_of_an_epoch(1, *waits)))
    cause = "missing_rank" if culprits else "order_mismatch"
    assert summary(f) == ("deadlock", cause, culprits, tuple(r for r in (0, 1) if r not in culprits))
    assert words in f.message


def test_the_rhythm_of_the_longer_interval_decides() -> None:
    """Both arrive as always, but a rank that runs past the end of an epoch also keeps the rhythm of its steps."""
    loop = in_the_loop(0, 181, 61, 121, trained=(177, 179, 181))
    end = rank(
        1,
        call("barrier", 181, SAVE),
        sites=BOTH,
        visits={"default_pg": {key(SAVE): (61, 121, 181), key(TRAIN): (175, 177, 179)}},
    )
    assert summary(only(snapshot(loop, end))) == ("deadlock", "missing_rank", (0,), (1,))


def test_a_rank_that_calls_another_operation_is_a_mismatch() -> None:
    near = Site("/job/train.py", 90, "step")
    s = snapshot(
        rank(0, call("reduce", 7, near, root=0), sites={key(near): 1, key(TRAIN): 6}),
        *(rank(r, call("all_reduce", 7), sites={key(TRAIN): 7}) for r in (1, 2)),
    )
    assert summary(only(s)) == ("mismatch", "op", (0,), (1, 2))


def test_ranks_out_of_batches_are_culprits_even_as_the_majority() -> None:
    s = snapshot(
        rank(0, call("all_reduce", 7), sites={key(TRAIN): 7}),
        *(rank(r, call("barrier", 7, SAVE), sites={key(TRAIN): 6, key(SAVE): 1}) for r in (1, 2)),
    )
    f = only(s, exhausted={1, 2})
    assert summary(f) == ("deadlock", "missing_rank", (1, 2), (0,))
    assert "ran out of batches" in f.message


@pytest.mark.parametrize(
    ("odd", "cause"),
    [
        ({"shape": (2048,)}, "shape"),
        ({"dtype": "float64"}, "dtype"),
        ({"op": "broadcast", "root": 1}, "root"),
    ],
)
def test_different_arguments_are_a_mismatch(odd: dict[str, Any], cause: str) -> None:
    usual = {"op": "broadcast", "root": 0} if cause == "root" else {}
    s = snapshot(rank(0, call(**usual)), rank(1, call(**usual)), rank(2, call(**{**usual, **odd})))
    assert summary(only(s)) == ("mismatch", cause, (2,), (0, 1))


def test_two_ranks_with_different_sizes_blame_nobody() -> None:
    s = snapshot(rank(0, call(shape=(4,))), rank(1, call(shape=(5,))))
    f = only(s)
    assert summary(f) == ("mismatch", "shape", (), (0, 1))
    assert "4 elements" in f.message and "5 elements" in f.message


def test_the_call_of_an_aborted_rank_is_compared_with_the_others() -> None:
    """gloo: SIGABRT on one rank within 0.1 s, "connection reset" on the others; the recorded call decides."""
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
    """Rank 3 issued the collective without waiting, and waits for rank 2 in their own group."""
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


def test_the_majority_waits_for_ranks_that_have_not_arrived() -> None:
    ranks = [rank(0, call("barrier", 7, SAVE)), rank(1, call()), *(rank(r, enqueued={"default_pg": 6}) for r in (2, 3))]
    assert proved(snapshot(*ranks)) == []
    settled = only(snapshot(*ranks, stable_since_s=1.0))
    assert settled.kind in ("deadlock", "mismatch")


PAIRS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gloo", {"op": "reduce_scatter_tensor"}, {"op": "all_reduce"}),  # gloo records one as the other
    ("nccl", {"op": "barrier"}, {"op": "all_reduce", "shape": (1,)}),  # NCCL's barrier is an all_reduce
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
def test_calls_that_may_be_compatible_are_not_a_mismatch(backend: str, a: dict[str, Any], b: dict[str, Any]) -> None:
    assert proved(snapshot(rank(0, call(**a)), rank(1, call(**b)), backend=backend)) == []


def test_two_calls_at_one_line_are_not_compared_with_each_other() -> None:
    both = [
        rank(r, call("all_reduce", 7, dtype=dtype), sites={key(TRAIN): 7}) for r, dtype in ((0, "Float"), (1, "Double"))
    ]
    f = only(snapshot(*both))
    assert (f.kind, f.cause, f.culprits) == ("mismatch", "dtype", ())
    assert "the ranks at train.py:88" in f.advice and f.advice.count("train.py:88") == 1


def experts(r: int, sent: int, received: int | None, **more: Any) -> RankState:
    here = call("all_to_all_single", 7, SAVE, shape=(sent, 16), received=received)
    return rank(r, here, enqueued={"default_pg": 7}, completed={"default_pg": 6}, **more)


def test_split_sizes_of_an_all_to_all_that_disagree_are_a_mismatch() -> None:
    """A rank that drops tokens over its capacity receives fewer than the others send: with NCCL no rank gets an error."""
    ranks = experts(0, 48, 50 * 16), experts(1, 48, 46 * 16), experts(2, 48, 16 * 16)
    f = only(snapshot(*ranks))
    assert (f.kind, f.cause, f.culprits) == ("mismatch", "shape", ())
    assert "rank 2 sends 768 and expects 256 elements in all_to_all_single #7 at" in f.message
    assert "as all ranks together send 2,304 and expect 1,792" in f.message
    assert f.advice.startswith("compare the split sizes at the ranks at")


@pytest.mark.parametrize(
    "ranks",
    [
        [experts(0, 48, 50 * 16), experts(1, 48, 46 * 16)],  # uneven splits that agree
        [experts(0, 48, 50 * 16), experts(1, 48, None)],
        [experts(0, 48, 50 * 16), rank(1, enqueued={"default_pg": 6})],  # rank 1 has not arrived
    ],
)
def test_split_sizes_are_judged_only_if_all_are_known(ranks: list[RankState]) -> None:
    assert proved(snapshot(*ranks)) == []


def test_sizes_that_differ_in_a_forward_are_those_of_the_batches() -> None:
    layer = Site("/job/model.py", 23, "forward")
    s = snapshot(*(rank(r, call(shape=(n, 64), site=layer)) for r, n in ((0, 104), (1, 89))))
    f = only(s)
    assert (f.kind, f.cause, f.culprits) == ("mismatch", "shape", ())
    assert "the batches of the ranks at model.py:23 in forward" in f.advice and "tensor, sequence" in f.advice


@pytest.mark.parametrize(
    ("first", "second", "culprits"),
    [
        ({SAVE: 9, TRAIN: 8}, {SAVE: 8, TRAIN: 9}, (1,)),  # each is in round 9: rank 1 came to TRAIN without SAVE
        (
            {SAVE: 9, TRAIN: 8},
            {SAVE: 9, TRAIN: 9},
            (),
        ),  # rank 1 has been at SAVE in this round, rank 0 is there once more
        ({SAVE: 3, TRAIN: 2}, {SAVE: 2, TRAIN: 3}, ()),  # too few rounds
        ({SAVE: 9, TRAIN: 4}, {SAVE: 8, TRAIN: 5}, ()),  # not in every round
    ],
)
def test_the_side_at_the_second_of_two_lines_that_took_turns_left_out_the_first(
    first: dict[Site, int], second: dict[Site, int], culprits: tuple[int, ...]
) -> None:
    """Nothing else is known: DDP's own collectives are no calls of Python, only their lines are counted."""
    s = snapshot(
        rank(0, call("all_reduce", 17, SAVE, shape=(90,)), sites={key(site): n for site, n in first.items()}),
        rank(1, call("all_reduce", 17, TRAIN, shape=(40,)), sites={key(site): n for site, n in second.items()}),
    )
    assert only(s).culprits == culprits


def test_a_rank_that_has_got_a_broadcast_is_not_in_it_any_longer() -> None:
    """The root has sent to rank 1, which is in the next call, and waits for rank 2, which has another root."""
    here = TRAIN
    first = call("broadcast", 7, here, root=0, completed_s=40.0)
    ranks = (
        rank(0, call("broadcast", 7, here, root=0)),
        rank(1, call("broadcast", 8, here, root=0), calls=(first,), completed={"default_pg": 7}),
        rank(2, call("broadcast", 7, here, root=2)),
    )
    f = only(snapshot(*ranks))
    assert f.cause == "root" and "ranks 0, 1 have made broadcast with root 0" in f.message
    assert "(rank 1 has completed it)" in f.message and "on all ranks" in f.message
    raised = rank(1, first, completed={"default_pg": 7}, life="crashed")  # counted as complete, too
    assert "completed" not in only(snapshot(ranks[0], raised, ranks[2])).message


def test_calls_at_one_line_are_shown_with_the_callers_by_which_the_ranks_reached_it() -> None:
    """The forward of a layer, in two models; a killed rank's last sample may be older than its call."""
    forward, outer = Site("/job/rl.py", 35, "forward"), Site("/job/rl.py", 90, "main")
    student, teacher = (Site("/job/rl.py", n, f) for n, f in ((50, "generate"), (63, "score")))

    def found(first: Site, second: Site, **of_one: Any) -> str:
        calls = [call("all_gather_into_tensor", 9, forward, shape=(n,)) for n in (64, 96)]
        killed = {"calls": (calls[1],), "enqueued": {"default_pg": 9}, "user_stack": (forward, second, outer), **of_one}
        ranks = rank(0, calls[0], user_stack=(forward, first, outer)), rank(1, None if of_one else calls[1], **killed)
        return only(snapshot(*ranks)).message

    text = found(student, teacher)
    assert "of 64 elements at rl.py:35 in forward (called at rl.py:50 in generate)" in text
    assert "of 96 elements at rl.py:35 in forward (called at rl.py:63 in score)" in text
    assert "called at" not in found(student, student)
    text = found(student, teacher, life=Life.KILLED, signal=6, ended_s=49.0)
    assert "in forward (called at rl.py:50 in generate)" in text and "rl.py:63" not in text
