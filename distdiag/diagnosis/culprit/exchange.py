"""Evidence from an exchange with neighbours: whose peers fit those of nobody.

All ranks are in one line and have issued a round of sends and receives there. A pair of ranks does not fit if one of them sends the
other more, or fewer, messages in a round than the other expects. If one rank is in every such pair, another peer on that rank alone
makes all of them fit.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import RankState
from distdiag.diagnosis.text.incident import verb
from distdiag.diagnosis.text.phrases import at
from distdiag.diagnosis.waits import messages

Round = Counter[tuple[str, int | None]]  # (send or recv, peer) -> messages


def accuse(case: Case) -> Testimony | None:
    """Accuse the one rank that is in every pair which does not fit, if there are two such pairs or more."""
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
