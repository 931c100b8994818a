"""Findings over time: when they are reported, kept and cleared."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from distdiag.diagnosis import kinds
from distdiag.diagnosis.culprit.verdict import SETTLED_S
from distdiag.diagnosis.engine import NO_CALLS, Checks, Diagnosis
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Finding
from distdiag.diagnosis.model.snapshot import (
    Call,
    CompletedConflict,
    Life,
    Site,
    Snapshot,
)
from distdiag.diagnosis.rules import RULES
from tests.diagnosis.made import LOOP, job, only, rank, steps, waits_for_rank_one


def test_a_stall_is_cleared_when_the_rank_arrives_and_its_record_stays() -> None:
    d = Diagnosis(source=lambda _: None)
    for t in range(30):
        d.update(waits_for_rank_one(1.0, float(t), activity="user_code"))
    assert [f.kind for f in d.open()] == ["stall"] and d.state == "stalled"
    for t in range(30, 34):
        d.update(job(rank(0, step=101), rank(1, step=101), t_s=float(t)))
    assert d.open() == [] and d.state == "running"
    f = only(d.findings)
    assert f.cleared_s is not None and d.recovered[1] > 20.0


@pytest.mark.parametrize(("life", "open_still"), [(Life.FINISHED, 0), (Life.KILLED, 1)])
def test_a_stall_is_cleared_when_all_ranks_have_finished(life: str, open_still: int) -> None:
    d = Diagnosis(source=lambda _: None)
    for t in range(30):
        d.update(waits_for_rank_one(1.0, float(t), activity="user_code"))
    ended = job(
        *(rank(q, life=life, ended_s=30.0, signal=9 if life == Life.KILLED else None) for q in (0, 1)), t_s=30.1
    )
    d.update(ended, final=True)
    assert len([f for f in d.open() if f.kind == "stall"]) == open_still


def test_a_stall_stays_reported_while_its_ranks_are_being_killed() -> None:
    def waiting(t_s: float, activity: str) -> Snapshot:
        call = Call(op="all_reduce", group="default_pg", seq=9, entered_s=1.0, site=LOOP)
        waits = [rank(q, blocked=call, enqueued={"default_pg": 9}, activity="waiting") for q in (0, 1)]
        return job(*waits, rank(2, enqueued={"default_pg": 8}, activity=activity), t_s=t_s)

    d = Diagnosis(source=lambda _: None)
    for t in range(40):
        d.update(waiting(float(t), "queue"))
    f = only(d.open())
    assert f.severity == "error" and "waits on a queue" in f.message
    dying = waiting(40.0, "user_code")  # it has left its queue; nothing else is known about it
    dying.ranks[0] = rank(0, life=Life.KILLED, ended_s=39.9, signal=15, enqueued={"default_pg": 9})
    assert d.update(dying) == [] and only(d.open()) == f


@pytest.mark.parametrize(
    "asked", [{"handling": "KeyboardInterrupt"}, {}], ids=["Ctrl-C reaches the rank", "the launcher got a signal"]
)
def test_where_a_rank_unwinds_to_after_an_interrupt_is_no_evidence(asked: dict[str, Any]) -> None:
    """It leaves its line for the locks and collectives of `with` and `finally`."""
    line, cleanup = Site("/job/cache.py", 8, "fill"), Site("/job/cache.py", 7, "fill")

    def poll(t_s: float, **late: Any) -> Snapshot:
        call = Call(op="all_reduce", group="default_pg", seq=9, entered_s=1.0, site=LOOP)
        waits = [rank(q, blocked=call, enqueued={"default_pg": 9}, activity="waiting") for q in (0, 1)]
        late = {"enqueued": {"default_pg": 8}, **late}
        return job(*waits, rank(2, **late), t_s=t_s, stopped_by=None if t_s < 40 or asked else 2)

    d = Diagnosis(source=lambda _: None)
    for t in range(40):
        d.update(poll(float(t), activity="queue", current_site=line, user_stack=(line,)))
    f = only(d.open())
    assert f.severity == "error" and "waits on a queue" in f.message
    unwinding = {**asked, "current_site": cleanup, "user_stack": (cleanup,)}
    barrier = Call(op="barrier", group="default_pg", seq=9, entered_s=41.0, site=cleanup)
    for t_s, where in ((40.0, {"activity": "lock"}), (41.0, {"blocked": barrier, "enqueued": {"default_pg": 9}})):
        for later_s in (0.0, 0.25, 0.5):
            d.update(poll(t_s + later_s, **unwinding, **where))
    assert only(d.findings) == f


def test_a_rank_that_handles_an_interrupt_of_its_own_still_stalls_the_others() -> None:
    """It was interrupted before the others waited: that is the cause."""
    d = Diagnosis(source=lambda _: None)
    for t in range(60):
        d.update(waits_for_rank_one(2.0, float(t), activity="lock", handling="KeyboardInterrupt"))
    assert only(d.open()).severity == "error" and "KeyboardInterrupt" in only(d.open()).message


def test_a_tie_is_decided_once_nobody_has_moved_for_a_while() -> None:
    """Ranks that are still on their way could change the majority."""
    calls = [Call(op=op, group="default_pg", seq=7, entered_s=0.0, site=LOOP) for op in ("barrier", "all_reduce")]
    ranks = [rank(q, blocked=c, enqueued={"default_pg": 7}, activity="waiting") for q, c in enumerate(calls)]
    ranks += [rank(q, enqueued={"default_pg": 6}, activity="user_code") for q in (2, 3)]
    d = Diagnosis(source=lambda _: None)
    first = next(t for t in range(10) if any(f.kind in ("mismatch", "deadlock") for f in d.update(job(*ranks, t_s=t))))
    assert first == SETTLED_S


def test_a_proof_needs_two_polls_and_is_kept_when_the_job_is_killed() -> None:
    def stuck(t_s: float, life: str = Life.RUNNING, **more: Any) -> Snapshot:
        ranks = [
            rank(q, life=life, enqueued={"default_pg": 7}, activity="waiting", sites={"/job/train.py:40": 5},
                 blocked=None if life != Life.RUNNING else Call(
                     op=op, group="default_pg", seq=7, entered_s=5.0, site=Site("/job/train.py", line, "f")),
                 **more)
            for q, (op, line) in enumerate([("barrier", 9), ("all_reduce", 40), ("all_reduce", 40)])
        ]  # fmt: skip
        return job(*ranks, t_s=t_s)

    d = Diagnosis(source=lambda _: None)
    for t in (5.0, 5.5, 6.0, 8.0):
        assert d.update(structs.replace(stuck(t), partial=True)) == []  # a node's state may be the same as before
    assert d.update(stuck(9.0)) == []
    assert d.update(structs.replace(stuck(9.2), partial=True)) == []
    f = only(d.update(stuck(9.25)))
    assert f.kind in ("deadlock", "mismatch") and f.certainty == "proved" and f.culprits == (0,)
    assert d.state == "deadlocked"
    for t in (10.0, 11.0, 15.0):
        assert d.update(stuck(t, Life.KILLED, signal=9, ended_s=9.9)) == []
    assert only(d.findings) == f


def test_checks_and_reasons_of_abstention_are_kept() -> None:
    d = Diagnosis(source=lambda _: None)
    d.update(job(rank(0, steps=steps(n=20)), rank(1, steps=steps(n=20)), t_s=1.0))
    checks = {(c.kind, c.cause): c for c in d.checks.all}
    assert {kind for kind, _ in checks} == {rule.kind.name for rule in RULES}
    assert not checks["straggler", None].checked and "15 of 30 steps" in checks["straggler", None].reason
    assert not checks["gpu", None].checked
    blind = {kind for (kind, _), check in checks.items() if check.reason == NO_CALLS and not check.checked}
    assert blind == {"deadlock", "mismatch", "stall", "timeout", "group_misuse"}
    d.update(job(rank(0, enqueued={"default_pg": 5}), rank(1, enqueued={"default_pg": 5}), t_s=2.0))
    assert all(c.checked for c in d.checks.all if c.kind in blind)
    d.update(job(rank(0, steps=steps(n=60)), rank(1, steps=steps(n=60)), t_s=3.0))
    checked = next(c for c in d.checks.all if c.kind == "straggler")
    assert (checked.checked and "costs" in checked.reason) or "no rank is the slowest" in checked.reason
    d.update(job(rank(0, life=Life.KILLED, signal=15), rank(1, life=Life.KILLED, signal=15), t_s=5.0))
    assert next(c for c in d.checks.all if c.kind == "straggler") == checked, "the job's end says nothing of its speed"


def test_what_cannot_be_told_of_a_rank_does_not_contradict_what_was_found_of_it() -> None:
    checks, found = Checks(), Finding(kind="straggler", severity="warning", culprits=(3,), message="rank 3 is slow")
    for q in (3, 2):  # another rank may be slow, too
        checks.take("straggler", [Abstained(f"rank {q} may only lack a CPU", undecided=True, ranks=(q,))], [found])
        assert [(c.checked, c.reason) for c in checks.all] == [
            (True, "") if q == 3 else (False, "rank 2 may only lack a CPU")
        ]


def test_what_was_found_counts_as_checked() -> None:
    """The host gets busy after it was found."""
    checks, found = Checks(), Finding(kind="comm_bound", severity="info", message="communication")
    for outcomes in ([found], [Abstained("the host is busy", undecided=True)]):
        checks.take("comm_bound", outcomes, [found])
        assert all(c.checked for c in checks.all)
    checks.take("comm_bound", [Abstained("the host is busy", undecided=True)])
    assert [c.checked for c in checks.all] == [False], "the finding was cleared"
    of, checks = Finding(kind="comm_bound", cause="size", severity="info", message=""), Checks()
    for outcomes in ([Abstained("too early", cause="size")], [of]):
        checks.take("comm_bound", outcomes)
    assert {(c.cause, c.checked) for c in checks.all} == {(None, True), ("size", True)}


def test_a_rule_that_raises_is_counted_and_loses_only_its_own_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        kind = kinds.MEMORY
        limits = None

        def evaluate(self, facts: Facts) -> list[Finding | Abstained]:
            raise ValueError("no such rank")

    monkeypatch.delenv("DISTDIAG_RAISE", raising=False)
    d = Diagnosis(source=lambda _: None, rules=(*(r for r in RULES if r.kind is not kinds.MEMORY), Broken()))
    d.update(waits_for_rank_one(1.0, 60.0, activity="user_code"))
    (failure,) = d.failures
    assert "ValueError: no such rank" in failure and [f.kind for f in d.open()] == ["stall"]
    assert "the rule failed" in next(c for c in d.checks.all if c.kind == "memory").reason


def test_a_mismatch_that_completed_stays_reported_and_does_not_stop_the_job() -> None:
    conflict = CompletedConflict(
        group="default_pg",
        seq=3,
        cause="root",
        calls={q: Call(op="broadcast", group="default_pg", seq=3, root=q % 2) for q in range(3)},
    )
    d = Diagnosis(source=lambda _: None)
    for k in range(12):
        d.update(job(rank(0), rank(1), rank(2), t_s=10.0 + k / 4, completed_conflicts=(conflict,)))
    f = only(d.findings)
    assert (f.kind, f.culprits, f.cleared_s, f.collective_completed) == ("mismatch", (1,), None, True)
    assert d.state == "degraded"


def test_a_deadlock_stays_while_its_ranks_are_being_killed_and_ends_once_one_moves() -> None:
    """A process that handles SIGTERM no longer sleeps in its call: for some polls it looks busy at the same site."""

    def poll(t_s: float, asleep: bool, issued: int = 7) -> Snapshot:
        ranks = [
            rank(q, blocked=Call(op=op, group="default_pg", seq=7, entered_s=1.0) if asleep else None,
                 enqueued={"default_pg": issued}, completed={"default_pg": issued - 1})
            for q, op in enumerate(("barrier", "all_reduce", "all_reduce"))
        ]  # fmt: skip
        return job(*ranks, t_s=t_s)

    d = Diagnosis(source=lambda _: None)
    for t_s in (2.0, 2.25):
        d.update(poll(t_s, True))
    assert [f.cleared_s for f in d.findings] == [None]
    for t_s in (2.5, 2.75, 3.0, 3.25):
        d.update(poll(t_s, False))
    assert [f.cleared_s for f in d.findings] == [None]
    for t_s in (3.5, 3.75, 4.0):
        d.update(poll(t_s, False, 8))
    assert [f.cleared_s is None for f in d.findings] == [False]


def test_a_straggler_is_not_counted_twice_for_the_same_steps() -> None:
    """Three evaluations must find it; those after the last step of a short job see no new steps."""

    def seen_at(*newest: int, calls: int = 0) -> list[Finding]:
        d = Diagnosis(source=lambda _: None)
        for i, step in enumerate(newest):
            more = {"step": step, "enqueued": {"default_pg": calls * i}}
            ranks = rank(0, steps=steps(wait_ms=80.0), **more), rank(1, steps=steps(80.0, "data", seed=1), **more)
            d.update(job(*ranks, t_s=100.0 + 2.0 * i), final=i == len(newest) - 1)
        return [f for f in d.findings if f.kind == "straggler" and d.records[f.key].reported]

    assert seen_at(60, 60, 60, 60, 60) == []
    assert only(seen_at(60, 62, 64)).culprits == (1,)
    assert only(seen_at(0, 0, 0, calls=9)).culprits == (1,)  # a loop without optimizer steps


def test_a_proof_whose_victims_come_to_wait_one_by_one_is_one_finding() -> None:
    """Hosts run ahead of their devices: that of rank 0 begins to wait later. Nothing has contradicted the first proof."""
    d = Diagnosis(source=lambda _: None)
    calls = [
        Call(op="all_reduce", group="default_pg", seq=7, entered_s=5.0, on_device=True, shape=(n,), dtype="float32",
             site=LOOP)
        for n in (8, 4)
    ]  # fmt: skip
    for t_s, waiting in ((6.0, (1,)), (6.3, (1,)), (6.6, (1,)), (6.9, (0, 1)), (7.2, (0, 1)), (7.5, (0, 1))):
        d.update(
            job(
                *(
                    rank(q, enqueued={"default_pg": 7}, completed={"default_pg": 6}, calls=(call,),
                         activity="waiting", blocked=call if q in waiting else None)
                    for q, call in enumerate(calls)
                ),
                t_s=t_s,
            )
        )  # fmt: skip
    assert [(f.kind, f.cause, f.cleared_s) for f in d.findings] == [("mismatch", "shape", None)]
    assert not d.contradicted


def test_a_proof_that_another_one_replaces_is_no_contradiction() -> None:
    """One collective is judged again once more is known of its ranks: which rank is to blame, and the cause, may change."""
    d, seen = Diagnosis(source=lambda _: None), []
    entered = {0: (LOOP, "all_reduce"), 1: (Site("/job/train.py", 50, "save"), "barrier")}
    for t_s, known in ((6.0, {}), (6.3, {}), (6.6, {}), (6.9, {50}), (7.2, {50}), (7.5, {50})):
        calls = {
            q: Call(op=op, group="default_pg", seq=7, entered_s=5.0, site=site) for q, (site, op) in entered.items()
        }
        sites = {f"{site.file}:{site.line}": 2 for site, _ in entered.values()} if known else {}
        ranks = (
            rank(q, enqueued={"default_pg": 7}, activity="waiting", calls=(c,), blocked=c, sites={c.site.key: 1, **sites})
            for q, c in calls.items() if c.site is not None
        )  # fmt: skip
        seen += d.update(job(*ranks, t_s=t_s))
    assert [(f.title, f.severity, f.cleared_s is None) for f in d.findings] == [
        ("mismatch/op", "info", False), ("deadlock/order_mismatch", "error", True)
    ]  # fmt: skip
    assert not d.contradicted and [f.severity for f in seen if f.cleared_s is not None] == ["info"]


@pytest.mark.parametrize("apart_s", [1, 2, 4])
def test_a_finding_is_held_for_seconds_however_far_apart_polls_are(apart_s: int) -> None:
    """Nodes send their state every two seconds, and a calm monitor polls every eight."""
    d = Diagnosis(source=lambda _: None)
    reported = None
    for t in range(10, 30, apart_s):
        d.update(
            job(
                rank(0, step=100 + t, steps=steps(wait_ms=80.0, seed=0)),
                rank(1, step=100 + t, steps=steps(80.0, "other", seed=1)),
                t_s=float(t),
                partial=t % 2 == 0,  # steps are compared, whichever node is late
            )
        )
        if reported is None and d.open():
            reported = t
    assert reported is not None and reported - 10 == apart_s, "the second look, however far apart they are"


def straggling(t: int, slow: bool) -> Snapshot:
    late = steps(80.0, "other", seed=1) if slow else steps(wait_ms=80.0, seed=1)
    return job(rank(0, step=100 + t, steps=steps(wait_ms=80.0)), rank(1, step=100 + t, steps=late), t_s=float(t))


@pytest.mark.parametrize("apart_s", [1, 2, 4])
def test_a_finding_is_cleared_after_seconds_however_far_apart_polls_are(apart_s: int) -> None:
    """One more evaluation that finds it does not report it again: it must hold as a new one must."""
    d = Diagnosis(source=lambda _: None)
    for t in range(0, 20, apart_s):
        d.update(straggling(t, True))
    assert len(d.open()) == 1
    for t in range(20, 20 + kinds.STRAGGLER.release, apart_s):
        d.update(straggling(t, False))
    assert d.open() == []
    d.update(straggling(60, True))
    d.update(straggling(60 + apart_s, False))
    assert d.open() == []
    for t in range(70, 80, apart_s):
        d.update(straggling(t, True))
    assert len(d.open()) == 1 and len(d.findings) == 1
