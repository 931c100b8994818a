"""Rules beside the wait-for graph: each on a snapshot of a few ranks that has the fault, and on ones that look like it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from distdiag.diagnosis import batches, endings, parameters, resources, silent, speed, stalls
from distdiag.diagnosis.engine import Diagnosis
from distdiag.diagnosis.findings import Finding
from distdiag.diagnosis.graph import build
from distdiag.diagnosis.snapshot import (
    Arrival,
    Call,
    Group,
    Life,
    Loader,
    Met,
    Model,
    RankState,
    Sample,
    Site,
    Snapshot,
    Step,
)

LOOP = Site("/job/train.py", 40, "main")
MODEL = Model(
    group="default_pg", parameters=4, find_unused=False, forwards=100, synced_backwards=100, unused_checks=100
)


def rank(q: int, **more: Any) -> RankState:
    return RankState(**{"rank": q, "place": LOOP, "user_stack": (LOOP,), "step": 100, "models": (MODEL,), **more})


def job(*ranks: RankState, t_s: float = 100.0, **more: Any) -> Snapshot:
    world = len(ranks)
    group = Group(name="default_pg", ranks=tuple(range(world)), backend="gloo")
    return Snapshot(
        **{
            "t_s": t_s,
            "world_size": world,
            "ranks": {r.rank: r for r in ranks},
            "groups": {"default_pg": group},
            **more,
        }
    )


def only(found: list[Finding]) -> Finding:
    assert len(found) == 1, found
    return found[0]


# -- endings -----------------------------------------------------------------------------------------------

CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:59009"


def test_ranks_that_could_not_connect_blame_nobody() -> None:
    text = "RuntimeError: Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: Connection refused"
    crashed = rank(0, life=Life.CRASHED, exception=text, ended_s=9.0)
    s = job(crashed, rank(1, life=Life.KILLED, signal=15, ended_s=9.5))
    f = only(endings.rules(s))
    assert (f.kind, f.cause, f.culprits, f.victims) == ("rank_lost", "crashed", (), (0,))
    assert "connectFullMesh" in f.message and "SOCKET_IFNAME" in f.advice


def test_the_first_end_that_is_no_echo_is_the_cause() -> None:
    s = job(
        rank(0, life=Life.CRASHED, exception=CLOSED, ended_s=9.0),
        rank(1, life=Life.CRASHED, exception="IndexError: list index out of range", ended_s=9.1),
        rank(2, life=Life.KILLED, signal=15, ended_s=9.5),
    )
    f = only(endings.rules(s))
    assert (f.kind, f.cause, f.culprits, f.victims) == ("rank_lost", "crashed", (1,), (0, 2))
    assert "IndexError" in f.message


def test_the_same_error_on_all_ranks_blames_all_of_them() -> None:
    s = job(
        *(rank(q, life=Life.CRASHED, exception="NameError: name 'x' is not defined", ended_s=9.0) for q in range(3))
    )
    assert only(endings.rules(s)).culprits == (0, 1, 2)


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (11, "SIGSEGV")])
def test_a_killed_rank_is_lost_with_its_signal(number: int, name: str) -> None:
    s = job(
        rank(0, life=Life.KILLED, signal=number, ended_s=9.0), rank(1, life=Life.CRASHED, exception=CLOSED, ended_s=9.2)
    )
    f = only(endings.rules(s))
    assert (f.cause, f.culprits) == ("killed", (0,)) and name in f.message


@pytest.mark.parametrize("number", [2, 9, 15])
def test_a_job_ended_from_outside_has_no_finding(number: int) -> None:
    s = job(*(rank(q, life=Life.KILLED, signal=number, ended_s=9.0 + q / 10) for q in range(3)))
    assert endings.rules(s) == []


def test_a_rank_that_finished_while_others_went_on_is_the_cause_of_their_errors() -> None:
    s = job(
        rank(0, life=Life.FINISHED, ended_s=8.0, step=48),
        rank(
            1,
            life=Life.CRASHED,
            exception=CLOSED,
            ended_s=9.0,
            enqueued={"default_pg": 60},
            completed={"default_pg": 59},
        ),
    )
    f = only(endings.rules(s))
    assert (f.kind, f.cause, f.culprits, f.victims) == ("deadlock", "rank_finished", (0,), (1,))


def test_a_timeout_names_the_late_rank() -> None:
    text = "RuntimeError: Timed out waiting 6000ms for recv operation to complete (gloo)"
    waiting = Call(op="all_reduce", group="default_pg", seq=7, entered_s=3.0, failed=True)
    s = job(
        rank(0, life=Life.CRASHED, exception=text, ended_s=9.0, calls=(waiting,), enqueued={"default_pg": 7}),
        rank(1, enqueued={"default_pg": 6}),
    )
    f = only(endings.rules(s))
    assert (f.kind, f.cause, f.culprits, f.victims) == ("timeout", "late_rank", (1,), (0,))


def test_a_timeout_of_the_users_own_is_a_crash() -> None:
    s = job(rank(0, life=Life.CRASHED, exception="TimeoutError: dataset server timed out", ended_s=9.0), rank(1))
    assert only(endings.rules(s)).kind == "rank_lost"


@pytest.mark.parametrize(("log", "culprits"), [((61, 121, 181), (1,)), ((61, 121, 170), (0,)), ((1, 50, 121, 170), ())])
def test_two_places_in_an_abort_of_gloo_and_who_is_out_of_rhythm(
    log: tuple[int, ...], culprits: tuple[int, ...]
) -> None:
    """Rank 0 was in a call that both know, rank 1 in the next backward: was it due, or too early?"""
    call = Call(op="all_reduce", group="default_pg", seq=log[-1], site=Site("/job/train.py", 8, "log"), shape=(4,))
    before = {"default_pg": {"/job/train.py:8": log[:-1]}}
    sites = {"/job/train.py:8": 3, f"{LOOP.file}:{LOOP.line}": 170}
    s = job(
        rank(0, life=Life.KILLED, signal=6, ended_s=40.0, ended_waiting=True, place=call.site, calls=(call,), sites=sites,
             visits={"default_pg": {"/job/train.py:8": log}}),
        rank(1, life=Life.CRASHED, exception="RuntimeError: Connection reset by peer", ended_s=40.1, place=LOOP, sites=sites,
             visits=before),
    )  # fmt: skip
    s = msgspec.structs.replace(s, groups={"default_pg": Group(name="default_pg", ranks=(0, 1), backend="gloo")})
    f = only(endings.rules(s))
    assert (f.kind, f.cause, f.culprits) == ("mismatch", "shape", culprits)
    assert ("collectives" in f.message) == bool(culprits)


# -- stalls ------------------------------------------------------------------------------------------------


def waits_for_rank_one(since_s: float, t_s: float, **late: Any) -> Snapshot:
    blocked = Call(op="all_reduce", group="default_pg", seq=7, entered_s=since_s)
    return job(
        rank(0, blocked=blocked, enqueued={"default_pg": 7}, activity="waiting"),
        rank(1, enqueued={"default_pg": 6}, **late),
        t_s=t_s,
    )


@pytest.mark.parametrize(
    ("activity", "waited_s", "said"),
    [
        ("user_code", 4.0, False),
        ("user_code", 21.0, True),
        ("stdin", 6.0, True),
        ("checkpoint", 30.0, False),
        ("data", 13.0, True),
    ],
)
def test_patience_depends_on_what_the_late_rank_does(activity: str, waited_s: float, said: bool) -> None:
    s = waits_for_rank_one(100.0 - waited_s, 100.0, activity=activity)
    assert bool(stalls.rules(s, build(s))) is said


def test_a_rank_that_has_been_late_before_and_came_is_given_more_time() -> None:
    s = waits_for_rank_one(75.0, 100.0, activity="user_code", longest_usual_s=15.0)
    assert stalls.rules(s, build(s)) == []


def test_a_file_lock_held_by_the_waiting_rank_is_a_deadlock() -> None:
    s = waits_for_rank_one(99.0, 100.0, activity="lock", holds_up=(0,))
    f = only(stalls.lock_cycles(s, build(s)))
    assert (f.kind, f.certainty, f.victims) == ("deadlock", "proved", (0, 1))


# -- batches -----------------------------------------------------------------------------------------------

PLAIN = "def main():\n    for x, y in loader:\n        step(x, y)\n"


def loader(**more: Any) -> Loader:
    site = Site("/job/train.py", 2, "main")
    return Loader(**{"site": site, "length": 100, "in_training": True, "iterations_started": 1, "batches": 3, **more})


def uneven(source: str, **second: Any) -> list[Finding]:
    s = job(rank(0, loaders=(loader(),)), rank(1, loaders=(loader(length=90),), **second))
    return [f for f in batches.rules(s, lambda _: source) if f.cause == "count"]


def test_lengths_that_cannot_agree_are_said_before_the_hang() -> None:
    f = only(uneven(PLAIN))
    assert (f.culprits, f.victims, f.severity) == ((1,), (0,), "error")


@pytest.mark.parametrize(
    "source",
    [
        "def main():\n    for x, y in loader:\n        if step(x, y):\n            break\n",
        "def main():\n    for x, y in islice(loader, 50):\n        step(x, y)\n",
        "def main():\n    for i, b in zip(range(50), loader):\n        step(b)\n",
        "def main():\n    for x, y in loader:\n        try:\n            return step(x)\n        finally:\n            pass\n",
        "not python at all (",
    ],
)
def test_a_loop_that_may_end_early_is_not_judged(source: str) -> None:
    assert uneven(source) == []


def test_a_break_of_an_inner_loop_does_not_end_the_outer_one() -> None:
    assert uneven("def main():\n    for x, y in loader:\n        for _ in range(3):\n            break\n")


def test_join_makes_uneven_inputs_legal() -> None:
    assert uneven(PLAIN, in_join=True) == []


def prints(seed: int) -> tuple[int, ...]:
    r = random.Random(seed)
    return tuple(r.getrandbits(64) | 1 << 40 | 1 for _ in range(6))


def duplicates(a: Loader, b: Loader) -> list[Finding]:
    return [
        f
        for f in batches.rules(job(rank(0, loaders=(a,)), rank(1, loaders=(b,))), lambda _: PLAIN)
        if f.kind == "duplicate_data"
    ]


def test_the_same_batches_on_two_ranks_are_said() -> None:
    f = only(duplicates(loader(first_fingerprints=prints(1)), loader(first_fingerprints=prints(1))))
    assert f.cause == "same_batches_on_ranks" and f.victims == (0, 1)
    assert duplicates(loader(first_fingerprints=prints(1)), loader(first_fingerprints=prints(2))) == []


def test_a_forgotten_set_epoch_is_said_only_where_shuffling_was_wanted() -> None:
    def again(seed: int, shuffle: bool) -> Loader:
        return loader(
            distributed_sampler=True, shuffle=shuffle, iterations_started=2, first_fingerprints=prints(seed),
            previous_fingerprints=prints(seed), sampler_epoch=0,
        )  # fmt: skip

    assert only(duplicates(again(1, True), again(2, True))).cause == "same_order_every_epoch"
    assert duplicates(again(1, False), again(2, False)) == []


# -- parameters --------------------------------------------------------------------------------------------


def test_unused_parameters_are_named_and_are_errors_only_where_ddp_will_refuse() -> None:
    unused = msgspec.structs.replace(
        MODEL, unused=(("head.weight", 40), ("head.bias", 4)), unused_hits=3, unused_step=9
    )
    f = only(
        [
            f
            for f in parameters.rules(job(rank(0, models=(unused,)), rank(1, models=(unused,))))
            if f.kind == "unused_parameters"
        ]
    )
    assert (f.cause, f.severity, f.names) == ("never_used", "error", ("head.weight", "head.bias"))


@pytest.mark.parametrize(
    ("never", "looks", "of_library", "severity"),
    [
        ((("head.weight", 40),), 120, False, "warning"),
        ((("head.weight", 40),), 120, True, "info"),  # the script did not choose the flag, nor may it know the model
        ((("head.weight", 40),), 50, False, "info"),
        ((("head.weight", 40),), 10, False, None),
        ((), 120, False, None),  # every parameter is used now and then: what the flag is for
    ],
)
def test_expected_unused_parameters_are_said_if_they_are_never_used(
    never: tuple[tuple[str, int], ...], looks: int, of_library: bool, severity: str | None
) -> None:
    m = msgspec.structs.replace(
        MODEL, find_unused=True, flag_of_library=of_library, unused=(("head.weight", 40), ("body.bias", 4)),
        unused_hits=3, unused_step=9, unused_checks=looks, never_trained=never,
    )  # fmt: skip
    other = msgspec.structs.replace(
        m, unused=(("body.weight", 9), ("head.weight", 40))
    )  # another branch at its last look
    found = [
        f
        for f in parameters.rules(job(rank(0, models=(m,)), rank(1, models=(other,))))
        if f.kind == "unused_parameters"
    ]
    if severity is None:
        assert found == []
    else:
        f = only(found)
        assert (f.cause, f.severity, f.names) == ("never_used", severity, ("head.weight",))
        assert f"at any of {looks} looks" in f.message


def drifting(
    values: Callable[[int, int], float],
    reduced: float | None = None,
    averaged: float | None = None,
    synced: Callable[[int, int], int] = lambda q, k: 0,
    **more: Any,
) -> list[Finding]:
    def samples(q: int) -> tuple[Sample, ...]:
        shares = () if reduced is None else tuple(Sample("reduced", k, reduced) for k in (2, 4, 8, 16))
        shares += () if averaged is None else (Sample("averaged", 8, averaged),)
        return (*(Sample("parameters", k, values(q, k), key=5 | synced(q, k) << 32) for k in (2, 4, 8, 16)), *shares)

    ranks = [rank(q, samples=samples(q), **more) for q in range(3)]
    return [f for f in parameters.rules(job(*ranks)) if f.kind == "replica_drift"]


def test_replicas_that_agree_have_no_finding_and_those_that_do_not_have_one() -> None:
    assert drifting(lambda q, k: 1.0 + k) == []
    assert drifting(lambda q, k: 1.0 + k + 1e-9 * q) == []
    f = only(drifting(lambda q, k: 1.0 + k + 0.1 * q * k))
    assert f.cause == "gradients_not_synced" and f.step == 2
    assert only(drifting(lambda q, k: 1.0 + (0.5 if q == 2 else 0.0))).culprits == (2,)


def test_replicas_averaged_now_and_then_may_differ_between() -> None:
    assert drifting(lambda q, k: 1.0 + 0.1 * q * k, averaged=1.0) == []
    assert drifting(lambda q, k: 1.0 + 0.1 * q * k, averaged=0.01) != []  # an accuracy was summed up, no parameters


def test_replicas_are_compared_at_the_same_point_of_the_job() -> None:
    def differ(q: int, k: int) -> float:
        return 1.0 + 0.1 * q * k

    assert drifting(differ, synced=lambda q, k: k) and drifting(differ, synced=lambda q, k: k + (q == 1))
    # each had trained something of its own before, for longer or shorter
    assert drifting(differ, synced=lambda q, k: k + 10 * q) == []


def test_models_without_averaging_may_differ() -> None:
    assert drifting(lambda q, k: float(q), models=()) == []


def test_only_models_averaged_by_hand_as_a_whole_can_have_begun_unlike() -> None:
    assert only(drifting(lambda q, k: float(q), 1.0, models=())).cause == "different_init"
    later = only(drifting(lambda q, k: float(q == 1 and k > 4), 1.0, models=()))  # alike at first: one skips a step
    assert (later.cause, later.culprits, later.step) == ("gradients_not_synced", (1,), 8)
    assert "does the same with" in later.message
    assert drifting(lambda q, k: float(q), 0.6, models=()) == []  # experts of a rank's own beside what is shared
    assert drifting(lambda q, k: float(q), 1.7, models=()) == []  # activations of a model split over the ranks


def test_the_rank_whose_loss_was_first_not_finite_is_named() -> None:
    s = job(
        rank(0, samples=(Sample("nonfinite_gradient", 12, float("nan")), Sample("nonfinite_loss", 13, float("nan")))),
        rank(1, samples=(Sample("nonfinite_loss", 12, float("inf"), site=LOOP),)),
    )
    f = only([f for f in parameters.rules(s) if f.kind == "nonfinite"])
    assert (f.cause, f.culprits, f.step) == ("loss", (1,), 12) and "inf" in f.message
    both = job(*(rank(q, samples=(Sample("nonfinite_loss", 12, float("nan")),)) for q in range(2)))
    f = only([f for f in parameters.rules(both) if f.kind == "nonfinite"])
    assert (f.culprits, f.victims) == ((), (0, 1))  # a collective in forward, or too high a rate: nobody was first


def test_a_trial_of_a_ranks_own_may_fail() -> None:
    """It is an error as soon as others have it, too: then what they train is one thing after all."""
    mine = rank(1, samples=(Sample("nonfinite_loss", 12, float("nan"), alone=True),))
    f = only([f for f in parameters.rules(job(rank(0), mine)) if f.kind == "nonfinite"])
    assert (f.severity, f.culprits) == ("info", (1,)) and "by itself" in f.message
    other = rank(0, samples=(Sample("nonfinite_loss", 20, float("nan")),))
    f = only([f for f in parameters.rules(job(other, mine)) if f.kind == "nonfinite"])
    assert (f.severity, f.culprits) == ("error", (1,))


# -- speed -------------------------------------------------------------------------------------------------


def steps(
    extra_ms: float = 0.0, phase: str = "forward", wait_ms: float = 0.0, seed: int = 0, n: int = 60
) -> tuple[Step, ...]:
    r = random.Random(seed)
    out = []
    for k in range(1, n + 1):
        parts = {"data": 2.0, "forward": 20.0, "backward": 40.0, "optimizer": 5.0, "other": 1.0}
        parts = {p: v * r.uniform(0.97, 1.03) for p, v in parts.items()}
        parts[phase] += extra_ms
        parts["backward"] += wait_ms
        ready = k * 0.1 + (sum(parts.values()) - wait_ms) / 1e3
        out.append(
            Step(k, k * 0.1 + 0.09, sum(parts.values()), parts["data"], parts["forward"], parts["backward"],
                 parts["optimizer"], wait_ms, parts["other"], ready, 8, 8, 1.0)
        )  # fmt: skip
    return tuple(out)


def stragglers(s: Snapshot) -> list[Finding]:
    return [f for f in speed.rules(s) if f.kind == "straggler"]


@pytest.mark.parametrize(
    ("phase", "cause"), [("data", "data"), ("optimizer", "optimizer"), ("other", "host"), ("backward", "backward")]
)
@pytest.mark.parametrize("world", [2, 4])
def test_the_rank_that_waits_least_is_the_straggler(phase: str, cause: str, world: int) -> None:
    late = world - 1
    ranks = [rank(q, steps=steps(wait_ms=80.0, seed=q)) for q in range(late)]
    ranks.append(rank(late, steps=steps(80.0, phase, seed=late)))
    f = only(stragglers(job(*ranks)))
    assert (f.cause, f.culprits) == (cause, (late,))


def test_ranks_alike_one_slow_step_and_a_slower_core_are_no_stragglers() -> None:
    assert stragglers(job(*(rank(q, steps=steps(seed=q)) for q in range(4)))) == []
    once = list(steps(seed=1))
    once[40] = msgspec.structs.replace(once[40], step_ms=900.0, forward_ms=850.0)
    assert stragglers(job(rank(0, steps=steps(wait_ms=3.0)), rank(1, steps=tuple(once)))) == []
    slower = [rank(0, steps=steps(wait_ms=6.0)), rank(1, steps=steps(6.0, "forward", seed=1))]
    assert stragglers(job(*slower, host_cpu_pct=100.0)) == []


def test_a_loader_whose_workers_get_no_cpu_is_no_fault_of_the_rank() -> None:
    def found(starved: float | None, cpu_pct: float, workers: int = 2) -> list[Finding]:
        loaders = (Loader(site=LOOP, workers=workers, in_training=True),)
        late = rank(1, steps=steps(80.0, "data", seed=1), workers_starved=starved, loaders=loaders)
        return stragglers(job(rank(0, steps=steps(wait_ms=80.0), loaders=loaders), late, host_cpu_pct=cpu_pct))

    assert only(found(0.02, 40.0)).culprits == (1,)  # a slow disk
    assert found(0.5, 40.0) == []
    assert found(0.02, 100.0) == []  # all loaders at their limit: the slowest makes all the waiting
    assert only(found(None, 100.0, workers=0)).culprits == (1,)


def sized(batch: int, scale: float, n: int = 60) -> tuple[Step, ...]:
    r = random.Random(batch)
    return tuple(msgspec.structs.replace(x, batch=batch, loss=scale * r.uniform(0.8, 1.2)) for x in steps(n=n))


def test_batches_of_different_sizes_are_legal_where_losses_are_weighed_by_them() -> None:
    def found(*ranks: tuple[int, float]) -> list[Finding]:
        states = (rank(q, steps=sized(batch, scale)) for q, (batch, scale) in enumerate(ranks))
        return [f for f in batches.rules(job(*states), lambda _: None) if f.cause == "size"]

    assert only(found((8, 1.0), (20, 1.0))).severity == "warning"
    assert found((8, 0.6), (12, 0.9), (20, 1.5)) == []  # sums over samples, divided by what all ranks have
    assert found((36, 0.02), (60, 0.05)) == []  # late in training, where losses scatter
    assert only(found((8, 1.5), (20, 0.6))).severity == "warning"  # the wrong way round
    assert only(found((8, -0.6), (20, -1.5))).severity == "warning"  # nothing is known of such losses


def test_the_same_steps_of_all_ranks_are_compared_whichever_each_has() -> None:
    every = steps(n=80)
    ahead, behind, gaps = every[10:75], every[:70], tuple(x for x in every if x.step != 30)[:70]
    whole = speed._window(job(rank(0, steps=ahead), rank(1, steps=behind)))
    assert whole is not None and [x.step for x in whole[0]] == [x.step for x in whole[1]] == list(range(21, 71))
    holes = speed._window(job(rank(0, steps=ahead), rank(1, steps=gaps)))
    assert holes is not None and [x.step for x in holes[0]] == [x.step for x in holes[1]]
    assert holes[0][-1].step == 71 and 30 not in [x.step for x in holes[0]] and len(holes[0]) == 50
    assert speed._window(job(rank(0, steps=every[60:]), rank(1, steps=every[:62]))) is None


@pytest.mark.parametrize("world", [2, 4, 100])
@pytest.mark.parametrize("turns", [True, False])
def test_ranks_that_are_slow_in_turns_are_no_single_straggler(world: int, turns: bool) -> None:
    r = random.Random(5)
    slow = [r.randrange(world if turns else 2) for _ in range(60)]  # else only ever one of the first two

    def of_rank(q: int) -> tuple[Step, ...]:
        own = steps(60.0, "data", seed=q)
        usual = steps(wait_ms=60.0, seed=q)
        return tuple(own[k] if slow[k] == q else usual[k] for k in range(60))

    found = stragglers(job(*(rank(q, steps=of_rank(q)) for q in range(world)), host_cpu_pct=40.0))
    if turns or world == 2:
        f = only(found)
        assert (f.cause, f.culprits, len(f.victims)) == ("rotating", (), world)
    else:
        assert [f for f in found if f.cause == "rotating"] == []


def arrivals(shared_ms: float, period_ms: float = 50.0, n: int = 60) -> tuple[Arrival, ...]:
    return tuple(
        Arrival("default_pg", k, "all_reduce", k * period_ms / 1e3, 1.0, k % 2, shared_ms + 1, shared_ms)
        for k in range(1, n + 1)
    )


def test_loops_without_an_optimizer_are_bound_by_what_all_ranks_wait() -> None:
    f = only(speed.rules(job(rank(0), rank(1), arrivals=arrivals(30.0))))
    assert (f.kind, f.severity, f.victims) == ("comm_bound", "info", (0, 1)) and "60 %" in f.message
    assert speed.rules(job(rank(0), rank(1), arrivals=arrivals(5.0))) == []
    assert speed.rules(job(rank(0), rank(1), arrivals=arrivals(5.0, period_ms=8.0))) == []  # half a second says little


def test_a_rank_on_a_shared_core_is_slower_in_everything_and_no_fault_of_the_job() -> None:
    def half_speed(s: tuple[Step, ...]) -> tuple[Step, ...]:
        names = ("forward_ms", "backward_ms", "optimizer_ms", "other_ms", "step_ms")
        return tuple(
            msgspec.structs.replace(x, **{n: 2 * getattr(x, n) for n in names}, ready_s=(x.ready_s or 0.0) + 0.07)
            for x in s
        )

    ranks = (rank(0, steps=steps(wait_ms=66.0)), rank(1, steps=half_speed(steps(seed=1))))
    assert stragglers(job(*ranks, host_cpu_pct=100.0)) == []
    assert only(stragglers(job(*ranks, host_cpu_pct=40.0))).culprits == (1,)  # nothing else runs there: a slow node


# -- the rest ----------------------------------------------------------------------------------------------


def test_growth_needs_steady_growth_after_the_first_steps() -> None:
    def grows(per_s: float, until: float = 1e9) -> Snapshot:
        points = tuple((float(t), int(4e8 + per_s * min(t, until))) for t in range(60))
        return job(
            rank(0, memory=points, warm_since_s=5.0),
            rank(1, memory=tuple((t, 400_000_000) for t, _ in points), warm_since_s=5.0),
        )

    f = only([f for f in resources.rules(grows(10e6)) if f.cause == "growth"])
    assert f.culprits == (0,)
    assert [f for f in resources.rules(grows(10e6, until=20)) if f.cause == "growth"] == []
    assert [f for f in resources.rules(grows(1e6)) if f.cause == "growth"] == []


def test_growth_of_a_device_and_when_it_will_be_full() -> None:
    def grows(per_s: float, seconds: int = 60) -> list[Finding]:
        points = tuple((float(t), int(4e9 + per_s * t)) for t in range(seconds))
        card = {"device_total_bytes": int(80e9), "warm_since_s": 5.0}
        ranks = (rank(0, device_memory=points, **card), rank(1, device_memory=((59.0, 4_000_000_000),), **card))
        return [f for f in resources.rules(job(*ranks)) if f.cause == "growth"]

    f = only(grows(100e6))  # 70.1 GB are left, at 100 MB/s
    assert f.culprits == (0,) and f.message.startswith("device memory of rank 0") and "full in 12 minutes" in f.message
    assert grows(1e6) == [] and grows(100e6, seconds=20) == []


def test_growth_of_a_host_says_how_long_it_has() -> None:
    """It is watched the longer, the more time there is: a replay buffer grows, too, until it is full."""

    def grows(per_s: float, seconds: int) -> list[Finding]:
        points = tuple((float(t), int(4e8 + per_s * t)) for t in range(seconds))
        ranks = [rank(q, memory=points, warm_since_s=5.0) for q in range(2)]
        return resources.rules(job(*ranks, host_available_bytes=int(144e9)))

    assert "full in 2 hours at this rate" in only(grows(10e6, 160)).message  # two ranks, 10 MB/s each
    assert grows(10e6, 100) == []
    assert "full in 12 minutes" in only(grows(100e6, 30)).message and grows(100e6, 10) == []


def test_imbalance_is_what_matters_on_this_host() -> None:
    def holds(more: float, host: float) -> list[tuple[int, ...]]:
        ranks = [
            rank(q, memory=tuple((float(t), int(4e8 + (q == 0) * more)) for t in range(30)), warm_since_s=5.0)
            for q in (0, 1)
        ]
        return [f.culprits for f in resources.rules(job(*ranks, host_memory_bytes=int(host))) if f.cause == "imbalance"]

    assert holds(1e9, host=24e9) == [(0,)]
    assert holds(0.3e9, host=24e9) == []  # what is left of a file that one rank read for all
    assert holds(1e9, host=500e9) == []


def test_a_collective_that_completed_with_different_types_is_said() -> None:
    def call(dtype: str, line: int) -> Call:
        return Call(
            op="all_reduce", group="default_pg", seq=3, dtype=dtype, shape=(4,), site=Site("/job/m.py", line, "f")
        )

    met = Met("default_pg", 3, "dtype", {0: call("float64", 5), 1: call("int64", 9), 2: call("float64", 5)})
    f = only(silent.rules(job(rank(0), rank(1), rank(2), met=(met,))))
    assert (f.kind, f.cause, f.culprits) == ("mismatch", "dtype", (1,)) and f.where[0].line == 9


# -- over time ---------------------------------------------------------------------------------------------


def test_a_stall_is_withdrawn_when_the_rank_comes_and_its_record_stays() -> None:
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
def test_a_stall_is_over_when_all_have_ended_well(life: str, open_still: int) -> None:
    d = Diagnosis(source=lambda _: None)
    for t in range(30):
        d.update(waits_for_rank_one(1.0, float(t), activity="user_code"))
    ended = job(
        *(rank(q, life=life, ended_s=30.0, signal=9 if life == Life.KILLED else None) for q in (0, 1)), t_s=30.1
    )
    d.update(ended, final=True)
    assert len([f for f in d.open() if f.kind == "stall"]) == open_still


def test_a_proof_needs_two_looks_and_is_kept_when_the_job_is_killed() -> None:
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
    assert d.update(stuck(6.0)) == []
    f = only(d.update(stuck(6.25)))
    assert f.kind in ("deadlock", "mismatch") and f.certainty == "proved" and f.culprits == (0,)
    assert d.state == "deadlocked"
    for t in (7.0, 8.0, 12.0):
        assert d.update(stuck(t, Life.KILLED, signal=9, ended_s=6.9)) == []
    assert only(d.findings) == f
