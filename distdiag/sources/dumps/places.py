"""Adds to a snapshot of flight records where the ranks are, by stacks that were taken at the same time.

Records in JSON have no stacks, and none shows where a rank is that has issued nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from distdiag.diagnosis.model.snapshot import RankState, Snapshot
from distdiag.sources.stacks.calls import Position


def with_places(snapshot: Snapshot, places: Mapping[int, Position]) -> Snapshot:
    """Return the snapshot with the user's frames of each rank, and its site at the operation that it waits in."""
    ranks = {q: _placed(r, places[q]) if q in places else r for q, r in snapshot.ranks.items()}
    return replace(snapshot, ranks=ranks)


def _placed(state: RankState, place: Position) -> RankState:
    calls = list(state.calls)
    waits_in = place.call
    if waits_in is not None:
        for i in reversed(range(len(calls))):  # the newest of that name is the one that the host waits in
            call = calls[i]
            if call.op == waits_in.op and call.completed_s is None:
                calls[i] = replace(call, site=call.site or place.site)
                break
    return replace(
        state, calls=tuple(calls), current_site=place.site or state.current_site, user_stack=place.stack,
        activity=place.activity,
    )  # fmt: skip
