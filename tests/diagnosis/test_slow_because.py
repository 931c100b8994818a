"""Why ranks are slow: tools that stay on, and steps that take longer with time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import Call, Model, RankState, Site, Step
from distdiag.diagnosis.pauses import Pauses
from distdiag.diagnosis.rules import straggler
from tests.diagnosis.made import findings, job, of_kind, rank, steps

ANOMALY = "autograd's anomaly detection"


@pytest.mark.parametrize(
    ("tools", "step", "found"),
    [
        (((ANOMALY,), (ANOMALY,)), 100, True),
        (((ANOMALY, "torch.profiler"), (ANOMALY,)), 100, True),
        (((ANOMALY,), ()), 100, False),  # on one rank: it is the straggler's reason, if that rank is one
        ((("torch.profiler",), ("torch.profiler",)), 100, False),  # for some steps, by intent
        (((ANOMALY,), (ANOMALY,)), 20, False),
        (((), ()), 100, False),
    ],
)
def test_a_debugging_tool_that_stays_on_on_all_ranks_is_told(
    tools: tuple[tuple[str, ...], ...], step: int, found: bool
) -> None:
    s = job(*(rank(q, tools=mine, step=step, steps=steps(seed=q)) for q, mine in enumerate(tools)))
    told = of_kind(findings(s, straggler), "straggler", "tools")
    assert len(told) is int(found)
    assert not found or (
        told[0].culprits == () and "all ranks run with autograd's anomaly detection on" in told[0].message
    )


def growing(
    *factors: float, start_ms: float = 40.0, now_ms: float = 120.0, more: Callable[[RankState], RankState] = lambda r: r,
    cause: str = "growth", **known: Any,
) -> list[Finding]:  # fmt: skip
    """Return what is found where the newest 64 of 400 steps of each rank take `factor` times as long as usual, most in forward."""
    ranks = []
    for q, factor in enumerate(factors):
        rows: list[Step] = []
        for i, x in enumerate(steps(n=64, seed=q)):
            step_ms = now_ms * factor + 0.1 * i
            rows.append(
                msgspec.structs.replace(
                    x, step=337 + i, step_ms=step_ms, forward_ms=0.7 * step_ms, backward_ms=0.2 * step_ms, end_s=60.0 + i * now_ms / 1e3
                )
            )  # fmt: skip
        site = Site("/job/probe.py", 21, "observe")
        began_s = rows[-1].end_s - 380 * start_ms / 1e3
        ranks.append(
            rank(
                q, step=400, steps=tuple(rows), warm_since_s=began_s, phase_sites={"forward": ((site, 9),)},
                phase_stacks={"forward": (site,)},
            )
        )  # fmt: skip
    return of_kind(findings(job(*map(more, ranks)), straggler, **known), "straggler", cause)


def test_steps_that_take_longer_with_time_on_all_ranks_are_told() -> None:
    (f,) = growing(1.0, 1.0)
    assert f.culprits == () and f.severity == "info" and "most of one is forward now (8" in f.message
    assert "at probe.py:21 in observe" in f.message and "hooks that are registered again" in str(f.advice)
    assert growing(1.0, 0.3) == []  # of one rank it is that rank's
    assert growing(1.0, 1.0, now_ms=42.0) == []


@pytest.mark.parametrize("grows", [True, False])
def test_the_call_that_carries_ever_more_is_named_with_steps_that_grow(grows: bool) -> None:
    calls = tuple(
        Call(
            op="all_gather", group="default_pg", seq=k, bytes=(1 << 20) * (k if grows else 9), dtype="float32",
            site=Site("/job/score.py", 26, "gather"), entered_s=50.0 + k, completed_s=50.5 + k,
        )
        for k in range(1, 20)
    )  # fmt: skip
    (f,) = growing(1.0, 1.0, more=lambda r: msgspec.structs.replace(r, calls=calls))
    told = "; the calls of all_gather at score.py:26 in gather carry ever more, from 1.0 MiB to 19.0 MiB"
    assert (told in f.message, "keep running sums" in f.advice) == (grows, grows)


@pytest.mark.parametrize(
    ("batches", "forwards", "told"),
    [((1, 1), 400, True), ((2, 4), 700, False), ((4, 4), 800, False), ((4, 4), 1600, True)],
)
def test_steps_that_accumulate_more_batches_than_before_have_more_to_do(
    batches: tuple[int, int], forwards: int, told: bool
) -> None:
    """In the ranks' newest 64 steps: their number in the first half and in the second; and forwards of all 400 steps."""

    def more(r: RankState) -> RankState:
        rows = tuple(msgspec.structs.replace(x, batch=8, samples=8 * batches[i >= 32]) for i, x in enumerate(r.steps))
        return msgspec.structs.replace(r, steps=rows, models=(Model(group="default_pg", forwards=forwards),))

    assert bool(growing(1.0, 1.0, more=more)) is told


def test_steps_that_take_longer_where_ranks_wait_for_a_cpu_no_longer_than_usual_are_told() -> None:
    """On a host whose cores are all in use, most of a step is such waiting from its start on."""
    waits: dict[str, Any] = {"more": lambda r: msgspec.structs.replace(r, queued_share=0.8)}
    assert growing(1.0, 1.0, **waits) == []
    pauses = Pauses(queued=dict.fromkeys(range(2), (80 * 0.8, 80)))
    assert len(growing(1.0, 1.0, **waits, pauses=pauses)) == 1


BY_DDP = Model(group="default_pg", synced_backwards=400, forwards=400)


@pytest.mark.parametrize("queued", [0.0, 0.8])
@pytest.mark.parametrize("models", [(BY_DDP,), ()])
def test_the_line_between_the_passes_is_named_where_only_a_busier_host_may_explain_that_steps_take_longer(
    queued: float, models: tuple[Model, ...]
) -> None:
    def more(r: RankState) -> RankState:
        rows = tuple(msgspec.structs.replace(x, other_ms=x.forward_ms, forward_ms=1.0) for x in r.steps)
        sites = {"other": r.phase_sites["forward"]}
        return msgspec.structs.replace(r, steps=rows, queued_share=queued, models=models, phase_sites=sites)

    found = growing(1.0, 1.0, more=more, cause="outside")
    assert bool(found) is (queued > 0 and models != ())  # without DDP a model's forward may be there
    assert all(
        "70 % of their steps" in f.message and "at probe.py:21 in observe; a step takes 1" in f.message for f in found
    )


@pytest.mark.parametrize(
    ("line", "samples", "found"), [("gather_object(x)", 30, 1), ("gather_object(x)", 15, 0), ("simulate()", 30, 0)]
)
def test_a_line_that_exchanges_objects_is_named_and_one_that_may_be_the_jobs_work_is_not(
    line: str, samples: int, found: int
) -> None:
    site, usual = Site("/job/score.py", 1, "compute"), Site("/job/score.py", 41, "step")
    sites = {"other": ((usual, 30 - samples), (site, samples))}
    ranks = [
        rank(q, step=60, steps=steps(60.0, "other", seed=q), models=(BY_DDP,), phase_sites=sites) for q in range(2)
    ]
    named = of_kind(findings(job(*ranks), straggler, source={site.file: line}.get), "straggler", "outside")
    assert ["exchange tensors instead of pickled objects" in str(f.advice) for f in named] == [True] * found


@pytest.mark.parametrize(("to", "found"), [(1.0, False), (1.3, False), (2.2, True), (6.0, True)])
@pytest.mark.parametrize("n", [300, 900])
def test_steady_growth_is_told_from_twice_the_first_time_on(to: float, found: bool, n: int) -> None:
    first_ms = 50.0
    times = [first_ms * (1.0 + (to - 1.0) * i / n) for i in range(n)]
    mean_ms = sum(times[20:]) / (n - 20)
    usual = steps(n=64, seed=1)
    ranks = []
    for q in range(2):
        rows = tuple(
            msgspec.structs.replace(x, step=n - 63 + i, step_ms=times[n - 64 + i], end_s=60.0 + sum(times[n - 64 : n - 63 + i]) / 1e3)
            for i, x in enumerate(usual)
        )  # fmt: skip
        ranks.append(rank(q, step=n, steps=rows, warm_since_s=rows[-1].end_s - (n - 20) * mean_ms / 1e3))
    assert bool(of_kind(findings(job(*ranks), straggler), "straggler", "growth")) is found


@pytest.mark.parametrize(
    ("cpus", "queued", "launcher", "said"),
    [
        (((0,), (0,)), 0.7, 2, "SLURM_LOCALID"),
        (((0,), (0,)), 0.7, 1, "srun"),
        (((0,), (0,)), 0.1, 2, None),  # they get it when they need it
        (((0,), (1,)), 0.7, 4, None),
        (((0,), ()), 0.7, 2, None),
        (((), ()), 0.7, 0, None),
    ],
)
def test_ranks_that_may_all_use_fewer_cpus_than_they_are_are_told_who_has_bound_them(
    cpus: tuple[tuple[int, ...], ...], queued: float, launcher: int, said: str | None
) -> None:
    ranks = (
        rank(q, steps=steps(seed=q), cpus=of, queued_share=queued, launcher_cpus=launcher) for q, of in enumerate(cpus)
    )
    found = findings(job(*ranks, host_cpu_pct=60.0), straggler)
    assert [f.cause for f in found] == ["cores"] * (said is not None)
    for f in found:
        assert "ranks 0, 1 may run on CPU 0 only" in f.message and f.severity == "warning"
        assert said is not None and said in f.advice and ("srun" in f.advice) is (said == "srun")
