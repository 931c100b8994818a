"""What `distdiag.open_run` returns: a run with pictures and a verdict for notebooks."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from distdiag.diagnosis.model.findings import Finding, Report, Severity, still_open
from distdiag.diagnosis.text.finding import GLYPHS, finding_lines, in_the_past, listed, printable
from distdiag.report.words import verdict, visible
from distdiag.store import reader

if TYPE_CHECKING:
    from distdiag.report.plot import Plot

COLOURS = {Severity.ERROR: "#d55e00", Severity.WARNING: "#e69f00", Severity.INFO: "#8a8a8a"}
_HEAD = "font-weight:600;margin:0 0 .4em 0"
_BOX = "border-left:4px solid {};padding:.2em 0 .2em .8em;margin:.6em 0"
_ROW = "display:flex;gap:.8em;margin:.15em 0"


class Run(reader.Run):
    """An open run; every method reads the newest contents. Not for use by two threads at once.

    In a notebook, a cell that ends in a run shows its verdict.
    """

    @property
    def plot(self) -> Plot:
        """Pictures of the run: `run.plot.steps()`, `.heat()`, `.ranks()` return matplotlib figures.

        Raises:
            DistdiagError: matplotlib is not installed.
        """
        from distdiag.errors import need

        need(("matplotlib",), "a picture")
        from distdiag.report.plot import Plot

        return Plot(self)

    def _repr_html_(self) -> str:
        return verdict_html(self.report())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the verdict where IPython shows text only."""
        report = self.report()
        lines = [printable(verdict(report)), *(line for f in still_open(report.findings) for line in finding_lines(f))]
        printer.text("\n".join(lines))


def verdict_html(report: Report) -> str:
    """Return the verdict as one HTML element without script and style sheet; its colours suit a dark and a light notebook."""
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
