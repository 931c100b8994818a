"""Pauses of one rank, summed over a job whose snapshots hold only its newest steps."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from msgspec.structs import replace

from distdiag.diagnosis.engine import Diagnosis
from distdiag.diagnosis.model.findings import Finding, Where
from distdiag.diagnosis.model.snapshot import Arrival, Site, Snapshot, Step
from distdiag.diagnosis.pauses import Pauses
from distdiag.diagnosis.rules import straggler
from tests.diagnosis.made import findings, job, loader, only, rank, steps

N, KEPT = 400, 64
UPLOAD = Site("/job/train.py", 14, "upload")


def history(pauses: dict[int, float], q: int, late: int = 0) -> list[Step]:
    """Return the steps of a rank; `pauses`: seconds by the step in which rank `late` kept the others waiting."""
    at_s, out = 0.0, []
    for x in steps(seed=q, n=N):
        extra_ms = 1e3 * pauses.get(x.step, 0.0)
        at_s += (68.0 + extra_ms) / 1e3
        own, waits = (extra_ms, 0.0) if q == late else (0.0, extra_ms)
        out.append(
            replace(
                x, end_s=at_s, step_ms=x.step_ms + extra_ms, other_ms=x.other_ms + own, wait_ms=waits,
                backward_ms=x.backward_ms + waits,
            )
        )  # fmt: skip
    return out


def snapshots(pauses: dict[int, float], polls: int, late: int = 0, ranks: int = 3) -> list[Snapshot]:
    """Return snapshots after equal numbers of steps; each has the newest `KEPT` steps."""
    of = [history(pauses, q, late) for q in range(ranks)]
    every = N // polls
    return [
        job(*(rank(q, steps=tuple(of[q][max(0, n - KEPT) : n]), step=n) for q in range(ranks)),
            t_s=max(x[n - 1].end_s for x in of), usual_step_s=0.068)
        for n in range(every, N + 1, every)
    ]  # fmt: skip


def followed(of: list[Snapshot]) -> Pauses:
    pauses = Pauses()
    for s in of:
        pauses.add(s)
    return pauses


def found(of: list[Snapshot]) -> list[Finding]:
    return [f for f in findings(of[-1], straggler, pauses=followed(of)) if f.cause == "pauses"]


def test_three_pauses_of_a_rank_that_may_save_are_half_of_the_time() -> None:
    pauses = followed(snapshots({60: 9.0, 160: 9.0, 260: 9.0}, polls=40))
    lost = pauses.of[0]
    assert lost.times == 3 and lost.ms == pytest.approx(27e3, rel=0.01)
    assert pauses.share(lost) == pytest.approx(0.5, abs=0.03)
    f = only(found(snapshots({60: 9.0, 160: 9.0, 260: 9.0}, polls=40)))
    assert (f.severity, f.culprits, f.victims) == ("warning", (0,), (1, 2))
    assert "kept the others waiting 3 times, for 27 s in all, 50 % of the training time" in f.message


def test_pauses_for_data_name_what_a_worker_does_and_advise_workers_only_where_there_are_none() -> None:
    shard = Site("/job/shards.py", 42, "records")
    for workers, advice in ((2, "read or decompress a whole shard"), (0, "let workers prefetch it")):
        seen = {"loaders": (loader(workers=workers),), "worker_sites": ((shard, 3),)}

        def loading(s: Snapshot, seen: dict[str, Any] = seen) -> Snapshot:
            for_data = {
                q: replace(x, steps=tuple(replace(y, data_ms=y.other_ms, other_ms=0.0) for y in x.steps), **seen)
                for q, x in s.ranks.items()
            }
            return replace(s, ranks=for_data)

        f = only(found([loading(s) for s in snapshots({60: 9.0, 160: 9.0, 260: 9.0}, polls=40)]))
        assert ("; its worker is then at shards.py:42 in records" in f.message) is bool(workers) and advice in f.advice


@pytest.mark.parametrize("seed", range(20))
def test_the_sum_does_not_depend_on_when_the_job_was_polled(seed: int) -> None:
    """Polls shifted and dropped: as long as no step is overwritten between two of them, the sum is the same."""
    r = random.Random(seed)
    pauses = {r.randrange(10, N): r.uniform(0.5, 4.0) for _ in range(r.randint(3, 12))}
    late = r.randrange(3)
    of = snapshots(pauses, polls=100, late=late)
    kept, since = [], 0
    for s in of:
        since += 4
        if since >= 4 * r.randint(1, 15) or since > KEPT - 8:
            kept.append(s)
            since = 0
    some = followed([*kept, of[-1]])
    assert [q for q, x in some.of.items() if x.times] == [late]
    assert some.of[late].times == len(pauses)
    assert some.of[late].ms == pytest.approx(1e3 * sum(pauses.values()), rel=0.02)


def after(s: Snapshot, pauses: dict[int, float], waited: float = 1.0) -> Snapshot:
    """Return the snapshot some barriers later; `pauses`: seconds that all others are in one before this rank enters it, too.

    Args:
        waited: Share of that time that their hosts wait in it.
    """
    at_s, out = max(x.steps[-1].end_s for x in s.ranks.values()), []
    for seq, (q, late_s) in enumerate(pauses.items()):
        ms = late_s * 1e3
        out.append(Arrival("default_pg", seq, "barrier", at_s + 0.01, ms + 5.0, q, waited * ms, 0.0, ms))
        at_s += late_s + 0.02
    return replace(s, arrivals=tuple(out), t_s=at_s)


def test_what_follows_the_last_step_is_one_more_pause() -> None:
    of = snapshots({60: 9.0, 160: 9.0}, polls=40)
    f = only(found([*of, after(of[-1], {0: 9.0})]))
    assert (f.severity, f.culprits) == ("warning", (0,))
    assert "kept the others waiting 3 times, for 27 s in all, 50 % of the training time" in f.message
    for pauses, waited in (({0: 0.15}, 1.0), ({0: 9.0}, 0.01), ({0: 9.0, 1: 9.0}, 1.0), ({}, 1.0)):
        assert found([*of, after(of[-1], pauses, waited)]) == [], "short, not waited for, or of another rank, too"
    one = snapshots({60: 9.0}, polls=40)
    assert found([*one, after(one[-1], {0: 9.0})]) == [], "one of two may be the end"
    assert followed([*of, replace(after(of[-1], {0: 9.0}), groups={})]).lost()[0].times == 2, "not of all ranks"


def test_a_step_that_follows_counts_that_time_instead() -> None:
    of, late = snapshots({60: 9.0, 160: 9.0, 260: 9.0}, polls=400), 258
    between = after(of[late], {0: 9.0})
    assert [x.ranks[0].step for x in (of[late], of[late + 1])] == [259, 260]
    half, whole = followed([*of[: late + 1], between, between]), followed([*of[: late + 1], between, *of[late + 1 :]])
    for pauses in (half, whole, followed(of)):
        lost = pauses.lost()[0]
        assert (lost.times, round(lost.ms / 1e3)) == (3, 27) and lost.stacks is pauses.of[0].stacks
    assert half.of[0].times == 2 and whole.lost() is whole.of


def test_few_short_or_shared_pauses_are_no_warning() -> None:
    assert found(snapshots({60: 9.0, 160: 9.0}, polls=40)) == [], "two may be the start and the end"
    assert found(snapshots({60: 1.0, 160: 1.0, 260: 1.0}, polls=40)) == [], "too short a job to say"
    shared = snapshots({}, polls=40)
    longer = [
        replace(s, ranks={q: replace(x, steps=tuple(
            replace(y, step_ms=y.step_ms + 5e3, other_ms=y.other_ms + 5e3) if y.step % 100 == 0 else y for y in x.steps
        )) for q, x in s.ranks.items()})
        for s in shared
    ]  # fmt: skip
    assert found(longer) == [], "all ranks pause together: none keeps another waiting"


def test_pauses_in_the_first_steps_alone_are_no_warning() -> None:
    """Kernels for new shapes are built there, on each rank when it meets one."""
    early = {7: 2.0, 11: 2.0, 19: 2.0, 30: 2.0}
    f = only(found(snapshots(early, polls=10)))
    assert f.severity == "info" and "4 of them in its first 50 steps, which may be warm-up" in f.message
    f = only(found(snapshots(early | {60: 3.0, 160: 3.0, 260: 3.0}, polls=40)))
    assert f.severity == "warning" and "warm-up" not in f.message


@pytest.mark.parametrize(("line", "pauses"), [(14, []), (15, ["pauses"])])
def test_pauses_at_a_line_that_an_info_has_already_are_no_second_one(line: int, pauses: list[str]) -> None:
    of = snapshots({7: 2.0, 11: 2.0, 19: 2.0, 30: 2.0}, polls=10)
    so_far = followed(of)
    so_far.waits_for(replace(of[-1].ranks[0], user_stack=(UPLOAD,)))
    here = Where(0, UPLOAD.file, line, UPLOAD.function, "user_code")
    host = Finding(kind="straggler", cause="host", severity="info", culprits=(0,), where=(here,), message="")
    found = findings(of[-1], straggler, pauses=so_far, reported=(host,))
    assert [f.cause for f in found if f.cause == "pauses"] == pauses


def test_the_line_is_the_one_at_which_the_others_waited() -> None:
    of = snapshots({60: 9.0, 160: 9.0, 260: 9.0}, polls=40)
    pauses = Pauses()
    for _ in range(9):  # before the job trains, for the rank that goes first
        pauses.waits_for(replace(of[0].ranks[0], user_stack=(Site("/job/train.py", 5, "tokenize"),)))
    for s in of:
        pauses.add(s)
    for stack in ((UPLOAD,), (UPLOAD,), (Site("/job/train.py", 30, "main"),)):
        pauses.waits_for(replace(of[-1].ranks[0], user_stack=stack))
    f = only([f for f in findings(of[-1], straggler, pauses=pauses) if f.cause == "pauses"])
    assert f.where[0].line == 14 and "at train.py:14 in upload" in f.message


@pytest.mark.parametrize(("line", "part"), [("hits += net(x)", True), ("torch.save(net, path)", False)])
def test_a_pause_for_an_evaluation_is_shared_among_the_ranks(line: str, part: bool) -> None:
    of = snapshots({60: 9.0, 160: 9.0, 260: 9.0}, polls=40)
    pauses = followed(of)
    stack = tuple(Site("/job/train.py", n, f) for n, f in ((5, "forward"), (1, "evaluate"), (30, "main")))
    pauses.waits_for(replace(of[-1].ranks[0], user_stack=stack))
    f = only([f for f in findings(of[-1], straggler, pauses=pauses, source=lambda _: line) if f.cause == "pauses"])
    assert "at train.py:1 in evaluate" in f.message and [w.line for w in f.where] == [1, 30]
    assert f.advice.startswith("let every rank evaluate a part") is part


def test_full_collections_are_the_cause_if_they_are_most_of_the_cost() -> None:
    of = snapshots(dict.fromkeys(range(20, N, 40), 2.0), polls=40)
    collected = [
        replace(
            s,
            ranks={
                q: replace(x, gc_s=(s.t_s * (0.5 if q == 0 else 0.01)), gc_count=int(s.t_s)) for q, x in s.ranks.items()
            },
        )
        for s in of
    ]
    f = only([f for f in findings(collected[-1], straggler, pauses=followed(collected)) if f.kind == "straggler"])
    assert (f.cause, f.culprits) == ("gc", (0,)) and "gc.freeze()" in f.advice
    again = findings(collected[-1], straggler, pauses=followed(collected), reported=(f,))
    assert [x.key for x in again if x.kind == "straggler"] == [f.key], "what is reported is found again"


def test_a_warning_is_reported_once_by_the_engine() -> None:
    diagnosis = Diagnosis(source=lambda _: None)
    of = snapshots({60: 9.0, 160: 9.0, 260: 9.0}, polls=40)
    reported = list(itertools.chain(*(diagnosis.update(s) for s in of)))
    assert [f.cause for f in reported if f.kind == "straggler" and f.severity == "warning"] == ["pauses"]


def in_turn(
    share_gc: float, busy_pct: float, most: tuple[int, ...] = (9, 9, 9), line: int | None = None
) -> list[Finding]:
    """Return what is found of three ranks that pause for a second each, one after the other, every 20 steps; each at `most` so often.

    Args:
        line: At which all of them do; None: each at another.
    """
    pauses = Pauses()
    at = [range(60 + 20 * late, N, 60)[:n] for late, n in enumerate(most)]
    of = {late: snapshots(dict.fromkeys(steps, 1.0), polls=40, late=late) for late, steps in enumerate(at)}
    last = of[0][-1]
    for states in of.values():
        pauses_of = followed(states)
        pauses.of |= {q: lost for q, lost in pauses_of.of.items() if lost.times}
        pauses.begun_s, pauses.end_s, pauses.settled_s = pauses_of.begun_s, pauses_of.end_s, pauses_of.settled_s
    pauses.gc_before = dict.fromkeys(last.ranks, (0.0, 0.0, 0))
    ranks = {q: replace(r, gc_s=share_gc * last.t_s, gc_count=6) for q, r in last.ranks.items()}
    last = replace(last, ranks=ranks, host_cpu_pct=busy_pct)
    for q in last.ranks:
        pauses.of[q].stacks[(Site("/job/rollout.py", line or 50 + q, "play"),)] += 9
    return [f for f in findings(last, straggler, pauses=pauses) if f.cause in ("rotating", "gc", "pauses")]


def test_pauses_of_another_rank_each_time_are_summed() -> None:
    f = only(in_turn(share_gc=0.0, busy_pct=20.0))
    assert (f.cause, f.culprits, f.victims) == ("rotating", (), (0, 1, 2))
    assert "rank 0 6 times for 6.0 s, rank 1 6 times" in f.message and "in the same step" in (f.advice or "")
    assert only(in_turn(share_gc=0.0, busy_pct=20.0, most=(3, 2, 2))).culprits == (), "one has its turn first"
    each = in_turn(share_gc=0.0, busy_pct=100.0)
    assert [f.culprits for f in each] == [(0,), (1,), (2,)], "on a busy host ranks pause by chance at different times"


def test_ranks_that_pause_in_turn_at_one_line_have_unequal_work() -> None:
    for busy_pct, severity in ((100.0, "info"), (20.0, "warning")):
        f = only(in_turn(share_gc=0.0, busy_pct=busy_pct, line=38))
        assert (f.cause, f.culprits, f.severity) == ("rotating", (), severity)
        assert "all at rollout.py:38 in play" in f.message and "the same number of units per step" in str(f.advice)


@pytest.mark.parametrize(("share", "step", "severity"), [(0.4, 90, "warning"), (0.4, 40, "info"), (0.1, 90, None)])
@pytest.mark.parametrize("seen", [30, 2])
def test_collections_that_cost_all_ranks_much_are_found_with_their_line(
    share: float, step: int, severity: str | None, seen: int
) -> None:
    pauses = Pauses(gc_before=dict.fromkeys(range(2), (0.0, 1.0, 4)), begun_s=0.0)
    tidy, loop = Site("/job/tidy.py", 3, "tidy"), Site("/job/train.py", 30, "main")
    sites = {"init": ((loop, 90),), "other": ((tidy, seen), (loop, 20))}
    of = [rank(q, step=step, gc_s=1.0 + share * 100.0, gc_count=84, phase_sites=sites) for q in range(2)]
    text = {tidy.file: "import gc\ndef tidy():\n    gc.collect()\n"}
    found = findings(job(*of), straggler, pauses=pauses, source=text.get)
    assert [(f.cause, f.culprits, f.severity) for f in found] == [("gc", (), severity)] * (severity is not None)
    for f in found:
        assert (
            "take at least 40 % of the time of every rank: 80 collections of 0.5 s each since the warm-up" in f.message
        )
        assert ("tidy.py:3" in f.message, "call `gc.collect()` at few steps" in str(f.advice)) == (
            seen > 9, seen > 9
        )  # fmt: skip
    off = findings(job(*(replace(r, gc_off=True) for r in of)), straggler, pauses=pauses, source=text.get)
    assert all("or not at all" not in str(f.advice) for f in off), "nothing else collects"
    one = job(of[0], replace(of[1], gc_s=1.0, gc_count=4))
    assert findings(one, straggler, pauses=pauses) == [], "not of one rank only: that is late, or keeps nobody waiting"


def test_collections_that_make_one_rank_slow_have_no_second_finding_of_all() -> None:
    pauses = Pauses(gc_before=dict.fromkeys(range(2), (0.0, 1.0, 4)), begun_s=0.0)
    late = ((150.0, 0.0, 20.0), (0.0, 150.0, 80.0))
    of = [
        rank(q, step=90, steps=steps(own, "other", wait, seed=q), gc_s=1.0 + gc_s, gc_count=84)
        for q, (wait, own, gc_s) in enumerate(late)
    ]
    f = only(findings(job(*of), straggler, pauses=pauses))
    assert (f.cause, f.culprits, f.severity) == ("gc", (1,), "warning") and "20 % on the others" in f.message
    later = job(*(rank(q, step=90, gc_s=41.0, gc_count=84) for q in range(2)))
    assert findings(later, straggler, pauses=pauses, reported=(f,)) == [], "while it is reported"


def test_pauses_for_garbage_collection_in_turn_want_the_same_step() -> None:
    f = only(in_turn(share_gc=0.2, busy_pct=100.0))
    assert f.cause == "gc" and "full garbage collections took" in f.message
    assert "`gc.collect()` now and then, at the same step on all ranks" in (f.advice or "") and "gc.freeze()" in (
        f.advice or ""
    )
