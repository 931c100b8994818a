"""Witness by the arguments of a call: which rank used a new dtype, size, root or peer at its site."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from distdiag.diagnosis.culprit.case import Case, Reason, Testimony
from distdiag.diagnosis.culprit.conditions import parted_text
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call, RankState
from distdiag.diagnosis.text.phrases import both_sites, count
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.wait import Wait

EARLIER = 2  # minimum of earlier calls at the site
LAST_BATCH = (
    "a batch is smaller than before, and not equally large on all ranks: use drop_last=True or a DistributedSampler (it "
    "pads), or exchange the sizes first and pad to the largest"
)

_ARGUMENT: Mapping[str, Callable[[Call], object]] = {
    "dtype": lambda call: compatible.dtype_name(call.dtype),
    "shape": compatible.elements,
    "root": lambda call: call.root,
    "peer": lambda call: call.peer,
}


class Changed(NamedTuple):
    """One rank's argument in earlier calls and in this one."""

    before: object
    times: int


def changed(state: RankState, call: Call, argument: str) -> Changed | None:
    """Return how an argument changed: all earlier calls at this site had one other value. None if not so."""
    values = _earlier(state, call, argument)
    now = _ARGUMENT[argument](call)
    if len(values) < EARLIER or len(set(values)) != 1 or None in (values[0], now) or values[0] == now:
        return None
    return Changed(values[0], len(values))


def _kept(state: RankState, call: Call, argument: str) -> bool:
    """True if the argument is what it always was at this site."""
    values = _earlier(state, call, argument)
    return len(values) >= EARLIER and set(values) == {_ARGUMENT[argument](call)}


def _earlier(state: RankState, call: Call, argument: str) -> list[object]:
    """Return the argument of all known earlier calls of this operation at this site."""
    if call.site is None:
        return []
    same = (
        c
        for c in state.calls
        if (c.op, c.group) == (call.op, call.group) and c.site is not None and c.site.key == call.site.key
    )
    before = itertools.takewhile(lambda c: (c.seq, c.nth, c.peer) != (call.seq, call.nth, call.peer), same)
    return [_ARGUMENT[argument](c) for c in before]


def side_that_changed(states: Mapping[int, RankState], wait: Wait) -> Collection[int]:
    """Return the side whose argument has changed at its site, if the other side's never has; else nothing."""
    argument = wait.conflict or ""
    if argument not in _ARGUMENT or len(wait.sides) != 2:
        return ()
    new, old = [], []
    for side in wait.sides:
        pairs = [(states[r], wait.calls[r]) for r in side if r in states and r in wait.calls]
        new.append(len(pairs) == len(side) and all(changed(st, call, argument) for st, call in pairs))
        old.append(len(pairs) == len(side) and all(_kept(st, call, argument) for st, call in pairs))
    if new[0] and old[1]:
        return wait.sides[0]
    return wait.sides[1] if new[1] and old[0] else ()


def ranks_with_new_size(states: Mapping[int, RankState], wait: Wait) -> Collection[int]:
    """Return the ranks whose size is new at their site, if not all ranks' sizes are."""
    new = [rank for rank, call in wait.calls.items() if changed(states[rank], call, "shape")]
    return new if len(new) < len(wait.calls) else ()


def reordered(states: Mapping[int, RankState], wait: Wait) -> bool:
    """True if every rank has called with both sides' arguments at this site before: the ranks' calls differ in their order only."""
    argument = wait.conflict or ""
    if argument not in _ARGUMENT or len(wait.sides) != 2:
        return False
    both = {_ARGUMENT[argument](wait.calls[r]) for side in wait.sides for r in side}
    members = [(states.get(r), wait.calls[r]) for side in wait.sides for r in side]
    return None not in both and all(st is not None and both <= set(_earlier(st, c, argument)) for st, c in members)


def new_peer(states: Mapping[int, RankState], calls: Mapping[int, Call | None]) -> Collection[int]:
    """Return the one rank of a cycle whose message has a new peer at its site; else nothing."""
    odd = [
        r
        for r, call in calls.items()
        if call is not None and call.p2p and r in states and changed(states[r], call, "peer")
    ]
    return odd if len(odd) == 1 else ()


def explain(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return the argument that the first of these ranks passed in its earlier calls at the site; None if it has not changed."""
    argument = case.wait.conflict or ""
    calls = {rank: call for rank, call in case.wait.calls.items() if rank in case.states}
    if argument not in _ARGUMENT or not ranks or ranks[0] not in calls:
        return None
    found = changed(case.states[ranks[0]], calls[ranks[0]], argument)
    if found is None:
        return None
    everywhere = [changed(case.states[rank], call, argument) for rank, call in calls.items()]
    all_changed = None not in everywhere and len({f.before for f in everywhere if f is not None}) == 1
    value = found.before
    if argument == "shape" and isinstance(value, int):
        value = count(value, "element")
    elif argument == "root":
        value = f"root {value}"
    times = "twice" if found.times == 2 else f"{found.times:,} times"
    return Testimony(
        name=Reason.ARGUMENT,
        ranks=tuple(ranks),
        text=f"; before, {'all ranks' if all_changed else rank_list(ranks)} called it with {value} ({times})",
        advice=LAST_BATCH if all_changed and argument == "shape" else "",
    )


def explain_peer(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return the peer of the first of these ranks in its earlier messages at the site; None if it has not changed."""
    state, call = (case.states.get(ranks[0]), case.calls.get(ranks[0])) if ranks else (None, None)
    found = changed(state, call, "peer") if state is not None and call is not None and call.p2p else None
    if found is None:
        return None
    text = f"; in {found.times:,} earlier calls there its peer was rank {found.before}"
    return Testimony(name=Reason.ARGUMENT, ranks=tuple(ranks), text=text)


def explain_order(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return that all ranks have made either call before, if none is to blame; None if not so."""
    if ranks or not reordered(case.states, case.wait):
        return None
    first, second = (case.wait.calls[min(side)].site for side in case.wait.sides[:2])
    return Testimony(
        name=Reason.ORDER,
        text="; both sides have made either call before: they make them in a different order" + parted_text(case),
        advice=f"compare {both_sites(first, second)}: make these calls in the same order on all ranks; loop over a sorted "
        "list, not over a set or a directory listing, whose order differs between processes",
    )
