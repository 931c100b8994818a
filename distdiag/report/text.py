"""The report as plain text, for a terminal, a ticket or a mail. The verdict comes first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from distdiag.diagnosis.model.findings import Finding, Where, rank_list, ranks_seen
from distdiag.diagnosis.text.finding import where_text
from distdiag.report.facts import RunFacts, lasted, notable_ranks
from distdiag.report.words import from_us, gradient_times, gradient_words, milliseconds, moment, number, visible
from distdiag.terms.steps import RATE
from distdiag.terms.tables import table, wrapped
from distdiag.terms.units import MISSING, decimal, duration, percent, rate_text, size_text
from distdiag.traces.text import lines as profile_lines

MAX_RANKS = 32
MAX_COLLECTIVES = 20


def render(facts: RunFacts) -> str:
    """Return the report: prose wrapped at 80 columns, tables as wide as they are."""
    sections = [
        _head(facts),
        *(_finding(f) for f in facts.open_findings),
        *(_finding(f) for f in facts.cleared_findings),
        _job(facts),
        _ranks(facts),
        _gradients(facts),
        _table(
            "Collectives (times on the rank that arrived last; skew: first to last arrival)",
            _COLLECTIVES, facts.collectives[:MAX_COLLECTIVES],
        ),
        _profile(facts),
        _table("Hosts", _HOSTS, facts.hosts),
        _table("GPUs", _GPUS, facts.gpus),
        _events(facts),
    ]  # fmt: skip
    return "\n\n".join("\n".join(visible(line) for line in lines) for lines in sections if lines) + "\n"


def _wrap(label: str, text: str | None) -> list[str]:
    """Return a text next to its label; nothing without text."""
    return wrapped(text, head=f"  {label:<9}") if text else []


def _head(f: RunFacts) -> list[str]:
    lines = [*wrapped(f.verdict), f"{f.name}, {f.run}", f"{moment(f.started_unix_s)}, {lasted(f)}"]
    return lines + [part for n in f.notes for part in wrapped(f"note: {n}")]


def _places(label: str, places: Sequence[Where]) -> list[str]:
    lines = []
    for w in places[:8]:
        text = f"rank {w.rank}"
        text += f": {where_text(w)}" if w.file else ""
        text += f" ({w.state})" if w.state else ""
        lines += _wrap(label if not lines else "", text)
    if len(places) > 8:
        lines += _wrap("", f"and {len(places) - 8} more")
    return lines


def _finding(f: Finding) -> list[str]:
    cleared = "" if f.cleared_s is None else f", cleared at {duration(f.cleared_s)}"
    lines = [f"{f.severity.upper()}  {f.title}  ({f.certainty}{cleared})"]
    lines += _wrap("what", f.message)
    lines += _wrap("who", rank_list(f.culprits) if f.culprits else "")
    lines += _places("where", f.where) + _places("waiting", f.waiting)
    more = f" and {len(f.names) - 20} more" if len(f.names) > 20 else ""
    lines += _wrap("names", ", ".join(f.names[:20]) + more)
    lines += _wrap("cost", f.cost) + _wrap("do", f.advice)
    step = "" if f.step is None else f", step {f.step:,}"
    lines += _wrap("when", f"first seen at {duration(f.first_seen_s)}, reported at {duration(f.detected_s)}{step}")
    return lines + _wrap("evidence", ", ".join(f.evidence))


def _job(f: RunFacts) -> list[str]:
    lines = ["The job"]
    lines += _wrap("ranks", ranks_seen(f.ranks_seen, f.world_size) + (f", {f.backend}" if f.backend else ""))
    if f.last_step is not None:
        sampled = f" (one in {f.sampled_every} was read)" if f.sampled_every > 1 else ""
        lines += _wrap("steps", f"{f.first_step:,}–{f.last_step:,}{sampled}")
    if f.step:
        ci = f.step.ci95_ms
        text = f"mean {milliseconds(f.step.mean_ms)} ms, median {milliseconds(f.step.p50_ms)} ms"
        text += f" (95 % interval {milliseconds(ci[0])}–{milliseconds(ci[1])})" if ci else ""
        text += f", p95 {milliseconds(f.step.p95_ms)} ms" if f.step.p95_ms is not None else ""
        lines += _wrap("step", f"{text}, largest {milliseconds(f.step.max_ms)} ms, n = {f.step.n:,}")
    if f.samples_per_s is not None:
        lines += _wrap("rate", f"{f.samples_per_s:,.0f} samples/s over the run ({RATE})")
    lines += _wrap("command", f.command)
    lines += _wrap("details", ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in f.details.items()))
    return lines + _wrap("versions", ", ".join(f"{k} {v}" for k, v in f.versions.items()))


Column = tuple[str, str, Callable[[Any], str]]  # head (`<` aligns to the left), attribute of a row, its text


def _table(title: str, columns: Sequence[Column], rows: Sequence[object]) -> list[str]:
    """Return a table under its title; nothing without rows."""
    if not rows:
        return []
    cells = [[head.lstrip("<") for head, *_ in columns]]
    cells += [[visible(show(getattr(row, name))) for _, name, show in columns] for row in rows]
    left = [i for i, (head, *_) in enumerate(columns) if head.startswith("<")]
    return [*wrapped(title), *(f"  {line}".rstrip() for line in table(cells, left))]


def _word(value: object) -> str:
    return MISSING if value is None or value == "" else str(value)


_two_digits = partial(decimal, digits=2)
_RANKS: tuple[Column, ...] = (
    ("rank", "rank", _word), ("<state", "life", _word), ("step", "step", number), ("mean", "step_mean_ms", milliseconds),
    ("p50", "step_ms", milliseconds), ("self", "self_ms", milliseconds), ("wait", "wait_ms", milliseconds),
    ("waited", "waited_s", duration), ("of it", "waited_share", percent), ("data", "data_ms", milliseconds),
    ("h2d", "h2d_ms", milliseconds), ("fwd", "forward_ms", milliseconds), ("bwd", "backward_ms", milliseconds),
    ("optim", "optimizer_ms", milliseconds), ("other", "other_ms", milliseconds), ("slowest", "slowest_share", percent),
    ("memory", "rss_bytes", size_text),
)  # fmt: skip
_COLLECTIVES: tuple[Column, ...] = (
    ("<operation", "op", _word), ("<group", "pgroup", _word), ("size", "bytes", size_text), ("count", "count", number),
    ("p50 ms", "p50_us", from_us), ("p99 ms", "p99_us", from_us), ("busbw GB/s", "busbw_gbps", _two_digits),
    ("skew ms", "skew_p50_us", from_us), ("<last to arrive", "latest", _word),
)  # fmt: skip
_HOSTS: tuple[Column, ...] = (
    ("node", "node", _word), ("<host", "host", _word), ("cores", "cores", _word), ("CPU %", "cpu_pct", number),
    ("load", "load1", decimal), ("memory peak", "memory_peak_bytes", size_text),
    ("disk read", "disk_read_bytes_per_s", rate_text), ("net sent", "net_sent_bytes_per_s", rate_text),
)  # fmt: skip
_GPUS: tuple[Column, ...] = (
    ("node", "node", _word), ("GPU", "gpu", _word), ("<name", "name", _word), ("rank", "rank", _word),
    ("util %", "utilization_pct", number), ("memory peak", "memory_peak_bytes", size_text), ("power W", "power_w", number),
    ("hottest °C", "temperature_max_c", number), ("throttled", "throttled_share", percent), ("<PCIe", "pcie", _word),
)  # fmt: skip


def _ranks(facts: RunFacts) -> list[str]:
    shown = notable_ranks(facts.ranks, MAX_RANKS)
    if not shown:
        return []
    some = f", {len(shown)} of {len(facts.ranks):,}" if len(shown) < len(facts.ranks) else ""
    lines = _table(
        f"Ranks{some} (ms per step: mean, then medians; time waited for others, and its share; the slow rank waits least; fwd, bwd include waiting)",
        _RANKS,
        shown,
    )
    for r in shown:
        if r.exception or r.waiting or (r.life not in ("running", "finished", "starting") and r.place):
            what = r.exception or (f"in {r.waiting}" if r.waiting else r.life or "")
            lines += _wrap(f"rank {r.rank}", f"{what}" + (f" at {r.place}" if r.place else ""))
    return lines


def _gradients(f: RunFacts) -> list[str]:
    g = f.gradients
    if g is None:
        return []
    lines = ["Gradients (DDP)"]
    lines += _wrap("buckets", gradient_words(g))
    if g.exposed_ms is not None:
        lines += _wrap("time", gradient_times(g))
    return lines


def _profile(f: RunFacts) -> list[str]:
    if f.profile is None:
        return []
    return [
        f"Profile {f.profile.number} (distdiag profile)",
        *(f"  {line}".rstrip() for line in profile_lines(f.profile)),
    ]


def _events(f: RunFacts) -> list[str]:
    events = [e for e in f.events if e.level != "info"][-10:]
    if not events:
        return []
    return ["Events", *(line for e in events for line in _wrap(duration(e.t_s), f"{e.source}: {e.text}"))]
