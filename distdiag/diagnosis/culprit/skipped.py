"""Witness by forwards and backwards: which rank ran a forward of its DDP model without its backward.

A batch that is skipped after its forward (a loss that is not finite, an exception that is caught) leaves this evidence: the
collectives of that rank are one step ahead of the other ranks'.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from distdiag.diagnosis.culprit.case import Case, Reason, Testimony
from distdiag.diagnosis.culprit.paths import parting, parting_text
from distdiag.diagnosis.culprit.rank_condition import Condition, Source
from distdiag.diagnosis.model.snapshot import RankState, Site, Snapshot

STEPS = 3  # backwards after which each forward is expected to have one


@dataclass(frozen=True, slots=True)
class Skipped:
    """Forwards of one rank without a backward."""

    rank: int
    forwards: int  # in all
    backwards: int  # in all
    missing: int


def skipped(snapshot: Snapshot, ranks: Collection[int]) -> Skipped | None:
    """Return the one of `ranks` that ran forwards without backward while each forward of the others has one; else None."""
    states = [snapshot.ranks[r] for r in ranks if r in snapshot.ranks]
    if len(states) < max(2, len(ranks)) or len({len(st.models) for st in states}) != 1:
        return None
    found: dict[int, Skipped] = {}
    for i in range(len(states[0].models)):
        counts = {st.rank: _open(st, i) for st in states}
        if any(st.models[i].synced_backwards < STEPS for st in states):
            continue
        odd = [st for st in states if counts[st.rank] > 0]
        if len(odd) != 1 or odd[0].rank in found:
            continue
        st, model = odd[0], odd[0].models[i]
        found[st.rank] = Skipped(st.rank, model.forwards, model.synced_backwards, counts[st.rank])
    return found.popitem()[1] if len(found) == 1 else None


def _open(state: RankState, i: int) -> int:
    """Return how many forwards will never have a backward, without the one that the rank is in or has just left."""
    model = state.models[i]
    n = model.forwards - model.synced_backwards
    here = state.blocked.site if state.blocked is not None and state.blocked.site is not None else state.current_site
    if state.phase != "forward" and (swallowed(state) or here is None or state.sites.get(here.key, 0) <= 1):
        return n  # after an exception, or at a site that is not part of every step
    return max(0, n - 1)


def swallowed(state: RankState) -> str:
    """Return the exception out of a forward or backward that the script has caught; empty if there is none."""
    text = (state.caught or "").splitlines()
    return text[0][:120] if text and not (state.exception or "").startswith(text[0][:60]) else ""


def way_out(snapshot: Snapshot, found: Skipped, source: Source | None) -> list[Condition]:
    """Return the conditions through which the rank left between the forward and the backward."""
    state = snapshot.ranks[found.rank]
    if source is None:
        return []
    for forward in _sites(state, found.forwards):
        for backward in _sites(state, found.backwards):
            if forward.file == backward.file and (conditions := parting((forward,), (backward,), source)):
                return conditions
    return []


def _sites(state: RankState, times: int) -> list[Site]:
    """Return the sites that a rank has visited exactly `times` times."""
    parts = [(*key.rsplit(":", 1), n) for key, n in state.sites.items() if ":" in key]
    return [Site(file, int(line)) for file, line, n in parts if n == times and line.isdigit()]


def explain(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return the evidence that these ranks ran forwards without backward, with the condition or exception; None if not."""
    found = skipped(case.snapshot, case.compared)
    if found is None or tuple(ranks) != (found.rank,):
        return None
    caught = swallowed(case.states[found.rank])
    return Testimony(
        name=Reason.SKIPPED,
        ranks=(found.rank,),
        text=f"; rank {found.rank} ran {found.missing:,} forward{'s' if found.missing > 1 else ''} without backward "
        f"({found.forwards:,} forwards, {found.backwards:,} backwards)"
        + (f", and caught {caught}" if caught else "")
        + parting_text(way_out(case.snapshot, found, case.source)),
        advice=f"run the backward of every forward on rank {found.rank}, too (of a loss times 0, if the batch is not "
        "to count), or skip the batch on all ranks together",
    )
