"""Evidence from loops over a DataLoader: who ran out of batches, and a loop that has more batches on some ranks.

A loop explains a culprit and does not decide who it is: in validation, for example, neither number of batches is known to be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Loader, RankState, Site
from distdiag.diagnosis.training_data import even_advice
from distdiag.diagnosis.waits.incidents import Root

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
