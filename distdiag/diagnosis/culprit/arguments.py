"""Evidence from the arguments of a call: which rank used a new dtype, size, root or peer at its site."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from distdiag.diagnosis.comparison import minority
from distdiag.diagnosis.culprit.call_order import LOOP_ADVICE
from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.culprit.conditions import tied
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.guards import on_stack
from distdiag.diagnosis.model.snapshot import Call, RankState
from distdiag.diagnosis.model.syntax import is_set, line_at, tree_of
from distdiag.diagnosis.text.phrases import at, both_sites
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.wait import call_at, calls_until
from distdiag.terms.ranks import by_value
from distdiag.terms.units import counted, size_text

EARLIER = 2  # minimum of earlier calls at the site
LAST_BATCH = (
    "a batch is smaller than before, and not equally large on all ranks: use drop_last=True or a DistributedSampler (it "
    "pads), or exchange the sizes first and pad to the largest"
)

_ARGUMENT: Mapping[str, Callable[[Call], object]] = {
    "dtype": lambda call: compatible.dtype_name(call.dtype),
    "shape": compatible.elements,
    "root": lambda call: call.root,
    "peer": lambda call: call.peer,
    "bytes": lambda call: call.bytes,
}


class Usual(NamedTuple):
    """The one value that an argument had in all earlier calls at a site."""

    value: object
    times: int
    changed: bool  # it has another value now


def usual(state: RankState | None, call: Call | None, argument: str) -> Usual | None:
    """Return the value that an argument of this call had in all earlier calls at its site; None without one."""
    values = _earlier(state, call, argument)
    now = _ARGUMENT[argument](call) if call is not None else None
    if len(values) < EARLIER or len(set(values)) != 1:
        return None
    known = values[0] is not None and now is not None
    return Usual(values[0], len(values), values[0] != now) if known or values[0] == now else None


def _earlier(state: RankState | None, call: Call | None, argument: str) -> list[object]:
    """Return the argument of all known earlier calls of this operation at this site."""
    return [_ARGUMENT[argument](c) for c in _calls_before(state, call)]


def _calls_before(state: RankState | None, call: Call | None) -> list[Call]:
    if state is None or call is None or call.site is None:
        return []
    here = f"{call.site.key} <"  # of a rank that was aborted the callers are not known
    same = (c for c in calls_until(state, call)[:-1] if (c.op, c.group) == (call.op, call.group))
    return [c for c in same if c.site is not None and f"{c.site.key} <".startswith(here)]


def _of_ranks(case: Case, ranks: Collection[int]) -> list[Usual | None]:
    return [usual(case.states.get(r), case.wait.calls.get(r), case.wait.conflict or "") for r in ranks]


def accuse(case: Case) -> Testimony | None:
    """Accuse the side whose argument has changed at its site, if the other side's never has.

    In a call that all made together, accuse the ranks whose size is new there, if not all sizes are.
    """
    if case.wait.conflict not in _ARGUMENT:
        return None
    if case.one_call:
        odd = [r for r in case.wait.calls if any(u is not None and u.changed for u in _of_ranks(case, [r]))]
        return (explain(case, sorted(odd)) if len(odd) < len(case.wait.calls) else None) or _uneven(case)
    for odd, rest in (case.sides, case.sides[::-1]) if case.tie else ():
        new, old = _of_ranks(case, odd), _of_ranks(case, rest)
        if all(u is not None and u.changed for u in new) and all(u is not None and not u.changed for u in old):
            return explain(case, odd)
    return None


def _uneven(case: Case) -> Testimony | None:
    """Accuse the minority by size, if in all known earlier calls there all ranks had passed equal sizes."""
    sizes = {rank: call.bytes for rank, call in case.wait.calls.items()}
    earlier = {tuple(_earlier(case.states.get(r), call, "bytes")[-EARLIER:]) for r, call in case.wait.calls.items()}
    odd = minority(sizes)
    if not odd or len(earlier) > 1 or len(earlier.pop()) < EARLIER or None in sizes.values():
        return None
    each = "; ".join(f"{rank_list(ranks)} {size_text(size or 0)}" for size, ranks in by_value(sizes).items())
    return Testimony(ranks=odd, text=f"; before, all ranks passed equal sizes there, now {each}")


def explain(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return the argument that the first of these ranks passed in its earlier calls at the site; None if it has not changed."""
    argument = case.wait.conflict or ""
    if argument == "shape" and (lists := _object_lists(case)) is not None:
        return replace(lists, ranks=tuple(ranks))
    if argument not in _ARGUMENT or not ranks:
        return None
    (found,) = _of_ranks(case, ranks[:1])
    if found is None or not found.changed:
        return None
    everywhere = _of_ranks(case, [rank for rank in case.wait.calls if rank in case.states])
    all_changed = {u.value if u is not None and u.changed else None for u in everywhere} == {found.value}
    value = f"root {found.value}" if argument == "root" else found.value
    if argument == "shape" and isinstance(value, int):
        value = counted(value, "element")
    times = "twice" if found.times == 2 else f"{found.times:,} times"
    times = f"at least {times}" if case.snapshot.source == "dumps" else times  # not all that a dump holds are read
    text = f"; before, {'all ranks' if all_changed else rank_list(ranks)} called it with {value} ({times})"
    last = argument == "shape" and (all_changed or _is_shorter(case.states[ranks[0]], case.wait.calls[ranks[0]]))
    return Testimony(ranks=tuple(ranks), text=text, advice=LAST_BATCH if last else "")


def _object_lists(case: Case) -> Testimony | None:
    """Return that lists of objects differ in length: what `broadcast_object_list` broadcasts first has one element for each object."""
    sites = {call.site for call in case.wait.calls.values()}
    site = next(iter(sites))
    if len({s and s.key for s in sites}) > 1 or "broadcast_object_list(" not in line_at(site, case.source):
        return None
    sizes = ((side, compatible.elements(case.wait.calls[side[0]]) or 0) for side in case.sides)
    each = (f"{rank_list(side)}: {counted(n, 'object')}" for side, n in sizes)
    return Testimony(
        text=f"; `broadcast_object_list` has lists of different lengths: {'; '.join(each)}",
        advice=f"pass a list of the same length on all ranks{at(site)}: only what is in it comes from src (`[None] * n` on the others)",
    )


def _is_shorter(state: RankState, call: Call) -> bool:
    """True if a tensor has fewer rows than all before at its site, each as long as before: those of a smaller batch."""
    shapes = {c.shape for c in _calls_before(state, call)}
    before, now = shapes.pop() if len(shapes) == 1 else None, call.shape
    return before is not None and now is not None and len(before) > 1 and before[1:] == now[1:] and now[0] < before[0]


def new_peer(case: Case) -> Testimony | None:
    """Accuse the one rank of a cycle whose message has a new peer at its site."""
    messages = {r: call for r, call in case.calls.items() if call is not None and call.p2p}
    known = {r: usual(case.states.get(r), call, "peer") for r, call in messages.items()}
    odd = {r: found for r, found in known.items() if found is not None and found.changed}
    if len(odd) != 1:
        return None
    ((rank, found),) = odd.items()
    text = f"; in {found.times:,} earlier calls there its peer was rank {found.value}"
    return Testimony(ranks=(rank,), text=text)


def reordered(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return that the calls differ in their order only: each side makes the other's next, or, if none is to blame, all have made both."""
    calls, argument, exchanged = case.wait.calls, case.wait.conflict or "", swapped(case)
    if not exchanged:
        if ranks or argument not in _ARGUMENT or len(case.sides) != 2:
            return None
        both = {_ARGUMENT[argument](calls[r]) for r in case.compared}
        known = ({*_earlier(case.states.get(r), calls[r], argument)} for r in case.compared)
        if None in both or not all(both <= earlier for earlier in known):
            return None
    first, second = (calls[side[0]].site for side in case.sides)
    parted = tuple(tied(case)) if not ranks else ()  # if a condition is known, its advice is the better one
    text = "both sides have made either call before: they make them in a different order, or one leaves some out"
    text = "each side makes the other's call next: only their order differs" if exchanged else text
    advice = f"compare {both_sites(first, second)}: make these calls in the same order on all ranks; {LOOP_ADVICE}"
    return Testimony(ranks=tuple(ranks), text=f"; {text}", conditions=parted, advice="" if parted else advice)


def over_set(case: Case) -> Testimony | None:
    """Blame nobody if a loop over a set makes all ranks' calls, in one line, and no argument was always the same there."""
    sites = {call.site for call in case.wait.calls.values()}
    around = on_stack(site.path, case.source) if len(sites) == 1 and (site := sites.pop()) is not None else ()
    loop = next((guard for guard in reversed(around) if isinstance(guard.node, ast.For)), None)
    if loop is None or loop.test is None or any(_of_ranks(case, [*case.wait.calls])):
        return None
    over, tree = loop.test, tree_of(loop.place.file, case.source)
    if tree is None or not is_set(over, tree):
        return None
    return Testimony(
        text=f"; `{loop.text}`{at(loop.place)} goes over a set",
        advice=f"loop over `sorted({ast.unparse(over)})`{at(loop.place)}: the order of a set differs between processes",
    )


def swapped(case: Case) -> bool:
    """True if each side has issued next what the other side is in, and then both the same: hosts that run ahead show it."""
    wait, sides = case.wait, []
    for side in case.sides if not wait.p2p and wait.seq else ():  # the number of an aborted call is not always known
        states = (case.states.get(r) for r in side)
        made = {tuple(_made(call_at(state, wait.group, wait.seq + n)) for n in range(3)) for state in states}
        sides.append(made.pop() if len(made) == 1 else (None,))
    return len(sides) == 2 and None not in sides[0] and sides[1] == (sides[0][1], sides[0][0], *sides[0][2:])


def _made(call: Call | None) -> tuple[object, ...] | None:
    return None if call is None else (compatible.signature(call), call.site)
