"""Incidents: what, in a wait-for graph, all who are stuck wait for in the end. One incident is one finding.

The stuck ranks and their waits form a directed graph; its terminal strongly connected components are where every path
of waiting ends: a rank that is gone, a collective whose calls do not fit, or a cycle (R. Tarjan, "Depth-first search
and linear graph algorithms", 1972; iterative here, as a chain may be as long as the job is wide).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from distdiag.diagnosis.graph import Wait, WaitGraph


class Root(StrEnum):
    """How the waiting ends."""

    GONE = "gone"  # at ranks that are dead or stopped
    CONFLICT = "conflict"  # in a collective or message whose ends do not fit together
    CYCLE = "cycle"  # among ranks that wait for each other


@dataclass(frozen=True, slots=True)
class Incident:
    """One root.

    Attributes:
        members: The ranks that are gone, that meet in the conflict, or that form the cycle.
        waits: What the members wait in (of a conflict: that wait; of ranks gone: the waits for them).
        victims: All that are stuck because of it (of a conflict, members included; or that died in it).
    """

    root: Root
    members: frozenset[int]
    waits: tuple[Wait, ...]
    victims: frozenset[int]


def components(vertices: Iterable[Hashable], successors: Callable[[Hashable], Iterable[Hashable]]) -> list[list]:
    """Strongly connected components, every one after those it leads to."""
    index: dict[Hashable, int] = {}
    low: dict[Hashable, int] = {}
    on_stack: set[Hashable] = set()
    stack: list[Hashable] = []
    out: list[list] = []
    for root in vertices:
        if root in index:
            continue
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        work = [(root, iter(successors(root)))]
        while work:
            v, it = work[-1]
            for w in it:
                if w not in index:
                    index[w] = low[w] = len(index)
                    stack.append(w)
                    on_stack.add(w)
                    work.append((w, iter(successors(w))))
                    break
                if w in on_stack and index[w] < low[v]:
                    low[v] = index[w]
            else:
                work.pop()
                if work and low[v] < low[work[-1][0]]:
                    low[work[-1][0]] = low[v]
                if low[v] == index[v]:
                    component = []
                    while True:
                        w = stack.pop()
                        on_stack.discard(w)
                        component.append(w)
                        if w == v:
                            break
                    out.append(component)
    return out


def find(graph: WaitGraph) -> list[Incident]:
    """All incidents of a graph, by first member; also conflicts that ranks died of, which leave nobody stuck."""
    held = graph.stuck | graph.gone
    open_waits = [
        w
        for w in graph.waits
        if w.conflict is not None or (any(r in graph.stuck for r in w.ranks) and w.missing & held)
    ]
    is_open = {id(w) for w in open_waits}
    targets = {id(w): () if w.conflict is not None else tuple(w.missing & held) for w in open_waits}

    def successors(v: Hashable) -> Iterable[Hashable]:
        if isinstance(v, Wait):
            return targets[id(v)]
        return [w for w in graph.of_rank.get(v, ()) if id(w) in is_open] if v in graph.stuck else ()  # type: ignore[arg-type]

    gone: list[int] = []
    conflicts: dict[str, list[Wait]] = {}
    cycles: list[tuple[frozenset[int], tuple[Wait, ...]]] = []
    vertices: list[Hashable] = [*sorted(graph.stuck), *open_waits]
    for component in components(vertices, successors):
        ranks = frozenset(v for v in component if not isinstance(v, Wait))
        waits = tuple(v for v in component if isinstance(v, Wait))
        inside = set(component)
        if any(t not in inside for v in component for t in successors(v)):
            continue
        if ranks & graph.gone:
            gone.extend(ranks)
        elif len(waits) == 1 and not ranks and waits[0].conflict is not None:
            if any(r in graph.stuck for r in waits[0].ranks) or waits[0].died:
                conflicts.setdefault(waits[0].group, []).append(waits[0])
        elif ranks and waits:
            cycles.append((ranks, waits))
    out = [_conflict(graph, ws) for ws in conflicts.values()]
    fell = {r for ws in conflicts.values() for w in ws for r in w.died}  # their end is the conflict's doing
    out += _gone(graph, [r for r in gone if r not in fell])
    out += [Incident(Root.CYCLE, ranks, waits, graph.victims_of(ranks) & graph.stuck) for ranks, waits in cycles]
    return sorted(out, key=lambda i: min(i.members))


def _conflict(graph: WaitGraph, waits: list[Wait]) -> Incident:
    """Several conflicts in one group are one: after the first, nothing pairs up any more."""
    first = min(waits, key=lambda w: w.seq)
    members = frozenset().union(*first.sides)
    waiting = frozenset().union(*(w.ranks for w in waits), first.died)
    stuck = (graph.victims_of(waiting) | waiting) & graph.stuck.union(first.died)
    return Incident(Root.CONFLICT, members, (first,), stuck)


def _gone(graph: WaitGraph, ranks: list[int]) -> list[Incident]:
    """One incident for all ranks gone that the same ranks wait for."""
    alike: dict[frozenset[int], list[int]] = {}  # ranks that exactly the same waits are for: hundreds may be gone
    for q in ranks:
        alike.setdefault(frozenset(id(w) for w in graph.waits if q in w.missing), []).append(q)
    merged: list[tuple[set[int], set[int]]] = []
    for qs in alike.values():
        together, victims = set(qs), set(graph.victims_of(qs) & graph.stuck)
        rest = []
        for others, theirs in merged:
            if theirs & victims:
                together |= others
                victims |= theirs
            else:
                rest.append((others, theirs))
        merged = [*rest, (together, victims)]
    return [
        Incident(
            Root.GONE,
            frozenset(members),
            tuple(w for w in graph.waits if w.missing & members and any(r in graph.stuck for r in w.ranks)),
            frozenset(victims),
        )
        for members, victims in merged
    ]
