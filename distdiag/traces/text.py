"""A profile as lines for a terminal."""

from __future__ import annotations

import os
from collections.abc import Sequence

from distdiag.terms.ranks import fold_ranks
from distdiag.terms.tables import table, wrapped
from distdiag.terms.units import MISSING, percent, size_text
from distdiag.terms.untrusted import visible
from distdiag.traces.model import CollectiveTimes, Comparison, CriticalPath, ModuleTimes, Profile, RankTimes

TOP = 5
PARTS, LEAST_SHARE = 5, 0.02  # of the critical path that are named
NAME = 60  # characters of an operator's name


def ms_text(value: float | None) -> str:
    """Return `4.20`, `836`, `3,539`; the unit is in the heading."""
    return MISSING if value is None else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 0-3,7`."""
    return f"rank{'s' * (len(ranks) > 1)} {fold_ranks(list(ranks))}"


def lines(p: Profile) -> list[str]:
    """Return the profile as lines of plain text; times are ms per step."""
    out = wrapped(p.verdict) if p.verdict else []
    out += wrapped(p.advice, head="  do  ") if p.advice else []
    out += [""] if out else []
    if p.ranks:
        last = (p.first_step or 0) + p.steps - 1
        steps = f"step {p.first_step}, ms" if p.steps == 1 else f"steps {p.first_step} to {last}, ms per step"
        out.append(steps if p.first_step is not None else "ms per step")
        out += ["", *table([_HEAD, *map(_times, p.ranks)])]
    if p.comparison is not None:
        out += ["", *_compared(p.comparison)]
    if p.critical_path is not None and p.critical_path.step_ms > 0:
        out += ["", *wrapped(path_text(p.critical_path, p.partial))]
    if p.collectives:
        transfer = "transfer or wait ms" if p.partial else "transfer ms"
        head = ("collective", "group", "per step", "bytes", "skew ms", transfer, "arrives last")
        out += ["", *table([head, *map(_collective, p.collectives[:TOP])], left=(0, 1))]
    if p.modules:
        out += ["", *table([_MODULE_HEAD, *map(_module, p.modules[:TOP])])]
    for r in p.ranks if p.comparison is None else ():
        out += ["", f"rank {r.rank}, most self time"]
        rows = [("  " + visible(o.name)[:NAME], ms_text(o.self_ms), f"{o.calls:g}") for o in r.operators[:TOP]]
        out += table([("  operator", "ms", "calls"), *rows])
        rows = [(f"  {place(x.file, x.line, x.function)}", ms_text(x.ms)) for x in r.lines[:TOP]]
        out += table([("  line of the script (sampled)", "ms"), *rows]) if rows else []
    measured = [r for r in p.ranks if r.stop_ms is not None]
    if measured:
        control = max((r.start_ms or 0.0) + (r.stop_ms or 0.0) for r in measured)
        saving = max(r.save_ms or 0.0 for r in measured)
        out += [
            "",
            *wrapped(
                f"cost, once: {ms_text(control)} ms to start and stop; {ms_text(saving)} ms to write the trace, "
                "in which the script mostly waits"
            ),
        ]
    reasons: dict[str, list[int]] = {}
    for m in p.missing:
        reasons.setdefault(m.reason, []).append(m.rank)
    notes = [f"{ranks_text(qs)}: no profile: {why}" for why, qs in reasons.items()]
    notes += [f"note: {n}" for n in p.notes]
    return out + [line for note in notes for line in wrapped(note)]


def place(file: str, line: int, function: str) -> str:
    """Return a line of code as `train.py:88 main`."""
    return visible(f"{os.path.basename(file)}:{line} {function}")


_HEAD = ("rank", "step", "compute", "comm", "overlap", "exposed", "waits for ranks", "data", "idle", "memory peak")


def _times(r: RankTimes) -> tuple[str, ...]:
    times = (r.step_ms, r.compute_ms, r.comm_ms, r.overlap_ms, r.exposed_ms, r.wait_ms, r.data_ms, r.idle_ms)
    return (str(r.rank), *map(ms_text, times), size_text(r.peak_bytes))


def _collective(c: CollectiveTimes) -> tuple[str, ...]:
    late = f"rank {c.late_rank} ({percent(c.late_share)})" if c.skew_ms >= LEAST_SHARE * c.transfer_ms else MISSING
    return (
        visible(c.op)[:40],
        visible(c.group or MISSING)[:30],
        f"{c.per_step:g}",
        size_text(c.bytes_per_step),
        ms_text(c.skew_ms),
        ms_text(c.transfer_ms),
        late,
    )


_MODULE_HEAD = ("module", "collectives per step", "comm ms", "exposed ms")


def _module(m: ModuleTimes) -> tuple[str, ...]:
    return visible(m.module)[-NAME:], f"{m.per_step:g}", ms_text(m.comm_ms), ms_text(m.exposed_ms)


def path_text(p: CriticalPath, partial: bool = False) -> str:
    """Return the critical path in one line: what sets the length of a step, largest first.

    It is `partial` if ranks of the job have no trace.
    """
    parts = [(r.compute_ms, f"compute of rank {r.rank}") for r in p.ranks]
    parts += [(r.idle_ms, f"rank {r.rank} idle") for r in p.ranks]
    parts += [(r.unmatched_ms, f"unmatched communication of rank {r.rank}") for r in p.ranks]
    loading = [r.rank for r in p.ranks if r.data_ms > 0]
    parts.append((sum(r.data_ms for r in p.ranks), f"data loading of {ranks_text(loading)}"))
    parts.append((p.transfer_ms, "transfers, or waits for ranks without a trace," if partial else "transfers"))
    parts = sorted((x for x in parts if x[0] >= LEAST_SHARE * p.step_ms), key=lambda x: -x[0])
    shown = ", ".join(f"{name} {ms_text(ms)} ({percent(ms / p.step_ms)})" for ms, name in parts[:PARTS])
    return f"critical path, {ms_text(p.step_ms)} ms per step: {shown}"


def _compared(c: Comparison) -> list[str]:
    rows = [
        (
            f"{d.kind}: {visible(d.name)[:NAME]}",
            ms_text(d.culprit_ms),
            ms_text(d.peer_ms),
            f"{d.culprit_ms - d.peer_ms:+,.2f}",
        )
        for d in c.rows
    ]
    head = ("ms per step", f"rank {c.culprit}", f"rank {c.peer}", "difference")
    return [f"rank {c.culprit} ({visible(c.reason)}) compared with rank {c.peer}", *table([head, *rows])]
