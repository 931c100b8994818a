"""nonfinite: a loss or gradient is NaN or infinite; on which rank first, and whether its batch already had NaN.

A loss that is infinite while its gradients are finite is an info: a large loss scale does that, too.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from distdiag.diagnosis import kinds
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import Life, RankState, Sample, Snapshot
from distdiag.diagnosis.text.phrases import where
from distdiag.diagnosis.text.template import Template

kind = kinds.NONFINITE


@dataclass(frozen=True)
class Limits:
    times: int = 4
    """Logged values in a row that are not finite, after finite ones: a scaler needs a few steps to find its scale."""


limits = Limits()
_WATCHED = re.compile(r"^(?!.*(val|test|eval)).*(loss|nll|grad|norm|perplexity|ppl|entropy)", re.IGNORECASE)
NONFINITE = Template(kind, "loss",
    "{what} is {value} on {on}, step {step}{followed}{name}{site}{from_input}{alone}", "{cost}",
    "{do}; go back to the last checkpoint", proved=True)  # fmt: skip
LOGGED = Template(kind, "logged",
    "the logged value {name} is {value} on {on} since step {step}", "what is averaged with it is lost, too",
    "check the batch of step {step}, and divisions and logarithms in what is logged; if gradients depend on it, go back "
    "to the last checkpoint")  # fmt: skip
HARMLESS = Template(kind, "loss",
    "loss is {value} on {on} since step {step}{site}; the gradients are finite, so training goes on",
    "averages and logs of the loss are infinite, too",
    "if the loss is not scaled by a large factor: check the batch, and logarithms and divisions in the loss",
    proved=True, severity=Severity.INFO)  # fmt: skip
DROPPED = Template(kind, "loss",
    "loss is {value} on {on} again and again, as in step {step}{site}{often}; the gradients of the updates between them are finite",
    "no rank learns from such a batch: its update is skipped, or its gradients are zero",
    "check the batches of {on} in which that happens (no target, a division by zero, a logarithm of zero), and leave out the sample, not the step",
    proved=True, severity=Severity.WARNING)  # fmt: skip
_DO = {
    "input": "look for where NaN comes in at step {step}: in the data (drop or repair such samples), or in what the script does with the batch before the model",
    "drifted": "first mend what lets the replicas drift apart since step {since}: the loss may follow from it",
    "everywhere": "check the batches of step {step}, the collectives in forward, and the learning rate",
    "one rank": "check that rank's batch of step {step}, and divisions and logarithms in the loss",
}
Found = list[tuple[int, Sample]]  # (rank, sample)


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    s = facts.snapshot
    found, dropped, infinite = (
        [(r.rank, x) for r in s.ranks.values() for x in r.samples if x.kind.startswith(begin)]
        for begin in ("nonfinite", "dropped", "infinite")
    )
    if found:
        drift = (f.step for f in facts.reported if f.kind == kinds.REPLICA_DRIFT.name and f.step is not None)
        yield _finding(s, found, min(drift, default=None))
    elif dropped:
        first = min(x.step for _, x in dropped)
        common = _common(s, [(q, x) for q, x in dropped if x.step == first])
        losses = [[x.loss for x in r.steps if x.loss is not None] for r in s.ranks.values()]
        newest = max(losses, key=lambda of: sum(map(math.isnan, of)))
        n = sum(map(math.isnan, newest))
        often = f", {n} of the newest {len(newest)} steps" if n else ""
        yield DROPPED(victims=sorted(s.ranks) if common["everywhere"] else (), **common, often=often)
    elif infinite:
        chosen, _ = _deciding(s, infinite)  # several in a row, while their gradients are finite
        common = _common(s, chosen)
        yield HARMLESS(victims=sorted({q for q, _ in chosen}) if common["everywhere"] else (), **common)
    elif logged := list(_logged(s)):
        yield from logged
    elif not any(map(_seen, s.ranks.values())):
        yield Abstained("no optimizer step with a scalar loss was seen, and handle.log() was not called")


def _seen(r: RankState) -> bool:
    """True if a loss was seen; on a device every eighth is read, and not kept as the step's."""
    return bool(r.logged) or any(x.loss is not None for x in r.steps) or (bool(r.device_bytes) and r.step >= 8)


def _logged(s: Snapshot) -> Iterator[Finding]:
    """Yield the values of handle.log() that have become NaN, or infinite, and stay so."""
    first: dict[str, dict[int, tuple[int, float]]] = {}
    for r in s.ranks.values():
        for name, values in r.logged.items():
            runs = [(ok, list(run)) for ok, run in itertools.groupby(values, lambda x: math.isfinite(x[1]))]
            *earlier, (ok, newest) = runs or [(True, [])]
            longest = max((len(run) for good, run in earlier if not good), default=0)
            # a value that is logged in some steps only is NaN in between
            if earlier and not ok and len(newest) >= limits.times > longest:
                first.setdefault(name, {})[r.rank] = newest[0]
    for name, of in first.items():
        step = min(step for step, _ in of.values())
        ranks = sorted(q for q in of if of[q][0] == step)
        everywhere = len(ranks) == s.world_size
        yield LOGGED(
            severity=Severity.WARNING if _WATCHED.search(name) else Severity.INFO,
            culprits=() if everywhere else ranks, victims=sorted(s.ranks) if everywhere else sorted(set(of) - set(ranks)),
            names=(name,), step=step, where=(where(s.ranks[q]) for q in ranks), site=None, name=name, value=of[ranks[0]][1],
            on="all ranks" if everywhere else rank_list(ranks),
        )  # fmt: skip


def _deciding(s: Snapshot, found: Found) -> tuple[Found, bool]:
    """Return (the deciding samples of the first step, whether their batch already had NaN)."""
    step = min(x.step for _, x in found)
    found = [(q, x) for q, x in found if x.step == step]
    from_input = {r.rank for r in s.ranks.values() for x in r.samples if x.kind == "nan_input" and x.step == step}
    losses = [(q, x) for q, x in found if x.kind == "nonfinite_loss"]
    local = [(q, x) for q, x in found if x.kind == "nonfinite_local_gradient"]
    return [(q, x) for q, x in losses if q in from_input] or losses or local or found, bool(from_input)


def _common(s: Snapshot, chosen: Found) -> dict[str, Any]:
    """Return what both findings share, of the samples that decide: each at its site, or at its backward."""
    states = {q: s.ranks[q] for q, _ in chosen}
    backward = {q: next(iter(r.phase_stacks.get("backward") or ()), r.current_site) for q, r in states.items()}
    x, ranks = chosen[0][1], tuple(sorted(states))
    everywhere = len(ranks) == s.world_size
    return {
        # on all ranks at once: it came through a collective of forward, or from what all have in common
        "culprits": () if everywhere and s.world_size > 1 else ranks,
        "where": [where(s.ranks[q], "user_code", y.site or backward[q]) for q, y in chosen],
        "step": x.step,
        "first_seen_s": min((y.t_s for _, y in chosen if y.t_s is not None), default=None),
        "value": "nan" if x.value != x.value else "inf" if x.value > 0 else "-inf",
        "on": "all ranks" if everywhere else rank_list(ranks),
        "everywhere": everywhere,
        "site": x.site,
    }


def _finding(s: Snapshot, found: Found, drift: int | None) -> Finding:
    """Return the finding of losses or gradients that are not finite, in a job whose replicas drift apart since a step, or do not (None)."""
    chosen, from_input = _deciding(s, found)
    common, x, ranks = _common(s, chosen), chosen[0][1], {q for q, _ in chosen}
    everywhere = common["everywhere"]
    others = sorted({q for q, _ in found} - ranks)
    alone = all(y.alone for _, y in found)  # it trains alone: a trial, which may be meant to fail
    alive = sorted(r.rank for r in s.ranks.values() if r.life != Life.MISSING)
    name = next((y.name for _, y in chosen if y.name), "")
    loss = x.kind == "nonfinite_loss"
    do = _DO["input" if from_input else "everywhere" if everywhere else "one rank"]
    if drift is not None and drift < x.step and not from_input:
        do = f"{_DO['drifted'].format(since=drift)}; then {do}"
    if not everywhere:
        common["on"] += " first"
    return NONFINITE(
        **common, cause="loss" if loss else "gradient", severity=Severity.INFO if alone else None,
        victims=[q for q in alive if q not in ranks or everywhere], names=(name,) if name else (),
        what="loss" if loss else "a gradient",
        followed=f"; {rank_list(others)} followed" if others and not everywhere else "",
        name=f" ({name})" if name else "", from_input=": what enters the model already has NaN" if from_input else "",
        alone=": so far it averages nothing with other ranks" if alone else "",
        cost="training on this rank is lost from here on" if alone
        else "averaging carries it to every rank; training is lost from here on",
        do=do.format(step=x.step),
    )  # fmt: skip
