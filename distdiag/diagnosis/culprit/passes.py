"""Evidence from DDP's passes: who ran a forward without its backward, or more backwards than optimizer steps.

A batch that is skipped after its forward (a loss that is not finite, an exception that is caught) leaves a
rank's collectives one step ahead of the others'. DDP averages gradients in every backward: a rank that
repeats a batch (in two halves after an exception, for example) makes one more, and its next passes meet the
others' passes of the step after.
"""

from __future__ import annotations

from distdiag.diagnosis.culprit import callers
from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.culprit.paths import Condition, conditions_between, handler_around
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call, RankState, Site, lines_of
from distdiag.diagnosis.model.syntax import Source, function, tree_of
from distdiag.diagnosis.text.conditions import NO_WEIGHT, conditions_text, handler_advice
from distdiag.diagnosis.text.phrases import op_at, shortened
from distdiag.diagnosis.waits.wait import by_python
from distdiag.terms.operations import op_name
from distdiag.terms.units import counted

STEPS = 3  # from which on one backward for each forward and for each step is a habit
UNDER_WAY = 1  # a pass whose step is not done yet


def extra(case: Case) -> Testimony | None:
    """Accuse the one rank with more, or fewer, backward passes than optimizer steps, if the others made one for each."""
    states = _states(case)
    if any(len(state.models) != 1 or state.step < STEPS for state in states.values()):
        return None
    over = {rank: _over(state) for rank, state in states.items()}
    odd = {rank for rank, (least, most) in over.items() if least > 0 or most < 0}
    if len(odd) != 1 or [rank := odd.pop()] not in case.sides:
        return None
    state, caught = states[rank], swallowed(states[rank])
    fix = f"fix what raised {caught} on rank {rank}; or " if caught else ""
    advice = f"{fix}let rank {rank} make one backward pass per step that exchanges gradients: the others under `no_sync()`; or let all ranks repeat the batch together"
    if over[rank][1] < 0:
        # one that failed has no backward
        passes = "" if caught else f", or run its forward and backward, too ({NO_WEIGHT})"
        advice = f"{fix}let rank {rank} skip a batch together with all ranks{passes}"
    made = f"{state.models[0].synced_backwards:,} backward passes in {state.step:,} steps, the others one for each"
    text = f"; it caught {caught}" if caught else ""
    return Testimony(ranks=(rank,), head=f"rank {rank} has made {made}", text=text, advice=advice)


def _over(state: RankState) -> tuple[int, int]:
    """Return the fewest and the most passes by which a rank may have more than steps: one may be under way."""
    (model,) = state.models
    over = model.synced_backwards - state.step
    return (over, over) if state.phase == "forward" else (over - UNDER_WAY, over)


def skipped(case: Case) -> Testimony | None:
    """Accuse the one rank that ran forwards without backward while each forward of the others has one."""
    states = _states(case)
    if len({len(state.models) for state in states.values()}) != 1:
        return None
    found: dict[int, tuple[int, int]] = {}  # rank -> (index of its model, forwards without backward)
    for i in range(len(next(iter(states.values())).models)):
        if all(state.models[i].synced_backwards >= STEPS for state in states.values()):
            missing = {rank: n for rank, state in states.items() if (n := _open(state, i))}
            if len(missing) == 1 and list(missing) in case.sides:
                found = {rank: (i, n) for rank, n in missing.items()} | found
    if len(found) != 1:
        return None
    ((rank, (i, missing)),) = found.items()
    model, caught = states[rank].models[i], swallowed(states[rank])
    # the newest forward may be the one that failed, or one that has its backward still to come
    here = lines_of(case.here[rank] or "")[:1]
    times = sum(n for key, n in states[rank].sites.items() if lines_of(key)[:1] == here)
    least = "at least " if caught and times > 1 < missing else ""
    missing -= bool(least)
    text = (
        f"; rank {rank} ran {least}{counted(missing, 'forward')} without backward ({model.forwards:,} "
        f"forwards, {model.synced_backwards:,} backwards)"
    )
    left_out = "".join(f"{op_at(call)} and " for call in _left_out(states, rank, model.synced_backwards))
    head = f"rank {rank} skipped {left_out}{'a backward' if missing == 1 else f'{least}{missing:,} backwards'}"
    way_out = tuple(_way_out(states[rank], model.forwards, model.synced_backwards, case.source))
    run = f"make {left_out}the" if left_out else "run the"
    advice = f"{run} backward of every forward on rank {rank}, too ({NO_WEIGHT}, if the batch is not to count), or skip the batch on all ranks together"
    if (caught or way_out) and all(condition.failed for condition in way_out):  # what failed has no backward
        advice = handler_advice(f"rank {rank}", caught, conditions_text(way_out)) + ", and skip the batch together"
    caught = f", and caught {caught}" if caught else ""
    return Testimony(ranks=(rank,), text=text, head=head + caught, conditions=way_out, advice=advice)


def _left_out(states: dict[int, RankState], rank: int, times: int) -> list[Call]:
    """Return the collectives that a rank has made as often as backwards, and all others more often: it skips them together."""
    made = {c.site.key: c for c in states[rank].calls if c.site is not None and not c.p2p}
    own, others = states[rank].sites, [state.sites for q, state in states.items() if q != rank]
    return [c for key, c in made.items() if own.get(key) == times < min(sites.get(key, 0) for sites in others)]


def unused(case: Case) -> Testimony | None:
    """Accuse the ranks that have left a backward in which DDP still averages gradients on the others.

    DDP sends a bucket once all its parameters have a gradient. All have begun equally many such passes, and nothing was caught.
    """
    states = _states(case)
    if any(len(state.models) != 1 or swallowed(state) for state in states.values()):
        return None
    models = [state.models[0] for state in states.values()]
    passes = {model.synced_backwards for model in models}
    if len(passes) != 1 or min(passes) < STEPS or any(model.find_unused is not False for model in models):
        return None
    inside = {rank for rank, state in states.items() if _averages_in(state, case.wait.calls.get(rank))}
    outside = tuple(sorted(states.keys() - inside))
    if not inside or not outside or min(states[q].step for q in outside) <= max(states[q].step for q in inside):
        return None
    who = rank_list(outside)
    return Testimony(
        ranks=outside,
        head=f"{who} left backward before DDP had averaged its gradients",
        text=f"; DDP does so once every parameter of a bucket has a gradient: on {who} some had none",
        advice=f"find them on {who} after a backward (`[n for n, p in model.named_parameters() if p.grad is None]`) and use their output "
        "in every loss, or pass find_unused_parameters=True",
    )


def _averages_in(state: RankState, call: Call | None) -> bool:
    """True if a rank is in an all_reduce of the group of its model that no line of Python has called.

    A rank that was aborted there has no name for it.
    """
    if call is None or call.group != state.models[0].group or op_name(call.op) not in ("all_reduce", ""):
        return False
    return not call.op or not by_python(state, call)


def _states(case: Case) -> dict[int, RankState]:
    """Return the states of the compared ranks; nothing unless all are known."""
    known = {rank: case.states[rank] for rank in case.compared if rank in case.states}
    return known if len(known) == len(case.compared) > 1 else {}


def _open(state: RankState, i: int) -> int:
    """Return how many forwards will never have a backward, without the one that the rank is in or has just left."""
    model = state.models[i]
    n = model.forwards - model.synced_backwards
    here = state.blocked.site if state.blocked is not None and state.blocked.site is not None else state.current_site
    if state.phase != "forward" and (swallowed(state) or here is None or state.sites.get(here.key, 0) <= 1):
        return n  # after an exception, or at a site that is not part of every step
    return max(0, n - 1)


def swallowed(state: RankState) -> str:
    """Return the exception out of a forward or backward that the script has caught; empty if there is none."""
    text = (state.caught or "").splitlines()
    return shortened(text[0], 120) if text and not (state.exception or "").startswith(text[0][:60]) else ""


def _way_out(state: RankState, forwards: int, backwards: int, source: Source) -> list[Condition]:
    """Return the conditions by which the rank left between forward and backward: sites visited as often."""
    sites: dict[int, list[tuple[Site, ...]]] = {}
    for key, times in state.sites.items():
        if times in (forwards, backwards):
            sites.setdefault(times, []).append(callers.stack_at(_site(key, source), state, source))
    pairs = ((f, b) for f in sites.get(forwards, ()) for b in sites.get(backwards, ()))
    found = next((found for f, b in pairs if (found := conditions_between(f, b, source))), [])
    backward = next(iter(sites.get(backwards, ())), ())
    return found or (handler_around(backward, source) if swallowed(state) else [])


def _site(key: str, source: Source) -> Site | None:
    """Return the site of this key, with the functions of its lines."""
    path: Site | None = None
    for file, line in reversed(lines_of(key)):
        around = function(tree, line) if (tree := tree_of(file, source)) is not None else None
        path = Site(file, line, around.name if around is not None else "<module>", path)
    return path
