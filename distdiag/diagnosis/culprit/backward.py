"""Evidence from an autograd function that communicates: it runs backward only where the input of its forward needs a gradient."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Sequence

from distdiag.diagnosis.culprit.case import Testimony
from distdiag.diagnosis.model import guards, syntax
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call, Site
from distdiag.diagnosis.text.phrases import at, op_at, site_text

_NEW_TENSORS = {
    "zeros", "ones", "full", "empty", "tensor", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full",
    "new_empty", "detach",
}  # fmt: skip


def left(
    ranks: Sequence[int], mine: Sequence[Site], theirs: Sequence[Site], call: Call, source: syntax.Source
) -> Testimony | None:
    """Return that `ranks`, which are at `mine`, left a `backward()` in which others are at `theirs`, in a function's own backward."""
    started = (pair for pair in itertools.pairwise(theirs) if ".backward(" in syntax.line_at(pair[1], source))
    inner, outer = next(started, (None, None))
    if inner is None or outer is None or inner.function != "backward":
        return None
    if not any((x.file, x.function) == (outer.file, outer.function) and x.line > outer.line for x in mine):
        return None
    who, where = rank_list(ranks), ""
    text = f"; that backward{at(Site(inner.file, inner.line, inner.function))} runs only where the input of its forward needs a gradient"
    if (anew := _made_anew(inner.file, source)) is not None:
        text += f"; {site_text(anew.place)} decides whether a new tensor, without a graph, is returned: `{anew.text}`"
        where = f", as under `{anew.text}`{at(anew.place)}"
    return Testimony(
        ranks=tuple(ranks),
        head=f"{who} left `{syntax.line_at(outer, source)}`{at(outer)} without {op_at(call)} in it",
        text=text,
        advice=f"keep {who}'s result in the graph: look for a tensor that the model makes anew (zeros, empty, detach, no_grad) "
        f"on some ranks{where}: often where there are no tokens or no data; return the computed one there, too, or add it times 0",
    )


def _made_anew(file: str, source: syntax.Source) -> guards.Guard | None:
    """Return the `if` under which a function returns a new tensor without a graph, and else a computed one.

    None if there is no such function in the file, or more than one such `if`.
    """
    found, tree = [], syntax.tree_of(file, source)
    for node in ast.walk(tree or ast.Module([], [])):
        if isinstance(node, syntax.FUNCTIONS):
            ways = [(x.value, guard) for x, guard in guards.exits(node.body) if isinstance(x, ast.Return)]
            new = [g for value, g in ways if isinstance(value, ast.Call) and syntax.name_of(value.func) in _NEW_TENSORS]
            if len(new) < len(ways):
                found += [g for g in new if g is not None and isinstance(g.node, ast.If)]
    return found[0]._replace(site=Site(file, found[0].line), source=source(file) or "") if len(found) == 1 else None
