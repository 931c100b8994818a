"""Evidence from loops over a DataLoader: who ran out of batches, and a loop that has more batches on some ranks.

A loop explains a culprit and does not decide who it is: in validation, for example, neither number of batches is known to be wrong.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping, Sequence

from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.model import syntax
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.guards import Guard, GuardKind, on_stack
from distdiag.diagnosis.model.snapshot import Call, Loader, RankState, Site
from distdiag.diagnosis.model.syntax import Source
from distdiag.diagnosis.text.phrases import at
from distdiag.diagnosis.training_data import even_advice
from distdiag.diagnosis.waits.incidents import Root
from distdiag.terms.operations import op_name

IN_A_ROW = 2  # calls of the shorter loop, at least
ADVICE = "give every rank the same number of batches in that loop (drop_last=True, DistributedSampler), or make the call once after it"


def exhausted(case: Case) -> Testimony | None:
    """Accuse the ranks that ran out of batches, if not all did."""
    ranks = {*case.compared, *(case.waiting if case.incident.root is Root.GONE else ())}
    out = tuple(sorted(ranks & set(case.exhausted)))
    if not out or len(out) == len(ranks):
        return None
    ended = (x for q in out if q in case.states for x in case.states[q].loaders if x.exhausted)
    return Testimony(ranks=out, head=f"{rank_list(out)} ran out of batches", advice=even_advice(ended))


def uneven(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return the loop that these ranks are in and which has ended for the others in the same pass over the data, or the reverse."""
    by_site: dict[str, dict[int, Loader]] = {}
    for q in case.compared:
        for loader in case.states[q].loaders if q in case.states else ():
            if loader.site is not None:
                by_site.setdefault(loader.site.key, {})[q] = loader
    for loaders in by_site.values():
        inside = tuple(q for q, x in loaders.items() if not x.exhausted and _is_in(case.states[q], x.site))
        outside = tuple(q for q, x in loaders.items() if x.exhausted)
        if not inside or not outside or len(inside) + len(outside) < len(case.compared):
            continue
        if (rounds := _rounds(case.states, loaders, inside, outside)) is not None:
            (unit, fewest, most), site = rounds, loaders[inside[0]].site
            loop = f"the loop at {site.key.rsplit('/', 1)[-1] if site else ''} is at {unit} {fewest:,} on {rank_list(inside)}"
            text = f"; {loop}, and ended after {most:,} on {rank_list(outside)}"
            named = tuple(ranks) in (inside, outside)
            return Testimony(ranks=tuple(ranks), text=text, advice=ADVICE) if named else None
    return None


def longer(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return the two loops in which a rank of a cycle makes more collectives in a row than the other end of its group, at another line.

    A sender and a receiver that each go over a list of their own: parameters here, entries of a state dict there.
    """
    for wait in case.incident.waits if not ranks else ():
        rank, other = min(wait.ranks, default=-1), min(wait.missing, default=-1)
        call, last = wait.calls.get(rank), case.call_before(wait, other)
        if call is None or call.site is None or last is None or last.site is None or call.site == last.site:
            continue
        mine, theirs = (_in_a_row(case.states[q], c) for q, c in ((rank, call), (other, last)))
        here, there = (_loop_around(c.site, case.source) for c in (call, last))
        if mine != theirs + 1 or theirs < IN_A_ROW or here is None or there is None:
            continue
        frames = (x for x in case.states[other].user_stack if x.file == there.site.file)
        if any(syntax.within(there.node, x.line) for x in frames):
            continue
        op, many = op_name(call.op), f"{rank_list([other])} ended `{there.text}`{at(there.place)} after {theirs:,}"
        return Testimony(
            text=f"; {many} of these calls{at(last.site)}, and {rank_list([rank])} makes {op} number {mine:,} in `{here.text}`{at(here.place)}",
            advice=f"let the loops {at(there.place).strip()} and {at(here.place).strip()} go over one list, in one order: the names that one rank "
            "sends to the others, or the same method of the same module (`state_dict()` has buffers, and each shared weight once per name, "
            "`named_parameters()` only once)",
        )  # fmt: skip
    return None


def _in_a_row(state: RankState, call: Call) -> int:
    """Return how many collectives of its group a rank had made at one line when it had made this one, with no other call in between."""
    calls = [c for c in state.calls if not c.other_thread]
    if state.blocked is not None and (state.blocked.group, state.blocked.seq) == (call.group, call.seq):
        calls = [*(c for c in calls if (c.group, c.seq) != (call.group, call.seq)), call]
    upto = itertools.takewhile(lambda c: (c.group, c.seq) != (call.group, call.seq), calls)
    before = itertools.takewhile(lambda c: (c.group, c.site) == (call.group, call.site), reversed([*upto]))
    return 1 + sum(1 for _ in before)


def _loop_around(site: Site | None, source: Source) -> Guard | None:
    """Return the innermost `for` around a line in its function."""
    around = on_stack((site,), source) if site is not None else ()
    return next((g for g in reversed(around) if g.kind is GuardKind.INSIDE and isinstance(g.node, ast.For)), None)


def _rounds(
    states: Mapping[int, RankState], loaders: dict[int, Loader], inside: Sequence[int], outside: Sequence[int]
) -> tuple[str, int, int] | None:
    """Return (unit, rounds so far of those inside, rounds of those outside), in batches of this pass or steps of all passes."""
    passes = {loader.iterations_started for loader in loaders.values()}
    if len(passes) != 1:
        return None
    fewest, most = min(loaders[q].batches for q in inside), max(loaders[q].batches for q in outside)
    if fewest > most:
        return "batch", fewest, most
    # without a collective between two passes, ranks may have been in different ones: their steps in all count
    fewest, most = 1 + min(states[q].step for q in inside), max(states[q].step for q in outside)
    all_train = min(passes) > 1 and all(loader.in_training for loader in loaders.values())
    return ("step", fewest, most) if fewest > most and all_train else None


def _is_in(state: RankState, site: Site | None) -> bool:
    return site is not None and (site.file, site.function) in {(f.file, f.function) for f in state.user_stack}
