"""What `distdiag.open_run` returns: a run with pictures and a verdict for notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distdiag.report.verdict_html import verdict_html
from distdiag.report.words import verdict
from distdiag.store import reader

if TYPE_CHECKING:
    from distdiag.report.plot import Plot


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
        """Return the verdict for a cell of a notebook."""
        return verdict_html(self.report())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the verdict where IPython shows text only."""
        from distdiag.diagnosis.model.findings import still_open
        from distdiag.diagnosis.text.finding import finding_lines, printable

        report = self.report()
        lines = [printable(verdict(report)), *(line for f in still_open(report.findings) for line in finding_lines(f))]
        printer.text("\n".join(lines))
