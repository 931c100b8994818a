"""Finds where the paths of two ranks diverge: the guards of one rank's call that are not guards of the other's.

`rank_condition` reads only guards on the rank and can decide who the culprit is. `conditions_between` reads guards on
anything (a loss, an exception, a loop that ends earlier): it explains a culprit and never decides who it is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from distdiag.diagnosis.culprit import callers
from distdiag.diagnosis.culprit.callers import function_key
from distdiag.diagnosis.model import rank_tests, syntax
from distdiag.diagnosis.model.guards import Guard, GuardKind, handler_past, on_stack
from distdiag.diagnosis.model.snapshot import Site
from distdiag.diagnosis.model.syntax import Source, tree_of

SHOWN = 2  # conditions, if several are possible
# exceptions by which a program is led, and that report no failure
CONTROL_FLOW = frozenset({"StopIteration", "StopAsyncIteration", "GeneratorExit", "Empty", "Full", "BlockingIOError"})
_LEAVES = (ast.Break, ast.Return, ast.Expr)  # statements that leave a loop; the last is a call that ends the process


class Way(StrEnum):
    """How a condition leads a rank away from the others."""

    ALONE = "alone"  # to a call that they do not make: `if rank == 0:` around it, `if rank != 0: return` before it
    SKIPPED = "skipped"  # past their call: `if rank == 1: return`, `continue`
    LEFT = "left"  # out of the loop that they are in: `break`, or the loop's own condition
    AGAIN = "again"  # to the call that all have made once: an exception was caught, and what raised it is tried again
    STAYED = "stayed"  # in a loop that they have left in the same way
    MORE = "more"  # through a loop once more: all made its call in this step, and the others have left it
    ROUND = "round"  # to the end of a round of a loop that has as many rounds on all ranks: `continue`


class Condition(NamedTuple):
    """A condition in the source, its text, and how it led a rank to another call."""

    file: str
    line: int
    text: str
    way: Way = Way.ALONE
    on_rank: bool = False  # it tests the rank
    past: bool = False  # it led the others away, where these ranks went on
    keeps_results: bool = False  # a decorator: a rank that has the result does not run the function

    @property
    def site(self) -> Site:
        return Site(self.file, self.line)

    @property
    def is_loop(self) -> bool:
        return self.text.startswith(("for ", "while ", "async for "))

    @property
    def failed(self) -> bool:
        """True for a handler of errors; not one of an end of data: `except Empty`."""
        return self.text.startswith("except") and CONTROL_FLOW.isdisjoint(re.findall(r"\w+", self.text))


def _condition(guard: Guard, way: Way) -> Condition:
    past = guard.kind is GuardKind.PASSED and way in (Way.ALONE, Way.STAYED)
    return Condition(guard.site.file, guard.line, guard.text, way, guard.on_rank, past, guard.keeps_results)


class _Path(NamedTuple):
    """The guards of one rank's call that are not guards of the other's, outermost first.

    Attributes:
        own: In the innermost function that both are in, and below it.
        common: The guards of both, in that function and around it.
        others: Keys of all guards of the other rank in that function.
        depth: Of that function on the stack; -1 if they are in different functions that one line has called.
        returned: True if the other has gone on to a later line of that function, from what this rank is in below it.
    """

    own: list[Guard]
    common: list[Guard]
    others: Collection[object]
    depth: int
    returned: bool

    @property
    def once(self) -> bool:
        """True if no loop is around both: neither has been further than it is now."""
        return not any(guard.kind is GuardKind.INSIDE for guard in self.common)

    def has_left(self, loop: Guard) -> bool:
        """True if the other rank is past this loop, in the function of both."""
        return loop.depth == self.depth and loop.key(GuardKind.ENDED) in self.others


def _from_one_caller(mine: Sequence[Site], theirs: Sequence[Site]) -> tuple[Sequence[Site], Sequence[Site]]:
    """Return the frames of both stacks from their outermost common function on: a traceback begins where a launcher in Python runs the
    script."""

    def within(stack: Sequence[Site], outer: Sequence[Site]) -> Sequence[Site]:
        places = [(x.file, x.function) for x in stack]
        last = (outer[-1].file, outer[-1].function) if outer else None
        return stack[: places.index(last) + 1] if last in places else stack

    mine, theirs = callers.frames(mine), callers.frames(theirs)
    return within(mine, theirs), within(theirs, mine)


def _path(mine: Sequence[Site], theirs: Sequence[Site], source: Source) -> _Path:
    """Return the path of the first of two ranks from the point where their stacks differ."""
    a, b = mine[::-1], theirs[::-1]
    start = callers.equal_start(a, b)
    together = start < min(len(a), len(b)) and function_key(a[start], source) == function_key(b[start], source)
    depth = start if together else -1
    guards, others = on_stack(mine, source), [g for g in on_stack(theirs, source) if g.depth >= start]
    # a helper that both ranks run has led neither away
    passed = {(g.site.file, g.depth == depth, g.key()): g.upto for g in others}

    def by_both(g: Guard) -> bool:
        return passed.get((g.site.file, g.depth == depth, g.key()), -1) >= g.upto

    own = [g for g in guards if g.depth >= start and not by_both(g)]
    common = [g for g in guards if g.depth < start or (g.depth == depth and by_both(g))]
    keys = {g.key() for g in others if g.depth == depth}
    return _Path(own, common, keys, depth, together and b[start].line > a[start].line)


# -- conditions on anything --------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """What is known about two ranks, besides where they are.

    Attributes:
        ahead: Both are in the same round of their loops. The rank further down has passed the other's call; the
            other has not evaluated yet what leads on from there.
        as_often: True for a loop (file, statement) that this rank has run as often as the other: it has not ended early.
        changed: Both stacks are of one rank, which went the other way before. A test that never changes in a rank is not the reason.
        again: Both made the call before at the other's site. So this rank has left the loop around that site.
        stays: Both made the call before at this rank's site, in the same step. So this rank is still in the loop around it.
        alone: The other has never made a call at this rank's site. It may never have run the function that makes the call.
    """

    ahead: bool = False
    as_often: Callable[[str, ast.AST], bool] = lambda file, statement: False
    changed: bool = False
    again: bool = False
    stays: bool = False
    alone: bool = False


def conditions_between(
    mine: Sequence[Site], theirs: Sequence[Site], source: Source, pair: Pair | None = None
) -> list[Condition]:
    """Return the conditions that can lead to one site and not to another; only those of the most likely sort.

    Args:
        mine, theirs: The user's frames of two ranks, innermost first. `mine` is empty if that rank has ended.
    """
    pair, alive = pair or Pair(), bool(mine)
    mine, theirs = _from_one_caller(mine, theirs)
    if not theirs or (mine and function_key(mine[-1], source) != function_key(theirs[-1], source)):
        return []
    if mine and mine[0] == theirs[0] and (set(mine) <= set(theirs) or set(theirs) <= set(mine)):
        return []  # one place, and the callers of a rank that was killed are not all known
    if any(site.function == "__del__" for site in (*mine, *theirs)):
        return []  # Python runs it when the last reference to the object is gone, which no condition decides
    path, their_path = _path(mine, theirs, source), _path(theirs, mine, source)
    # a rank that is still in a helper, which the other has left, may only be later
    held, *left = ([],) * 4 if pair.ahead and their_path.returned else _sorts(path._replace(returned=False))
    held_there, *left_there = _sorts(their_path)
    left_there = [[g for g in sort if not pair.as_often(g.site.file, g.node)] for sort in left_there]
    # what ends a round early in a loop of both: a round ago
    rounds = [g for g in their_path.common if g.depth == their_path.depth and isinstance(g.way_out, ast.Continue)]
    # a round that ended early, in a loop that has ended for this rank and has as many rounds on every rank
    even = (g for g in their_path.own if g.kind is GuardKind.INSIDE and their_path.has_left(g) and not g.can_differ())
    ends_or_branches = [(Way.LEFT, left_there[2]), (Way.SKIPPED, held_there)]
    if any(rank_tests.is_over_registered(g.node) for g in left_there[2]):
        ends_or_branches.reverse()  # of callbacks, one of which went another way
    tries = [
        *((Way.LEFT, sort) for sort in (_innermost(their_path) if pair.again else ())),
        *((Way.MORE, sort) for sort in (_innermost(path) if pair.stays else ())),
        (Way.ALONE, held), *zip((Way.SKIPPED, Way.LEFT), left_there, strict=False), *ends_or_branches,
        *zip((Way.ALONE, Way.STAYED, Way.STAYED), left, strict=False),
        (Way.SKIPPED, rounds), (Way.ROUND, [g for loop in even for g in loop.ways_out(ast.Continue)]),
    ]  # fmt: skip
    # no two ranks read the same time, so a test of a clock comes first; so do kept results, unless a test of the rank leads there
    by_rank = any(g.on_rank for g in (*path.own, *their_path.own))

    def first(g: Guard) -> bool:
        return (g.keeps_results and not by_rank) or rank_tests.reads_clock(g.test, g.source)

    for way, sort in (*((way, [*filter(first, sort)]) for way, sort in tries), *tries):
        found = [g for g in sort if g.can_differ(alive) and not (pair.changed and g.is_fixed)]
        if found and found[0].kind is GuardKind.INSIDE:
            found = found[:1]  # the outermost of nested loops
        asked, more = [g for g in found if g.on_rank], []
        if found and sort is held and not asked:
            if pair.alone and found[0].depth != path.depth:  # the other may never have run the function that this is in
                around = path.own[: path.own.index(found[0])]
                found = [*(g for g in around if g.kind is GuardKind.INSIDE and g.can_differ(alive)), *found]
            # or all were in that branch, and this rank has left a loop before it
            more = [_condition(g, Way.LEFT) for g in left_there[-1] if _ends_by_data(g)]
        if found:
            led = (_condition(g, _way_of(g, way, pair.stays)) for g in asked or found)
            return list(dict.fromkeys((*led, *more)))[-SHOWN:]
    return []


def _way_of(guard: Guard, way: Way, stays: bool) -> Way:
    """Return the way of a condition, by what it leads to: a `break` ends the loop, not only this round; a handler may try again."""
    if way is Way.MORE and guard.way_out is not None:
        return Way.STAYED
    if isinstance(guard.way_out, ast.Break):
        return {Way.ALONE: Way.STAYED, Way.SKIPPED: Way.LEFT}.get(way, way)
    return Way.AGAIN if stays and way is Way.ALONE and isinstance(guard.node, ast.ExceptHandler) else way


def _sorts(path: _Path) -> tuple[list[Guard], ...]:
    """Return the guards by which the other rank can have missed this rank's call, in four lists.

    1. Branches around the call; in a function that only this rank is in, also what leaves it before such a branch.
    2. Each `return`, `continue` or `break` before the call.
    3. Each statement that leaves a loop around the call.
    4. Loops around the call that have ended for the other rank.
    """
    # the other never evaluates what is in a handler or a branch for some ranks, nor what comes after a loop that it has not left
    still_in = [g for g in path.own if g.kind is GuardKind.ENDED and g.key(GuardKind.INSIDE) in path.others]
    handlers = [g for g in path.own if g.kind is GuardKind.HOLDS and isinstance(g.node, ast.ExceptHandler)]
    once = handlers + (still_in if path.once else [])
    end = next((g for g in path.own if g in once or (g.keeps_to_some and g.on_rank)), None)
    own = path.own[: path.own.index(end) + 1] if end is not None else path.own
    skips = [g for g in own if g.kind is GuardKind.PASSED and not any(syntax.within(x.node, g.line) for x in still_in)]
    loops = [g for g in own if g.kind is GuardKind.INSIDE]
    breaks = [x for g in loops for x in g.ways_out(*((ast.Break,) if path.has_left(g) else _LEAVES))]
    ends = [g for g in loops if path.has_left(g) or (path.returned and g.depth != path.depth)]
    # what ends a round does not end a loop that the other has left, if that ends by data
    first = next((own.index(g) for g in ends if _ends_by_data(g)), len(own))
    skips = [g for g in skips if own.index(g) < first]
    holds = [g for g in own if g.kind is GuardKind.HOLDS]
    if holds:  # a rank that has left the function before has not evaluated the branch
        before = own[: own.index(holds[-1])]
        holds = [g for g in own if g in holds or (g in skips and g in before and g.depth != path.depth)]
    return holds, skips, breaks, ends


def _innermost(path: _Path) -> Iterator[list[Guard]]:
    """Yield what leaves the innermost loop around a call, what leaves the loops around it if it is a `for`, which mostly ends by itself,
    and the innermost loop that can have more rounds on one rank (not one over a model's blocks).

    Nothing if an exception may have left it, or if a comprehension may make the call again.
    """
    loops = [g for g in reversed(path.own) if g.kind is GuardKind.INSIDE]
    raised = any(isinstance(g.node, ast.ExceptHandler) for g in path.own)
    if not loops or raised or any(g.kind is GuardKind.REPEATED for g in (*path.common, *path.own)):
        return
    for loop in loops if isinstance(loops[0].node, ast.For) else loops[:1]:
        yield [*loop.ways_out(*_LEAVES)]
    yield [loop for loop in loops if loop.can_differ()][:1]


def _ends_by_data(loop: Guard) -> bool:
    """True if a loop over no data set has a test or a `break` that can differ between ranks in one round, so reads no counter."""
    if isinstance(loop.node, (ast.For, ast.AsyncFor)) and loop.can_differ():
        return False
    ends = (*((loop,) if isinstance(loop.node, ast.While) else ()), *loop.ways_out(ast.Break))
    return any(g.can_differ() and not rank_tests.reads_counter(g.test) for g in ends)


def in_no_branch(mine: Sequence[Site], theirs: Sequence[Site], source: Source) -> bool:
    """True if the first of two ranks is in no branch that the other is not in; False if a source cannot be read."""
    if any(tree_of(site.file, source) is None for site in (*mine, *theirs)):
        return False
    return not any(g.kind is GuardKind.HOLDS for g in _path(mine, theirs, source).own)


def returns_before(site: Site, source: Source) -> list[Condition]:
    """Return the conditions under which a function returns before it reaches a line; those on the rank are left out."""
    found = (g for g in on_stack((site,), source) if isinstance(g.way_out, ast.Return))
    return [_condition(g, Way.SKIPPED) for g in found if g.can_differ() and not g.on_rank]


def handler_around(stack: Sequence[Site], source: Source) -> list[Condition]:
    """Return the innermost handler that leads past a call on a stack after an error before it."""
    handler = handler_past(stack, source)
    return [_condition(handler, Way.SKIPPED)] if handler is not None else []


def short_rounds(stack: Sequence[Site], source: Source) -> list[Condition]:
    """Return what ends a round early in the innermost loop around a call that was made twice, without what follows in the round."""
    loop = next((g for g in reversed(on_stack(stack, source)) if g.kind is GuardKind.INSIDE), None)
    ways = loop.ways_out(ast.Continue) if loop is not None else ()
    return [_condition(g, Way.ROUND) for g in ways if g.can_differ() and not g.is_fixed][-SHOWN:]


def leaving(site: Site | None, theirs: Sequence[Site], source: Source) -> list[Condition]:
    """Return the conditions through which a rank that ended normally can have left the loop that another rank is in.

    Args:
        site: Its last site. If that is a call of `sys.exit`, the rank left there, and the `if` around it is
            the condition.
        theirs: The user's frames of the other rank, innermost first.
    """
    if syntax.exits_process(syntax.statement_at(site, source)):
        return [around._replace(way=Way.SKIPPED)] if (around := enclosing(site, source)) is not None else []
    return conditions_between((), theirs, source)


def left_loop(mine: Sequence[Site], theirs: Sequence[Site], source: Source) -> list[Condition]:
    """Return the conditions by which the first of two ranks can have left a loop for good that the other is still in.

    Nothing if a loop around both may have brought the other into it once more.
    """
    if not mine or not theirs or not _path(*_from_one_caller(theirs, mine), source).once:
        return []
    found = conditions_between(mine, theirs, source)
    return found if {c.way for c in found} == {Way.LEFT} else []


# -- conditions on the rank --------------------------------------------------------------------------------------------


def rank_condition(mine: Sequence[Site], theirs: Sequence[Site], source: Source) -> Condition | None:
    """Return the condition on the rank that leads to one site of a program and not to another; None if there is none.

    Args:
        mine, theirs: The user's frames of two ranks, innermost first.
    """
    mine, theirs = _from_one_caller(mine, theirs)
    if not mine or not theirs or (mine[-1].file, mine[-1].function) != (theirs[-1].file, theirs[-1].function):
        return None
    path, found = _path(mine, theirs, source), None
    for guard in path.own:
        if found is not None and guard.depth != found[0].depth:
            break  # the innermost condition in the outermost function with one
        ways = [(guard, Way.ALONE)] if guard.keeps_to_some else []
        if guard.kind is GuardKind.PASSED:
            names_it = (rank_tests.named_ranks(guard.test) is not None) is (guard.branch == "body")
            ways = [(guard, Way.SKIPPED if names_it else Way.ALONE)]
        elif guard.kind is GuardKind.ENDED and guard.key(GuardKind.INSIDE) in path.others:  # by its `break`
            ways = [(x, Way.LEFT) for x in guard.ways_out(ast.Break)]
        found = next(((g, way) for g, way in ways if g.on_rank), found)
    return _condition(*found) if found is not None else None


def led_away(mine: Sequence[Site], theirs: Sequence[Site], source: Source) -> tuple[Condition, int] | None:
    """Return the condition on the rank that only one of two stacks is under, and which of the two it leads away: 0 or 1."""
    both = rank_condition(mine, theirs, source), rank_condition(theirs, mine, source)
    found = [(condition, under) for under, condition in enumerate(both) if condition is not None]
    if len(found) != 1:
        return None
    ((condition, under),) = found
    return condition, 1 - under if condition.way is Way.SKIPPED else under


def enclosing(site: Site | None, source: Source, callee: str = "") -> Condition | None:
    """Return the innermost `if` whose body holds a site, on the rank or on data; None if there is none in its function.

    Args:
        callee: What the site calls, if that may be under a condition in its line: `f() if first else None`.
    """
    kinds = (ast.If, ast.IfExp) if callee else ast.If
    around = on_stack((site,), source, callee) if site is not None else ()
    held = [g for g in around if g.kind is GuardKind.HOLDS and isinstance(g.node, kinds) and g.branch == "body"]
    return _condition(held[-1], Way.ALONE) if held else None


def only_under(name: str, file: str, source: Source) -> Condition | None:
    """Return the `if` around the only call of a module in a file, `self.name(…)`, else the one that returns before it; None if there is
    none, or more than one call or `return`."""
    calls = [n for n in ast.walk(tree_of(file, source) or ast.Module([], [])) if isinstance(n, ast.Call)]
    calls = [n for n in calls if isinstance(n.func, ast.Attribute) and n.func.attr == name]
    if len(calls) != 1:
        return None
    site = Site(file, calls[0].lineno)
    before = returns_before(site, source)
    return enclosing(site, source, name) or (before[0] if len(before) == 1 else None)
