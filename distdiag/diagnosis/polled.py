"""A rank that polls, or waits for a key of a store: its loop, its key, and where the branch of the other ranks may have hidden an error.

One rank writes a file or a key, the others wait for it. If the writer caught an exception and went on, they
wait for ever. So they do if it left the function before it wrote the file.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence

from distdiag.diagnosis.culprit.paths import returns_before
from distdiag.diagnosis.model import rank_tests, syntax
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.guards import Guard, GuardKind, handler_past, on_stack
from distdiag.diagnosis.model.snapshot import DEAD, RankState, Site
from distdiag.diagnosis.model.syntax import FUNCTIONS, Source, tree_of
from distdiag.diagnosis.text.phrases import at
from distdiag.diagnosis.waits.graph import WaitGraph
from distdiag.terms.ranks import by_value

_WRITES = {"save", "dump", "touch", "write_text", "write_bytes", "savez", "save_file"}
_SETS = {"set", "add", "compare_set", "append", "multi_set"}  # of a store
_GETS = {"get", "wait", "multi_get"}
_SHOWN = 4  # keys
_HASH = re.compile(r"-?[0-9a-f]*\d[0-9a-f]*")  # also a number
_NUMBER = re.compile(r"(?<!\d)\d{1,6}(?![0-9a-f])")
COUNTED = 1_000_000  # numbers below it may be those of steps


def polled_loop(site: Site | None, source: Source) -> tuple[str, Site, bool] | None:
    """Return (text, site, True if it polls) of the innermost `while` with a condition around a site.

    A loop polls if it sleeps between its tests; one that tests a clock ends by itself.
    """
    guards = on_stack((site,), source) if site is not None else ()
    loop = next((guard for guard in reversed(guards) if guard.kind is GuardKind.INSIDE), None)
    if loop is None or not isinstance(loop.node, ast.While) or isinstance(loop.node.test, ast.Constant):
        return None
    naps = any(isinstance(x, ast.Call) and syntax.name_of(x.func) == "sleep" for x in ast.walk(loop.node))
    return loop.text, loop.place, naps and not rank_tests.reads_clock(loop.node.test, loop.source)


def keys_text(waiting: Sequence[RankState], others: Iterable[RankState]) -> str:
    """Return `rank 1 waits for the key 'ready/3f' of a store, rank 2 for 'ready/9a'`; empty if no key is known.

    With the similar keys that other ranks have set last.
    """
    waited = by_value({r.rank: r.store_key for r in waiting if r.store_key})
    if not waited:
        return ""
    (key, ranks), *more = sorted(waited.items(), key=lambda item: item[1])
    who = rank_list(ranks) if more or len(waiting) > len(ranks) else "it" if len(ranks) == 1 else "each"
    verb = "waits" if len(ranks) == 1 or who == "each" else "wait"
    text = f"{who} {verb} for the key '{key}' of a store"
    text += "".join(f", {rank_list(q)} for '{name}'" for name, q in more[: _SHOWN - 1])
    text += f" and {len(more) - _SHOWN + 1} more keys" if len(more) >= _SHOWN else ""
    text += at(waiting[0].current_site)
    similar = {_HASH.sub("#", name) for name in waited}
    for r in [r for r in others if r.store_set not in waited and _HASH.sub("#", r.store_set) in similar][:_SHOWN]:
        text += f", and rank {r.rank} has set '{r.store_set}'{at(r.store_set_site)}"
    return text


def keys_differ(waiting: Sequence[RankState], others: Iterable[RankState], world: int) -> bool:
    """True if ranks ask for a key by different names: they count or name it differently.

    The keys of ranks at one line differ in more than a rank's number; or another rank has set a key that differs from theirs in
    more than a step's number. Only keys that are equal but for numbers and hashes are compared.
    """
    keys = {r.store_key for r in waiting if r.store_key}
    if len({_HASH.sub("#", key) for key in keys}) != 1:
        return False
    (pattern,) = {_HASH.sub("#", key) for key in keys}
    there = {r.store_set for r in others if _HASH.sub("#", r.store_set) == pattern}
    unlike = {_uncounted(key, world) for key in keys}
    return len(unlike) > 1 or (
        bool(there) and {_uncounted(k, COUNTED) for k in keys}.isdisjoint(_uncounted(k, COUNTED) for k in there)
    )


def _uncounted(key: str, below: int) -> str:
    return _NUMBER.sub(lambda found: "#" if int(found[0]) < below else found[0], key)


def nobody_sets(states: Sequence[RankState], graph: WaitGraph, world: int) -> bool:
    """True if every rank waits for a key of a store, or for ranks that do: no main thread is left to set one."""
    waits = {r.rank for r in states if r.store_key and r.blocked is None and r.life not in DEAD}
    return bool(waits) and len(states) >= world and {r.rank for r in states} == waits | graph.victims_of(waits)


def setter_of(key: str, states: Iterable[RankState]) -> RankState | None:
    """Return the rank that would set a key, by the keys that ranks have set last; None if that is not clear.

    Of `done/8/2`, where ranks 1 and 2 have set `done/8/1` and `done/7/2`, rank 2: the last number counts the ranks.
    """
    similar = _similar(key, states)
    if len(similar) < 2 or any(r.store_set == key for r in similar):
        return similar[0] if len(similar) == 1 and similar[0].store_set != key else None
    found: dict[int, set[int]] = {}  # by how much a number differs from that of the rank which has set it
    for number, *of in zip(_HASH.findall(key), *(_HASH.findall(r.store_set) for r in similar), strict=True):
        off = {int(x) - r.rank if x.isdecimal() else None for x, r in zip(of, similar, strict=True)}
        if len(off) == 1 and None not in off and number in of:
            found.setdefault(abs(off.pop() or 0), set()).add(of.index(number))
    nearest = found[min(found)] if found else set()
    return similar[nearest.pop()] if len(nearest) == 1 else None


def set_at(key: str, states: Iterable[RankState], source: Source) -> Site | None:
    """Return the only line that sets a key of this form in a store, in the files of the ranks' frames; its prefix may be of a PrefixStore."""
    calls = syntax.calls_in(sorted({site.file for r in states for site in r.user_stack}), source)
    sets = ((_form(call.args[0]), site) for call, site in calls if call.args and syntax.name_of(call.func) in _SETS)
    found = {site for form, site in sets if form and re.fullmatch(f"(?:.*/)?{form}", key)}
    return found.pop() if len(found) == 1 else None


def _form(name: ast.expr) -> str:
    """Return a pattern of the texts that a name of a key can have: `published/.+`; empty if nothing of it is constant."""
    parts = name.values if isinstance(name, ast.JoinedStr) else [name]
    texts = [x.value if isinstance(x, ast.Constant) and isinstance(x.value, str) else None for x in parts]
    return "".join(".+" if text is None else re.escape(text) for text in texts) if any(texts) else ""


def behind(states: Sequence[RankState]) -> tuple[RankState, RankState] | None:
    """Return (a rank that has left out a key, one that waits for it), if both wait, and others have set theirs of the same round."""
    for waiting in states:
        late = setter_of(waiting.store_key, states) if waiting.store_key else None
        if late is None or late is waiting or not late.store_key:
            continue
        wanted, own = _HASH.findall(waiting.store_key), _HASH.findall(late.store_set)
        others = [_HASH.findall(r.store_set) for r in _similar(waiting.store_key, states) if r is not late]
        apart = [i for i, (a, b) in enumerate(zip(wanted, own, strict=True)) if a != b]
        if others and apart and all(of[i] == wanted[i] for of in others for i in apart):
            return late, waiting
    return None


def _similar(key: str, states: Iterable[RankState]) -> list[RankState]:
    """Return the ranks whose newest key differs from this one in numbers only, if at all."""
    return [r for r in states if _HASH.split(r.store_set) == _HASH.split(key)]


def caught_around(stack: Sequence[Site], source: Source) -> tuple[str, Site] | None:
    """Return (text, site) of the innermost `except` around the frames of a stack after which the script goes on."""
    handler = handler_past(stack, source)
    return (handler.text, handler.place) if handler is not None else None


def hidden_error(stack: Sequence[Site], source: Source) -> tuple[str, Site] | None:
    """Return (text, site) of the first `except` that goes on, in what the other ranks' branch calls.

    Args:
        stack: The user's frames of the rank that polls, innermost first.
    """
    for guard in (x for x in on_stack(stack, source)[::-1] if x.on_rank):
        for handler in _handlers(tree_of(guard.site.file, source), guard):
            text = syntax.code_of_line(guard.source, handler.lineno).removesuffix(":")
            return text, Site(guard.site.file, handler.lineno)
    return None


def left_unwritten(stack: Sequence[Site], source: Source, key: bool = False) -> tuple[str, Site] | None:
    """Return (text, site) of the `if` by which a function leaves before it writes the file; None if there is not exactly one.

    It writes under a name that the poll tests, or from which a caller made that. A condition on the rank decides who writes.

    Args:
        stack: The user's frames of the rank that polls for a file, innermost first.
        key: It waits for a key of a store instead.
    """
    found: set[tuple[str, Site]] = set()
    names, writes = _polled_names(stack, source, key), _SETS if key else _WRITES
    for file in {frame.file for frame in stack}:
        tree = tree_of(file, source) or ast.Module([], [])
        for function in (x for x in ast.walk(tree) if isinstance(x, FUNCTIONS)):
            calls = (x for x in ast.walk(function) if isinstance(x, ast.Call) and syntax.name_of(x.func) in writes)
            written = [x.lineno for x in calls if _handed(x, _modules(tree)) & names]
            before = returns_before(Site(file, min(written)), source) if written else ()
            found.update((condition.text, Site(file, condition.line, function.name)) for condition in before)
    return found.pop() if len(found) == 1 else None


def _polled_names(stack: Sequence[Site], source: Source, key: bool) -> set[str]:
    """Return the names in the test of the loop, or in the call that waits for a key, and in the callers' arguments if they hold those."""
    names: set[str] = set()
    for i, site in enumerate(stack):
        tree = tree_of(site.file, source) or ast.Module([], [])
        modules = _modules(tree)
        if i or key:
            wanted = {stack[i - 1].function} if i else _GETS
            statement = syntax.statement_at(site, source) or ast.Pass()
            calls = (x for x in ast.walk(statement) if isinstance(x, ast.Call) and syntax.name_of(x.func) in wanted)
            handed = (word for x in calls for word in ([*x.args, *(k.value for k in x.keywords)] if key else [x]))
            names |= set().union(*(_handed(word, modules) for word in handed))
        else:
            loops = (guard.node for guard in on_stack((site,), source) if guard.kind is GuardKind.INSIDE)
            names |= set().union(*(_handed(x.test, modules) for x in loops if isinstance(x, ast.While)))
        function = syntax.function(tree, site.line)
        if function is None or not names & {x.arg for x in function.args.args} - {"self"}:
            break
    return names - rank_tests.COUNTERS - {"self", ""}


def _modules(tree: ast.Module) -> set[str]:
    return {(a.asname or a.name).split(".")[0] for x in ast.walk(tree) if isinstance(x, ast.Import) for a in x.names}


def _handed(node: ast.AST, modules: set[str]) -> set[str]:
    """Return the names in an expression, without functions of modules: of `os.path.exists(self.file(n))` self, file, n. Texts count, too."""
    root: ast.AST = node.func if isinstance(node, ast.Call) else node
    while isinstance(root, ast.Attribute):
        root = root.value
    inner = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call) and isinstance(root, ast.Name) and root.id in modules:
        inner = [*node.args, *(word.value for word in node.keywords)]
    own = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else syntax.name_of(node)
    return {own}.union(*(_handed(x, modules) for x in inner))


def _handlers(tree: ast.Module | None, guard: Guard) -> Iterator[ast.ExceptHandler]:
    """Yield the handlers after which a function goes on, in the other branch of an `if` and in the functions that it calls."""
    if tree is None or guard.kind is not GuardKind.HOLDS or not isinstance(guard.node, ast.If):
        return
    branch = getattr(guard.node, "orelse" if guard.branch == "body" else "body")
    called = {syntax.name_of(x.func) for node in branch for x in ast.walk(node) if isinstance(x, ast.Call)}
    functions = (x for x in ast.walk(tree) if isinstance(x, FUNCTIONS) and x.name in called)
    for inner in (x for node in (*branch, *functions) for x in ast.walk(node)):
        if isinstance(inner, ast.ExceptHandler) and not any(
            isinstance(x, ast.Raise) or syntax.exits_process(x) for x in ast.walk(inner)
        ):
            yield inner
