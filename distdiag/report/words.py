"""Format numbers and the job's text; nothing from the job is interpreted by a terminal or a browser."""

from __future__ import annotations

import time

from distdiag.diagnosis.model.findings import (
    BAD_STATES,
    KILLED,
    NO_ERROR,
    STOPPED_BY,
    Gradients,
    Report,
    Severity,
    State,
    rank_list,
    ranks_seen,
    still_open,
)
from distdiag.terms import untrusted
from distdiag.terms.units import MISSING, counted, decimal, percent, rough_duration, size_text

EARLY_S = 10.0  # a job this young has too few steps to judge


def visible(text: object) -> str:
    """Return `text` with control, bidirectional and invisible characters written as escapes (`\\x1b`)."""
    return untrusted.visible(str(text))


def milliseconds(value: float | None) -> str:
    """Return `0.042`, `3.1`, `231.4`, `12,400`; the unit is in the heading."""
    if value is None:
        return MISSING
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 1 or value == 0:
        return f"{value:.1f}"
    return f"{value:.3f}"


def from_us(value_us: float | None) -> str:
    """Return a time given in µs as `milliseconds` writes it."""
    return MISSING if value_us is None else milliseconds(value_us / 1e3)


def number(value: float | None, digits: int = 0) -> str:
    return decimal(value, digits)


def moment(unix_s: float | None) -> str:
    """Return local date and time with the offset from UTC; MISSING for a time beyond the calendar, in a damaged run."""
    try:
        return MISSING if unix_s is None else time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(unix_s))
    except (OSError, OverflowError, ValueError):
        return MISSING


def gradient_words(g: Gradients) -> str:
    """Return `9.4 MiB in 3 buckets of at most 25.0 MiB, all-reduced in default_pg by 2 ranks`."""
    text = f"{size_text(g.bytes)} in {counted(g.buckets, 'bucket')}"
    text += f" of at most {size_text(g.bucket_cap_bytes)}" if g.bucket_cap_bytes else ""
    text += f", all-reduced in {g.pgroup} by {number(g.ranks)} ranks"
    return text + (f" with {g.comm_hook}" if g.comm_hook else "")


def gradient_times(g: Gradients) -> str:
    """Return `31.0 ms of communication a step, 14.2 ms of it exposed (not hidden by computation; medians of …); …`."""
    return (
        f"{milliseconds(g.comm_ms)} ms of communication a step, {milliseconds(g.exposed_ms)} ms of it exposed (not hidden by computation; medians of"
        f" {number(g.steps)} measured steps of the rank with the least); in all of them {percent(g.exposed_share)} of step time is exposed"
    )


def _verdict_without_findings(report: Report, stopped: str | None, infos: int, seen: str) -> str:
    """Return the line for a job without an error or a warning, with the number of its `infos`.

    `stopped`: what ended the job from outside, if that is known; `seen`: how many ranks were seen, in words.
    """
    found = f"no error or warning, {infos} info ({seen})" if infos else ""
    if stopped:
        return f"{report.state}: {stopped}; {found or f'no other cause found, {seen}'}"
    if report.state in BAD_STATES:
        why = f"; {report.state_text}" if report.state_text else ""
        return f"{report.state}: the cause was not found, {seen}{why}"
    if report.unjudged and (not report.ranks_seen or report.unjudged.startswith(NO_ERROR)):
        return f"no verdict: {report.unjudged}"
    n = sum(f.cleared_s is not None for f in report.findings)
    cleared = f"; {n} cleared" if n else ""
    if report.unjudged:
        return f"{report.state}, only partly judged: {report.unjudged}{cleared}"
    if report.state == State.RUNNING and report.ended_ago_s is None and (report.age_s or EARLY_S) < EARLY_S:
        return f"{report.state}: too early to tell, nothing found in {rough_duration(report.age_s or 0.0)}, {seen}"
    waits = f"{report.state_text}; " if report.state == State.RUNNING and report.state_text else ""
    if found:
        return f"{report.state}: {waits}{found}"
    return f"{report.state}: {waits}nothing {'else ' if waits else ''}found, {seen}{cleared}"


def verdict(report: Report) -> str:
    """Return one line: the state of the job, the number of findings, and the ranks to examine first."""
    open_ones = still_open(report.findings)
    seen = ranks_seen(report.ranks_seen, report.world_size)
    counts = [
        counted(n, word)
        for word, s in (("error", Severity.ERROR), ("warning", Severity.WARNING))
        if (n := sum(f.severity == s for f in open_ones))
    ]
    text = report.state_text or ""
    stopped = text if KILLED in text or text.startswith(STOPPED_BY) else None
    if not counts:
        return _verdict_without_findings(report, stopped, infos=len(open_ones), seen=seen)
    culprits = sorted({r for f in open_ones if f.severity == Severity.ERROR for r in f.culprits})
    blame = f"; look at {rank_list(culprits)} first" if culprits else ""
    how = f"{stopped}; " if stopped else ""
    return f"{report.state}: {how}{', '.join(counts)}{blame} ({seen})"
