"""The report as plain text, for a terminal, a ticket or a mail. The verdict comes first."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence

from distdiag.diagnosis.model.findings import Finding, Where, rank_list
from distdiag.report.facts import RunFacts, notable_ranks, verdict_words
from distdiag.report.words import from_us, gradient_times, gradient_words, milliseconds, moment, number, visible
from distdiag.terms.units import MISSING, duration, percent, rate_text, size_text
from distdiag.traces.text import lines as profile_lines

WIDTH = 110
MAX_RANKS = 32
MAX_COLLECTIVES = 20


def render(facts: RunFacts) -> str:
    """Return the report as lines of at most `WIDTH` columns, unless a name of the run is longer."""
    sections = [
        _head(facts),
        *(_finding(f) for f in facts.open_findings),
        *(_finding(f) for f in facts.cleared_findings),
        _job(facts),
        _ranks(facts),
        _gradients(facts),
        _collectives(facts),
        _profile(facts),
        _hosts(facts),
        _gpus(facts),
        _events(facts),
    ]
    return "\n\n".join("\n".join(visible(line) for line in lines) for lines in sections if lines) + "\n"


def _wrap(label: str, text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(
        visible(text), WIDTH, initial_indent=f"{indent}{label:<9}", subsequent_indent=" " * (len(indent) + 9),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _head(f: RunFacts) -> list[str]:
    words = verdict_words(f)
    lines = [f"{f.name}  {f.state.upper()}" + (f": {words}" if words else "")]
    lines.append(f"{f.run}, {moment(f.started_unix_s)}, {duration(f.duration_s)}")
    lines += [f"note: {n}" for n in f.notes]
    if not f.findings:
        lines.append("No findings.")
    return lines


def _places(label: str, places: Sequence[Where]) -> list[str]:
    lines = []
    for w in places[:8]:
        text = f"rank {w.rank}"
        text += f": {w.file}:{w.line}" if w.file else ""
        text += f" in {w.function}" if w.function else ""
        text += f" ({w.state})" if w.state else ""
        lines += _wrap(label if not lines else "", text)
    if len(places) > 8:
        lines += _wrap("", f"and {len(places) - 8} more")
    return lines


def _finding(f: Finding) -> list[str]:
    kind = f"{f.kind}/{f.cause}" if f.cause else f.kind
    cleared = "" if f.cleared_s is None else f", cleared at {duration(f.cleared_s)}"
    lines = [f"{f.severity.upper()}  {kind}  ({f.certainty}{cleared})"]
    lines += _wrap("what", f.message)
    if f.culprits:
        lines += _wrap("who", rank_list(f.culprits))
    lines += _places("where", f.where) + _places("waiting", f.waiting)
    if f.names:
        lines += _wrap(
            "names", ", ".join(f.names[:20]) + (f" and {len(f.names) - 20} more" if len(f.names) > 20 else "")
        )
    if f.cost:
        lines += _wrap("cost", f.cost)
    if f.advice:
        lines += _wrap("do", f.advice)
    step = "" if f.step is None else f", step {f.step:,}"
    lines += _wrap("when", f"first seen at {duration(f.first_seen_s)}, reported at {duration(f.detected_s)}{step}")
    if f.evidence:
        lines += _wrap("evidence", ", ".join(f.evidence))
    return lines


def _job(f: RunFacts) -> list[str]:
    lines = ["The job"]
    lines += _wrap(
        "ranks", f"{f.ranks_seen} of {number(f.world_size)} reported" + (f", {f.backend}" if f.backend else "")
    )
    if f.last_step is not None:
        sampled = f" (one in {f.sampled_every} was read)" if f.sampled_every > 1 else ""
        lines += _wrap("steps", f"{f.first_step:,}–{f.last_step:,}{sampled}")
    if f.step:
        ci = f.step.ci95_ms
        text = f"median {milliseconds(f.step.p50_ms)} ms"
        text += f" (95 % interval {milliseconds(ci[0])}–{milliseconds(ci[1])})" if ci else ""
        text += f", p95 {milliseconds(f.step.p95_ms)} ms" if f.step.p95_ms is not None else ""
        lines += _wrap("step", f"{text}, largest {milliseconds(f.step.max_ms)} ms, n = {f.step.n:,}")
    if f.samples_per_s is not None:
        lines += _wrap("rate", f"{f.samples_per_s:,.0f} samples/s, pauses included")
    if f.command:
        lines += _wrap("command", f.command)
    if f.details:
        lines += _wrap("details", ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in f.details.items()))
    if f.versions:
        lines += _wrap("versions", ", ".join(f"{k} {v}" for k, v in f.versions.items()))
    return lines


def _table(
    title: str, columns: Sequence[tuple[str, Callable[[object], str]]], rows: Iterable[Sequence[object]]
) -> list[str]:
    """Return a table under its title; numbers right-aligned, words (columns marked by a leading '<') left-aligned."""
    body = [[visible(show(v)) for (_, show), v in zip(columns, row, strict=True)] for row in rows]
    names = [name.lstrip("<") for name, _ in columns]
    widths = [max(len(n), *(len(r[i]) for r in body)) for i, n in enumerate(names)]
    left = [name.startswith("<") for name, _ in columns]

    def line(cells: Sequence[str]) -> str:
        return (
            "  "
            + "  ".join(
                c.ljust(w) if is_left else c.rjust(w) for c, w, is_left in zip(cells, widths, left, strict=True)
            ).rstrip()
        )

    return [title, line(names), *map(line, body)]


def _word(value: object) -> str:
    return MISSING if value is None or value == "" else str(value)


def _any(show: Callable[..., str], *args: object) -> Callable[[object], str]:
    return lambda v: show(v, *args)


def _ranks(f: RunFacts) -> list[str]:
    shown = notable_ranks(f.ranks, MAX_RANKS)
    if not shown:
        return []
    ms = _any(milliseconds)
    title = "Ranks (medians per step, ms; the slow rank waits least)"
    if len(shown) < len(f.ranks):
        title = f"Ranks, {len(shown)} of {len(f.ranks):,} (medians per step, ms; the slow rank waits least)"
    lines = _table(
        title,
        [("rank", _word), ("<state", _word), ("step", _any(number)), *((n, ms) for n in
         ("step ms", "self", "wait", "data", "h2d", "fwd", "bwd", "optim", "other")),
         ("slowest in", _any(percent)), ("memory", _any(size_text))],
        [(r.rank, r.life, r.step, r.step_ms, r.self_ms, r.wait_ms, r.data_ms, r.h2d_ms, r.forward_ms, r.backward_ms,
          r.optimizer_ms, r.other_ms, r.slowest_share, r.rss_bytes) for r in shown],
    )  # fmt: skip
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


def _collectives(f: RunFacts) -> list[str]:
    if not f.collectives:
        return []
    us = _any(from_us)
    late = [None if c.late_rank is None else f"rank {c.late_rank} in {percent(c.late_share)}" for c in f.collectives]
    return _table(
        "Collectives (times on the rank that arrived last; skew: first to last arrival)",
        [("<operation", _word), ("<group", _word), ("size", _any(size_text)), ("count", _any(number)), ("p50 ms", us),
         ("p99 ms", us), ("busbw GB/s", _any(number, 2)), ("skew ms", us), ("<last to arrive", _word)],
        [(c.op, c.pgroup, c.bytes, c.count, c.p50_us, c.p99_us, c.busbw_gbps, c.skew_p50_us, who)
         for c, who in list(zip(f.collectives, late, strict=True))[:MAX_COLLECTIVES]],
    )  # fmt: skip


def _profile(f: RunFacts) -> list[str]:
    if f.profile is None:
        return []
    return [
        f"Profile {f.profile.number} (distdiag profile)",
        *(f"  {line}".rstrip() for line in profile_lines(f.profile)),
    ]


def _hosts(f: RunFacts) -> list[str]:
    if not f.hosts:
        return []
    return _table(
        "Hosts",
        [("node", _word), ("<host", _word), ("cores", _word), ("CPU %", _any(number)), ("load", _any(number, 1)),
         ("memory peak", _any(size_text)), ("disk read", _any(rate_text)), ("net sent", _any(rate_text))],
        [(h.node, h.host, h.cores, h.cpu_pct, h.load1, h.memory_peak_bytes, h.disk_read_bytes_per_s,
          h.net_sent_bytes_per_s) for h in f.hosts],
    )  # fmt: skip


def _gpus(f: RunFacts) -> list[str]:
    if not f.gpus:
        return []
    return _table(
        "GPUs",
        [("node", _word), ("GPU", _word), ("<name", _word), ("rank", _word), ("util %", _any(number)),
         ("memory peak", _any(size_text)), ("power W", _any(number)), ("hottest °C", _any(number)), ("throttled", _any(percent)),
         ("<PCIe", _word)],
        [(g.node, g.gpu, g.name, g.rank, g.utilization_pct, g.memory_peak_bytes, g.power_w, g.temperature_max_c,
          g.throttled_share, g.pcie) for g in f.gpus],
    )  # fmt: skip


def _events(f: RunFacts) -> list[str]:
    events = [e for e in f.events if e.level != "info"][-10:]
    if not events:
        return []
    return ["Events", *(line for e in events for line in _wrap(duration(e.t_s), f"{e.source}: {e.text}"))]
