"""`distdiag config`: every setting, its value, and where that is from."""

from __future__ import annotations

import os
from typing import Any

import click

from distdiag.command_line import recording_options
from distdiag.streams import say
from distdiag.terms.tables import table


@click.command()
@recording_options
def command(**options: Any) -> None:
    """Print every setting with its value and its origin: an option given here, a variable, a line of pyproject.toml, or the default.

    [tool.distdiag] is read from the nearest pyproject.toml that has it, from here up to the repository's root or your home
    directory. It holds for `distdiag run` and `-m distdiag.run`; its run-dir and fail-on also for the commands that read runs.

    \b
    [tool.distdiag]
    keep = "500M"
    end-hangs-s = 600
    """
    from distdiag import settings

    file = settings.read()
    rows = [("setting", "value", "from"), *settings.shown(options, file, os.environ)]
    for line in table(rows, left=(0, 1, 2)):
        say(line)
    for warning in file.warnings:
        say(f"distdiag: warning: {warning}", err=True)
