"""Parameters: without gradient, drifting apart between replicas, or not finite."""

from __future__ import annotations

from distdiag.diagnosis.model.findings import Certainty, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import Life, Model, RankState, Sample, Site, Snapshot
from distdiag.diagnosis.rules import drift
from distdiag.diagnosis.rules.endings import UNUSED
from distdiag.diagnosis.text.phrases import at, where

NOT_NEEDED_CHECKS = 40  # looks at all gradients without a miss before the flag is called unneeded
# Looks without a gradient at any of them, where DDP was told to expect unused parameters: worth a line; worth a warning
SOME_LOOKS, NEVER_LOOKS = 30, 100
NOT_NEEDED_SHARE = 0.001  # of the step, below which the search is not worth a word


def rules(s: Snapshot) -> list[Finding]:
    """Findings about parameters."""
    return [*_unused(s), *_frozen(s), *_not_needed(s), *drift.rules(s), *_nonfinite(s)]


# -- unused ------------------------------------------------------------------------------------------------


def _model_of(r: RankState) -> Model | None:
    """The DDP module of a rank that had parameters without gradient, the most recent such."""
    hit = [m for m in r.models if m.unused]
    return max(hit, key=lambda m: m.unused_step) if hit else None


def _unused(s: Snapshot) -> list[Finding]:
    having = {r.rank: m for r in s.ranks.values() if (m := _model_of(r)) is not None}
    if not having:
        return []
    refused = {
        q
        for q, m in having.items()
        if m.unused_site is not None or UNUSED.search(s.ranks[q].exception or s.ranks[q].caught or "")
    }
    first = next(iter(having.values()))
    flagged = bool(first.find_unused) or first.static_graph
    by_names: dict[tuple[str, ...], list[int]] = {}
    for q, m in having.items():
        by_names.setdefault(tuple(n for n, _ in m.unused), []).append(q)
    with_models = [r.rank for r in s.ranks.values() if r.models]
    lacking = [q for q in with_models if q not in having and s.ranks[q].models[-1].unused_checks > 0]
    differs = len(by_names) > 1 or bool(lacking)
    if flagged or (not first.find_unused and not refused and not _will_crash(having)):
        severity = Severity.INFO
    else:
        severity = Severity.ERROR
    if differs and not refused and severity != Severity.INFO and not _stuck_in_backward(s):
        severity = Severity.INFO  # the looks of the ranks fell on different steps; nothing has come of it
    unused = dict(p for m in having.values() for p in m.unused)
    looks = min(m.unused_checks for m in having.values())
    if flagged and not refused:  # branches that are skipped now and then are what the flag is for
        unused, differs = _never(s, having), False
        if not unused:
            return []
        if looks >= NEVER_LOOKS and not first.flag_of_library:
            severity = Severity.WARNING
    names = tuple(unused)
    elements = sum(unused.values())
    culprits = tuple(sorted(having)) if differs and lacking else ()
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    on = "all ranks" if not differs else rank_list(sorted(having))
    where_site = next((m.unused_site for m in having.values() if m.unused_site), None)
    crash = "DDP refuses the next forward" if refused else "DDP will refuse the next forward"
    return [
        Finding(
            kind="unused_parameters",
            cause="differs_between_ranks" if differs else "never_used",
            certainty=Certainty.PROVED,
            severity=severity,
            culprits=culprits,
            victims=tuple(q for q in sorted(with_models) if q not in culprits),
            where=tuple(
                where(s.ranks[q], "crashed" if q in refused else None, having[q].unused_site) for q in sorted(having)
            ),
            names=names,
            step=max(m.unused_step for m in having.values()),
            message=f"{len(names)} parameters ({elements:,} elements) got no gradient on {on}: {shown}{at(where_site)}"
            f"{f', at any of {looks} looks' if flagged else ''}{_why(first)}",
            cost=crash if severity == Severity.ERROR else "they are never trained",
            advice="use their output in the loss, freeze them (requires_grad_(False)) before DDP, or pass "
            "find_unused_parameters=True"
            if not flagged
            else "freeze or remove them if they are meant to stay unused",
        )
    ]


def _never(s: Snapshot, having: dict[int, Model]) -> dict[str, int]:
    """Name and elements of what no rank has ever had a gradient for, in some dozens of looks."""
    models = list(having.values())
    if len(having) < len(s.ranks) or any(m.unused_checks < SOME_LOOKS for m in models):
        return {}
    common = set.intersection(*({n for n, _ in m.never_trained} for m in models))
    return {n: k for n, k in models[0].never_trained if n in common}


def _why(m: Model) -> str:
    """Whether the modules of the unused parameters were entered at all, where that was seen."""
    if m.never_called is None or m.unused_step > 1:
        return ""
    if not m.never_called:
        return "; forward did call their modules: what they compute does not reach the loss"
    names = [n or "the model itself" for n in m.never_called]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"; forward never called {shown}"


def _frozen(s: Snapshot) -> list[Finding]:
    """Parameters that are not trained on purpose: said once, so that nobody takes them for unused ones."""
    models = {r.rank: m for r in s.ranks.values() for m in r.models if m.frozen and m.forwards}
    if not models:
        return []
    m = next(iter(models.values()))
    names = tuple(n for n, _ in m.frozen_names)
    return [
        Finding(
            kind="unused_parameters",
            cause="frozen",
            certainty=Certainty.PROVED,
            severity=Severity.INFO,
            victims=tuple(sorted(models)),
            where=tuple(where(s.ranks[q], None, x.site) for q, x in sorted(models.items())),
            names=names,
            message=f"{m.frozen} of {m.frozen + m.parameters} parameters are frozen (requires_grad False), "
            f"so DDP does not wait for them: {', '.join(names[:4])}{f' and {m.frozen - 4} more' if m.frozen > 4 else ''}",
            cost="none, where that is meant",
            advice="set requires_grad before wrapping in DDP if they are to be trained",
        )
    ]


def _will_crash(having: dict[int, Model]) -> bool:
    return any(m.find_unused is False and not m.static_graph and m.synced_backwards > 0 for m in having.values())


def _stuck_in_backward(s: Snapshot) -> bool:
    return any(r.blocked is not None and r.phase == "backward" for r in s.ranks.values())


def _not_needed(s: Snapshot) -> list[Finding]:
    models = [m for r in s.ranks.values() for m in r.models if m.find_unused]
    if not models or s.usual_step_s is None or len(s.ranks) < s.world_size:
        return []
    if any(m.unused_hits or m.unused_checks < NOT_NEEDED_CHECKS or m.search_ms is None for m in models):
        return []
    cost_ms = max(m.search_ms or 0.0 for m in models)
    if cost_ms < NOT_NEEDED_SHARE * s.usual_step_s * 1e3:
        return []
    m = models[0]
    return [
        Finding(
            kind="unused_parameters",
            cause="flag_not_needed",
            certainty=Certainty.SUSPECTED,
            # a library's default is no fault of the script, however dear it is
            severity=Severity.INFO if m.flag_of_library else Severity.WARNING,
            victims=tuple(sorted(s.ranks)),
            where=tuple(where(r, None, x.site) for r in s.ranks.values() for x in r.models[:1]),
            message=f"find_unused_parameters=True{at(m.site)}, but every parameter got a gradient in "
            f"{min(x.unused_checks for x in models)} of {min(x.unused_checks for x in models)} looks",
            cost=f"{cost_ms:.1f} ms per step ({cost_ms / s.usual_step_s / 10:.0f} % of it) spent searching the graph",
            advice="switch it off in the library that wraps the model (for Hugging Face, ddp_find_unused_parameters=False)"
            if m.flag_of_library
            else "drop the flag if no branch of the model is ever skipped",
        )
    ]


# -- replicas ----------------------------------------------------------------------------------------------


# -- not finite --------------------------------------------------------------------------------------------


def _nonfinite(s: Snapshot) -> list[Finding]:
    found: list[tuple[int, Sample]] = [
        (r.rank, x) for r in s.ranks.values() for x in r.samples if x.kind.startswith("nonfinite")
    ]
    if not found:
        return []
    first_step = min(x.step for _, x in found)
    at_first = [(q, x) for q, x in found if x.step == first_step]
    alone = all(x.alone for _, x in found)
    losses = [(q, x) for q, x in at_first if x.kind == "nonfinite_loss"]
    cause = "loss" if losses else "gradient"
    from_input = {r.rank for r in s.ranks.values() for x in r.samples if x.kind == "nan_input" and x.step == first_step}
    losses = [(q, x) for q, x in losses if q in from_input] or losses
    chosen = losses or [(q, x) for q, x in at_first if x.kind == "nonfinite_local_gradient"] or at_first
    ranks = tuple(sorted({q for q, _ in chosen}))
    x = chosen[0][1]
    everywhere = len(ranks) == s.world_size
    name = next((y.name for _, y in chosen if y.name), "")
    value = "nan" if x.value != x.value else ("inf" if x.value > 0 else "-inf")
    others = sorted({q for q, _ in found} - set(ranks))
    alive = [r for r in s.ranks.values() if r.life != Life.MISSING]
    what = f"{'loss is' if cause == 'loss' else 'a gradient is'} {value}"
    return [
        Finding(
            kind="nonfinite",
            cause=cause,
            certainty=Certainty.PROVED,
            severity=Severity.INFO if alone else Severity.ERROR,  # a trial of its own: it may be meant to fail
            # everywhere at once: it came through a collective of forward, or from what all have in common
            culprits=() if everywhere and s.world_size > 1 else ranks,
            victims=tuple(sorted(r.rank for r in alive if r.rank not in ranks or everywhere)),
            where=tuple(where(s.ranks[q], "user_code", y.site or _backward_place(s.ranks[q])) for q, y in chosen),
            names=(name,) if name else (),
            step=first_step,
            first_seen_s=min((y.t_s for _, y in chosen if y.t_s is not None), default=None),
            message=f"{what} on {'all ranks' if everywhere else rank_list(ranks) + ' first'}, step {first_step}"
            + (f"; {rank_list(others)} followed" if others and not everywhere else "")
            + (f" ({name})" if name else "")
            + at(x.site)
            + (": NaN was in the batch already" if from_input else "")
            + (": it had trained by itself so far, nothing is averaged with others" if alone else ""),
            cost="what that rank trains from here on is lost"
            if alone
            else "averaging carries it to every rank; what is trained from here on is lost",
            advice=(
                f"look for NaN in the data, and drop or mend such samples: the batch of step {first_step} has some"
                if from_input
                else f"look at the batches of step {first_step}, what collectives carry in forward, and the learning rate"
                if everywhere
                else f"look at that rank's batch of step {first_step}, and at divisions and logarithms in the loss"
            )
            + "; go back to the last checkpoint",
        )
    ]


def _backward_place(r: RankState) -> Site | None:
    stack = r.phase_stacks.get("backward")
    return stack[0] if stack else r.place
