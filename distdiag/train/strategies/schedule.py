"""Pipeline schedules: the actions of each rank by time slot, and the share of idle time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FORWARD, BACKWARD = "F", "B"
Action = tuple[str, int, int]  # (F or B, stage, micro-batch)


def order(kind: str, ranks: int, micro_batches: int) -> list[list[Action]]:
    """Return what each rank computes, in order, with one stage per rank.

    Args:
        kind: "gpipe": all forwards, then all backwards. "1f1b": a backward as soon as one can run.
    """
    lanes: list[list[Action]] = []
    for rank in range(ranks):
        ahead = micro_batches if kind == "gpipe" else min(micro_batches, ranks - rank)
        lane = [(FORWARD, rank, m) for m in range(ahead)]
        for m in range(micro_batches):
            lane.append((BACKWARD, rank, m))
            if ahead + m < micro_batches:
                lane.append((FORWARD, rank, ahead + m))
        lanes.append(lane)
    return lanes


def bubble(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """Return the share of a step in which a rank is idle, if all stages take equally long.

    (p-1) / (v*m + p-1) with p ranks, m micro-batches and v stages per rank (Narayanan et al. 2021, section 2.2).
    """
    return (ranks - 1) / (stages_per_rank * micro_batches + ranks - 1)


def slots(lanes: Sequence[Sequence[Action]], stages: int) -> list[dict[int, Action]]:
    """Return each lane's actions by time slot, if every action takes one slot."""
    done: dict[Action, int] = {}
    placed: list[dict[int, Action]] = [{} for _ in lanes]
    position, free = [0] * len(lanes), [0] * len(lanes)
    while any(p < len(lane) for p, lane in zip(position, lanes, strict=True)):
        before = sum(position)
        for i, lane in enumerate(lanes):
            if position[i] == len(lane):
                continue
            action = lane[position[i]]
            ready = [done.get(a) for a in _needs(action, stages)]
            if None in ready:
                continue
            slot = max([free[i], *(t + 1 for t in ready if t is not None)])
            placed[i][slot] = action
            done[action], free[i] = slot, slot + 1
            position[i] += 1
        if sum(position) == before:
            raise ValueError("the schedule waits for itself")
    return placed


def _needs(action: Action, stages: int) -> list[Action]:
    kind, stage, micro_batch = action
    if kind == FORWARD:
        return [(FORWARD, stage - 1, micro_batch)] if stage else []
    after = [(BACKWARD, stage + 1, micro_batch)] if stage + 1 < stages else []
    return [(FORWARD, stage, micro_batch), *after]


def drawing(lanes: Sequence[Mapping[int, Action]]) -> list[str]:
    """Return one line per rank, one column per slot: `F0` forward of micro-batch 0, `B0` its backward, `.` idle."""
    length = max(slot for lane in lanes for slot in lane) + 1
    width = max(len(f"{a[0]}{a[2]}") for lane in lanes for a in lane.values())
    return [
        f"rank {rank}  "
        + " ".join((f"{lane[s][0]}{lane[s][2]}" if s in lane else ".").ljust(width) for s in range(length)).rstrip()
        for rank, lane in enumerate(lanes)
    ]
