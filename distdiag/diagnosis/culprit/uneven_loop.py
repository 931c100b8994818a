"""Finds a loop over a DataLoader that has more batches on some ranks than on the others: in validation, for example.

It explains a culprit and does not decide who it is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from distdiag.diagnosis.culprit.case import Case, Reason, Testimony
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Loader, Site, Snapshot

ADVICE = "give every rank the same number of batches in that loop (drop_last=True, DistributedSampler), or make the call once after it"


class UnevenLoop(NamedTuple):
    """A loop that has ended on some ranks, and still goes on for the others."""

    site: Site
    unit: str  # "batch" of this pass, or "step" of all passes
    at: int  # so far, on the ranks that are in it
    inside: tuple[int, ...]
    ended_after: int
    outside: tuple[int, ...]


def uneven_loop(snapshot: Snapshot, ranks: Collection[int]) -> UnevenLoop | None:
    """Return the loop in which some of these ranks are and which has ended for the others, in the same pass over the data."""
    by_site: dict[str, dict[int, Loader]] = {}
    for q in ranks:
        for loader in snapshot.ranks[q].loaders if q in snapshot.ranks else ():
            if loader.site is not None:
                by_site.setdefault(loader.site.key, {})[q] = loader
    for loaders in by_site.values():
        inside = tuple(sorted(q for q, x in loaders.items() if not x.exhausted and _is_in(snapshot, q, x.site)))
        outside = tuple(sorted(q for q, x in loaders.items() if x.exhausted))
        if not inside or not outside or len(inside) + len(outside) < len(ranks):
            continue
        site, passes = loaders[inside[0]].site, {x.iterations_started for x in loaders.values()}
        if site is None or len(passes) != 1:
            continue
        fewest, most = min(loaders[q].batches for q in inside), max(loaders[q].batches for q in outside)
        if fewest > most:
            return UnevenLoop(site, "batch", fewest, inside, most, outside)
        # without a collective between two passes, ranks may have been in different ones: their steps in all count
        fewest = 1 + min(snapshot.ranks[q].step for q in inside)
        most = max(snapshot.ranks[q].step for q in outside)
        if fewest > most and min(passes) > 1 and all(x.in_training for x in loaders.values()):
            return UnevenLoop(site, "step", fewest, inside, most, outside)
    return None


def explain(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return the loop that these ranks are in and the others have left, or the reverse; None if there is none."""
    found = uneven_loop(case.snapshot, case.compared)
    if found is None or tuple(ranks) not in (found.inside, found.outside):
        return None
    where = f"{found.site.file.rsplit('/', 1)[-1]}:{found.site.line}"
    return Testimony(
        name=Reason.LOOP,
        ranks=tuple(ranks),
        text=f"; the loop at {where} is at {found.unit} {found.at:,} on {rank_list(found.inside)}, "
        f"and ended after {found.ended_after:,} on {rank_list(found.outside)}",
        advice=ADVICE,
    )


def _is_in(snapshot: Snapshot, rank: int, site: Site | None) -> bool:
    frames = snapshot.ranks[rank].user_stack
    return site is not None and any((f.file, f.function) == (site.file, site.function) for f in frames)
