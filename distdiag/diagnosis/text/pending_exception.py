"""Text for a rank that is at its call because it handles an exception."""

from __future__ import annotations

from collections.abc import Collection

from distdiag.diagnosis.culprit.pending_exception import name
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import RankState
from distdiag.diagnosis.text.phrases import at, shortened

SHOWN = 160  # characters of the exception


def handled(state: RankState) -> str:
    """Return `KeyError: 'device', raised at read.py:27 in batch`."""
    return f"{shortened(state.handling or '', SHOWN)}, raised{at(state.handling_site)}"


def text(state: RankState) -> str:
    """Return the end of a sentence: which exception the rank is handling."""
    return f"; rank {state.rank} is handling {handled(state)}"


def advice(state: RankState, culprits: Collection[int]) -> str:
    """Return what to do about it."""
    return (
        f"fix the {name(state)}{at(state.handling_site)}; and make no collective call in `finally` or `except` that the other "
        f"ranks do not make: let the exception end {rank_list(culprits)}, or let all ranks agree on the failure first "
        "(all_reduce a flag)"
    )
