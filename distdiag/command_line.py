"""Reads a command line with click for the entry points that are not `distdiag COMMAND`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import click

from distdiag.errors import DistdiagError

SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


def read(command: click.Command, argv: Sequence[str], prog: str) -> dict[str, Any]:
    """Return the values of a command's parameters by name.

    Raises:
        DistdiagError: an option or value is wrong.
        SystemExit: `--help` was printed; the code is 0.
    """
    try:
        return command.make_context(prog, list(argv)).params
    except click.UsageError as e:
        raise usage_error(e, prog) from None
    except click.exceptions.Exit as e:
        raise SystemExit(e.exit_code) from None


def usage_error(error: click.UsageError, prog: str) -> DistdiagError:
    """Return click's error as ours: one line, and the command whose help lists the options."""
    where = error.ctx.command_path if error.ctx else prog
    return DistdiagError(error.format_message().rstrip("."), f"`{where} --help` lists the options")


class SectionedCommand(click.Command):
    """A command whose help lists its options in sections: title -> options."""

    def __init__(
        self,
        sections: dict[str, list[click.Parameter]],
        params: list[click.Parameter],
        shown: Callable[[click.Parameter], bool] = lambda _: True,
        **attrs: Any,
    ) -> None:
        """Make the command.

        Args:
            sections: Title -> options.
            params: Of no section: arguments.
            shown: Whether the help lists an option; the command line takes all.
        """
        super().__init__(params=[*params, *itertools.chain(*sections.values())], context_settings=SETTINGS, **attrs)
        self.sections = {title: listed for title, given in sections.items() if (listed := [*filter(shown, given)])}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shown = dict(self.sections)
        last = list(shown)[-1]
        shown[last] = [*shown[last], *filter(None, [self.get_help_option(ctx)])]
        for title, options in shown.items():
            with formatter.section(title):
                formatter.write_dl([record for o in options if (record := o.get_help_record(ctx)) is not None])


def recording_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a recorded launch, which `distdiag run` and `-m distdiag.run` share."""
    for option in (
        click.option("--quiet", is_flag=True, help="Record findings but do not print them on stderr."),
        click.option("--tape", is_flag=True, help="Keep what the diagnosis is given as RUN/run.tape, at most 8 MiB."),
        click.option("--keep", metavar="SIZE", help="Size bound of the run's database, e.g. 500M (default 2G)."),
        click.option(
            "--share", is_flag=True, help="Let other users read the run, as the umask allows (default: only you)."
        ),
        click.option("--name", help="Name of the run (default: the script's)."),
        click.option("--run-dir", metavar="DIR", help="Run directory (default: ./reports/<time>-<name>)."),
    ):
        command = option(command)
    return command
