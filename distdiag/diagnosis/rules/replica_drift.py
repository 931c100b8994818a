"""replica_drift: replicas of one model that differ, by checksums of the same elements at the same steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial

import msgspec

from distdiag.diagnosis import kinds, split_models
from distdiag.diagnosis.comparison import Veto, by_step, minority, vetoed
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Finding, Severity, rank_list
from distdiag.diagnosis.model.guards import GuardKind
from distdiag.diagnosis.model.snapshot import Model, RankState, Sample, Site, Snapshot
from distdiag.diagnosis.replicas import (
    averaged_by_ddp,
    averaging_site,
    comparable,
    differ,
    each_text,
    exchange_tensors,
    limits,
    sampled,
    samples_of,
    separate_sets,
    sets_text,
    spread,
    step_site,
    values_of,
)
from distdiag.diagnosis.text.conditions import guard_text
from distdiag.diagnosis.text.drift import (
    DRIFT,
    LEFT_IN_EVAL,
    LOGGED,
    MODES,
    ORDER,
    ORDER_DOES,
    OVERWRITTEN,
    UNFROZEN,
    WAYS,
)
from distdiag.diagnosis.text.phrases import at, wheres
from distdiag.diagnosis.text.template import filled
from distdiag.diagnosis.training_data import NOT_ALL, model_parallel, synchronous, training_loaders
from distdiag.terms.ranks import by_value, unfold_ranks
from distdiag.terms.units import counted, percent

kind = kinds.REPLICA_DRIFT
_VETOES = (
    *NOT_ALL,
    Veto(lambda s: any(r.in_join for r in s.ranks.values()),
         "the ranks are in torch's Join context: those that have run out do not step"),
)  # fmt: skip


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    s = facts.snapshot
    if (found := vetoed(_VETOES, s) or _unfrozen(s) or _order(s)) is not None:
        yield found
        return
    teams = {x.name for x in sampled(s, "parameters")} - {""}
    of_teams = [("parameters", team) for team in sorted(teams) or [""]]
    outside, reported = _drift(facts, "outside_ddp", sorted(s.ranks), split=False), False
    others = [(kind_of, "") for kind_of in ("outside_ddp", "outside_fsdp", "untrained", "frozen", "state", "buffers")]
    for kind_of, team in (*of_teams, *others):
        ranks = [q for q in unfold_ranks(team) if q in s.ranks] or sorted(s.ranks)
        found = outside if kind_of == "outside_ddp" else _drift(facts, kind_of, ranks, bool(team))
        if team and isinstance(found, Finding):
            found = _and_teams(facts, found, [unfold_ranks(x) for x in teams if x != team])
        if kind_of == "parameters" and isinstance(found, Finding) and isinstance(outside, Finding):
            found = _first(outside, found)
        if isinstance(found, Finding):
            if kind_of != "parameters":
                yield Abstained("", checked=True, cause=kind_of)
            if reported:  # the first is the cause, or is enough
                continue
            reported = True
        elif kind_of != "parameters" and not any(sampled(s, kind_of)):
            continue
        yield found
    if reported:
        return
    yield from split_models.crossed(s)
    yield from split_models.layers(s)
    yield from split_models.rates(s)
    yield from _modes(s)
    yield from _logged(s)


def _and_teams(facts: Facts, found: Finding, teams: list[tuple[int, ...]]) -> Finding:
    """Return a drift within one set of ranks, which names the other sets that drift, too."""
    known = ([q for q in of if q in facts.snapshot.ranks] for of in sorted(teams))
    drifts = (_drift(facts, "parameters", ranks, True) for ranks in known if ranks)
    too = [x for x in drifts if isinstance(x, Finding)]
    shown = ", ".join(rank_list(sorted({*x.culprits, *x.victims})) for x in too[:3]) + (", …" if len(too) > 3 else "")
    victims = sorted({*found.victims, *(q for x in too for q in (*x.culprits, *x.victims))})
    message = found.message + (f"; {shown} drift apart among each other, too" if too else "")
    return msgspec.structs.replace(found, message=message, victims=tuple(victims))


def _first(cause: Finding, effect: Finding) -> Finding:
    """Return the drift of parameters outside DDP, if that of DDP's own follows it: through a norm over all gradients, for example."""
    if (cause.step or 0) > (effect.step or 0):
        return effect
    message = f"{cause.message}; those of DDP drift since step {effect.step} or earlier, too"
    return msgspec.structs.replace(cause, message=message, severity=effect.severity, cost=effect.cost)


def _modes(s: Snapshot) -> Iterator[Finding]:
    """Yield the ranks that train with more of their dropout and batch-norm layers in eval mode than the others."""
    samples = by_step({q: values_of(r, "eval_mode") for q, r in s.ranks.items()})
    apart = [k for k, values in samples.items() if len(set(values.values())) > 1]
    if len(apart) < limits.modes or apart[-limits.modes :] != [*samples][-limits.modes :]:
        yield from _left_in_eval(s)
        return
    values = samples[apart[-1]]
    most = max(values.values())
    odd = minority(values) or tuple(q for q, n in values.items() if n == most)
    usual = next(n for q, n in values.items() if q not in odd)
    yield MODES(
        culprits=odd, victims=[q for q in sorted(s.ranks) if q not in odd], step=apart[0], where=(), n=int(values[odd[0]]),
        usual=int(usual), call="train" if values[odd[0]] > usual else "eval",
    )  # fmt: skip


def _left_in_eval(s: Snapshot) -> Iterator[Finding]:
    """Yield that all ranks train with all these layers in eval mode, after steps in which none was."""
    since = []
    for r in s.ranks.values():
        samples = samples_of(r, "eval_mode")
        trained = max((i for i, x in enumerate(samples) if not x.value), default=-1)
        left = samples[trained + 1 :]
        if trained < 0 or len(left) < limits.modes or any(x.value < x.key for x in left):
            return
        since.append((left[0].step, samples[trained].step, int(left[0].value)))
    if since:
        step, before, n = min(since)
        yield LEFT_IN_EVAL(victims=sorted(s.ranks), step=step, where=(), n=n, before=before)


def _logged(s: Snapshot) -> Iterator[Finding]:
    """Yield the values of handle.log() that were equal on all ranks while they changed, and differ now: not local ones."""
    for name in set.intersection(*(set(r.logged) for r in s.ranks.values())):
        logged = by_step({q: dict(r.logged[name]) for q, r in s.ranks.items()})
        equal = [k for k, values in logged.items() if len(set(map(repr, values.values()))) == 1]
        since = [k for k in logged if not equal or k > equal[-1]]
        changing = len({logged[k][min(s.ranks)] for k in equal}) >= limits.logged_equal
        if not changing or len(since) < limits.logged or len(equal) + len(since) < len(logged):
            continue
        values = logged[since[0]]
        odd = minority(values)
        yield LOGGED(
            culprits=odd, victims=[q for q in sorted(s.ranks) if q not in odd], names=(name,), step=since[0],
            where=wheres(s, odd or sorted(s.ranks)), site=None, name=name, n=len(equal), each=each_text(values),
        )  # fmt: skip


_OWN_PARTS = "the parameters that the ranks' optimizers step differ, as shards or each rank's own parts of a model may"
_NAMED = {
    "outside_ddp": "parameters outside DDP",
    "outside_fsdp": "parameters that FSDP does not shard",
    "untrained": "parameters or buffers of modules outside DDP",
    "frozen": "parameters that no gradient trains",
}


def _drift(facts: Facts, kind_of: str, ranks: list[int], split: bool) -> Finding | Abstained:
    """Return the drift of values that must be equal on some ranks.

    Args:
        split: These ranks split a module between them, and the values are of what each has whole.
    """
    s, is_buffers = facts.snapshot, kind_of == "buffers"
    abstained = partial(Abstained, cause=None if kind_of == "parameters" else kind_of)
    models = dict.fromkeys(m.name for r in s.ranks.values() for m in r.models if m.name)
    named = _NAMED.get(kind_of, kind_of)
    named += f" of {', '.join(models)}" if kind_of == "parameters" and models else ""
    samples = by_step({q: {x.step: x for x in samples_of(s.ranks[q], kind_of)} for q in ranks})
    sums = {k: {q: x.value for q, x in of.items()} for k, of in samples.items()}
    common = [k for k, of in samples.items() if comparable([x.key for x in of.values()])]
    sets = separate_sets(s) if kind_of == "parameters" and not split else []
    separate = f"{sets_text(sets)} exchange nothing in most steps, so their replicas were not compared" if sets else ""
    if len(common) < limits.samples:
        few = f"all ranks have checksums of the same elements of {named} at {counted(len(common), 'step')}"
        return abstained(separate or f"{few}; {limits.samples} are needed")

    def differing(relative: float) -> list[int]:
        return [k for k in common if differ([*sums[k].values()], relative)]

    steps = differing(limits.buffers_relative) if is_buffers else []
    mild = is_buffers and not steps  # statistics of different batches differ a little from the first step on
    steps = steps or differing(limits.relative)
    over = kind_of == "state" and _over(facts, steps, common)
    if len(steps) < limits.samples or not (over or steps[-limits.samples :] == common[-limits.samples :]):
        if not (finite := [k for k in common if all(map(math.isfinite, sums[k].values()))]):
            return abstained(f"no checksum of {named} is finite")
        return abstained(_agree(named, finite, len({*steps} & {*finite})), checked=True)
    # later ones may be NaN on all ranks, which says nothing
    steps = [k for k in steps if all(map(math.isfinite, sums[k].values()))] or steps
    cause = "split_module" if split else _cause(s, kind_of, steps)
    began_equal = len([k for k in common if k < steps[0]]) >= limits.samples
    if cause is None or (mild and not began_equal):
        if separate:
            return abstained(separate)
        averaged = kind_of == "parameters" and any(x.value >= limits.averaged for x in sampled(s, "averaged"))
        if common[0] or kind_of not in ("parameters", "outside_fsdp") or averaged or not steps[0]:
            stepped = kind_of == "parameters" and not any(r.models for r in s.ranks.values())
            why = f"{named} differ, as the structure of the model allows"
            return abstained(_OWN_PARTS if stepped else why, checked=True)
        return abstained(f"{named} agreed before the first step and differ since: each rank may have its own by intent")
    if cause == "overwritten":
        name, severity = next(reversed(sampled(s, kind_of))).name, Severity.INFO if over else None
        seen = f", at {len(steps)} of {counted(len(common), 'step')} that were compared, but not at the newest two"
        return OVERWRITTEN(victims=ranks, step=steps[0], name=name, passed=seen if over else "", severity=severity)
    distances = [spread(sums[k]) for k in steps]
    move_apart = min(distances) < limits.constant * max(distances) if common[0] else steps[0]
    if cause == "different_init" and not began_equal and move_apart:
        cause = "unequal"
    if cause == "gradients_not_synced" and averaged_by_ddp(s) == "each_step" and not steps[0]:
        cause = "different_init"  # before the first step: weights were loaded after DDP had made the replicas equal
    local = cause in ("unequal", "gradients_not_synced") and _local_gradients(s, steps)
    equal = 0 if cause == "outside_fsdp" else max((k for k in common if k < steps[0]), default=None)
    return _finding(facts, "mild" if mild else cause, steps, sums[steps[-1]], equal, began_equal, local)


def _over(facts: Facts, steps: list[int], common: list[int]) -> bool:
    """True if a warning of overwritten buffers is to be an info since they are equal: statistics of own batches may be frozen later."""
    told = any((f.kind, f.cause) == (kind.name, "buffers") for f in facts.reported)
    equal = not {*steps} & {*common[-limits.samples :]}
    return told and equal and _cause(facts.snapshot, "state", steps) == "overwritten"


def _agree(named: str, compared: list[int], differing: int) -> str:
    """Return why there is no drift: of what, and at which steps, the checksums were compared."""
    n, newest = counted(len(compared), "step"), f"the newest is {compared[-1]:,}"
    if differing:
        return f"the checksums of some elements of {named} differ at {differing} of {n} that were compared, but not at both of the newest two ({newest})"
    return f"the checksums of some elements of {named} agree at {n} that were compared ({newest})"


def _local_gradients(s: Snapshot, drifting: list[int]) -> bool:
    """True if the gradients with which the optimizers step differ between ranks: what was averaged does not reach them."""
    sums = by_step({q: values_of(r, "gradients") for q, r in s.ranks.items()})
    newest = [sums[k] for k in drifting if k in sums][-2 * limits.samples :]  # local ones may be close now and then
    return sum(spread(of) > limits.gradients * max(of.values()) for of in newest) >= limits.samples


def _cause(s: Snapshot, kind: str, drifting: list[int]) -> str | None:
    """Return why replicas differ; None if they may differ by design."""
    models = [m for r in s.ranks.values() for m in r.models]
    over_all = [m for m in models if s.whole(m.group)]
    values = ({x.value for x in samples_of(r, kind)} for r in s.ranks.values())
    if kind in ("state", "frozen") and all(len(of) < limits.samples for of in values):
        return None  # a constant of each rank
    if kind in ("state", "buffers"):
        sent = {m.broadcast_buffers for m in over_all} if synchronous(s) else set()
        if sent == {True} and kind == "state" and averaged_by_ddp(s) == "each_step" and not any(_modes(s)):
            return "overwritten"
        return kind if sent == {False} else None
    if kind in ("untrained", "frozen"):  # an exchange of the script may keep the latter close to each other
        own = kind == "frozen" and exchange_tensors(s)
        return kind if over_all and synchronous(s) and not own else None
    if kind == "outside_ddp":
        return None if exchange_tensors(s) else kind
    if kind == "outside_fsdp":
        every = all(limits.reduced[0] <= x.value <= limits.reduced[1] for x in sampled(s, "reduced"))
        return kind if _left_to_ranks(s, *["all_reduce"] * every) else None
    if _not_written_back(s, drifting):
        return "not_written_back"
    if over_all and len(over_all) >= s.world_size:
        # Parameters that are averaged now and then, not their gradients at each step, differ between those times (local
        # SGD). Otherwise: no backward is synchronised, or the parameters that are stepped are not those that DDP wraps.
        averaged = max((x.value for x in sampled(s, "averaged")), default=0.0)
        return "gradients_not_synced" if averaged < limits.averaged else None
    if models:
        return None
    reduced = [values_of(r, "reduced") for r in s.ranks.values()]
    shares = [of[k] for of in reduced for k in drifting if k in of]
    least, most = limits.reduced
    if _never_averaged(s, shares):
        return "never_averaged"
    earlier = [share for of in reduced for k, share in of.items() if k < drifting[0]]
    all_before = len(earlier) >= limits.samples * len(s.ranks) and all(least <= share <= most for share in earlier)
    # The same gradients are averaged at every step since, but more parameters are trained.
    some_now = shares and limits.metrics < min(shares) and max(shares) < min(least, min(shares) + limits.metrics)
    if all_before and some_now:
        return "partly_averaged"
    if some_now and min(shares) >= limits.almost and not model_parallel(s):
        return "some_reduced"
    if not shares or min(shares) < least or max(shares) > most:
        return None
    return "different_init"


def _not_written_back(s: Snapshot, drifting: list[int]) -> bool:
    """True if replicas began equal, and averagings of as many elements as they have leave them as they were, and different.

    Averages that arrive after the next step are applied later.
    """
    sums = by_step({q: values_of(r, "not_written_back") for q, r in s.ranks.items()})
    apart = [differ([*of.values()], limits.relative) for of in sums.values()]
    changed = any(x.key >> 32 for x in sampled(s, "not_written_back"))
    equal_first = drifting[0] > 0 and not changed and all(0 in values_of(r, "parameters") for r in s.ranks.values())
    return len(apart) >= limits.samples and all(apart) and equal_first and not any(map(_late, s.ranks.values()))


def _late(r: RankState) -> bool:
    """True if a rank does not wait for an all_reduce of tensors before its next step ends, or another thread reduces them."""
    for c in r.calls:
        if c.op == "all_reduce" and (c.bytes or 0) > limits.metrics_bytes and c.entered_s is not None:
            until_s = c.completed_s or c.left_s or math.inf
            if c.other_thread or (c.asynchronous and any(c.entered_s < x.end_s < until_s for x in r.steps)):
                return True
    return False


def _never_averaged(s: Snapshot, shares: list[float]) -> bool:
    """True if ranks that split their data by rank (DistributedSampler) have exchanged no tensor in a whole epoch."""
    loaders = training_loaders(s)
    if not loaders or not all(x.distributed_sampler for x in loaders.values()):
        return False
    if any(share > limits.metrics for share in (*shares, *(x.value for x in sampled(s, "averaged")))):
        return False
    return not exchange_tensors(s) and all(x.iterations_started > 1 for x in loaders.values())


def _left_to_ranks(s: Snapshot, *reduces: str) -> bool:
    """True if parameters that FSDP does not shard were equal before the first step and at no sampled step since, and no exchange may be theirs.

    FSDP gathers and reduce-scatters; experts and stages of the ranks' own need other operations.

    Args:
        reduces: Operations of the script that may reduce all gradients, and do not keep these parameters equal.
    """
    common = by_step({q: values_of(r, "outside_fsdp") for q, r in s.ranks.items()})
    own = exchange_tensors(s, *limits.of_fsdp, *reduces) or any(r.p2p_issued or r.models for r in s.ranks.values())
    apart = [k for k, of in common.items() if len(set(of.values())) > 1]
    return [0, *apart] == [*common] and synchronous(s) and not own


def _apart_in(s: Snapshot, kind: str, drifting: list[int]) -> dict[int, float]:
    """Return each rank's learning rate, or another sample, at the newest step (up to the newest that drifts) at which they differed; or nothing."""
    values = by_step({q: values_of(r, kind) for q, r in s.ranks.items()})
    apart = [of for k, of in values.items() if k <= drifting[-1] and len(set(of.values())) > 1]
    return apart[-1] if apart else {}


_BY_HAND = ("different_init", "partly_averaged", "some_reduced", "unequal", "not_written_back")
_WARNS = ("outside_ddp", "outside_fsdp", "untrained", "frozen", "state", "not_written_back")
# a plain tensor in a model of DTensors may be a rank's own, such as its experts
_BY_DESIGN = (*_WARNS, "some_reduced", "partly_averaged", "split_module")


def _what_differs(s: Snapshot, steps: list[int]) -> tuple[str, dict[int, float]]:
    """Return (which of `WAYS`, each rank's value) if ranks skip different steps, or their optimizers differ; or nothing.

    After different numbers of steps, nothing else can be compared step by step.
    """
    if skipped := _skipped_steps(s):
        return "skipped_steps", skipped
    ways = {"optimizer_steps": "optimizer_state", "learning_rate": "learning_rates"}
    found = ((way, of) for kind_of, way in ways.items() if (of := _apart_in(s, kind_of, steps)))
    return next(found, ("", {}))


def _finding(
    facts: Facts,
    cause: str,
    steps: list[int],
    values: dict[int, float],
    equal: int | None,
    began_equal: bool,
    local: bool,
) -> Finding:
    """Return the finding of replicas whose newest checksums are `values`, and which differ at `steps`, after they were equal at a step."""
    s = facts.snapshot
    models = [m for r in s.ranks.values() for m in r.models]
    averaged = cause == "different_init" or (averaged_by_ddp(s) == "each_step" and cause == "gradients_not_synced")
    lost = _hooks_lost(s, steps[0]) if averaged else None
    way, each = _what_differs(s, steps) if averaged and not lost else ("hooks_lost" if lost else "", {})
    # at the start, those that have loaded a checkpoint may be right, and the others wrong, however many they are
    no_one = lost or (way == "optimizer_state" and not began_equal)
    odd, ranks = () if no_one else minority(each or values), sorted(values)
    apart, written = _apart(s, equal, steps[0], odd)
    way = way or _way(s, cause, averaged, began_equal, local, written)
    by_hand = cause in _BY_HAND and not models
    unawaited = _not_waited_for(s) if way in ("unequal", "local") or by_hand else None
    way = "not_waited" if unawaited is not None else way
    newest = lost or next(reversed(sampled(s, "reduced" if way == "some_reduced" else cause)), None)
    words = WAYS[way]
    what = filled(
        words.what, passes=min((m.synced_backwards for m in models), default=0),
        in_all=max((m.forwards / max(m.synced_backwards, 1) for m in models), default=0.0), steps=max(r.step for r in s.ranks.values()),
        name=newest and newest.name, share=newest and newest.value, apart=apart, site=unawaited,
        hooks=lost and ("its parameters" if lost.value == lost.key else f"{lost.value:.0f} of {lost.key} parameters that were checked"),
    )  # fmt: skip
    if each:
        what += f" ({each_text(each)})"
    elif way == "gradients_not_synced":
        what += _not_through_ddp(s)
    sites = {q: site for q in ranks if (site := _place(s.ranks[q], words.place, by_hand)) is not None}
    certain = steps[-1] >= limits.certain_step and cause not in _BY_DESIGN
    near = f"differed by less than {percent(limits.buffers_relative)}" if way == "buffers" else "agreed within rounding"
    return DRIFT(
        cause=known if (known := words.cause or way) in kind.causes else None, proved=certain or cause in ("buffers", "mild"),
        severity=Severity.INFO if cause in ("mild", "some_reduced") else Severity.WARNING if cause in _WARNS else None,
        culprits=odd, victims=[q for q in ranks if q not in odd], step=steps[0], last=steps[-1],
        where=wheres(s, sites, None, sites), what=what,
        equal="" if equal is None else f" (checksums {near} at step {equal})", spread=spread(values), cost=words.cost,
        do=(_skips(facts) if way == "skipped_steps" else "") + words.do,
    )  # fmt: skip


def _place(r: RankState, place: str, by_hand: bool) -> Site | None:
    """Return the line of a rank that the evidence is of (`Words.place`); None if it is not known."""
    if place == "averaging" or (by_hand and place == "all_reduce"):
        return averaging_site(r, by_hand)
    if place == "wrap":
        return next((m.site for m in r.models), None)
    found = (
        step_site(r) if phase == "optimizer" else next(iter(r.phase_stacks.get(phase, ())), None)
        for phase in place.split()
    )
    return next(filter(None, found), None)


def _skips(facts: Facts) -> str:
    """Return the condition under which ranks step, or go on before they do; empty if none is known."""
    stacks = [stack for r in facts.snapshot.ranks.values() if (stack := r.phase_stacks.get("optimizer"))]
    guard = guard_text(stacks[0], facts.source, GuardKind.HOLDS, GuardKind.PASSED) if stacks else ""
    return f"{guard} may be what decides on each rank by itself whether it steps: " if guard else ""


def _skipped_steps(s: Snapshot) -> dict[int, float]:
    """Return how many averaged backward passes of each rank had no optimizer step of their own, when that differed last; or nothing.

    By the checksums of one step, whose keys count the passes before it, as ranks are polled at different moments, and the numbers may be
    equal again. Most passes must be followed by a step.
    """
    keys = by_step({q: {x.step: x.key >> 32 for x in samples_of(r, "parameters")} for q, r in s.ranks.items()})
    for k, passes in reversed(keys.items()):
        without = {q: float(n - k) for q, n in passes.items()}
        if len({*without.values()}) > 1 and all(0 <= 2 * without[q] < n for q, n in passes.items()):
            return without
    return {}


def _way(s: Snapshot, cause: str, averaged: bool, began_equal: bool, local: bool, written: bool) -> str:
    """Return which of `WAYS` replicas went that came apart for a cause."""
    models = [m for r in s.ranks.values() for m in r.models]
    way = cause
    accumulates = models and all(2 * m.forwards > 3 * m.synced_backwards > 0 for m in models)
    if averaged and began_equal:
        way = "accumulated" if accumulates else "update"
    elif averaged and cause == "gradients_not_synced":
        way = "first_update"
    elif cause == "gradients_not_synced":
        way = averaged_by_ddp(s) or cause
    if way == "outside_fsdp" and not _left_to_ranks(s):
        return "beside_fsdp"
    if local and averaged and accumulates:
        return "added"
    if local and way in ("unequal", "update", "first_update"):
        no_hook = models and all(m.buckets is not None and m.buckets.comm_hook is None for m in models)
        each_step = no_hook and averaged_by_ddp(s) == "each_step"
        return "local" if way == "unequal" else "changed in DDP" if each_step else "changed"
    if way == "update" and written:
        return "written"
    return "different_init in DDP" if way == "different_init" and models else way


def _hooks_lost(s: Snapshot, since: int) -> Sample | None:
    """Return the newest sample of parameters without DDP's hooks, if every rank has had some when the replicas came apart."""
    lost = [[x for x in samples_of(r, "hooks_lost") if x.step <= since] for r in s.ranks.values()]
    return lost[0][-1] if all(lost) else None


def _apart(s: Snapshot, equal: int | None, first: int, odd: tuple[int, ...]) -> tuple[str, bool]:
    """Return how the parameters came apart between two steps, and whether something else than the common steps wrote those of `odd`."""
    rates = by_step({q: {x.step: x for x in samples_of(r, "learning_rate")} for q, r in s.ranks.items()})
    counts = {k: {q: x.key & 0xFFFFFFFF for q, x in of.items()} for k, of in rates.items()}
    written = {q: n - counts[equal][q] for q, n in counts[first].items()} if equal in counts and first in counts else {}
    most = {q for q, n in written.items() if n == max(written.values())}
    named = {*odd} or most
    if most != {*written} and named in (most, {*written} - most):
        text = f"then the parameters of {rank_list(sorted(named))} were written {'more' if named == most else 'less'} often than those of "
        return text + rank_list(sorted({*written} - named)), bool(odd) and named == most
    text = f"then those of {rank_list(odd)} changed in another way than the others"
    return text if odd else "then they changed in different ways", False


def _not_through_ddp(s: Snapshot) -> str:
    """Return which wrapped modules have trained without DDP on every rank; an empty text if none has."""
    per_rank = [[(m.name, m.elements, m.site) for m in r.models if not m.synced_backwards] for r in s.ranks.values()]
    if not per_rank[0] or any(len(models) != len(per_rank[0]) for models in per_rank):
        return ""
    shown = [f"{name or 'module'} of {counted(n, 'element')}, wrapped{at(site)}" for name, n, site in per_rank[0][:3]]
    return f"; DDP has averaged no backward pass of {'; '.join(shown)}"


def _not_waited_for(s: Snapshot) -> Site | None:
    """Return the line whose asynchronous all_reduces no rank waits for; None if there is none."""
    per_rank = [[c for c in r.calls if c.asynchronous and c.op == "all_reduce"] for r in s.ranks.values()]
    done = any(c.completed_s is not None for calls in per_rank for c in calls)
    return per_rank[0][-1].site if all(per_rank) and not done else None


def _unfrozen(s: Snapshot) -> Finding | None:
    """Return the finding of parameters that were frozen when DDP was built and get gradients now.

    Nothing if some gradients are reduced by hand: theirs may be among them.
    """
    samples = {q: x for q, r in s.ranks.items() for x in r.samples if x.kind == "unfrozen"}
    if not samples or any(x.value > limits.metrics for x in sampled(s, "reduced")):
        return None
    first, ranks = min(samples.values(), key=lambda x: x.step), sorted(samples)
    return UNFROZEN(
        victims=ranks, where=wheres(s, ranks, None, {q: x.site for q, x in samples.items()}), names=(first.name,),
        step=first.step, site=first.site, n=int(first.value), name=first.name,
    )  # fmt: skip


def _order(s: Snapshot) -> Finding | None:
    """Return the finding of ranks whose modules in DDP have tensors of the same names and shapes, in different orders."""
    models: dict[tuple[str, str, int], dict[int, Model]] = {}
    for (q, r), what in itertools.product(s.ranks.items(), ORDER_DOES):
        for m in r.models:
            if m.group is not None and (what == "parameter" or m.broadcast_buffers):
                models.setdefault((what, m.group, getattr(m, f"{what}_order") >> 32), {})[q] = m
    for (what, *_), of in models.items():
        sides = [tuple(x) for x in by_value({q: getattr(m, f"{what}_order") for q, m in of.items()}).values()]
        if len(sides) > 1:
            return ORDER(
                cause="buffers" if what == "buffer" else None, severity=Severity.WARNING if what == "buffer" else None, victims=sorted(of),
                where=wheres(s, of, None, {q: m.site for q, m in of.items()}), name=of[min(of)].name or "the module", what=what, does=ORDER_DOES[what],
                sides=sets_text(sides),
            )  # fmt: skip
    return None
