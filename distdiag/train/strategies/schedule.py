"""Pipeline schedules: the actions of each rank by time slot, and the share of idle time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FORWARD, BACKWARD = "F", "B"
Action = tuple[str, int, int]  # (F or B, stage, micro-batch)


def slots(kind: str, ranks: int, micro_batches: int) -> list[dict[int, Action]]:
    """Return each rank's actions by time slot, with one stage per rank, if every action takes one slot.

    Args:
        kind: "gpipe": all forwards, then all backwards. "1f1b": a backward as soon as one can run, with at least as many
            micro-batches as ranks.
    """
    lanes: list[dict[int, Action]] = []
    for rank in range(ranks):
        lane: dict[int, Action] = {}
        later = ranks - 1 - rank  # ranks behind this one, through which a micro-batch goes before its backward
        for m in range(micro_batches):
            if kind == "gpipe":
                forward, backward = rank + m, micro_batches + ranks - 1 + later + m
            else:
                forward, backward = rank + (m if m <= later else 2 * m), ranks + later + 2 * m
            lane[forward], lane[backward] = (FORWARD, rank, m), (BACKWARD, rank, m)
        lanes.append(lane)
    return lanes


def bubble(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """Return the share of a step in which a rank is idle, if all stages take equally long.

    (p-1) / (v*m + p-1) with p ranks, m micro-batches and v stages per rank (Narayanan et al. 2021, section 2.2).
    """
    return (ranks - 1) / (stages_per_rank * micro_batches + ranks - 1)


def drawing(lanes: Sequence[Mapping[int, Action]]) -> list[str]:
    """Return one line per rank, one column per slot: `F0` forward of micro-batch 0, `B0` its backward, `.` idle."""
    length = max(slot for lane in lanes for slot in lane) + 1
    width = max(len(f"{a[0]}{a[2]}") for lane in lanes for a in lane.values())
    return [
        f"rank {rank}  "
        + " ".join((f"{lane[s][0]}{lane[s][2]}" if s in lane else ".").ljust(width) for s in range(length)).rstrip()
        for rank, lane in enumerate(lanes)
    ]
