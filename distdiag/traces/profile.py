"""A profile of a run from the traces of its ranks: the steps that all of them recorded, analysed and compared."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from distdiag.terms.steps import BY_NAME
from distdiag.traces import analyse
from distdiag.traces.analyse import Joined, Key, Recorded
from distdiag.traces.critical_path import critical_path
from distdiag.traces.intervals import Spans
from distdiag.traces.model import Comparison, Difference, Missing, Profile, RankTimes, parts_of
from distdiag.traces.read import Comm
from distdiag.traces.text import place, ranks_text
from distdiag.traces.verdict import LATE_WAIT, verdict_of

LEAST_SHARE = 0.01  # of a step: smaller differences between two ranks are not listed
LEAST_MS = 0.05


def profile_of(
    run: str,
    number: int,
    recorded: Mapping[int, Recorded],
    missing: Sequence[Missing],
    chosen: tuple[int, int, str] | None,
    same_clock: bool = False,
) -> tuple[Profile, dict[Key, dict[int, Comm]], dict[int, float]]:
    """Return the profile, the collectives that ranks share, and the offset of each trace on the common clock (µs).

    The traces' times are moved to that clock. `chosen`: culprit, peer, and why it is the culprit, if two are compared.
    If not all ranks are on one host (`same_clock`), ranks whose collectives end at other times have another clock.
    """
    missing, notes = list(missing), []
    common = _common_steps(recorded)
    before, last = common or (0, 0)
    usable = dict(recorded) if common else {}
    if recorded and not common:
        missing += [Missing(rank=q, reason="it recorded no step that all ranks recorded") for q in sorted(recorded)]
    origin = min((r.trace.base_ns for r in usable.values()), default=0)
    offsets = {q: (r.trace.base_ns - origin) / 1e3 for q, r in usable.items()}
    steps = last - before
    for r in usable.values():
        analyse.number_collectives(r.trace, r.entries)
        analyse.number_messages(r.trace, r.messages)
        ends = dict(r.boundaries)
        r.window, r.steps = (r.trace.us(ends[before]), r.trace.us(ends[last])), steps
    collectives = analyse.joined(usable)
    unsure: set[int] = set()
    if usable and not same_clock:
        doubt_us = LATE_WAIT * min(r.window[1] - r.window[0] for r in usable.values()) / steps
        collectives, unsure, notes = _on_one_clock(usable, collectives, offsets, doubt_us)
    for q, r in usable.items():  # from here on, all times are on one clock
        r.trace.shift(offsets[q])
        r.window = r.window[0] + offsets[q], r.window[1] + offsets[q]
    computes = {q: r.compute() for q, r in usable.items()}
    ranks = _rank_times(usable, computes, collectives, unsure)
    by_kind = analyse.collective_times(collectives, steps)
    world = max((r.trace.world_size or 0 for r in usable.values()), default=0)
    verdict, advice = verdict_of(ranks, by_kind, collectives, usable, steps, world)
    profile = Profile(
        run=run, number=number, first_step=before + 1 if common else None, steps=steps, ranks=ranks, missing=missing,
        verdict=verdict, advice=advice, partial=world > len(usable) > 0, collectives=by_kind,
        modules=analyse.module_times(usable, computes), critical_path=critical_path(collectives, usable, computes, steps),
        comparison=_comparison(usable, ranks, chosen), trace=None, notes=notes,
    )  # fmt: skip
    return profile, collectives, offsets


def _on_one_clock(
    recorded: Mapping[int, Recorded], joined: Mapping[Key, dict[int, Comm]], offsets: dict[int, float], doubt_us: float
) -> tuple[dict[Key, dict[int, Comm]], set[int], list[str]]:
    """Align the clocks; return the collectives whose members then share one, the members of the others, and notes."""
    moved, clocks = analyse.align(joined, offsets, recorded, doubt_us)
    known = {key: of_rank for key, of_rank in joined.items() if len({clocks[q] for q in of_rank}) == 1}
    unsure = {q for key, of_rank in joined.items() if key not in known for q in of_rank}
    notes = [f"clocks of {ranks_text(moved)} were aligned: all ranks leave a collective together"] if moved else []
    if unsure:
        notes.append(f"how long {ranks_text(sorted(unsure))} wait is not known: their clocks cannot be compared")
    return known, unsure, notes


def _rank_times(
    recorded: Mapping[int, Recorded], computes: Mapping[int, Spans], collectives: Joined, unsure: Collection[int]
) -> list[RankTimes]:
    shared = [(max(c.start for c in by.values()), by) for by in collectives.values()]
    out = []
    for q, r in sorted(recorded.items()):
        times = analyse.rank_times(q, r, computes[q], shared)
        recorded_ms = (r.boundaries[-1][1] - r.boundaries[0][1]) / 1e6 / max(1, len(r.boundaries) - 1)
        lines = analyse.line_times(r.lines, r.samples, recorded_ms)
        wait_ms = None if q in unsure else times.wait_ms
        out.append(msgspec.structs.replace(times, wait_ms=wait_ms, lines=lines[: analyse.TOP], **r.measured))
    return out


def _common_steps(recorded: Mapping[int, Recorded]) -> tuple[int, int] | None:
    """Return (step before the first, last step) of what all ranks recorded; None if they share no step."""
    known = [dict(r.boundaries) for r in recorded.values()]
    if not known or not all(known):
        return None
    first, last = max(min(k) for k in known), min(max(k) for k in known)
    if first >= last or any(first not in k or last not in k for k in known):
        return None
    return first, last


def _comparison(
    recorded: Mapping[int, Recorded], ranks: Sequence[RankTimes], chosen: tuple[int, int, str] | None
) -> Comparison | None:
    by_rank = {r.rank: r for r in ranks}
    if chosen is None or chosen[0] not in by_rank or chosen[1] not in by_rank:
        return None
    culprit, peer, reason = chosen
    a, b = by_rank[culprit], by_rank[peer]
    least = max(LEAST_MS, LEAST_SHARE * max(a.step_ms, b.step_ms))
    parts = zip(parts_of(a).items(), parts_of(b).values(), strict=True)  # together they are the step
    rows = [
        Difference(kind="time", name=BY_NAME[name].word or name, culprit_ms=ms, peer_ms=peer_ms)
        for (name, ms), peer_ms in parts
    ]
    times: dict[str, list[dict[str, float]]] = {"operator": [], "line": []}
    for q in (culprit, peer):
        r = recorded[q]
        lines = analyse.line_times(r.lines, r.samples, by_rank[q].step_ms)
        times["operator"].append({o.name: o.self_ms for o in r.operators()})
        times["line"].append({place(x.file, x.line, x.function): x.ms for x in lines})
    for kind, (own, others) in times.items():
        rows += analyse.differences(own, others, least, kind)[:6]
    return Comparison(culprit=culprit, peer=peer, reason=reason, rows=rows)
