"""`distdiag bench`: measure distdiag itself. The collection and its code are in a checkout only, in tests/faults."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

import click

from distdiag.cli import LazyGroup
from distdiag.errors import DistdiagError


def _checkout() -> Path:
    """Return the folder of the checkout: the one of this package, or the current one."""
    import distdiag

    for folder in (Path(distdiag.__file__).resolve().parents[1], Path.cwd()):
        if (folder / "tests" / "faults" / "bench.py").is_file():
            return folder
    hint = "run `distdiag bench faults` in a clone of the repository"
    raise DistdiagError("the fault collection is not installed", hint)


class _OfCheckout(LazyGroup):
    table: ClassVar = {
        "faults": ("tests.faults.bench", "Run faulty and healthy jobs and print the scorecard (in a clone).")
    }

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.table and (root := str(_checkout())) not in sys.path:
            sys.path.insert(0, root)
        return super().get_command(ctx, cmd_name)


@click.group(cls=_OfCheckout)
def command() -> None:
    """Measure distdiag itself."""
