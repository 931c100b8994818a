"""Witnesses: the order in which evidence decides who is the culprit, and what each witness decides."""

from __future__ import annotations

import msgspec
import pytest

from distdiag.diagnosis.culprit.witnesses import ORDER, Reason
from distdiag.diagnosis.engine import Diagnosis
from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import Call, Site, Snapshot
from distdiag.diagnosis.rules import deadlock, mismatch
from distdiag.diagnosis.waits.incidents import Root
from tests.diagnosis import waits
from tests.diagnosis.made import findings, job, only, rank
from tests.faults.replay import left_out


def stuck(t_s: float, sizes: tuple[int, ...]) -> Snapshot:
    """Return ranks 0… in a barrier at line 9, the others in an all_reduce at line 40; each side knows only line 40."""
    calls = [("barrier", 9)] * sizes[0] + [("all_reduce", 40)] * sizes[1]
    ranks = [
        rank(q, enqueued={"default_pg": 7}, activity="waiting", sites={"/job/train.py:40": 5, f"/job/train.py:{line}": 5},
             blocked=Call(op=op, group="default_pg", seq=7, entered_s=5.0, site=Site("/job/train.py", line, "f")))
        for q, (op, line) in enumerate(calls)
    ]  # fmt: skip
    return job(*ranks, t_s=t_s)


def culprits(sizes: tuple[int, ...], *without: str) -> tuple[int, ...]:
    d = Diagnosis(source=lambda _: None)
    with left_out(without):
        for t_s in (6.0, 6.25):
            d.update(stuck(t_s, sizes))
    return only(d.findings).culprits


def test_the_first_witness_that_names_ranks_decides() -> None:
    assert culprits((1, 2)) == (0,)  # the minority
    assert culprits((1, 1)) == (0,)  # a tie: it is at a site where the other has never been


def test_a_tie_without_its_witness_blames_nobody() -> None:
    assert culprits((1, 1), "site", "history") == ()
    assert culprits((1, 2), "site", "history") == (0,)


def test_every_root_of_an_incident_has_an_order_and_every_reason_a_witness() -> None:
    assert set(ORDER) == set(Root)
    assert {w.name for witnesses in ORDER.values() for w in witnesses} | {Reason.NONE} == set(Reason)


def test_threads_that_all_ranks_run_are_a_tie() -> None:
    """Which thread calls first is chance on each rank."""
    board, step = Site("/job/train.py", 67, "run"), Site("/job/train.py", 77, "train")
    both = {"/job/train.py:67": 1, "/job/train.py:77": 9}
    of_thread = Call(op="all_gather", group="default_pg", seq=9, site=board, other_thread=True)
    of_main = Call(op="all_reduce", group="default_pg", seq=9, site=step)
    for theirs, culprits in ((both, ()), ({"/job/train.py:77": 10}, (0,))):
        s = waits.snapshot(waits.rank(0, of_thread, sites=both), waits.rank(1, of_main, sites=theirs))
        f = only(findings(s, deadlock))
        assert f.culprits == culprits and "its own process group" in f.advice
        assert f"two threads of {'rank 0' if culprits else 'each rank'} use this group" in f.message
        assert ("in a thread on every rank" in f.advice) is bool(culprits)


@pytest.mark.parametrize(("line", "known"), [("job = dcp.async_save(state)", True), ("# async_save(state)", False)])
def test_a_thread_without_a_line_of_the_script_may_be_that_of_an_asynchronous_checkpoint(
    line: str, known: bool
) -> None:
    step = Site("/job/train.py", 2, "train")
    of_thread = Call(op="gather", group="default_pg", seq=9, other_thread=True)
    of_main = Call(op="all_reduce", group="default_pg", seq=9, site=step)
    s = waits.snapshot(waits.rank(0, of_thread, user_stack=(step,)), waits.rank(1, of_main, user_stack=(step,)))
    f = only(findings(s, mismatch, source={step.file: f"{line}\nloss.backward()\n"}.get))
    assert ("gather, in another thread (of torch, for async_save at train.py:1)" in f.message) is known
    assert f.advice.startswith("give async_save at train.py:1 its own process group") is known


def test_where_calls_of_two_threads_have_met_the_later_difference_is_chance() -> None:
    """Rank 0's thread made its gather one call earlier: that paired with an all_gather, and the difference in kind came next."""
    step = Site("/job/train.py", 2, "train")

    def calls(*ops: str) -> tuple[Call, ...]:
        return tuple(
            Call(op=op, group="default_pg", seq=n, shape=(1,) if op == "all_gather" else (64,), completed_s=1.0, other_thread=op == "all_gather",
                 site=None if op == "all_gather" else step)
            for n, op in enumerate(ops, 8)
        )  # fmt: skip

    forward, backward = "all_gather_into_tensor", "reduce_scatter_tensor"
    early, late = calls("barrier", "all_gather", forward), calls("barrier", forward, backward, "all_gather")
    blocked = [msgspec.structs.replace(made[2], completed_s=None) for made in (early, late)]
    source = {step.file: "job = dcp.async_save(state)\nloss.backward()\n"}.get

    def found(*made: tuple[Call, ...]) -> Finding:
        ranks = (waits.rank(q, blocked[q], user_stack=(step,), calls=made[q]) for q in (0, 1))
        return only(findings(waits.snapshot(*ranks), mismatch, source=source))

    f = found(early, late)
    assert f.message.startswith(
        "rank 0 has completed all_gather, in another thread (of torch, for async_save at train.py:1), rank 1"
    )
    assert "#9 of default_pg" in f.message and "two threads of each rank use this group" in f.message and not f.culprits
    assert "its own process group" in f.advice and [w.line for w in f.where] == [1, 2]
    # on both ranks the thread's call paired with the thread's
    paired = [calls("barrier", "all_gather", op) for op in (forward, backward)]
    assert "another thread" not in found(*paired).message
