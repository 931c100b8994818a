"""Witness by backwards and steps: which rank made a backward pass more than the others for its optimizer steps.

DDP averages gradients in every backward pass. A rank that repeats a batch (in two halves after an exception, for example) makes one
more: its next passes meet the others' passes of the step after.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from distdiag.diagnosis.culprit.case import Case, Reason, Testimony
from distdiag.diagnosis.culprit.skipped import swallowed
from distdiag.diagnosis.model.snapshot import Snapshot

STEPS = 3  # optimizer steps from which on one backward pass per step is a habit
UNDER_WAY = 1  # a pass whose step is not done yet


@dataclass(frozen=True, slots=True)
class Extra:
    """Backward passes of one rank beyond one per optimizer step."""

    rank: int
    backwards: int  # in all
    steps: int
    caught: str  # an exception out of a forward or backward that the script caught; or empty


def extra_backward(snapshot: Snapshot, ranks: Collection[int]) -> Extra | None:
    """Return the one of `ranks` with more backward passes than steps, while the others made one for each step; else None."""
    states = [snapshot.ranks[r] for r in ranks if r in snapshot.ranks]
    if len(states) < max(2, len(ranks)) or any(len(st.models) != 1 or st.step < STEPS for st in states):
        return None
    over = {st.rank: st.models[0].synced_backwards - st.step for st in states}
    odd = [st for st in states if over[st.rank] > UNDER_WAY]
    if len(odd) != 1 or any(not 0 <= n <= UNDER_WAY for q, n in over.items() if q != odd[0].rank):
        return None
    return Extra(odd[0].rank, odd[0].models[0].synced_backwards, odd[0].step, swallowed(odd[0]))


def explain(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return the evidence that these ranks made more backward passes than steps; None if they did not."""
    found = extra_backward(case.snapshot, case.compared)
    if found is None or tuple(ranks) != (found.rank,):
        return None
    rank = found.rank
    return Testimony(
        name=Reason.EXTRA,
        ranks=(rank,),
        text=f"; rank {rank} has made {found.backwards:,} backward passes in {found.steps:,} steps, "
        "the others one for each step" + (f"; it caught {found.caught}" if found.caught else ""),
        advice=f"let rank {rank} make one backward pass per step that exchanges gradients: the others "
        "under `no_sync()`; or let all ranks repeat the batch together",
    )
