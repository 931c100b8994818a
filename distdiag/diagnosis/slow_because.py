"""Why a rank is slow: garbage collections, a tool that is on, another of its threads, more data, or something that grows."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import msgspec

from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import WARM_STEPS, Snapshot
from distdiag.diagnosis.pauses import Pauses
from distdiag.diagnosis.step_times import mean_step_s
from distdiag.diagnosis.text import straggler as text
from distdiag.diagnosis.text.phrases import at, count
from distdiag.diagnosis.training_data import training_loaders
from distdiag.terms.units import percent, size_text


@dataclass(frozen=True)
class Limits:
    thread: float = 0.3
    """Share of the time that a thread of a slow rank must compute, beyond the others', to be named. Where cores are scarce, as much as
    another rank computes in all is enough."""
    larger: float = 1.25
    """How many times as much data it must get."""
    gained_bytes: int = 64 << 20
    """Bytes by which its memory must have grown to be mentioned."""
    slower: float = 1.4
    """Its newest steps must take this many times as long as its steps on average. Steps that grow steadily come to twice the average."""
    newest: int = 32
    """Newest steps whose median is compared."""
    collecting: float = 0.5
    """Share of what it costs that full garbage collections must take to be its cause."""


limits = Limits()
Why = tuple[str, str]  # (what is added to the message, advice)


def explained(found: Finding, s: Snapshot, pauses: Pauses, cost: float) -> Finding:
    """Return the finding of slow ranks, of one with what explains it.

    Args:
        cost: Share of the time that the others lose to it.
    """
    if len(found.culprits) != 1:
        return found
    rank = found.culprits[0]
    if (why := _of_collections(rank, s, pauses, cost)) is not None:
        found = msgspec.structs.replace(found, cause="gc")
    elif (why := _of_tools(rank, s)) is None and (why := of_thread(rank, s)) is not None:
        found = msgspec.structs.replace(found, cause="host")  # in whichever phase it takes the time
    why = why or _of_data(found, s) or _of_growth(found, s)
    return msgspec.structs.replace(found, message=found.message + why[0], advice=why[1]) if why is not None else found


def _of_tools(rank: int, s: Snapshot) -> Why | None:
    """Return the tools that are on in that rank only."""
    theirs = {tool for q, r in s.ranks.items() if q != rank for tool in r.tools}
    if not (on := [tool for tool in s.ranks[rank].tools if tool not in theirs]):
        return None
    return f"; {' and '.join(on)} {'is' if len(on) == 1 else 'are'} on there, and on no other rank", text.TOOLS


def _of_collections(rank: int, s: Snapshot, pauses: Pauses, cost: float) -> Why | None:
    """Return the garbage collections, if they are most of what the rank costs."""
    share, n = pauses.collecting(s, rank)
    usual = statistics.median_low(pauses.collecting(s, q)[0] for q in s.ranks if q != rank)
    if not n or share - usual < limits.collecting * cost:
        return None
    took = f"{count(n, 'full garbage collection')} {'take' if n > 1 else 'takes'} {percent(share)} of its time"
    at_once = "" if s.ranks[rank].gc_off else f"; `gc.disable()`, and {text.TOGETHER}, let them pause together"
    return f": {took}, {percent(usual)} on the others", f"{text.FREEZE}{at_once}"


def of_thread(rank: int, s: Snapshot) -> Why | None:
    """Return the thread that takes the GIL or a core from the training; None if the others have such a one, too."""
    r, others = s.ranks[rank], [x for q, x in s.ranks.items() if q != rank]
    usual, computed = (
        statistics.median_low(of) for of in ([x.thread_share for x in others], [x.cpu_pct or 100.0 for x in others])
    )
    if r.thread_share - usual < min(limits.thread, computed / 100):
        return None
    share, theirs = percent(r.thread_share), percent(usual)
    return (
        f"; its thread {r.thread!r} computes {share} of the time{at(r.thread_site)}, {theirs} on the others",
        text.THREAD,
    )


def _of_data(found: Finding, s: Snapshot) -> Why | None:
    """Return how much more data the rank gets: forwards in a step, or elements in a batch; None if it gets no more."""
    forwards = {q: sum(m.forwards for m in r.models) / r.step for q, r in s.ranks.items() if r.step}
    elements = {q: x.mean_elements or 0.0 for q, x in training_loaders(s).items()}
    for of, more, advice, causes in (
        (forwards, "it has made {own:.1f} forwards per step so far, the others {usual:.1f}", text.MORE,
         ("forward", "backward", "data", "host")),
        (elements, "its batches are {times:.1f} times as large: {own:,.0f} elements on average, {usual:,.0f} on the others", text.LARGER,
         ("forward", "backward", "data")),
    ):  # fmt: skip
        own = of.pop(found.culprits[0], 0.0)
        usual = statistics.median(of.values()) if of else 0.0
        if found.cause in causes and usual and own >= limits.larger * usual:
            return f"; {more.format(own=own, usual=usual, times=own / usual)}", advice
    return None


def _of_growth(found: Finding, s: Snapshot) -> Why | None:
    """Return what grows: the rank's memory, if that is much and the others' little, or the time of its steps."""
    (rank,), said = found.culprits, []
    grown = {q: (points[-1][1] - points[0][1], points[-1][0] - points[0][0])
             for q, r in s.ranks.items() if (points := [x for x in r.memory if x[0] >= (r.warm_since_s or math.inf)])}  # fmt: skip
    n_bytes, span_s = grown.pop(rank, (0, 0.0))
    theirs = max((n for n, _ in grown.values()), default=n_bytes)
    if found.cause == "host" and n_bytes >= limits.gained_bytes and 4 * theirs <= n_bytes:
        said.append(
            f"its memory has grown by {size_text(n_bytes)} in {span_s:.0f} s, that of the others by {size_text(max(0, theirs))}"
        )
    r = s.ranks[rank]
    mean_s = mean_step_s(r)
    if mean_s is not None and r.step - WARM_STEPS >= 2 * limits.newest:
        now_s = statistics.median(x.step_ms for x in r.steps[-limits.newest :]) / 1e3
        if now_s >= limits.slower * mean_s:
            said.append(
                f"steps take longer with time: {now_s * 1e3:.0f} ms now, {mean_s * 1e3:.0f} ms on average so far"
            )
    return ("".join(f"; {x}" for x in said), f"{text.KEEPS}; {found.advice}") if said else None
