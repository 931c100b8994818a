"""Incidents: what the stuck ranks of a wait-for graph ultimately wait for. One incident is one finding.

The stuck ranks and their waits form a directed graph. Every path of waits ends in one of its terminal strongly connected
components: a rank that is gone, a collective whose calls are incompatible, or a cycle (R. Tarjan, "Depth-first search
and linear graph algorithms", 1972; iterative here, as a chain may be as long as the job is wide).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.diagnosis.waits.graph import WaitGraph
from distdiag.diagnosis.waits.wait import Wait
from distdiag.terms.ranks import by_value


class Root(StrEnum):
    """Where a chain of waits ends."""

    GONE = "gone"  # ranks that are dead or stopped
    CONFLICT = "conflict"  # a collective or message whose calls are incompatible
    CYCLE = "cycle"  # ranks that wait for each other
    ABORT = "abort"  # calls of different sizes, for which the backend ended ranks (see `waits.abort`)


@dataclass(frozen=True, slots=True)
class Incident:
    """One root.

    Attributes:
        members: The ranks that are gone, that are in the conflicting collective, or that form the cycle.
        waits: The waits of the members (of a conflict: that wait; of ranks gone: the waits for them).
        victims: All ranks that are stuck because of it or died in it, members included.
    """

    root: Root
    members: frozenset[int]
    waits: tuple[Wait, ...]
    victims: frozenset[int]


def components(vertices: Iterable[int], successors: Callable[[int], Iterable[int]]) -> list[list[int]]:
    """Return the strongly connected components, each after those that it leads to."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    on_stack: set[int] = set()
    stack: list[int] = []
    out: list[list[int]] = []
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
                    while not component or component[-1] != v:
                        component.append(stack.pop())
                    on_stack.difference_update(component)
                    out.append(component)
    return out


def find(graph: WaitGraph) -> list[Incident]:
    """Return all incidents of a graph by first member, with conflicts that ranks died of and that leave no rank stuck."""
    # Ranks in the same wait have the same successors: the vertices are the waits, not the ranks.
    waits = [
        w
        for w in graph.waits
        if w.conflict is not None or (w.ranks and w.ranks[0] in graph.stuck and not w.missing.isdisjoint(graph.stuck))
    ]
    number = {id(w): i for i, w in enumerate(waits)}
    onward: list[set[int]] = []
    for w in waits:
        ranks = () if w.conflict is not None else w.missing & graph.stuck
        onward.append({number[id(v)] for r in ranks for v in graph.of_rank[r] if id(v) in number})
    gone: set[int] = set()
    for w in graph.waits:
        if w.conflict is None and w.missing and not graph.stuck.isdisjoint(w.ranks):
            gone |= w.missing & graph.gone
    conflicts: dict[str, list[Wait]] = {}
    out: list[Incident] = []
    for component in components(range(len(waits)), onward.__getitem__):
        here = [waits[i] for i in component]
        if here[0].conflict is not None:
            if here[0].died or not graph.stuck.isdisjoint(here[0].ranks):
                conflicts.setdefault(here[0].group, []).append(here[0])
            continue
        inside = set(component)
        if any(onward[i] - inside for i in component) or not any(onward[i] for i in component):
            continue
        if any(w.missing & graph.gone for w in here) or _ends_elsewhere(graph, here, number):
            continue
        awaited = frozenset().union(*(w.missing for w in here))
        members = awaited & {r for w in here for r in w.ranks}
        victims = (graph.victims_of(members) | members) & graph.stuck
        out.append(Incident(Root.CYCLE, members, tuple(here), victims))
    out += [_conflict(graph, ws) for ws in conflicts.values()]
    fell = {r for ws in conflicts.values() for w in ws for r in w.died}  # they died of the conflict
    out += _gone(graph, sorted(gone - fell))
    return sorted(out, key=lambda i: min(i.members))


def _ends_elsewhere(graph: WaitGraph, waits: list[Wait], number: dict[int, int]) -> bool:
    """True if a rank of the cycle also waits only for ranks that are gone."""
    ranks = {r for w in waits for r in w.missing if r in graph.stuck}
    return any(v.missing & graph.gone for r in ranks for v in graph.of_rank[r] if id(v) not in number)


def _conflict(graph: WaitGraph, waits: list[Wait]) -> Incident:
    """Merge the conflicts of one group into the first: after it, no calls pair up any more."""
    first = min(waits, key=lambda w: w.seq)
    members = frozenset().union(*first.sides)
    waiting = frozenset().union(*(w.ranks for w in waits), first.died)
    stuck = (graph.victims_of(waiting) | waiting) & graph.stuck.union(first.died)
    return Incident(Root.CONFLICT, members, (first,), stuck)


def _gone(graph: WaitGraph, ranks: list[int]) -> list[Incident]:
    """Merge the incidents of gone ranks that the same ranks wait for."""
    # gone ranks by the waits for them: hundreds may be gone
    by_waits = by_value({q: frozenset(id(w) for w in graph.waits if q in w.missing) for q in ranks})
    merged: list[tuple[set[int], set[int]]] = []
    for qs in by_waits.values():
        found = [(set(qs), set(graph.victims_of(qs) & graph.stuck))]
        found += (one for one in merged if one[1] & found[0][1])
        together, victims = (set().union(*sets) for sets in zip(*found, strict=True))
        merged = [*(one for one in merged if one not in found), (together, victims)]
    stuck = [w for w in graph.waits if not graph.stuck.isdisjoint(w.ranks)]
    return [
        Incident(Root.GONE, frozenset(members), tuple(w for w in stuck if w.missing & members), frozenset(victims))
        for members, victims in merged
    ]


# -- file locks across collectives -------------------------------------------------------------------------------------


class LockCycle(NamedTuple):
    """One cycle through a file lock."""

    rank: int  # that waits for the lock
    holders: tuple[int, ...]  # ranks that hold it, and wait for `rank`
    members: tuple[int, ...]  # all ranks that are stuck because of it


def lock_cycles(s: Snapshot, graph: WaitGraph) -> tuple[LockCycle, ...]:
    """Return the cycles in which a rank waits for a file lock whose holder waits for that rank, by the kernel's lock table.

    Neither can free the other, whatever it does next.
    """
    out = []
    for rank in graph.sinks:
        if rank not in s.ranks:
            continue
        waiting = graph.victims_of(rank)
        holders = tuple(h for h in s.ranks[rank].lock_holders if h in waiting and s.ranks[h].blocked is not None)
        if holders:
            out.append(LockCycle(rank, holders, tuple(sorted({rank, *waiting}))))
    return tuple(out)
