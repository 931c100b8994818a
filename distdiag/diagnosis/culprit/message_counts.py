"""Witnesses by counts: who has sent fewer messages than its peers, or visited a site more or less often than all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from distdiag.diagnosis.culprit.call_site import site_of
from distdiag.diagnosis.culprit.case import Case, Reason, Testimony
from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.diagnosis.waits import messages
from distdiag.diagnosis.waits.incidents import Incident
from distdiag.diagnosis.waits.wait import Wait


class MoreCalls(NamedTuple):
    """Calls that one rank has made at a site beyond those of all others, which made equally many."""

    rank: int
    site: str  # key of the site: `file:line`
    more: int


ADVICE = "look for what calls it on that rank alone: a module that communicates (a norm, a metric), run for a preview, a log or a check"


def more_calls(snapshot: Snapshot, odd: Collection[int], rest: Collection[int]) -> MoreCalls | None:
    """Return the site that one rank has used more often than the others, which used it equally often and are in the same step."""
    states = [snapshot.ranks[q] for q in rest if q in snapshot.ranks]
    if len(odd) != 1 or not states or len({st.step for st in states} | {snapshot.ranks[q].step for q in odd}) != 1:
        return None
    (q,) = odd
    found = []
    for site, count in snapshot.ranks[q].sites.items():
        theirs = {st.sites.get(site, 0) for st in states}
        if len(theirs) == 1 and 0 < min(theirs) < count:
            found.append(MoreCalls(q, site, count - min(theirs)))
    return found[0] if len(found) == 1 else None


def explain_more(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return the site that this rank has used more often than the others in as many steps; None if there is none."""
    found = more_calls(case.snapshot, ranks, [rank for rank in case.compared if rank not in ranks])
    if found is None:
        return None
    times = "once" if found.more == 1 else f"{found.more:,} times"
    return Testimony(
        name=Reason.COUNT,
        ranks=tuple(ranks),
        text=f"; in as many steps, rank {found.rank} has called the collective at {found.site.rsplit('/', 1)[-1]} {times} "
        "more than the others",
        advice=ADVICE,
    )


def fewer_messages(snapshot: Snapshot, incident: Incident) -> tuple[int, ...]:
    """Return the rank that has sent fewer messages than all that have issued a collective which it waits in, if another rank waits
    for one of its messages. If a message of any of them would do, the others must have sent equally many, at least two of them.
    """
    states = snapshot.ranks
    for w in incident.waits:
        if not w.p2p or len(w.ranks) != 1 or not (w.any_of or len(w.missing) == 1):
            continue
        (m,) = w.ranks
        call = w.calls.get(m)
        if call is None or messages.direction_of(call) != "recv":
            continue
        for p in sorted(w.missing):
            together = next((_arrived(snapshot, x) for x in incident.waits if not x.p2p and p in x.ranks), [])
            sent = {q: messages.count(states[q], "send", m, call.tag, call.group) for q in together if q != m}
            others = [n for q, n in sent.items() if q != p]
            equal = not w.any_of or (len(others) > 1 and len(set(others)) == 1)
            if others and equal and sent.get(p, 0) < min(others) and 2 * sent[p] > max(others):
                return (p,)
    return ()


def _arrived(snapshot: Snapshot, wait: Wait) -> list[int]:
    """Return the ranks that have issued a collective, whether or not their hosts are known to wait for it yet."""
    group = snapshot.groups.get(wait.group)
    members = group.ranks if group is not None else tuple(wait.ranks)
    return sorted({*wait.ranks, *(q for q in members if q in snapshot.ranks and q not in wait.missing)})


def visits_differ(snapshot: Snapshot, incident: Incident, here: dict[int, str | None]) -> tuple[int, ...]:
    """Return the rank with one visit too many or too few: m waits alone for p at a site that all others know.

    It is m if m has been there once too often, p if p has been there once too seldom.
    """
    states = snapshot.ranks
    found: set[int] = set()
    for w in incident.waits if len(incident.waits) == 2 else ():
        inside = [r for r in w.ranks if r in incident.members]
        awaited = w.missing & incident.members
        if w.p2p or len(inside) != 1 or len(awaited) != 1:
            continue  # a rank stuck behind the cycle has called send and recv less often for that reason alone
        (m,), (p,) = inside, awaited
        site = here.get(m)
        if site is None:
            continue
        others = [st for q, st in states.items() if q not in incident.members and st.sites.get(site)]
        if not others:
            continue
        usual = Counter(st.sites[site] for st in others).most_common(1)[0][0]
        before = Counter(st.sites[site] - (site_of(st, st.blocked) == site) for st in others).most_common(1)[0][0]
        n_m, n_p = states[m].sites.get(site, 0), states[p].sites.get(site, 0)
        if n_m > usual:
            found.add(m)
        elif before >= n_m > n_p > 0:  # a rank that has never been there has another role
            found.add(p)
    return (found.pop(),) if len(found) == 1 else ()
