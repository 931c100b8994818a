"""Evidence from an exchange with neighbours: the variable that holds the peer is as far from the own rank on all ranks but one.

For stacks, which have no counts.
"""

from __future__ import annotations

import ast

from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.model import syntax
from distdiag.diagnosis.model.snapshot import Call, RankState
from distdiag.diagnosis.text.phrases import at
from distdiag.diagnosis.waits import messages

ENOUGH = 3  # ranks, of which all but one agree


def accuse(case: Case) -> Testimony | None:
    """Accuse the one rank whose peer is at another distance than those of the others."""
    if case.snapshot.source != "stacks":
        return None
    odd = [t for rank, call in case.calls.items() if call is not None and (t := _other_distance(case, rank, call))]
    return odd[0] if len(odd) == 1 else None


def _other_distance(case: Case, rank: int, call: Call) -> Testimony | None:
    """Accuse a rank whose peer is at another distance from it than on all other ranks, if at theirs it fits a rank that waits for it.

    Not if it is in another round: then a number that is equal on the others differs, too.
    """
    world, variables = case.snapshot.world_size or 0, {q: _variables(state) for q, state in case.states.items()}
    if call.site is None or call.peer is None or world < ENOUGH or len(variables) < world:
        return None
    statement = syntax.statement_at(call.site, case.source)
    used = {syntax.name_of(node) for node in ast.walk(statement)} if statement is not None else set()
    common = set.intersection(*map(set, variables.values()))
    others = {key: {own[key] for q, own in variables.items() if q != rank} for key in common}
    if any(len(values) == 1 and variables[rank][key] not in values for key, values in others.items()):
        return None
    of_peer = ((f, name) for f, name in sorted(common) if name in used and f == call.site.function)
    for key in (key for key in of_peer if variables[rank][key] == call.peer):
        distance, *more = {(own[key] - q) % world for q, own in variables.items() if q != rank}
        partner, name = case.states[(rank + distance) % world], key[1]
        theirs = partner.blocked
        if more or theirs is None or not theirs.p2p or theirs.peer != rank:
            continue
        if messages.direction_of(theirs) == messages.direction_of(call):
            continue
        return Testimony(
            ranks=(rank,),
            text=f"; `{name}` is {_distance(call.peer - rank, world)} on rank {rank}, and {_distance(distance, world)} on all other ranks",
            advice=f"find why `{name}`{at(call.site)} is rank {call.peer} on rank {rank}: with rank {partner.rank}, its {call.op} "
            f"would fit that rank's {theirs.op}{at(theirs.site)}",
        )
    return None


def _variables(state: RankState) -> dict[tuple[str, str], int]:
    """Return the integers in the user's frames, by function and name."""
    frames = zip(reversed(state.user_stack), reversed(state.names), strict=False)
    return {(site.function, name): value for site, names in frames for name, value in names.items()}


def _distance(ranks: int, world: int) -> str:
    """Return `own rank - 1`."""
    ranks = (ranks + world // 2) % world - world // 2
    return f"the own rank {'-' if ranks < 0 else '+'} {abs(ranks)}"
