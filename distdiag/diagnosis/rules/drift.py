"""Replicas of one model that drift apart: checksums of the same elements at the same steps."""

from __future__ import annotations

from distdiag.diagnosis.model.findings import Certainty, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import RankState, Sample, Site, Snapshot
from distdiag.diagnosis.rules.batches import synchronous
from distdiag.diagnosis.text.phrases import where

DRIFT_RELATIVE = 1e-5
CONSTANT, CONSTANT_AT_FIRST = 0.75, 0.9  # of the newest distance, the first; until there are four times as many steps
BUFFERS_RELATIVE = 0.3  # statistics of different batches of the same data differ by some per cent, and may


def rules(s: Snapshot) -> list[Finding]:
    """Checksums of the same elements, at the same steps, that differ between replicas of one model."""
    ranks = sorted(s.ranks)
    if len(ranks) < 2 or len(ranks) < s.world_size or any(r.in_join for r in s.ranks.values()):
        return []  # in a Join context the ranks that have run out do not step
    for kind in ("parameters", "buffers"):
        samples = {q: _by_step(s.ranks[q], kind) for q in ranks}
        common = sorted(set.intersection(*(set(x) for x in samples.values())))
        common = [k for k in common if _comparable([samples[q][k].key for q in ranks])]
        if len(common) < 2:
            continue
        relative = DRIFT_RELATIVE if kind == "parameters" else BUFFERS_RELATIVE
        drifting = [k for k in common if _differ([samples[q][k].value for q in ranks], relative)]
        if len(drifting) < 2 or drifting[-1] != common[-1] or drifting[-2] != common[-2]:
            continue
        cause = _drift_cause(s, kind, drifting)
        if cause is None:
            continue
        began_alike = len([k for k in common if k < drifting[0]]) >= 2
        values = {q: samples[q][drifting[-1]].value for q in ranks}
        spreads = [max(v) - min(v) for k in drifting for v in [[samples[q][k].value for q in ranks]]]
        averaged = cause == "gradients_not_synced" and all(map(_averages, s.ranks.values()))
        if averaged and not began_alike and _constant(drifting, spreads):
            cause = "different_init"
        return [_drift_finding(s, cause, drifting, values, began_alike)]
    return []


def _constant(steps: list[int], spreads: list[float]) -> bool:
    """Whether replicas are as far apart as at the first look; those that walk away from each other are further with each step,
    by its root at least."""
    return spreads[0] >= (CONSTANT if steps[-1] >= 4 * steps[0] else CONSTANT_AT_FIRST) * spreads[-1]


def _by_step(r: RankState, kind: str) -> dict[int, Sample]:
    return {x.step: x for x in r.samples if x.kind == kind}


def _comparable(keys: list[int]) -> bool:
    """Whether checksums are of the same elements, averaged in the same group (`SampleRecord.key`), at the same point of the job.

    Ranks that each had trained something of their own before come to one model with different numbers of steps. One that
    leaves out a step now and then is not far from the others.
    """
    synced = [k >> 32 for k in keys]
    return len({k & 0xFFFFFFFF for k in keys}) == 1 and max(synced) - min(synced) <= 2 + min(max(synced) // 20, 14)


def _differ(values: list[float], relative: float) -> bool:
    scale = max(abs(v) for v in values) + 1e-3
    return (max(values) - min(values)) / scale > relative or any(v != v for v in values) != all(v != v for v in values)


def _drift_cause(s: Snapshot, kind: str, drifting: list[int]) -> str | None:
    """Why replicas differ; None where they may differ by design."""
    models = [m for r in s.ranks.values() for m in r.models]
    over_all = [m for m in models if (g := s.groups.get(m.group or "")) is not None and len(g.ranks) == s.world_size]
    if kind == "buffers":
        return "buffers" if over_all and not any(m.broadcast_buffers for m in over_all) and synchronous(s) else None
    if over_all and len(over_all) >= s.world_size:
        # Parameters that are averaged now and then, not their gradients at each step, differ between those times (local
        # SGD). Otherwise: no backward is synchronised, or the parameters that are stepped are not those that DDP wraps.
        averaged = max((x.value for r in s.ranks.values() for x in r.samples if x.kind == "averaged"), default=0.0)
        return "gradients_not_synced" if averaged < 0.9 else None
    if models:
        return None
    reduced = {q: _by_step(s.ranks[q], "reduced") for q in s.ranks}
    shares = [reduced[q][k].value for q in s.ranks for k in drifting if k in reduced[q]]
    # Only where as many elements are reduced as there are parameters can it be told that all of them are averaged: with
    # fewer, some are meant to be a rank's own (experts, personal layers), or they are averaged now and then; with more,
    # what is reduced are activations of a model that is split over the ranks.
    if not shares or min(shares) < 0.999 or max(shares) > 1.05:
        return None
    return "different_init"


def _drift_finding(
    s: Snapshot, cause: str, drifting: list[int], values: dict[int, float], began_alike: bool
) -> Finding:
    spread = max(values.values()) - min(values.values())
    odd = _fewer(values)
    what = {
        "gradients_not_synced": "their gradients are not averaged",
        "different_init": "gradients are averaged, but the replicas began with different values",
        "buffers": "their buffers differ, and broadcast_buffers is off",
    }[cause]
    do = {
        "gradients_not_synced": "call the DDP-wrapped model, not model.module, in the training step; "
        "step the parameters that DDP wraps",
        "different_init": "load weights alike on all ranks before the model is wrapped: DDP makes replicas alike only then"
        if any(r.models for r in s.ranks.values())
        else "broadcast the parameters from rank 0 once after building the model (or seed alike, or use DDP)",
        "buffers": "leave broadcast_buffers=True, or reduce the buffers by hand",
    }[cause]
    models = [m for r in s.ranks.values() for m in r.models]
    averaged = cause == "different_init" or (models and all(map(_averages, s.ranks.values())))
    rates = _rates(s, drifting) if averaged and cause != "buffers" else {}
    if rates:
        cause, odd = "gradients_not_synced", _fewer(rates)
        what = f"gradients are averaged, but learning rates differ ({_rates_text(rates)})"
        do = (
            "let the scheduler see the same on all ranks: a metric that is reduced over them, steps and not samples or tokens "
            "of a rank's own, the same length of an epoch"
        )
    elif averaged and began_alike and cause != "buffers":
        cause = "gradients_not_synced"
        what = "gradients are averaged and the replicas were alike before, but not every rank does the same with its parameters"
        do = (
            "are weights loaded, or a step skipped, clipped or scaled, by what only one rank sees? let all ranks decide it "
            "together (all_reduce, broadcast); and reduce in one order on all ranks: that of a set differs"
        )
    sites = {q: _averaging_place(r) if averaged and not models else None for q, r in s.ranks.items()}
    for q, r in s.ranks.items():
        stack = r.phase_stacks.get("backward") or r.user_stack
        sites[q] = sites[q] or (stack[0] if stack else None)
    return Finding(
        kind="replica_drift",
        cause=cause,
        certainty=Certainty.PROVED,
        severity=Severity.ERROR,
        culprits=odd,
        victims=tuple(sorted(set(values) - set(odd))),
        where=tuple(where(s.ranks[q], None, sites[q]) for q in sorted(values)),
        step=drifting[0],
        message=f"replicas drift apart since step {drifting[0]}: {what} "
        f"(checksums differ by {spread:.3g} at step {drifting[-1]})",
        cost="each rank trains a model of its own; only one of them is saved",
        advice=do,
    )


def _averaging_place(r: RankState) -> Site | None:
    """Where gradients are averaged by hand: the newest all_reduce of more than a number or two."""
    return next((c.site for c in reversed(r.calls) if c.op == "all_reduce" and (c.bytes or 0) > 16), None)


def _by_value(values: dict[int, float]) -> dict[float, list[int]]:
    """The ranks that have each value."""
    out: dict[float, list[int]] = {}
    for q, v in sorted(values.items()):
        out.setdefault(v, []).append(q)
    return out


def _fewer(values: dict[int, float]) -> tuple[int, ...]:
    """Ranks whose value fewer ranks have than another; none where no two agree."""
    by_value = _by_value(values)
    most = max(len(v) for v in by_value.values())
    return tuple(sorted(q for v in by_value.values() if len(v) < most for q in v)) if most > 1 else ()


def _averages(r: RankState) -> bool:
    """Whether DDP averages gradients in each step of this rank; with accumulation not in each backward."""
    return bool(r.models) and all(m.synced_backwards >= 0.9 * min(m.forwards, max(r.step, 1)) > 0 for m in r.models)


def _rates(s: Snapshot, drifting: list[int]) -> dict[int, float]:
    """Of each rank the learning rate at the newest step at which they differed, of those up to the newest that drifts; or nothing."""
    samples = {q: _by_step(r, "learning_rate") for q, r in s.ranks.items()}
    common = set.intersection(*(set(x) for x in samples.values()))
    for k in sorted(common, reverse=True):
        values = {q: x[k].value for q, x in samples.items()}
        if k <= drifting[-1] and len(set(values.values())) > 1:
            return values
    return {}


def _rates_text(rates: dict[int, float]) -> str:
    by_rate = _by_value(rates)
    shown = [f"{rate:.6g} on {rank_list(ranks)}" for rate, ranks in sorted(by_rate.items(), key=lambda x: -len(x[1]))]
    return ", ".join(shown[:4]) + (", …" if len(shown) > 4 else "")
