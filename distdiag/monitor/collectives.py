"""Match the ranks' calls by group and number: rows of collectives that all members have completed, and who arrived when."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from distdiag.diagnosis.model.snapshot import Arrival, Call, CompletedConflict, Group, Snapshot
from distdiag.diagnosis.waits.compatible import first_conflict
from distdiag.monitor.fields import shared
from distdiag.store.rows import CollectiveRow

OPEN = 4096  # collectives kept that some members have not completed
ARRIVALS_PER_S = 100  # arrival times kept of one operation, group and size: of 50 ranks, two collectives a second
_Key = tuple[str, int]  # group, seq


class Collectives:
    """Matches the ranks' calls by group and number, for collectives that all members (or their devices) have completed."""

    def __init__(self) -> None:
        self._open: dict[_Key, dict[int, tuple[Call, float]]] = {}
        self._on_device: dict[_Key, dict[int, Call | None]] = {}
        self._arrivals_due_s: dict[tuple[str, str, int | None], float] = {}
        self.arrivals: deque[Arrival] = deque(maxlen=256)
        self.completed_conflicts: list[CompletedConflict] = []

    def add(self, rank: int, closed: list[tuple[Call, float]]) -> None:
        """Add the calls that this rank has left, with the seconds it waited in each."""
        for call, waited_s in closed:
            if call.seq is None or call.failed or call.entered_s is None:
                continue
            if call.on_device:  # the host leaves the call before the collective is complete
                calls = self._on_device.setdefault((call.group, call.seq), {})
                calls[rank] = None if rank in calls else call  # operations of a coalesced group share a number
            else:
                self._open.setdefault((call.group, call.seq), {})[rank] = (call, waited_s)
        for kept in (self._open, self._on_device):
            while len(kept) > OPEN:
                del kept[next(iter(kept))]

    def rows(self, s: Snapshot, step: int | None) -> list[CollectiveRow]:
        """Return the rows of collectives that are complete since the last call; `step` is the step number of the rows."""
        return [*self._rows_on_device(s, step), *self._rows_on_host(s.groups, step)]

    def _rows_on_device(self, s: Snapshot, step: int | None) -> list[CollectiveRow]:
        """Return the collectives that all devices have completed. When a device came and went is not known, so they have no times."""
        done = {
            name: min((s.ranks[q].completed.get(name, -1) if q in s.ranks else -1 for q in group.ranks), default=-1)
            for name, group in s.groups.items()
        }
        out = []
        for key in [k for k in self._on_device if k[1] <= done.get(k[0], -1)]:
            found = self._on_device.pop(key)
            calls = {q: call for q, call in found.items() if call is not None}
            group = s.groups[key[0]]
            if not len(calls) == len(found) == len(group.ranks):
                continue
            self._compare(key, calls, group.backend)
            call = min(calls.values(), key=lambda c: c.entered_s or 0.0)
            out.append(CollectiveRow(**_of_call(call), ranks=len(calls), step=step, t_s=call.entered_s))
        return out

    def _rows_on_host(self, groups: Mapping[str, Group], step: int | None) -> list[CollectiveRow]:
        out = []
        for key in [k for k, v in self._open.items() if k[0] in groups and len(v) >= len(groups[k[0]].ranks)]:
            by_rank = self._open.pop(key)
            entered = {q: c.entered_s or 0.0 for q, (c, _) in by_rank.items()}
            times = sorted(entered.values())
            first, before, last = times[0], times[-2:][0], times[-1]
            late = max(entered, key=lambda q: entered[q])
            call, waited_s = by_rank[late]
            self._compare(key, {q: c for q, (c, _) in by_rank.items()}, groups[key[0]].backend)
            row = CollectiveRow(
                **_of_call(call),
                ranks=len(by_rank),
                step=step,
                t_s=first,
                duration_us=waited_s * 1e6 if waited_s > 0 else None,
                skew_us=(last - first) * 1e6,
                late_rank=late if last > first else None,
                arrivals_us=self._arrivals(key, call, entered, groups[key[0]].ranks),
            )
            out.append(row)
            waited = max((w for q, (_, w) in by_rank.items() if q != late), default=0.0)
            shared = min(w for _, w in by_rank.values())
            self.arrivals.append(
                Arrival(
                    *key, call.op, first, (last - first) * 1e3, late, waited * 1e3, shared * 1e3, (last - before) * 1e3
                )
            )
        return out

    def _arrivals(self, key: _Key, call: Call, entered: dict[int, float], members: tuple[int, ...]) -> str | None:
        """Return the members' arrival times as the row has them; None if the last ones of such a collective are recent."""
        first_s, kind = min(entered.values()), (key[0], call.op, call.bytes)
        if len(members) < 2 or not entered.keys() >= set(members) or first_s < self._arrivals_due_s.get(kind, 0.0):
            return None
        if len(self._arrivals_due_s) > OPEN:  # of another size each time
            self._arrivals_due_s.clear()
        self._arrivals_due_s[kind] = first_s + len(members) / ARRIVALS_PER_S
        return ",".join(str(round((entered[q] - first_s) * 1e6)) for q in members)

    def _compare(self, key: _Key, calls: dict[int, Call], backend: str) -> None:
        """Keep a collective that completed although the ranks' arguments differ: the values are wrong, and nothing raised."""
        if len(self.completed_conflicts) >= 8 or any(call.failed for call in calls.values()):
            return
        cause = first_conflict(calls.values(), backend)
        if cause is not None:  # of size, too: gloo fills a part of a larger tensor, without an error
            self.completed_conflicts.append(CompletedConflict(key[0], key[1], cause, calls))


def _of_call(call: Call) -> dict[str, Any]:
    return {"pgroup": call.group, **shared(CollectiveRow, call)}
