"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from distdiag.streams import tolerate


def _plain(_context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        tolerate(ascii_only=True)


def ascii_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--ascii` to a command that prints text only."""
    return click.option(
        "--ascii", is_flag=True, expose_value=False, is_eager=True, callback=_plain, help="Print ASCII characters only."
    )(command)


def fail_on_option(about: str, *words: str) -> Callable[..., Any]:
    """Return the decorator that adds `--fail-on`; the first word is its default."""
    return click.option("--fail-on", type=click.Choice(words), default=words[0], show_default=True, help=about)
