"""Finds the ranks that a dumped job waited for: others wait for them, and they wait for no other rank.

A dump does not show whether the host thread waits. It shows the operations in flight, and which ranks have not issued them. From
these follow two kinds of edges. A rank waits for members that have not issued its operation in flight. If all have issued it,
the rank depends on members that have it in flight, too (their devices may be blocked elsewhere). The culprits are where such
paths end outside a conflict or a cycle: their host stopped issuing, or their device stopped running.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from distdiag.diagnosis.model.snapshot import Call, Life, RankState, Snapshot
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.graph import WaitGraph
from distdiag.diagnosis.waits.incidents import components
from distdiag.diagnosis.waits.wait import Wait, other_end_of


@dataclass
class Blame:
    """The culprits and their victims, as far as dumps show.

    Attributes:
        culprits: Ranks with a dump that others wait for, and that wait for no other rank.
        extra: A few ranks in a collective that most others have never entered.
        victims: Ranks with operations in flight, except culprits.
        silent: Ranks without a dump that some rank's oldest operation in flight may be waiting for.
        main: The operation that most victims wait in, as their oldest.
        silent_in: The operation with most waiting ranks, of those that may wait for a silent rank.
        idle: Culprits with nothing in flight: the host stopped.
        device: Culprits whose operations in flight are complete on their peers: the device stopped.
        waited_for_since_s: When the first rank began to wait for the culprit directly.
        behind: Culprits that have issued the operation that others wait in, but whose device has not begun it.
        in_flight: Operations that all ranks have issued and none has completed, if nothing else explains them.
        crossed: Operations of two groups that ranks issued in opposite order, with the ranks that issued each first; the
            culprits are those that are alone with their order.
        circle: The running operations of a cycle: each rank's running op is queued behind another's.
    """

    culprits: tuple[int, ...] = ()
    extra: tuple[int, ...] = ()
    victims: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    main: Wait | None = None
    silent_in: Wait | None = None
    idle: tuple[int, ...] = ()
    device: tuple[int, ...] = ()
    waited_for_since_s: dict[int, float | None] = field(default_factory=dict)
    behind: tuple[int, ...] = ()
    in_flight: tuple[Wait, ...] = ()
    crossed: tuple[tuple[Wait, frozenset[int]], ...] = ()
    circle: tuple[Wait, ...] = ()
    oldest: dict[int, Call] = field(default_factory=dict)  # of each rank with operations in flight


def judge(snapshot: Snapshot, graph: WaitGraph, stale: tuple[int, ...] = ()) -> Blame:
    """Return the culprits: the ends of all chains of waits.

    Args:
        stale: Ranks whose dump is older than the others': they may have entered a collective since.
    """
    waiting = [r for r in graph.of_rank if r not in graph.stuck]
    if not waiting:
        return Blame()
    waits = [w for w in graph.waits if any(r in snapshot.ranks for r in w.ranks)]
    members = _members(snapshot, waits, stale)
    awaited = frozenset().union(*members.lacking.values())
    oldest = {r: min(graph.of_rank[r], key=lambda w: _age_key(w, r)) for r in waiting}
    ends = _ends(snapshot, graph, waits, members, awaited)
    device_stopped = _device_stopped(snapshot, graph, stale)
    culprits = ends.culprits | device_stopped & awaited
    lagging = _lagging(snapshot, graph, culprits, stale)
    culprits |= lagging.keys()
    silent = ends.silent.union(*(members.unclear[id(w)] for w in oldest.values()))
    main = _main(oldest, members.lacking, culprits)
    victims = set(waiting) - culprits
    extra = _extra(snapshot, main, culprits, victims)
    awaited_silently = (w for w in waits if members.unclear[id(w)] & silent)
    return Blame(
        culprits=() if extra else tuple(sorted(culprits)),
        extra=tuple(extra),
        victims=tuple(sorted((victims | culprits) - set(extra))) if extra else tuple(sorted(victims)),
        silent=tuple(sorted(silent)),
        main=main,
        silent_in=max(awaited_silently, key=lambda w: (not w.p2p, len(w.ranks)), default=None),
        idle=tuple(sorted(q for q in culprits if q not in graph.of_rank)),
        device=tuple(sorted(culprits & device_stopped)),
        waited_for_since_s={**_crossed_since(ends.crossed), **lagging, **_since(waits, members.lacking, culprits)},
        behind=tuple(sorted(culprits & awaited - frozenset().union(*(w.missing for w in waits)))),
        in_flight=tuple(ends.in_flight) if not culprits and not silent and not ends.circle else (),
        crossed=ends.crossed,
        circle=tuple(w for w in waits if any(r in ends.circle and c.started for r, c in w.calls.items())),
        oldest={r: w.calls[r] for r, w in oldest.items() if r in w.calls},
    )


@dataclass
class _Members:
    """The members of each wait, by its id: known not to have issued it; without a dump; with it in flight, too."""

    lacking: dict[int, frozenset[int]] = field(default_factory=dict)
    unclear: dict[int, frozenset[int]] = field(default_factory=dict)
    also: dict[int, frozenset[int]] = field(default_factory=dict)


def _members(snapshot: Snapshot, waits: list[Wait], stale: tuple[int, ...]) -> _Members:
    absent = {r for r, st in snapshot.ranks.items() if st.life == Life.MISSING}
    out = _Members()
    for w in waits:
        lacking, unclear = w.missing - absent - set(stale), w.missing & absent
        also = out.also[id(w)] = _in_it(snapshot, w)
        if not w.p2p and _done_somewhere(snapshot, w):
            lacking = unclear = frozenset()
        if not w.missing:
            lacking = _not_begun(w, also) if not w.p2p else _not_met(snapshot, w)
        out.lacking[id(w)], out.unclear[id(w)] = lacking, unclear
    return out


@dataclass
class _Ends:
    """Where the chains of waits end; the fields have the meaning of those in `Blame`."""

    culprits: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)
    circle: set[int] = field(default_factory=set)
    in_flight: list[Wait] = field(default_factory=list)
    crossed: tuple[tuple[Wait, frozenset[int]], ...] = ()


def _ends(snapshot: Snapshot, graph: WaitGraph, waits: list[Wait], members: _Members, awaited: frozenset[int]) -> _Ends:
    """Return the ends of the graph: components of ranks and waits without an edge to another component."""
    onward = _edges(snapshot.ranks, graph, waits, members.lacking, members.also)
    absentees = frozenset().union(*(members.lacking[id(w)] & w.missing for w in waits))
    out = _Ends()
    for component in components(onward, lambda v: onward.get(v, ())):
        inside = set(component)
        if any(t not in inside for v in component for t in onward[v]):
            continue
        ends = {v for v in component if v >= 0}
        here = [waits[-v - 1] for v in component if v < 0]
        unknown = frozenset().union(*(members.unclear[id(w)] for w in here))
        order = _crossed(here, members.also)
        if order:
            out.crossed = order
            few, many = order
            out.culprits |= few[1] if len(few[1]) < len(many[1]) else frozenset()
        elif unknown:
            out.silent |= unknown
        elif ends & absentees:
            out.culprits |= ends & absentees
        elif len(ends) > 1 and ends <= awaited:  # each rank's running op is queued behind another's: a cycle
            out.circle |= ends
        elif ends & awaited:  # all issued it: an op that a device has not begun may be queued behind one that waits
            out.culprits |= ends & awaited
        else:
            out.in_flight += here
    return out


def _edges(
    states: dict[int, RankState],
    graph: WaitGraph,
    waits: list[Wait],
    lacking: dict[int, frozenset[int]],
    also: dict[int, frozenset[int]],
) -> dict[int, list[int]]:
    """Return the edges of the graph. Ranks are numbered 0, 1, …; waits are numbered -1, -2, …"""
    number = {id(w): -i - 1 for i, w in enumerate(waits)}
    onward: dict[int, list[int]] = {}
    for r, st in states.items():
        if st.life != Life.MISSING:
            mine = [w for w in graph.of_rank.get(r, ()) if id(w) in number]
            # ops that its device has not begun are queued behind those it has
            begun = [w for w in mine if r in w.calls and w.calls[r].started]
            onward[r] = [number[id(w)] for w in begun or mine]
    for w in waits:
        onward[number[id(w)]] = sorted(lacking[id(w)] or also[id(w)])
    return onward


def _in_it(snapshot: Snapshot, w: Wait) -> frozenset[int]:
    """Return the members that have this operation in flight, too."""
    if w.p2p:
        rank, peer = w.key[3], w.key[4]
        return frozenset((rank, peer)) if other_end_of(snapshot, w) is not None else frozenset((rank,))
    states = snapshot.ranks
    return frozenset(
        q
        for q in snapshot.groups[w.group].ranks
        if q in states and states[q].completed.get(w.group, 0) < w.seq <= states[q].enqueued.get(w.group, 0)
    )


def _not_met(snapshot: Snapshot, w: Wait) -> frozenset[int]:
    """Return the peer of a message if this rank's device has begun it and the peer's has not."""
    mine, theirs = w.calls.get(w.key[3]), other_end_of(snapshot, w)
    waits = mine is not None and mine.started and theirs is not None and theirs.started is False
    return frozenset((w.key[4],)) if waits else frozenset()


def _not_begun(w: Wait, in_it: frozenset[int]) -> frozenset[int]:
    """Return the members whose device has not begun the operation that other members' devices have begun."""
    begun = {q: c.started for q, c in w.calls.items() if q in in_it and c.started is not None}
    if len(begun) < len(in_it) or not any(begun.values()):
        return frozenset()
    return frozenset(q for q, b in begun.items() if not b)


def _crossed(waits: list[Wait], also: dict[int, frozenset[int]]) -> tuple[tuple[Wait, frozenset[int]], ...]:
    """Return two groups' operations that common ranks run in opposite order, with the ranks that run each first; the smaller set of
    ranks comes first. Empty if no groups are crossed.

    The order is the one in which devices began them, if known, else the order of issue.
    """
    whole = [w for w in waits if not w.p2p and not w.missing]
    for i, v in enumerate(whole):
        for w in whole[:i]:
            if v.group == w.group:
                continue
            shared = also[id(v)] & also[id(w)]
            first_v = frozenset(q for q in shared if _came_first(v, w, q))
            first_w = frozenset(q for q in shared if _came_first(w, v, q))
            if first_v and first_w:
                a, b = sorted(((v, first_v), (w, first_w)), key=lambda x: len(x[1]))
                return a, b
    return ()


def _came_first(v: Wait, w: Wait, rank: int) -> bool:
    """True if this rank's device has begun `v` and not `w`; if that is unknown, True if it issued `v` first."""
    a, b = v.calls.get(rank), w.calls.get(rank)
    if a is None or b is None:
        return False
    if a.started is not None and b.started is not None:
        return a.started and not b.started
    return a.entered_s is not None and b.entered_s is not None and a.entered_s < b.entered_s


def _crossed_since(crossed: tuple[tuple[Wait, frozenset[int]], ...]) -> dict[int, float | None]:
    """Return when the ranks with opposite orders had issued both operations."""
    out: dict[int, float | None] = {}
    for q in frozenset().union(*(ranks for _, ranks in crossed)):
        out[q] = max((t for w, _ in crossed if q in w.calls and (t := w.calls[q].entered_s) is not None), default=None)
    return out


def _done_somewhere(snapshot: Snapshot, w: Wait) -> bool:
    """True if a member has completed it, which proves that all had issued it."""
    call = next((w.calls[r] for r in w.ranks if r in w.calls), None)
    if call is None or not compatible.needs_everybody(call.op):
        return False
    states = snapshot.ranks
    return any(q in states and states[q].completed.get(w.group, 0) >= w.seq for q in snapshot.groups[w.group].ranks)


def _age_key(w: Wait, rank: int) -> tuple[float, int]:
    call = w.calls.get(rank)
    at = call.entered_s if call is not None and call.entered_s is not None else float("inf")
    return (at, w.seq)


def _since(waits: list[Wait], lacking: dict[int, frozenset[int]], culprits: set[int]) -> dict[int, float | None]:
    out: dict[int, float | None] = {}
    for w in waits:
        times = [t for r in w.ranks if r in w.calls and (t := w.calls[r].entered_s) is not None]
        if times:
            for q in lacking[id(w)] & culprits:
                out[q] = min(t for t in (out.get(q), *times) if t is not None)
    return out


def _device_stopped(snapshot: Snapshot, graph: WaitGraph, stale: tuple[int, ...]) -> set[int]:
    """Return the ranks with a collective in flight that all other members with a dump have completed."""
    out: set[int] = set()
    states = snapshot.ranks
    for w in graph.waits:
        if w.p2p or w.missing & states.keys() - {q for q in w.missing if states[q].life == Life.MISSING}:
            continue
        members = [q for q in snapshot.groups[w.group].ranks if q in states and states[q].life != Life.MISSING]
        behind = [q for q in members if states[q].completed.get(w.group, 0) < w.seq]
        if 0 < len(behind) < len(members) and len(behind) <= len(members) // 2:
            out |= set(behind) - set(stale)
    return out


def _lagging(
    snapshot: Snapshot, graph: WaitGraph, culprits: set[int], stale: tuple[int, ...]
) -> dict[int, float | None]:
    """Return ranks that stopped issuing before their peers without a visible reason, and since when.

    Members of a group that wait for one culprit in the same operation run ahead equally far, until the host waits. A member
    that issued less than all others, and has nothing in flight that they lack, stopped for another reason.
    """
    out: dict[int, float | None] = {}
    states = snapshot.ranks
    for key, group in snapshot.groups.items():
        here = [
            q for q in group.ranks
            if q in graph.of_rank and q not in culprits and q not in stale and q not in graph.stuck
            and states[q].completed.get(key, 0) < states[q].enqueued.get(key, 0)
        ]  # fmt: skip
        if len(here) < 3:
            continue
        front = max(states[q].enqueued[key] for q in here)
        ahead = [q for q in here if states[q].enqueued[key] == front]
        behind = [q for q in here if states[q].enqueued[key] < front]
        if not behind or len(ahead) <= len(behind) or len(ahead) + len(behind) + 1 < len(group.ranks):
            continue
        if len({states[q].completed.get(key, 0) for q in here}) > 1:
            continue
        usual = [_kinds(snapshot, graph, q) for q in ahead]
        for q in behind:
            mine = _kinds(snapshot, graph, q)
            if all(mine <= theirs for theirs in usual) and _never_ahead(states, q, ahead):
                next_one = states[q].enqueued[key] + 1
                times = [c.entered_s for o in ahead for c in states[o].calls if c.group == key and c.seq == next_one]
                out[q] = min((t for t in times if t is not None), default=None)
    return out


def _kinds(snapshot: Snapshot, graph: WaitGraph, rank: int) -> set[tuple[str, str]]:
    """Return what a rank has in flight: kind of group, and direction."""
    return {(snapshot.groups[w.group].description, w.key[2] if w.p2p else "") for w in graph.of_rank[rank]}


def _never_ahead(states: dict[int, RankState], rank: int, others: list[int]) -> bool:
    return all(
        n <= states[o].enqueued[g] for g, n in states[rank].enqueued.items() for o in others if g in states[o].enqueued
    )


def _main(oldest: dict[int, Wait], lacking: dict[int, frozenset[int]], culprits: set[int]) -> Wait | None:
    """Return the wait that is the oldest of most ranks, of those waits that have a culprit missing."""
    votes: dict[int, tuple[int, Wait]] = {}
    for direct in (True, False):
        for w in oldest.values():
            if bool(lacking[id(w)] & culprits) is direct and w.calls:
                votes[id(w)] = (votes.get(id(w), (0, w))[0] + 1, w)
        if votes:
            break
    return max(votes.values(), key=lambda v: (v[0], not v[1].p2p, -v[1].seq), default=(0, None))[1]


def _extra(snapshot: Snapshot, main: Wait | None, culprits: set[int], victims: set[int]) -> list[int]:
    """Return a few ranks in a collective that none of the many others has entered, if those are in equal states with nothing in flight."""
    if main is None or main.p2p or not culprits <= main.missing or len(culprits) <= len(victims) or len(culprits) < 2:
        return []
    if victims != set(main.ranks) or culprits | victims != set(snapshot.groups[main.group].ranks):
        return []
    level = {snapshot.ranks[q].enqueued.get(main.group, 0) for q in culprits}
    clear = all(st.enqueued == st.completed for q in culprits for st in (snapshot.ranks[q],))
    return sorted(victims) if len(level) == 1 and clear else []
