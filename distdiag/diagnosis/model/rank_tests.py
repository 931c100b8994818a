"""Reads from a condition's syntax whether it tests the rank, and whether it can differ between ranks."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from distdiag.diagnosis.model.syntax import FUNCTIONS, name_of, parsed
from distdiag.terms.launchers import LAUNCHERS

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_VARIABLES = tuple(name for launcher in LAUNCHERS for name in (launcher.rank, launcher.local))  # environment variables
_FIRST = {"main", "master", "chief", "leader", "primary", "coordinator"}  # words for one rank
_NO_RANK = {"thread", "lora", "low", "matrix", "full", "svd", "loss"}  # `lora_rank` is a size
COUNTERS = {
    "step", "steps", "epoch", "i", "j", "it", "idx", "iteration", "batch_idx", "batch", "global_step", "__name__",
}  # fmt: skip
_SIZES = {"len", "sum", "numel", "size", "count", "nelement"}
CLOCKS = {"time", "monotonic", "perf_counter", "now"}
# functions and values that are equal on all ranks of a job
_SAME = {
    "dist", "torch", "distributed", "cuda", "is_initialized", "is_available", "is_torchelastic_launched", "get_world_size", "world_size",
    "world", "num_replicas", "self", "len", "range", "enumerate",
}  # fmt: skip
# containers of submodules, and what a module lists: the ranks of a job build the same module
_OF_MODULES = {"ModuleList", "ModuleDict", "Sequential", "ParameterList"}
# what a program registers once, mostly the same on all ranks
_REGISTERED = re.compile(r"(?:^|[._])(?:callbacks|hooks|plugins|listeners|observers)(?:\.(?:values|items)\(\))?$")
_LISTS = re.compile(r"\.(?:named_)?(?:parameters|modules|children|buffers)\(\)\)?$")


def can_differ(test: ast.expr | None, constant: frozenset[str] = frozenset()) -> bool:
    """True if a condition can differ between ranks: not if it tests only a loop counter, or what is equal in a whole job."""
    if test is None:
        return True
    same = COUNTERS | _SAME | constant
    modulos = (n for n in ast.walk(test) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod))
    interval = {id(n) for x in modulos if _counts(x.left) for n in ast.walk(x.right)}  # `step % self.every`
    return not {name_of(n) for n in ast.walk(test) if id(n) not in interval} - {""} <= same


def _counts(value: ast.expr) -> bool:
    names = _names(value)
    return bool(names & COUNTERS) and names <= COUNTERS | _SAME


def can_end_unevenly(loop: ast.For | ast.AsyncFor | ast.While, constant: frozenset[str] = frozenset()) -> bool:
    """True if the number of rounds of a loop can differ between ranks; not in `range(9)`, `while True`."""
    if isinstance(loop, ast.While):
        return can_differ(loop.test, constant)
    if _LISTS.search(ast.unparse(loop.iter)):
        return False
    return not _names(loop.iter) <= _SAME | constant


def is_over_registered(loop: ast.AST) -> bool:
    """True of `for callback in self.callbacks`."""
    return isinstance(loop, ast.For) and _REGISTERED.search(ast.unparse(loop.iter)) is not None


@lru_cache(16)
def constants(text: str) -> frozenset[str]:
    """Return the names that are equal on all ranks at one point of the program.

    Those that a module assigns once, to a literal: `STEPS = 400`, or to a container of modules: `self.experts`; those that only
    count: `for k in range(9)`, `for k, x in enumerate(…)`, also where they are handed on under the same name; parameters that get
    only literals: `def train(steps=90)`; and options of the command line: `args.steps`.
    """
    tree = parsed(text) or ast.Module([], [])
    nodes = list(ast.walk(tree))
    made = (x for x in nodes if isinstance(x, ast.Assign))
    modules = Counter(name_of(x.targets[0]) for x in made if _called(x.value) in _OF_MODULES)
    stored = _stored(tree)
    given = Counter(n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    pairs = (pair for x in tree.body if isinstance(x, ast.Assign) for pair in _assigned(x))
    literal = {name.id for name, value in pairs if _is_literal(value) and isinstance(name, ast.Name)}
    changed = {n.arg for n in nodes if isinstance(n, ast.arg)}
    loops = (x for x in nodes if isinstance(x, (ast.For, ast.comprehension)))
    counted = Counter(name_of(_counter(loop)) for loop in loops)
    counters = {name for name, times in counted.items() if times == given[name]}
    layers = {name for name, times in modules.items() if times == given[name] + stored[name]}
    handed = {name for name in _literal_parameters(nodes) if not given[name] + stored[name]}
    equal = {name for name in handed | counters | _options(nodes) if not _means_rank(name)}  # not `args.local_rank`
    return frozenset(layers | equal).union(name for name in literal - changed if given[name] == 1)


def _literal_parameters(nodes: list[ast.AST]) -> set[str]:
    """Return the parameters that get a literal in every call of their function, of which this file has at least one."""
    passed: dict[str, list[ast.Call]] = {}
    for node in nodes:
        if isinstance(node, ast.Call):
            passed.setdefault(name_of(node.func), []).append(node)
    literal: dict[str, bool] = {}
    for function in (n for n in nodes if isinstance(n, FUNCTIONS)):
        of, calls = function.args, passed.get(function.name, [])
        names = [a.arg for a in (*of.posonlyargs, *of.args)]
        defaults = dict(zip(reversed(names), reversed(of.defaults), strict=False))
        defaults |= {a.arg: value for a, value in zip(of.kwonlyargs, of.kw_defaults, strict=True) if value is not None}
        by_place = names[1:] if names[:1] in (["self"], ["cls"]) else names
        given = [_passed(call, by_place) for call in calls]
        for name in (*names, *(a.arg for a in of.kwonlyargs)):
            values = [None if words is None else words.get(name, defaults.get(name)) for words in given]
            fits = bool(values) and all(isinstance(value, ast.Constant) for value in values)
            literal[name] = literal.get(name, True) and fits
    return {name for name, fits in literal.items() if fits}


def _passed(call: ast.Call, by_place: list[str]) -> dict[str, ast.expr] | None:
    """Return what a call passes for each parameter; None for `*args`, which may hold anything."""
    words = {k.arg: k.value for k in call.keywords if k.arg}
    if len(words) < len(call.keywords) or any(isinstance(a, ast.Starred) for a in call.args):
        return None
    return words | dict(zip(by_place, call.args, strict=False))


def _options(nodes: list[ast.AST]) -> set[str]:
    """Return the variables that hold parsed options, with the attributes that are read from them alone and never set."""
    parsed_ = {name_of(x.targets[0]) for x in nodes if isinstance(x, ast.Assign) and _called(x.value) == "parse_args"}
    read: dict[str, bool] = {}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            of_options = isinstance(node.ctx, ast.Load) and name_of(node.value) in parsed_
            read[node.attr] = read.get(node.attr, True) and of_options
    return parsed_ | {name for name, of_options in read.items() if of_options and parsed_}


def _called(value: ast.expr) -> str:
    return name_of(value.func) if isinstance(value, ast.Call) else ""


def _is_literal(value: ast.expr) -> bool:
    """True for `400`, and for a tuple of such: `(0, 1)`, which cannot change."""
    return isinstance(value, ast.Constant) or (isinstance(value, ast.Tuple) and all(map(_is_literal, value.elts)))


def _stored(node: ast.AST) -> Counter[str]:
    """Return how often each attribute is set."""
    return Counter(n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))


def fixed(test: ast.expr, text: str) -> bool:
    """True if a condition tests only attributes that one `__init__` sets once, and names of a module: `self.last`, not `self.loss`."""
    tree = parsed(text) or ast.Module([], [])
    stored, made = _stored(tree), (n for n in ast.walk(tree) if isinstance(n, FUNCTIONS) and n.name == "__init__")
    once = {name for function in made for name in _stored(function) if stored[name] == 1}
    return bool(_names(test) & once) and _names(test) <= once | _SAME


def _counter(loop: ast.For | ast.comprehension) -> ast.expr | None:
    """Return the variable of a loop that counts its rounds."""
    called = _called(loop.iter)
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


def named_ranks(test: ast.expr | None) -> set[object] | None:
    """Return the ranks that a test names by number, `rank == 1`, or as the first one, `is_main`; empty if it has no number.

    None if it names none: `rank`, `rank != 0`, `not is_main`.
    """
    for part in test.values if isinstance(test, ast.BoolOp) else [test]:
        if isinstance(part, ast.Compare) and reads_rank(part):
            numbers: set[object] = {x.value for x in (part.left, *part.comparators) if isinstance(x, ast.Constant)}
            return numbers if all(isinstance(op, ast.Eq) for op in part.ops) else None
        if _means_rank(name_of(part)) and "rank" not in _words(name_of(part)):
            return {0}
    return None


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
    """Return variables, properties, functions and parameters that hold the rank or a comparison with it.

    `r = dist.get_rank()`, `first = rank == 0`, `def boss(self): return self.rank == 0`, `Log(enabled=rank == 0)`.
    """
    return frozenset(name for name, value in _named_values(text) if _is_rank(value))


@lru_cache(16)
def _clock_variables(text: str) -> frozenset[str]:
    """Return variables, properties and functions that hold a time: `elapsed = time.time() - start`."""
    return frozenset(name for name, value in _named_values(text) if _is_time(value))


def _is_time(value: ast.expr | None) -> bool:
    """True for a clock's time, and for what is computed of it or compared with it."""
    match value:
        case ast.Call():
            return name_of(value.func) in CLOCKS
        case ast.BinOp():
            return _is_time(value.left) or _is_time(value.right)
        case ast.Compare():
            return any(map(_is_time, (value.left, *value.comparators)))
        case ast.UnaryOp():
            return _is_time(value.operand)
    return False


def reads_clock(test: ast.expr | None, text: str) -> bool:
    """True if a condition tests the time, also by a variable or a function of its file."""
    return test is not None and (
        any(isinstance(x, ast.expr) and _is_time(x) for x in ast.walk(test))
        or bool(_names(test) & _clock_variables(text))
    )


def counts_from(text: str) -> str:
    """Return what `for epoch in range(first, last)` counts from, here `first`; empty if that is a constant, or another line."""
    tree = parsed(f"{text}: pass") if text.startswith("for ") else None
    loop = tree.body[0].iter if tree is not None and isinstance(tree.body[0], ast.For) else None
    if not isinstance(loop, ast.Call) or name_of(loop.func) != "range" or len(loop.args) < 2:
        return ""
    return "" if isinstance(loop.args[0], ast.Constant) else ast.unparse(loop.args[0])


def of_amount(text: str) -> bool:
    """True unless a condition is a decision: it may ask whether there is anything, or enough: `if not rows`, `if len(x) > 1`, `except`."""
    tree = parsed(f"{text}: pass") if text.startswith("if ") else None
    test = tree.body[0].test if tree is not None and isinstance(tree.body[0], ast.If) else None
    return not all(map(_decides, test.values if isinstance(test, ast.BoolOp) else [test]))


def _decides(part: ast.expr | None) -> bool:
    """True for a comparison of two values, `loss < best`, and a call that gives no size."""
    if isinstance(part, ast.UnaryOp):
        return _decides(part.operand)
    if isinstance(part, ast.Compare):
        return not any(isinstance(x, ast.Constant) and x.value in (0, 1) for x in part.comparators)
    return isinstance(part, ast.Call) and name_of(part.func) not in _SIZES


def reads_counter(test: ast.expr | None) -> bool:
    return test is not None and bool(_names(test) & COUNTERS)


def _named_values(text: str) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield what variables are assigned, functions return at their end and calls hand on, with their names."""
    pairs: list[tuple[ast.AST | str, ast.expr | None]] = []
    for node in ast.walk(parsed(text) or ast.Module([], [])):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            pairs += _assigned(node)
        elif isinstance(node, FUNCTIONS) and isinstance(last := node.body[-1], ast.Return):
            pairs.append((node.name, last.value))
        elif isinstance(node, ast.keyword) and node.arg:
            pairs.append((node.arg, node.value))
    for given, value in pairs:
        if name := given if isinstance(given, str) else name_of(given):
            yield name, value


def _assigned(node: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    """Return (target, value) of an assignment; of `a, b = 1, 2` each."""
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=False))
    return [(target, value)]


def _is_rank(value: ast.expr | None) -> bool:
    """True for a call that returns the rank, an environment variable with it, and a comparison of it, alone or with `and`, `or`, `not`."""
    if isinstance(value, ast.BoolOp):
        return any(map(_is_rank, value.values))
    if isinstance(value, ast.UnaryOp):
        return isinstance(value.op, ast.Not) and reads_rank(value.operand)
    if isinstance(value, ast.Compare):
        return reads_rank(value)
    if isinstance(value, ast.Call):
        variable = any(isinstance(n, ast.Constant) and n.value in _VARIABLES for n in ast.walk(value))
        return variable or reads_rank(value.func)
    return False
