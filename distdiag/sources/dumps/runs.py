"""Tells the dumps of two runs apart that are in one folder: by the default group's members, and by times that cannot be of one run.

A folder that is not emptied before a start keeps the files of an earlier run, or of ranks that the new one lacks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.text.template import filled
from distdiag.sources.dumps.content import DumpFile
from distdiag.sources.dumps.entries import time_ns
from distdiag.sources.dumps.times import limit_ns, span_ns, written_at_timeout
from distdiag.terms.operations import synchronizes
from distdiag.terms.ranks import grouped

SLACK_NS = 1_000_000_000  # a clock that NTP corrects during the run moves by less
COMPARED = 4  # ranks of the newer set that each older dump is compared with

Chosen = dict[int, list[DumpFile]]
_OTHER_WORLD = "the dumps of {others} are of another run: their default group has {theirs}, that of {rest} has {ours}; they are not used"
_EARLIER = (
    "the dumps of {others} end {gap:time} before those of {rest} begin, and their calls do not fit together: an earlier run or an "
    "earlier dump, unless a clock is wrong; they are not used"
)


@dataclass(frozen=True, slots=True)
class Call:
    """When a rank issued a collective of a group, and when that was found complete; ns, 0 if not known."""

    issued_ns: int
    completed_ns: int
    done: bool
    meets: bool  # no rank completes it before all have issued it


Calls = Mapping[tuple[str, int], Call]


def without_other_runs(chosen: Chosen) -> tuple[Chosen, dict[int, str]]:
    """Return the dumps of the newest run, and for each rank whose dump is of another one, why; all ranks of one reason share it."""
    kept, why = _one_world(chosen)
    spans = {q: span for q, files in kept.items() if (span := span_ns(files)) is not None}
    order = sorted(spans, key=lambda q: spans[q][1])
    for cut in range(len(order) - 1, 0, -1):
        newer, older = order[cut:], order[:cut]
        begin, end = min(spans[q][0] for q in newer), spans[older[-1]][1]
        if end < begin and (others := _not_of(kept, older, newer)):
            rest = sorted(set(kept) - set(others))
            gap_s = (begin - max(spans[q][1] for q in others)) / 1e9
            text = filled(_EARLIER, others=others, rest=rest, gap=gap_s)
            return {q: kept[q] for q in rest}, {**why, **dict.fromkeys(others, text)}
    return kept, why


def _one_world(chosen: Chosen) -> tuple[Chosen, dict[int, str]]:
    """Return the dumps whose default groups have the same members as the newest one's; the reason for each other rank."""
    listed = ((q, [m for f in files for d, m in f.groups.values() if d == "default_pg"]) for q, files in chosen.items())
    worlds = grouped((frozenset(m), q) for q, lists in sorted(listed) for m in [*filter(None, lists)][:1])
    if len(worlds) < 2:
        return chosen, {}
    ours = max(worlds, key=lambda w: (max(f.newest_ns for q in worlds[w] for f in chosen[q]), len(worlds[w])))
    why = {}
    for members, others in worlds.items():
        if members != ours:
            texts = {"theirs": rank_list(members), "ours": rank_list(ours)}
            why |= dict.fromkeys(others, filled(_OTHER_WORLD, others=others, rest=worlds[ours], **texts))
    return {q: files for q, files in chosen.items() if q not in why}, why


def _not_of(chosen: Chosen, older: Collection[int], newer: Collection[int]) -> list[int]:
    """Return the older ranks whose dumps do not fit the newer ones."""
    compared = sorted(newer)[:COMPARED]
    known = {q: (_calls(chosen[q]), _taken_ns(chosen[q])) for q in [*older, *compared]}
    return [a for a in older if any(_apart(known[a], known[b]) for b in compared)]


def _apart(a: tuple[Calls, int], b: tuple[Calls, int]) -> bool:
    """True if no offset of the clocks makes two dumps fit, or one is ahead by whole calls and they have none in common.

    No rank completes such a collective before all have issued it. One that a dump lacks was issued after the dump.
    """
    (first, first_taken), (second, second_taken) = a, b
    low, high = _least(first, second, second_taken), _least(second, first, first_taken)
    if low is not None and high is not None and low + high > SLACK_NS:
        return True
    return first.keys().isdisjoint(second) and bool(_beyond(first, second) or _beyond(second, first))


def _beyond(done: Calls, issued: Calls) -> list[tuple[str, int]]:
    """Return what one rank has completed that the other, a member of its group, has not issued yet."""
    newest = dict(sorted(issued))  # of each group, the last number
    return [key for key, c in done.items() if c.meets and c.done and key[1] > newest.get(key[0], key[1])]


def _least(done: Calls, issued: Calls, taken_ns: int) -> int | None:
    """Return by how much the clock of the rank that issued is ahead at least, as the other one completed these calls."""
    met = ((issued[key], c) for key, c in done.items() if c.meets and c.completed_ns and key in issued)
    both = (theirs.issued_ns - c.completed_ns for theirs, c in met if theirs.issued_ns)
    later = (taken_ns - t for key in _beyond(done, issued) if (t := done[key].completed_ns))
    return max([*both, *later], default=None)


def _calls(files: Collection[DumpFile]) -> Calls:
    calls = {}
    for e in (e for f in files for e in f.entries if not e.is_p2p and not e.ends_batch):
        done_ns = (time_ns(e.time_discovered_completed_ns) or 0) if e.completed else 0
        calls[e.group, e.seq] = Call(e.created_ns or 0, done_ns, e.completed, synchronizes(e.profiling_name))
    return calls


def _taken_ns(files: Collection[DumpFile]) -> int:
    """Return the earliest time at which a dump can have been taken: its newest entry, or the timeout that made it."""
    times = [f.newest_ns for f in files]
    for f in files:
        for e in f.entries:
            issued_ns, after_ns = e.created_ns, limit_ns(e)
            if after_ns is None or issued_ns is None or e.completed or e.retired_when_issued:
                continue
            if e.retired or written_at_timeout((f.modified_ns - issued_ns) / 1e9, after_ns / 1e9):
                times.append(issued_ns + after_ns)
    return max(times, default=0)
