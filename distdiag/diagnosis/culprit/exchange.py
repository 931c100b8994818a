"""Evidence from an exchange with neighbours: whose peers fit those of nobody.

All ranks are in one line and have issued a round of sends and receives there. A pair of ranks does not fit if one of them sends the
other more, or fewer, messages in a round than the other expects. If one rank is in every such pair, another peer on that rank alone
makes all of them fit. Without counts, the variable that holds the peer shows it, where it is as far from the own rank on all others.
"""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Mapping

from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.model import syntax
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call, RankState
from distdiag.diagnosis.text.incident import verb
from distdiag.diagnosis.text.phrases import at
from distdiag.diagnosis.waits import messages

ENOUGH = 3  # ranks, of which all but one agree
Round = Counter[tuple[str, int | None]]  # (send or recv, peer) -> messages


def accuse(case: Case) -> Testimony | None:
    """Accuse the one rank that is in every pair which does not fit, if there are two such pairs or more."""
    if case.snapshot.source == "stacks":
        odd = [t for rank, call in case.calls.items() if call is not None and (t := _other_distance(case, rank, call))]
        return odd[0] if len(odd) == 1 else None
    sites = {call.site for call in case.calls.values() if call is not None and call.p2p}
    if len(sites) != 1 or not all(wait.p2p for wait in case.incident.waits):
        return None
    rounds = {rank: _newest_round(case.states[rank]) for rank in case.compared if rank in case.states}
    if len(rounds) < len(case.compared) or not all(rounds.values()):
        return None
    rank = odd_one(rounds)
    if rank is None:
        return None
    others = sorted({q for pair in _unfitting(rounds) for q in pair} - {rank})
    own = ", ".join(f"{n} to rank {peer}" for (way, peer), n in sorted(rounds[rank].items(), key=str) if way == "send")
    due = f"{verb(others, 'expects', 'expect')} {' and '.join(str(rounds[q]['recv', rank]) for q in others)} of it"
    site = next(c.site for c in reversed(case.states[rank].calls) if c.p2p)
    return Testimony(
        ranks=(rank,),
        text=f"; only rank {rank}'s messages do not fit: in a round it sends {own}, where {rank_list(others)} {due}",
        advice=f"check the peers that rank {rank} computes for the messages{at(site)}: a neighbour is wrong on that rank only",
    )


def odd_one(rounds: Mapping[int, Round]) -> int | None:
    """Return the one rank that is in every pair which does not fit; None if there is only one such pair."""
    apart = _unfitting(rounds)
    common = set.intersection(*map(set, apart)) if len(apart) > 1 else set()
    return common.pop() if len(common) == 1 else None


def _unfitting(rounds: Mapping[int, Round]) -> list[tuple[int, int]]:
    """Return the pairs of ranks in which one sends the other another number of messages than the other expects."""
    pairs = itertools.combinations(sorted(rounds), 2)
    return [pair for pair in pairs if any(rounds[x]["send", y] != rounds[y]["recv", x] for x, y in (pair, pair[::-1]))]


def _newest_round(state: RankState) -> Round:
    """Return the messages of one round: the shortest sequence of which the rank's newest messages from one line are repetitions."""
    ends: list[tuple[str, int | None]] = []
    site = state.calls[-1].site if state.calls else None
    for call in reversed(state.calls):
        if not call.p2p or call.site != site:
            break
        ends.append((messages.direction_of(call), call.peer))
    whole = len(ends)
    repeated = (n for n in range(1, whole) if whole % n == 0 and ends == ends[:n] * (whole // n))
    return Counter(ends[: next(repeated, whole)])


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
