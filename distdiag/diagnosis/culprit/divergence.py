"""Evidence from the order of events: where two histories part, and which of the two events was due.

Ranks of one job make the same calls and steps in the same order. Two histories are aligned by the numbers of the group's collectives; the
first pair of events that differs is where they part, even if calls paired silently since then. What came before is the same on both
sides, so it predicts: of the two events, the one that followed the longer equal context before was due, and the other rank departed
(prediction by partial matching: J. Cleary, I. Witten, 1984). A context that reaches beyond what is known proves nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from distdiag.diagnosis.culprit.callers import COMPARED, equal_start
from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call, RankState
from distdiag.diagnosis.text.phrases import at, op_at
from distdiag.diagnosis.waits import compatible, messages
from distdiag.diagnosis.waits.incidents import Root
from distdiag.diagnosis.waits.wait import calls_until
from distdiag.terms.units import counted

NEVER = -1  # depth of an event that never happened before
LEAST = 8  # events by which the contexts of the due event are longer, in all: varying orders agree by chance for a few
ROUNDS = 4  # in which one event followed another, at least
STEP, COUNTED = ("step",), ("counted",)
_ARGUMENTS = ("", "", "roots", "dtypes", "sizes")  # of a collective's event

Event = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class History:
    """Events of one rank, oldest first; the last one is what it is in.

    Attributes:
        calls: The call of each event; None: the end of a step.
        gaps: Collectives of the call's group that C++ issued (DDP) since the one before: they are counted, not listed.
    """

    state: RankState
    events: tuple[Event, ...]
    calls: tuple[Call | None, ...]
    gaps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Departure:
    """One rank's event that was not due.

    Attributes:
        made: Its call; None: it ended a step, or is in DDP.
        due: The event that was due, of the other rank; None in the same way.
        left_out: True if its event has always followed the due one: it left that out and went on.
    """

    rank: int
    made: Call | None
    due: Call | None
    left_out: bool = False


def history(state: RankState, here: Call | None, groups: Collection[str]) -> History:
    """Return the events of a rank in these groups, up to `here`."""
    calls = [call for call in calls_until(state, here) if call.group in groups or call is here]
    listed = {messages.name(call) for call in state.calls}
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
    gaps: list[int] = []
    newest: dict[str, int] = {}
    for _, _, call in timed:
        gap, event = 0, STEP
        if call is not None:
            known = newest.get(call.group)
            # without a listed call of its group, the end of the step represents DDP's calls
            hidden = STEP if known is None and len(groups) > 1 else COUNTED
            event = _event(call) if messages.name(call) in listed else hidden
            if call.seq is not None:
                gap = call.seq - known - 1 if known else 0
                newest[call.group] = call.seq
        events.append(event)
        gaps.append(gap)
    return History(state, tuple(events), tuple(call for _, _, call in timed), tuple(gaps))


def _event(call: Call) -> Event:
    """Return what equal calls of all ranks have in common: not the peer, which is another one on each."""
    site = call.site.key if call.site is not None else None
    if call.p2p:
        return messages.direction_of(call), site, compatible.elements(call)
    size = compatible.elements(call)
    return compatible.op_name(call.op), site, call.root, compatible.dtype_name(call.dtype), size  # see _ARGUMENTS


def _aligned(first: History, second: History) -> tuple[int, int] | None:
    """Return the indices of the first collective that both list; None without one, or if it differs already."""
    both = (first.calls, second.calls)
    mine, theirs = ({(c.group, c.seq): i for i, c in enumerate(calls) if c is not None and c.seq} for calls in both)
    i, j = next(((i, theirs[key]) for key, i in mine.items() if key in theirs), (-1, -1))
    return (i, j) if i >= 0 and first.events[i] == second.events[j] else None


def first_difference(first: History, second: History) -> tuple[int, int] | None:
    """Return the indices of the first events that differ; None if all that is known is equal, or differs from the start."""
    if (start := _aligned(first, second)) is None:
        return None
    # the gap before the first one depends on how far back each is known
    rest = (zip(h.events[k:], h.gaps[k:], strict=False) for h, k in ((first, start[0] + 1), (second, start[1] + 1)))
    n = next((n for n, (a, b) in enumerate(zip(*rest, strict=False), 1) if a != b), None)
    return (start[0] + n, start[1] + n) if n is not None else None


def departure(first: History, second: History) -> Departure | None:
    """Return which of two ranks departed, and from what; None if that is not known."""
    at_index = first_difference(first, second)
    if at_index is None:
        return None
    i, j = at_index
    both = first.calls[i], second.calls[j]
    if {first.events[i], second.events[j]} <= {STEP, COUNTED}:
        return None  # a step holds DDP's collectives, but where in it they are is not known
    messages_only = all(call is not None and call.p2p for call in both)
    mixed = any(call is not None and call.p2p for call in both)
    if messages_only or (mixed and equal_start(reversed(first.events[:i]), reversed(second.events[:j])) < LEAST):
        return None  # how many messages are due depends on the data, and stages of a pipeline differ in theirs
    if _lost(first, i, second) or _lost(second, j, first):
        return None
    here, there = _contexts(first, i, first, i), _contexts(first, i, second, j)
    deeper, other = (max((length for length, _ in found), default=NEVER) for found in (here, there))
    odd, right, k, n = second, first, j, i
    if deeper < other:
        odd, right, k, n, other, here, there = first, second, i, j, deeper, there, here
    made = odd.calls[k]
    in_ddp = made is not None and odd.events[k] in (STEP, COUNTED)
    if made is not None and in_ddp and _may_be_due(odd.state, made, right.state, right.calls[n]):
        return None  # the other rank may have skipped DDP's call, instead of this one the call that was due
    weight = sum(max(0, length - max(other, 0)) for length, _ in here)
    if weight < LEAST or any(cut and length == other for length, cut in there):
        return None
    if other == NEVER and odd.events[k][1:2] != right.events[n][1:2] and _earlier(odd, k):
        return None
    return Departure(odd.state.rank, made, right.calls[n], _followed(odd, k, right.events[n]))


def _followed(odd: History, k: int, due: Event) -> bool:
    """True if the event `k` of a history has followed each earlier `due` event, and often enough."""
    after = [then for event, then in itertools.pairwise(odd.events[:k]) if event == due]
    return len(after) >= ROUNDS and set(after) == {odd.events[k]}


def _may_be_due(state: RankState, made: Call, other: RankState, due: Call | None) -> bool:
    """True if another rank may have left out the pass of DDP that a rank is in.

    Where in a step the pass is due shows only in the gaps between calls of its own group.
    """
    if any(model.forwards > model.synced_backwards for model in other.models):
        return True
    in_pass = not all(model.forwards <= model.synced_backwards <= state.step for model in state.models)
    return in_pass and due is not None and (due.p2p or due.group != made.group)


def _contexts(before: History, i: int, of: History, k: int) -> list[tuple[int, bool]]:
    """Return (length of the context that equals the one before event `i`, True if it may be longer than is known) of each earlier
    event that equals event `k` of a history."""
    events, found = before.events, []
    event, gap = of.events[k], of.gaps[k]
    for end in range(1, i):
        again = before.gaps[end] > gap if event == COUNTED else (events[end], before.gaps[end]) == (event, gap)
        if again:
            length = equal_start(reversed(events[:end]), reversed(events[:i]))
            found.append((length, length == end))
    return found


def _lost(history: History, i: int, other: History) -> bool:
    """True if the record of a call before event `i` is lost: another rank lists its number, so C++ did not issue it."""
    here = history.calls[i]
    if here is None or here.seq is None:
        return False
    missing = range(here.seq - history.gaps[i], here.seq)
    listed = (call for call, event in zip(other.calls, other.events, strict=True) if event != COUNTED)
    return any(call is not None and call.group == here.group and call.seq in missing for call in listed)


def _earlier(history: History, i: int) -> bool:
    """True if the rank has been at the site of event `i` before, longer ago than its events are known."""
    call = history.calls[i]
    if call is None or call.site is None:
        return True
    key = call.site.key
    known = sum(c is not None and c.site is not None and c.site.key == key for c in history.calls)
    return history.state.sites.get(key, 0) > known


def _against(first: History, second: History, others: Sequence[History]) -> Departure | None:
    """Return which of two ranks departed, if all others that are known have gone the other's way: the first epoch's end is due, too."""
    pair, known = (first, second), [h for h in others if _aligned(h, first) and _aligned(h, second)]
    apart = [{first_difference(h, other) is not None for other in known} for h in pair]
    if apart not in ([{True}, {False}], [{False}, {True}]) or (at_index := first_difference(first, second)) is None:
        return None
    odd = 0 if apart[0] == {True} else 1
    made, due = pair[odd].calls[at_index[odd]], pair[1 - odd].calls[at_index[1 - odd]]
    return Departure(pair[odd].state.rank, made, due)


def accuse(case: Case) -> Testimony | None:
    """Accuse the one side of which every rank departed from the first rank of another; nobody for messages.

    In a cycle, ranks are compared with those that wait for them. The number of messages in a step depends on its data (micro-batches): none of
    them is due. Ranks that are not members of the same groups have one order of calls in a mesh, and different ones in a pipeline.
    """
    waits = case.incident.waits
    in_cycle, by_message = case.incident.root is Root.CYCLE, any(wait.p2p for wait in waits)
    groups = {*case.snapshot.groups} if in_cycle and not by_message else {wait.group for wait in waits}
    known = [case.snapshot.groups[name].ranks for name in groups if name in case.snapshot.groups]
    if (by_message or not in_cycle) and any(not {*case.compared} <= {*ranks} for ranks in known):
        return None
    if len(case.sides) < 2 or not all(r in case.states for r in case.compared):
        return None

    @cache
    def of(rank: int) -> History:  # most ranks need none: of thousands, each costs a millisecond
        return history(case.states[rank], case.calls.get(rank) or case.states[rank].blocked, groups)

    members, rest = {*case.compared}, []
    if in_cycle:
        pairs = {(q, p) for wait in waits for q in wait.ranks for p in wait.missing if {q, p} <= members}
        if len(pairs) > COMPARED:
            return None
        rest = [of(r) for r in sorted(case.states.keys() - members)[:COMPARED]] if not by_message else []
    else:
        largest, *others = case.sides
        pairs = {*((r, others[0][0]) for r in largest), *((r, largest[0]) for side in others for r in side)}
    both = ((of(q), of(p)) for q, p in sorted(pairs))
    departed = {d.rank: d for q, p in both if (d := _against(q, p, rest) or departure(q, p)) is not None}
    found = [side for side in case.sides if departed.keys() >= {*side}]
    if len(found) != 1:
        return None
    (side,) = found
    first = departed[side[0]]
    made, due = (_word(call) for call in (first.made, first.due))
    same = made == due
    if same:  # one line, in a wrapper for all calls: the arguments differ
        sizes = (compatible.elements(call) if call is not None else None for call in (first.made, first.due))
        made, due = (f"{made} of {counted(n, 'element')}" if n is not None else made for n in sizes)
    elif first.made is not None and first.due is not None and first.made.op == first.due.op and first.due.site:
        due = f"the one{at(first.due.site)}"
    did = "made an optimizer step" if first.made is None else f"made {made}"
    of_group = first.made is not None and first.made.group == case.wait.group and not case.wait.p2p
    seq = first.made.seq if first.made is not None and of_group else None
    here = f"in call #{seq:,}" if seq and seq != case.wait.seq else "here"
    text = f"; all ranks had kept one order of calls; {here} {rank_list(side)} {did} where {due} was due"
    if made == due:
        text = f"; all ranks had passed the same {argument(first)} there in the same order; {here} {rank_list(side)} did not"
    if not first.left_out or first.due is None or case.wait.conflict != "shape":
        return Testimony(ranks=tuple(side), text=text)
    size = compatible.elements(first.due) if same else None
    who, call = rank_list(side), op_at(first.due) + (f" of {counted(size, 'element')}" if size is not None else "")
    return Testimony(
        ranks=tuple(side), head=f"{who} left out {call}", text=f"{text}, and has always followed it",
        advice=f"find what led {who} past {call} in this round: a condition, an exception, an early return; the sizes differ only because "
        "its next call met that one",
    )  # fmt: skip


def argument(found: Departure) -> str:
    """Return the first argument in which two calls at one line differ: `roots`."""
    made, due = (_event(call) if call is not None else STEP for call in (found.made, found.due))
    differ = (name for name, a, b in zip(_ARGUMENTS, made, due, strict=False) if a != b)
    return next((name for name in differ if name), "sizes")


def _word(call: Call | None) -> str:
    op = compatible.op_name(call.op) or "a collective" if call is not None else ""
    return f"{op}{at(call.site)}" if call is not None else "the end of a step"
