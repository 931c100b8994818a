"""Makes a snapshot of flight-recorder dumps.

Ranks are compared by (group, collective_seq_id) only: record ids are per process, and rings wrap. Messages are compared
by p2p_seq_id if both ends count equally, else by what is in flight on either side.
"""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from distdiag.diagnosis.dumps import late_ranks
from distdiag.diagnosis.dumps import messages as dump_messages
from distdiag.diagnosis.dumps.choice import choose, drop_earlier_runs, newest_ns
from distdiag.diagnosis.dumps.content import DumpFile
from distdiag.diagnosis.dumps.entries import Scan, backend_of, call_of, ns, scan_file, timeout_ms, user_site
from distdiag.diagnosis.dumps.files import read_all
from distdiag.diagnosis.dumps.guard import Announce
from distdiag.diagnosis.dumps.late_ranks import LateRanks
from distdiag.diagnosis.dumps.naming import name_ranks
from distdiag.diagnosis.model.snapshot import Call, Group, Life, RankState, Site, Snapshot
from distdiag.diagnosis.model.visits import Visits
from distdiag.diagnosis.waits import compatible
from distdiag.terms.untrusted import short_text

GAPS_SEEN = 3  # a rank that has paused for this long so often may do so again
GAP_ENTRIES = 200  # of the newest
SITES_UP_TO = (
    60_000  # up to this many entries, all are read, to break ties; beyond, only those from the oldest in flight on
)
ANALYSIS, ENTRY_BYTES = "", 1000  # of making the snapshot, after all files are read: its limits grow with the entries
CALLS_BEFORE = 128  # in one group


@dataclass
class LoadReport:
    """Which files were read, and which were not.

    Attributes:
        files: By rank, the files that its state comes from.
        bad: (path, reason) of files that should have been dumps.
        missing: Ranks of the job that left no file at all.
        unreadable: Ranks whose only file is in `bad`.
        others: Other files, which were not read.
        notes: Further remarks, one line each.
    """

    files: dict[int, tuple[str, ...]] = field(default_factory=dict)
    bad: list[tuple[str, str]] = field(default_factory=list)
    missing: tuple[int, ...] = ()
    unreadable: tuple[int, ...] = ()
    others: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stale: tuple[int, ...] = ()  # ranks whose dump is older than the others': they went on after it
    modified_s: dict[int, float] = field(default_factory=dict)  # when each rank's file was written, on the run's clock
    newest_s: dict[int, float] = field(default_factory=dict)  # its newest entry
    oldest_s: dict[int, float] = field(default_factory=dict)
    # by group: members whose own list of groups lacks it: they never created it
    without_group: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unmet: dict[int, list[Call]] = field(
        default_factory=dict
    )  # messages in flight whose peer has already issued later ones
    usual_gap_s: dict[int, float] = field(default_factory=dict)  # how long a rank has paused repeatedly
    timeout_s: float | None = None  # of the collectives; None if groups differ
    # of ranks whose dump has completed operations that the watchdog, which runs ten times a second, had not retired yet
    moved_s: dict[int, float] = field(default_factory=dict)
    # when a rank's dump found operations begun and not completed: a lower bound of when it was taken
    asked_s: dict[int, float] = field(default_factory=dict)
    late: LateRanks | None = None


def load(
    paths: str | Path | Iterable[str | Path],
    announce: Announce = lambda _step, _bytes: None,
    refused: Mapping[str, str] | None = None,
) -> tuple[Snapshot, LoadReport]:
    """Return all dumps in files and directories as one snapshot, and what could not be read.

    In this process, without limits: `verdict.diagnose_dumps` calls it in a child.

    Args:
        announce: Called before each file and before the snapshot is made, with the bytes that it is made of.
        refused: Files not to be read, with the reason.
    """
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    collecting = gc.isenabled()
    gc.disable()  # millions of small containers live until the snapshot is made: garbage collection would find nothing
    try:
        return _load([Path(p) for p in given], announce, refused)
    finally:
        if collecting:
            gc.enable()


def _load(paths: list[Path], announce: Announce, refused: Mapping[str, str] | None) -> tuple[Snapshot, LoadReport]:
    read, bad, others = read_all(paths, announce, refused)
    announce(ANALYSIS, sum(len(f.entries) for f in read) * ENTRY_BYTES)
    report = LoadReport(bad=bad, others=others)
    by_rank: dict[int, list[DumpFile]] = {}
    for f in read:
        if f.rank is None:
            report.bad.append((str(f.path), "of which rank it is cannot be told: no number in its name or content"))
        else:
            by_rank.setdefault(f.rank, []).append(f)
    age: dict[Path, int] = {}  # a dump without entries counts as new as the others
    for f in read:
        age[f.path.parent] = max(age.get(f.path.parent, 0), newest_ns(f))
    drop_earlier_runs(by_rank, age, report.notes)
    chosen = {r: choose(r, files, age, report.notes) for r, files in sorted(by_rank.items())}
    report.files = {r: tuple(str(f.path) for f in files) for r, files in chosen.items()}
    snapshot = _Builder(chosen, report).snapshot()
    known = [f for files in chosen.values() for f in files]
    failed = {r for path, _ in report.bad if (r := _rank_of_bad(Path(path), known)) is not None}
    absent = [r for r, st in snapshot.ranks.items() if st.life == Life.MISSING]
    report.unreadable = tuple(r for r in absent if r in failed)
    report.missing = tuple(r for r in absent if r not in failed)
    damaged = sum(f.damaged for f in known)
    if damaged:
        report.notes.append(f"{damaged:,} entries without group, number or name were left out")
    return snapshot, report


def _rank_of_bad(path: Path, known: Sequence[DumpFile]) -> int | None:
    """Return the rank of a damaged file, by the names of the other files."""
    probe = DumpFile(path, None, "", {}, {}, [])
    beside = [DumpFile(f.path, None, "", f.groups, {}, []) for f in known if f.path.parent == path.parent]
    name_ranks([probe, *beside])
    return probe.rank


def _gaps_s(f: DumpFile) -> list[float]:
    """Return the times between consecutive operations, of a file's newest."""
    times = [t for e in f.entries[-GAP_ENTRIES:] if (t := ns(e)) is not None]
    return [(b - a) / 1e9 for a, b in itertools.pairwise(times)]


def _moved_ns(f: DumpFile) -> int:
    """Return when a dump found operations complete that the watchdog (ten times a second) had not seen; 0 if none.

    That is when the dump was taken, and the rank had just made progress. Unknown with gloo's recorder, and with one that does
    not retire entries.
    """
    if backend_of(f) == "gloo" or not any(e["retired"] for e in f.entries):
        return 0
    found = (
        ns(e, "time_discovered_completed_ns")
        for e in f.entries[-GAP_ENTRIES:]
        if e["state"] == "completed" and not e["retired"]
    )
    return max((t for t in found if t is not None), default=0)


def _asked_ns(f: DumpFile) -> int:
    """Return when a dump found operations in flight that the device had begun; 0 if none. The recorder checks at the dump."""
    begun = (ns(e, "time_discovered_started_ns") for e in f.entries[-GAP_ENTRIES:] if e["state"] == "started")
    return max((t for t in begun if t is not None), default=0)


class _Builder:
    """Makes one snapshot of the dumps of all ranks."""

    def __init__(self, chosen: dict[int, list[DumpFile]], report: LoadReport) -> None:
        self.chosen, self.report = chosen, report
        self.scans = {rank: [scan_file(f) for f in files] for rank, files in chosen.items()}
        known = Counter(scan.backend for scans in self.scans.values() for scan in scans if scan.backend)
        for scans in self.scans.values():
            for scan in scans:  # a dump without entries does not name its rank
                scan.backend = scan.backend or known.most_common(1)[0][0] if known else scan.backend
        self.groups: dict[str, Group] = {}
        self.in_order: dict[str, tuple[int, ...]] = {}  # their members as the group numbers them
        self.positions: dict[int, dict[str, tuple[int, int]]] = {}  # rank -> group -> (newest issued, newest completed)
        self.messages: dict[int, list[tuple[str, dict[str, Any], Scan]]] = {}  # rank -> (group, entry, its file)
        self.keys: dict[tuple[int, str, str], str] = {}  # (rank, backend, name) -> key of the group
        self.t0_ns = 0
        self.world_size = 0
        self.looks_back = False

    def snapshot(self) -> Snapshot:
        self._find_groups()
        from_status: dict[int, dict[str, tuple[int, int]]] = {}
        for rank, scans in self.scans.items():
            mine = self.positions[rank] = {}
            self.messages[rank] = []
            for scan in scans:
                for name, t in scan.tails.items():
                    key = self.keys[(rank, scan.backend, name)]
                    mine[key] = (t.newest, t.newest if t.head is None else t.head - 1)
                for e in scan.messages:
                    self.messages[rank].append((self.keys[(rank, scan.backend, str(e["process_group"][0]))], e, scan))
                from_status.setdefault(rank, {}).update(self._status(rank, scan))
        with_messages = {g for ms in self.messages.values() for g, *_ in ms}
        for rank, counters in from_status.items():
            for g, (issued, done) in counters.items():
                if g not in self.positions[rank] and g not in with_messages and issued > 0:
                    self.positions[rank][g] = (issued, max(done, 0))
        floor: dict[str, int] = {}
        for where in self.positions.values():
            for g, (issued, done) in where.items():
                if done < issued:
                    floor[g] = min(floor.get(g, done + 1), done + 1)
        total = sum(len(f.entries) for files in self.chosen.values() for f in files)
        self.looks_back = bool(floor) and total <= SITES_UP_TO
        self._clock()
        self._find_stale()
        calls = {rank: self._calls(rank, floor) for rank in self.chosen}
        open_messages, issued_messages, self.report.unmet = dump_messages.match(
            self.messages, self.in_order, self.t0_ns
        )
        sites, visits = self._sites()
        self.report.late = late_ranks.find(self.scans, self.keys, floor, self.positions, self.t0_ns)
        ranks = {}
        for rank in range(self.world_size):
            if rank not in self.chosen:
                ranks[rank] = RankState(rank=rank, life=Life.MISSING, activity="unknown")
                continue
            positions = self.positions[rank]
            ranks[rank] = RankState(
                rank=rank,
                life=Life.RUNNING,
                activity="unknown",
                place=self._newest_site(rank),
                enqueued={g: n for g, (n, _) in positions.items()},
                completed={g: n for g, (_, n) in positions.items()},
                calls=tuple(sorted((*calls[rank], *open_messages[rank]), key=lambda c: c.entered_s or 0.0)),
                p2p_issued=issued_messages[rank],
                sites=sites.get(rank, {}),
                visits=visits[rank].known() if rank in visits else {},
                visits_whole=rank in visits and visits[rank].whole and self._from_the_start(rank),
            )
        t = max((*self.report.newest_s.values(), 0.0))
        return Snapshot(t_s=t, world_size=self.world_size, ranks=ranks, groups=self.groups, source="dumps")

    # -- groups --------------------------------------------------------------------------------------------------

    def _find_groups(self) -> None:
        """Map names to groups. One name may be several groups: by backend or, after a split, by members."""
        members: dict[tuple[str, str], dict[int, tuple[int, ...] | None]] = {}
        text: dict[tuple[str, str], str] = {}
        backends: dict[str, set[str]] = {}
        for rank, scans in self.scans.items():
            for scan in scans:
                backend = scan.backend
                for name, (desc, ranks) in self._named(scan).items():
                    backends.setdefault(name, set()).add(backend)
                    members.setdefault((backend, name), {})[rank] = ranks
                    if desc:
                        text[(backend, name)] = desc
        top = max((r for by in members.values() for ranks in by.values() for r in ranks or ()), default=-1)
        self.world_size = max(top, max(self.chosen, default=-1)) + 1
        for (backend, name), by_rank in members.items():
            known = {r for r in by_rank.values() if r}
            plain = name if len({b for b in backends[name] if b}) < 2 else f"{name}/{backend}"
            desc = text.get((backend, name), "")
            for rank, ranks in by_rank.items():
                if ranks is None:
                    fitting = [k for k in known if rank in k]
                    ranks = fitting[0] if fitting else self._assumed(name, desc, by_rank)
                key = plain if len(known) < 2 or ranks not in known else f"{plain}@{ranks[0]}"
                self.keys[(rank, backend, name)] = key
                if key not in self.groups:
                    self.groups[key] = Group(name=key, ranks=tuple(sorted(ranks)), description=desc, backend=backend)
                    self.in_order[key] = ranks
                    if without := self._without(ranks, backend, by_rank):
                        self.report.without_group[key] = without

    def _without(self, ranks: tuple[int, ...], backend: str, by_rank: dict[int, Any]) -> tuple[int, ...]:
        """Return the members of a group whose own list has neither its name nor a group with the same members."""
        found = []
        for r in ranks:
            lists = [x.file.groups for x in self.scans.get(r, ()) if x.backend == backend and any(x.file.groups)]
            if r not in by_rank and lists and not any(own == ranks for x in lists for _, own in x.values()):
                found.append(r)
        return tuple(found)

    @staticmethod
    def _named(scan: Scan) -> dict[str, tuple[str, tuple[int, ...] | None]]:
        """Return name, description and members of the groups of one file, as far as it has them."""
        f = scan.file
        out = {n: (d, r) for n, (d, r) in f.groups.items() if n}
        for name, t in scan.tails.items():
            if name not in out:
                out[name] = (str(t.description), None)
        for e in scan.messages:
            name, desc = e["process_group"]
            if str(name) not in out:
                out[str(name)] = (str(desc), None)
        for number in f.status:
            if not f.entries and not out:
                out[f"group {number}" if number != "0" else "0"] = ("default_pg" if number == "0" else "", None)
        return out

    def _assumed(self, name: str, desc: str, by_rank: dict[int, Any]) -> tuple[int, ...]:
        """Return members that were not recorded (gloo): all ranks for the default group, else the ranks that used it."""
        if desc == "default_pg" or name == "0":
            return tuple(range(self.world_size))
        note = f"members of group {desc if desc not in ('', 'undefined') else name} were not recorded: taken to be the ranks that used it"
        if note not in self.report.notes:
            self.report.notes.append(note)
        return tuple(sorted(by_rank))

    # -- one rank ------------------------------------------------------------------------------------------------

    def _status(self, rank: int, scan: Scan) -> dict[str, tuple[int, int]]:
        """Return the counters of groups without entries by name, matched by the numbers in entries, else by order of creation."""
        f, backend = scan.file, scan.backend
        if not f.status or len(scan.tails) == len(f.status):
            return {}  # every group has entries, which have more detail
        if backend == "gloo":
            return {}  # it also counts messages, which leave no entries and need not be as many on all ranks
        names = {short_text(e["pg_id"]): e["process_group"][0] for e in f.entries if "pg_id" in e}
        listed = [n for n in f.groups if n]
        if len(listed) == len(f.status) and all(n.isdecimal() for n in (*listed, *f.status)):
            in_order = dict(zip(sorted(f.status, key=int), sorted(listed, key=int), strict=True))
            if all(in_order.get(k) == n for k, n in names.items()):
                names = in_order
        elif not f.entries and not listed:
            names = {n: f"group {n}" if n != "0" else "0" for n in f.status}
        out = {}
        for number, counters in f.status.items():
            key = self.keys.get((rank, backend, names.get(number, "")))
            if key is not None:
                out[key] = counters
        return out

    def _clock(self) -> None:
        first: list[int] = []
        spans: dict[int, tuple[int, int]] = {}
        for rank, files in self.chosen.items():
            times = [t for f in files if f.entries for e in (f.entries[0], f.entries[-1]) if (t := ns(e)) is not None]
            if times:
                spans[rank] = min(times), max(times)
                first.append(min(times))
        self.t0_ns = min(first, default=0)
        limits = {timeout_ms(f.entries[-1]) for files in self.chosen.values() for f in files if f.entries}
        if len(limits) == 1 and (limit := limits.pop()) is not None:
            self.report.timeout_s = limit / 1e3
        for rank, files in self.chosen.items():
            if (moved := max((_moved_ns(f) for f in files), default=0)) > 0:
                self.report.moved_s[rank] = (moved - self.t0_ns) / 1e9
            if (asked := max((_asked_ns(f) for f in files), default=0)) > 0:
                self.report.asked_s[rank] = (asked - self.t0_ns) / 1e9
            gaps = [g for f in files for g in _gaps_s(f)]
            if len(gaps) >= GAPS_SEEN:
                self.report.usual_gap_s[rank] = sorted(gaps)[-GAPS_SEEN]
        for rank, (low, high) in spans.items():
            self.report.oldest_s[rank] = (low - self.t0_ns) / 1e9
            self.report.newest_s[rank] = (high - self.t0_ns) / 1e9
            self.report.modified_s[rank] = (max(f.modified_ns for f in self.chosen[rank]) - self.t0_ns) / 1e9

    def _find_stale(self) -> None:
        """Return ranks whose dump is older: another rank completed a collective that such a rank has not issued."""
        stale: set[int] = set()
        for key, group in self.groups.items():
            here = {q: self.positions[q][key] for q in group.ranks if q in self.positions and key in self.positions[q]}
            if not here:
                continue
            ahead = max(here, key=lambda q: here[q][1])
            done = here[ahead][1]
            behind = [q for q, (issued, _) in here.items() if issued < done]
            if behind:
                least = min(here[q][0] for q in behind)
                between = {
                    e["collective_seq_id"]
                    for f in self.chosen[ahead]
                    for e in f.entries
                    if not e["is_p2p"]
                    and least < e["collective_seq_id"] <= done
                    and self.keys.get((ahead, backend_of(f), e["process_group"][0])) == key
                    and compatible.needs_everybody(e["profiling_name"])
                }
                stale |= {q for q in behind if any(s > here[q][0] for s in between)}
        self.report.stale = tuple(sorted(stale))

    def _calls(self, rank: int, floor: dict[str, int]) -> list[Call]:
        """Return calls from the oldest collective in flight in the group on, and some earlier ones if that is cheap."""
        out: dict[tuple[str, int], Call] = {}
        for scan in self.scans[rank]:
            backend = scan.backend
            back = CALLS_BEFORE if self.looks_back else 0
            low = {n: floor[k] - back for n in scan.tails if (k := self.keys[(rank, backend, n)]) in floor}
            if not low:
                continue
            for e in scan.file.entries:
                least = low.get(e["process_group"][0])
                if least is None or e["is_p2p"] or e["collective_seq_id"] < least:
                    continue
                key = self.keys[(rank, backend, e["process_group"][0])]
                call = call_of(key, e, scan, self.t0_ns)
                if (key, e["collective_seq_id"]) in out:
                    call = replace(call, op="coalesced")
                out[(key, e["collective_seq_id"])] = call
        return list(out.values())

    def _from_the_start(self, rank: int) -> bool:
        """True if a rank's ring still holds all entries, and its dump left none out."""
        return all(
            (f.entries[0].get("record_id"), f.entries[-1].get("record_id")) == (0, len(f.entries) - 1)
            for f in self.chosen[rank]
            if f.entries
        )

    def _newest_site(self, rank: int) -> Site | None:
        last = [f.entries[-1] for f in self.chosen[rank] if f.entries]
        return user_site(max(last, key=lambda e: ns(e) or 0).get("frames")) if last else None

    def _sites(self) -> tuple[dict[int, dict[str, int]], dict[int, Visits]]:
        """Return the call sites of each rank so far, and when each group first used them."""
        counts: dict[int, dict[str, int]] = {}
        visits: dict[int, Visits] = {}
        for rank, scans in self.scans.items() if self.looks_back else ():
            mine, seen = counts.setdefault(rank, {}), visits.setdefault(rank, Visits())
            for scan in scans:
                for e in scan.file.entries:
                    site = user_site(e.get("frames"))
                    if site is None:
                        continue
                    mine[site.key] = mine.get(site.key, 0) + 1
                    if not e["is_p2p"]:
                        key = self.keys[(rank, scan.backend, e["process_group"][0])]
                        seen.add(key, site.key, e["collective_seq_id"])
        return counts, visits
