"""An abort as an incident: gloo aborts a rank that receives more bytes than its own call has room for.

The ranks are dead, so no graph shows their waits; but their pages keep the call and the line in which each ended. A rank that had all
bytes of that call may have gone on to the next one: its call of the same number counts. Ranks at one line are one side; in a wrapper, those that reached it by one path. If all made one call together, each is a side: its size is what may differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from signal import SIGABRT

from msgspec.structs import replace

from distdiag.diagnosis.model.snapshot import Call, RankState, Site, Snapshot, lines_of
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.incidents import Incident, Root
from distdiag.diagnosis.waits.messages import other_end
from distdiag.diagnosis.waits.wait import Wait, call_at, last_wait
from distdiag.terms.ranks import by_value


def incident(snapshot: Snapshot, ended: Iterable[int]) -> Incident | None:
    """Return the incident of ranks that ended in calls that did not fit; None if it is not known where they ended."""
    states = [snapshot.ranks[rank] for rank in ended if snapshot.ranks[rank].current_site is not None]
    aborted = [call for state in states if state.signal == SIGABRT and (call := last_wait(state)) is not None]
    numbers = [(call.group, call.seq) for call in aborted if call.seq is not None and not call.p2p]
    calls = {state.rank: _call(state, min(numbers) if numbers else None) for state in states}
    calls = _message(snapshot, states) or calls
    by_site = by_value({rank: call.site.key if call.site is not None else "" for rank, call in calls.items()})
    sides = [frozenset(ranks) for ranks in by_site.values()]
    if len(sides) == 1 and (by_path := _by_path(states, calls)) is not None:
        sides = by_path
    elif len(sides) == 1:
        known = {(call.group, call.seq, call.op) for call in calls.values()}
        messages = all(call.p2p for call in calls.values())  # only sizes that do not fit make gloo abort
        if len(states) < 2 or not (messages or (len(known) == 1 and None not in next(iter(known)))):
            return None
        sides = [frozenset((rank,)) for rank in calls]
    if len(sides) < 2:
        return None
    numbered = next((call for call in calls.values() if call.seq is not None), None)
    wait = Wait((numbered.group if numbered else "", numbered.seq if numbered else None))
    wait.conflict, wait.calls, wait.died = "shape", calls, tuple(calls)
    wait.sides = tuple(sorted(sides, key=lambda side: (-len(side), min(side))))
    return Incident(Root.ABORT, frozenset(calls), (wait,), frozenset(calls))


def _message(snapshot: Snapshot, states: Sequence[RankState]) -> dict[int, Call] | None:
    """Return both ends of the first message that an aborted rank received in other bytes than were sent; its sender has gone on."""
    for state in states:
        call = last_wait(state)
        peer = call.peer if call is not None and state.signal == SIGABRT and call.op.endswith("recv") else None
        if call is None or peer is None or call.nth is None:
            continue
        sent = other_end(snapshot.ranks.get(peer), state.rank, call, call.nth)
        if sent is not None and sent.bytes != call.bytes and sent.site is not None and call.site is not None:
            return {peer: sent, state.rank: call}
    return None


def _by_path(states: Sequence[RankState], calls: dict[int, Call]) -> list[frozenset[int]] | None:
    """Return the sides by the callers of one line, in a wrapper for all calls; None unless their sizes are as different.

    The callers of a killed rank are from its last sample, and alone prove nothing.
    """
    paths = set(map(frozenset, by_value({state.rank: state.user_stack for state in states}).values()))
    of_call = {q: (compatible.op_name(c.op), compatible.elements(c), c.bytes) for q, c in calls.items()}
    sizes = set(map(frozenset, by_value(of_call).values()))
    return list(paths) if paths == sizes and 1 < len(paths) < len(states) else None


def _call(state: RankState, number: tuple[str, int] | None) -> Call:
    """Return the call in which a rank ended, at the line where it was; its call of that number, if it had gone on from there."""
    call = last_wait(state) or Call(op="", group="")
    if number is not None and call.group == number[0] and call.seq is not None and call.seq > number[1]:
        earlier = call_at(state, *number) or _by_ddp(state, number)
        if earlier is not None and earlier.site is not None:
            return replace(earlier, site=replace(earlier.site, caller=None))
    return replace(call, site=state.current_site)


def _by_ddp(state: RankState, number: tuple[str, int]) -> Call | None:
    """Return the all_reduce of DDP that had this number, as no line of Python made it: in its last line, in the order of a step."""
    own = {call.site.key for call in state.calls if call.site is not None}
    places = [lines for key in state.sites if key not in own and len(lines := lines_of(key)) == 1]
    if not places or not any(model.group == number[0] and model.synced_backwards for model in state.models):
        return None
    (file, line) = places[-1][0]
    seen = (x for x in state.phase_stacks.get("backward", ()) if (x.file, x.line) == (file, line))
    return Call(op="", group=number[0], seq=number[1], site=next(seen, Site(file, line)))
