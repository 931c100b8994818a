"""Write man/distdiag.1 from the command line itself; the wheel installs it as share/man/man1/distdiag.1.

.venv/bin/python tools/man_page.py          # `-`: on stdout; a test checks that the file is current
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from distdiag.cli import COMMANDS, app
from distdiag.errors import ExitCode
from distdiag.settings import SETTINGS

PAGE = Path(__file__).resolve().parents[1] / "man" / "distdiag.1"
_PLAIN = str.maketrans({"–": "-", "—": "-", "…": "...", "×": "x", "’": "'", "≥": ">=", "·": ".", "Δ": "delta"})


def page() -> str:
    """Return the page as troff's man macros; without a date or version, so that only a change of the command line changes it."""
    lines = [".TH DISTDIAG 1", ".SH NAME", r"distdiag \- diagnostics for distributed PyTorch jobs while they run"]
    lines += [".SH SYNOPSIS", r".B distdiag", r".I COMMAND", "[options]"]
    lines += [".SH DESCRIPTION", *_text(app.help or "")]
    lines += [".SH COMMANDS"]
    for name in COMMANDS:
        command = app.get_command(click.Context(app), name)
        assert command is not None
        for path, sub in _leaves(f"distdiag {name}", command):
            lines += _command(path, sub)
    lines += [".SH EXIT STATUS", ".nf", *(f"{code.value:>3}  {code.name}" for code in ExitCode), ".fi"]
    lines += [".SH ENVIRONMENT"]
    about = {
        s.variable: f"as {s.name} in [tool.distdiag]; default: {s.default}" for s in SETTINGS.values() if s.variable
    }
    about = {"DISTDIAG": "1 records every process that joins a process group; 0 switches all recording off"} | about
    for name, text in about.items():
        lines += [".TP", rf".B {_escaped(name)}", _escaped(text)]
    lines += [".SH FILES", ".TP", ".I reports/latest", "the newest run of this directory: RUN, where no other is named"]
    lines += [".TP", ".I pyproject.toml", "[tool.distdiag]; `distdiag config` shows what holds"]
    return "\n".join(lines) + "\n"


def _leaves(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        if (found := command.get_command(context, name)) is not None:
            yield from _leaves(f"{path} {name}", found)


def _command(path: str, command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=path, help_option_names=["-h", "--help"])
    usage = " ".join(piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]")
    yield f".SS {_escaped(f'{path} {usage}'.strip())}"
    yield from _text(command.help or "")
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if isinstance(parameter, click.Option) and record is not None and "--help" not in parameter.opts:
            yield from (".TP", rf"\fB{_escaped(record[0])}\fR", _escaped(record[1]))


def _text(text: str) -> Iterator[str]:
    """Yield paragraphs; those that click must not wrap keep their lines."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        kept = paragraph.startswith("\b\n")
        rows = paragraph.removeprefix("\b\n").splitlines()
        body = [_escaped(row) for row in rows] if kept else [_escaped(" ".join(row.strip() for row in rows))]
        yield ".PP"
        yield from [".nf", *body, ".fi"] if kept else body


def _escaped(text: str) -> str:
    text = text.translate(_PLAIN).encode("ascii", "backslashreplace").decode().replace("\\", "\\e").replace("-", "\\-")
    return ("\\&" if text.startswith((".", "'")) else "") + text


if __name__ == "__main__":
    if sys.argv[1:] == ["-"]:
        sys.stdout.write(page())
    else:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page())
