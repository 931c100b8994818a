"""The public contract: commands, options, exit codes, and the package's public names.

`UPDATE_GOLDEN=1 pytest tests/cli/test_contract.py` writes commands.txt again. New lines may be
added freely; a removed line breaks somebody's script.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import distdiag
from distdiag.cli import COMMANDS, app, main
from distdiag.errors import DistdiagError, ExitCode
from distdiag.probekit.command.options import build_command
from distdiag.run import command as run_command
from tests.report.runs import make_run

FROZEN = Path(__file__).with_name("commands.txt")


def lines(name: str, command: click.Command) -> Iterator[str]:
    """Return the command and its parameters, one per line, sorted."""
    if isinstance(command, click.Group) and name != "distdiag":
        context = click.Context(command)
        for sub in command.list_commands(context):
            found = command.get_command(context, sub)
            assert found is not None
            yield from lines(f"{name} {sub}", found)
        return
    yield name
    for p in sorted(command.params, key=lambda p: p.opts):
        kind = p.type.name if not isinstance(p, click.Option) or not p.is_flag else "flag"
        choices = f" {'|'.join(map(str, p.type.choices))}" if isinstance(p.type, click.Choice) else ""
        yield f"  {' '.join([*p.opts, *p.secondary_opts])} ({kind}){choices}"


def test_commands_and_options_are_frozen() -> None:
    found = list(lines("distdiag", app))
    for name in COMMANDS:
        command = app.get_command(click.Context(app), name)
        assert command is not None
        found += [
            *lines(f"distdiag {name}", command),
            *(lines("probes/NAME.py", build_command(named=True)) if name == "probe" else ()),
        ]
    found += lines("python -m distdiag.run", run_command)
    if os.environ.get("UPDATE_GOLDEN"):
        FROZEN.write_text("\n".join(found) + "\n")
    frozen = FROZEN.read_text().splitlines()
    assert not (gone := [x for x in frozen if x not in found]), f"removed from the command line: {gone}"


def test_exit_codes_are_frozen() -> None:
    assert {c.name: c.value for c in ExitCode} == {
        "OK": 0, "FAILED": 1, "USAGE": 2, "INCONCLUSIVE": 3, "NO_DATA": 4, "TIMEOUT": 5, "INTERRUPTED": 130,
    }  # fmt: skip


def test_the_public_names_of_the_package() -> None:
    assert sorted(distdiag.__all__) == ["Handle", "Run", "__version__", "attach", "open_run"]
    for name in distdiag.__all__:
        assert getattr(distdiag, name) is not None
    with pytest.raises(AttributeError):
        distdiag.no_such_name  # type: ignore[attr-defined]  # noqa: B018


def test_open_run_reads_a_run_from_python(tmp_path: Path) -> None:
    make_run(tmp_path / "run", ranks=2, steps=30)
    with distdiag.open_run(tmp_path / "run") as run:
        assert len(run.steps_frame()) == 60
    with pytest.raises(DistdiagError) as raised:
        distdiag.open_run(tmp_path / "absent")
    assert raised.value.hint


def test_the_collection_is_found_in_a_clone_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An installed package has no tests."""
    monkeypatch.setattr(distdiag, "__file__", str(tmp_path / "site-packages" / "distdiag" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "faults", "--list"]) == ExitCode.USAGE
    error, hint = capsys.readouterr().err.splitlines()
    assert "the fault collection is not installed" in error and hint.startswith("hint: ")
    assert main(["bench", "--help"]) == 0 and "faults" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_80_columns(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*name.split(), "--help"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
