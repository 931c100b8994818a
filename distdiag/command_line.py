"""Reads a command line with click for the entry points that are not `distdiag COMMAND`."""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, get_type_hints

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
    message = " ".join(error.format_message().split()).rstrip(".")  # click lists choices on lines of their own
    message = message.replace("integer range", "whole number").replace("float range", "number")  # click's words
    return DistdiagError(message, f"`{where} --help` lists the options")


def option(default: Any = None, *flags: str, **attrs: Any) -> Any:
    """Return a field of a dataclass that is an option of the command line; its help is the docstring below it.

    Args:
        flags: Names of the option; default: the field's.
        attrs: click's, and `section`, `used_by`, `low` (the least number), which the caller reads from the
            field's metadata.
    """
    given: dict[str, Any] = {"default_factory": list} if default == [] else {"default": default}
    return field(**given, metadata={"flags": flags, "attrs": attrs})


def options_of(
    kind: type, build: Callable[[str, Any, dict[str, Any]], dict[str, Any]] = lambda _name, _kind, attrs: attrs
) -> Iterator[tuple[Field[Any], click.Option]]:
    """Yield the fields that are options, with click's option, in their order.

    Args:
        build: Returns click's arguments from a field's name, its type and its own arguments.
    """
    docs, kinds = _field_docs(kind), get_type_hints(kind)
    for f in fields(kind):
        if f.metadata:
            attrs: dict[str, Any] = {"help": docs.get(f.name, ""), "default": f.default} | f.metadata["attrs"]
            attrs = {"flags": f.metadata["flags"] or (flag(f.name),)} | build(f.name, kinds[f.name], attrs)
            yield f, click.Option([f.name, *attrs.pop("flags")], **attrs)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _field_docs(kind: type) -> dict[str, str]:
    """Return the docstring below each field; empty if only byte code is installed."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, SyntaxError):
        return {}
    docs: dict[str, str] = {}
    for statement, after in itertools.pairwise(tree.body[0].body):  # type: ignore[attr-defined]
        match statement, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
    return docs


@dataclass
class Parsed(click.ParamType):
    """An option's value, converted by a function that raises our errors; `name` is what the contract calls its type."""

    name: str  # type: ignore[misc]
    parse: Callable[[str], Any]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self.parse(value) if isinstance(value, str) else value


def count(text: str) -> int:
    """Return a whole number that is not below 0."""
    try:
        value = int(text)
    except ValueError:
        raise DistdiagError(f"'{text}' is not a whole number", "give a count, e.g. 2") from None
    if value < 0:
        raise DistdiagError(f"{text} is below 0", "give a count, e.g. 2")
    return value


def number(text: str) -> float:
    """Return a finite number."""
    try:
        value = float(text)
    except ValueError:
        raise DistdiagError(f"'{text}' is not a number", "give a number, e.g. 10") from None
    if not math.isfinite(value):
        raise DistdiagError(f"'{text}' is not a finite number", "give a number, e.g. 10")
    return value


def check_script(words: Sequence[str], usage: str) -> None:
    """Check what a launch runs, before any rank starts: `-m MODULE`, a file, or a directory with a `__main__.py`.

    Raises:
        DistdiagError: there is none, or it cannot be read.
    """
    if words[:1] in ([], ["-m"]) and len(words) < 2:
        raise DistdiagError("-m needs the name of a module" if words else "no script given", usage)
    script = words[0]
    if script == "-m":
        return
    problem = ""
    if script.startswith("-"):
        raise DistdiagError(f"unknown option {script} before the script", usage)
    if not os.path.exists(script):
        problem = f"no script {script}"
    elif not os.access(script, os.R_OK):
        problem = f"{script} may not be read"
    elif os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        problem = f"{script} is a directory without __main__.py"
    if problem:
        raise DistdiagError(problem, "give the path of a Python file, or -m and a module's name")


class SectionedCommand(click.Command):
    """A command whose help lists its options in sections.

    Args:
        sections: Title -> options; a section without an option that is shown has no title either.
        params: Of no section: arguments.
    """

    def __init__(self, sections: dict[str, list[click.Parameter]], params: list[click.Parameter], **attrs: Any) -> None:
        super().__init__(params=[*params, *itertools.chain(*sections.values())], context_settings=SETTINGS, **attrs)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        last = [*self.sections][-1]
        for title, options in self.sections.items():
            shown = [*options, *filter(None, [self.get_help_option(ctx)])] if title == last else options
            if records := [record for one in shown if (record := one.get_help_record(ctx)) is not None]:
                with formatter.section(title):
                    formatter.write_dl(records)


def recording_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a recorded launch, which `distdiag run` and `-m distdiag.run` share."""
    for option in (
        click.option("--quiet", is_flag=True, help="Record findings but do not print them on stderr."),
        click.option("--tape", is_flag=True, help="Keep what the diagnosis is given as RUN/run.tape, at most 8 MiB."),
        click.option(
            "--metrics",
            metavar="ADDRESS",
            help="Serve Prometheus metrics at PORT or HOST:PORT; `otlp` sends them by OTLP.",
        ),
        click.option(
            "--nodes-port",
            type=click.IntRange(1, 65535),
            metavar="PORT",
            help="Port of node 0 for nodes that do not see RUN (default: any).",
        ),
        click.option("--keep", metavar="SIZE", help="Size bound of the run's database, e.g. 500M (default 2G)."),
        click.option(
            "--share", is_flag=True, help="Let other users read the run, as the umask allows (default: only you)."
        ),
        click.option("--name", help="Name of the run (default: the script's)."),
        click.option("--run-dir", metavar="DIR", help="Run directory (default: ./reports/<time>-<name>)."),
    ):
        command = option(command)
    return command
