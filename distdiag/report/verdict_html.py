"""A verdict as HTML for a cell of a notebook: no script, no style sheet, and all text from the job is escaped."""

from __future__ import annotations

from html import escape

from distdiag.diagnosis.model.findings import Finding, Report, Severity, still_open
from distdiag.diagnosis.text.finding import GLYPHS, in_the_past, listed
from distdiag.report.words import verdict, visible

COLOURS = {Severity.ERROR: "#d55e00", Severity.WARNING: "#e69f00", Severity.INFO: "#8a8a8a"}
_HEAD = "font-weight:600;margin:0 0 .4em 0"
_BOX = "border-left:4px solid {};padding:.2em 0 .2em .8em;margin:.6em 0"
_ROW = "display:flex;gap:.8em;margin:.15em 0"


def verdict_html(report: Report) -> str:
    """Return the verdict as one HTML element; its colours suit a dark and a light notebook."""
    shown = [in_the_past(f) if report.ended_ago_s is not None else f for f in still_open(report.findings)]
    parts = [f'<p style="{_HEAD}">{_text(verdict(report))}</p>', *map(_finding, shown)]
    cleared = len(report.findings) - len(shown)
    notes = [f"cleared: {cleared}"] * bool(cleared) + [f"note: {note}" for note in report.notes]
    parts += [f'<p style="margin:.2em 0">{_text(note)}</p>' for note in notes]
    # a `$` in the job's text is no formula
    return f'<div class="tex2jax_ignore mathjax_ignore" style="max-width:60em;line-height:1.45">{"".join(parts)}</div>'


def _finding(f: Finding) -> str:
    severity = Severity(f.severity)
    certain = "proved" if f.certainty == "proved" else "suspected"
    head = f"{GLYPHS[severity]} {severity.upper()} {f.title} ({certain})"
    where = listed(f.where or f.waiting)
    rows = [("cost", f.cost), ("where", where), ("do", f.advice)]
    lines = [
        f'<div style="{_ROW}"><span style="min-width:3.2em;opacity:.7">{label}</span><span>{_text(text)}</span></div>'
        for label, text in rows
        if text
    ]
    colour = COLOURS[severity]
    return f'<div style="{_BOX.format(colour)}"><b style="color:{colour}">{_text(head)}</b><br>{_text(f.message)}{"".join(lines)}</div>'


def _text(text: str) -> str:
    """Return the job's text as it may be in HTML: control characters written out, markup escaped."""
    return escape(visible(text))
