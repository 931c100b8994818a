"""Completes and compares call paths: the user's frames of a rank, from the call to the start of the program."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Mapping, Sequence

from distdiag.diagnosis.model.snapshot import Call, RankState, Site, issue_stack
from distdiag.diagnosis.model.syntax import Source, function, name_of, statement_at, tree_of

# what the name of a function that makes a call has in common with the name of the operation
_ROOTS = ("gather", "scatter", "reduce", "broadcast", "barrier", "all_to_all", "send", "recv")
_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")  # frames of their own up to Python 3.11
COMPARED = 8  # ranks that wait, of which the one nearest to the culprit in the source is compared with it


def frames(stack: Sequence[Site]) -> Sequence[Site]:
    """Return the sites of a stack without the callers that one of them may know: equal frames are equal then."""
    return [Site(x.file, x.line, x.function) for x in stack]


def with_callers(stack: Sequence[Site], source: Source) -> tuple[Site, ...]:
    """Return the stack with callers that match what is below them.

    The innermost site of a killed rank is current, but its callers are from the last sample, which may be older. A caller at
    a line without such a call is moved to the only call of that function in its file.
    """
    out = list(stack[:1])
    rest = list(stack[1:])
    if torn(stack, source):
        out.append(_around(stack[0], source) or stack[0])
    while out and len(out) < len(stack) + 3 and not out[-1].function.startswith("<"):
        callee = out[-1]
        caller = rest.pop(0) if rest else None
        calls = calls_of(callee, source, callee.file)
        if caller is None or (calls and caller.file == callee.file and caller.key not in {c.key for c in calls}):
            if len(calls) != 1 or calls[0] in out:
                break
            caller = calls[0]
            rest = [x for x in rest if x.function != caller.function]
        out.append(caller)
    return tuple(out) if len(out) >= len(stack[:2]) else tuple(stack)


def torn(stack: Sequence[Site], source: Source) -> bool:
    """True if a stack begins in a comprehension, and goes on in another function than the one around it: that part is older."""
    around = _around(stack[0], source) if stack and stack[0].function in _COMPREHENSIONS else None
    return around is not None and [(x.file, x.function) for x in stack[1:2]] != [(around.file, around.function)]


def _around(site: Site, source: Source) -> Site | None:
    """Return the same line in the function around a comprehension, which runs where it stands."""
    tree = tree_of(site.file, source)
    around = function(tree, site.line) if tree is not None else None
    return Site(site.file, site.line, around.name) if around is not None else None


def call_stack(stack: Sequence[Site], host: Sequence[Site], source: Source) -> tuple[Site, ...]:
    """Return the user's frames at a call on a device, with its callers, although its function has returned on the host.

    The caller is the function on the host's stack that calls that function in exactly one line. Nothing is added if that is
    not so.
    """
    if len(stack) != 1:
        return tuple(stack)
    callee = stack[0]
    for i, frame in enumerate(host):
        # two calls in one line are one site
        calls = {c.line: c for c in calls_of(callee, source, frame.file, by_name=True) if c.function == frame.function}
        if calls:
            return (callee, *calls.values(), *host[i + 1 :]) if len(calls) == 1 else (callee,)
    return (callee,)


def stack_at(site: Site | None, state: RankState, source: Source) -> tuple[Site, ...]:
    """Return the frames at an earlier call, with the callers that its rank is still in."""
    if site is None:
        return ()
    found = issue_stack(site, state.user_stack)
    return found if len(found) > 1 else with_callers((site, *state.user_stack[-1:]), source)


def calls_of(callee: Site, source: Source, file: str, by_name: bool = False) -> list[Site]:
    """Return the sites in a file that call a function of this name; with `by_name` only `name`, `self.name`, `module.name`."""
    tree = tree_of(file, source)
    if tree is None:
        return []
    imports = (node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)))
    modules = {(a.asname or a.name).split(".")[0] for node in imports for a in node.names}
    out = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or name_of(node.func) != callee.function:
            continue
        owner = getattr(node.func.value, "id", "") if isinstance(node.func, ast.Attribute) else None
        if not by_name or owner in (None, "self", "cls") or owner in modules:
            around = function(tree, node.lineno)
            out.append(Site(file, node.lineno, around.name if around is not None else "<module>"))
    return out


def is_inside(call: Call, source: Source) -> bool:
    """True if the line of a collective calls nothing of its name: a library makes it, in what the line calls."""
    node = statement_at(call.site, source)
    roots = [root for root in _ROOTS if root in call.op]
    if node is None or not roots:
        return False
    called = (name_of(x.func) for x in ast.walk(node) if isinstance(x, ast.Call))
    return not any(root in name for name in called for root in roots)


def function_key(site: Site, source: Source) -> tuple[str, str, int]:
    """Return (file, name, first line) of the function around a site; line 0 if it is not known."""
    tree = tree_of(site.file, source)
    around = function(tree, site.line) if tree is not None else None
    return site.file, site.function, around.lineno if around is not None else 0


def equal_start(first: Iterable[object], second: Iterable[object]) -> int:
    """Return how many first items of two sequences are equal, in pairs."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def in_common(mine: Sequence[Site], theirs: Sequence[Site], source: Source) -> Sequence[Site]:
    """Return the outer part of a stack that is in functions which are on the other, too."""
    keys = ((function_key(x, source) for x in reversed(stack)) for stack in (mine, theirs))
    return mine[len(mine) - equal_start(*keys) :]


def dispatched(mine: Sequence[Site], theirs: Sequence[Site], source: Source) -> bool:
    """True if two stacks part in a line with one call, which called one function for one of them and another for the other.

    What is called there decides: no condition in either function has led them apart.
    """
    a, b = list(reversed(frames(mine))), list(reversed(frames(theirs)))
    same = equal_start(a, b)
    if not 0 < same < min(len(a), len(b)) or function_key(a[same], source) == function_key(b[same], source):
        return False
    line = statement_at(a[same - 1], source)
    return line is not None and sum(isinstance(node, ast.Call) for node in ast.walk(line)) == 1


def nearest(mine: Sequence[Site], others: Mapping[int, Sequence[Site]], source: Source) -> int:
    """Return the rank whose stack has the most functions in common with `mine`, from the outermost; the first of equals."""
    wanted = [function_key(x, source) for x in reversed(mine)]
    return max(others, key=lambda q: equal_start(wanted, (function_key(x, source) for x in reversed(others[q]))))
