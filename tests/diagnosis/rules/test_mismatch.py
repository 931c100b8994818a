"""mismatch: ranks that the backend aborted because their calls did not fit, and collectives that completed although they do not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import (
    Call,
    CompletedConflict,
    Group,
    Life,
    Model,
    RankState,
    Site,
    Snapshot,
)
from distdiag.diagnosis.rules import deadlock, mismatch, rank_lost, timeout
from distdiag.diagnosis.text.finding import head_and_more
from tests.diagnosis.made import LOOP, MODEL, findings, job, only, proved, rank


def ended(s: Snapshot, **known: Any) -> list[Finding]:
    return findings(s, timeout, mismatch, deadlock, rank_lost, **known)


@pytest.mark.parametrize(("log", "culprits"), [((61, 121, 181), (1,)), ((61, 121, 170), (0,)), ((1, 50, 121, 170), ())])
def test_in_an_abort_by_gloo_the_rhythm_decides_between_two_sites(
    log: tuple[int, ...], culprits: tuple[int, ...]
) -> None:
    """Rank 0 was in a call that both know, rank 1 in the next backward: was that call due, or too early?"""
    call = Call(op="all_reduce", group="default_pg", seq=log[-1], site=Site("/job/train.py", 8, "log"), shape=(4,))
    before = {"default_pg": {"/job/train.py:8": log[:-1]}}
    sites = {"/job/train.py:8": 3, f"{LOOP.file}:{LOOP.line}": 170}
    s = job(
        rank(0, life=Life.KILLED, signal=6, ended_s=40.0, ended_waiting=True, current_site=call.site, calls=(call,), sites=sites,
             visits={"default_pg": {"/job/train.py:8": log}}),
        rank(1, life=Life.CRASHED, exception="RuntimeError: Connection reset by peer", ended_s=40.1, current_site=LOOP, sites=sites,
             visits=before),
    )  # fmt: skip
    s = msgspec.structs.replace(s, groups={"default_pg": Group(name="default_pg", ranks=(0, 1), backend="gloo")})
    f = only(ended(s))
    assert (f.kind, f.cause, f.culprits) == ("mismatch", "shape", culprits)
    assert ("collectives" in f.message) == bool(culprits)


def on_device(q: int, **more: Any) -> RankState:
    """Return a rank on NCCL whose device had an all_reduce open for 6 seconds until the rank ended at 20.0."""
    call = Call(op="all_reduce", group="default_pg", seq=7, entered_s=14.0, left_s=14.0, on_device=True)
    return rank(q, **{
        "calls": (call,), "queued": (call,), "wait_measured": False, "ended_waiting": True, "life": Life.KILLED, "signal": 6,
        "ended_s": 20.0, "enqueued": {"default_pg": 7}, "completed": {"default_pg": 6}, **more,
    })  # fmt: skip


def test_a_rank_that_is_killed_before_the_others_watchdogs_abort_them_is_lost() -> None:
    killed = rank(1, life=Life.KILLED, signal=9, ended_s=13.0, wait_measured=False)
    f = only(ended(job(on_device(0), killed)))
    assert (f.kind, f.cause, f.culprits) == ("rank_lost", "killed", (1,))


def test_ranks_that_died_of_a_mismatch_are_shown_at_the_call() -> None:
    metric, backward = Site("/job/train.py", 6, "log_metric"), Site("/job/train.py", 15, "main")
    calls = {q: Call(op="all_reduce", group="default_pg", seq=7, dtype=d, shape=(1,), site=metric, entered_s=99.0)
             for q, d in ((0, "int64"), (1, "float32"))}  # fmt: skip
    s = job(
        rank(
            0,
            life="crashed",
            current_site=backward,
            enqueued={"default_pg": 7},
            calls=(calls[0],),
            exception="RuntimeError: reset",
        ),
        rank(1, life="killed", signal=6, current_site=backward, enqueued={"default_pg": 7}, calls=(calls[1],)),
    )
    f = only(proved(s))
    assert (f.kind, f.cause) == ("mismatch", "dtype")
    assert {(w.rank, w.line) for w in (*f.where, *f.waiting)} == {(0, 6), (1, 6)}


@pytest.mark.parametrize(("usual", "odd"), [((8, 8), (1,)), ((9, 8), ())])
def test_gloo_aborts_a_rank_in_an_all_to_all_whose_split_sizes_do_not_fit(usual: tuple[int, int], odd: tuple) -> None:
    route = Site("/job/train.py", 5, "route")

    def call(seq: int, shape: tuple[int, int], completed_s: float | None) -> Call:
        return Call(op="all_to_all_single", group="default_pg", seq=seq, shape=shape, site=route, entered_s=seq + 90.0,
                    completed_s=completed_s)  # fmt: skip

    ends = {
        0: {"life": "killed", "signal": 6},
        1: {"life": "crashed", "exception": "RuntimeError: Connection reset by peer"},
    }
    last = {0: (8, 8), 1: (9, 8)}
    before = {0: (8, 8), 1: usual}
    s = job(
        *(
            rank(
                q, current_site=route, ended_waiting=True, ended_s=99.0, enqueued={"default_pg": 7}, **ends[q],
                calls=(*(call(n, before[q], n + 90.1) for n in (4, 5, 6)), call(7, last[q], None)),
            )
            for q in (0, 1)
        )
    )  # fmt: skip
    f = only(findings(s, mismatch, rank_lost))
    assert (f.kind, f.cause, f.culprits) == ("mismatch", "shape", odd)
    assert "rank 0 8x8, rank 1 9x8" in f.message and "split sizes" in f.advice


@pytest.mark.parametrize("gone_on", [(), (0,), (0, 1)])
def test_ranks_that_have_gone_on_from_an_abort_are_judged_by_their_call_of_its_number(gone_on: tuple[int, ...]) -> None:
    """Rank 2 has no rows of a small matrix. Whether the others have all bytes of that exchange before they notice is chance."""
    there, back = Site("/job/opt.py", 38, "exchange"), Site("/job/opt.py", 46, "step")

    def made(seq: int, size: int, site: Site) -> Call:
        return Call(
            op="all_to_all",
            group="default_pg",
            seq=seq,
            bytes=size,
            received=size // 4,
            site=site,
            entered_s=90.0 + seq,
        )

    def ended(q: int) -> RankState:
        caller = Site("/job/opt.py", 62, "train")  # the recorder knows it, and a rank that was aborted does not
        known = (made(n, 96, msgspec.structs.replace(there if n % 2 else back, caller=caller)) for n in (1, 2, 3, 4))
        calls = (*known, made(5, 96 if q < 2 else 0, there), *((made(6, 96, back),) if q in gone_on else ()))
        end = (
            {"life": "killed", "signal": 6}
            if q == 2
            else {"life": "crashed", "exception": "RuntimeError: Connection reset by peer"}
        )
        return rank(
            q,
            calls=calls,
            current_site=calls[-1].site,
            sites={there.key: 3, back.key: 2},
            ended_waiting=True,
            ended_s=99.0,
            **end,
        )

    f = only(findings(job(*map(ended, range(3))), mismatch, rank_lost))
    assert (f.kind, f.cause, f.culprits) == ("mismatch", "shape", (2,))
    assert "ranks 0, 1, 2 at opt.py:38" in f.message and "now ranks 0, 1 96 B; rank 2 0 B" in f.message
    assert "compare what each rank sends with what its peer expects" in f.advice


def test_gloo_aborts_a_rank_whose_message_is_longer_than_its_receive() -> None:
    """Stages of a pipeline: no collective is involved."""

    def stage(q: int, op: str, line: int, **end: Any) -> RankState:
        site = Site("/job/train.py", line, "run")
        message = Call(op=op, group="default_pg", peer=1 - q, nth=9, shape=(4,), site=site, entered_s=98.0)
        return rank(q, current_site=site, ended_waiting=True, ended_s=99.0, calls=(message,), **end)

    for line in (57, 49):  # of a stage, or of the one function that all ranks of a ring are in
        s = job(
            stage(0, "irecv", 49, life="killed", signal=6),
            stage(1, "isend", line, life="crashed", exception="RuntimeError: Connection reset by peer"),
        )
        f = only(findings(s, mismatch, rank_lost))
        assert f.message.startswith("ranks exchanged messages of different sizes, and gloo aborted rank 0")
        assert "collective" not in f.message + f.advice


def test_a_branch_by_which_messages_have_met_before_is_no_reason_for_their_sizes() -> None:
    """Stages of a pipeline: the branch between them was the same in each round. Only what computes the shape differs."""
    text = "first = rank == 0\nfor step in range(40):\n    if first:\n        dist.send(x, 1)\n    else:\n        dist.recv(y, 0)\n"

    def stage(q: int, op: str, line: int, rounds: int, n_bytes: int, **end: Any) -> RankState:
        site = Site("/job/train.py", line, "<module>")
        made = [
            Call(op=op, group="default_pg", peer=1 - q, nth=n, bytes=n_bytes if n == 9 else 64, site=site, entered_s=90.0 + n)
            for n in range(10 - rounds, 10)
        ]  # fmt: skip
        return rank(q, current_site=site, ended_waiting=True, ended_s=100.0, calls=tuple(made), **end)

    def found(rounds: int) -> Finding:
        ended = {"life": "crashed", "exception": "RuntimeError: Connection reset by peer"}
        s = job(stage(0, "send", 4, rounds, 256, **ended), stage(1, "recv", 6, rounds, 128, life="killed", signal=6))
        return only(findings(s, mismatch, rank_lost, source=lambda _: text))

    assert "they diverge at `if first … else` (train.py:3)" in found(1).message
    f = found(2)
    assert f.message.endswith("rank 0 sends 256 B at train.py:4, rank 1 receives into 128 B at train.py:6")
    assert "compute the shape of that message in one function" in f.advice


def test_ranks_that_went_on_from_an_aborted_call_of_ddp_are_compared_in_that_call() -> None:
    """Rank 1 caught an exception and left a backward out: what it reduces after the epoch meets the others' last gradients."""
    model = msgspec.structs.replace(MODEL, forwards=24, synced_backwards=24)
    stats, backward, forward = (Site("/job/train.py", n, "epoch") for n in (54, 35, 33))
    sums = {
        q: Call(op="all_reduce", group="default_pg", seq=30 - q, bytes=24, site=stats, entered_s=98.0) for q in (0, 1)
    }
    common = {"phase": "other", "ended_waiting": True, "current_site": stats, "step": 23}
    short = msgspec.structs.replace(model, synced_backwards=23)
    s = job(
        *(
            rank(q, calls=(sums[0],), models=(model,), life="crashed", exception="RuntimeError: Connection reset by peer",
                 sites={forward.key: 24, backward.key: 24, stats.key: 1}, ended_s=99.1, **common)
            for q in (0, 2)
        ),
        rank(1, calls=(sums[1],), models=(short,), life="killed", signal=6, caught="IndexError: [enforce fail at x/alloc.cpp:1] err == 0. index out of range", ended_s=99.0,
             sites={forward.key: 24, backward.key: 23, stats.key: 1}, **common),
    )  # fmt: skip
    f = only(findings(s, mismatch, rank_lost))
    assert (f.kind, f.culprits) == ("mismatch", (1,))
    assert f.message.startswith("rank 1 skipped a backward, and caught IndexError: index out of range; ")
    assert "ranks 0, 2 at train.py:35, rank 1 at train.py:54 in epoch" in f.message


def test_a_backward_that_may_still_come_is_not_counted_as_skipped() -> None:
    """Rank 1 caught an exception in an earlier forward, and is in a flag's all_reduce after the forward that it now makes."""
    flag, backward = Site("/job/train.py", 63, "probe"), Site("/job/train.py", 53, "attempt")
    inside = msgspec.structs.replace(flag, caller=Site("/job/train.py", 49, "attempt"))
    models = {q: msgspec.structs.replace(MODEL, forwards=41 + q, synced_backwards=40 + (not q)) for q in (0, 1)}
    sums = {
        q: Call(
            op="all_reduce", group="default_pg", seq=30, bytes=4 if q else 24, site=(backward, flag)[q], entered_s=98.0
        )
        for q in (0, 1)
    }
    s = job(
        *(
            rank(q, calls=(sums[q],), models=(models[q],), life="killed", signal=6, ended_s=99.0, ended_waiting=True,
                 caught="OutOfMemoryError: too large" if q else "", phase="other" if q else "backward", current_site=sums[q].site,
                 sites={inside.key: 41 + q, backward.key: 41 - q}, step=40)
            for q in (0, 1)
        )
    )  # fmt: skip
    f = only(findings(s, mismatch))
    assert f.message.startswith("rank 1 skipped a backward, and caught OutOfMemoryError: too large")
    assert "rank 1 ran at least 1 forward without backward (42 forwards, 40 backwards)" in f.message


REFUSED = "RuntimeError: DDP expects same model across all ranks, but Rank 2 has 4 params, while rank 0 has inconsistent 5 params."


@pytest.mark.parametrize("wraps", [False, True])
def test_a_model_that_ddp_refused_may_have_met_another_call(wraps: bool) -> None:
    """Ranks 0 and 1 gather what they resume from; what DDP compares on ranks 2 and 3 meets that."""
    agree, wrap = Site("/job/state.py", 49, "agree"), Site("/job/train.py", 41, "main")
    gather = Call(op="all_gather", group="default_pg", seq=2, bytes=5, site=agree, entered_s=98.0)
    model = msgspec.structs.replace(MODEL, group=None, forwards=0, synced_backwards=0)
    refused = {"life": "crashed", "exception": REFUSED, "ended_s": 99.0}
    reset = {"life": "crashed", "exception": "RuntimeError: Connection reset by peer", "ended_s": 99.1}
    gathering = {"current_site": agree, "calls": (gather,), "ended_waiting": True, "models": ()}
    wrapping = {"current_site": wrap, "models": (model,), "calls": ()}
    s = job(
        *(rank(q, **(wrapping if wraps else gathering), **reset) for q in (0, 1)),
        *(rank(q, **wrapping, **refused) for q in (2, 3)),
    )
    f = only(findings(s, mismatch, rank_lost))
    if wraps:  # all are in DDP: nothing shows another call
        assert (f.kind, f.culprits) == ("rank_lost", (2, 3))
    else:
        assert f.kind == "mismatch" and "DDP took what it received there for other ranks' modules" in f.message
        assert "ranks 0, 1 at state.py:49 in agree, ranks 2, 3 at train.py:41 in main" in f.message


def test_a_message_of_another_size_is_shown_where_it_was_sent_from_although_its_sender_has_gone_on() -> None:
    def message(op: str, line: int, nth: int, **more: Any) -> Call:
        return Call(op=op, group="default_pg", site=Site("/job/link.py", line, "run"), nth=nth, entered_s=98.0, **more)

    sent = message("send", 19, 9, peer=1, bytes=3072, completed_s=98.1)
    later, small = message("recv", 27, 4, peer=1, bytes=3072), message("recv", 24, 9, peer=0, bytes=16)
    onlooker = message("recv", 27, 3, peer=3, bytes=3072)
    ends = ((later, (sent, later)), (small, (small,)), (onlooker, (onlooker,)))
    aborted = {
        0: {"life": "crashed", "exception": "RuntimeError: Connection reset by peer"},
        1: {"life": "killed", "signal": 6},
    }
    ranks = (
        rank(q, current_site=at.site, ended_waiting=True, ended_s=99.0, calls=calls, **aborted.get(q, aborted[0]))
        for q, (at, calls) in enumerate(ends)
    )
    f = only(findings(job(*ranks), mismatch, rank_lost))
    assert "rank 0 sends 3.0 KiB at link.py:19 in run, rank 1 receives into 16 B at link.py:24 in run" in f.message
    assert "27" not in f.message and f.certainty == "proved"


def test_an_aborted_rank_is_judged_with_the_rank_that_the_launcher_killed_in_its_call() -> None:
    """torchrun's SIGTERM may arrive before the exception of the rank that lost its peer."""
    validate, backward = Site("/job/train.py", 14, "reduce_mean"), Site("/job/train.py", 38, "main")
    aborted = rank(
        0,
        life="killed",
        signal=6,
        ended_s=99.0,
        ended_waiting=True,
        current_site=validate,
        sites={validate.key: 1, backward.key: 60},
    )
    swept = rank(
        1, life="killed", signal=15, ended_s=99.1, ended_waiting=True, current_site=backward, sites={backward.key: 60}
    )
    f = only(findings(job(aborted, swept), mismatch, rank_lost))
    assert (f.kind, f.cause, f.culprits, f.victims) == ("mismatch", "shape", (0,), (1,))
    busy = msgspec.structs.replace(
        swept, ended_waiting=False
    )  # killed in its own code, which shows nothing about the call
    assert only(findings(job(aborted, busy), mismatch, rank_lost)).kind == "rank_lost"


def test_an_abort_counts_the_ranks_that_still_wait_and_waits_for_those_under_way() -> None:
    """Which ranks gloo aborts is chance: rank 2 is in its backward pass, and ranks 0 and 1 fall in the call that it skipped."""
    share, backward = Site("/job/train.py", 17, "share"), Site("/job/train.py", 34, "main")
    call = Call(op="all_reduce", group="default_pg", seq=87, shape=(2,), site=share, entered_s=98.0)
    known = {share.key: 41, backward.key: 41}
    fell = {"ended_s": 99.0, "ended_waiting": True, "current_site": share, "calls": (call,), "sites": known}
    first = rank(0, life="crashed", exception="RuntimeError: Connection reset by peer", **fell)
    second = rank(1, life="killed", signal=6, **fell)
    skipped = {"current_site": backward, "sites": {share.key: 40, backward.key: 42}}

    def verdict(t_s: float, **third: Any) -> list[Finding]:
        return findings(job(first, second, rank(2, **skipped, **third), t_s=t_s), mismatch, rank_lost)

    assert verdict(99.5, phase="forward") == []  # on its way
    waiting = Call(op="all_reduce", group="default_pg", seq=87, shape=(900,), site=backward, entered_s=98.5)
    for third in ({"blocked": waiting}, {"life": "killed", "signal": 15, "ended_s": 99.2, "ended_waiting": True}):
        f = only(verdict(99.5, **third))
        assert (f.kind, f.cause, f.culprits) == ("mismatch", "shape", (2,)), f
        assert "train.py:17" in f.message and "train.py:34" in f.message
    late = only(verdict(105.0))  # it goes on in other code: the rank that gloo aborted is a victim
    assert late.culprits == () and late.certainty == "suspected"  # its page shows no call


@pytest.mark.parametrize(
    "page", [{"calls": "open"}, {"calls": "failed"}, {"caught": "RuntimeError: Connection reset by peer"}]
)
def test_a_rank_that_gloo_aborts_while_it_leaves_its_call_is_a_victim(page: dict[str, str]) -> None:
    """gloo's thread aborts the rank while its main thread handles the exception of the same call: it no longer waits."""
    share, backward = Site("/job/train.py", 17, "share"), Site("/job/train.py", 34, "main")
    made = Call(op="all_reduce", group="default_pg", seq=87, shape=(2,), site=share, entered_s=98.0)
    if page.get("calls") == "failed":
        made = msgspec.structs.replace(made, failed=True, completed_s=98.9)
    elif "calls" not in page:
        made = msgspec.structs.replace(made, completed_s=98.9)
    known = {"current_site": share, "calls": (made,), "sites": {share.key: 41, backward.key: 41}, "ended_s": 99.0}
    ranks = (
        rank(0, life="crashed", exception="RuntimeError: Connection reset by peer", ended_waiting=True, **known),
        rank(1, life="killed", signal=6, caught=page.get("caught"), **known),
        rank(2, life="killed", signal=15, ended_waiting=True, ended_s=99.2, current_site=backward, sites={share.key: 40, backward.key: 42}),
    )  # fmt: skip
    f = only(findings(job(*ranks), mismatch, rank_lost))
    assert (f.kind, f.cause, f.culprits, f.certainty) == ("mismatch", "shape", (2,), "proved")


def test_the_sides_of_an_abort_in_a_wrapper_are_the_paths_that_led_there() -> None:
    """All collectives of a framework are called in one line: its callers tell the rank that came by another path."""
    wrapper = Site("/job/comm.py", 5, "reduce")

    def ended(q: int, line: int, size: int, **more: Any) -> RankState:
        made = Call(op="all_reduce", group="default_pg", seq=87, shape=(size,), site=wrapper, entered_s=98.0)
        stack = (wrapper, Site("/job/train.py", line, "main"))
        return rank(q, ended_s=99.0, ended_waiting=True, current_site=wrapper, user_stack=stack, calls=(made,),
                    sites={wrapper.key: 90}, **more)  # fmt: skip

    reset = {"life": "crashed", "exception": "RuntimeError: Connection reset by peer"}
    for aborted in (0, 1, 2):
        ends = [reset | ({"life": "killed", "signal": 6, "exception": None} if q == aborted else {}) for q in range(3)]
        ranks = [ended(q, *((30, 2) if q != 1 else (44, 900)), **ends[q]) for q in range(3)]
        assert only(findings(job(*ranks), mismatch, rank_lost)).culprits == (1,)


EXITS = """def sum_up(name):
    dist.all_reduce(counts[name])
class Span:
    def __exit__(self, *error):
        sum_up(self.name)
def fit():
    for batch in data:
        try:
            with Span("train"):
                net(batch).sum().backward()
        except BadRow as error:
            skip(batch)
"""


def test_a_call_in_an_exit_after_an_exception_is_said_to_be_there_and_at_a_line_where_all_have_been() -> None:
    """Of an abort the callers are not known: only one rank was at that line alone, all have been there from their callers."""
    end, leave, block, backward = (
        Site("/job/span.py", *at) for at in ((2, "sum_up"), (5, "__exit__"), (9, "fit"), (10, "fit"))
    )
    usual = {f"{end.file}:{line}": 40 for line in ("2 < /job/span.py:5", "10")}
    dead = {"ended_waiting": True, "sites": usual, "enqueued": {"default_pg": 7}, "completed": {"default_pg": 6}}
    closed = "RuntimeError: Connection reset by peer"
    others = (
        rank(q, current_site=backward, user_stack=(backward,), life="crashed", exception=closed, ended_s=99.1, **dead)
        for q in (0, 1)
    )
    own = rank(2, current_site=end, user_stack=(end, leave, block), life="killed", signal=6, ended_s=99.0, **dead)
    f = only(ended(job(*others, own), source={end.file: EXITS}.get))
    assert f.culprits == (2,) and "`except BadRow as error` (line 11)" in f.message and "ever" not in f.message
    assert "rank 2 is in `__exit__` (span.py:5), which also runs while an exception passes" in f.message
    assert f.advice.startswith("make no collective in `__exit__` if an exception passes") and {
        w.line for w in f.waiting
    } == {10}
    assert "let all ranks skip such a round together" in f.advice and "on rank 2, too" not in f.advice


def test_a_collective_that_completed_with_different_dtypes_is_reported() -> None:
    def call(dtype: str, line: int) -> Call:
        return Call(
            op="all_reduce", group="default_pg", seq=3, dtype=dtype, shape=(4,), site=Site("/job/m.py", line, "f")
        )

    conflict = CompletedConflict(
        "default_pg", 3, "dtype", {0: call("float64", 5), 1: call("int64", 9), 2: call("float64", 5)}
    )
    f = only(mismatch.completed(job(rank(0), rank(1), rank(2), completed_conflicts=(conflict,))))
    assert (f.kind, f.cause, f.culprits) == ("mismatch", "dtype", (1,)) and f.where[0].line == 9


def test_a_thread_that_uses_the_main_threads_group_is_named_after_the_abort() -> None:
    """gloo: the thread's all_reduce receives the bytes of DDP's, and aborts; DDP's own call is not in Python."""
    model = (Model(group="default_pg", forwards=9, synced_backwards=8),)
    backward, publish = Site("/job/train.py", 31, "<module>"), Site("/job/train.py", 16, "run")
    call = Call(op="all_reduce", group="default_pg", seq=7, site=publish, entered_s=39.0, other_thread=True)
    reset = "RuntimeError: Read error [127.0.0.1]: Connection reset by peer"

    def ended(calls: tuple[Call, ...], others: tuple[Call, ...] = ()) -> Finding:
        s = job(
            rank(0, life=Life.KILLED, signal=6, ended_s=40.0, current_site=backward, models=model, calls=calls),
            rank(
                1, life=Life.CRASHED, exception=reset, ended_s=40.1, current_site=backward, models=model, calls=others
            ),
            groups={"default_pg": Group(name="default_pg", ranks=(0, 1), backend="gloo")},
        )
        return only(findings(s, mismatch, rank_lost))

    f = ended((call,))
    assert (f.kind, f.culprits, f.victims, f.where[0].line) == ("mismatch", (0,), (1,), 16)
    assert f.message.startswith(
        "another thread of rank 0 is in all_reduce at train.py:16 in run while the main thread uses"
    )
    assert "its own process group" in f.advice
    faster = ended((), (call,))  # the thread of the other rank has made its call, that of the aborted rank not yet
    assert (faster.kind, faster.culprits, faster.where[0].line) == ("mismatch", (1,), 16)
    assert faster.message.endswith("gloo aborted rank 0")
    assert ended((msgspec.structs.replace(call, completed_s=39.5),)).kind == "rank_lost"
    assert ended((msgspec.structs.replace(call, group="metrics"),)).kind == "rank_lost"


def test_ranks_whose_loops_went_over_different_keys_are_all_named_and_told_to_have_the_same() -> None:
    """Two ranks have no loss of one head, and are in the backward: the first sentence has both sides."""
    text = "def step(losses):\n    for name, value in losses.items():\n        dist.all_reduce(value)\n    total.backward()\n"
    reduce, backward = (Site("/job/train.py", line, "step") for line in (3, 4))

    def ended(q: int) -> RankState:
        site, end = (reduce, {"life": "killed", "signal": 6}) if q in (0, 2) else (backward, {"life": "crashed", "exception": "RuntimeError: Connection closed by peer"})  # fmt: skip
        call = Call(op="all_reduce", group="default_pg", seq=61, shape=(), site=site, entered_s=98.0)
        known = {reduce.key: 40, backward.key: 10}
        return rank(
            q,
            calls=(call,),
            current_site=site,
            user_stack=(site,),
            ended_waiting=True,
            ended_s=99.0,
            sites=known,
            **end,
        )

    f = only(findings(job(*map(ended, range(4))), mismatch, rank_lost, source={"/job/train.py": text}.get))
    assert (f.cause, f.culprits) == ("shape", ())
    first, _ = head_and_more(f.message)
    assert "ranks 0, 2 at train.py:3 in step, ranks 1, 3 at train.py:4 in step" in first
    assert f.advice.startswith(
        "let the loop `for name, value in losses.items()` at line 2 run equally often on all ranks"
    )
    assert "a zero loss, not none" in f.advice and "wrong result" not in f.advice


@pytest.mark.parametrize(("names", "how"), [(1, "different orders"), (2, "different shapes")])
def test_modules_that_ddp_refuses_are_distinguished_by_the_names_of_their_parameters(names: int, how: str) -> None:
    refused = "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 4 params"
    ranks = (
        rank(q, life=Life.CRASHED, exception=refused, ended_s=40.0,
             models=(msgspec.structs.replace(MODEL, shape_hash=q, parameter_order=(names if q == 1 else 1) << 32 | q),))
        for q in (1, 2)
    )  # fmt: skip
    f = only(ended(job(*ranks)))
    assert (f.cause, how in f.message) == ("model", True)
