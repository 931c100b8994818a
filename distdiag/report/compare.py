"""Compare runs with a baseline: is the step time different, by how much, and in which phase.

The difference of medians has an interval by block bootstrap (steps are autocorrelated), drawn for each run on its own.
"Different" needs both: an interval that leaves out zero, and an effect that matters. An interval that holds zero and what matters decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec
import numpy as np

from distdiag.diagnosis.model.findings import Finding, rank_list
from distdiag.diagnosis.step_times import LIMITS as STEPS
from distdiag.report.facts import versions
from distdiag.report.steps import (
    ENOUGH_FOR_INTERVAL,
    Floats,
    Quantiles,
    job_steps,
    median,
    quantiles,
    read_steps,
    samples_per_s,
)
from distdiag.store.liveness import number
from distdiag.store.reader import Run
from distdiag.terms.statistics import bootstrap_medians, compare
from distdiag.terms.steps import PHASES
from distdiag.terms.untrusted import encodable

SCHEMA = "distdiag.compare/1"
WARM_UP_STEPS = 10  # left out if at least four times as many were recorded: compilation, caches, allocators
REPLICATES = 1_000
MATTERS_PCT = 1.0  # a smaller difference is not reported, however certain
MATTERS_DELTA = 0.147  # Cliff's delta below which an effect is called negligible (Romano et al. 2006)


class Outcome(StrEnum):
    SLOWER = "slower"
    FASTER = "faster"
    SAME = "no difference"
    UNDECIDED = "cannot tell"
    UNKNOWN = "too few steps"


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Step time of a run compared with the baseline's."""

    outcome: Outcome
    change_pct: float | None = None  # of the median; above 0 is slower
    ci95_pct: tuple[float, float] | None = None
    cliffs_delta: float | None = None  # P(a step is slower than the baseline's) - P(it is faster)
    p_value: float | None = None  # Mann-Whitney U; of steps, which are not independent: the interval decides


class Column(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    name: str
    state: str
    world_size: int | None
    torch: str | None
    skipped_steps: int  # warm-up
    step: Quantiles | None
    samples_per_s: float | None
    host_cpu_pct: float | None  # mean of the run, of all nodes' cores
    foreign_cpus: float | None  # CPUs that processes other than the ranks and their children used, mean
    # medians over all ranks' steps, with `wait`, `self`, and DDP's `comm` and `exposed`
    phases_ms: dict[str, float | None]
    against_baseline: Difference | None  # None: this is the baseline
    phases_change_ms: dict[str, float | None]
    findings: dict[str, str]  # "kind/cause": who, of severity warning and above


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `distdiag compare --json`; the first run is the baseline."""

    schema: str = SCHEMA
    runs: tuple[Column, ...]
    notes: tuple[str, ...] = ()


def compare_runs(runs: Sequence[Run], skip: int | None = None, limit_pct: float | None = None) -> Comparison:
    """Compare each run with the first; a slowdown above `limit_pct` % matters.

    `skip` steps are left out at the beginning of each run, by default `WARM_UP_STEPS` if there are enough.
    """
    columns: list[Column] = []
    baseline: Floats | None = None
    for run in runs:
        steps = read_steps(run)
        job = job_steps(steps)
        left_out = skip if skip is not None else WARM_UP_STEPS if len(job) >= 4 * WARM_UP_STEPS else 0
        used = steps.where(steps["step"] >= (job.step[left_out] if left_out < len(job) else np.inf))
        times = job["step_ms"][left_out:]
        phases = {name: median(used[f"{name}_ms"]) for name in (*PHASES, "wait", "self", "comm", "exposed")}
        first = columns[0] if columns else None
        host_cpu_pct, foreign_cpus = _load(run)
        columns.append(
            Column(
                run=encodable(str(run.path)),
                name=run.path.resolve().name,
                state=run.state()[0],
                world_size=None if (n := number(run.meta.get("world_size"))) is None else int(n),
                torch=versions(run).get("torch"),
                skipped_steps=left_out,
                step=quantiles(times),
                samples_per_s=samples_per_s(job_steps(used)),
                host_cpu_pct=host_cpu_pct,
                foreign_cpus=foreign_cpus,
                phases_ms=phases,
                against_baseline=None if baseline is None else difference(baseline, times, limit_pct),
                phases_change_ms={
                    k: None if (before := first.phases_ms[k]) is None or v is None else v - before
                    for k, v in phases.items()
                }
                if first
                else {},
                findings={f.title: _who(f) for f in reversed(run.findings()) if f.severity != "info"},
            )
        )
        if baseline is None:
            baseline = times
    scripts = {encodable(name) for run in runs if (name := run.meta.get("name"))}
    return Comparison(runs=tuple(columns), notes=tuple(_notes(columns, scripts)))


def difference(before: Floats, after: Floats, limit_pct: float | None = None) -> Difference:
    """Step times `after` against `before`, ms; a slowdown above `limit_pct` matters."""
    if min(len(before), len(after)) < ENOUGH_FOR_INTERVAL:
        return Difference(outcome=Outcome.UNKNOWN)
    ratios = bootstrap_medians(after, REPLICATES, seed=1) / bootstrap_medians(before, REPLICATES, seed=2)
    low, high = (float(100 * (np.percentile(ratios, q) - 1)) for q in (2.5, 97.5))
    pair = compare(before, after)
    change = 100 * (pair.ratio - 1)
    matters = abs(change) >= MATTERS_PCT and abs(pair.cliffs_delta) >= MATTERS_DELTA
    outcome = Outcome.SAME
    if matters and low > 0:
        outcome = Outcome.SLOWER
    elif matters and high < 0:
        outcome = Outcome.FASTER
    elif low <= 0 <= high and (matters or (limit_pct is not None and high > limit_pct)):
        outcome = Outcome.UNDECIDED
    return Difference(
        outcome=outcome, change_pct=change, ci95_pct=(low, high), cliffs_delta=pair.cliffs_delta, p_value=pair.p_value
    )


def _who(f: Finding) -> str:
    who = rank_list(f.culprits or f.victims) if f.culprits or f.victims else "the job"
    return who + (" (cleared)" if f.cleared_s is not None else "")


def _load(run: Run) -> tuple[float | None, float | None]:
    """Return (use of the hosts' cores in %, CPUs that others used); None where it was not measured."""
    ((used, cores),) = run.query(
        "SELECT sum(pct * n) / 100, sum(n) FROM (SELECT avg(cpu_pct) pct, max(cores) n FROM host GROUP BY node)"
    )
    ((by_ranks,),) = run.query(
        "SELECT sum(pct) / 100 FROM (SELECT avg(cpu_pct + ifnull(children_cpu_pct, 0)) pct FROM process GROUP BY rank)"
    )
    if not used or not cores:
        return None, None
    return 100 * used / cores, None if by_ranks is None else max(0.0, used - by_ranks)


def _notes(columns: list[Column], scripts: set[str]) -> list[str]:
    sets = {
        "scripts": scripts,
        "numbers of ranks": {c.world_size for c in columns},
        "versions of torch": {c.torch for c in columns},
    }
    different = {what: ", ".join(sorted(map(str, values))) for what, values in sets.items() if len(values) > 1}
    notes = [f"the runs have different {what}: {values}" for what, values in different.items()]
    if busy := [c.name for c in columns if (c.host_cpu_pct or 0.0) > STEPS.busy_host_pct]:
        notes.append(
            f"nearly all cores of the host were in use during {', '.join(busy)}: step times depend on its load, too"
        )
    return notes
