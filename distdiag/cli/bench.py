"""`distdiag bench`: measure distdiag itself. The collection and its code are in a checkout only, in tests/faults."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import click

from distdiag.errors import DistdiagError


def _checkout() -> Path:
    """Return the folder of the checkout: the one of this package, or the current one."""
    import distdiag

    for folder in (Path(distdiag.__file__).resolve().parents[1], Path.cwd()):
        if (folder / "tests" / "faults" / "bench.py").is_file():
            return folder
    raise DistdiagError(
        "the fault collection is not installed", "run `distdiag bench faults` in a clone of the repository"
    )


class _OfCheckout(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return ["faults"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name != "faults":
            return None
        root = str(_checkout())
        if root not in sys.path:
            sys.path.insert(0, root)
        return importlib.import_module("tests.faults.bench").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([("faults", "Run faulty and healthy jobs and print the scorecard (in a clone).")])


@click.group(cls=_OfCheckout)
def command() -> None:
    """Measure distdiag itself."""
