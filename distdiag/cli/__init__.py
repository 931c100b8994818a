"""The `distdiag` command: one file per sub-command, imported only when it is called.

`distdiag --help` must not import torch, textual or pandas, so the group has only names and short help.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from typing import Any, ClassVar

import click

from distdiag.cli.errors import report_error
from distdiag.command_line import SETTINGS, usage_error
from distdiag.errors import DistdiagError, ExitCode
from distdiag.streams import open_closed, say, tolerate
from distdiag.version import VERSION

COMMANDS: dict[str, tuple[str, str]] = {
    # name: (module with an attribute `command`, one line for the overview)
    "run": ("distdiag.cli.run", "Launch an unchanged training script on all ranks, and record it."),
    "tui": ("distdiag.cli.tui", "Watch a run live, or replay a finished one."),
    "diagnose": ("distdiag.cli.diagnose", "Print the verdict on a run, or on flight-recorder dumps from any cluster."),
    "dump": ("distdiag.cli.dump", "Print the stacks and in-flight collectives of every rank, now."),
    "attach": ("distdiag.cli.attach", "Judge a running job that was not recorded, by the stacks of its ranks."),
    "profile": ("distdiag.cli.profile", "Profile the running job for a few steps, with torch.profiler."),
    "demo": ("distdiag.cli.demo", "Show a job that hangs, and its verdict, within a minute."),
    "probe": ("distdiag.cli.probe", "Measure this machine: collectives, data loading, steps, GPUs."),
    "report": ("distdiag.cli.report", "Write the findings as HTML, text, JSON or a Perfetto trace."),
    "compare": ("distdiag.cli.compare", "Compare runs: step time, phases, findings."),
    "history": ("distdiag.cli.history", "Ask many runs: which host, which line, which figure changed."),
    "doctor": ("distdiag.cli.doctor", "Check that this machine can run distributed jobs; list what to fix."),
    "config": ("distdiag.cli.config", "Print every setting, its value, and where that is from."),
    "mcp": ("distdiag.cli.mcp", "Serve a run to an assistant: read-only tools over stdio."),
    "skill": ("distdiag.cli.skill", "Print how an assistant reads distdiag's output."),
    "completion": ("distdiag.cli.completion", "Print the completion script of a shell."),
    "bench": ("distdiag.cli.bench", "Run the fault collection and print the scorecard."),
}

READERS = ("tui", "diagnose", "dump", "attach", "profile", "report", "doctor", "mcp")  # [tool.distdiag] holds for them
EXIT_CODES = "Exit codes: " + ", ".join(f"{c.value} {c.name}" for c in ExitCode) + "."


class LazyGroup(click.Group):
    """Commands that are imported when they are called."""

    table: ClassVar[dict[str, tuple[str, str]]] = COMMANDS

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.table:
            return None
        return importlib.import_module(self.table[cmd_name][0]).command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in self.table and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], self.table, n=1)
            path = ctx.command_path
            raise DistdiagError(
                f"unknown command '{args[0]}'",
                f"did you mean `{path} {near[0]}`?" if near else f"`{path} --help` lists the commands",
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.table.items()])


@click.group(cls=LazyGroup, epilog=EXIT_CODES, context_settings=SETTINGS)
@click.version_option(VERSION)
@click.pass_context
def app(context: click.Context) -> None:
    """Who is slow, who is stuck, at which line: diagnostics for distributed PyTorch jobs while they run.

    \b
    DISTDIAG=1 torchrun --nproc-per-node 8 train.py …   record any script
    distdiag tui                                             watch it
    distdiag diagnose                                        the verdict
    """
    if context.invoked_subcommand in READERS:
        _use_settings(context)


def _use_settings(context: click.Context) -> None:
    """Take the run directory and --fail-on from pyproject.toml, unless the command line or a variable has them."""
    from distdiag import settings

    file = settings.read()
    if "run-dir" in file.values:
        os.environ.setdefault(settings.SETTINGS["run-dir"].variable, file.values["run-dir"])
    if "fail-on" in file.values:
        context.default_map = {name: {"fail_on": file.values["fail-on"]} for name in ("diagnose", "attach")}
    if file.warnings:
        say(file.warning(), err=True)


def main(argv: list[str] | None = None) -> int:
    """Run the `distdiag` command and return its exit code; a known error shows no traceback."""
    open_closed()
    tolerate()
    arguments = sys.argv[1:] if argv is None else argv
    named = arguments[0] if arguments and arguments[0] in COMMANDS else None
    json_of = named if "--json" in arguments else None
    try:
        code = _run(arguments, json_of, f"distdiag {named}" if named else "distdiag")
        sys.stdout.flush()  # a full disk shows here, not when Python ends
    except BrokenPipeError:  # the reader of stdout (head, less) has ended
        _discard_output()
        code = 0
    except OSError as e:
        code = report_error(_of_system(e), json_of)
    return code


def _run(arguments: list[str], json_of: str | None, prog: str) -> int:
    try:
        result = app.main(args=arguments, prog_name="distdiag", standalone_mode=False)
        return int(result) if isinstance(result, int) else 0
    except DistdiagError as e:
        return report_error(e, json_of)
    except click.exceptions.NoArgsIsHelpError as e:
        say(e.format_message())
        return int(ExitCode.USAGE)
    except click.UsageError as e:
        return report_error(usage_error(e, prog), json_of)
    except click.exceptions.Exit as e:
        return e.exit_code
    except (KeyboardInterrupt, click.Abort):
        return int(ExitCode.INTERRUPTED)


def _of_system(error: OSError) -> DistdiagError:
    """Return an error of a file, or of the output on a full or broken disk, in one line; raise any other."""
    if error.filename is not None:
        return DistdiagError(f"{error.filename}: {error.strerror}", "give the path of a file or a directory")
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
        raise error
    _discard_output()
    text = f"the output cannot be written: {error.strerror}"
    return DistdiagError(text, "check the disk that it goes to, and TMPDIR")


def _discard_output() -> None:
    """Let what is still to be written on stdout go nowhere: Python would report the failure again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
