"""An abort as an incident: gloo aborts a rank that receives more bytes than its own call has room for.

The ranks are dead, so no graph shows their waits; but their pages keep the call and the line in which each ended. Ranks at one line
are one side; in a wrapper, those that reached it by one path. If all made one call together, each is a side: its size is what may differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from distdiag.diagnosis.model.snapshot import Call, RankState, Snapshot
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.incidents import Incident, Root
from distdiag.diagnosis.waits.wait import Wait, last_wait
from distdiag.terms.ranks import by_value


def incident(snapshot: Snapshot, ended: Iterable[int]) -> Incident | None:
    """Return the incident of ranks that ended in calls that did not fit; None if it is not known where they ended."""
    states = [snapshot.ranks[rank] for rank in ended if snapshot.ranks[rank].current_site is not None]
    calls = {state.rank: _call(state) for state in states}
    by_site = by_value({state.rank: state.current_site.key if state.current_site else "" for state in states})
    sides = [frozenset(ranks) for ranks in by_site.values()]
    if len(sides) == 1 and (by_path := _by_path(states, calls)) is not None:
        sides = by_path
    elif len(sides) == 1:
        known = {(call.group, call.seq, call.op) for call in calls.values()}
        if len(states) < 2 or len(known) != 1 or next(iter(known))[1] is None:
            return None
        sides = [frozenset((rank,)) for rank in calls]
    if len(sides) < 2:
        return None
    numbered = next((call for call in calls.values() if call.seq is not None), None)
    wait = Wait((numbered.group if numbered else "", numbered.seq if numbered else None))
    wait.conflict, wait.calls, wait.died = "shape", calls, tuple(calls)
    wait.sides = tuple(sorted(sides, key=lambda side: (-len(side), min(side))))
    return Incident(Root.ABORT, frozenset(calls), (wait,), frozenset(calls))


def _by_path(states: Sequence[RankState], calls: dict[int, Call]) -> list[frozenset[int]] | None:
    """Return the sides by the callers of one line, in a wrapper for all calls; None unless their sizes are as different.

    The callers of a killed rank are from its last sample, and alone prove nothing.
    """
    paths = set(map(frozenset, by_value({state.rank: state.user_stack for state in states}).values()))
    of_call = {q: (compatible.op_name(c.op), compatible.elements(c), c.bytes) for q, c in calls.items()}
    sizes = set(map(frozenset, by_value(of_call).values()))
    return list(paths) if paths == sizes and 1 < len(paths) < len(states) else None


def _call(state: RankState) -> Call:
    """Return the call in which a rank ended, at the line where it was."""
    call = last_wait(state) or Call(op="", group="")
    return replace(call, site=state.current_site)
