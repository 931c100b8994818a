"""What a rank's other threads do: a collective that one of them is in, and an exception that ended one.

Nothing else shows a dead thread: its traceback is printed among thousands of lines, and the rank goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from distdiag.diagnosis.culprit import paths
from distdiag.diagnosis.culprit.paths import Condition
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.snapshot import Call, RankState
from distdiag.diagnosis.text.phrases import at, shortened
from distdiag.diagnosis.waits.wait import call_at

SHOWN = 160  # characters of the exception


class Open(NamedTuple):
    """A collective that a rank issued without waiting in it, mostly in another thread, and that does not complete."""

    call: Call
    missing: tuple[int, ...]  # members that have not issued it
    alone: Condition | None  # the condition that keeps the rank's call to it


def left_open(facts: Facts, r: RankState) -> Open | None:
    """Return the open collective of a rank whose host is elsewhere."""
    s = facts.snapshot
    for name, issued in r.enqueued.items():
        done, group = r.completed.get(name, issued), s.groups.get(name)
        if done >= issued or group is None:
            continue
        missing = tuple(q for q in group.ranks if q in s.ranks and s.ranks[q].enqueued.get(name, 0) <= done)
        if missing:
            call = call_at(r, name, done + 1) or Call(op="", group=name, seq=done + 1)
            guard = paths.rank_condition(r.user_stack, s.ranks[missing[0]].user_stack, facts.source)
            return Open(call, missing, guard if guard is not None and guard.way is paths.Way.ALONE else None)
    return None


def ended_thread(states: Iterable[RankState]) -> str:
    """Return `a thread of rank 2 had ended by OSError: …, raised at a.py:7; `, the newest of these ranks; empty if none had."""
    found = [(x.t_s or 0.0, r.rank, x) for r in states for x in r.samples if x.kind == "thread_ended"]
    if not found:
        return ""
    _, rank, sample = max(found, key=lambda item: item[:2])
    return f"a thread of rank {rank} had ended by {shortened(sample.name, SHOWN)}, raised{at(sample.site)}; "
