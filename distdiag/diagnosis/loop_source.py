"""Finds out from the source whether a training loop can end before its loader does."""

from __future__ import annotations

import ast


def may_end_early(text: str, line: int) -> bool:
    """True if the `for` statement at `line` may stop before its iterator does, or is not found.

    True for a `break` or `return` in the loop, `zip` / `islice` / `enumerate(zip…)` over the loader, or an iterator advanced by `next()`.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return True
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.AsyncFor)) and node.iter.lineno <= line <= (node.iter.end_lineno or line):
            calls = {
                n.func.attr if isinstance(n.func, ast.Attribute) else getattr(n.func, "id", "")
                for n in ast.walk(node.iter)
                if isinstance(n, ast.Call)
            }
            return bool(calls & {"zip", "islice", "takewhile", "cycle"}) or _leaves(node.body)
    return True


def _leaves(body: list[ast.stmt]) -> bool:
    """True if `body` breaks out of this loop, or returns out of it."""
    for node in body:
        if isinstance(node, (ast.Break, ast.Return)):
            return True
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        inner_loop = isinstance(node, (ast.For, ast.While, ast.AsyncFor))
        for field in ("body", "orelse", "finalbody", "handlers"):
            part = getattr(node, field, None)
            if not isinstance(part, list):
                continue
            statements = [x for h in part for x in (h.body if isinstance(h, ast.ExceptHandler) else [h])]
            if inner_loop and field == "body":
                if any(isinstance(n, ast.Return) for x in statements for n in ast.walk(x)):
                    return True
            elif _leaves(statements):
                return True
        for case in getattr(node, "cases", ()):
            if _leaves(case.body):
                return True
    return False
