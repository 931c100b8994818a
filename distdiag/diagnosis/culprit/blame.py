"""Who is to blame in an incident: the majority at the first collective that differs; with a tie, history; else nobody.

History is the set of call sites that each rank has been at. The odd one out stands at a site where the others have
never been while theirs is common to both: it makes an extra call. Seen later, when the extra call has long been paired
with something else, the odd one is the rank that has been everywhere the others were, and somewhere else too. Where both
know both sites, the rhythm may tell: a rank that comes to the barrier of its epoch after fewer collectives than ever has
left its loop early; one that is in its loop when that barrier is due has stayed too long. At one and the same site, as in
a loop over the gradients, and in a circle of messages it is the rank that has departed from the order of calls that was
kept until then (`patterns`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from distdiag.diagnosis.culprit import call_order, rank_condition
from distdiag.diagnosis.culprit.rank_condition import Source
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call, Life, RankState, Site, Snapshot
from distdiag.diagnosis.waits import messages
from distdiag.diagnosis.waits.graph import Wait, WaitGraph
from distdiag.diagnosis.waits.incidents import Incident

SETTLED_S = 5.0  # nobody has issued anything for so long: whoever was on the way does not come in time to vote


class Reason(StrEnum):
    """What decided; NONE is a true tie."""

    EXHAUSTED = "exhausted"  # known to have run out of batches
    MAJORITY = "majority"
    SITE = "site"  # stands where the others have never been
    HISTORY = "history"  # has been where the others have never been
    CONDITION = "condition"  # stands behind a condition on the rank, and the others do not
    RHYTHM = "rhythm"  # came earlier than ever to its call, or has not come where it was due
    PATTERN = "pattern"  # has just gone from one call to another as never before
    COUNT = "count"  # has been there more, or less, often than everybody else
    NONE = "none"


Verdict = tuple[tuple[int, ...], Reason]
NOBODY: Verdict = ((), Reason.NONE)


def standing(st: RankState | None, call: Call | None) -> str | None:
    """Where a rank stands with its call; the main thread's own place where the call has none."""
    site = call.site if call is not None else None
    if site is None and st is not None and st.blocked is call:
        site = st.place
    return site.key if site is not None else None


def _past(st: RankState, here: str | None) -> set[str]:
    """Sites a rank has been at, not counting the call it is in now."""
    return {s for s, n in st.sites.items() if n - (s == here) > 0}


def odd_by_site(states: dict[int, RankState], here: dict[int, str | None], odd: Iterable[int], rest: list[int]) -> bool:
    """True where `odd` stand at sites that `rest` never had, and have themselves been where `rest` stand."""
    for a in odd:
        mine = here.get(a)
        if mine is None or not states[a].sites:
            return False
        for b in rest:
            theirs = here.get(b)
            if theirs is None or mine in states[b].sites or theirs not in states[a].sites:
                return False
    return True


def odd_by_history(
    states: dict[int, RankState], here: dict[int, str | None], odd: Iterable[int], rest: Iterable[int]
) -> bool:
    """True where `odd` have been everywhere that `rest` have, and before this call also somewhere else."""
    common: set[str] = set()
    for b in rest:
        if not states[b].sites:
            return False
        common |= _past(states[b], here.get(b))
    for a in odd:
        if not common <= set(states[a].sites):
            return False
        everywhere = common.union(*(states[b].sites for b in rest))
        if not _past(states[a], here.get(a)) - everywhere:
            return False
    return True


def odd_in_group(states: dict[int, RankState], wait: Wait, here: dict[int, str | None], odd: Iterable[int]) -> bool:
    """The same within one group: `odd` are the first ever to bring it to their site, which they may know from other groups,
    while all have brought it to the site of the rest before."""
    odd = set(odd)
    rest = frozenset().union(*wait.sides) - odd
    if not all(states[r].visits_whole for r in odd | rest):
        return False
    visited = {r: states[r].visits.get(wait.group, {}) for r in odd | rest}
    mine, theirs = {here.get(a) or "" for a in odd}, {here.get(b) or "" for b in rest}
    return (
        all(visited[a].get(here.get(a) or "") == (wait.seq,) for a in odd)
        and all(not mine & visited[b].keys() for b in rest)
        and all(min(visited[r].get(site, (wait.seq,))) < wait.seq for r in odd | rest for site in theirs)
    )


def _exhausted(ranks: Collection[int], exhausted: Collection[int]) -> tuple[int, ...]:
    """Those of `ranks` known to have run out of batches, if the others have not."""
    out = tuple(sorted(set(ranks) & set(exhausted)))
    return out if len(out) < len(ranks) else ()


def of_conflict(
    snapshot: Snapshot, wait: Wait, exhausted: Collection[int] = (), source: Source | None = None
) -> Verdict:
    """Who is wrong among ranks whose calls do not fit together."""
    members = frozenset().union(*wait.sides)
    if ran_out := _exhausted(members, exhausted):
        return ran_out, Reason.EXHAUSTED
    first, second, *_ = (sorted(s) for s in wait.sides)
    if len(first) > len(second):
        return tuple(sorted(members - set(first))), Reason.MAJORITY
    if len(wait.sides) > 2:
        return NOBODY
    states = snapshot.ranks
    here = {r: standing(states.get(r), wait.calls.get(r)) for r in members}
    if any(r not in states for r in members):
        return NOBODY
    for reason, test in ((Reason.SITE, odd_by_site), (Reason.HISTORY, odd_by_history)):
        a, b = test(states, here, first, second), test(states, here, second, first)
        if a != b:
            return tuple(first if a else second), reason
    for side in (first, second):
        if odd_in_group(states, wait, here, side):
            return tuple(side), Reason.SITE
    odd = rhythm_of(snapshot, wait)
    if odd is not None:
        return odd.ranks, Reason.RHYTHM
    behind = condition_of(snapshot, wait, source)
    if behind is not None:
        return behind[0], Reason.CONDITION
    left = call_order.left_by(states, wait)
    return (tuple(sorted(left)), Reason.PATTERN) if left else NOBODY


def condition_of(
    snapshot: Snapshot, wait: Wait, source: Source | None
) -> tuple[tuple[int, ...], rank_condition.Condition] | None:
    """(ranks, condition) where one of two sides stands behind a condition on the rank, and the other behind none."""
    if source is None or len(wait.sides) != 2:
        return None
    stacks = [_stack(snapshot.ranks[r], wait.calls.get(r)) for r in map(min, wait.sides)]
    found = [rank_condition.around(stacks[i], stacks[1 - i], source) for i in (0, 1)]
    for side, mine, theirs in zip(wait.sides, found, reversed(found), strict=True):
        if mine is not None and theirs is None:
            return tuple(sorted(side)), mine
    return None


def _stack(st: RankState, call: Call | None) -> tuple[Site, ...]:
    site = call.site if call is not None else None
    if site is None or st.user_stack[:1] == (site,):
        return st.user_stack
    return site, *st.user_stack[1:]


@dataclass(frozen=True, slots=True)
class Rhythm:
    """A rank at a site that all ranks of an incident have come to before, in collectives of the group since its last visit."""

    ranks: tuple[int, ...]  # out of rhythm
    gap: int  # that the ranks at the site made this time
    usual: int  # and the times before

    @property
    def early(self) -> bool:
        """Whether they came too early; else they have not come although they were due."""
        return self.gap < self.usual

    @property
    def text(self) -> str:
        """What tells, as the end of a sentence about the two places."""
        who = rank_list(self.ranks)
        if self.early:
            return f"{who} came there after {self.gap:,} collectives, all ranks after {self.usual:,} the times before"
        return (
            f"{who} should be at the other place, too: it was due after {self.usual:,} collectives, as the times before"
        )


def _gaps(
    states: Mapping[int, RankState],
    meeting: tuple[str, int],
    here: Mapping[int, str | None],
    side: Collection[int],
    others: Collection[int],
) -> tuple[int, int] | None:
    """(collectives since the last visit, the usual number) of a side at its site; None where there is no common rhythm.

    Of the times before all that are known (two at most) must be alike, on both sides.
    """
    group, seq = meeting
    found: set[tuple[int, int]] = set()
    for r in side:
        key = here.get(r) or ""
        seen = states[r].visits.get(group, {}).get(key, ())
        if len(seen) < 3 or seen[-1] != seq:
            return None
        gaps = [b - a for a, b in itertools.pairwise(seen)]
        if len(set(gaps[:-1])) != 1:
            return None
        for q in others:
            theirs = states[q].visits.get(group, {}).get(key, ())
            if theirs[1 - len(seen) :] != seen[:-1]:
                return None
        found.add((gaps[-1], gaps[0]))
    return found.pop() if len(found) == 1 else None


def out_of_rhythm(
    states: Mapping[int, RankState],
    meeting: tuple[str, int],
    here: Mapping[int, str | None],
    first: Collection[int],
    second: Collection[int],
) -> Rhythm | None:
    """Which of two sides came too early to its call, or stays away from one that is due.

    Args:
        meeting: (group, sequence number) of the collective in which they met.
        here: Site at which each stands.
        first, second: The sides.
    """
    gaps = _gaps(states, meeting, here, first, second), _gaps(states, meeting, here, second, first)
    early = [g is not None and g[0] < g[1] for g in gaps]
    if all(early):
        return None
    for side, g, too_early in zip((first, second), gaps, early, strict=True):
        if g is not None and too_early:
            return Rhythm(tuple(sorted(side)), *g)
    due = [g[1] if g is not None and g[0] == g[1] else 0 for g in gaps]
    if due[0] == due[1]:
        return None
    return Rhythm(tuple(sorted(second if due[0] > due[1] else first)), max(due), max(due))


def rhythm_of(snapshot: Snapshot, wait: Wait) -> Rhythm | None:
    """The same, of a collective whose calls do not fit together."""
    if wait.p2p or wait.seq is None or len(wait.sides) != 2:
        return None
    states = snapshot.ranks
    here = {r: standing(states.get(r), c) for r, c in wait.calls.items()}
    return out_of_rhythm(states, (wait.group, wait.seq), here, *wait.sides)


def undecided(snapshot: Snapshot, graph: WaitGraph, wait: Wait, verdict: Verdict) -> bool:
    """True while ranks are on their way into `wait` whose call could still turn the vote."""
    if snapshot.source == "dumps" or verdict[1] is Reason.EXHAUSTED:
        return False
    coming = [q for q in wait.missing if q not in graph.gone and q not in graph.stuck]
    if not coming:
        return False
    first, second, *_ = sorted((len(s) for s in wait.sides), reverse=True)
    if first > second + len(coming):
        return False
    since = snapshot.stable_since_s
    return since is None or snapshot.t_s - since < SETTLED_S


def of_gone(
    snapshot: Snapshot,
    graph: WaitGraph,
    ended: Collection[int],
    waits: Iterable[Wait],
    stuck: Collection[int],
    exhausted: Collection[int],
) -> Verdict:
    """Ranks that ended are to blame for being missed, unless the one that waits has made calls they never did."""
    waiting = sorted({r for w in waits if not w.p2p for r in w.ranks} & set(stuck))
    if ran_out := _exhausted({*ended, *waiting}, exhausted):
        return ran_out, Reason.EXHAUSTED
    states = snapshot.ranks
    normally = all(states[q].life == Life.FINISHED and not states[q].exit_code for q in ended)
    if len(waiting) == 1 and normally and set(stuck) <= graph.victims_of(waiting) | set(waiting):
        here = {r: standing(states[r], states[r].blocked) for r in waiting}
        if odd_by_history(states, here, waiting, ended):
            return (waiting[0],), Reason.HISTORY
    return tuple(sorted(ended)), Reason.NONE


def of_cycle(snapshot: Snapshot, incident: Incident, exhausted: Collection[int] = ()) -> Verdict:
    """In a cycle mostly nobody; but one of it may stand where nobody else has ever been."""
    members = sorted(incident.members)
    states = snapshot.ranks
    if ran_out := _exhausted(members, exhausted):
        return ran_out, Reason.EXHAUSTED
    if left_out := _by_messages(snapshot, incident):
        return left_out
    others = (st for q, st in states.items() if q not in incident.members)
    if (departed := call_order.departed((states[r] for r in members), others)) is not None:
        return (departed,), Reason.PATTERN
    calls = {r: w.calls.get(r) for w in incident.waits for r in w.ranks}
    here = {r: standing(states[r], calls.get(r)) for r in members}
    known_to = Counter(site for r in members for site in states[r].sites)
    alone = [a for a in members if known_to.get(here[a] or "", 0) <= 1]  # a thousand may stand in one ring
    # the ends of messages have parts of their own to play, at places of their own: there it is nothing new
    new = [a for a in alone if (c := calls.get(a)) is None or not c.p2p or states[a].sites.get(here[a] or "", 0) <= 1]
    if len(alone) == 1 and new and odd_by_site(states, here, alone, [b for b in members if b != alone[0]]):
        return (alone[0],), Reason.SITE
    return _by_count(snapshot, incident, here) or _alone(incident) or NOBODY


def _by_count(snapshot: Snapshot, incident: Incident, here: dict[int, str | None]) -> Verdict | None:
    """Rank m waits alone for p at a site that all others know: has m been there once too often, or p once too seldom?"""
    states = snapshot.ranks
    found: set[int] = set()
    for w in incident.waits if len(incident.waits) == 2 else ():
        inside = [r for r in w.ranks if r in incident.members]
        awaited = w.missing & incident.members
        if w.p2p or len(inside) != 1 or len(awaited) != 1:
            continue  # of messages, who is stuck behind the circle has been at its ends less often for that alone
        (m,), (p,) = inside, awaited
        site = here.get(m)
        if site is None:
            continue
        others = [st for q, st in states.items() if q not in incident.members and st.sites.get(site)]
        if not others:
            continue
        usual = Counter(st.sites[site] for st in others).most_common(1)[0][0]
        before = Counter(st.sites[site] - (standing(st, st.blocked) == site) for st in others).most_common(1)[0][0]
        n_m, n_p = states[m].sites.get(site, 0), states[p].sites.get(site, 0)
        if n_m > usual:
            found.add(m)
        elif before >= n_m > n_p > 0:  # who has never been there has another part to play
            found.add(p)
    return ((found.pop(),), Reason.COUNT) if len(found) == 1 else None


def _by_messages(snapshot: Snapshot, incident: Incident) -> Verdict | None:
    """Rank m waits for a message of p, who stands in a collective with others: did all of these send m theirs, and p not?"""
    states = snapshot.ranks
    for w in incident.waits:
        if not w.p2p or len(w.ranks) != 1 or len(w.missing) != 1:
            continue
        (m,), (p,) = w.ranks, w.missing
        call = w.calls.get(m)
        if call is None or messages.direction_of(call) != "recv":
            continue
        together = next((x.ranks for x in incident.waits if not x.p2p and p in x.ranks), [])
        sent = {q: messages.count(states[q], "send", m, call.tag, call.group) for q in together if q != m}
        others = [n for q, n in sent.items() if q != p]
        if others and sent.get(p, 0) < min(others) and 2 * sent[p] > max(others):
            return (p,), Reason.COUNT
    return None


def _alone(incident: Incident) -> Verdict | None:
    """One rank somewhere of its own, against at least two that stand together in one collective it does not enter."""
    if len(incident.waits) != 2:
        return None
    for lonely_in, together in (incident.waits, tuple(reversed(incident.waits))):
        lonely = [r for r in lonely_in.ranks if r in incident.members]
        if together.p2p or len(lonely) != 1 or together.missing != {lonely[0]} or len(together.ranks) < 2:
            continue
        if lonely_in.p2p or lonely_in.missing <= set(together.ranks):
            return (lonely[0],), Reason.MAJORITY
    return None
