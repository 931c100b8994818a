"""nonfinite: a loss or gradient is NaN or infinite; on which rank first, and whether its batch already had NaN.

A loss that is infinite while its gradients are finite is an info: a large loss scale does that, too.

Faulty jobs: log_poisson, norm_grad. Healthy look-alikes: half_scaler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from distdiag.diagnosis import kinds
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Certainty, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import Life, RankState, Sample, Site, Snapshot
from distdiag.diagnosis.text.phrases import at, where

kind = kinds.NONFINITE


@dataclass(frozen=True)
class Limits:
    """None: a value is finite or it is not."""


limits = Limits()
Found = list[tuple[int, Sample]]  # (rank, sample)


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    """Yield the first value that is not finite."""
    s = facts.snapshot
    found = [(r.rank, x) for r in s.ranks.values() for x in r.samples if x.kind.startswith("nonfinite")]
    infinite = [(r.rank, x) for r in s.ranks.values() for x in r.samples if x.kind == "infinite_loss"]
    if found:
        yield _finding(s, found)
    elif infinite:
        yield _harmless(s, infinite)
    elif not any(x.loss is not None for r in s.ranks.values() for x in r.steps):
        yield Abstained("no scalar loss has gone through backward; values of handle.log() are not judged")


def _first(s: Snapshot, found: Found) -> tuple[Found, bool]:
    """Return (the deciding samples of the first step, whether their batch already had NaN)."""
    step = min(x.step for _, x in found)
    at_first = [(q, x) for q, x in found if x.step == step]
    from_input = {r.rank for r in s.ranks.values() for x in r.samples if x.kind == "nan_input" and x.step == step}
    losses = [(q, x) for q, x in at_first if x.kind == "nonfinite_loss"]
    in_order = (
        [(q, x) for q, x in losses if q in from_input],
        losses,
        [(q, x) for q, x in at_first if x.kind == "nonfinite_local_gradient"],
        at_first,
    )
    return next(filter(None, in_order)), bool(from_input)


def _backward_place(r: RankState) -> Site | None:
    stack = r.phase_stacks.get("backward")
    return stack[0] if stack else r.current_site


# -- wording ----------------------------------------------------------------------------------------------------------


def _finding(s: Snapshot, found: Found) -> Finding:
    chosen, from_input = _first(s, found)
    x = chosen[0][1]
    cause = "loss" if x.kind == "nonfinite_loss" else "gradient"
    ranks = tuple(sorted({q for q, _ in chosen}))
    alone = all(y.alone for _, y in found)  # it trains alone: a trial, which may be meant to fail
    everywhere = len(ranks) == s.world_size
    alive = [r for r in s.ranks.values() if r.life != Life.MISSING]
    name = next((y.name for _, y in chosen if y.name), "")
    return Finding(
        kind=kind.name,
        cause=cause,
        certainty=Certainty.PROVED,
        severity=Severity.INFO if alone else Severity.ERROR,
        # on all ranks at once: it came through a collective of forward, or from what all have in common
        culprits=() if everywhere and s.world_size > 1 else ranks,
        victims=tuple(sorted(r.rank for r in alive if r.rank not in ranks or everywhere)),
        where=tuple(where(s.ranks[q], "user_code", y.site or _backward_place(s.ranks[q])) for q, y in chosen),
        names=(name,) if name else (),
        step=x.step,
        first_seen_s=min((y.t_s for _, y in chosen if y.t_s is not None), default=None),
        message=_message(x, name, ranks, everywhere, sorted({q for q, _ in found} - set(ranks)))
        + (": the batch already had NaN" if from_input else "")
        + (": so far it averages nothing with other ranks" if alone else ""),
        cost="training on this rank is lost from here on"
        if alone
        else "averaging carries it to every rank; training is lost from here on",
        advice=_advice(x.step, from_input, everywhere),
    )


def _harmless(s: Snapshot, found: Found) -> Finding:
    """Return the finding of losses that are infinite, several in a row, while their gradients are finite."""
    step = min(x.step for _, x in found)
    chosen = [(q, x) for q, x in found if x.step == step]
    ranks = tuple(sorted({q for q, _ in chosen}))
    x = chosen[0][1]
    everywhere = len(ranks) == s.world_size
    return Finding(
        kind=kind.name,
        cause="loss",
        certainty=Certainty.PROVED,
        severity=Severity.INFO,
        culprits=() if everywhere and s.world_size > 1 else ranks,
        victims=ranks if everywhere else (),
        where=tuple(where(s.ranks[q], "user_code", y.site or _backward_place(s.ranks[q])) for q, y in chosen),
        step=step,
        first_seen_s=min((y.t_s for _, y in chosen if y.t_s is not None), default=None),
        message=f"loss is {'inf' if x.value > 0 else '-inf'} on {'all ranks' if everywhere else rank_list(ranks)} since step {step}"
        f"{at(x.site)}; the gradients are finite, so training goes on",
        cost="averages and logs of the loss are infinite, too",
        advice="if the loss is not scaled by a large factor: check the batch, and logarithms and divisions in the loss",
    )


def _message(x: Sample, name: str, ranks: tuple[int, ...], everywhere: bool, others: list[int]) -> str:
    value = "nan" if x.value != x.value else ("inf" if x.value > 0 else "-inf")
    what = f"{'loss' if x.kind == 'nonfinite_loss' else 'a gradient'} is {value}"
    on = "all ranks" if everywhere else f"{rank_list(ranks)} first"
    followed = f"; {rank_list(others)} followed" if others and not everywhere else ""
    return f"{what} on {on}, step {x.step}{followed}{f' ({name})' if name else ''}{at(x.site)}"


def _advice(step: int, from_input: bool, everywhere: bool) -> str:
    if from_input:
        do = f"look for NaN in the data, and drop or repair such samples: the batch of step {step} has some"
    elif everywhere:
        do = f"check the batches of step {step}, the collectives in forward, and the learning rate"
    else:
        do = f"check that rank's batch of step {step}, and divisions and logarithms in the loss"
    return f"{do}; go back to the last checkpoint"
