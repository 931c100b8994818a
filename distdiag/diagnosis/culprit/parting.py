"""Finds where the paths of two ranks diverge: the guards of one rank's call that are not guards of the other's.

`rank_condition` reads only guards on the rank and can decide who the culprit is. `parting` reads guards on anything (a loss, an
exception, a loop that ends earlier): it explains a culprit and never decides who it is.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from distdiag.diagnosis.culprit.callers import function_key
from distdiag.diagnosis.model import guards as guarding
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.guards import LOOPS, Guard, Kind, Source, tree_of
from distdiag.diagnosis.model.snapshot import Site

SHOWN = 2  # conditions, if several are possible


class Condition(NamedTuple):
    """A condition's line number, and the text of that line.

    Attributes:
        names_leaver: True if it names the rank that leaves before the call: `if rank == 1: return`. Else it names the rank that
            makes the call: `if rank == 0:` around it, `if rank != 0: return` before it.
    """

    file: str
    line: int
    text: str
    names_leaver: bool = False


class _Placed(NamedTuple):
    """A guard of one rank's path.

    Attributes:
        shared: The other rank is in the same function.
    """

    guard: Guard
    site: Site
    shared: bool


class _Paths(NamedTuple):
    """The guards that differ between the paths of two ranks, outermost first, and what they have in common.

    Attributes:
        both: The guards of both, in their common function.
        my_keys, their_keys: Keys of all guards of a rank in the common function.
        later: True if mine is in a later line of the common function.
    """

    mine: list[_Placed]
    theirs: list[_Placed]
    both: list[_Placed]
    my_keys: frozenset[object]
    their_keys: frozenset[object]
    later: bool


def _paths(mine: Sequence[Site], theirs: Sequence[Site], source: Source) -> _Paths:
    a, b = list(reversed(mine)), list(reversed(theirs))
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    together = common < min(len(a), len(b)) and function_key(a[common], source) == function_key(b[common], source)
    both = [
        [_guards(stack, i, source, together and i == common) for i in range(common, len(stack))] for stack in (a, b)
    ]
    keys = [{p.guard.key: p.guard.upto for p in frames[0]} if together else {} for frames in both]
    differ = [
        [p for frame in frames for p in frame if not p.shared or other.get(p.guard.key, -1) < p.guard.upto]
        for frames, other in zip(both, reversed(keys), strict=True)
    ]
    shared = [p for p in both[1][0] if p.guard.key in keys[0]] if together else []
    later = together and a[common].line > b[common].line
    return _Paths(differ[0], differ[1], shared, frozenset(keys[0]), frozenset(keys[1]), later)


def _guards(frames: Sequence[Site], i: int, source: Source, shared: bool) -> list[_Placed]:
    site, callee = frames[i], frames[i + 1].function if i + 1 < len(frames) else ""
    tree = tree_of(site.file, source)
    return [_Placed(g, site, shared) for g in guarding.guards(tree, site.line, callee)] if tree is not None else []


def _evaluated(own: list[_Placed], source: Source) -> list[_Placed]:
    """Return the guards up to the first branch for some ranks only: the other ranks never evaluate those inside it."""
    on_rank = (i for i, p in enumerate(own) if _keeps_to_some(p.guard) and _reads_rank(p, source))
    return own[: next(on_rank, len(own)) + 1]


def _keeps_to_some(guard: Guard) -> bool:
    """True for a branch that another rank may not need: the other branch calls nothing."""
    return guard.kind is Kind.HOLDS and not guarding.other_branch_calls(guard)


# -- conditions on anything --------------------------------------------------------------------------------------------


def _holds(own: list[_Placed]) -> Iterator[_Placed]:
    """Yield the branches that this rank is in and the other is not."""
    return (p for p in own if p.guard.kind is Kind.HOLDS)


def _skips(own: list[_Placed], keys_of_other: Collection[object]) -> Iterator[_Placed]:
    """Yield what leaves, or skips the rest of a block, before this rank's call: the other may have left there."""
    still_in = [p.guard.node for p in own if p.guard.kind is Kind.ENDED and _inside(p) in keys_of_other]
    for p in own:
        passed = p.guard.kind is Kind.PASSED and not isinstance(p.guard.way_out, ast.Raise)
        if passed and not any(guarding.within(loop, p.guard.line) for loop in still_in):
            yield p


def _inside(loop: _Placed) -> object:
    """Return the key of the guard that a line is in this loop."""
    return loop.guard._replace(kind=Kind.INSIDE).key


def _breaks(own: list[_Placed], keys_of_other: Collection[object]) -> Iterator[_Placed]:
    """Yield the `break`, `return` or exit in a loop that this rank is in and the other is not."""
    for p in own:
        if p.guard.kind is Kind.INSIDE:  # behind the loop, in its function: no `return` leads there
            behind = p.shared and _ended(p) in keys_of_other
            yield from _ways_out(p, (ast.Break,) if behind else (ast.Break, ast.Return, ast.Expr))


def _ended(loop: _Placed) -> object:
    """Return the key of the guard that this loop has ended."""
    return loop.guard._replace(kind=Kind.ENDED).key


def _ways_out(loop: _Placed, by: tuple[type[ast.stmt], ...]) -> Iterator[_Placed]:
    assert isinstance(loop.guard.node, LOOPS)
    for way_out in guarding.exits(loop.guard.node.body):
        if isinstance(way_out.statement, by) and (guard := way_out.guard) is not None:
            yield loop._replace(guard=guard)


def _ends(own: list[_Placed], keys_of_other: Collection[object], returned: bool) -> Iterator[_Placed]:
    """Yield the loops that this rank is in and the other has left; `returned`: or has left with its function."""
    for p in own:
        ended = _ended(p) in keys_of_other if p.shared else returned
        if p.guard.kind is Kind.INSIDE and ended:
            yield p


def _rounds(both: list[_Placed]) -> Iterator[_Placed]:
    """Yield what ends a round early in a loop of both: one may have done so a round ago."""
    return (p for p in both if isinstance(p.guard.way_out, ast.Continue))


def _first(found: list[_Placed]) -> list[_Placed]:
    """Return the outermost of nested loops; anything else as it is."""
    return found[:1] if found and found[0].guard.kind is Kind.INSIDE else found


# how a guard can lead two ranks apart, most likely first
_ORDER: tuple[Callable[[_Paths], Iterator[_Placed]], ...] = (
    lambda paths: _holds(paths.mine),
    lambda paths: _skips(paths.theirs, paths.my_keys),
    lambda paths: _breaks(paths.theirs, paths.my_keys),
    lambda paths: _ends(paths.theirs, paths.my_keys, paths.later),
    lambda paths: _holds(paths.theirs),
    lambda paths: _skips(paths.mine, paths.their_keys),
    lambda paths: _breaks(paths.mine, paths.their_keys),
    lambda paths: _ends(paths.mine, paths.their_keys, False),
    lambda paths: _rounds(paths.both),
)


def parting(mine: Sequence[Site], theirs: Sequence[Site], source: Source) -> list[Condition]:
    """Return the conditions that can lead to one site and not to another; only those of the most likely sort.

    Args:
        mine, theirs: The user's frames of two ranks, innermost first. `mine` is empty if that rank has ended.
        source: Text of a source file by path, or None.
    """
    if not theirs or (mine and function_key(mine[-1], source) != function_key(theirs[-1], source)):
        return []
    if mine and mine[0] == theirs[0] and (set(mine) <= set(theirs) or set(theirs) <= set(mine)):
        return []  # one place, and the callers of a rank that was killed are not all known
    paths = _paths(mine, theirs, source)
    paths = paths._replace(mine=_evaluated(paths.mine, source), theirs=_evaluated(paths.theirs, source))
    for sort in _ORDER:
        found = [p for p in sort(paths) if _can_differ(p, source, alive=bool(mine))]
        conditions = {c: _reads_rank(p, source) for p in _first(found) if (c := _condition(p, source)) is not None}
        if conditions:
            asked = [c for c, reads in conditions.items() if reads]
            return (asked or list(conditions))[-SHOWN:]
    return []


def _can_differ(placed: _Placed, source: Source, alive: bool) -> bool:
    """True if a guard can be what differs; a rank that is alive has not ended its process."""
    guard, text = placed.guard, source(placed.site.file) or ""
    if guard.branch == "decorator":
        return _reads_rank(placed, source)
    if isinstance(guard.node, LOOPS):
        return guarding.can_end_unevenly(guard.node, guarding.constants(text))
    left = alive and guarding.exits_process(guard.way_out)
    return not left and guarding.can_differ(guard.test, guarding.constants(text))


def leaving(site: Site | None, theirs: Sequence[Site], source: Source) -> list[Condition]:
    """Return the conditions through which a rank that ended normally can have left the loop that another rank is in.

    Args:
        site: Its last site. If that is a call of `sys.exit`, the rank left there, and the `if` around it is the condition.
        theirs: The user's frames of the other rank, innermost first.
    """
    tree = tree_of(site.file, source) if site is not None else None
    if site is not None and tree is not None and guarding.exits_process(guarding.statement(tree, site.line)):
        around = enclosing(site, source)
        return [] if around is None else [around]
    return parting((), theirs, source)


def _reads_rank(placed: _Placed, source: Source) -> bool:
    variables = guarding.rank_variables(source(placed.site.file) or "")
    return guarding.reads_rank(placed.guard.test, variables)


def _condition(placed: _Placed, source: Source, names_leaver: bool = False) -> Condition | None:
    text = guarding.text_of(placed.guard, source(placed.site.file) or "")
    return Condition(placed.site.file, placed.guard.line, text, names_leaver) if text else None


# -- conditions on the rank --------------------------------------------------------------------------------------------


def rank_condition(mine: Sequence[Site], theirs: Sequence[Site], source: Source) -> Condition | None:
    """Return the condition on the rank that leads to one site of a program and not to another; None if there is none.

    Args:
        mine, theirs: The user's frames of two ranks, innermost first.
        source: Text of a source file by path, or None.
    """
    if not mine or not theirs or (mine[-1].file, mine[-1].function) != (theirs[-1].file, theirs[-1].function):
        return None
    paths = _paths(mine, theirs, source)
    found: _Placed | None = None
    for placed in paths.mine:
        if found is not None and placed.site != found.site:
            break  # the innermost condition in the outermost function with one
        found = next((p for p in _on_rank(placed, paths) if _reads_rank(p, source)), found)
    if found is None:
        return None
    guard = found.guard
    names_it = guarding.names_one_rank(guard.test) is (guard.branch == "body")
    return _condition(found, source, guard.kind is Kind.PASSED and names_it)


def _on_rank(placed: _Placed, paths: _Paths) -> Iterator[_Placed]:
    """Yield the guards that can be conditions on the rank: a loop that ended, by its `break`."""
    guard = placed.guard
    if guard.kind is Kind.ENDED and _inside(placed) in paths.their_keys:
        yield from (p._replace(guard=p.guard._replace(kind=Kind.ENDED)) for p in _ways_out(placed, (ast.Break,)))
    elif guard.kind is Kind.PASSED or _keeps_to_some(guard):
        yield placed


def enclosing(site: Site | None, source: Source) -> Condition | None:
    """Return the innermost `if` whose body holds a site, on the rank or on data; None if there is none in its function."""
    tree = tree_of(site.file, source) if site is not None else None
    if site is None or tree is None:
        return None
    around = [
        g
        for g in guarding.guards(tree, site.line)
        if g.kind is Kind.HOLDS and g.branch == "body" and isinstance(g.node, ast.If)
    ]
    return _bare(around[-1], site, source) if around else None


def only_under(name: str, file: str, source: Source) -> Condition | None:
    """Return the `if` around the only call of a module in a file: `self.name(…)` or `model.name(…)`; None if there is none."""
    tree = tree_of(file, source)
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)] if tree is not None else []
    calls = [n for n in calls if isinstance(n.func, ast.Attribute) and n.func.attr == name]
    if tree is None or len(calls) != 1:
        return None
    site = Site(file, calls[0].lineno)
    choices = [
        g for g in guarding.guards(tree, site.line, name) if isinstance(g.node, ast.IfExp) and g.branch == "body"
    ]
    return _bare(choices[-1], site, source) if choices else enclosing(site, source)


def _bare(guard: Guard, site: Site, source: Source) -> Condition:
    return Condition(site.file, guard.line, guarding.text_of(guard, source(site.file) or "").removesuffix(":"))


# -- wording -----------------------------------------------------------------------------------------------------------


def parting_text(conditions: Sequence[Condition]) -> str:
    """Return the end of a sentence: `; they diverge at `if loss < 0.2` (train.py:6)`; empty if there is no condition."""
    if not conditions:
        return ""
    names = [f"`{c.text.removesuffix(':')}` ({c.file.rsplit('/', 1)[-1]}:{c.line})" for c in conditions]
    return f"; they diverge at {' or '.join(names)}"


def decision_advice(condition: Condition, culprits: Collection[int]) -> str:
    """Return what to do about a condition that held on some ranks only."""
    text = condition.text.removesuffix(":")
    if text.startswith("except"):
        return (
            f"make the calls that `{text}` at line {condition.line} skips on {rank_list(culprits)}, too (for example with "
            "a loss times 0), or skip them on all ranks together (all_reduce a flag)"
        )
    if text.startswith(("for ", "while ", "async for ")):
        return (
            f"let the loop `{text}` at line {condition.line} run equally often on all ranks: find why it did not on "
            f"{rank_list(culprits)}, or let all ranks decide together when it ends"
        )
    return (
        f"find why `{text}` at line {condition.line} had another result on {rank_list(culprits)}, or let all ranks decide together "
        "(all_reduce what it tests)"
    )
