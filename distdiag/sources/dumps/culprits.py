"""Finds the ranks that a dumped job waited for: others wait for them, and they wait for no other rank.

A dump does not show whether the host thread waits. It shows the operations in flight, and which ranks have not issued them. From
these follow two kinds of edges. A rank waits for members that have not issued its operation in flight. If all have issued it,
the rank depends on members that have it in flight, too (their devices may be blocked elsewhere). The culprits are where such
paths end outside a conflict or a cycle: their host stopped issuing, or their device stopped running.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from distdiag.diagnosis.model.snapshot import Call, Life, Site, Snapshot
from distdiag.diagnosis.waits.graph import WaitGraph
from distdiag.diagnosis.waits.incidents import components
from distdiag.diagnosis.waits.wait import Wait, other_end_of
from distdiag.terms.operations import synchronizes
from distdiag.terms.ranks import grouped

Crossed = tuple[tuple[Wait, frozenset[int]], ...]
Paths = Mapping[int, Mapping[tuple[str, int], tuple[Site, ...]]]


@dataclass
class Blame:
    """The culprits and their victims, as far as dumps show."""

    culprits: tuple[int, ...] = ()  # with a dump; others wait for them, and they wait for no other rank
    alone: bool = False  # the culprits are a few ranks in a collective that most others have never entered
    victims: tuple[int, ...] = ()  # ranks with operations in flight, except culprits
    silent: tuple[int, ...] = ()  # without a dump; some rank's oldest operation in flight may be waiting for them
    main: Wait | None = None  # the operation that most victims wait in, as their oldest
    silent_in: Wait | None = None  # the one with most waiting ranks, of those that may wait for a silent rank
    idle: tuple[int, ...] = ()  # culprits with nothing in flight: the host stopped
    device: tuple[int, ...] = ()  # culprits whose operations are complete on their peers: the device stopped
    behind: tuple[int, ...] = ()  # culprits that issued what others wait in, but whose device has not begun it
    waited_for_since_s: dict[int, float | None] = field(default_factory=dict)  # when the first rank began to wait
    in_flight: tuple[Wait, ...] = ()  # issued by all ranks, complete on none, if nothing else explains them
    # operations of two groups that ranks issued in opposite order, with the ranks that issued each first; the culprits are
    # those that are alone with their order
    crossed: Crossed = ()
    circle: tuple[Wait, ...] = ()  # the running operations of a cycle: each rank's is queued behind another's
    oldest: dict[int, Call] = field(default_factory=dict)  # of each rank with operations in flight


@dataclass
class _Link:
    """One wait, and the members that may keep its ranks in it."""

    wait: Wait
    lacking: frozenset[int]  # known not to have issued it; if all have, those whose device has not begun it
    unclear: frozenset[int]  # without a dump
    also: frozenset[int]  # with it in flight, too
    met: bool = False  # both ends, or the devices of all members, have begun it, and it has completed on none


Links = dict[int, _Link]  # by id of the wait


def judge(snapshot: Snapshot, graph: WaitGraph, stale: tuple[int, ...] = ()) -> Blame:
    """Return the culprits: the ends of all chains of waits.

    Args:
        stale: Ranks whose dump is older than the others': they may have entered a collective since.
    """
    waiting = [r for r in graph.of_rank if r not in graph.stuck]
    if not waiting:
        return Blame()
    dumped = {r for r, state in snapshot.ranks.items() if state.life != Life.MISSING}
    links = {id(w): _link(snapshot, w, dumped, stale) for w in graph.waits}
    awaited = frozenset().union(*(link.lacking for link in links.values()))
    oldest = {r: min(graph.of_rank[r], key=lambda w: _age_key(w, r)) for r in waiting}
    ends = _ends(graph, links, dumped, awaited)
    device_stopped = _device_stopped(snapshot, graph, dumped, stale)
    culprits = set(ends.culprits)
    lagging = _lagging(snapshot, graph, {*culprits, *stale, *graph.stuck})
    culprits |= lagging.keys()
    silent = ends.silent.union(*(links[id(w)].unclear for w in oldest.values()))
    main = _main(oldest, links, culprits)
    victims = set(waiting) - culprits
    alone = main is not None and _alone(snapshot, main, culprits, victims)
    awaited_silently = (w for w in graph.waits if links[id(w)].unclear & silent)
    crossing = frozenset().union(*(ranks for _, ranks in ends.crossed))  # and when each had issued both operations
    crossed = {q: max((t for w, _ in ends.crossed for t in _issued_s(w, (q,))), default=None) for q in crossing}
    return Blame(
        culprits=tuple(sorted(victims if alone else culprits)),
        alone=alone,
        victims=tuple(sorted(culprits if alone else victims)),
        silent=tuple(sorted(silent)),
        main=main,
        silent_in=max(awaited_silently, key=lambda w: (not w.p2p, len(w.ranks)), default=None),
        idle=tuple(sorted(q for q in culprits if q not in graph.of_rank)),
        device=tuple(sorted(culprits & device_stopped)),
        behind=tuple(sorted(culprits & awaited - frozenset().union(*(w.missing for w in graph.waits)))),
        waited_for_since_s={**crossed, **lagging, **_since(links.values(), culprits)},
        in_flight=tuple(ends.in_flight) if not culprits and not silent and not ends.circle else (),
        crossed=ends.crossed,
        circle=tuple(w for w in graph.waits if any(r in ends.circle and c.started for r, c in w.calls.items())),
        oldest={r: w.calls[r] for r, w in oldest.items() if r in w.calls},
    )


def _issued_s(w: Wait, ranks: Iterable[int]) -> list[float]:
    return [t for r in ranks if r in w.calls and (t := w.calls[r].entered_s) is not None]


def _age_key(w: Wait, rank: int) -> tuple[float, int]:
    return min(_issued_s(w, (rank,)), default=float("inf")), w.seq


def _link(snapshot: Snapshot, w: Wait, dumped: set[int], stale: Collection[int]) -> _Link:
    states = snapshot.ranks
    if w.p2p:
        rank, peer = w.key[3], w.key[4]
        mine, theirs = w.calls.get(rank), other_end_of(snapshot, w)
        also = frozenset((rank,) if theirs is None else (rank, peer))
        waits = mine is not None and mine.started and theirs is not None and theirs.started is False
        not_begun = frozenset((peer,) if waits else ())
        arrived, met = False, not not_begun
    else:
        members, call = snapshot.groups[w.group].ranks, next(iter(w.calls.values()), None)
        completed = {q: states[q].completed.get(w.group, 0) for q in members}
        also = frozenset(q for q in members if completed[q] < w.seq <= states[q].enqueued.get(w.group, 0))
        begun = {q: c.started for q, c in w.calls.items() if q in also and c.started is not None}
        known = len(begun) == len(also) and any(begun.values())
        met = len(also) == len(members) > 1 and len(begun) == len(also) and all(begun.values())
        not_begun = frozenset(q for q, b in begun.items() if not b) if known else frozenset()
        # a member has completed it, which proves that all had issued it
        arrived = call is not None and synchronizes(call.op) and max(completed.values(), default=0) >= w.seq
    if not w.missing:
        return _Link(w, not_begun, frozenset(), also, met)
    if arrived:
        return _Link(w, frozenset(), frozenset(), also)
    return _Link(w, w.missing & dumped - set(stale), w.missing - dumped, also)


@dataclass
class _Ends:
    """Where the chains of waits end; the fields have the meaning of those in `Blame`."""

    culprits: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)
    circle: set[int] = field(default_factory=set)
    in_flight: list[Wait] = field(default_factory=list)
    crossed: Crossed = ()


def _ends(graph: WaitGraph, links: Links, dumped: Iterable[int], awaited: frozenset[int]) -> _Ends:
    """Return the ends of the graph: components of ranks and waits without an edge to another component.

    Its vertices are ranks (0, 1, …) and waits (-1, -2, …).
    """
    number = {key: -i - 1 for i, key in enumerate(links)}
    onward: dict[int, list[int]] = {}
    lacked = grouped((q, link.wait.key) for link in links.values() for q in link.lacking)
    for r in dumped:
        mine = graph.of_rank.get(r, ())
        # ops that its device has not begun are queued behind those it has
        begun = [w for w in mine if r in w.calls and w.calls[r].started]
        lost = [w for w in mine if r not in w.calls or not w.calls[r].op]  # from the ring: older than what is in it
        queue = begun or lost or _oldest(mine, r)
        onward[r] = [] if _not_begun_first(r, mine, lacked.get(r, ())) else [number[id(w)] for w in queue]
    for key, link in links.items():
        onward[number[key]] = sorted(link.lacking or link.also)
    by_number = list(links.values())
    absentees = frozenset().union(*(link.lacking & link.wait.missing for link in by_number))
    out = _Ends()
    for component in components(onward, lambda v: onward.get(v, ())):
        inside = set(component)
        if any(t not in inside for v in component for t in onward[v]):
            continue
        ends = {v for v in component if v >= 0}
        here = [by_number[-v - 1] for v in component if v < 0]
        unknown = frozenset().union(*(link.unclear for link in here))
        order = _crossed(here)
        if order:
            out.crossed = order
            few, many = order
            out.culprits |= few[1] if len(few[1]) < len(many[1]) else frozenset()
        elif unknown:
            out.silent |= unknown
        elif here and all(link.met for link in here):  # which of them stopped is not known
            out.in_flight += [link.wait for link in here]
        elif ends & absentees:
            out.culprits |= ends & absentees
        elif len(ends) > 1 and ends <= awaited:  # each rank's running op is queued behind another's: a cycle
            out.circle |= ends
        elif ends & awaited:  # all issued it: an op that a device has not begun may be queued behind one that waits
            out.culprits |= ends & awaited
        else:
            out.in_flight += [link.wait for link in here]
    return out


def _oldest(mine: Collection[Wait], rank: int) -> list[Wait]:
    """Return what a rank issued first of its operations in flight: one, or the messages of one batch."""
    since = min((_age_key(w, rank)[0] for w in mine), default=0.0)
    return [w for w in mine if _age_key(w, rank)[0] == since]


def _not_begun_first(rank: int, mine: Collection[Wait], lacked: Iterable[tuple]) -> bool:
    """True if a rank's device has begun nothing in flight, not even its oldest operation, which others have begun.

    Args:
        lacked: Keys of the waits that lack this rank.
    """
    calls = [(w, w.calls.get(rank)) for w in mine]
    if not calls or any(call is None or call.started is not False for _, call in calls):
        return False
    oldest = {_operation(w.key) for w in _oldest(mine, rank)}
    return any(_operation(key) in oldest for key in lacked)


def _operation(key: tuple) -> tuple:
    """Return the same value for a wait of either end of a message."""
    return *key[:2], frozenset(key[3:5])


def _crossed(links: list[_Link]) -> Crossed:
    """Return two groups' operations that common ranks run in opposite order, with the ranks that run each first; the smaller set of
    ranks comes first. Empty if no groups are crossed.

    The order is the one in which devices began them, if known, else the order of issue.
    """
    whole = [link for link in links if not link.wait.p2p and not link.wait.missing]
    for i, a in enumerate(whole):
        for b in whole[:i]:
            v, w = a.wait, b.wait
            if v.group == w.group:
                continue
            both = a.also & b.also
            first_v, first_w = (frozenset(q for q in both if _came_first(*pair, q)) for pair in ((v, w), (w, v)))
            if first_v and first_w:
                few, many = sorted(((v, first_v), (w, first_w)), key=lambda x: len(x[1]))
                return few, many
    return ()


def _came_first(v: Wait, w: Wait, rank: int) -> bool:
    """True if this rank's device has begun `v` and not `w`; if that is unknown, True if it issued `v` first."""
    a, b = v.calls.get(rank), w.calls.get(rank)
    if a is None or b is None:
        return False
    if a.started is not None and b.started is not None:
        return a.started and not b.started
    return a.entered_s is not None and b.entered_s is not None and a.entered_s < b.entered_s


def _since(links: Iterable[_Link], culprits: set[int]) -> dict[int, float | None]:
    """Return when the first rank began to wait for each culprit directly."""
    out: dict[int, float | None] = {}
    for link in links:
        if times := _issued_s(link.wait, link.wait.ranks):
            for q in link.lacking & culprits:
                out[q] = min(t for t in (out.get(q), *times) if t is not None)
    return out


def _device_stopped(snapshot: Snapshot, graph: WaitGraph, dumped: set[int], stale: Collection[int]) -> set[int]:
    """Return the ranks with a collective in flight that all other members with a dump have completed."""
    out: set[int] = set()
    for w in graph.waits:
        if w.p2p or w.missing & dumped:
            continue
        members = [q for q in snapshot.groups[w.group].ranks if q in dumped]
        behind = [q for q in members if snapshot.ranks[q].completed.get(w.group, 0) < w.seq]
        if 0 < len(behind) < len(members) and len(behind) <= len(members) // 2:
            out |= set(behind) - set(stale)
    return out


def _lagging(snapshot: Snapshot, graph: WaitGraph, explained: set[int]) -> dict[int, float | None]:
    """Return ranks that stopped issuing before their peers without a visible reason, and since when.

    Members of a group that wait for one culprit in the same operation run ahead equally far, until the host waits. A member
    that issued less than all others, and has nothing in flight that they lack, stopped for another reason.
    """
    out: dict[int, float | None] = {}
    states = snapshot.ranks
    for key, group in snapshot.groups.items():
        waiting = [q for q in group.ranks if q in graph.of_rank and q not in explained]
        here = [q for q in waiting if states[q].completed.get(key, 0) < states[q].enqueued.get(key, 0)]
        if len(here) < 3:
            continue
        front = max(states[q].enqueued[key] for q in here)
        ahead = [q for q in here if states[q].enqueued[key] == front]
        behind = [q for q in here if states[q].enqueued[key] < front]
        if not behind or len(ahead) <= len(behind) or len(here) + 1 < len(group.ranks):
            continue
        if len({states[q].completed.get(key, 0) for q in here}) > 1:
            continue
        usual = [_kinds(snapshot, graph, q) for q in ahead]
        for q in behind:
            mine = _kinds(snapshot, graph, q)
            own = states[q].enqueued.items()
            never_ahead = all(n <= states[o].enqueued.get(g, n) for g, n in own for o in ahead)
            if never_ahead and all(mine <= theirs for theirs in usual):
                next_one = states[q].enqueued[key] + 1
                times = [c.entered_s for o in ahead for c in states[o].calls if c.group == key and c.seq == next_one]
                out[q] = min((t for t in times if t is not None), default=None)
    return out


def _kinds(snapshot: Snapshot, graph: WaitGraph, rank: int) -> set[tuple[str, str]]:
    """Return what a rank has in flight: kind of group, and direction."""
    return {(snapshot.groups[w.group].description, w.key[2] if w.p2p else "") for w in graph.of_rank[rank]}


def _main(oldest: dict[int, Wait], links: Links, culprits: set[int]) -> Wait | None:
    """Return the oldest wait of most ranks, of those with a culprit missing; if it is of no rank, that with most ranks.

    One that a culprit has not issued comes before those that are queued on it.
    """
    known = [w for w in oldest.values() if w.calls]
    direct = [w for w in known if links[id(w)].lacking & culprits]
    later = [link.wait for link in links.values() if link.lacking & culprits for _ in link.wait.calls]
    votes = Counter(id(w) for w in direct or later or known)
    unissued = [v for v in votes if links[v].wait.missing & culprits]
    waits = (links[v].wait for v in unissued or votes)
    return max(waits, key=lambda w: (votes[id(w)], not w.p2p, -w.seq), default=None)


def _alone(snapshot: Snapshot, main: Wait, culprits: set[int], victims: set[int]) -> bool:
    """True if the victims are a few ranks in a collective that none of the many others, all equal and idle, has entered."""
    if main.p2p or not culprits <= main.missing or len(culprits) <= len(victims) or len(culprits) < 2:
        return False
    if victims != set(main.ranks) or culprits | victims != set(snapshot.groups[main.group].ranks):
        return False
    states = [snapshot.ranks[q] for q in culprits]
    idle = all(s.enqueued == s.completed and not any(c.completed_s is None for c in s.calls) for s in states)
    return idle and len({s.enqueued.get(main.group, 0) for s in states}) == 1


def one_more(
    paths: Paths, ahead: Collection[int], behind: Collection[int], wait: Wait
) -> tuple[int, Site, Site] | None:
    """Return the number of the call that only the ranks ahead made, and the outermost frames in which it and the others' call differ.

    Until then all made their calls by the same paths. From there on each call of the ranks ahead has the path of the others' call
    before it.
    """
    mine, theirs = _common(paths, ahead, wait.group), _common(paths, behind, wait.group)
    numbers = [n for n in sorted(mine.keys() & theirs.keys()) if n < wait.seq]
    first = next((n for n in numbers if mine[n] != theirs[n]), None)
    if first is None or first == numbers[0] or not all((mine[first], theirs[first])):
        return None
    if any(mine.get(n + 1) != theirs.get(n) for n in range(first, wait.seq)):
        return None
    # a line that is new to all, or one that those behind have left out: not the line of a role
    known, times = mine[first] in theirs.values(), list(mine.values()).count(mine[first])
    if known is (len(ahead) < len(behind)) or (times > 1 and not known):
        return None
    pairs = zip(mine[first], theirs[first], strict=False)
    return next(((first, a, b) for a, b in pairs if a != b), None)


def _common(paths: Paths, ranks: Collection[int], group: str) -> dict[int, tuple[Site, ...]]:
    """Return the path of each collective of a group that is the same on all of these ranks."""
    first, *others = (paths.get(q, {}) for q in ranks)
    return {n: path for (g, n), path in first.items() if g == group and all(x.get((g, n)) == path for x in others)}
