"""Reads from a source which conditions decide whether a line runs: its guards (control dependence on the syntax tree).

A guard is a statement or expression and the branch of it that the line needs, in program order from the start of the function:
the `if` around the line, an earlier `if` whose arm leaves (`return`, `continue`, `break`, `raise`, `sys.exit`), a loop that
it is in or that must have ended, an exception that must not have been raised, a decorator. Nothing is executed.
"""

from __future__ import annotations

import ast
import re
import tokenize
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import Enum, auto
from functools import lru_cache
from typing import NamedTuple

from distdiag.terms.launchers import LAUNCHERS

Source = Callable[[str], str | None]  # text of a source file by path, or None

MAX_TEXT = 1 << 20  # characters of a file; a longer one is not read
LOOPS = (ast.For, ast.AsyncFor, ast.While)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*FUNCTIONS, ast.ClassDef)
_EXITS = (ast.Return, ast.Break, ast.Continue, ast.Raise)
_Node = ast.stmt | ast.expr | ast.ExceptHandler | ast.match_case


class Kind(Enum):
    """How a guard decides about the line."""

    HOLDS = auto()  # the line is in this branch
    PASSED = auto()  # the line runs only if this branch, which leaves before it, was not taken
    INSIDE = auto()  # the line is in this loop
    ENDED = auto()  # the line runs only after this loop has ended


class Guard(NamedTuple):
    """One condition of a line.

    Attributes:
        node: The `if`, loop, handler, case, `with`, conditional expression or decorator.
        branch: The branch that the line is in, or that leaves before it: "body" or "orelse".
        test: What is tested; None for an exception.
        way_out: The statement that leaves in the branch of a PASSED guard; None if an exception skips the rest of a block.
        upto: For an exception that skips the rest of a `try` or `with`: the line that it skips, else 0.
    """

    kind: Kind
    node: _Node
    branch: str = "body"
    test: ast.expr | None = None
    way_out: ast.stmt | None = None
    upto: int = 0

    @property
    def key(self) -> tuple[object, ...]:
        """What it has in common with the same guard of another line."""
        place = self.node.pattern if isinstance(self.node, ast.match_case) else self.node
        return self.kind, self.branch, type(self.node), place.lineno, place.col_offset

    @property
    def line(self) -> int:
        """Line of the condition's text."""
        return self.node.pattern.lineno if isinstance(self.node, ast.match_case) else self.node.lineno


# -- the syntax tree ---------------------------------------------------------------------------------------------------


@lru_cache(16)
def parsed(text: str) -> ast.Module | None:
    """Return the syntax tree; None if the text is no program, too long, or nested too deeply."""
    if len(text) > MAX_TEXT:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the user's literals
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def tree_of(file: str, source: Source) -> ast.Module | None:
    """Return the syntax tree of a file, or None."""
    text = source(file)
    return parsed(text) if text else None


def within(node: ast.AST, line: int) -> bool:
    """True if a line lies in a statement, handler or case."""
    first, last = (node.pattern, node.body[-1]) if isinstance(node, ast.match_case) else (node, node)
    return first.lineno <= line <= (last.end_lineno or last.lineno)  # type: ignore[attr-defined]


class _Step(NamedTuple):
    owner: ast.AST
    field: str
    block: list[ast.stmt]
    at: int

    @property
    def node(self) -> ast.stmt:
        return self.block[self.at]


def _way(tree: ast.Module, line: int) -> Iterator[_Step]:
    """Yield the blocks around a line from the module inwards, each with the index of the statement that has the line."""
    owner: ast.AST | None = tree
    while owner is not None:
        blocks = (
            (field, getattr(owner, field, None)) for field in ("body", "orelse", "finalbody", "handlers", "cases")
        )
        steps = (
            _Step(owner, field, block, i)
            for field, block in blocks
            if isinstance(block, list)
            for i, child in enumerate(block)
            if within(child, line)
        )
        step = next(steps, None)
        if step is not None:
            yield step
        owner = step.node if step is not None else None


def statement(tree: ast.Module, line: int) -> ast.stmt | None:
    """Return the innermost statement with a line."""
    return next((step.node for step in reversed(list(_way(tree, line)))), None)


def function(tree: ast.Module, line: int) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the innermost function around a line; two classes may each have a `run`."""
    around = [step.node for step in _way(tree, line)]
    return next((node for node in reversed(around) if isinstance(node, FUNCTIONS)), None)


def class_around(tree: ast.Module | None, line: int) -> str:
    """Return the name of the innermost class around a line, or nothing."""
    around = [step.node for step in _way(tree, line)] if tree is not None else []
    return next((node.name for node in reversed(around) if isinstance(node, ast.ClassDef)), "")


class Nested(NamedTuple):
    """A statement in a block: the condition that it is under there, and whether a loop inside the block is around it."""

    statement: ast.AST
    guard: Guard | None = None
    in_loop: bool = False


def exits(block: Sequence[ast.stmt]) -> Iterator[tuple[ast.stmt, Guard | None]]:
    """Yield the statements in a block that leave it, in program order, each with what it passes; None if it always leaves.

    A `break` or `continue` leaves only a loop around the block.
    """
    for node, guard, in_loop in _nested(block):
        leaves = isinstance(node, _EXITS) and not (in_loop and isinstance(node, (ast.Break, ast.Continue)))
        if isinstance(node, ast.stmt) and (leaves or exits_process(node)):
            yield node, guard._replace(way_out=node) if guard is not None else None


def _nested(block: Sequence[ast.stmt]) -> Iterator[Nested]:
    """Yield the statements in a block and in blocks inside it, in program order."""
    todo = [Nested(node) for node in reversed(block)]
    while todo:
        about = todo.pop()
        yield about
        node, inner = about.statement, []
        for field in ("body", "handlers", "orelse", "finalbody", "cases") if not isinstance(node, _SCOPES) else ():
            in_loop = about.in_loop or (isinstance(node, LOOPS) and field == "body")
            for child in getattr(node, field, ()):
                guard = about.guard
                if isinstance(node, ast.If):
                    guard = Guard(Kind.PASSED, node, field, node.test)
                elif isinstance(child, ast.ExceptHandler):
                    guard = Guard(Kind.PASSED, child)
                elif isinstance(child, ast.match_case) and isinstance(node, ast.Match):
                    guard = Guard(Kind.PASSED, child, test=node.subject)
                inner.append(Nested(child, guard, in_loop))
        todo += reversed(inner)


def exits_process(node: ast.AST | None) -> bool:
    """True for `sys.exit(…)`, `os._exit(…)`, `exit(…)`, `quit(…)`."""
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and name_of(call.func) in ("exit", "_exit", "quit")


def name_of(node: ast.AST | None) -> str:
    """Return the last part of a name: `c` of `a.b.c`."""
    return getattr(node, "attr", None) or getattr(node, "id", None) or ""


def code_of_line(text: str, line: int) -> str:
    """Return a line of a program without its comment; an empty text if there is no such line."""
    lines = text.splitlines()
    code = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    if "#" not in code:
        return code
    with suppress(tokenize.TokenError, SyntaxError):  # the line may continue in the next one
        for token in tokenize.generate_tokens(iter([code]).__next__):
            if token.type == tokenize.COMMENT:
                return code[: token.start[1]].rstrip()
    return code


def text_of(guard: Guard, text: str) -> str:
    """Return a condition as the program has it: the line of a statement or decorator, or what an expression tests."""
    node, test = guard.node, guard.test
    if isinstance(node, ast.BoolOp) and test is not None:
        return f"{ast.get_source_segment(text, test)} {'and' if isinstance(node.op, ast.And) else 'or'} …"
    if isinstance(node, (ast.expr, ast.With, ast.AsyncWith)) and test is not None and test is not node:
        return f"if {ast.get_source_segment(text, test)}"
    return code_of_line(text, guard.line)


# -- guards ------------------------------------------------------------------------------------------------------------


@lru_cache(512)
def guards(tree: ast.Module, line: int, callee: str = "") -> tuple[Guard, ...]:
    """Return the guards of a line in program order from the start of its function; of the module if it is in none.

    Args:
        callee: Name of the function that the line calls, if known: which part of an expression runs.
    """
    out: list[Guard] = []
    node: ast.stmt | None = None
    for step in _way(tree, line):
        out += _around(step, line)
        if step.field not in ("handlers", "cases"):
            for earlier in step.block[: step.at]:
                out += (guard for _, guard in exits([earlier]) if guard is not None)
                out += (_loop(Kind.ENDED, x.statement) for x in _nested([earlier]) if isinstance(x.statement, LOOPS))
        node = step.node
        if isinstance(node, _SCOPES):  # a condition around a function's definition does not apply to its calls
            out = [Guard(Kind.HOLDS, x, "decorator", x) for x in node.decorator_list]
    if isinstance(node, LOOPS) and line < node.body[0].lineno:
        out.append(_loop(Kind.INSIDE, node))
    if node is not None and not isinstance(node, _SCOPES):
        out += _in_expression(node, callee)
    return tuple(out)


def _loop(kind: Kind, node: ast.For | ast.AsyncFor | ast.While) -> Guard:
    return Guard(kind, node, test=node.test if isinstance(node, ast.While) else node.iter)


def _around(step: _Step, line: int) -> Iterator[Guard]:
    """Yield what the statement around a block lets it run by."""
    owner = step.owner
    match owner:
        case ast.If() if line > (owner.test.end_lineno or 0) or not _calls_other(owner.test):
            yield Guard(Kind.HOLDS, owner, step.field, owner.test)
        case ast.For() | ast.AsyncFor() | ast.While():
            yield _loop(Kind.INSIDE if step.field == "body" else Kind.ENDED, owner)
        case ast.Try() if step.field in ("body", "orelse"):
            for handler in owner.handlers:
                if not isinstance(handler.body[-1], ast.Raise) and not exits_process(handler.body[-1]):
                    yield Guard(Kind.PASSED, handler, upto=line)
        case ast.With() | ast.AsyncWith() if any(_called_in(x.context_expr) & {"suppress"} for x in owner.items):
            yield Guard(Kind.PASSED, owner, upto=line)
        case ast.With() | ast.AsyncWith():
            for part in (x for item in owner.items for x in ast.walk(item.context_expr) if isinstance(x, ast.IfExp)):
                if "no_sync" in _called_in(part.body) ^ _called_in(part.orelse):  # DDP exchanges gradients, or does not
                    branch = "orelse" if "no_sync" in _called_in(part.body) else "body"
                    yield Guard(Kind.HOLDS, owner, branch, part.test)
        case ast.ExceptHandler():
            yield Guard(Kind.HOLDS, owner)
        case ast.Match() if isinstance(case := step.node, ast.match_case):
            yield Guard(Kind.HOLDS, case, test=owner.subject)


def _in_expression(node: ast.stmt, callee: str) -> Iterator[Guard]:
    """Yield expressions that call something in one branch: `f() if first else None`, `first and f()`, `[f(x) for … if …]`."""
    own = [x for x in ast.iter_child_nodes(node) if isinstance(x, (ast.expr, ast.withitem))]  # not the blocks inside
    in_all = set().union(*map(_called_in, own))
    for part in (x for child in own for x in ast.walk(child)):
        found: list[tuple[ast.expr, str, list[ast.expr]]] = []
        match part:
            case ast.IfExp():
                found = [(part.test, arm, [getattr(part, arm)]) for arm in ("body", "orelse")]
            case ast.BoolOp():
                found = [(part.values[0], "body", part.values[1:])]
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                found = [(test, "body", [part.elt]) for loop in part.generators for test in loop.ifs]
        called = [set().union(*map(_called_in, arm)) for _, _, arm in found]
        if callee in in_all:
            found = [x for x, names in zip(found, called, strict=True) if callee in names]
        else:
            found = [x for x, names in zip(found, called, strict=True) if names]
        if len(found) == 1:  # two branches that call are one way as good as the other
            ((test, branch, _),) = found
            yield Guard(Kind.HOLDS, part, branch, test)  # type: ignore[arg-type]


def _called_in(node: ast.AST) -> set[str]:
    """Return the names of what is called in an expression."""
    return {name_of(x.func) or "()" for x in ast.walk(node) if isinstance(x, ast.Call)}


def _calls_other(test: ast.expr) -> bool:
    """True if a test calls more than what asks for the rank or is the same on all ranks: that may be the call in its line."""
    return any(isinstance(x, ast.Call) and not reads_rank(x.func) and can_differ(x.func) for x in ast.walk(test))


def other_branch_calls(guard: Guard) -> bool:
    """True if the other branch of an `if` calls something, too: the ranks' branches may belong together."""
    if not isinstance(guard.node, (ast.If, ast.IfExp)):
        return False
    other = getattr(guard.node, "orelse" if guard.branch == "body" else "body")
    return any(map(_called_in, other if isinstance(other, list) else [other]))


def made_anew(text: str) -> Guard | None:
    """Return the `if` under which a function returns a new tensor, which no gradient flows through, and else a computed one.

    None if there is no such function in the file, or more than one such `if`.
    """
    found = []
    for node in ast.walk(parsed(text) or ast.Module([], [])):
        if isinstance(node, FUNCTIONS):
            ways = [(way, guard) for way, guard in exits(node.body) if isinstance(way, ast.Return)]
            new = [guard for way, guard in ways if _makes_tensor(way.value)]
            if len(new) < len(ways):
                found += [guard for guard in new if guard is not None and isinstance(guard.node, ast.If)]
    return found[0] if len(found) == 1 else None


def _makes_tensor(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and name_of(value.func) in _NEW_TENSORS


def may_end_early(text: str, line: int) -> bool:
    """True if the `for` statement at `line` may stop before its iterator does, or is not found.

    True for a `break` or `return` in the loop, or `zip`, `islice` over the loader.
    """
    for node in ast.walk(parsed(text) or ast.Module([], [])):
        if isinstance(node, (ast.For, ast.AsyncFor)) and node.iter.lineno <= line <= (node.iter.end_lineno or line):
            ends = any(isinstance(way_out, (ast.Break, ast.Return)) for way_out, _ in exits(node.body))
            return ends or bool(_called_in(node.iter) & {"zip", "islice", "takewhile", "cycle"})
    return True


# -- what a condition reads --------------------------------------------------------------------------------------------

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_VARIABLES = tuple(name for launcher in LAUNCHERS for name in (launcher.rank, launcher.local))  # environment variables
_FIRST = {"main", "master", "chief", "leader", "primary", "coordinator"}  # words for one rank
_NO_RANK = {"thread", "lora", "low", "matrix", "full", "svd", "loss"}  # `lora_rank` is a size
_COUNTERS = {
    "step", "steps", "epoch", "i", "j", "it", "idx", "iteration", "batch_idx", "batch", "global_step", "__name__",
}  # fmt: skip
# functions and values that are equal on all ranks of a job
_SAME = {
    "dist", "torch", "distributed", "is_initialized", "is_available", "is_torchelastic_launched", "get_world_size", "world_size",
    "world", "num_replicas", "self", "len", "range", "enumerate",
}  # fmt: skip
# functions whose result has no graph
_NEW_TENSORS = {
    "zeros", "ones", "full", "empty", "tensor", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "detach",
}  # fmt: skip
# containers of submodules: the ranks of a job build the same module
_OF_MODULES = {"ModuleList", "ModuleDict", "Sequential", "ParameterList"}


def can_differ(test: ast.expr | None, constant: frozenset[str] = frozenset()) -> bool:
    """True if a condition can differ between ranks: not if it tests only a loop counter, or what is equal in a whole job."""
    if test is None:
        return True
    same = _COUNTERS | _SAME | constant
    intervals = (
        n.right for n in ast.walk(test) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod) and _counts(n.left)
    )
    interval = {id(n) for right in intervals for n in ast.walk(right)}  # `step % self.every`
    return not {name_of(n) for n in ast.walk(test) if id(n) not in interval} - {""} <= same


def _counts(value: ast.expr) -> bool:
    names = _names(value)
    return bool(names & _COUNTERS) and names <= _COUNTERS | _SAME


def can_end_unevenly(loop: ast.For | ast.AsyncFor | ast.While, constant: frozenset[str] = frozenset()) -> bool:
    """True if the number of rounds of a loop can differ between ranks; not in `range(9)`, `while True`."""
    if isinstance(loop, ast.While):
        return can_differ(loop.test, constant)
    return not _names(loop.iter) <= _SAME | constant


@lru_cache(16)
def constants(text: str) -> frozenset[str]:
    """Return the names that are equal on all ranks at one point of the program.

    Those that a module assigns once, to a literal: `STEPS = 400`, or to a container of modules: `self.experts`; and those that only
    count: `for k in range(9)`, `for k, x in enumerate(…)`, also where they are handed on under the same name.
    """
    tree = parsed(text) or ast.Module([], [])
    values = (node for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call))
    modules = Counter(
        name_of(node.targets[0])
        for node in values
        if name_of(node.value.func) in _OF_MODULES  # type: ignore[attr-defined]
    )
    stored = Counter(n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    literal = {
        node.targets[0].id
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.targets[0], ast.Name)
    }
    given = Counter(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    changed = {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    loops = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.For, ast.comprehension)) and isinstance(node.iter, ast.Call)
    ]
    counted = Counter(name_of(target) for node in loops if (target := _counter(node)) is not None)
    counters = {name for name, times in counted.items() if name and times == given[name]}
    layers = {name for name, times in modules.items() if times == given[name] + stored[name]}
    return frozenset(layers | counters).union(name for name in literal - changed if given[name] == 1)


def _counter(loop: ast.For | ast.comprehension) -> ast.expr | None:
    """Return the variable of a loop that counts its rounds."""
    called = name_of(loop.iter.func) if isinstance(loop.iter, ast.Call) else ""
    if called == "enumerate" and isinstance(loop.target, ast.Tuple):
        return loop.target.elts[0]
    return loop.target if called == "range" else None


def reads_rank(test: ast.expr | None, variables: frozenset[str] = frozenset()) -> bool:
    """True if a condition tests the rank. `variables`: names that hold it, see `rank_variables`."""
    if test is None:
        return False
    names = _names(test)
    variable = any(isinstance(n, ast.Constant) and n.value in _VARIABLES for n in ast.walk(test))
    return variable or bool(names & variables) or any(map(_means_rank, names))


def names_one_rank(test: ast.expr | None) -> bool:
    """True if a test holds for the rank that it names: `rank == 1`, `is_main`; not for `rank`, `rank != 0`, `not is_main`."""
    for part in test.values if isinstance(test, ast.BoolOp) else [test]:
        if isinstance(part, ast.Compare) and reads_rank(part):
            return all(isinstance(op, ast.Eq) for op in part.ops)
        if _means_rank(name_of(part)) and "rank" not in _words(name_of(part)):
            return True
    return False


def may_hold_on(test: ast.expr | None, rank: int) -> bool:
    """False for a test that names one rank by its number, `rank == 1`, or as the first, `is_global_zero`, if that is another rank."""
    for part in test.values if isinstance(test, ast.BoolOp) else [test]:
        if isinstance(part, ast.Compare) and reads_rank(part) and isinstance(part.ops[0], ast.Eq):
            numbers = [x.value for x in (part.left, *part.comparators) if isinstance(x, ast.Constant)]
            return not numbers or rank in numbers
        if names_one_rank(part):
            return rank == 0
    return True


def _names(node: ast.AST) -> set[str]:
    return set(map(name_of, ast.walk(node))) - {""}


def _words(name: str) -> set[str]:
    return {word.lower() for word in _WORDS.findall(name)}


def _means_rank(name: str) -> bool:
    """True for a name that holds the rank or whether it is a certain one: `local_rank`, `is_main_process`, `is_global_zero`."""
    words = _words(name)
    zero = {"zero"} < words and bool(words & {"global", "local", "world", "process"})
    one = "rank" in words or bool(words & _FIRST) or zero or ("process" in words and bool(words & {"index", "id"}))
    return (one or words == {"should", "save"}) and not words & _NO_RANK


@lru_cache(16)
def rank_variables(text: str) -> frozenset[str]:
    """Return variables, properties and functions that hold the rank or a comparison with it.

    `r = dist.get_rank()`, `first = rank == 0`, `def boss(self): return self.rank == 0`.
    """
    pairs: list[tuple[ast.AST | str, ast.expr | None]] = []
    for node in ast.walk(parsed(text) or ast.Module([], [])):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs += zip(target.elts, value.elts, strict=False) if both else [(target, value)]  # type: ignore[union-attr]
        elif isinstance(node, FUNCTIONS) and isinstance(last := node.body[-1], ast.Return):
            pairs.append((node.name, last.value))
    return frozenset(
        name
        for given, value in pairs
        if (name := given if isinstance(given, str) else name_of(given)) and _is_rank(value)
    )


def _is_rank(value: ast.expr | None) -> bool:
    """True for a call that returns the rank, an environment variable with it, and a comparison of it."""
    if isinstance(value, ast.Compare):
        return reads_rank(value)
    if isinstance(value, ast.Call):
        variable = any(isinstance(n, ast.Constant) and n.value in _VARIABLES for n in ast.walk(value))
        return variable or reads_rank(value.func)
    return False
