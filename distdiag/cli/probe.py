"""`distdiag probe NAME`: the options are those of `distdiag.probekit.command.options`, shared with the scripts in probes/."""

from __future__ import annotations

import click


@click.command(
    add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> int:
    """Measure this machine: collectives, data loading, steps, GPUs; with a verdict."""
    from distdiag.probekit.command.main import main

    return main(list(arguments))
