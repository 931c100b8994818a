"""Evidence from the order of events: where two histories part, and which of the two events was due.

Ranks of one job make the same calls and steps in the same order. Two histories are aligned by the numbers of the group's collectives; the
first pair of events that differs is where they part, even if calls paired silently since then. What came before is the same on both
sides, so it predicts: of the two events, the one that followed the longer equal context before was due, and the other rank departed
(prediction by partial matching: J. Cleary, I. Witten, 1984). A context that reaches beyond what is known proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call, RankState
from distdiag.diagnosis.text.phrases import at
from distdiag.diagnosis.waits import compatible, messages

NEVER = -1  # depth of an event that never happened before
LEAST = 8  # events by which the contexts of the due event are longer, in all: varying orders agree by chance for a few
STEP, COUNTED = ("step",), ("counted",)

Event = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class History:
    """Events of one rank, oldest first; the last one is what it is in.

    Attributes:
        calls: The call of each event; None: the end of a step.
        numbers: The number of the group's newest collective at each event.
        gaps: Collectives that C++ issued (DDP) since the call before: they are counted, not listed.
    """

    state: RankState
    events: tuple[Event, ...]
    calls: tuple[Call | None, ...]
    numbers: tuple[int, ...]
    gaps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Departure:
    """One rank's event that was not due.

    Attributes:
        made: Its call; None: it ended a step, or is in DDP.
        due: The event that was due, of the other rank; None in the same way.
        depth: Equal events before it that had led to the due event.
    """

    rank: int
    made: Call | None
    due: Call | None
    depth: int


def history(state: RankState, here: Call | None, group: str) -> History:
    """Return the events of a rank in one group, up to `here`."""
    calls = [call for call in state.calls if call.group == group]
    if here is not None:
        same = [i for i, call in enumerate(calls) if _name(call) == _name(here)]
        calls = [*(calls[: same[-1]] if same else calls), here]
    timed: list[tuple[float, int, Call | None]] = []
    newest_s = 0.0
    for call in calls:
        newest_s = call.entered_s if call.entered_s is not None else newest_s
        timed.append((newest_s, 1, call))
    if timed:
        oldest_s = timed[0][0]
        timed += [(step.end_s, 0, None) for step in state.steps if oldest_s < step.end_s < newest_s]
    timed.sort(key=lambda item: item[:2])
    events: list[Event] = []
    numbers: list[int] = []
    gaps: list[int] = []
    number = 0
    for _, _, call in timed:
        gap = 0
        if call is not None and call.seq is not None:
            gap = call.seq - number - 1 if number else 0
            number = call.seq
        listed = call is None or call is not here or any(_name(c) == _name(call) for c in state.calls)
        events.append(STEP if call is None else _event(call) if listed else COUNTED)
        numbers.append(number)
        gaps.append(gap)
    return History(state, tuple(events), tuple(call for _, _, call in timed), tuple(numbers), tuple(gaps))


def _name(call: Call) -> tuple[Any, ...]:
    return call.op, call.group, call.seq, call.peer, call.nth


def _event(call: Call) -> Event:
    """Return what equal calls of all ranks have in common: not the peer, which is another one on each."""
    site = call.site.key if call.site is not None else None
    if call.p2p:
        return messages.direction_of(call), site, compatible.elements(call)
    size = compatible.elements(call)
    return compatible.op_name(call.op), site, call.root, compatible.dtype_name(call.dtype), size


def parting(first: History, second: History) -> tuple[int, int] | None:
    """Return the indices of the first events that differ; None if all that is known is equal, or differs from the start."""
    oldest = [
        next((n for n, call in zip(h.numbers, h.calls, strict=True) if call and call.seq), 0) for h in (first, second)
    ]
    i, j = (_index_of(h, max(oldest)) for h in (first, second))
    if i is None or j is None or first.events[i] != second.events[j]:
        return None
    i, j = i + 1, j + 1
    while i < len(first.events) and j < len(second.events) and _same(first, i, second, j):
        i, j = i + 1, j + 1
    return (i, j) if i < len(first.events) and j < len(second.events) else None


def _same(first: History, i: int, second: History, j: int) -> bool:
    return (first.events[i], first.gaps[i]) == (second.events[j], second.gaps[j])


def _index_of(history: History, number: int) -> int | None:
    """Return the index of the collective with this number."""
    for i, (known, call) in enumerate(zip(history.numbers, history.calls, strict=True)):
        if known == number and call is not None and call.seq is not None:
            return i
    return None


def departure(first: History, second: History) -> Departure | None:
    """Return which of two ranks departed, and from what; None if that is not known."""
    at_index = parting(first, second)
    if at_index is None:
        return None
    i, j = at_index
    if {first.events[i], second.events[j]} <= {STEP, COUNTED}:
        return None  # a step holds DDP's collectives, but where in it they are is not known
    if _lost(first, i, second) or _lost(second, j, first):
        return None
    here, there = _contexts(first, i, first, i), _contexts(first, i, second, j)
    deeper, other = (max((length for length, _ in found), default=NEVER) for found in (here, there))
    odd, right, k, n = (second, first, j, i)
    if deeper < other:
        odd, right, k, n, deeper, other, here, there = first, second, i, j, other, deeper, there, here
    weight = sum(max(0, length - max(other, 0)) for length, _ in here)
    if weight < LEAST or any(cut and length == other for length, cut in there):
        return None
    if other == NEVER and odd.events[k][1:2] != right.events[n][1:2] and _earlier(odd, k):
        return None
    return Departure(odd.state.rank, odd.calls[k], right.calls[n], deeper)


def _contexts(before: History, i: int, of: History, k: int) -> list[tuple[int, bool]]:
    """Return (length of the context that equals the one before event `i`, True if it may be longer than is known) of each earlier
    event that equals event `k` of a history."""
    events, found = before.events, []
    event, gap = of.events[k], of.gaps[k]
    for end in range(1, i):
        again = before.gaps[end] > gap if event == COUNTED else (events[end], before.gaps[end]) == (event, gap)
        if again:
            length = 0
            while length < end and events[end - 1 - length] == events[i - 1 - length]:
                length += 1
            found.append((length, length == end))
    return found


def _lost(history: History, i: int, other: History) -> bool:
    """True if the record of a call before event `i` is lost: another rank lists its number, so C++ did not issue it."""
    missing = range(history.numbers[i] - history.gaps[i], history.numbers[i])
    return any(
        call is not None and call.seq in missing and event != COUNTED
        for call, event in zip(other.calls, other.events, strict=True)
    )


def _earlier(history: History, i: int) -> bool:
    """True if the rank has been at the site of event `i` before, longer ago than its events are known."""
    call = history.calls[i]
    if call is None or call.site is None:
        return True
    key = call.site.key
    known = sum(c is not None and c.site is not None and c.site.key == key for c in history.calls)
    return history.state.sites.get(key, 0) > known


def accuse(case: Case) -> Testimony | None:
    """Accuse the one of two sides of which every rank departed from the first rank of the other."""
    if len(case.sides) != 2 or case.wait.p2p:
        return None
    histories = {
        r: history(case.states[r], case.calls.get(r), case.wait.group) for r in case.compared if r in case.states
    }
    for side, other in (case.sides, case.sides[::-1]):
        against = histories.get(other[0])
        found = [departure(histories[r], against) if r in histories and against else None for r in side]
        if (first := found[0]) is not None and [d.rank for d in found if d is not None] == side:
            made, due = (_word(call) for call in (first.made, first.due))
            text = f"; {rank_list(side)} left the order that all had kept: {made} came where {due} was due"
            return Testimony(ranks=tuple(side), text=text)
    return None


def _word(call: Call | None) -> str:
    return f"{compatible.op_name(call.op)}{at(call.site)}" if call is not None else "the end of a step"
