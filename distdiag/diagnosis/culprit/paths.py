"""Finds where the paths of two ranks diverge: the conditions in the source that lead to one site and not to the other.

Unlike `rank_condition` this reads conditions on anything: an `if` on a loss or a length, an `except` that continues without the
call, a loop that ends earlier. So it explains a culprit and never decides who it is.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

from distdiag.diagnosis.culprit import rank_condition
from distdiag.diagnosis.culprit.rank_condition import Condition, Source
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Site

COMPARED = 8  # ranks that wait, of which the one nearest to the culprit in the source is compared with it
SHOWN = 2  # conditions, if several are possible
_COUNTERS = {
    "step", "steps", "epoch", "i", "j", "it", "idx", "iteration", "batch_idx", "batch", "global_step", "__name__",
}  # fmt: skip
# functions and values that are equal on all ranks of a job
_SAME = {
    "dist", "torch", "distributed", "is_initialized", "is_available", "is_torchelastic_launched", "get_world_size", "world_size",
    "world", "num_replicas", "self", "len",
}  # fmt: skip
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_Step = tuple[list[ast.stmt], int]


def parting(mine: Sequence[Site], theirs: Sequence[Site], source: Source) -> list[Condition]:
    """Return the conditions that can lead to one site and not to another; only those of the most likely sort.

    Args:
        mine, theirs: The user's frames of two ranks, innermost first. `mine` is empty if that rank has ended.
        source: Text of a source file by path, or None.
    """
    a, b = list(reversed(mine)), list(reversed(theirs))
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    if not b or (a and _function(a[0], source) != _function(b[0], source)):
        return []
    if a and a[-1] == b[-1] and (set(a) <= set(b) or set(b) <= set(a)):
        return []  # one place, and the callers of a rank that was killed are not all known
    for sort in (
        _holds_mine,
        _skips_theirs,
        _leaves_loop,
        _ends_loop,
        _holds_theirs,
        _skips_mine,
        _skips_round,
        _left_by_theirs,
        _stays_in_loop,
    ):
        found = list(dict.fromkeys(c for c in sort(a, b, common, source) if c is not None))
        asked = [c for c in found if _asks_for_rank(c, source)]
        if found:
            return (asked or found)[-SHOWN:]
    return []


def leaving(site: Site | None, theirs: Sequence[Site], source: Source) -> list[Condition]:
    """Return the conditions through which a rank that ended normally can have left the loop that another rank is in.

    Args:
        site: Its last site. If that is a call of `sys.exit`, the rank left there, and the `if` around it is the condition.
        theirs: The user's frames of the other rank, innermost first.
    """
    steps = _blocks_around(site, source) if site is not None else []
    if site is not None and steps and _exits_process(steps[-1][0][steps[-1][1]]):
        around = rank_condition.enclosing(site, source)
        return [] if around is None else [around]
    return parting((), theirs, source)


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


def with_callers(stack: Sequence[Site], source: Source) -> tuple[Site, ...]:
    """Return the stack with callers that match what is below them.

    The innermost site of a killed rank is current, but its callers are from the last sample, which may be older. A caller at a line
    without such a call is moved to the only call of that function in its file.
    """
    out = list(stack[:1])
    rest = list(stack[1:])
    while out and len(out) < len(stack) + 3 and not out[-1].function.startswith("<"):
        callee = out[-1]
        caller = rest.pop(0) if rest else None
        calls = _calls_of(callee, source, callee.file)
        if caller is None or (calls and caller.file == callee.file and caller.key not in {c.key for c in calls}):
            if len(calls) != 1 or calls[0] in out:
                break
            caller = calls[0]
            rest = [x for x in rest if x.function != caller.function]
        out.append(caller)
    return tuple(out) if len(out) >= len(stack[:2]) else tuple(stack)


def call_stack(stack: Sequence[Site], host: Sequence[Site], source: Source) -> tuple[Site, ...]:
    """Return the user's frames at a call on a device, with its callers, although its function has returned on the host.

    The caller is the function on the host's stack that calls that function in exactly one line. Nothing is added if that is not so.
    """
    if len(stack) != 1:
        return tuple(stack)
    callee = stack[0]
    for i, frame in enumerate(host):
        calls = {
            c.line: c for c in _calls_of(callee, source, frame.file, by_name=True) if c.function == frame.function
        }  # two calls in one line are one site
        if calls:
            return (callee, *calls.values(), *host[i + 1 :]) if len(calls) == 1 else (callee,)
    return (callee,)


def _calls_of(callee: Site, source: Source, file: str, by_name: bool = False) -> list[Site]:
    """Return the sites in a file that call a function of this name; with `by_name` only `name`, `self.name` and `module.name`."""
    text = source(file)
    tree = rank_condition.parsed(text) if text else None
    if tree is None:
        return []
    modules = {
        (a.asname or a.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for a in node.names
    }
    out = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        owner, name = _called(node.func)
        if name == callee.function and (not by_name or owner in (None, "self", "cls") or owner in modules):
            inside = "<module>"
            for block, at in rank_condition.path(tree, node.lineno):
                if isinstance(node_on_way := block[at], (ast.FunctionDef, ast.AsyncFunctionDef)):
                    inside = node_on_way.name
            out.append(Site(file, node.lineno, inside))
    return out


def _called(function: ast.expr) -> tuple[str | None, str | None]:
    """Return (owner, name) of a called function: `("self", "step")`; the owner is None for a plain name, "" for an expression."""
    if isinstance(function, ast.Attribute):
        return getattr(function.value, "id", ""), function.attr
    return None, getattr(function, "id", None)


# -- the sorts of conditions, most likely first ------------------------------------------------------------------------


def _ends_loop(a: list[Site], b: list[Site], common: int, source: Source) -> Iterator[Condition | None]:
    """Yield a loop that the other rank is in and this one has left: its iterator or condition ended it."""
    yield from _loops(b, a, common, source)
    yield from _loops_of_callees(b, a, common, source)


def _stays_in_loop(a: list[Site], b: list[Site], common: int, source: Source) -> Iterator[Condition | None]:
    yield from _loops(a, b, common, source)


def _loops(inside: list[Site], outside: list[Site], common: int, source: Source) -> Iterator[Condition | None]:
    if not inside[common:]:
        return
    frame = inside[common]
    other = _same_function(outside, common, frame, source)
    for block, at in _blocks_around(frame, source):
        node = block[at]
        if isinstance(node, _LOOPS) and other is not None and other > (node.end_lineno or other):
            yield _condition(frame, node, source)
            return  # the outermost of nested loops


def _loops_of_callees(
    inside: list[Site], outside: list[Site], common: int, source: Source
) -> Iterator[Condition | None]:
    """Yield the outermost loop of a function that one rank is in, if the other has returned from that function."""
    if len(inside) <= common + 1:
        return
    other = _same_function(outside, common, inside[common], source)
    if other is None or other <= inside[common].line:
        return
    for frame in inside[common + 1 :]:
        for block, at in _blocks_around(frame, source):
            if isinstance(block[at], _LOOPS):
                yield _condition(frame, block[at], source)
                return


def _holds_mine(a: list[Site], b: list[Site], common: int, source: Source) -> Iterator[Condition | None]:
    """Yield an `if` around this rank's call and not around the other's."""
    yield from _around(a, b, common, source)


def _holds_theirs(a: list[Site], b: list[Site], common: int, source: Source) -> Iterator[Condition | None]:
    yield from _around(b, a, common, source)


def _around(a: list[Site], b: list[Site], common: int, source: Source) -> Iterator[Condition | None]:
    for i, frame in enumerate(a[common:], common):
        other = _same_function(b, i, frame, source) if i == common else None
        for block, at in _blocks_around(frame, source):
            node = block[at]
            if isinstance(node, ast.If) and node.test.lineno < frame.line and _can_differ(node.test):
                inside = _part(node, frame.line)
                if other is None or not _within(node, other) or _part(node, other) is not inside:
                    yield _condition(frame, node, source)


def _skips_theirs(a: list[Site], b: list[Site], common: int, source: Source) -> Iterator[Condition | None]:
    """Yield an `if` before the other's call that leaves the block, or the handler of an exception that skips it."""
    yield from _before(b, a, common, source)


def _skips_mine(a: list[Site], b: list[Site], common: int, source: Source) -> Iterator[Condition | None]:
    yield from _before(a, b, common, source)


def _before(a: list[Site], b: list[Site], common: int, source: Source) -> Iterator[Condition | None]:
    for i, frame in enumerate(a[common:], common):
        other = _same_function(b, i, frame, source) if i == common else None
        for block, at in _blocks_around(frame, source):
            for node in block[:at]:
                between = other is None or not other <= frame.line or node.lineno > other
                for way_out in _exits_from_block(node) if between else ():
                    yield _condition(frame, way_out, source)
            if other is None or other < frame.line or not _within(block[at], other):
                for handler in _swallowing(block[at], frame.line):
                    yield _condition(frame, handler, source)


def _skips_round(a: list[Site], b: list[Site], common: int, source: Source) -> Iterator[Condition | None]:
    """Yield a condition or handler in a loop of both ranks, before the other's call, that ends an iteration early."""
    if not a[common:] or not b[common:]:
        return
    for block, at in _blocks_around(b[common], source):
        node = block[at]
        if isinstance(node, _LOOPS) and _within(node, a[common].line):
            for earlier in node.body:
                for way_out in _exits_from_block(earlier) if (earlier.end_lineno or 0) < b[common].line else ():
                    if isinstance(way_out.body[-1], ast.Continue):
                        yield _condition(b[common], way_out, source)


def _leaves_loop(a: list[Site], b: list[Site], common: int, source: Source) -> Iterator[Condition | None]:
    """Yield a `break`, `return` or exit in a loop that the other rank is in and this one is not."""
    for i, frame in enumerate(b[common:] if a else b, common if a else 0):
        other = _same_function(a, i, frame, source) if i == common else None
        for block, at in _blocks_around(frame, source):
            node = block[at]
            if isinstance(node, _LOOPS) and (other is None or not _within(node, other)):
                for test in _exits(node.body, inner=False):
                    if not isinstance(test, ast.If) or _can_differ(test.test):
                        yield _condition(frame, test, source)


def _left_by_theirs(a: list[Site], b: list[Site], common: int, source: Source) -> Iterator[Condition | None]:
    """Yield a `break`, `return` or exit in a loop that this rank is in and the other is not."""
    if a and b:
        yield from _leaves_loop(b, a, common, source)


# -- reading the source ------------------------------------------------------------------------------------------------


def _same_function(frames: list[Site], i: int, frame: Site, source: Source) -> int | None:
    if i < len(frames) and _function(frames[i], source) == _function(frame, source):
        return frames[i].line
    return None


def _function(site: Site, source: Source) -> tuple[str, str, int]:
    """Return (file, name, first line) of the function around a site: two classes may each have a `run`; line 0 if not known."""
    text = source(site.file)
    tree = rank_condition.parsed(text) if text else None
    blocks = rank_condition.path(tree, site.line) if tree is not None else ()
    first = [block[at].lineno for block, at in blocks if isinstance(block[at], (ast.FunctionDef, ast.AsyncFunctionDef))]
    return site.file, site.function, first[-1] if first else 0


def nearest(mine: Sequence[Site], others: Mapping[int, Sequence[Site]], source: Source) -> int:
    """Return the rank whose stack has the most functions in common with `mine`, from the outermost on; the first of equals."""
    wanted = [_function(x, source) for x in reversed(mine)]

    def shared(stack: Sequence[Site]) -> int:
        theirs = [_function(x, source) for x in reversed(stack)]
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(wanted, theirs, strict=False)))

    return max(others, key=lambda q: shared(others[q]))


def _blocks_around(site: Site, source: Source) -> list[_Step]:
    """Return the blocks around a site, from its innermost function on."""
    text = source(site.file)
    tree = rank_condition.parsed(text) if text else None
    out: list[_Step] = []
    for block, at in rank_condition.path(tree, site.line) if tree is not None else ():
        if isinstance(block[at], _FUNCTIONS):
            out = []
        else:
            out.append((block, at))
    return out


def _within(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _part(node: ast.If, line: int) -> object:
    """Return which part of an `if` a line lies in."""
    return any(_within(x, line) for x in node.body)


def _leaves(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], (ast.Return, ast.Continue, ast.Break)) or _exits_process(body[-1])


def _exits_from_block(node: ast.stmt) -> list[ast.If | ast.ExceptHandler]:
    """Return the condition or the handlers of a statement that leave its block."""
    if isinstance(node, ast.If):
        return [node] if _leaves(node.body) and _can_differ(node.test) else []
    return [h for h in getattr(node, "handlers", ()) if _leaves(h.body)]


def _swallowing(node: ast.stmt, line: int) -> list[ast.ExceptHandler]:
    """Return the handlers of a `try` around a line that continue without the rest of its body."""
    if not isinstance(node, ast.Try) or not any(_within(x, line) for x in node.body):
        return []
    return [h for h in node.handlers if not isinstance(h.body[-1], ast.Raise) and not _exits_process(h.body[-1])]


def _exits_process(node: ast.stmt) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    name = getattr(call.func, "attr", None) or getattr(call.func, "id", "") if isinstance(call, ast.Call) else ""
    return name in ("exit", "_exit", "quit")


def _exits(body: list[ast.stmt], inner: bool) -> Iterator[ast.If | ast.ExceptHandler]:
    """Yield the conditions and handlers that leave a loop; the `break` of an inner loop leaves only that one."""
    for node in body:
        if isinstance(node, _FUNCTIONS):
            continue
        if isinstance(node, ast.If) and _ends(node.body, inner):
            yield node
        for handler in getattr(node, "handlers", ()):
            if _ends(handler.body, inner):
                yield handler
        for field in ("body", "orelse", "finalbody"):
            part = getattr(node, field, None)
            if isinstance(part, list):
                yield from _exits(part, inner or isinstance(node, _LOOPS))


def _ends(body: list[ast.stmt], inner: bool) -> bool:
    last = body[-1]
    return isinstance(last, ast.Return) or (isinstance(last, ast.Break) and not inner) or _exits_process(last)


def _can_differ(test: ast.expr) -> bool:
    """True if a condition can differ between ranks: not if it tests only a loop counter, or what is equal in a whole job."""
    names = {getattr(n, "attr", None) or getattr(n, "id", "") for n in ast.walk(test)} - {""}
    return bool(names - _COUNTERS - _SAME)


def _condition(site: Site, node: ast.stmt | ast.ExceptHandler, source: Source) -> Condition | None:
    text = rank_condition.code_of_line(source(site.file) or "", node.lineno)
    return Condition(site.file, node.lineno, text) if text else None


def _asks_for_rank(condition: Condition, source: Source) -> bool:
    return rank_condition.asks_for_rank(condition.text, source(condition.file) or "")
