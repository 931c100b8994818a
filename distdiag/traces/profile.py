"""A profile of a run from the traces of its ranks: the steps that all of them recorded, analysed and compared."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from distdiag.terms.ranks import fold_ranks
from distdiag.terms.steps import BY_NAME
from distdiag.terms.units import percent
from distdiag.traces import analyse
from distdiag.traces.analyse import Entry, Key, Message, Spans, Window
from distdiag.traces.critical_path import critical_path
from distdiag.traces.intervals import length, union
from distdiag.traces.model import Comparison, Difference, Missing, Profile, RankTimes, parts_of
from distdiag.traces.read import Comm, Trace, is_message
from distdiag.traces.text import ms_text, place

LEAST_SHARE = 0.01  # of a step: smaller differences between two ranks are not listed
LEAST_MS = 0.05
LATE_SHARE, LATE_WAIT = 0.6, 0.05  # of all skew, of a step: from here on one rank is named
LATE_STEPS, LEAST_STEPS = 0.8, 0.3  # share of the steps with a late rank in which it must be the latest; of all steps
MORE_SHARE = 0.03  # of a step: a part of a late rank's time is named as the reason if it exceeds the others' by this
COMM_SHARE = 0.3  # of a step, on every rank: from here on exposed communication is named


@dataclass(slots=True)
class Recorded:
    """What one rank recorded.

    Attributes:
        boundaries: (step, wall clock in ns at its end), ascending.
        lines: (file, line, function, samples) of the training thread.
        measured: Further fields of `RankTimes`.
    """

    trace: Trace
    boundaries: Sequence[tuple[int, int]]
    entries: Sequence[Entry] = ()
    lines: Sequence[tuple[str, int, str, int]] = ()
    samples: int = 0
    measured: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Message] = ()


def profile_of(
    run: str,
    number: int,
    recorded: Mapping[int, Recorded],
    missing: Sequence[Missing],
    chosen: tuple[int, int, str] | None,
    same_clock: bool = False,
) -> tuple[Profile, dict[Key, dict[int, Comm]], dict[int, float]]:
    """Return the profile, the collectives that ranks share, and the offset of each trace on the common clock (µs).

    The traces' times are moved to that clock.

    Args:
        chosen: Culprit, peer, and why it is the culprit, if two ranks are compared.
        same_clock: All ranks are on one host. Else ranks whose collectives end at other times have another clock.
    """
    missing, notes = list(missing), []
    common = _common_steps(recorded)
    before, last = common or (0, 0)
    usable = dict(recorded) if common else {}
    if recorded and not common:
        missing += [Missing(rank=q, reason="it recorded no step that all ranks recorded") for q in sorted(recorded)]
    origin = min((r.trace.base_ns for r in usable.values()), default=0)
    offsets = {q: (r.trace.base_ns - origin) / 1e3 for q, r in usable.items()}
    windows: dict[int, Window] = {}
    for q, r in usable.items():
        analyse.number_collectives(r.trace, r.entries)
        analyse.number_messages(r.trace, r.messages)
        ends = dict(r.boundaries)
        windows[q] = r.trace.us(ends[before]), r.trace.us(ends[last])
    steps = last - before
    collectives = analyse.joined({q: r.trace for q, r in usable.items()}, windows)
    if usable and not same_clock and (moved := analyse.align(collectives, offsets)):
        notes.append(f"clocks of ranks {fold_ranks(moved)} were aligned: all ranks leave a collective together")
    for q, r in usable.items():  # from here on, all times are on one clock
        r.trace.shift(offsets[q])
        windows[q] = windows[q][0] + offsets[q], windows[q][1] + offsets[q]
    computes = {q: analyse.compute_of(r.trace, windows[q]) for q, r in usable.items()}
    ranks = _rank_times(usable, windows, steps, computes, collectives)
    by_kind = analyse.collective_times(collectives, steps)
    if _world(usable) > len(usable) > 0:
        notes.append("transfers include waits for the ranks without a trace")
    profile = Profile(
        run=run,
        number=number,
        first_step=before + 1 if common else None,
        steps=steps,
        ranks=ranks,
        missing=missing,
        verdict=_verdict(ranks, collectives, usable, windows, steps),
        collectives=by_kind,
        modules=analyse.module_times({q: r.trace.comms for q, r in usable.items()}, computes, windows, steps),
        critical_path=critical_path(collectives, computes, _unmatched(usable, collectives, windows), windows, steps),
        comparison=_comparison(usable, windows, steps, ranks, chosen),
        trace=None,
        notes=notes,
    )
    return profile, collectives, offsets


def _unmatched(
    recorded: Mapping[int, Recorded], collectives: Mapping[Key, Mapping[int, Comm]], windows: Mapping[int, Window]
) -> dict[int, Spans]:
    """Return when each rank was in communication of which no other rank's part is known."""
    matched = {id(c) for of_rank in collectives.values() for c in of_rank.values()}
    alone = {q: [(c.start, c.end) for c in r.trace.comms if id(c) not in matched] for q, r in recorded.items()}
    return {q: union(spans, *windows[q]) for q, spans in alone.items()}


def _rank_times(
    recorded: Mapping[int, Recorded], windows: Mapping[int, Window], steps: int, computes: Mapping[int, Spans],
    collectives: Mapping[Key, Mapping[int, Comm]],
) -> list[RankTimes]:  # fmt: skip
    shared = [(max(c.start for c in by.values()), by) for by in collectives.values()]
    out = []
    for q, r in sorted(recorded.items()):
        times = analyse.rank_times(q, r.trace, windows[q], steps, computes[q], shared)
        recorded_ms = (r.boundaries[-1][1] - r.boundaries[0][1]) / 1e6 / max(1, len(r.boundaries) - 1)
        lines = analyse.line_times(r.lines, r.samples, recorded_ms)
        out.append(msgspec.structs.replace(times, lines=lines[: analyse.TOP], **r.measured))
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
    recorded: Mapping[int, Recorded],
    windows: Mapping[int, Window],
    steps: int,
    ranks: Sequence[RankTimes],
    chosen: tuple[int, int, str] | None,
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
        found = analyse.operators_of(r.trace, windows[q], steps)
        times["operator"].append({o.name: o.self_ms for o in found})
        times["line"].append({place(x.file, x.line, x.function): x.ms for x in lines})
    for kind, (own, others) in times.items():
        rows += analyse.differences(own, others, least, kind)[:6]
    return Comparison(culprit=culprit, peer=peer, reason=reason, rows=rows)


def _verdict(
    ranks: Sequence[RankTimes], collectives: Mapping[Key, Mapping[int, Comm]], recorded: Mapping[int, Recorded],
    windows: Mapping[int, Window], steps: int,
) -> str | None:  # fmt: skip
    """Name the rank that the others wait for, and why; else communication that every rank waits for."""
    world = _world(recorded)
    found = _late_rank(collectives, recorded, steps)
    late, led = found or (-1, 0)
    most, step = _wait_for(late, collectives, windows, steps), max((r.step_ms for r in ranks), default=0.0)
    exposed_ms = {r.rank: r.exposed_ms for r in ranks}
    # a rank that waited as long for messages comes last because of these, as the first stage of a pipeline does
    gained = max(exposed_ms.values(), default=0.0) - exposed_ms.get(late, 0.0)
    if min(most, gained) >= LATE_WAIT * step > 0 and found is not None:
        often = "" if led == steps else f" in {led} of {steps} steps"
        among = "" if world <= len(ranks) else f"of the {len(ranks)} ranks with a trace, of {world:,}, "
        data = {
            q: length(union(r.trace.loads, *windows[q])) / 1e3 / steps for q, r in recorded.items() if r.trace.loads
        }
        kernels = {q: analyse.kernels_of(r.trace, windows[q], steps) for q, r in recorded.items()}
        waited = f"others wait up to {ms_text(most)} ms of a step of {ms_text(step)} ms for it"
        return f"{among}rank {late} comes last to the collectives{often}: {waited}{_more(late, ranks, data, kernels)}"
    exposed = [(r.exposed_ms - min(r.wait_ms or 0.0, r.exposed_ms), r.step_ms) for r in ranks if r.step_ms > 0]
    if len(exposed) < 2 or min(ms / step_ms for ms, step_ms in exposed) < COMM_SHARE:
        return None
    least, step = min(exposed, key=lambda x: x[0] / x[1])
    others = ", or waiting for the ranks without a trace," if world > len(ranks) else ""
    return (
        f"communication{others} that no computation hides takes at least {percent(least / step)} of a step on every rank: "
        f"{ms_text(least)} of {ms_text(step)} ms"
    )


def _wait_for(
    late: int, collectives: Mapping[Key, Mapping[int, Comm]], windows: Mapping[int, Window], steps: int
) -> float:
    """Return how long a rank waits at most for the late one in collectives to which that comes last, in ms per step."""
    spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for (_, _, op), of_rank in collectives.items():
        if not is_message(op) and analyse.last_rank(of_rank) == late:
            for q, c in of_rank.items():
                spans[q].append((c.start, min(c.end, of_rank[late].start)))
    return max((length(union(x, *windows[q])) for q, x in spans.items()), default=0.0) / 1e3 / max(1, steps)


def _world(recorded: Mapping[int, Recorded]) -> int:
    return max((r.trace.world_size or 0 for r in recorded.values()), default=0)


def _late_rank(
    collectives: Mapping[Key, Mapping[int, Comm]], recorded: Mapping[int, Recorded], steps: int
) -> tuple[int, int] | None:
    """Return the rank that causes most of the skew, and in how many steps; None if others are as often the latest.

    Only steps in which the last arrival costs a share of the step count.
    """
    clock = next(iter(recorded.values()), None)
    ends = [] if clock is None else [clock.trace.us(end) for _, end in clock.boundaries]
    by_step: dict[int, Counter[int]] = defaultdict(Counter)
    total: Counter[int] = Counter()
    for (_, _, op), of_rank in collectives.items():
        if is_message(op):  # a stage waits for the one before it by design
            continue
        late = analyse.last_rank(of_rank)
        skew = round(of_rank[late].start - min(c.start for c in of_rank.values()))  # µs
        total[late] += skew
        step = bisect_left(ends, of_rank[late].start)
        if 0 < step < len(ends) and skew >= LATE_WAIT * (ends[step] - ends[step - 1]):
            by_step[step][late] += skew
    if not total:
        return None
    late, most = total.most_common(1)[0]
    led = sum(late == of_step.most_common(1)[0][0] for of_step in by_step.values())
    often = led >= max(LATE_STEPS * len(by_step), LEAST_STEPS * steps)
    return (late, led) if often and led >= min(2, steps) and most >= LATE_SHARE * total.total() else None


def _more(
    late: int, ranks: Sequence[RankTimes], data_ms: Mapping[int, float], kernels: Mapping[int, tuple[float, float]]
) -> str:
    """Return what takes the late rank longer than the others: its data loader, its computation, or time in neither."""
    own = next(r for r in ranks if r.rank == late)
    times = [
        ("its data loader takes", data_ms),
        ("it computes for", {r.rank: r.compute_ms for r in ranks}),
        ("it neither computes nor communicates for", {r.rank: r.idle_ms for r in ranks}),
    ]
    found = []
    for text, by_rank in times:
        others = [ms for q, ms in by_rank.items() if q != late]
        if late in by_rank and others:
            theirs = statistics.median(others)
            took = f"{ms_text(by_rank[late])} ms per step (median of the others: {ms_text(theirs)} ms)"
            computes = _kernels(late, kernels) if text == "it computes for" else ""
            found.append((by_rank[late] - theirs, f"; {text} {took}{computes}"))
    found = [x for x in found if x[0] >= MORE_SHARE * own.step_ms]
    most = max((more for more, _ in found), default=0.0)
    # the loader is named first: a wait for it is also time in which nothing is computed
    return next((text for more, text in found if more >= 0.8 * most), "")


def _kernels(late: int, of_rank: Mapping[int, tuple[float, float]]) -> str:
    """Return whether the late rank runs more kernels than the others, or as many that take longer; empty without a device."""
    usual, usual_us = (statistics.median(x[i] for q, x in of_rank.items() if q != late) for i in (0, 1))
    number, us = of_rank[late]
    more, longer = (number / usual, us / usual_us) if usual and usual_us else (0.0, 0.0)
    if more >= 1 + MORE_SHARE:
        return f", in {more:.2f} times as many kernels"
    if more <= 1 - MORE_SHARE or longer < 1 + MORE_SHARE:
        return ""
    return (
        f", in as many kernels, on average {longer:.2f} times as long: a slower device (clocks, heat), or larger inputs"
    )
