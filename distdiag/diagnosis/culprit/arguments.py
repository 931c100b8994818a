"""Witness by the arguments of a call: which rank used a new dtype, size, root or peer at its site."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from distdiag.diagnosis.model.snapshot import Call, RankState
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.wait import Wait

EARLIER = 2  # minimum of earlier calls at the site

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
