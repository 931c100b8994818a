"""Makes a snapshot of flight-recorder dumps.

Ranks are compared only by (group, collective_seq_id): record ids differ between processes, and rings wrap. Messages are compared
by p2p_seq_id if both ends count equally, else by what is in flight at either end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call, CompletedConflict, Group, Life, RankState, Snapshot
from distdiag.diagnosis.model.visits import Visits
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.wait import conflict_at
from distdiag.sources.dumps.content import DumpFile
from distdiag.sources.dumps.entries import Entry, by_hook, helpers_of, time_ns, user_site, user_stack
from distdiag.sources.dumps.load_report import LoadReport
from distdiag.sources.dumps.messages import match
from distdiag.sources.dumps.scan import Scan, scan_file
from distdiag.sources.dumps.times import BEFORE, GAP_ENTRIES, GAPS_SEEN, late_ranks, times_of
from distdiag.terms.operations import synchronizes
from distdiag.terms.untrusted import short_text

# Up to this many entries all are read, to break ties; of more, only those from the oldest in flight on.
SITES_UP_TO = 60_000
CALLS_BEFORE = 128  # earlier calls that are read in one group
COMPARED = 32  # collectives of a group without completion that are compared: a host does not run ahead by more


class SnapshotBuilder:
    """Makes one snapshot of the dumps of all ranks, and finds the groups in them."""

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
        self.messages: dict[int, list[tuple[str, Entry, Scan]]] = {  # rank -> (group, entry, its file)
            rank: [(scan.keys[e.group], e, scan) for scan in scans for e in scan.messages]
            for rank, scans in self.scans.items()
        }
        self.positions = self._positions()  # rank -> group -> (newest issued, newest completed)
        self.t0_ns, report.times = times_of(chosen)
        scans = [scan for of_rank in self.scans.values() for scan in of_rank]
        limits = ((scan.keys[e.group], time_ns(e.timeout_ms)) for scan in scans for e in scan.file.entries)
        report.timeouts_s = {key: limit / 1e3 for key, limit in limits if limit is not None}  # by the newest entries
        report.batched = frozenset(scan.keys[name] for scan in scans for name, _ in scan.batches)

    def snapshot(self) -> Snapshot:
        uncounted = self._uncounted()
        self.report.not_visible = tuple(self._not_visible(uncounted))
        self.report.stale = self._stale()
        floor: dict[str, int] = {}
        for where in self.positions.values():
            for g, (issued, done) in where.items():
                if done < issued:
                    floor[g] = min(floor.get(g, done + 1), done + 1)
        for g, by_all in uncounted.items():
            floor[g] = min(floor.get(g, by_all), max(1, by_all - COMPARED))
        entries = [e for files in self.chosen.values() for f in files for e in f.entries]
        few = len(entries) <= SITES_UP_TO
        if few:
            helpers = helpers_of(e.frames for e in entries)
            for scan in (scan for scans in self.scans.values() for scan in scans):
                scan.helpers = helpers
        looks_back = bool(floor) and few
        before = CALLS_BEFORE if looks_back else BEFORE
        since = {group: seq - before for group, seq in floor.items()}
        matched = match(self.messages, self.in_order, self.t0_ns, few)
        self.report.unmet, self.report.unequal = matched.unmet, matched.unequal
        ranks = {}
        for rank in range(self.world_size):
            if rank not in self.chosen:
                ranks[rank] = RankState(rank=rank, life=Life.MISSING, activity="unknown")
                continue
            positions, calls = self.positions[rank], (*self._calls(rank, since), *matched.calls[rank])
            sites, visits = self._sites(rank) if looks_back else ({}, Visits())
            newest = self._newest(rank)
            ranks[rank] = RankState(
                rank=rank,
                life=Life.RUNNING,
                activity="unknown",
                current_site=user_site(newest[0].frames, newest[1].helpers) if newest else None,
                enqueued={g: n for g, (n, _) in positions.items()},
                completed={g: n for g, (_, n) in positions.items()},
                calls=tuple(sorted(calls, key=lambda c: c.entered_s or 0.0)),
                p2p_issued=matched.issued[rank],
                sites=sites,
                visits=visits.known(),
            )
        t = max((times.newest_s or 0.0 for times in self.report.times.values()), default=0.0)
        found = Snapshot(
            t_s=t, world_size=self.world_size, ranks=ranks, groups=self.groups, source="dumps",
            completed_conflicts=self._completed_conflicts(),
        )  # fmt: skip
        self.report.late = late_ranks(found, self.report.timeouts_s)
        return _with_open_conflicts(found, uncounted)

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

    def _positions(self) -> dict[int, dict[str, tuple[int, int]]]:
        """Return each rank's newest issued and newest completed collective of each group: by its entries, else by its counters."""
        with_messages = {g for ms in self.messages.values() for g, *_ in ms}
        out: dict[int, dict[str, tuple[int, int]]] = {}
        for rank, scans in self.scans.items():
            tails = ((scan.keys[name], tail) for scan in scans for name, tail in scan.tails.items())
            mine = {key: (t.newest, t.newest if t.head is None else t.head - 1) for key, t in tails}
            out[rank] = mine
            for scan in scans:
                for g, (issued, done) in _status(scan).items():
                    if g not in mine and g not in with_messages and issued > 0:
                        mine[g] = (issued, max(done, 0))
        return out

    def _not_visible(self, uncounted: dict[str, int]) -> Iterator[str]:
        """Yield what these dumps cannot show, one line each."""
        for g in sorted(uncounted):
            label = self.groups[g].description or g
            yield f"the backend of group {label} reports no completion: judged by what each rank issued"
        of_anybody, batches = set(), set()
        for rank, mine in self.messages.items():
            for _, e, scan in mine:
                if e.profiling_name.endswith("<-?") and not e.completed and not e.retired_when_issued:
                    of_anybody.add(rank)
                if scan.backend == "nccl2" and e.state == "completed":
                    batches.add(rank)
        if of_anybody:
            yield f"{rank_list(of_anybody)} may wait for a message from any rank: the sender is not recorded"
        if batches:
            yield (
                "nccl2 records messages of batch_isend_irecv as completed when they are issued: whether those of "
                f"{rank_list(batches)} have arrived is not known"
            )

    def _uncounted(self) -> dict[str, int]:
        """Return groups whose completions are not reported, with the newest collective that all members have issued.

        Their ranks are taken to have completed that one, and no later one.
        """
        scans = [scan for of_rank in self.scans.values() for scan in of_rank]
        out = {}
        for g in {scan.keys[name] for scan in scans for name, tail in scan.tails.items() if tail.uncounted}:
            here = [p[g][0] if g in p else 0 for q, p in self.positions.items() if q in self.groups[g].ranks]
            out[g] = min(here, default=0)
            for p in self.positions.values():
                if g in p:
                    p[g] = (p[g][0], min(p[g][0], out[g]))
        return out

    def _stale(self) -> tuple[int, ...]:
        """Return ranks whose dump is older, since another rank completed a collective that they have not issued."""
        stale: set[int] = set()
        for key, group in self.groups.items():
            here = {q: self.positions[q][key] for q in group.ranks if q in self.positions and key in self.positions[q]}
            if not here:
                continue
            ahead = max(here, key=lambda q: here[q][1])
            done = here[ahead][1]
            behind = [q for q, (issued, _) in here.items() if issued < done]
            if behind:
                since = {key: min(here[q][0] for q in behind) + 1}
                later = [(seq, e) for scan in self.scans[ahead] for _, seq, e in scan.collectives(since)]
                newest = max((seq for seq, e in later if seq <= done and synchronizes(e.profiling_name)), default=0)
                stale |= {q for q in behind if here[q][0] < newest}
        return tuple(sorted(stale))

    def _calls(self, rank: int, since: dict[str, int]) -> list[Call]:
        """Return the calls of collectives from these numbers on."""
        out: dict[tuple[str, int], Call] = {}
        paths = self.report.paths[rank] = {}
        for scan in self.scans[rank]:
            for key, seq, e in scan.collectives(since):
                paths[key, seq] = user_stack(e.frames)
                call = scan.call(e, self.t0_ns)
                out[key, seq] = replace(call, op="coalesced") if (key, seq) in out else call
        return list(out.values())

    def _completed_conflicts(self) -> tuple[CompletedConflict, ...]:
        """Return the collectives that all members completed with different arguments, oldest first.

        Only where all calls are recorded. In a group in which operations differ, too, the ranks' numbers seem not to belong together.
        """
        first: dict[tuple[str, int], Entry] = {}
        odd: dict[tuple[str, int], dict[int, list[Call]]] = {}
        files = [(rank, scan) for rank, scans in self.scans.items() for scan in scans]
        for collect in (False, True):
            for rank, scan in files:
                for e in scan.file.entries:
                    if e.is_p2p or e.ends_batch or not e.completed:
                        continue
                    key = scan.keys[e.group], e.seq
                    if collect and key in odd:
                        odd[key].setdefault(rank, []).append(scan.call(e, self.t0_ns))
                    elif not collect and e.arguments != first.setdefault(key, e).arguments:
                        odd[key] = {}
        found, apart = [], set()
        for (group, seq), by_rank in odd.items():
            calls = {rank: made[0] for rank, made in sorted(by_rank.items()) if len(made) == 1}
            if calls.keys() == set(self.groups[group].ranks):
                cause = compatible.first_conflict(calls.values(), self.groups[group].backend)
                apart |= {group} if cause == "op" else set()
                found += [CompletedConflict(group, seq, cause, calls)] if cause else []
        found.sort(key=lambda c: min(call.entered_s or 0.0 for call in c.calls.values()))
        return tuple(c for c in found if c.group not in apart)

    def _newest(self, rank: int) -> tuple[Entry, Scan] | None:
        """Return the newest entry of a rank, with its file, and note its call, its stack, and how often the rank made it."""
        ends = [(f.entries[-1], scan) for scan in self.scans[rank] if (f := scan.file).entries]
        if not ends:
            return None
        newest, scan = max(ends, key=lambda x: x[0].created_ns or 0)
        if not newest.is_p2p:
            self.report.newest[rank] = scan.call(newest, self.t0_ns)
        self.report.stacks[rank] = user_stack(newest.frames)
        times = [
            t for e in scan.file.entries[-GAP_ENTRIES:]
            if (e.group, e.profiling_name) == (newest.group, newest.profiling_name) and (t := e.created_ns) is not None
        ]  # fmt: skip
        if len(times) > GAPS_SEEN and times[-1] > times[0]:
            self.report.rates[rank] = (len(times) - 1) * 1e9 / (times[-1] - times[0])
        return newest, scan

    def _sites(self, rank: int) -> tuple[dict[str, int], Visits]:
        """Return the call sites of a rank so far, and when each group first used them."""
        counts: dict[str, int] = {}
        visits = Visits()
        for scan in self.scans[rank]:
            for e in scan.file.entries:
                if (site := user_site(e.frames, scan.helpers)) is not None:
                    counts[site.key] = counts.get(site.key, 0) + 1
                    if not e.is_p2p:
                        visits.add(scan.keys[e.group], site.key, e.seq)
        return counts, visits


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
        out[_group_of(first)] = ("default_pg" if first == "0" else "", None)
    return out


def _group_of(number: str) -> str:
    """Return the name of a group of which only the recorder's number is known."""
    return number if number == "0" else f"group {number}"


def _status(scan: Scan) -> dict[str, tuple[int, int]]:
    """Return the counters of groups without entries by name, matched by the numbers in entries, else by the order of creation."""
    f = scan.file
    if not f.status or len(scan.tails) == len(f.status):
        return {}  # every group has entries, which are more detailed
    if scan.backend == "gloo" or by_hook(scan.backend):
        return {}  # they also count messages, which may differ between ranks
    names = {short_text(e.pg_id): e.group for e in f.entries if e.pg_id is not None}
    listed = [n for n in f.groups if n]
    if len(listed) == len(f.status) and all(n.isdecimal() for n in (*listed, *f.status)):
        in_order = dict(zip(sorted(f.status, key=int), sorted(listed, key=int), strict=True))
        if all(in_order.get(k) == n for k, n in names.items()):
            names = in_order
    elif not f.entries and not listed:
        names = {number: _group_of(number) for number in f.status}
    keys = {number: scan.keys.get(names.get(number, "")) for number in f.status}
    return {key: f.status[number] for number, key in keys.items() if key is not None}


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
