"""The process groups of a dumped job: their names, members and backends, as far as dumps record them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from distdiag.diagnosis.model.snapshot import Group
from distdiag.sources.dumps.content import DumpFile
from distdiag.sources.dumps.load_report import LoadReport
from distdiag.sources.dumps.scan import Scan, scan_file


class Groups:
    """The dumps of all ranks, and the groups in them."""

    def __init__(self, chosen: dict[int, list[DumpFile]], report: LoadReport) -> None:
        self.chosen, self.report = chosen, report
        self.scans = {rank: [scan_file(f) for f in files] for rank, files in chosen.items()}
        known = Counter(scan.backend for scans in self.scans.values() for scan in scans if scan.backend)
        for scans in self.scans.values():
            for scan in scans:  # a dump without entries does not name its rank
                scan.backend = scan.backend or known.most_common(1)[0][0] if known else scan.backend
        self.groups: dict[str, Group] = {}
        self.in_order: dict[str, tuple[int, ...]] = {}  # members in the group's own order
        self.world_size = 0
        self._find_groups()

    def _find_groups(self) -> None:
        """Map names to groups. One name may be several groups: on different backends or, after a split, with different members."""
        members: dict[tuple[str, str], dict[int, tuple[int, ...] | None]] = {}
        text: dict[tuple[str, str], str] = {}
        backends: dict[str, set[str]] = {}
        for rank, scans in self.scans.items():
            for scan in scans:
                for name, (desc, ranks) in _named(scan).items():
                    members.setdefault((scan.backend, name), {})[rank] = ranks
                    backends.setdefault(name, set()).update({scan.backend} - {""})
                    if desc:
                        text[scan.backend, name] = desc
        top = max((r for by in members.values() for ranks in by.values() for r in ranks or ()), default=-1)
        self.world_size = max(top, max(self.chosen, default=-1)) + 1
        for (backend, name), by_rank in members.items():
            known = {r for r in by_rank.values() if r}
            plain = name if len(backends[name]) < 2 else f"{name}/{backend}"
            desc = text.get((backend, name), "")
            for rank, ranks in by_rank.items():
                if ranks is None:
                    fitting = [k for k in known if rank in k]
                    ranks = fitting[0] if fitting else self._assumed(name, desc, by_rank)
                key = plain if len(known) < 2 or ranks not in known else f"{plain}@{sorted(known).index(ranks)}"
                if not known:
                    self.report.assumed.add(key)
                for scan in self.scans[rank]:
                    scan.assumed = self.report.assumed
                    if scan.backend == backend:
                        scan.keys[name] = key
                if key not in self.groups:
                    self.groups[key] = Group(name=key, ranks=tuple(sorted(ranks)), description=desc, backend=backend)
                    self.in_order[key] = ranks
                    if without := self._without(ranks, backend, by_rank):
                        self.report.without_group[key] = without

    def _without(self, ranks: tuple[int, ...], backend: str, by_rank: dict[int, Any]) -> tuple[int, ...]:
        """Return the group's members whose own list of groups has no group with the same members, nor its name without members."""
        found = []
        for r in ranks:
            lists = [x.file.groups for x in self.scans.get(r, ()) if x.backend == backend and any(x.file.groups)]
            named = by_rank.get(r, ()) in (None, ranks)
            if not named and lists and not any(own == ranks for x in lists for _, own in x.values()):
                found.append(r)
        return tuple(found)

    def _assumed(self, name: str, desc: str, by_rank: dict[int, Any]) -> tuple[int, ...]:
        """Return the members of a group that were not recorded (gloo): all ranks for the default group, else those that used it."""
        if desc == "default_pg" or name == "0":
            return tuple(range(self.world_size))
        note = f"members of group {desc if desc not in ('', 'undefined') else name} were not recorded: taken to be the ranks that used it"
        if note not in self.report.notes:
            self.report.notes.append(note)
        return tuple(sorted(by_rank))


def _named(scan: Scan) -> dict[str, tuple[str, tuple[int, ...] | None]]:
    """Return name, description and members of the groups in one file, as far as it records them."""
    f = scan.file
    out = {n: (d, r) for n, (d, r) in f.groups.items() if n}
    for name, t in scan.tails.items():
        out.setdefault(name, (t.description, None))
    for name, description in (e.process_group for e in scan.messages):
        out.setdefault(name, (description, None))
    first = next(iter(f.status), None)  # the default group's number
    if not f.entries and not out and first is not None:
        out[group_of(first)] = ("default_pg" if first == "0" else "", None)
    return out


def group_of(number: str) -> str:
    """Return the name of a group of which only the recorder's number is known."""
    return number if number == "0" else f"group {number}"
