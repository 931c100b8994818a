"""Finds where the paths of two ranks diverge: the guards of one rank's call that are not guards of the other's.

`rank_condition` reads only guards on the rank and can decide who the culprit is. `conditions_between` reads guards on
anything (a loss, an exception, a loop that ends earlier): it explains a culprit and never decides who it is.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from distdiag.diagnosis.culprit import callers
from distdiag.diagnosis.culprit.callers import function_key
from distdiag.diagnosis.model import guards as guarding
from distdiag.diagnosis.model import rank_tests, syntax
from distdiag.diagnosis.model.guards import Guard, GuardKind
from distdiag.diagnosis.model.snapshot import Site
from distdiag.diagnosis.model.syntax import LOOPS, Source, tree_of

SHOWN = 2  # conditions, if several are possible
_LEAVES = (ast.Break, ast.Return, ast.Expr)  # statements that leave a loop; the last is a call that ends the process
CALLERS = 3  # functions around a wrapper that are looked at, from the inside


class Way(StrEnum):
    """How a condition leads a rank away from the others."""

    ALONE = "alone"  # to a call that they do not make: `if rank == 0:` around it, `if rank != 0: return` before it
    SKIPPED = "skipped"  # past their call: `if rank == 1: return`, `continue`
    LEFT = "left"  # out of the loop that they are in: `break`, or the loop's own condition
    AGAIN = "again"  # to the call that all have made once: an exception was caught, and what raised it is tried again
    STAYED = "stayed"  # in a loop that they have left in the same way
    ROUND = "round"  # to the end of a round of a loop that has as many rounds on all ranks: `continue`


class Condition(NamedTuple):
    """A condition in the source, its text, and how it led a rank to another call."""

    file: str
    line: int
    text: str
    way: Way = Way.ALONE

    @property
    def site(self) -> Site:
        return Site(self.file, self.line)


class _Placed(NamedTuple):
    """A guard of one rank's path.

    Attributes:
        text: Its file's.
        shared: The other rank is in the same function.
        given: Names that files of the stack hand on with a comparison of the rank: `Log(enabled=rank == 0)`.
    """

    guard: Guard
    site: Site
    text: str
    shared: bool
    given: frozenset[str]

    def key(self, kind: GuardKind) -> object:
        """Return the key of the same statement as a guard of this kind: a loop around a line, or one that ended."""
        return self.guard._replace(kind=kind).key


class _Path(NamedTuple):
    """The guards of one rank's call that are not guards of the other's, outermost first.

    Attributes:
        common: The guards of both, in their common function.
        others: Keys of all guards of the other rank in the common function.
        returned: True if the other has gone on to a later line of the common function, from what this rank is
            in below it.
        once: No loop is around both: neither has been further than it is now.
    """

    own: list[_Placed]
    common: list[_Placed]
    others: frozenset[object]
    returned: bool
    once: bool


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
    a, b = list(reversed(mine)), list(reversed(theirs))
    start = callers.equal_start(a, b)
    together = start < min(len(a), len(b)) and function_key(a[start], source) == function_key(b[start], source)
    frames, others = ([_guards(s, i, source, together and i == start) for i in range(start, len(s))] for s in (a, b))
    shared = {p.guard.key: p.guard.upto for p in others[0]} if together else {}
    # a helper that both ranks run has led neither away
    helped = {(p.site.file, p.guard.key): p.guard.upto for p in itertools.chain(*others) if not p.shared}

    def passed_by_both(p: _Placed) -> bool:
        upto = shared.get(p.guard.key) if p.shared else helped.get((p.site.file, p.guard.key))
        return upto is not None and upto >= p.guard.upto

    own = [p for p in itertools.chain(*frames) if not passed_by_both(p)]
    common = [p for p in frames[0] if p.guard.key in shared] if together else []
    around = (p for i in range(start) for p in _guards(a, i, source, False))
    once = not any(p.guard.kind is GuardKind.INSIDE for p in (*around, *common))
    return _Path(own, common, frozenset(shared), together and b[start].line > a[start].line, once)


def _guards(frames: Sequence[Site], i: int, source: Source, shared: bool) -> list[_Placed]:
    site, callee = frames[i], frames[i + 1].function if i + 1 < len(frames) else ""
    tree = tree_of(site.file, source)
    if tree is None:
        return []
    given = frozenset().union(*(rank_tests.given(source(file) or "") for file in {frame.file for frame in frames}))
    found = guarding.guards(tree, site.line, callee)
    text = source(site.file) or ""
    return [_Placed(g, site, text, shared, given) for g in found if not guarding.takes_turns(tree, g, site.line)]


def takes_turns(site: Site, source: Source) -> bool:
    """True if a call at a site is under a condition whose opposite has the same call in that function."""
    tree = tree_of(site.file, source)
    return tree is not None and any(guarding.takes_turns(tree, g, site.line) for g in guarding.guards(tree, site.line))


def _keeps_to_some(guard: Guard) -> bool:
    """True for a branch that another rank may not need: the other branch calls nothing."""
    return guard.kind is GuardKind.HOLDS and not guarding.other_branch_calls(guard)


def _ways_out(loop: _Placed, by: tuple[type[ast.stmt], ...]) -> Iterator[_Placed]:
    assert isinstance(loop.guard.node, LOOPS)
    for way_out, guard in guarding.exits(loop.guard.node.body):
        if isinstance(way_out, by) and guard is not None:
            yield loop._replace(guard=guard)


def _reads_rank(placed: _Placed) -> bool:
    variables = rank_tests.rank_variables(placed.text)
    return rank_tests.reads_rank(placed.guard.test, variables | placed.given)


def _condition(placed: _Placed, way: Way) -> Condition | None:
    text = guarding.text_of(placed.guard, placed.text)
    return Condition(placed.site.file, placed.guard.line, text, way) if text else None


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
    pair = pair or Pair()
    mine, theirs = _from_one_caller(mine, theirs)
    if not theirs or (mine and function_key(mine[-1], source) != function_key(theirs[-1], source)):
        return []
    if mine and mine[0] == theirs[0] and (set(mine) <= set(theirs) or set(theirs) <= set(mine)):
        return []  # one place, and the callers of a rank that was killed are not all known
    my_path, their_path = _path(mine, theirs, source), _path(theirs, mine, source)
    held, left_there, tries = _tries(my_path, their_path, pair)
    if pair.again and not _repeated(theirs, source):
        tries = [*((Way.LEFT, sort) for sort in _innermost(their_path)), *tries]
    if pair.stays and not _repeated(mine, source):
        tries = [*((Way.STAYED, sort) for sort in _innermost(my_path)), *tries]
    # no two ranks read the same time, so a test of a clock comes first
    clocked = [(way, [p for p in sort if rank_tests.reads_clock(p.guard.test, p.text)]) for way, sort in tries]
    for way, sort in (*clocked, *tries):
        found = [p for p in sort if _can_differ(p, bool(mine)) and not (pair.changed and _is_fixed(p))]
        if found and found[0].guard.kind is GuardKind.INSIDE:
            found = found[:1]  # the outermost of nested loops
        if pair.alone and sort is held:
            found = _surely_evaluated(my_path, found, bool(mine))
        made = ((p, _condition(p, _way_of(p, way, pair.stays))) for p in found)
        conditions = {c: _reads_rank(p) for p, c in made if c is not None}
        asked = [c for c, reads in conditions.items() if reads]
        if conditions and not asked and sort is held:
            # or all were in that branch, and this rank has left a loop before it
            by_data = (_condition(p, Way.LEFT) for p in left_there[-1] if _ends_by_data(p))
            conditions |= {c: False for c in by_data if c is not None}
        if conditions:
            return (asked or list(conditions))[-SHOWN:]
    return []


def _way_of(placed: _Placed, way: Way, stays: bool) -> Way:
    """Return the way of a condition, by what it leads to: a `break` ends the loop, not only this round; a handler may try again."""
    if isinstance(placed.guard.way_out, ast.Break):
        return {Way.ALONE: Way.STAYED, Way.SKIPPED: Way.LEFT}.get(way, way)
    tries_again = stays and way is Way.ALONE and isinstance(placed.guard.node, ast.ExceptHandler)
    return Way.AGAIN if tries_again else way


def tried_until_success(condition: Condition, source: Source) -> bool:
    """True if a condition is a handler of a `try` that is left for good once nothing was raised: `try: return save()`."""
    tree = tree_of(condition.file, source)
    tries = (x for x in ast.walk(tree) if isinstance(x, ast.Try)) if tree is not None else ()
    own = next((x for x in tries if any(h.lineno == condition.line for h in x.handlers)), None)
    last = (own.orelse or own.body)[-1:] if own is not None else ()
    return any(isinstance(x, (ast.Return, ast.Break)) for x in last)


def _tries(
    my_path: _Path, their_path: _Path, pair: Pair
) -> tuple[list[_Placed], list[list[_Placed]], list[tuple[Way, list[_Placed]]]]:
    """Return (branches that only this rank is in, what it can have missed the other's call by, all sorts, the likeliest first)."""
    # a rank that is still in a helper, which the other has left, may only be later
    held, *left = _sorts(my_path._replace(returned=False))
    if pair.ahead and their_path.returned:
        held, left = [], []
    held_there, *left_there = _sorts(their_path)
    left_there = [[p for p in sort if not pair.as_often(p.site.file, p.guard.node)] for sort in left_there]
    # what ends a round early in a loop of both: a round ago
    rounds = [p for p in their_path.common if isinstance(p.guard.way_out, ast.Continue)]
    missed = zip((Way.SKIPPED, Way.LEFT, Way.LEFT), left_there, strict=False)
    others_left = zip((Way.ALONE, Way.STAYED, Way.STAYED), left, strict=False)
    # the same in a loop that has ended for this rank, and has as many rounds on every rank
    ended = (
        p for p in their_path.own if p.guard.kind is GuardKind.INSIDE and p.key(GuardKind.ENDED) in their_path.others
    )
    even = (p for p in ended if p.shared and not _can_differ(p, alive=True))
    shorter = [p for loop in even for p in _ways_out(loop, (ast.Continue,))]
    tries = [(Way.ALONE, held), *missed, (Way.SKIPPED, held_there), *others_left]
    return held, left_there, [*tries, (Way.SKIPPED, rounds), (Way.ROUND, shorter)]


def short_rounds(stack: Sequence[Site], source: Source) -> list[Condition]:
    """Return what ends a round early in the innermost loop around a call that was made twice, without what follows in the round."""
    guards = (p for i in range(len(stack)) for p in reversed(_guards(stack, i, source, False)))
    loop = next((p for p in guards if p.guard.kind is GuardKind.INSIDE), None)
    ways = _ways_out(loop, (ast.Continue,)) if loop is not None else ()
    found = (p for p in ways if _can_differ(p, alive=True) and not _is_fixed(p))
    return [c for p in found if (c := _condition(p, Way.ROUND)) is not None][-SHOWN:]


def returns_before(site: Site, source: Source) -> list[Condition]:
    """Return the conditions under which a function returns before it reaches a line; those on the rank are left out."""
    found = (p for p in _guards([site], 0, source, False) if isinstance(p.guard.way_out, ast.Return))
    by_data = (p for p in found if _can_differ(p, alive=True) and not _reads_rank(p))
    return [c for p in by_data if (c := _condition(p, Way.SKIPPED)) is not None]


def in_no_branch(mine: Sequence[Site], theirs: Sequence[Site], source: Source) -> bool:
    """True if the first of two ranks is in no branch that the other is not in; False if a source cannot be read."""
    if any(tree_of(site.file, source) is None for site in (*mine, *theirs)):
        return False
    return not any(p.guard.kind is GuardKind.HOLDS for p in _path(mine, theirs, source).own)


def _sorts(path: _Path) -> tuple[list[_Placed], ...]:
    """Return the guards by which the other rank can have missed this rank's call, in four lists.

    1. Branches around the call; in a function that only this rank is in, also what leaves it before such a branch.
    2. Each `return`, `continue` or `break` before the call.
    3. Each statement that leaves a loop around the call.
    4. Loops around the call that have ended for the other rank.
    """
    on_rank = (i for i, p in enumerate(path.own) if _keeps_to_some(p.guard) and _reads_rank(p))
    own = path.own[: next(on_rank, len(path.own)) + 1]  # the other never evaluates what is in a branch for some ranks
    still_in = [p.guard.node for p in own if p.guard.kind is GuardKind.ENDED and p.key(GuardKind.INSIDE) in path.others]
    if path.once and still_in:  # nor what comes after a loop that it has not left
        own = own[
            : 1 + next(i for i, p in enumerate(own) if p.guard.node is still_in[0] and p.guard.kind is GuardKind.ENDED)
        ]
    holds, breaks, ends = [p for p in own if p.guard.kind is GuardKind.HOLDS], [], []
    passed = (p for p in own if p.guard.kind is GuardKind.PASSED and not isinstance(p.guard.way_out, ast.Raise))
    skips = [p for p in passed if not any(syntax.within(loop, p.guard.line) for loop in still_in)]
    for p in own:
        if p.guard.kind is GuardKind.INSIDE:
            behind = p.shared and p.key(GuardKind.ENDED) in path.others  # in its function: no `return` leads there
            breaks += _ways_out(p, (ast.Break,) if behind else _LEAVES)
            ends += [p] * (behind or (path.returned and not p.shared))
    # what ends a round does not end a loop that the other has left, if that ends by data
    first = next((i for i, p in enumerate(own) if p in ends and _ends_by_data(p)), len(own))
    skips = [p for p in skips if p in own[:first]]
    if holds:  # a rank that has left the function before has not evaluated the branch
        before = own[: own.index(holds[-1])]
        holds = [p for p in own if p in holds or (p in skips and p in before and not p.shared)]
    return holds, skips, breaks, ends


def _innermost(path: _Path) -> Iterator[list[_Placed]]:
    """Yield what leaves the innermost loop around a call, what leaves the loops around it if it is a `for`, which mostly ends by itself,
    and the loop; nothing if an exception may have left it."""
    loops = [p for p in reversed(path.own) if p.guard.kind is GuardKind.INSIDE]
    if not loops or any(isinstance(p.guard.node, ast.ExceptHandler) for p in path.own):
        return
    for loop in loops if isinstance(loops[0].guard.node, ast.For) else loops[:1]:
        yield [*_ways_out(loop, _LEAVES)]
    yield loops[:1]


def _surely_evaluated(path: _Path, found: list[_Placed], alive: bool) -> list[_Placed]:
    """Return these branches with the loops around them, if the other rank may never have run the function that they are in."""
    if not found or found[0].shared or any(_reads_rank(p) for p in found):
        return found
    around = path.own[: path.own.index(found[0])]
    loops = [p for p in around if p.guard.kind is GuardKind.INSIDE and _can_differ(p, alive)]
    return [p for p in (*loops, *found) if not _reads_gradient(p)]


def _repeated(stack: Sequence[Site], source: Source) -> bool:
    """True if a comprehension on a stack repeats what its site calls: that may be what makes a call again."""
    for site, callee in zip(stack, ("", *(x.function for x in stack)), strict=False):
        node = syntax.statement_at(site, source)
        parts = (x for x in ast.iter_child_nodes(node) if isinstance(x, ast.expr)) if node is not None else ()
        if any(guarding.repeats(x, callee) for part in parts for x in ast.walk(part)):
            return True
    return False


def _reads_gradient(placed: _Placed) -> bool:
    """True for a test whether there is a gradient: on all ranks there is, but where parameters are unused."""
    test = placed.guard.test
    return test is not None and any(isinstance(x, ast.Attribute) and x.attr == "grad" for x in ast.walk(test))


def _ends_by_data(loop: _Placed) -> bool:
    """True if a loop over no data set has a test or a `break` that can differ between ranks in one round, so reads no counter."""
    if isinstance(loop.guard.node, (ast.For, ast.AsyncFor)) and _can_differ(loop, alive=True):
        return False
    ends = (*((loop,) if isinstance(loop.guard.node, ast.While) else ()), *_ways_out(loop, (ast.Break,)))
    return any(_can_differ(p, alive=True) and not rank_tests.reads_counter(p.guard.test) for p in ends)


def _is_fixed(placed: _Placed) -> bool:
    """True if a guard tests only what is set once in a rank: `if self.last`."""
    return placed.guard.test is not None and rank_tests.fixed(placed.guard.test, placed.text)


def _can_differ(placed: _Placed, alive: bool) -> bool:
    """True if a guard can be what differs; a rank that is alive has not ended its process."""
    guard, text = placed.guard, placed.text
    if guard.branch == "decorator":
        return _reads_rank(placed) or guarding.caches(guarding.text_of(guard, text))
    if isinstance(guard.node, LOOPS):
        return rank_tests.can_end_unevenly(guard.node, rank_tests.constants(text))
    left = alive and syntax.exits_process(guard.way_out)
    return not left and rank_tests.can_differ(guard.test, rank_tests.constants(text))


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
    mine, theirs = _from_one_caller(mine, theirs)
    if not mine or not theirs or not _path(theirs, mine, source).once:
        return []
    found = conditions_between(mine, theirs, source)
    return found if {c.way for c in found} == {Way.LEFT} else []


def left_around(after: Site | None, due: Site | None, made: Site | None, source: Source) -> list[Condition]:
    """Return the conditions by which a rank can have left the loop in which it made a call, and another was due.

    Args:
        made: The call that it made instead; nothing if that is in the function of the loop, too.
    """
    if after is None or due is None:
        return []
    ends, here = callers.frames([after.path[-1], due.path[-1]]), made.path if made is not None else ()
    places = {(x.file, x.function) for x in ends}
    if len(places) > 1 or any((x.file, x.function) in places for x in here):
        return []
    around, others = ([p for p in _guards([x], 0, source, True) if p.guard.kind is GuardKind.INSIDE] for x in ends)
    keys = {p.guard.key for p in others}
    loop = next((p for p in reversed(around) if p.guard.key in keys), None)
    for sort in ([*_ways_out(loop, _LEAVES)], [loop]) if loop is not None else ():
        found = (_condition(p, Way.LEFT) for p in sort if _can_differ(p, alive=True))
        if conditions := [c for c in found if c is not None]:
            return conditions[-SHOWN:]
    return []


# -- conditions on the rank --------------------------------------------------------------------------------------------


def rank_condition(mine: Sequence[Site], theirs: Sequence[Site], source: Source) -> Condition | None:
    """Return the condition on the rank that leads to one site of a program and not to another; None if there is none.

    Args:
        mine, theirs: The user's frames of two ranks, innermost first.
    """
    mine, theirs = _from_one_caller(mine, theirs)
    if not mine or not theirs or (mine[-1].file, mine[-1].function) != (theirs[-1].file, theirs[-1].function):
        return None
    found: _Placed | None = None
    path = _path(mine, theirs, source)
    for placed in path.own:
        if found is not None and placed.site != found.site:
            break  # the innermost condition in the outermost function with one
        guard, ways = placed.guard, []
        if (
            guard.kind is GuardKind.ENDED and placed.key(GuardKind.INSIDE) in path.others
        ):  # a loop that ended, by its `break`
            ways = [p._replace(guard=p.guard._replace(kind=GuardKind.ENDED)) for p in _ways_out(placed, (ast.Break,))]
        elif guard.kind is GuardKind.PASSED or _keeps_to_some(guard):
            ways = [placed]
        found = next((p for p in ways if _reads_rank(p)), found)
    if found is None:
        return None
    guard = found.guard
    names_it = rank_tests.names_one_rank(guard.test) is (guard.branch == "body")
    leaves = guard.kind is GuardKind.PASSED and names_it
    return _condition(found, Way.SKIPPED if leaves else Way.LEFT if guard.kind is GuardKind.ENDED else Way.ALONE)


def led_away(mine: Sequence[Site], theirs: Sequence[Site], source: Source) -> tuple[Condition, int] | None:
    """Return the condition on the rank that only one of two stacks is under, and which of the two it leads away: 0 or 1."""
    found = [rank_condition(a, b, source) for a, b in ((mine, theirs), (theirs, mine))]
    condition = found[0] or found[1]
    if condition is None or all(found):
        return None
    under = 0 if found[0] else 1
    return condition, 1 - under if condition.way is Way.SKIPPED else under


def enclosing(site: Site | None, source: Source, callee: str = "") -> Condition | None:
    """Return the innermost `if` whose body holds a site, on the rank or on data; None if there is none in its function.

    Args:
        callee: What the site calls, if that may be under a condition in its line: `f() if first else None`.
    """
    tree = tree_of(site.file, source) if site is not None else None
    if site is None or tree is None:
        return None
    kinds = (ast.If, ast.IfExp) if callee else ast.If
    around = [
        g for g in guarding.guards(tree, site.line, callee) if g.kind is GuardKind.HOLDS and isinstance(g.node, kinds)
    ]
    held = [g for g in around if g.branch == "body"]
    if not held:
        return None
    return Condition(site.file, held[-1].line, guarding.text_of(held[-1], source(site.file) or ""))


def call_under_rank(site: Site, files: Collection[str], rank: int, source: Source) -> Condition | None:
    """Return the condition on the rank under which one of the calls of a function is, directly or through its callers.

    Of a wrapper that every rank calls from several lines. None if there is no such condition, more than one,
    or one for another rank.

    Args:
        site: A line of the function.
        files: Where it may be called from.
    """
    found: dict[Condition, bool] = {}
    todo, seen = [(site, 0)], {(site.file, site.function)}
    while todo:
        callee, depth = todo.pop()
        for caller in (c for file in files for c in callers.calls_of(callee, source, file)):
            guards = _guards((caller, callee), 0, source, False)
            held = next((p for p in guards if _keeps_to_some(p.guard) and _reads_rank(p)), None)
            if held is not None and (condition := _condition(held, Way.ALONE)) is not None:
                found[condition] = rank_tests.may_hold_on(held.guard.test, rank)
            elif (caller.file, caller.function) not in seen and depth < CALLERS:
                seen.add((caller.file, caller.function))
                todo.append((caller, depth + 1))
    return next(iter(found)) if len(found) == 1 and all(found.values()) else None


def only_under(name: str, file: str, source: Source) -> Condition | None:
    """Return the `if` around the only call of a module in a file, `self.name(…)`, else the one that returns before it; None if there is
    none, or more than one call or `return`."""
    calls = [n for n in ast.walk(tree_of(file, source) or ast.Module([], [])) if isinstance(n, ast.Call)]
    calls = [n for n in calls if isinstance(n.func, ast.Attribute) and n.func.attr == name]
    if len(calls) != 1:
        return None
    site = Site(file, calls[0].lineno)
    if (around := enclosing(site, source, name)) is not None:
        return around
    before = returns_before(site, source)
    return before[0] if len(before) == 1 else None
