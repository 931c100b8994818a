"""straggler: which rank is late in a sustained share of steps, and which only looks like it."""

from __future__ import annotations

import random
import re
from typing import Any

import msgspec
import pytest

from distdiag.diagnosis import step_times
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Finding
from distdiag.diagnosis.model.snapshot import (
    Arrival,
    Call,
    Group,
    Loader,
    Model,
    RankState,
    Sample,
    Site,
    Snapshot,
    Step,
)
from distdiag.diagnosis.pauses import Pauses
from distdiag.diagnosis.rules import RULES, straggler, uneven_batches
from tests.diagnosis.made import CARD, GIB, LOOP, findings, job, loader, of_kind, only, rank, speeds, steps, stragglers


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


def test_a_rank_that_has_counted_more_steps_is_named_where_too_few_are_common() -> None:
    for n, more in ((22, ""), (60, "; rank 0 is 40 steps ahead of rank 1")):
        few = step_times.window(job(rank(0, step=n, steps=steps(n=n)), rank(1, step=20, steps=steps(n=20))))
        assert isinstance(few, Abstained) and few.reason == f"15 of 30 steps after the warm-up{more}"


def test_waits_within_the_optimizer_are_not_of_backward() -> None:
    """Each rank steps some parameters and sends them to the others, which wait for them there."""
    theirs = tuple(
        msgspec.structs.replace(x, backward_ms=x.backward_ms - 80.0, optimizer_wait_ms=80.0)
        for x in steps(wait_ms=80.0)
    )
    s = job(rank(0, steps=theirs), rank(1, steps=steps(80.0, "optimizer", seed=1)), host_cpu_pct=100.0)
    assert only(stragglers(s)).cause == "optimizer"


def test_an_excess_that_is_in_no_phase_is_not_compared_by_one() -> None:
    spread = ("forward", "backward", "optimizer")
    own = tuple(
        msgspec.structs.replace(
            x, step_ms=x.step_ms + 60.0, ready_s=(x.ready_s or 0.0) + 0.06,
            **{f"{p}_ms": getattr(x, f"{p}_ms") + 20.0 for p in spread},
        )
        for x in steps(seed=1)
    )  # fmt: skip
    ranks = rank(0, steps=steps(wait_ms=60.0), queued_share=0.1), rank(1, steps=own, queued_share=0.2)
    why = [x.reason for x in straggler.evaluate(Facts(job(*ranks, host_cpu_pct=100.0))) if isinstance(x, Abstained)]
    assert len(why) == 1 and "47 ms longer per step, only 7 ms of them in" in why[0]


@pytest.mark.parametrize(("theirs", "named"), [((), True), (("torch.profiler",), False)])
def test_a_profiler_that_is_on_in_the_slow_rank_only_is_named(theirs: tuple[str, ...], named: bool) -> None:
    ranks = [rank(q, steps=steps(wait_ms=80.0, seed=q), tools=theirs) for q in range(2)]
    ranks.append(rank(2, steps=steps(80.0, "backward", seed=2), tools=("torch.profiler",)))
    f = only(stragglers(job(*ranks)))
    assert ("torch.profiler is on there, and on no other rank" in f.message) is named
    assert ("schedule(" in f.advice) is named


@pytest.mark.parametrize(("same", "advice"), [(True, "the same code is fast"), (False, "not seen on the other ranks")])
def test_a_line_of_one_ranks_own_has_its_own_advice(same: bool, advice: str) -> None:
    hook, forward = Site("/job/stats.py", 45, "hook"), Site("/job/model.py", 17, "forward")
    sites = {"phase_sites": {"forward": ((hook if same else forward, 9),)}}
    ranks = [rank(q, steps=steps(wait_ms=80.0, seed=q), **sites) for q in range(2)]
    ranks.append(rank(2, steps=steps(80.0, "forward", seed=2), phase_sites={"forward": ((hook, 40),)}))
    assert advice in only(stragglers(job(*ranks))).advice


@pytest.mark.parametrize(("counts", "line"), [((60, 30, 10), 44), ((60, 4, 2), 40), ((40, 30, 30), 44)])
def test_a_slow_rank_is_at_the_line_at_which_it_takes_longer_than_the_others(
    counts: tuple[int, ...], line: int
) -> None:
    """All ranks are longest at line 40; only the slow one is longer at line 44 than they are."""
    at = [Site("/job/train.py", n, "main") for n in (40, 44, 48)]
    usual = {"phase_sites": {"other": ((at[0], 90), (at[1], 5), (at[2], 5))}}
    ranks = [rank(q, steps=plus(steps(wait_ms=80.0, seed=q), 50.0), **usual) for q in range(2)]
    own = {"phase_sites": {"other": tuple(zip(at, counts, strict=True))}}
    ranks.append(rank(2, steps=plus(steps(80.0, "other", seed=2), 50.0), **own))
    f = only(stragglers(job(*ranks)))
    assert f"at train.py:{line} in main" in f.message


def plus(of: tuple[Step, ...], other_ms: float) -> tuple[Step, ...]:
    """Return steps with so much more between them."""
    return tuple(msgspec.structs.replace(x, step_ms=x.step_ms + other_ms, other_ms=x.other_ms + other_ms) for x in of)


def test_a_line_of_one_ranks_own_is_named_with_the_condition_that_leads_to_it() -> None:
    draw, call, usual = Site("/job/log.py", 2, "draw"), Site("/job/log.py", 5, "main"), Site("/job/log.py", 6, "main")
    text = "def draw():\n  plot()\ndef main():\n  if rank == 2:\n    draw()\n  print(step)\n"
    ranks = [rank(q, steps=steps(wait_ms=80.0, seed=q), phase_sites={"other": ((usual, 9),)}) for q in range(2)]
    own = {"phase_sites": {"other": ((draw, 40),)}, "phase_stacks": {"other": (draw, call)}}
    ranks.append(rank(2, steps=steps(80.0, "other", seed=2), **own))
    f = only(findings(job(*ranks), straggler, source={"/job/log.py": text}.get))
    assert f.advice.startswith(
        "that line is not seen on the other ranks, and is under `if rank == 2` at log.py:4 in main; move"
    )


@pytest.mark.parametrize("theirs", [2, 5])
def test_a_line_that_only_an_exception_leads_to_says_to_look_for_that(theirs: int) -> None:
    """A rank tries its storage again; others may do so now and then."""
    wait, line = Site("/job/read.py", 5, "read"), Site("/job/read.py", theirs, "read")
    text = "def read():\n  try:\n    return get()\n  except ConnectionError:\n    sleep(1)\n"
    ranks = [rank(q, steps=steps(wait_ms=80.0, seed=q), phase_sites={"data": ((line, 9),)}) for q in range(2)]
    own = {"phase_sites": {"data": ((wait, 40),)}, "phase_stacks": {"data": (wait,)}}
    ranks.append(rank(2, steps=steps(80.0, "data", seed=2), **own))
    f = only(findings(job(*ranks), straggler, source={"/job/read.py": text}.get))
    assert f.advice.startswith(
        "that line is under `except ConnectionError` at read.py:4 in read: find out why rank 2 gets that"
    )


@pytest.mark.parametrize(
    ("elements", "advice"), [(64.0, "its batches are as large"), (None, "compare the input sizes")]
)
def test_input_sizes_that_are_known_to_be_equal_need_no_comparison(elements: float | None, advice: str) -> None:
    given = {"loaders": (loader(mean_elements=elements),)}
    ranks = [rank(q, steps=steps(wait_ms=80.0, seed=q), **given) for q in range(2)]
    ranks.append(rank(2, steps=steps(80.0, "forward", seed=2), **given))
    assert advice in only(stragglers(job(*ranks))).advice


@pytest.mark.parametrize(("own", "theirs", "named"), [(0.8, 0.0, True), (0.8, 0.7, False), (0.2, 0.0, False)])
def test_a_thread_that_takes_the_time_of_a_slow_rank_is_named(own: float, theirs: float, named: bool) -> None:
    line = Site("/job/metrics.py", 12, "flush")
    ranks = [rank(q, steps=steps(wait_ms=80.0, seed=q), thread_share=theirs) for q in range(2)]
    ranks.append(rank(2, steps=steps(80.0, "forward", seed=2), thread="flusher", thread_share=own, thread_site=line))
    f = only(stragglers(job(*ranks)))
    assert ("its thread 'flusher' computes 80 % of the time at metrics.py:12 in flush" in f.message) is named
    assert ("GIL" in f.advice) is named


def test_a_rank_that_a_thread_makes_slow_has_no_second_finding_of_a_phase() -> None:
    """Which thread it is shows in some polls only."""
    ranks = [rank(q, steps=steps(wait_ms=80.0, seed=q)) for q in range(2)]
    slow = steps(80.0, "forward", seed=2)
    with_thread = job(*ranks, rank(2, steps=slow, thread="flusher", thread_share=0.8))
    (known,) = findings(with_thread, straggler)
    assert [*straggler.evaluate(Facts(job(*ranks, rank(2, steps=slow)), reported=(known,)))] == []
    assert [f.cause for f in findings(with_thread, straggler, reported=(known,))] == ["host"]


@pytest.mark.parametrize(("share", "rare", "found"), [(0.2, False, True), (0.2, True, False), (0.05, False, False)])
def test_a_thread_that_makes_some_steps_much_longer_is_found_by_the_mean(share: float, rare: bool, found: bool) -> None:
    """On a busy host, on which the thread gets no third of a core, and the other rank is the slowest in as many steps."""
    line, r = Site("/job/metrics.py", 12, "flush"), random.Random(5)
    long = [r.random() < (0.05 if rare else 0.4) for _ in range(60)]

    def mixed(slow: tuple[Step, ...], usual: tuple[Step, ...]) -> tuple[Step, ...]:
        return tuple(a if is_long else b for a, b, is_long in zip(slow, usual, long, strict=True))

    own = mixed(steps(200.0, "backward", seed=1), steps(wait_ms=8.0, seed=1))
    theirs = mixed(steps(wait_ms=200.0), steps(8.0, "forward"))
    ranks = (
        rank(0, steps=theirs, cpu_pct=9.0, queued_share=0.1),
        rank(1, steps=own, cpu_pct=27.0, queued_share=0.6, thread="flusher", thread_share=share, thread_site=line),
    )
    f = stragglers(job(*ranks, host_cpu_pct=100.0))
    assert [(x.cause, x.culprits) for x in f] == [("host", (1,))] * found
    assert all("its thread 'flusher' computes 20 % of the time at metrics.py:12 in flush" in x.message for x in f)


@pytest.mark.parametrize(("longest", "more_ms"), [("forward", 50.0), ("backward", 50.0), ("backward", 80.0)])
def test_what_makes_both_passes_longer_is_one_finding_whichever_is_longest(longest: str, more_ms: float) -> None:
    ranks = [rank(q, steps=steps(wait_ms=30.0 + more_ms, seed=q)) for q in range(2)]
    other_ms = {"forward": {"backward_ms": 70.0}, "backward": {"forward_ms": 50.0}}[longest]
    slow = tuple(
        msgspec.structs.replace(x, step_ms=x.step_ms + 30.0, **other_ms) for x in steps(more_ms, longest, seed=2)
    )
    f = only(stragglers(job(*ranks, rank(2, steps=slow))))
    found = re.match(r"rank 2: (.*) takes (\d+) ms longer per step", f.message)
    assert found is not None
    both = more_ms == 50.0  # of 80 ms, most is one pass alone
    assert (f.cause, found[1]) == (("forward", "forward with backward") if both else ("backward", "backward"))
    assert int(found[2]) == pytest.approx(80.0, abs=2.0)


@pytest.mark.parametrize(
    ("phase", "elements", "named"),
    [("forward", 6e4, True), ("backward", 6e4, True), ("forward", 2.2e4, False), ("optimizer", 6e4, False)],
)
def test_inputs_that_are_larger_than_those_of_the_others_are_named(phase: str, elements: float, named: bool) -> None:
    ranks = [rank(q, steps=steps(wait_ms=80.0, seed=q), loaders=(loader(mean_elements=2e4),)) for q in range(2)]
    ranks.append(rank(2, steps=steps(80.0, phase, seed=2), loaders=(loader(mean_elements=elements),)))
    f = only(stragglers(job(*ranks)))
    assert (
        "its batches are 3.0 times as large: 60,000 elements on average, 20,000 on the others" in f.message
    ) is named
    assert ("bucket the samples by length" in f.advice) is named


@pytest.mark.parametrize(
    ("warm_since_s", "each_ms", "queued", "grows"),
    [
        (0.0, 0.2, 0.3, True),
        (0.0, 0.2, 0.6, False),
        (-9.0, 0.2, 0.0, False),
        (0.0, 0.0, 0.0, False),
        (0.0, -0.2, 0.0, False),
    ],
)
def test_steps_that_take_longer_with_time_are_said_to(
    warm_since_s: float, each_ms: float, queued: float, grows: bool
) -> None:
    """A hundred steps since then: 61 ms each on average, or 151 ms; the newest take 148 ms or more, in each `each_ms` more."""
    ranks = [rank(q, steps=steps(wait_ms=80.0, seed=q)) for q in range(2)]
    own = [msgspec.structs.replace(x, step_ms=x.step_ms + each_ms * x.step) for x in steps(80.0, "forward", seed=2)]
    ranks.append(rank(2, steps=tuple(own), step=120, warm_since_s=warm_since_s, queued_share=queued))
    f = only(stragglers(job(*ranks)))
    assert ("steps take longer with time: 157 ms now, 61 ms on average so far" in f.message) is grows
    assert ("hooks that are registered again" in f.advice) is grows


def test_a_rank_that_accumulates_more_batches_in_a_step_is_said_to() -> None:
    models = [Model(group="default_pg", forwards=n, synced_backwards=50) for n in (100, 100, 200)]
    ranks = [rank(q, steps=steps(wait_ms=80.0, seed=q), step=50, models=(models[q],)) for q in range(2)]
    ranks.append(rank(2, steps=steps(80.0, "other", seed=2), step=50, models=(models[2],)))
    f = only(stragglers(job(*ranks)))
    assert "it has made 4.0 forwards per step so far, the others 2.0" in f.message and "accumulate" in f.advice


@pytest.mark.parametrize(("theirs", "named"), [(0, True), (60, False)])
def test_memory_that_only_the_slow_rank_gains_is_told(theirs: int, named: bool) -> None:
    def memory(mib: int) -> tuple[tuple[float, int], ...]:
        return tuple((float(t), GIB + t * mib * 2**20 // 60) for t in range(61))

    ranks = [
        rank(q, steps=steps(wait_ms=80.0, seed=q), memory=memory(theirs), warm_since_s=0.5, step=60) for q in range(2)
    ]
    ranks.append(rank(2, steps=steps(80.0, "other", seed=2), memory=memory(180), warm_since_s=0.5, step=60))
    f = only(stragglers(job(*ranks)))
    assert ("its memory has grown by 177.0 MiB in 59 s, that of the others by 0 B" in f.message) is named
    assert ("what grows there from step to step" in f.advice) is named


def late_in_its_last_steps(q: int, n: int, factor: float) -> tuple[Step, ...]:
    """Return steps of `factor` times 68 ms, in whose last `n` rank 1 takes longer by more than half, and the others wait for it."""
    late = steps(40.0, "other", seed=q) if q == 1 else steps(wait_ms=40.0, seed=q)
    return tuple(
        msgspec.structs.replace(
            x,
            end_s=x.end_s * factor,
            **{name: factor * ms for name in x.__struct_fields__ if name.endswith("_ms") and (ms := getattr(x, name))},
        )
        for x in (*steps(seed=q)[:-n], *late[-n:])
    )


@pytest.mark.parametrize(
    ("world", "n", "factor", "found"),
    [
        (8, 10, 6.0, True),  # 4 s
        (8, 8, 150.0, True),  # not only after 30 steps: minutes
        (8, 10, 0.6, False),  # 0.4 s: it may be the machine
        (2, 20, 6.0, False),  # one of two ranks is slower by chance
    ],
)
def test_a_rank_that_became_slow_lately_is_named_after_seconds_if_steps_are_slow(
    world: int, n: int, factor: float, found: bool
) -> None:
    outcome = stragglers(job(*(rank(q, steps=late_in_its_last_steps(q, n, factor)) for q in range(world))))
    assert [f.culprits for f in outcome] == ([(1,)] if found else [])


def test_the_line_of_slow_code_is_not_from_before_the_first_step() -> None:
    index, logging = Site("/job/train.py", 8, "__init__"), Site("/job/train.py", 14, "epoch")
    seen = {"init": ((index, 26),), "other": ((logging, 5),)}
    late = rank(
        1, steps=steps(80.0, "other", seed=1), phase_sites=seen, phase_stacks={"init": (index,), "other": (logging,)}
    )
    f = only(stragglers(job(rank(0, steps=steps(wait_ms=80.0, seed=0)), late)))
    assert (f.cause, f.where[0].line) == ("host", 14)


@pytest.mark.parametrize("also", [False, True])
def test_the_advice_tells_code_that_all_ranks_run_from_code_of_one(also: bool) -> None:
    line = Site("/job/train.py", 14, "epoch")
    seen = {"phase_sites": {"other": ((line, 9),)}, "phase_stacks": {"other": (line,)}}
    late = rank(1, steps=steps(80.0, "other", seed=1), **seen)
    other = rank(0, steps=steps(wait_ms=80.0, seed=0), **(seen if also else {}))
    f = only(stragglers(job(other, late)))
    assert f.advice.startswith("the same code is fast on the other ranks: compare what rank 1 gets there") is also


def test_a_few_milliseconds_at_a_collective_call_of_a_busy_host_are_jitter() -> None:
    """All ranks make that call: what one of them spends there is the host's scheduling."""
    agree = Site("/job/train.py", 42, "agree")

    def found(extra_ms: float, line: Site, cpu_pct: float) -> list[Finding]:
        seen = {"phase_sites": {"other": ((line, 9),)}, "phase_stacks": {"other": (line,)}, "sites": {agree.key: 90}}
        late = rank(1, steps=steps(extra_ms, "other", seed=1), **seen)
        return stragglers(job(rank(0, steps=steps(wait_ms=extra_ms, seed=0)), late, host_cpu_pct=cpu_pct))

    assert found(9.0, agree, 99.0) == []
    assert only(found(9.0, LOOP, 99.0)).culprits == only(found(9.0, agree, 20.0)).culprits == (1,)
    assert only(found(60.0, agree, 99.0)).culprits == (1,), "the arguments of the call may be expensive"


def aligned_by_buffers(q: int, late_ms: float) -> tuple[Step, ...]:
    """Return steps of a DDP model with buffers: ranks wait for each other in the forward, and leave it together."""
    r = random.Random(q)
    return tuple(
        msgspec.structs.replace(
            x,
            step_ms=x.step_ms + 80.0 - late_ms,
            wait_ms=x.wait_ms + 80.0 - late_ms,
            forward_wait_ms=80.0 - late_ms,
            arrived_s=x.step * 0.2 + late_ms / 1e3,
            ready_s=x.step * 0.2 + 0.16 + r.uniform(0.0, 1e-3),
        )
        for x in steps(late_ms, "other", seed=q)
    )


def test_a_rank_that_is_late_for_the_buffers_of_the_forward_is_a_straggler() -> None:
    f = only(stragglers(job(rank(0, steps=aligned_by_buffers(0, 0.0)), rank(1, steps=aligned_by_buffers(1, 80.0)))))
    assert (f.cause, f.culprits) == ("host", (1,))


def every(period: int, extra_ms: float, q: int) -> tuple[Step, ...]:
    """Return steps of two ranks: rank 1 takes longer in every `period`-th step; the other waits for it."""
    return tuple(
        x
        if x.step % period
        else msgspec.structs.replace(
            x,
            step_ms=x.step_ms + extra_ms,
            wait_ms=0.0 if q else extra_ms,
            other_ms=x.other_ms + (extra_ms if q else 0.0),
            backward_ms=x.backward_ms + (0.0 if q else extra_ms),
        )
        for x in steps(seed=q)
    )


def test_a_rank_that_stalls_the_others_at_every_15th_step_is_reported_with_its_period() -> None:
    f = only(stragglers(job(*(rank(q, local_rank=q, steps=every(15, 900.0, q)) for q in (0, 1)))))
    assert (f.cause, f.culprits, f.severity) == ("host", (1,), "warning")
    assert "every 15th step" in f.message
    cheap = only(stragglers(job(*(rank(q, local_rank=q, steps=every(15, 80.0, q)) for q in (0, 1)))))
    assert cheap.severity == "info"
    first_of_its_node = only(stragglers(job(*(rank(q, node=q, steps=every(15, 900.0, q)) for q in (0, 1)))))
    assert first_of_its_node.severity == "warning", "what is lost is what counts, whoever saves"


def irregular(at: dict[int, tuple[int, ...]], extra_ms: float) -> list[tuple[Step, ...]]:
    """Steps of two ranks; `at`: in which steps each rank takes longer."""

    def one(q: int) -> tuple[Step, ...]:
        own, waits = (every(1, extra_ms, late) for late in (1, 0))
        return tuple(
            a if x.step in at.get(q, ()) else b if x.step in at.get(1 - q, ()) else x
            for x, a, b in zip(steps(seed=q), own, waits, strict=True)
        )

    return [one(0), one(1)]


@pytest.mark.parametrize("jitter", [0, 2])
def test_the_others_in_turn_are_not_slow_where_one_rank_is_at_regular_intervals(jitter: int) -> None:
    """Rank 0 writes images in every second step; which rank is the slowest of the others is chance. So is a short stall of rank 2."""
    late = [dict.fromkeys(range(2, 61, 2), 400.0), {}, dict.fromkeys((35, 51)[:jitter], 100.0)]
    for k in range(1, 61, 2):
        late[k % 4 // 2 + 1].setdefault(k, 20.0)

    def of_rank(q: int) -> tuple[Step, ...]:
        longest = {x.step: max(of.get(x.step, 0.0) for of in late) for x in steps()}
        return tuple(
            msgspec.structs.replace(
                x,
                step_ms=x.step_ms + longest[x.step],
                other_ms=x.other_ms + late[q].get(x.step, 0.0),
                wait_ms=longest[x.step] - late[q].get(x.step, 0.0),
            )
            for x in steps(seed=q)
        )

    f = only(stragglers(job(*(rank(q, steps=of_rank(q)) for q in range(3)), host_cpu_pct=99.0)))
    assert (f.cause, f.culprits) == ("host", (0,)) and "in every 2nd step" in f.message


@pytest.mark.parametrize(
    ("at", "extra_ms", "cpu_pct", "culprits"),
    [
        ({1: (12, 15, 24, 31, 40, 52, 53)}, 300.0, 40.0, [(1,)]),  # garbage collection, a cache that is written out
        ({1: (*range(12, 30), *range(38, 50))}, 150.0, 40.0, [(1,)]),  # a device that throttles for some seconds
        ({1: (*range(12, 30), *range(38, 50)), 0: (33,)}, 150.0, 40.0, []),
        ({1: (12, 15, 31, 52)}, 400.0, 40.0, []),  # too few to exclude chance
        ({1: (22, 24, 26)}, 400.0, 40.0, []),  # no period: in most of the window it was as fast as the other
        ({1: (12, 15, 24, 31, 40, 52)}, 60.0, 40.0, []),  # costs little
        ({1: (12, 15, 24, 31, 40, 52), 0: (20,)}, 300.0, 40.0, []),  # both ranks have such steps
        ({1: (12, 15, 24, 31, 40, 52, 53)}, 300.0, 100.0, []),  # no core is free
    ],
)
def test_a_rank_that_is_slow_in_some_steps(
    at: dict[int, tuple[int, ...]], extra_ms: float, cpu_pct: float, culprits: list[tuple[int, ...]]
) -> None:
    of_rank = irregular(at, extra_ms)
    found = stragglers(job(*(rank(q, local_rank=q, steps=of_rank[q]) for q in (0, 1)), host_cpu_pct=cpu_pct))
    assert [f.culprits for f in found] == culprits
    for f in found:
        assert (f.cause, f.severity) == ("host", "warning")
        assert f"ms longer in {len(at[1])} of the last 50 steps" in f.message and "wait" in f.cost


def test_a_rank_that_never_arrives_last_is_no_straggler() -> None:
    early = tuple(msgspec.structs.replace(x, arrived_s=x.step * 0.2) for x in aligned_by_buffers(1, 80.0))
    late = tuple(msgspec.structs.replace(x, arrived_s=x.step * 0.2 + 0.01) for x in aligned_by_buffers(0, 0.0))
    assert stragglers(job(rank(0, steps=late), rank(1, steps=early))) == []


def test_equal_ranks_one_slow_step_and_a_slower_core_are_no_stragglers() -> None:
    assert stragglers(job(*(rank(q, steps=steps(seed=q)) for q in range(4)))) == []
    once = list(steps(seed=1))
    once[40] = msgspec.structs.replace(once[40], step_ms=900.0, forward_ms=850.0)
    assert stragglers(job(rank(0, steps=steps(wait_ms=3.0)), rank(1, steps=tuple(once)))) == []
    slower = [rank(0, steps=steps(wait_ms=6.0)), rank(1, steps=steps(6.0, "forward", seed=1))]
    assert stragglers(job(*slower, host_cpu_pct=100.0)) == []


def node_of_two(slow: tuple[int, ...], world: int, *phases: str, **more: Any) -> list[Finding]:
    """Return ranks that are equally slow on average, alternately one more than the other."""
    r, phase = random.Random(7), dict(zip(slow, phases or ("data",) * len(slow), strict=True))
    extra = [{q: r.uniform(50.0, 70.0) for q in slow} for _ in range(60)]

    def of_rank(q: int) -> tuple[Step, ...]:
        usual = steps(seed=q)
        out = []
        for k, x in enumerate(usual):
            own, most = extra[k].get(q, 0.0), max(extra[k].values())
            assert x.ready_s is not None
            longer = {f"{p}_ms": getattr(x, f"{p}_ms") + own for p in [phase.get(q)] if p}
            longer["ready_s"] = x.ready_s + own / 1e3
            wait_ms = x.wait_ms + most - own
            out.append(
                msgspec.structs.replace(
                    x,
                    **{
                        **longer,
                        "step_ms": x.step_ms + most,
                        "wait_ms": wait_ms,
                        "backward_ms": x.backward_ms + most - own,
                    },
                )
            )
        return tuple(out)

    return stragglers(job(*(rank(q, steps=of_rank(q), **more) for q in range(world)), host_cpu_pct=40.0))


def test_several_slow_ranks_are_named_together() -> None:
    f = only(node_of_two((2, 3), 4))
    assert (f.cause, f.culprits, f.victims) == ("data", (2, 3), (0, 1)) and "ranks 2, 3: data takes up to " in f.message
    assert {w.rank for w in f.where} == {2, 3}
    assert only(node_of_two((0, 5, 6), 8)).culprits == (0, 5, 6)


@pytest.mark.parametrize(
    ("line", "rest", "found"),
    [
        (30, {}, True),
        (20, {}, False),
        (0, {}, False),
        (30, {"phase_sites": {}}, False),  # nothing is known of where it is
        (30, {"sites": {"/job/data.py:30 < /job/train.py:9": 60}}, False),  # it makes a collective call there
    ],
)
def test_a_majority_is_slow_only_where_it_runs_code_that_the_rest_leaves_out(
    line: int, rest: dict[str, Any], found: bool
) -> None:
    """One rank has a cache; else it may only have less to do. A rank is not slower than others that are as slow."""
    at, seen = Site("/job/data.py", line, "compute"), Site("/job/data.py", 20, "get")
    sites = {"phase_sites": {"data": ((at, 40),)}} if line else {}
    ranks = [rank(0, steps=steps(wait_ms=80.0), **{"phase_sites": {"data": ((seen, 9),)}, **rest})]
    ranks += [
        rank(1, steps=steps(70.0, "data", wait_ms=10.0, seed=1), **sites),
        rank(2, steps=steps(80.0, "data", seed=2), **sites),
    ]
    f = stragglers(job(*ranks, host_cpu_pct=40.0))
    assert [x.culprits for x in f] == [(1, 2)] * found
    assert all("that line is not seen on rank 0: see what lets rank 0 leave that work out" in x.advice for x in f)


def test_a_majority_pipeline_stages_and_different_phases_are_no_slow_node() -> None:
    assert [f.culprits for f in node_of_two((1, 2, 3), 4) if f.cause != "rotating"] == []
    assert node_of_two((2, 3), 4, p2p_issued={"send:1:0:default_pg": 9}) == []
    assert node_of_two((2, 3), 4, "data", "optimizer") == []


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "other", "data"])
def test_the_longest_pipeline_stage_is_info_and_its_slow_data_a_warning(phase: str) -> None:
    messages = [{"send:1:0:default_pg": 400}, {"recv:0:0:default_pg": 400}]
    ranks = [rank(0, steps=steps(wait_ms=80.0), p2p_issued=messages[0], models=())]
    ranks.append(rank(1, steps=steps(80.0, phase, seed=1), p2p_issued=messages[1], models=()))
    f = only(stragglers(job(*ranks)))
    assert f.culprits == (1,)
    assert (f.cause, f.severity) == (("data", "warning") if phase == "data" else ("stage", "info"))


@pytest.mark.parametrize(("extra_ms", "found"), [(200.0, True), (20.0, False)])
def test_a_longest_stage_need_not_arrive_last(extra_ms: float, found: bool) -> None:
    """All that it computes counts, in whichever phase; messages have no order of arrival that all ranks share."""

    def stage(q: int, times: tuple[Step, ...]) -> RankState:
        arrived = tuple(msgspec.structs.replace(x, arrived_s=x.step - q, ready_s=x.step - q) for x in times)
        return rank(q, steps=arrived, p2p_issued={"send:1:0:default_pg": 9}, models=())

    stages = [stage(q, steps(wait_ms=extra_ms, seed=q)) for q in (0, 1)]
    stages.append(stage(2, steps(extra_ms, "other", seed=2)))
    found_there = stragglers(job(*stages, host_cpu_pct=100.0))
    assert [(f.cause, f.severity, f.culprits) for f in found_there] == [("stage", "info", (2,))] * found
    assert all(
        "rank 2, the longest stage, works 268 ms of a step of 268 ms, ranks 0, 1 work 68" in f.message
        for f in found_there
    )


def test_a_loader_without_cpu_is_no_straggler() -> None:
    def found(
        starved: float | None, cpu_pct: float, workers: int = 2, busy: float = 0.9, others: float | None = 0.8
    ) -> list[Finding]:
        loaders = (Loader(site=LOOP, workers=workers, in_training=True),)
        late = rank(1, steps=steps(80.0, "data", seed=1), workers_starved=starved, workers_busy=busy, loaders=loaders)
        first = rank(0, steps=steps(wait_ms=80.0), workers_busy=others, loaders=loaders)
        return stragglers(job(first, late, host_cpu_pct=cpu_pct))

    assert only(found(0.02, 40.0)).culprits == (1,)  # a slow disk
    assert found(0.5, 40.0) == []
    assert found(0.02, 100.0) == []  # all loaders at their limit: the slowest causes all the waiting
    assert only(found(None, 100.0, workers=0)).culprits == (1,)
    assert only(found(None, 100.0, busy=0.05)).culprits == (1,)  # they sleep: no core would make them faster
    assert only(found(0.5, 100.0, busy=0.05)).culprits == (1,)
    assert only(found(0.5, 100.0, others=0.1)).culprits == (
        1,
    )  # the others' loaders have far less work for as many batches
    assert found(0.5, 100.0, others=None) == []


@pytest.mark.parametrize(("fetching", "culprits"), [(0.3, (1,)), (0.6, (1,)), (0.95, ()), (1.0, ()), (None, (1,))])
def test_equally_slow_loaders_are_no_straggler(fetching: float | None, culprits: tuple[int, ...]) -> None:
    """Storage gives each rank a batch in 80 ms. The rank that is slightly later finds its queue empty, the other finds it full."""

    def workers(share: float | None) -> tuple[Loader, ...]:
        return (Loader(site=LOOP, workers=2, in_training=True, fetching=share),)

    late = rank(1, steps=steps(80.0, "data", seed=1), workers_busy=0.05, loaders=workers(1.0))
    first = rank(0, steps=steps(wait_ms=80.0), workers_busy=0.05, loaders=workers(fetching))
    found = stragglers(job(first, late, host_cpu_pct=20.0))
    assert [f.culprits for f in found] == ([culprits] if culprits else [])
    if culprits:  # the speed of the others' loaders limits the gain of a faster one, and so does their wait
        at_most = re.search(
            r"loses (\d+) ms of a step of (\d+) ms \(medians of these steps\); .* would take at most (\d+) % less",
            found[0].cost,
        )
        assert (at_most is None) is (fetching is None)
        if at_most is not None and fetching is not None:
            waits_ms, step_ms, less = map(int, at_most.groups())
            assert less == pytest.approx(100 * min(1 - fetching, waits_ms / step_ms), abs=1)
    slow_everywhere = of_kind(speeds(job(first, late, host_cpu_pct=20.0)), "input_bound")
    assert bool(slow_everywhere) is ((fetching or 0.0) > 0.8)


def sized(batch: int, scale: float, n: int = 60) -> tuple[Step, ...]:
    r = random.Random(batch)
    return tuple(msgspec.structs.replace(x, batch=batch, loss=scale * r.uniform(0.8, 1.2)) for x in steps(n=n))


def test_different_batch_sizes_are_legal_if_losses_are_weighted_by_them() -> None:
    def found(*ranks: tuple[int, float]) -> list[Finding]:
        states = (rank(q, steps=sized(batch, scale)) for q, (batch, scale) in enumerate(ranks))
        return [f for f in findings(job(*states), uneven_batches) if f.cause == "size"]

    assert only(found((8, 1.0), (20, 1.0))).severity == "warning"
    assert found((8, 0.6), (12, 0.9), (20, 1.5)) == []  # sums over samples, divided by the samples of all ranks
    assert found((36, 0.02), (60, 0.05)) == []  # late in training, where losses scatter
    assert only(found((8, 1.5), (20, 0.6))).severity == "warning"  # inverse proportion
    assert only(found((8, -0.6), (20, -1.5))).severity == "warning"  # negative losses show nothing


def compared(*of_ranks: tuple[Step, ...]) -> dict[int, list[Step]]:
    window = step_times.window(job(*(rank(q, steps=x) for q, x in enumerate(of_ranks))))
    assert isinstance(window, step_times.Window)
    return window.steps


def test_only_steps_that_all_ranks_have_are_compared() -> None:
    every = steps(n=80)
    ahead, behind, gaps = every[10:75], every[:70], tuple(x for x in every if x.step != 30)[:70]
    whole = compared(ahead, behind)
    assert [x.step for x in whole[0]] == [x.step for x in whole[1]] == list(range(21, 71))
    holes = compared(ahead, gaps)
    assert [x.step for x in holes[0]] == [x.step for x in holes[1]]
    assert holes[0][-1].step == 71 and 30 not in [x.step for x in holes[0]] and len(holes[0]) == 50
    few = step_times.window(job(rank(0, steps=every[60:]), rank(1, steps=every[:62])))
    assert isinstance(few, Abstained) and "2 of 30 steps" in few.reason
    roles = job(rank(0, steps=every), rank(1, steps=every), rank(2, step=0))
    found = step_times.window(roles)
    assert isinstance(found, Abstained) and found.reason == "only ranks 0, 1 make optimizer steps"


@pytest.mark.parametrize("world", [2, 4, 100])
@pytest.mark.parametrize("turns", [True, False])
def test_ranks_that_are_slow_in_turns_are_rotating(world: int, turns: bool) -> None:
    r = random.Random(5)
    slow = [r.randrange(world if turns else 2) for _ in range(60)]  # otherwise always one of the first two

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


@pytest.mark.parametrize(
    ("lines", "cpu_pct", "lasting", "cause", "advice"),
    [
        ((23, 23, 23), 5.0, 12, "rotating", "a lock across processes"),
        ((23, 23, 23), 90.0, 12, "rotating", "what makes its work differ from step to step"),
        ((23, 24, 24), 5.0, 12, "rotating", "look for work of varying length"),
        ((23, 24, 24), 5.0, 1, "rotating", "look for work of varying length"),
    ],
)
def test_ranks_that_are_slow_in_turns_at_one_line_share_something(
    lines: tuple[int, ...], cpu_pct: float, lasting: int, cause: str, advice: str
) -> None:
    """By chance one of them is the slowest in the last steps."""
    slow = [k % 3 for k in range(60 - lasting)] + [0] * lasting
    ranks = []
    for q, line in enumerate(lines):
        own, usual, at = (
            steps(300.0, "other", seed=q),
            steps(wait_ms=300.0, seed=q),
            Site("/job/log.py", line, "scalar"),
        )
        of_rank = tuple(own[k] if slow[k] == q else usual[k] for k in range(60))
        sites = {"phase_sites": {"other": ((at, 30),)}, "phase_stacks": {"other": (at,)}}
        ranks.append(rank(q, steps=of_rank, cpu_pct=cpu_pct, queued_share=0.0, **sites))
    f = only(stragglers(job(*ranks, host_cpu_pct=40.0)))
    assert f.cause == cause and advice in f.advice


def routed(shares: tuple[int, ...], n: int = 20) -> list[tuple[Call, ...]]:
    """Return the calls of ranks that receive these elements in an all_to_all of tokens, after one of their numbers."""
    at = [Site("/job/moe.py", line, "dispatch") for line in (50, 52)]
    return [
        tuple(
            Call(op="all_to_all_single", group="default_pg", seq=2 * k + i, received=received, site=at[i])
            for k in range(n)
            for i, received in enumerate((3, elements))
        )
        for elements in shares
    ]


@pytest.mark.parametrize(
    ("shares", "culprits", "times"),
    [((100, 1200, 1400), (1, 2), "1.3"), ((900, 900, 900), (), ""), ((500, 500, 1700), (), "")],
)
def test_most_ranks_are_slow_if_they_receive_more_than_the_few_others(
    shares: tuple[int, ...], culprits: tuple[int, ...], times: str
) -> None:
    """A router sends most tokens to the experts of two ranks; they compute at a line that the third passes quickly."""
    sites = {"phase_sites": {"other": ((Site("/job/moe.py", 53, "forward"), 30),)}}
    calls = routed(shares)
    ranks = [rank(0, steps=steps(wait_ms=80.0), calls=calls[0])]
    ranks += [
        rank(q, steps=steps(70.0 + 10 * (q - 1), "other", wait_ms=10.0 * (2 - q), seed=q), calls=calls[q], **sites)
        for q in (1, 2)
    ]
    found = [f for f in stragglers(job(*ranks, host_cpu_pct=40.0)) if f.cause == "host"]
    assert [f.culprits for f in found] == [culprits] * bool(culprits)
    for f in found:
        assert (
            f"in all_to_all_single at moe.py:52 in dispatch, they receive at least {times} times an even share"
            in f.message
        )
        assert "load-balancing loss" in f.advice


@pytest.mark.parametrize(
    ("phase", "queued_share", "starved", "found"),
    [
        ("backward", 0.02, None, True),
        ("backward", 0.4, None, False),
        ("backward", (0.8, 0.0, 0.0), None, False),  # the others have just waited for it: they queued before
        ("other", 0.4, None, True),  # what sleeps between steps needs no CPU
        ("data", 0.4, None, False),
        ("data", 0.4, 0.02, True),
        ("data", 0.4, 0.7, False),  # the workers of a loader wait for a CPU, too
    ],
)
def test_ranks_that_compute_and_wait_for_a_cpu_in_turns_are_not_rotating(
    phase: str, queued_share: float | tuple[float, ...], starved: float | None, found: bool
) -> None:
    r = random.Random(5)
    slow = [r.randrange(3) for _ in range(60)]

    def of_rank(q: int) -> tuple[Step, ...]:
        own, usual = steps(120.0, phase, seed=q), steps(wait_ms=120.0, seed=q)
        return tuple(own[k] if slow[k] == q else usual[k] for k in range(60))

    queued = queued_share if isinstance(queued_share, tuple) else (queued_share,) * 3
    ranks = (rank(q, steps=of_rank(q), queued_share=queued[q], workers_starved=starved) for q in range(3))
    assert bool(stragglers(job(*ranks, host_cpu_pct=99.0))) is found


@pytest.mark.parametrize(
    ("same_line", "queued_share", "cpu_pct", "found"),
    [(True, 0.25, 99.0, False), (False, 0.25, 99.0, True), (True, 0.02, 99.0, True), (True, 0.25, 40.0, True)],
)
def test_a_rank_that_lacks_a_cpu_where_all_run_the_same_line_is_not_accused(
    same_line: bool, queued_share: float, cpu_pct: float, found: bool
) -> None:
    """It works 43 ms longer and waits 37 ms for a CPU, on a busy host."""
    line, other = Site("/job/train.py", 101, "average"), Site("/job/train.py", 50, "log")
    first = rank(0, steps=steps(wait_ms=80.0), queued_share=0.0, phase_sites={"other": ((line, 9),)})
    there = {"other": ((line if same_line else other, 9),)}
    late = rank(1, steps=steps(80.0, "other", seed=1), queued_share=queued_share, phase_sites=there)
    assert bool(stragglers(job(first, late, host_cpu_pct=cpu_pct))) is found


@pytest.mark.parametrize(
    ("extra_ms", "largest", "severity"),
    [
        (60.0, "slowest", "warning"),
        (25.0, "slowest", "info"),
        (25.0, "same", None),
        (25.0, "other", None),
        (10.0, "slowest", None),
    ],
)
def test_batches_that_differ_in_size_explain_who_is_slowest(
    extra_ms: float, largest: str, severity: str | None
) -> None:
    """On a host with no core to spare: as sizes explain it, no load does."""
    r = random.Random(5)
    slow = [r.randrange(3) for _ in range(60)]

    def of_rank(q: int) -> tuple[Step, ...]:
        own, usual = steps(extra_ms, "backward", seed=q), steps(wait_ms=extra_ms, seed=q)
        large = {"slowest": q, "same": -1, "other": (q + 1) % 3}[largest]
        mine = (own[k] if slow[k] == q else usual[k] for k in range(60))
        return tuple(
            msgspec.structs.replace(x, elements=9000 if slow[k] == large else 4000) for k, x in enumerate(mine)
        )

    ranks = (rank(q, steps=of_rank(q), queued_share=0.3) for q in range(3))
    found = stragglers(job(*ranks, host_cpu_pct=99.0))
    if severity is None:
        assert found == []
        return
    f = only(found)
    assert (f.cause, f.severity) == ("rotating", severity)
    assert "in 50 of these the slowest has the largest batch, 2.2 times the others'" in f.message
    assert "bucket the samples by length" in f.advice


def test_ranks_that_are_slow_in_turn_stay_reported_while_much_of_it_lasts() -> None:
    def found(extra_ms: float, *reported: Finding) -> list[Finding]:
        ranks = [
            rank(q, steps=tuple((own if k % 3 == q else usual)[k] for k in range(60)))
            for q in range(3)
            for own, usual in [(steps(extra_ms, "backward", seed=q), steps(wait_ms=extra_ms, seed=q))]
        ]
        return of_kind(findings(job(*ranks, host_cpu_pct=40.0), straggler, reported=reported), "straggler")

    first = only(found(90.0))
    assert first.cause == "rotating"
    assert found(35.0) == [] and only(found(35.0, first)).severity == "warning" and found(8.0, first) == []


def test_ranks_that_do_not_wait_for_each_other_in_most_steps_are_not_rotating() -> None:
    """Local SGD: they average their models now and then."""
    r = random.Random(5)
    slow = [r.randrange(3) for _ in range(60)]

    def of_rank(q: int) -> tuple[Step, ...]:
        own, usual = steps(60.0, "data", seed=q), steps(seed=q)
        return tuple(own[k] if slow[k] == q else usual[k] for k in range(60))

    found = stragglers(job(*(rank(q, steps=of_rank(q)) for q in range(3)), host_cpu_pct=40.0))
    assert [f for f in found if f.cause == "rotating"] == []


def test_a_rank_on_a_shared_core_is_no_straggler() -> None:
    def half_speed(s: tuple[Step, ...]) -> tuple[Step, ...]:
        names = ("forward_ms", "backward_ms", "optimizer_ms", "other_ms", "step_ms")
        return tuple(
            msgspec.structs.replace(x, **{n: 2 * getattr(x, n) for n in names}, ready_s=(x.ready_s or 0.0) + 0.07)
            for x in s
        )

    ranks = (rank(0, steps=steps(wait_ms=66.0)), rank(1, steps=half_speed(steps(seed=1))))
    assert stragglers(job(*ranks, host_cpu_pct=100.0)) == []
    assert only(stragglers(job(*ranks, host_cpu_pct=40.0))).culprits == (1,)  # no other load: a slow node


@pytest.mark.parametrize(("own", "found"), [((950,), True), ((950, 270), False), ((300,), False), ((0,), False)])
def test_batches_that_are_always_much_larger_need_no_lack_of_cpus_to_be_slow(own: tuple[int, ...], found: bool) -> None:
    """All phases take longer, as on a slower core, and it waits for a CPU for much of that: the host's cores are all in use."""

    def sized(q: int, factor: float, wait_ms: float, elements: tuple[int, ...], **clocks: float) -> RankState:
        names = ("forward_ms", "backward_ms", "optimizer_ms", "other_ms", "step_ms")
        mine = tuple(
            msgspec.structs.replace(
                x, **{n: factor * getattr(x, n) for n in names}, elements=elements[k % len(elements)],
                ready_s=(x.ready_s or 0.0) + 0.07 * (factor - 1),
            )
            for k, x in enumerate(steps(wait_ms=wait_ms, seed=q))
        )  # fmt: skip
        return rank(q, steps=mine, **clocks)

    ranks = [sized(q, 1.0, 66.0, (270,), queued_share=0.4, cpu_pct=18.0) for q in range(2)]
    ranks.append(sized(2, 2.0, 0.0, own, queued_share=0.7, cpu_pct=19.0))
    assert [f.culprits for f in stragglers(job(*ranks, host_cpu_pct=100.0))] == [(2,)] * found


def test_time_without_a_cpu_is_not_the_ranks_own_work() -> None:
    """On a host whose cores are shared with other work; on one with spare cores the rank is slow for its own reasons."""

    def found(queued: float | None, cpu_pct: float = 100.0, extra_ms: float = 80.0) -> list[Finding]:
        first = rank(0, steps=steps(wait_ms=extra_ms), queued_share=0.02)
        late = rank(1, steps=steps(extra_ms, "backward", seed=1), queued_share=queued)
        return stragglers(job(first, late, host_cpu_pct=cpu_pct))

    for none in (found(0.5), found(0.45)):
        assert none == []
    for one in (found(0.02), found(None), found(0.5, 40.0), found(0.2, extra_ms=200.0)):
        assert (only(one).culprits, only(one).cause) == ((1,), "backward")
    lacking = only(found(0.2, extra_ms=200.0)).message
    assert re.search(
        r"(\d+) ms longer per step than on the others \((\d+) ms of them without a CPU\), slowest", lacking
    )
    assert "without a CPU" not in only(found(0.5, 40.0)).message


@pytest.mark.parametrize(("cpu_pct", "culprits"), [(45.0, [(1,)]), (10.0, [])])
def test_a_rank_that_computes_more_also_waits_more_often_for_a_cpu(
    cpu_pct: float, culprits: list[tuple[int, ...]]
) -> None:
    """On a busy host all ranks wait equally long for a CPU per second of work; one that waits longer has a busier core."""
    first = rank(0, steps=steps(wait_ms=300.0), queued_share=0.1, cpu_pct=8.0)
    late = rank(1, steps=steps(300.0, "backward", seed=1), queued_share=0.5, cpu_pct=cpu_pct)
    assert [f.culprits for f in stragglers(job(first, late, host_cpu_pct=100.0))] == culprits


@pytest.mark.parametrize(
    ("cpu_pct", "queued", "culprits"), [(40.0, 0.6, []), (70.0, 0.3, [(1,)]), (10.0, 0.3, [(1,)]), (None, 0.3, [(1,)])]
)
def test_on_a_busy_host_a_rank_must_compute_more_or_sleep(
    cpu_pct: float | None, queued: float, culprits: list[tuple[int, ...]]
) -> None:
    """Where it does neither, it only gets its CPU later than the others, who wait for it."""
    first = rank(0, steps=steps(wait_ms=80.0), queued_share=0.25, cpu_pct=20.0)
    late = rank(1, steps=steps(80.0, "backward", seed=1), queued_share=queued, cpu_pct=cpu_pct)
    assert [f.culprits for f in stragglers(job(first, late, host_cpu_pct=100.0))] == culprits
    assert len(stragglers(job(first, late, host_cpu_pct=40.0))) == 1


@pytest.mark.parametrize(
    ("cpu_pct", "queued", "theirs", "lasting", "culprits"),
    [
        (40.0, 0.55, 0.25, False, []),  # a third of its excess
        (40.0, 0.55, 0.25, True, [(1,)]),
        (70.0, 0.25, 0.25, False, [(1,)]),
        # by these clocks it sleeps for 59 ms, but those of the other rank are wrong by 50 ms
        (20.0, 0.4, 0.6, False, []),
        (20.0, 0.4, 0.6, True, []),
    ],
)
def test_on_a_busy_host_a_rank_that_computes_little_more_must_lead_for_two_windows(
    cpu_pct: float, queued: float, theirs: float, lasting: bool, culprits: list[tuple[int, ...]]
) -> None:
    """Healthy ranks lead for one of them by chance: they get a CPU in turns, and clocks are read at other times than steps."""
    pauses, s = Pauses(), job()
    for first, slow in ((0, int(lasting)), (60, 1)):
        ranks = []
        for q, clocks in enumerate(
            ({"queued_share": theirs, "cpu_pct": 20.0}, {"queued_share": queued, "cpu_pct": cpu_pct})
        ):
            own = steps(80.0, "optimizer", seed=q) if q == slow else steps(wait_ms=80.0, seed=q)
            own = tuple(msgspec.structs.replace(x, step=x.step + first, end_s=x.end_s + first / 10) for x in own)
            ranks.append(rank(q, steps=own, **clocks))
        s = job(*ranks, host_cpu_pct=100.0)
        pauses.add(s)
    assert [f.culprits for f in findings(s, straggler, pauses=pauses)] == culprits


@pytest.mark.parametrize(
    ("line", "cpu_pct", "severity", "advice"),
    [
        ("item = self.queue.get()", 10.0, "info", "see what fills that queue, on all ranks"),
        ("with self._lock:", 95.0, "warning", "it waits there for a lock that another thread or process holds"),
        ("with self.guard:", 10.0, "warning", "it waits there and computes little"),
        ("with self.guard:", 95.0, "warning", "move that work off the training step"),
    ],
)
def test_a_rank_that_waits_between_its_steps_is_not_said_to_work(
    line: str, cpu_pct: float, severity: str, advice: str
) -> None:
    """How fast the other ranks' queues are filled is not known: they fill while these ranks wait for this one."""
    site = Site("/job/feed.py", 3, "batches")
    sites = {"phase_sites": {"other": ((site, 30),)}, "phase_stacks": {"other": (site,)}, "cpu_pct": cpu_pct}
    ranks = rank(0, steps=steps(wait_ms=200.0)), rank(1, steps=steps(200.0, "other", seed=1), **sites)
    f = only(findings(job(*ranks, host_cpu_pct=40.0), straggler, source={"/job/feed.py": f"\n\n{line}\n"}.get))
    assert (f.culprits, f.severity) == ((1,), severity) and advice in f.advice
    assert ("waiting for a" in f.message) is ("lock" in line or "queue" in line)
    assert ("if rank 1 were as fast" in f.cost) is (severity == "warning")


@pytest.mark.parametrize(("more", "kept"), [(0, True), (1, False)])
def test_clocks_that_are_read_after_the_last_step_change_no_finding(more: int, kept: bool) -> None:
    """A rank that slept in its steps computes, or waits for a CPU, while the job ends."""

    def found(cpu_pct: float, step: int, *reported: Finding) -> Finding:
        late = rank(1, step=step, steps=steps(200.0, "other", seed=1), cpu_pct=cpu_pct, queued_share=0.05)
        s = job(rank(0, steps=steps(wait_ms=200.0)), late, host_cpu_pct=40.0)
        return only(findings(s, straggler, reported=reported))

    live = found(10.0, 100)
    assert "computes little" in (live.advice or "")
    assert ("computes little" in (found(80.0, 100 + more, live).advice or "")) is kept


@pytest.mark.parametrize(("queued", "promised"), [(0.2, True), (0.5, False)])
def test_no_gain_is_promised_where_a_rank_mostly_lacks_a_cpu(queued: float, promised: bool) -> None:
    """Other code would save only what it computes."""
    first = rank(0, steps=steps(wait_ms=200.0), queued_share=0.0, cpu_pct=20.0)
    late = rank(1, steps=steps(200.0, "other", seed=1), queued_share=queued, cpu_pct=60.0)
    f = only(stragglers(job(first, late, host_cpu_pct=100.0)))
    assert ("a step would take" in f.cost) is promised and "rank 0 loses" in f.cost


def test_a_line_before_the_first_step_is_not_where_a_rank_is_slow() -> None:
    """Early in a job few samples are from its steps."""
    site = Site("/job/train.py", 34, "__init__")
    late = rank(1, steps=steps(200.0, "other", seed=1), phase_sites={"init": ((site, 9),)}, cpu_pct=10.0)
    f = only(stragglers(job(rank(0, steps=steps(wait_ms=200.0)), late, host_cpu_pct=40.0)))
    assert f.culprits == (1,) and "train.py:34" not in f.message
    assert 34 not in [w.line for w in f.where]


def feeding() -> Loader:
    return loader(workers=2, site=Site("/job/train.py", 31, "main"))


def test_a_loop_without_waits_has_no_finding() -> None:
    """Runs all rules of this file on an ordinary job: each has its input, and finds nothing."""
    ordinary: Snapshot = job(
        *(
            rank(
                q, steps=steps(seed=q), loaders=(feeding(),), device_bytes=40 * GIB, device_total_bytes=80 * GIB,
                samples=tuple(Sample(kind, k, 1.0, key=5) for kind in ("parameters", "buffers") for k in (2, 4, 8)),
            )
            for q in (0, 1)
        ),
        usual_step_s=0.1,
        gpus=tuple(msgspec.structs.replace(CARD, gpu=q, rank=q, pcie_width=16) for q in (0, 1)),
    )  # fmt: skip
    found = [*findings(ordinary, *RULES)]
    assert found == []


def test_a_rank_that_is_slow_in_every_second_step() -> None:
    f = only(stragglers(job(*(rank(q, local_rank=q, steps=every(2, 200.0, q)) for q in (0, 1)), host_cpu_pct=40.0)))
    assert f.culprits == (1,) and "in every 2nd step, 25 of the last 50" in f.message


def test_a_rank_that_shares_its_core_with_children_of_its_own_is_no_slow_core() -> None:
    """Its phases are three times as long, on a busy host: a mask of one core, and two children that run there."""

    def found(cpus: tuple[int, ...], children: float) -> list[Finding]:
        slow = tuple(
            msgspec.structs.replace(
                x,
                step_ms=x.step_ms + 120.0,
                ready_s=(x.ready_s or 0.0) + 0.12,
                **{f"{p}_ms": getattr(x, f"{p}_ms") * 3 for p in ("forward", "backward")},
            )
            for x in steps(seed=1)
        )
        mine = rank(1, steps=slow, queued_share=0.8, cpus=cpus, workers_busy=children)
        other = rank(0, steps=steps(wait_ms=120.0, seed=0), queued_share=0.1, cpus=(0,) if cpus else ())
        return stragglers(job(other, mine, host_cpu_pct=100.0))

    f = only(found((1,), 2.0))
    assert (f.cause, f.culprits) == ("cores", (1,)) and "its only core with its own 2 busy children" in f.message
    assert found((), 2.0) == [], "the host is busy, and nothing shows with what"
    assert found((1,), 0.0) == [], "it has its core for itself"


@pytest.mark.parametrize(
    ("op", "n_bytes", "found"), [("scatter", 1 << 20, False), ("broadcast", 8, True), ("all_reduce", 1 << 20, True)]
)
def test_a_root_that_hands_out_what_it_reads_is_no_straggler(op: str, n_bytes: int, found: bool) -> None:
    """The others wait for it in its scatter of the batches, not in a call that all prepare, nor in that of a flag."""
    root = None if op == "all_reduce" else 0
    calls = tuple(Call(op=op, group="default_pg", seq=k, root=root, bytes=n_bytes) for k in range(1, 61))
    arrivals = tuple(Arrival("default_pg", k, op, k * 0.1, 80.0, 0, 80.0) for k in range(1, 61))
    slow = rank(0, steps=steps(80.0, "other"), calls=calls)
    ranks = [slow, *(rank(q, steps=steps(wait_ms=80.0, seed=q), calls=calls) for q in (1, 2))]
    assert bool(stragglers(job(*ranks, arrivals=arrivals))) is found


@pytest.mark.parametrize(("op", "told"), [("broadcast", True), ("all_reduce", False)])
def test_a_rank_that_alone_reads_and_hands_out_should_let_all_read(op: str, told: bool) -> None:
    """Of its three broadcasts in a step the others wait long in the first only."""
    calls = tuple(Call(op=op, group="default_pg", seq=k, root=0 if told else None) for k in range(1, 181))
    arrivals = tuple(
        Arrival("default_pg", k, op, k / 30, ms, 0, ms) for k in range(1, 181) for ms in (80.0 if k % 3 == 1 else 1.0,)
    )
    slow = rank(0, steps=steps(80.0, "data"), calls=calls)
    idle = [tuple(msgspec.structs.replace(x, data_ms=0.0) for x in steps(wait_ms=80.0, seed=q)) for q in (1, 2)]
    f = only(stragglers(job(slow, *(rank(q, steps=x, calls=calls) for q, x in enumerate(idle, 1)), arrivals=arrivals)))
    assert f.culprits == (0,)
    assert str(f.advice).startswith("rank 0 reads the data of all ranks and hands it out") is told


@pytest.mark.parametrize(
    ("skew_ms", "busy_pct", "found"), [(5.0, 100.0, False), (5.0, 40.0, True), (15.0, 100.0, True)]
)
def test_jitter_of_a_busy_host_makes_no_straggler_by_arrival(skew_ms: float, busy_pct: float, found: bool) -> None:
    late = (Arrival("default_pg", k, "all_reduce", k * 0.02, skew_ms, 1, skew_ms) for k in range(1, 61))
    s = job(rank(0), rank(1), rank(2), arrivals=tuple(late), host_cpu_pct=busy_pct)
    assert [f.culprits for f in stragglers(s)] == [(1,)] * found


def test_what_the_steps_showed_of_a_rank_is_not_replaced_by_its_arrivals_at_the_end() -> None:
    late = tuple(Arrival("default_pg", k, "all_reduce", k * 0.1, 80.0, 1, 80.0) for k in range(1, 61))
    ranks = [rank(0, steps=steps(wait_ms=80.0)), rank(1, steps=steps(80.0, "other", seed=1))]
    known = only(stragglers(job(*ranks, arrivals=late)))
    ended = job(*(msgspec.structs.replace(r, steps=()) for r in ranks), arrivals=late)
    assert only(stragglers(ended)).key == known.key
    assert findings(ended, straggler, reported=(known,)) == []


@pytest.mark.parametrize(("learner_ms", "culprits"), [(20.0, (2,)), (300.0, ())])
def test_a_rank_that_waits_longer_for_a_root_is_no_straggler_by_arrival(
    learner_ms: float, culprits: tuple[int, ...]
) -> None:
    """The slower of two actors is last in every gather, but all actors wait longer for the learner's broadcast: nobody is slow."""
    late = (("broadcast", learner_ms, 0), ("all_gather", 100.0, 2), ("all_reduce", 100.0, 2))
    arrivals = (Arrival("default_pg", k, op, k * 0.2, ms, q, ms) for k in range(1, 181) for op, ms, q in (late[k % 3],))
    found = stragglers(job(rank(0), rank(1), rank(2), arrivals=tuple(arrivals)))
    assert tuple(q for f in found for q in f.culprits) == culprits
    assert all(f.message.startswith("rank 2 enters its collectives last in") for f in found)


@pytest.mark.parametrize(("team", "judged"), [((0, 1), True), ((0, 1, 2), False), (None, False)], ids=str)
def test_a_ddp_group_is_judged_although_another_rank_makes_no_steps(team: tuple[int, ...] | None, judged: bool) -> None:
    """Rank 2 keeps the books: it gets messages, and has no part in DDP's group."""
    models = () if team is None else (Model(group="trainers", forwards=100, synced_backwards=100),)
    trainers = (rank(q, steps=steps(n=60, seed=q), models=models) for q in range(2))
    s = job(*trainers, rank(2, steps=(), step=0, models=()))
    groups = {**s.groups, "trainers": Group(name="trainers", ranks=team or (), backend="gloo")}
    found = step_times.window(msgspec.structs.replace(s, groups=groups))
    assert (found.ranks if isinstance(found, step_times.Window) else None) == ([0, 1] if judged else None)
