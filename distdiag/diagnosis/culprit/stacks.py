"""Evidence for stacks, which have no counts: which side is past the call that the other is in, and the rounds of a loop.

Where calls are counted, other witnesses know who made one call less. This can suspect, and prove nothing.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from distdiag.diagnosis.culprit import paths
from distdiag.diagnosis.culprit.callers import function_key
from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.model import rank_tests, syntax
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.guards import Guard, GuardKind, guards, on_stack
from distdiag.diagnosis.model.snapshot import RankState, Site
from distdiag.diagnosis.model.syntax import LOOPS, Source, name_of
from distdiag.diagnosis.text.incident import verb
from distdiag.diagnosis.text.phrases import at
from distdiag.terms.operations import family

States = Mapping[int, RankState]
_MESSAGES = {"send", "recv", "isend", "irecv", "batch_isend_irecv", "backward"}
_OF_OBJECT = re.compile(r"[A-Za-z_]\w*\.(.+)")
_KNOWN = frozenset(dir(builtins))


# -- who is further -------------------------------------------------------------------------------------------------------


def ahead(case: Case) -> Testimony | None:
    if case.snapshot.source != "stacks" or not case.tie:
        return None
    first, second = case.sides
    return between(case.states, first, second, case.source)


def between(states: States, first: Sequence[int], second: Sequence[int], source: Source) -> Testimony | None:
    """Accuse the one of two sides that is ahead of the other; nobody if both, or neither, can be."""
    sides = (first, second), (second, first)
    for odd, rest in sides:
        mine, theirs = states[odd[0]], states[rest[0]]
        if mine.phase == "forward" and theirs.phase == "backward":  # the forward of that step came before
            is_in = f"{rank_list(odd)} {verb(odd, 'is', 'are')} in the next forward"
            return Testimony(ranks=tuple(odd), text=f"; {is_in}, without the backward{at(theirs.current_site)}")
    found = [(odd, rest) for odd, rest in sides if _has_passed(states[odd[0]], states[rest[0]], source)]
    if len(found) != 1:
        return None
    ((odd, rest),) = found
    passed = f"{verb(odd, 'has', 'have')} passed{at(states[rest[0]].current_site).removeprefix(' at')}"
    text = f"; {rank_list(odd)} {passed}, where {rank_list(rest)} still {verb(rest, 'is', 'are')}"
    return Testimony(ranks=tuple(odd), text=text)


def in_cycle(case: Case) -> Testimony | None:
    """Accuse the rank from which another waits for a message while it is already in a collective with others; else by their rounds."""
    waits = case.incident.waits
    if case.snapshot.source != "stacks":
        return None
    return (_without_sending(case) if len(waits) == 2 else None) or _by_rounds(case)


def _without_sending(case: Case) -> Testimony | None:
    waits = case.incident.waits
    message, collective = sorted(waits, key=lambda wait: not wait.p2p)
    calls = [message.calls[rank] for rank in message.ranks if rank in message.calls]
    if not message.p2p or collective.p2p or not calls or not all(call.op.endswith("recv") for call in calls):
        return None
    awaited = message.missing & set(collective.ranks)
    if len(message.missing) != 1 or not awaited or len(collective.ranks) < 2:
        return None
    (rank,) = awaited
    where = collective.calls.get(rank)
    place = at(where.site) if where is not None else ""
    return Testimony(ranks=(rank,), text=f"; rank {rank} went on to the next collective{place} without sending")


def _has_passed(mine: RankState, theirs: RankState, source: Source) -> bool:
    """True if a rank is at a later line of the innermost function that it shares with another.

    Not if it is under a condition that the other is not under: then the other may have left out this call.
    """
    for a, b in zip(mine.user_stack[::-1], theirs.user_stack[::-1], strict=False):
        if a != b:
            later = (a.file, a.function) == (b.file, b.function) and a.line > b.line
            return later and paths.in_no_branch(mine.user_stack, theirs.user_stack, source)
    return False


# -- rounds of a loop -----------------------------------------------------------------------------------------------------
# Of ranks in one round, those at the latest line have made the call that others still are in. So these left one out before, or the others made
# one more. If the source has a way for one of the two only, and that names one rank, it is accused; whatever it leaves open accuses nobody.


class _Loop(NamedTuple):
    """The loop, and which ranks are where in it; `depth`: the frame that has it, from the outermost."""

    file: str
    text: str
    node: ast.For | ast.AsyncFor | ast.While
    depth: int
    behind: list[int]
    ahead: list[int]
    left: bool  # those ahead are past the loop


def _by_rounds(case: Case) -> Testimony | None:
    """Accuse the one rank that can have made another number of calls in the loop."""
    loop = _loop(case)
    if loop is None:
        return None
    behind = [case.states[q] for q in loop.behind]
    skips = any(True for state in behind for _ in _skips(loop, state, case))
    extras = {g.line: g for g in _extras(loop)}
    place, what = at(behind[0].user_stack[-1 - loop.depth]), rank_list(loop.behind)
    if skips and not extras and len(loop.ahead) == 1 < len(loop.behind) and loop.left:
        return Testimony(
            ranks=tuple(loop.ahead),
            text=f"; {rank_list(loop.ahead)} has ended the loop in which {what} still are{place}: it made fewer calls in a round",
        )
    if skips or len(extras) != 1 or len(loop.behind) != 1:
        return None
    (extra,) = extras.values()
    if not all(_is_false(extra, case.states[q], case) for q in loop.ahead):
        return None
    condition = f"`{extra.text}`{at(Site(loop.file, extra.line))}"
    return Testimony(
        ranks=tuple(loop.behind),
        text=f"; {rank_list(loop.ahead)} {verb(loop.ahead, 'has', 'have')} made that call{place} in the same round; only "
        f"{what} can have made one more before, under {condition}",
        advice=f"make no call under {condition} that other ranks must make, too; or let all ranks make it",
    )


def _loop(case: Case) -> _Loop | None:
    """Return the outermost loop in which some ranks are behind others: all wait, and their counters are equal."""
    stacks = {q: state.user_stack[::-1] for q, state in case.states.items()}
    if any(state.blocked is None for state in case.states.values()):
        return None
    shortest = min(map(len, stacks.values()), default=0)
    depth = next((i for i in range(shortest) if len({stack[i] for stack in stacks.values()}) > 1), None)
    if depth is None or len({function_key(stack[depth], case.source) for stack in stacks.values()}) > 1:
        return None
    sites = {q: stack[depth] for q, stack in stacks.items()}
    file, last = next(iter(sites.values())).file, max(site.line for site in sites.values())
    ahead, behind = ([q for q, site in sites.items() if (site.line == last) is late] for late in (True, False))
    text = case.source(file) or ""
    tree, line = syntax.parsed(text), max(sites[q].line for q in behind)
    around = (step.owner for step in syntax.way(tree, line)) if tree is not None else ()
    loops = (x for x in around if isinstance(x, LOOPS))
    node = next((x for x in loops if all(syntax.within(x, sites[q].line) for q in behind)), None)
    if node is None:
        return None
    left = not syntax.within(node, last)
    counts = {_counter(node, case.states[q], depth) for q in (behind if left else sites)}
    if len(counts) > 1 or None in counts or (left and rank_tests.can_end_unevenly(node, rank_tests.constants(text))):
        return None
    return _Loop(file, text, node, depth, sorted(behind), sorted(ahead), left)


def _counter(loop: ast.For | ast.AsyncFor | ast.While, state: RankState, depth: int) -> int | None:
    """Return the value of a loop's variable; of a pair, of its first."""
    target = loop.target if not isinstance(loop, ast.While) else None
    target = target.elts[0] if isinstance(target, ast.Tuple) else target
    return state.names[-1 - depth].get(name_of(target)) if len(state.names) > depth else None


def _skips(loop: _Loop, state: RankState, case: Case) -> Iterator[Guard]:
    """Yield what can have kept a rank from a call in a round, on the path to it."""
    for guard in on_stack(state.user_stack[: len(state.user_stack) - loop.depth], case.source):
        outside = guard.depth == 0 and not syntax.within(loop.node, guard.line)
        if guard.node is not loop.node and not outside and _differs(guard):
            yield guard


def _extras(loop: _Loop) -> Iterator[Guard]:
    """Yield the conditions and uneven loops in which the loop, or a function that it calls, communicates."""
    tree = syntax.parsed(loop.text)
    assert tree is not None
    functions: dict[str, ast.AST] = {x.name: x for x in ast.walk(tree) if isinstance(x, syntax.FUNCTIONS)}
    names = (x.asname or x.name.split(".")[0] for x in ast.walk(tree) if isinstance(x, ast.alias))
    known = _KNOWN.union(names, (x.name for x in ast.walk(tree) if isinstance(x, ast.ClassDef)))
    asked: dict[str, bool | None] = {}
    todo: list[ast.AST] = [loop.node]
    seen: set[ast.AST] = set()
    while todo:
        scope = todo.pop()
        if scope in seen:
            continue
        seen.add(scope)
        calls = [x for x in ast.walk(scope) if isinstance(x, ast.Call)]
        todo += (functions[name_of(x.func)] for x in calls if name_of(x.func) in functions)
        talking = (x for x in calls if _communicates(x, functions, known, asked))
        for guard in (guard for call in talking for guard in guards(tree, call.lineno, name_of(call.func))):
            around = scope is loop.node and (guard.node is scope or not syntax.within(scope, guard.line))
            in_branch = guard.kind in (GuardKind.HOLDS, GuardKind.INSIDE, GuardKind.REPEATED) and not around
            if in_branch and _differs(guard := guard._replace(source=loop.text)):
                yield guard


def _communicates(
    call: ast.Call, functions: dict[str, ast.AST], known: frozenset[str], asked: dict[str, bool | None]
) -> bool:
    """True if a call may communicate: an operation, a module that is called by a variable, or a function of the file that does.

    Args:
        asked: The answers for functions; None for those that are being looked through.
    """
    name = name_of(call.func)
    if name in functions and name not in asked:
        asked[name] = None
        calls = (node for node in ast.walk(functions[name]) if isinstance(node, ast.Call))
        asked[name] = any(_communicates(inner, functions, known, asked) for inner in calls)
    if (answer := asked.get(name)) is not None:
        return answer
    variable = isinstance(call.func, ast.Name) and name not in known and name not in functions
    return family(name) is not None or name in _MESSAGES or variable


def _differs(guard: Guard) -> bool:
    """True if a guard can have another result on another rank in one round, and the opposite in another round."""
    repeats = guard.kind is GuardKind.REPEATED and not isinstance(guard.test, ast.Call)
    if isinstance(guard.way_out, ast.Raise) or repeats:
        return False
    ends = isinstance(guard.node, LOOPS) and any(guard.ways_out(ast.Break, ast.Return))
    return ends or (guard.can_differ() and not guard.is_fixed)


def _is_false(guard: Guard, state: RankState, case: Case) -> bool:
    """True if a rank is on a path where a part of this condition is false, of what never changes in a rank."""
    test = guard.test
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    wanted = {_of_object(part) for part in parts} - {None}
    guards = (x for x in on_stack(state.user_stack, case.source) if x.kind is GuardKind.HOLDS and x.branch == "orelse")
    return any(guard.is_fixed and _of_object(guard.test) in wanted for guard in guards)


def _of_object(test: ast.expr | None) -> str | None:
    """Return `link.after is None` of `stage.link.after is None`: what is tested of an object, whatever its name."""
    found = _OF_OBJECT.fullmatch(ast.unparse(test)) if isinstance(test, (ast.Compare, ast.Attribute)) else None
    return found[1] if found is not None else None
