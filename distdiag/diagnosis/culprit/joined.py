"""Evidence from torch's Join: a rank without batches shadows only the collectives of the objects that it was given.

It makes them in the line of its `with`. A call that a line of the script makes meanwhile on the other ranks meets one of these, and from
there on every call meets another one.
"""

from __future__ import annotations

import ast

from distdiag.diagnosis.culprit import callers
from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call, Site
from distdiag.diagnosis.model.syntax import Source, statement_at
from distdiag.diagnosis.text.phrases import op_at, site_text
from distdiag.diagnosis.waits.incidents import Root
from distdiag.diagnosis.waits.wait import call_at


def at_own_call(case: Case) -> Case:
    """Return a case of ranks whose calls differ at the first call that met a shadow, which is earlier than where they ended."""
    shadows = _shadows(case)
    if case.incident.root not in (Root.CONFLICT, Root.ABORT) or not shadows:
        return case
    states = case.states
    calls = (c for q in states if q not in shadows for c in states[q].calls if c.seq is not None and not c.other_thread)
    found = (c for c in calls if _is_own(c, case.source))
    met = [c for c in found if all(_same(call_at(states[q], c.group, c.seq or 0), site) for q, site in shadows.items())]
    if not met:
        return case
    first = min(met, key=lambda call: call.seq or 0)
    return case.at_call(first.group, first.seq or 0, lambda rank, _: rank in shadows)


def accuse(case: Case) -> Testimony | None:
    """Accuse the ranks whose own call met one of a rank that only shadows those of Join's objects."""
    shadows = {q: site for q, site in _shadows(case).items() if q in case.compared}
    ranks = tuple(q for q in case.compared if q not in shadows)
    call = case.wait.calls.get(ranks[0]) if ranks else None
    if not shadows or call is None or not _is_own(call, case.source):
        return None
    who, (site, *_) = rank_list(sorted(shadows)), shadows.values()
    one = len(shadows) == 1
    return Testimony(
        ranks=ranks,
        head=f"{who} {'is' if one else 'are'} out of batches and only {'shadows' if one else 'shadow'} the collectives of the objects given to "
        f"`with Join` ({site_text(Site(site.file, site.line))}): {op_at(call)} of {rank_list(ranks)} is none of them",
        advice=f"move {op_at(call)} out of the `with Join`, let all ranks make it equally often, or give Join an object whose JoinHook makes the same call",
    )


def _shadows(case: Case) -> dict[int, Site]:
    """Return the ranks whose newest call was made by the line of a `with` in Join's context, and that line."""
    states = case.states.values()
    if not all(state.in_join for state in states):
        return {}
    newest = {state.rank: next((c for c in reversed(state.calls) if not c.other_thread), None) for state in states}
    sites = {q: call.site for q, call in newest.items() if call is not None and call.site is not None}
    statements = {q: statement_at(site, case.source) for q, site in sites.items()}
    return {q: sites[q] for q, x in statements.items() if isinstance(x, (ast.With, ast.AsyncWith))}


def _is_own(call: Call, source: Source) -> bool:
    """True if the source of a call's line is known, and the line makes the call itself."""
    return not call.p2p and statement_at(call.site, source) is not None and not callers.is_inside(call, source)


def _same(call: Call | None, site: Site) -> bool:
    return call is not None and call.site is not None and call.site.key == site.key
