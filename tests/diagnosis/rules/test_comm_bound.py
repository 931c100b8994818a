"""comm_bound: what all ranks lose to communication that does not overlap, and what DDP's own timings add."""

from __future__ import annotations

import random
import statistics
from typing import Any

import msgspec
import pytest

from distdiag.diagnosis import kinds
from distdiag.diagnosis.engine import Checks
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.gradient_cost import gradients
from distdiag.diagnosis.model.findings import Abstained, Finding
from distdiag.diagnosis.model.snapshot import Arrival, Buckets, Call, DdpTime, Model, RankState, Sample, Site, Step
from distdiag.diagnosis.rules import comm_bound
from distdiag.diagnosis.text.template import Template
from tests.diagnosis.made import findings, job, only, rank, speeds, steps

MIB = 1 << 20
STRAGGLER = Template(kinds.STRAGGLER, "host")
BUCKETS = Buckets(bytes=100 * MIB, buckets=4, bucket_bytes=(25 * MIB,) * 4, dtypes="float")


def found(
    exposed_ms: tuple[float, float], on_device: bool = True, measured: int = 4, cpu_pct: float = 40.0, **of_bucket: Any
) -> list[Finding]:
    """Return findings of a job of two ranks with steps of 100 ms, some of which DDP timed."""
    model = Model(buckets=msgspec.structs.replace(BUCKETS, **of_bucket))
    ranks = [
        rank(
            q,
            steps=steps(wait_ms=0.0 if on_device else 45.0, seed=q),
            models=(model,),
            wait_measured=not on_device,
            ddp_times=tuple(DdpTime(8 * k, 100.0, ms + 10.0, ms) for k in range(1, measured + 1)),
        )
        for q, ms in enumerate(exposed_ms)
    ]
    return findings(job(*ranks, host_cpu_pct=cpu_pct), comm_bound)


def test_a_part_is_never_more_than_the_whole() -> None:
    f = only(found((60.0, 60.0), on_device=False))
    assert "at least 60 % of step time" in f.message and f.message.endswith("take 60 %")


def test_waits_on_a_busy_host_are_partly_for_a_cpu() -> None:
    f = only(found((60.0, 60.0), on_device=False, cpu_pct=99.0))
    assert f.message.endswith("; the host's cores are all in use: part of that is waiting for a CPU")


def test_on_a_device_ddps_own_timings_are_used() -> None:
    f = only(found((40.0, 60.0)))
    assert "at least 40 %" in f.message and "100.0 MiB in 4 buckets" in f.message and f.victims == (0, 1)
    assert found((20.0, 60.0)) == []  # rank 1 waits for rank 0
    assert found((40.0, 60.0), measured=2) == []  # too few to tell


def test_the_advice_fits_the_buckets() -> None:
    def advice(**of_bucket: Any) -> str:
        return str(only(found((40.0, 40.0), **of_bucket)).advice)

    assert "about 20 % less" in advice() and "fp16_compress_hook" in advice() and "bucket_cap_mb" not in advice()
    assert "compress" not in advice(comm_hook="powerSGD_hook") and "compress" not in advice(dtypes="bfloat16")
    assert "gradient_as_bucket_view" in advice() and "gradient_as_bucket_view" not in advice(
        gradient_as_bucket_view=True
    )
    assert "below 100" in advice(buckets=1) and "raise `bucket_cap_mb`" in advice(buckets=200)
    # of a small model neither: each would lead to the other
    assert all("bucket_cap_mb" not in advice(buckets=n, bytes=MIB * 5 // 4) for n in (1, 2))


def test_the_advice_has_the_gain_and_its_limits() -> None:
    def advice(**of_bucket: Any) -> str:
        return str(only(found((40.0, 40.0), **of_bucket)).advice)

    # 40 of 50 ms of communication are exposed, in steps of 100 ms
    assert "interval" not in advice()  # of four steps
    assert "about 20 % less time per batch (95 % interval 20 to 20 %)" in advice(measured=20)
    assert "halves the bytes: at most 25 % less" in advice()
    assert "4 buckets save at most 38 %" in advice(buckets=1, last_bytes=25 * MIB)
    # a bucket cannot split a parameter
    assert "4 buckets save at most 30 %" in advice(buckets=1, last_bytes=40 * MIB)
    assert "bucket_cap_mb" not in advice(buckets=1, last_bytes=99 * MIB) and "save at most" not in advice(buckets=1)


def test_the_interval_of_the_gain_contains_what_accumulation_saves_later() -> None:
    rng, held = random.Random(1), 0
    for _ in range(500):
        load = [1.0]
        while len(load) < 64:
            load.append(1 + 0.3 * (load[-1] - 1) + rng.gauss(0, 0.05))  # of every eighth step
        shares = [max(0.0, 0.4 * f + rng.gauss(0, 0.05)) for f in load]
        times = tuple(DdpTime(8 * k + 8, 100.0, 110 * x, 100 * x) for k, x in enumerate(shares[:32]))
        ranks = [rank(q, models=(Model(buckets=BUCKETS),), ddp_times=times) for q in range(2)]
        known = gradients(job(*ranks))
        assert known is not None and known.interval is not None
        later = statistics.fmean(shares[32:])
        held += known.interval[0] / 2 <= later / 2 <= known.interval[1] / 2
    assert held >= 465


def test_the_bf16_hook_is_advised_only_where_torch_accepts_it() -> None:
    """On gloo, `bf16_compress_hook` raises in the first backward."""
    gloo = job(rank(0), rank(1))
    nccl = msgspec.structs.replace(
        gloo, groups={n: msgspec.structs.replace(g, backend="nccl") for n, g in gloo.groups.items()}
    )
    for snapshot, hook in ((gloo, "fp16_compress_hook"), (nccl, "bf16_compress_hook")):
        ranks = {
            q: rank(
                q,
                steps=steps(seed=q),
                models=(Model(buckets=BUCKETS),),
                wait_measured=False,
                ddp_times=tuple(DdpTime(8 * k, 100.0, 50.0, 40.0) for k in range(1, 5)),
            )
            for q in snapshot.ranks
        }
        assert hook in str(only(findings(msgspec.structs.replace(snapshot, ranks=ranks), comm_bound)).advice)


@pytest.mark.parametrize(("exposed_ms", "named"), [(40.0, True), (1.0, False)])
def test_gradients_are_named_only_if_they_are_most_of_the_communication(exposed_ms: float, named: bool) -> None:
    f = only(found((exposed_ms, exposed_ms), on_device=False))
    assert ("gradients" in f.message) is named and ("no_sync" in str(f.advice)) is named


def test_a_straggler_explains_comm_bound() -> None:
    straggler = Finding(kind="straggler", cause="host", severity="warning", culprits=(1,))
    shared = Finding(kind="comm_bound", severity="info", victims=(0, 1))
    for new in (True, False):
        assert kinds.explains(straggler, shared, new) and not kinds.explains(shared, straggler, new)


def arrivals(shared_ms: float, period_ms: float = 50.0, n: int = 60) -> tuple[Arrival, ...]:
    return tuple(
        Arrival("default_pg", k, "all_reduce", k * period_ms / 1e3, 1.0, k % 2, shared_ms + 1, shared_ms)
        for k in range(1, n + 1)
    )


def test_comm_bound_in_a_loop_without_an_optimizer_uses_the_waits_of_all_ranks() -> None:
    f = only(speeds(job(rank(0), rank(1), arrivals=arrivals(30.0))))
    assert (f.kind, f.severity, f.victims) == ("comm_bound", "info", (0, 1)) and "60 %" in f.message
    assert speeds(job(rank(0), rank(1), arrivals=arrivals(5.0))) == []
    assert speeds(job(rank(0), rank(1), arrivals=arrivals(5.0, period_ms=8.0))) == []  # half a second is too little


def begins_with(op: str) -> tuple[Call, ...]:
    """Return the calls of a rank whose steps begin with this message; that of the first is from the middle of one."""
    names = ("recv" if op == "send" else "send", op)
    return tuple(
        Call(op=x, group="default_pg", peer=1, entered_s=t_s) for x, t_s in zip(names, (1.12, 1.3), strict=True)
    )


def test_the_waits_of_a_pipelines_stages_are_not_called_communication() -> None:
    def found_in(first: tuple[str, ...] = ("send", "recv"), **more: Any) -> Finding:
        sent = {"send:1:0:default_pg": 9}
        ranks = [
            rank(q, steps=steps(wait_ms=200.0, seed=q), p2p_issued=sent, calls=begins_with(op), **more)
            for q, op in enumerate(first)
        ]
        return only(findings(job(*ranks), comm_bound))

    for first in (("send", "send"), ("recv", "recv"), ("send", "recv", "send", "recv")):
        f = found_in(first, models=())
        assert "pipeline" not in f.message + str(f.advice), "ranks exchange with each other"
        assert str(f.advice).startswith("send less, exchange less often, or compute while messages are under way")
    f = found_in(models=())
    assert "the idle time of a pipeline" in f.message and "more micro-batches" in f.advice and f.severity == "info"
    assert found_in().message.startswith("communication that no computation hides (exposed)"), (
        "replicas that also exchange messages"
    )


@pytest.mark.parametrize(
    ("forward_ms", "n_bytes", "on_device", "named"),
    [(30.0, 40 * MIB, False, True), (10.0, 40 * MIB, False, False), (30.0, 4096, False, False), (30.0, 40 * MIB, True, False)],
)  # fmt: skip
def test_buffers_are_named_where_their_broadcast_is_most_of_it(
    forward_ms: float, n_bytes: int, on_device: bool, named: bool
) -> None:
    """Of a few bytes the wait may be that for a late rank; on a device it is not measured."""
    model = Model(buckets=Buckets(bytes=MIB, buckets=1, broadcast_bytes=n_bytes, largest_buffer="layers.0.table"))
    times = tuple(DdpTime(8 * k, 100.0, 60.0, 10.0 if not on_device else 40.0) for k in range(1, 5))
    ranks = [
        rank(
            q,
            steps=tuple(msgspec.structs.replace(x, forward_wait_ms=forward_ms) for x in steps(wait_ms=45.0, seed=q)),
            models=(model,), ddp_times=times, wait_measured=not on_device,
        )
        for q in range(2)
    ]  # fmt: skip
    f = only(findings(job(*ranks, host_cpu_pct=40.0), comm_bound))
    text = "DDP's broadcast of buffers in each forward, 40.0 MiB (the largest is layers.0.table), takes 27 %"
    assert (text in f.message, "broadcast_buffers=False" in str(f.advice)) == (named, named)


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ((1, 1), "so a step has one micro-batch, with which each of 3 stages is idle for 67 % of it; 12 make that 14 %"),
        ((4, 4), "at most 4 of them, with which each of 3 stages is idle for 33 %"),
        ((12, 12), None), ((1, 3), None),
    ],
)  # fmt: skip
def test_a_pipeline_with_few_micro_batches_is_told_what_more_would_gain(
    sent: tuple[int, int], text: str | None
) -> None:
    def found(first: int = 1) -> str:
        issued = [
            {f"send:{first}:0:default_pg": 100 * sent[0]},
            {"send:2:0:default_pg": 100 * sent[1], "send:0:0:default_pg": 100 * sent[0]},
            {"send:1:0:default_pg": 100 * sent[1]},
        ]
        of = [
            rank(
                q,
                steps=steps(wait_ms=200.0, seed=q),
                models=(),
                p2p_issued=x,
                calls=begins_with("recv" if q else "send"),
            )
            for q, x in enumerate(issued)
        ]
        return str(only(findings(job(*of), comm_bound)).advice)

    assert (text or "start and end; `distdiag") in found()
    assert "start and end; `distdiag" in found(first=2), "no chain"


def test_passes_that_each_exchange_gradients_want_no_sync_on_all_but_the_last() -> None:
    def advice(backwards: int) -> str:
        model = Model(buckets=BUCKETS, forwards=backwards, synced_backwards=backwards)
        times = tuple(DdpTime(8 * k, 100.0, 70.0, 60.0) for k in range(1, 5))
        ranks = [
            rank(q, step=60, steps=steps(wait_ms=45.0, seed=q), models=(model,), ddp_times=times) for q in range(2)
        ]
        return str(only(findings(job(*ranks, host_cpu_pct=40.0), comm_bound)).advice)

    assert advice(240).startswith(
        "each of the 4 backward passes of a step exchanges gradients: make all but the last under `no_sync()`"
    )
    assert "about 45 % less time" in advice(240)
    assert advice(60).startswith("accumulate gradients over 2 batches")


def test_no_sync_around_backward_alone_is_named_by_counts_at_any_load() -> None:
    def ranks(vain: int, exposed_ms: float = 0.0) -> list[RankState]:
        model = Model(buckets=BUCKETS, forwards=240, synced_backwards=240, vain_no_syncs=vain)
        stacks = {"backward": (Site("/job/fit.py", 80, "update"),)}
        seen = {"phase_stacks": stacks, "phase_sites": {"backward": ((stacks["backward"][0], 9),)}}
        seen["ddp_times"] = tuple(DdpTime(8 * k, 100.0, 70.0, 60.0) for k in range(1, 5) if exposed_ms)
        return [rank(q, step=60, steps=steps(wait_ms=exposed_ms, seed=q), models=(model,), **seen) for q in range(2)]

    for cpu_pct, exposed_ms in ((99.0, 0.0), (40.0, 0.0), (99.0, 90.0), (40.0, 90.0)):
        f = only(findings(job(*ranks(180, exposed_ms), host_cpu_pct=cpu_pct), comm_bound))
        assert f.message == (
            "`no_sync()` has no effect at fit.py:80 in update: 3 of 4 backward passes of a step run in it, their forward "
            "does not, so all 4 exchange 100.0 MiB of gradients"
        )
        assert f.cost == "3 of 4 exchanges of gradients in each step" + ": up to 45 % of step time" * bool(exposed_ms)
        assert (f.severity, f.certainty) == ("warning", "proved") and str(f.advice).startswith(
            "put the forward inside `no_sync()`"
        )
    assert findings(job(*ranks(0)), comm_bound) == [] and findings(job(*ranks(2)), comm_bound) == []
    one = ranks(180)[0], ranks(0)[1]
    assert findings(job(*one), comm_bound) == []
    late = STRAGGLER(culprits=(1,), victims=(0,), message="")
    assert not kinds.explains(late, only(findings(job(*ranks(180)), comm_bound)), True)


def test_what_a_busy_host_hides_is_not_checked() -> None:
    ranks = [rank(q, steps=steps(wait_ms=90.0, seed=q), models=()) for q in range(2)]
    (outcome,) = comm_bound.evaluate(Facts(job(*ranks, host_cpu_pct=99.0)))
    assert isinstance(outcome, Abstained) and "cores are all in use" in outcome.reason
    checks = Checks()
    for outcomes in ([], [outcome], [Abstained("the job has ended")]):  # less was lost at first
        checks.take("comm_bound", outcomes)
    (check,) = checks.all
    assert (check.checked, check.reason) == (False, outcome.reason)


@pytest.mark.parametrize(("together_ms", "share"), [(80.0, 38), (40.0, None)])
def test_what_ranks_wait_for_one_another_in_turn_is_no_communication(together_ms: float, share: int | None) -> None:
    def of_rank(q: int) -> tuple[Step, ...]:
        late, waits = steps(60.0, wait_ms=together_ms, seed=q), steps(wait_ms=together_ms + 60.0, seed=q)
        return tuple((late if k % 3 == q else waits)[k] for k in range(60))

    facts = Facts(job(*(rank(q, steps=of_rank(q), models=()) for q in range(3)), host_cpu_pct=40.0))
    (outcome,) = comm_bound.evaluate(facts)
    if share is None:
        assert isinstance(outcome, Abstained) and "all of them only" in outcome.reason
    else:
        assert isinstance(outcome, Finding) and outcome.message.startswith(
            f"communication that no computation hides (exposed): at least {share} % of step time on every rank; 19 % more for whichever rank is late"
        )


def test_a_rank_that_works_longest_in_most_steps_is_named_and_no_rank_is_called_on_time() -> None:
    def message(late_ms: float) -> str:
        ranks = [rank(q, steps=steps(ms, wait_ms=45.0, seed=q)) for q, ms in enumerate((10.0, 10.0 + late_ms))]
        return only(findings(job(*ranks, host_cpu_pct=40.0), comm_bound)).message

    assert "rank 1 works longest in 50 of 50 steps" in message(20.0) and "no rank late" not in message(20.0)


def test_the_parameter_that_most_bytes_are_of_is_named() -> None:
    table = {"largest": "user.weight", "largest_bytes": 80 * MIB}
    f = only(found((40.0, 40.0), **table))
    assert "(80 % of the bytes are user.weight)" in f.message and "sparse" not in str(f.advice)
    assert "`Embedding(…, sparse=True)` sends those only" in str(
        only(found((40.0, 40.0), embedding=True, **table)).advice
    )
    small = only(found((40.0, 40.0), largest="user.weight", largest_bytes=20 * MIB, embedding=True))
    assert "user.weight" not in small.message + str(small.advice)


# -- the script's own collectives --------------------------------------------------------------------------------------

LINE = Site("/job/sync.py", 3, "sync")
TEXTS = {
    LINE.file: "def sync(model, world):\n    for p in model.parameters():\n        dist.all_reduce(p.grad)\n",
    "/job/train.py": "for x, y in loader:\n    loss(model(x), y).backward()\n",
    "/job/objects.py": "def log(rows):\n    out = [None] * 2\n    dist.all_gather_object(out, rows)\n",
}


def of_calls(
    op: str = "all_reduce", n_bytes: int = 4096, per_step: int = 6, wait_ms: float = 8.0, site: Site = LINE, of_rank: tuple[float, ...] = (1.0, 1.0),
    models: tuple[Model, ...] = (), samples: tuple[Sample, ...] = (), other: int = 0, more_bytes: int = 0, rank_bytes: int = 0, begun: int = 0, step: int = 100,
) -> list[Finding]:  # fmt: skip
    """Return findings of a job whose ranks wait in each step in calls of a line, and in some of another line of the same cost."""
    ranks = []
    for q, factor in enumerate(of_rank):
        each_s = wait_ms * factor / 1e3
        calls = tuple(
            Call(op=op, group="default_pg", seq=1 + k, bytes=n_bytes + k % per_step * more_bytes + q * rank_bytes, site=Site("/job/other.py", 9) if k < other else site,
                 entered_s=3.989 + 0.1 * k / per_step, completed_s=3.989 + 0.1 * k / per_step + each_s)
            for k in range(20 * per_step + begun)
        )  # fmt: skip
        made = steps(wait_ms=45.0, seed=q)[:step]
        ranks.append(
            rank(q, step=step, steps=made, calls=calls, sites={site.key: step * per_step + begun}, models=models, samples=samples)
        )  # fmt: skip
    return findings(job(*ranks, host_cpu_pct=40.0), comm_bound, source=TEXTS.get)


def test_the_line_that_costs_most_is_named() -> None:
    f = only(of_calls())
    assert "all_reduce of 4.0 KiB at sync.py:3 in sync, 6 times a step, takes 48 %" in f.message
    # the step in progress has made most of its calls
    assert ", 46 times a step" in only(of_calls(per_step=46, wait_ms=1.0, step=59, begun=44)).message
    assert ", about 400 times a step" in only(of_calls(per_step=398, wait_ms=0.12)).message
    assert "at least 48 % of step time" in f.message  # a part is never more than the whole
    assert "other.py" not in f.message
    assert "all_reduce of 6.5 KiB on average at sync.py:3" in only(of_calls(more_bytes=1024)).message
    of_one = only(of_calls(of_rank=(1.0, 1.1), rank_bytes=1024)).message  # the number is of the rank that waits least
    assert "all_reduce of 4.0 KiB on rank 0 at sync.py:3" in of_one
    assert "sync.py:3" not in only(of_calls(wait_ms=2.0)).message  # most is lost elsewhere
    assert "takes 24 %" in only(of_calls(of_rank=(1.0, 0.5))).message  # rank 0 also waits for rank 1
    assert "other.py:9" in only(of_calls(other=100)).message


@pytest.mark.parametrize(
    ("of", "advice"),
    [
        ({}, "one call"),
        ({"n_bytes": 8 << 20}, "async_op=True"),
        ({"per_step": 1, "wait_ms": 48.0}, "every n-th step"),
        ({"op": "barrier", "n_bytes": 0, "per_step": 1, "wait_ms": 48.0}, "leave the barrier out"),
        ({"op": "all_gather", "site": Site("/job/objects.py", 3, "log")}, "instead of pickled objects"),
        ({"op": "reduce_scatter_tensor", "n_bytes": 1 << 19, "site": Site("/job/train.py", 2)}, "on larger blocks"),
        ({"n_bytes": 1 << 19, "site": Site("/job/train.py", 2)}, "fuse layers"),  # of tensor parallelism
        ({"site": Site("/job/objects.py", 1, "forward")}, "fuse layers"),
        ({"op": "scatter", "site": Site("/job/train.py", 2)}, "one call"),  # of what a loss has gathered
        ({"op": "all_gather", "per_step": 1, "wait_ms": 48.0}, "call it less often, send less"),
    ],
)
def test_the_advice_fits_the_calls(of: dict[str, Any], advice: str) -> None:
    assert advice in str(only(of_calls(**of)).advice)


def test_growing_calls_are_named_with_the_other_calls_of_their_line() -> None:
    """A helper gathers the sizes, then a history that grows with each step."""

    def found(grows: int, share: float = 1.0) -> Finding:
        loop = Site("/job/train.py", 60, "step")
        sizes, rows = (Site("/job/sync.py", line, "gather", caller=loop) for line in (4, 9))
        of = ((sizes, 8, 12.0), (rows, 0, 18.0 * share))
        calls = tuple(
            Call(op="all_gather", group="default_pg", seq=2 * k + i, bytes=n or MIB + grows * (k + k % 2), dtype="float32" if n else "int64",
                 site=site, entered_s=4.0 + 0.1 * k + 0.05 * i, completed_s=4.0 + 0.1 * k + 0.05 * i + ms / 1e3)
            for k in range(40) for i, (site, n, ms) in enumerate(of)
        )  # fmt: skip
        ranks = [
            rank(q, steps=steps(wait_ms=45.0, seed=q), calls=calls, sites={sizes.key: 100, rows.key: 100})
            for q in range(2)
        ]
        return only(findings(job(*ranks, host_cpu_pct=40.0), comm_bound))

    f = found(MIB)
    assert "sync.py:9 in gather" in f.message and "carry ever more, from 1.0 MiB to 41.0 MiB" in f.message
    assert "with 1 other call from there, takes 30 %" in f.message and "running sums" in str(f.advice)
    f = found(0)
    assert "ever more" not in f.message and "all_gather of 1.0 MiB" in f.message and "running sums" not in str(f.advice)


@pytest.mark.parametrize(
    ("each", "wait_ms", "n_bytes", "cpu_pct", "severity"),
    [
        (42, 45.0, 4, 99.0, "info"), (42, 45.0, 4, 40.0, "warning"),
        (42, 25.0, 4, 99.0, "info"),  # less than other communication must take
        (42, 10.0, 4, 40.0, None), (2, 25.0, 4, 40.0, None), (42, 25.0, 1 << 20, 40.0, None),
    ],
)  # fmt: skip
def test_many_tiny_calls_of_a_helpers_line_are_counted_whatever_the_load(
    each: int, wait_ms: float, n_bytes: int, cpu_pct: float, severity: str | None
) -> None:
    """Statistics of each parameter, reduced one by one after the optimizer; the page keeps less than a step's calls."""
    helper = [Site("/job/log.py", 10, "reduce", caller=Site("/job/log.py", line, "collect")) for line in range(24, 28)]
    gap_s = wait_ms / 1e3 / (4 * each)
    calls = tuple(
        Call(op="all_reduce", group="default_pg", seq=k, bytes=n_bytes, site=helper[k % 4],
             entered_s=6.05 + 1.1 * gap_s * k, completed_s=6.05 + 1.1 * gap_s * k + gap_s)
        for k in range(min(128, 4 * each))
    )  # fmt: skip
    sites = {x.key: 60 * each for x in helper}
    ranks = [
        rank(q, step=60, steps=steps(wait_ms=wait_ms, seed=q), calls=calls, sites=sites, models=()) for q in range(2)
    ]
    f = next(iter(findings(job(*ranks, host_cpu_pct=cpu_pct), comm_bound)), None)
    assert (f and f.severity) == severity
    if f is not None:
        share = round(100 * wait_ms / (68 + wait_ms))
        assert f"all_reduce of 4 B at log.py:10 in reduce, about 170 times a step, takes {share} %" in f.message
        assert str(f.advice).startswith("put the tensors of a step into one")


def test_messages_that_are_under_way_side_by_side_do_not_wait_longer_than_a_step() -> None:
    """Of those that a rank starts together it waits for the first, and the others are there then."""
    calls = tuple(
        Call(op="recv", group="default_pg", peer=1, nth=k + 1, bytes=65536, site=LINE, entered_s=4.0 + 0.1 * (k // 8),
             completed_s=4.045 + 0.1 * (k // 8), waited_s=0.045 * (k % 8 == 0))
        for k in range(160)
    )  # fmt: skip
    of = [rank(q, steps=steps(wait_ms=45.0, seed=q), calls=calls, sites={LINE.key: 800}) for q in range(2)]
    assert "takes 46 %" in only(findings(job(*of, host_cpu_pct=40.0), comm_bound)).message


@pytest.mark.parametrize(("waited_ms", "named"), [(6.0, True), (0.2, False)])
def test_functional_collectives_that_are_waited_for_count(waited_ms: float, named: bool) -> None:
    """`full_tensor` issues one and waits for it; a call that is complete long after it was issued may have cost nothing."""
    weight, gradient = (Site("/job/watch.py", line, "update") for line in (2, 3))
    texts = {"/job/watch.py": "def update(p):\n    w = p.full_tensor()\n    g = p.grad.full_tensor()\n"}
    calls = tuple(
        Call(op="all_gather_into_tensor", group="default_pg", seq=k, bytes=4096, site=(weight, gradient)[k % 2], asynchronous=True,
             entered_s=4.0 + 0.02 * k, completed_s=4.015 + 0.02 * k, waited_s=waited_ms / 1e3)
        for k in range(120)
    )  # fmt: skip
    sites = {weight.key: 300, gradient.key: 300}
    ranks = [rank(q, steps=steps(wait_ms=45.0, seed=q), calls=calls, sites=sites) for q in range(2)]
    f = only(findings(job(*ranks, host_cpu_pct=40.0), comm_bound, source=texts.get))
    assert ("watch.py:2 in update, 3 times a step, with 1 other call from there, takes 30 %" in f.message) is named
    assert ("to_local()" in f.advice) is named


def test_gradients_that_are_reduced_twice_are_told() -> None:
    ddp = (Model(group="default_pg", forwards=100, synced_backwards=100),)
    every = tuple(Sample("reduced", k, 1.0) for k in (16, 32, 64))
    f = only(of_calls(models=ddp, samples=every))
    assert "as many elements as DDP has averaged already" in f.message and "leave the second out" in str(f.advice)
    seldom = only(of_calls(models=ddp, samples=every, wait_ms=0.1, n_bytes=1 << 20))
    assert "twice" not in seldom.message  # the finding is about the communication elsewhere
    for models, samples in (
        ((), every), (ddp, every[:1]), (ddp, (*every, Sample("reduced", 96, 0.4))),
        ((Model(group="default_pg", forwards=100, synced_backwards=50),), every),
    ):  # fmt: skip
        assert "already" not in only(of_calls(models=models, samples=samples)).message


def test_a_second_reduction_is_told_where_communication_is_cheap() -> None:
    ddp = (Model(group="default_pg", forwards=100, synced_backwards=100),)
    call = Call(op="all_reduce", group="default_pg", seq=7, bytes=1 << 20, site=LINE, entered_s=90.0, on_device=True)

    def told(*shares: float, averaged: float = 0.0) -> list[Finding]:
        samples = (
            *(Sample("reduced", 16 << k, share) for k, share in enumerate(shares)),
            Sample("averaged", 32, averaged),
        )
        return findings(
            job(*(rank(q, steps=steps(seed=q), calls=(call,), models=ddp, samples=samples) for q in range(2))),
            comm_bound,
        )

    assert "gradients are reduced twice" in only(told(1.0, 1.0)).message and "sync.py:3" in only(told(1.0, 1.0)).message
    assert told(1.0, 1.0, averaged=1.0) == []  # of parameters, between two steps
    assert told(1.0) == [] and told(1.0, 0.5) == [] and told(2.0, 2.0) == []


def test_calls_of_two_operations_at_one_line_are_counted_apart() -> None:
    """FSDP gathers parameters and scatters gradients in backward."""
    calls = tuple(
        Call(op=op, group="default_pg", seq=1 + k, bytes=MIB, site=LINE, entered_s=4.0 + 0.02 * k, completed_s=4.01 + 0.02 * k)
        for k, op in enumerate(("all_gather_into_tensor", "reduce_scatter_tensor") * 60)
    )  # fmt: skip
    ranks = [rank(q, steps=steps(wait_ms=45.0, seed=q), calls=calls, sites={LINE.key: 1200}) for q in range(2)]
    f = only(findings(job(*ranks, host_cpu_pct=40.0), comm_bound))
    assert "6 times a step, with 1 other call from there" in f.message


def test_a_full_host_is_not_called_slow_communication() -> None:
    """A rank that waits for a CPU makes the others wait: only what is known to be large or frequent is reported."""
    ranks = [rank(q, steps=steps(wait_ms=45.0, seed=q)) for q in range(2)]
    assert only(findings(job(*ranks, host_cpu_pct=40.0), comm_bound))
    assert not findings(job(*ranks, host_cpu_pct=98.0), comm_bound)
    small = {"bytes": 200 << 10, "largest_bytes": 0}
    assert found((40.0, 40.0), on_device=False, **small) and not found(
        (40.0, 40.0), on_device=False, cpu_pct=98.0, **small
    )
    assert found((40.0, 40.0), on_device=False, cpu_pct=98.0, bytes=100 * MIB)
