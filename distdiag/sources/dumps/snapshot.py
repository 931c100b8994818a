"""Makes a snapshot of flight-recorder dumps.

Ranks are compared only by (group, collective_seq_id): record ids differ between processes, and rings wrap. Messages are compared
by p2p_seq_id if both ends count equally, else by what is in flight at either end.
"""

from __future__ import annotations

from msgspec.structs import replace

from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call, Life, RankState, Site, Snapshot
from distdiag.diagnosis.model.visits import Visits
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.wait import conflict_at
from distdiag.sources.dumps import late_ranks
from distdiag.sources.dumps import messages as dump_messages
from distdiag.sources.dumps.content import DumpFile
from distdiag.sources.dumps.entries import Entry, by_hook, user_site
from distdiag.sources.dumps.groups import Groups
from distdiag.sources.dumps.load_report import LoadReport
from distdiag.sources.dumps.scan import Scan
from distdiag.sources.dumps.times import timeout_s, times_of
from distdiag.terms.untrusted import short_text

# Up to this many entries all are read, to break ties; of more, only those from the oldest in flight on.
SITES_UP_TO = 60_000
CALLS_BEFORE = 128  # earlier calls that are read in one group
COMPARED = 32  # collectives of a group without completion that are compared: a host does not run ahead by more


class SnapshotBuilder(Groups):
    """Makes one snapshot of the dumps of all ranks."""

    def __init__(self, chosen: dict[int, list[DumpFile]], report: LoadReport) -> None:
        super().__init__(chosen, report)
        self.positions: dict[int, dict[str, tuple[int, int]]] = {}  # rank -> group -> (newest issued, newest completed)
        self.messages: dict[int, list[tuple[str, Entry, Scan]]] = {}  # rank -> (group, entry, its file)
        self.t0_ns, report.times = times_of(chosen)
        report.timeout_s = timeout_s(chosen)
        self.looks_back = False

    def snapshot(self) -> Snapshot:
        from_status: dict[int, dict[str, tuple[int, int]]] = {}
        for rank, scans in self.scans.items():
            mine = self.positions[rank] = {}
            self.messages[rank] = []
            for scan in scans:
                for name, t in scan.tails.items():
                    mine[scan.keys[name]] = (t.newest, t.newest if t.head is None else t.head - 1)
                self.messages[rank] += [(scan.keys[e.group], e, scan) for e in scan.messages]
                from_status.setdefault(rank, {}).update(self._status(scan))
        with_messages = {g for ms in self.messages.values() for g, *_ in ms}
        for rank, counters in from_status.items():
            for g, (issued, done) in counters.items():
                if g not in self.positions[rank] and g not in with_messages and issued > 0:
                    self.positions[rank][g] = (issued, max(done, 0))
        uncounted = self._uncounted()
        self.report.notes += self._not_visible(uncounted)
        floor: dict[str, int] = {}
        for where in self.positions.values():
            for g, (issued, done) in where.items():
                if done < issued:
                    floor[g] = min(floor.get(g, done + 1), done + 1)
        for g, by_all in uncounted.items():
            floor[g] = min(floor.get(g, by_all), max(1, by_all - COMPARED))
        total = sum(len(f.entries) for files in self.chosen.values() for f in files)
        self.looks_back = bool(floor) and total <= SITES_UP_TO
        self._find_stale()
        calls = {rank: self._calls(rank, floor) for rank in self.chosen}
        open_messages, issued_messages, self.report.unmet = dump_messages.match(
            self.messages, self.in_order, self.t0_ns
        )
        sites, visits = self._sites()
        self.report.late = late_ranks.find(self.scans, floor, self.positions, self.t0_ns)
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
                current_site=self._newest_site(rank),
                enqueued={g: n for g, (n, _) in positions.items()},
                completed={g: n for g, (_, n) in positions.items()},
                calls=tuple(sorted((*calls[rank], *open_messages[rank]), key=lambda c: c.entered_s or 0.0)),
                p2p_issued=issued_messages[rank],
                sites=sites.get(rank, {}),
                visits=visits[rank].known() if rank in visits else {},
            )
        t = max((times.newest_s or 0.0 for times in self.report.times.values()), default=0.0)
        found = Snapshot(t_s=t, world_size=self.world_size, ranks=ranks, groups=self.groups, source="dumps")
        return _with_open_conflicts(found, uncounted)

    def _not_visible(self, uncounted: dict[str, int]) -> list[str]:
        """Return what these dumps cannot show, one line each."""
        notes = [
            f"the backend of group {self.groups[g].description or g} reports no completion: judged by what each rank issued"
            for g in sorted(uncounted)
        ]
        of_anybody, batches = set(), set()
        for rank, mine in self.messages.items():
            for _, e, scan in mine:
                if e.profiling_name.endswith("<-?") and not e.completed and not e.retired_when_issued:
                    of_anybody.add(rank)
                if scan.backend == "nccl2" and e.state == "completed":
                    batches.add(rank)
        if of_anybody:
            notes.append(f"{rank_list(of_anybody)} may wait for a message from any rank: the sender is not recorded")
        if batches:
            notes.append(
                f"nccl2 records messages of batch_isend_irecv as completed when they are issued: whether those of "
                f"{rank_list(batches)} have arrived is not known"
            )
        return notes

    def _uncounted(self) -> dict[str, int]:
        """Return groups whose completions are not reported, with the newest collective that all members have issued.

        Their ranks are taken to have completed that one, and no later one.
        """
        keys = {
            scan.keys[name]
            for scans in self.scans.values()
            for scan in scans
            for name, tail in scan.tails.items()
            if tail.uncounted
        }
        out = {}
        for g in keys:
            here = [p[g][0] if g in p else 0 for q, p in self.positions.items() if q in self.groups[g].ranks]
            out[g] = min(here, default=0)
            for p in self.positions.values():
                if g in p:
                    p[g] = (p[g][0], min(p[g][0], out[g]))
        return out

    def _status(self, scan: Scan) -> dict[str, tuple[int, int]]:
        """Return the counters of groups without entries by name, matched by the numbers in entries, else by the order of creation."""
        f, backend = scan.file, scan.backend
        if not f.status or len(scan.tails) == len(f.status):
            return {}  # every group has entries, which are more detailed
        if backend == "gloo" or by_hook(backend):
            return {}  # they also count messages, which may differ between ranks
        names = {short_text(e.pg_id): e.group for e in f.entries if e.pg_id is not None}
        listed = [n for n in f.groups if n]
        if len(listed) == len(f.status) and all(n.isdecimal() for n in (*listed, *f.status)):
            in_order = dict(zip(sorted(f.status, key=int), sorted(listed, key=int), strict=True))
            if all(in_order.get(k) == n for k, n in names.items()):
                names = in_order
        elif not f.entries and not listed:
            names = {n: f"group {n}" if n != "0" else "0" for n in f.status}
        out = {}
        for number, counters in f.status.items():
            key = scan.keys.get(names.get(number, ""))
            if key is not None:
                out[key] = counters
        return out

    def _find_stale(self) -> None:
        """Set `stale`: ranks whose dump is older, since another rank completed a collective that they have not issued."""
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
                between = [
                    seq
                    for scan in self.scans[ahead]
                    for _, seq, e in scan.collectives({key: least + 1})
                    if seq <= done and compatible.needs_everybody(e.profiling_name)
                ]
                stale |= {q for q in behind if any(s > here[q][0] for s in between)}
        self.report.stale = tuple(sorted(stale))

    def _calls(self, rank: int, floor: dict[str, int]) -> list[Call]:
        """Return calls from the group's oldest collective in flight on, and some earlier ones if that is cheap."""
        out: dict[tuple[str, int], Call] = {}
        back = CALLS_BEFORE if self.looks_back else 0
        since = {group: seq - back for group, seq in floor.items()}
        for scan in self.scans[rank]:
            for key, seq, e in scan.collectives(since):
                call = scan.call(e, self.t0_ns)
                out[key, seq] = replace(call, op="coalesced") if (key, seq) in out else call
        return list(out.values())

    def _newest_site(self, rank: int) -> Site | None:
        last = [f.entries[-1] for f in self.chosen[rank] if f.entries]
        return user_site(max(last, key=lambda e: e.created_ns or 0).frames) if last else None

    def _sites(self) -> tuple[dict[int, dict[str, int]], dict[int, Visits]]:
        """Return the call sites of each rank so far, and when each group first used them."""
        counts: dict[int, dict[str, int]] = {}
        visits: dict[int, Visits] = {}
        for rank, scans in self.scans.items() if self.looks_back else ():
            mine, seen = counts.setdefault(rank, {}), visits.setdefault(rank, Visits())
            for scan in scans:
                for e in scan.file.entries:
                    if (site := user_site(e.frames)) is not None:
                        mine[site.key] = mine.get(site.key, 0) + 1
                        if not e.is_p2p:
                            seen.add(scan.keys[e.group], site.key, e.seq)
        return counts, visits


def _with_open_conflicts(s: Snapshot, uncounted: dict[str, int]) -> Snapshot:
    """Return the snapshot in which collectives that cannot complete, as their calls are incompatible, are open."""
    ranks = dict(s.ranks)
    for g, by_all in uncounted.items():
        for seq in range(max(1, by_all - COMPARED), by_all + 1):
            if conflict_at(s, g, seq):
                for q in s.groups[g].ranks:
                    if q in ranks and g in ranks[q].completed:
                        ranks[q] = replace(ranks[q], completed=ranks[q].completed | {g: seq - 1})
                break
    return replace(s, ranks=ranks)
