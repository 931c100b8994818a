"""Process groups of this rank: who is in them, and how far their counters have come.

Sequence numbers are the flight recorder's: collectives of one group, counted from 1. gloo's counter also counts
point-to-point; those are learned from the counter's step at each of them and taken off again.
"""

from __future__ import annotations

import json
import threading
from typing import Any

from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d as dist

from distdiag.recorder import state
from distdiag.recorder.layout import GROUPS, GroupSlot, fold_ranks
from distdiag.recorder.state import guarded


class Group:
    """What is known of one process group in this process."""

    __slots__ = ("last_fr", "members", "offset", "pg", "slot", "slot_index", "to_global")

    def __init__(self, pg: Any, slot: GroupSlot, slot_index: int, members: list[int]) -> None:
        self.pg, self.slot, self.slot_index = pg, slot, slot_index
        self.members = members
        self.to_global = dict(enumerate(members))
        self.offset = 0  # of the backend's counter over the number of collectives


class Groups:
    """The groups registered in the page of one recorder."""

    def __init__(self, recorder: state.Recorder) -> None:
        self.r = recorder
        self.h = recorder.h
        self.page = recorder.page
        self.groups: dict[int, Group] = {}  # by id of the ProcessGroup object
        self.generation = 0
        self.in_monitored_barrier = False
        self._lock = threading.Lock()

    def group(self, pg: Any) -> Group | None:
        """The slot of a process group, registered when first seen."""
        g = self.groups.get(id(pg))
        if g is None or g.pg is not pg:
            g = self._register(pg)
        return g

    def _register(self, pg: Any) -> Group | None:
        with self._lock:
            n = self.h.n_groups
            if n >= GROUPS:
                self.h.dropped += 1
                return None
            world = dist._world
            ranks = world.pg_group_ranks.get(pg)
            members = sorted(ranks, key=lambda r: ranks[r]) if ranks else list(range(pg.size()))
            name = world.pg_names.get(pg) or pg.group_name
            slot = self.page.page.groups[n]
            slot.name = self.page.text(str(name))
            slot.description = self.page.text(str(getattr(pg, "group_desc", "") or ""))
            try:
                backend = str(dist.get_backend(pg))
            except (ValueError, RuntimeError, KeyError, AssertionError):
                backend = ""
            slot.backend = self.page.text(backend)
            slot.ranks = self.page.text(fold_ranks(list(members)))
            slot.generation = max(self.generation, 1)
            slot.completed = -1
            slot.flight_recorder_id = -1
            g = Group(pg, slot, n, list(members))
            self._calibrate(g)
            self.groups[id(pg)] = g
            self.h.n_groups = n + 1
            return g

    def _calibrate(self, g: Group) -> None:
        """Where the backend's counter and the flight recorder's differ already (we came late), take the difference."""
        count = g.pg._get_sequence_number_for_group()
        if count <= 0:
            return
        status = flight_recorder_status()
        known = [int(s["last_enqueued_collective"]) for s in status.values()]
        if known and count not in known:
            below = [k for k in known if 0 <= k < count]
            if len(known) == 1 and below:
                g.offset = count - below[0]

    @guarded
    def refresh_groups(self) -> None:
        """From the pulse: newest issued and completed collective of every group."""
        status = flight_recorder_status()
        for g in list(self.groups.values()):
            if g.slot.destroyed:
                continue
            try:
                issued = g.pg._get_sequence_number_for_group() - g.offset
            except RuntimeError:  # the group was shut down between two beats
                continue
            fr = self._recorder_entry(g, status, issued)
            if fr is not None:
                # the flight recorder counts collectives only; gloo's own counter is ahead inside a point-to-point call
                g.slot.enqueued = int(fr["last_enqueued_collective"])
                g.slot.completed = int(fr["last_completed_collective"])
            elif not self.in_monitored_barrier:
                g.slot.enqueued = issued
                g.slot.completed = -1

    def _recorder_entry(self, g: Group, status: dict[str, Any], issued: int) -> dict[str, Any] | None:
        """The flight recorder's counters of a group: by order of creation, and only where its own count agrees."""
        if g.slot.flight_recorder_id >= 0:
            return status.get(str(g.slot.flight_recorder_id))
        by_count = [k for k, s in status.items() if int(s["last_enqueued_collective"]) == issued]
        order = str(g.slot_index)
        if issued > 0 and order in by_count:
            g.slot.flight_recorder_id = g.slot_index
        elif issued > 0 and len(by_count) == 1:
            g.slot.flight_recorder_id = int(by_count[0])
        return status.get(str(g.slot.flight_recorder_id))


def flight_recorder_status() -> dict[str, Any]:
    """Newest enqueued / completed collective by the flight recorder's own group number; {} where there is none."""
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is None:
            continue
        try:
            status = json.loads(dump(False, False)).get("pg_status", {})
        except (RuntimeError, ValueError):
            continue
        if status:
            return status
    return {}
