"""`distdiag doctor`: print one line per check, and the remedy below each that did not pass."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from distdiag.cli.options import ascii_option
from distdiag.errors import DistdiagError, ExitCode
from distdiag.streams import say, say_json, wants_colour
from distdiag.terms.untrusted import cut, visible

if TYPE_CHECKING:
    from distdiag.doctor.check import Check, Examination

_COLOURS = {"pass": "green", "warn": "yellow", "fail": "red", "skip": "bright_black"}


def _endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        hint = "for example --reach node0:29500, torchrun's default port"
        raise DistdiagError(f"--reach {cut(text, 80)}: not HOST:PORT", hint)
    return host.strip("[]"), int(port)


def _examine(ranks: int, reach: tuple[str, ...], with_torch: bool) -> Examination:
    from distdiag.doctor import host, network, torch_checks
    from distdiag.doctor.check import examination, skipped
    from distdiag.store import rundir

    endpoints = [_endpoint(r) for r in reach]
    facts = torch_checks.ask_torch() if with_torch else None
    checks: list[Check] = [host.python()]
    checks += torch_checks.torch(facts) if facts is not None else [skipped("torch", "not asked (--no-torch)")]
    checks += torch_checks.gpus(facts)
    checks += [
        host.cores(os.environ, ranks),
        host.memory(),
        host.shared_memory(),
        host.open_files(),
        host.locked_memory(),
        host.processes(),
        network.host_name(),
        network.interfaces(os.environ),
        network.other_nodes(),
        host.clock(),
        host.run_directory(Path(os.environ.get(rundir.ENV) or rundir.ROOT)),
        host.variables(os.environ),
        host.metrics(os.environ),
    ]
    checks += [network.reach(name, port) for name, port in endpoints]
    return examination(checks)


@click.command()
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(1), help="Local ranks of the job.")
@click.option(
    "--reach", multiple=True, metavar="HOST:PORT", help="Also try to connect to this rendezvous (repeatable)."
)
@click.option("--no-torch", is_flag=True, help="Skip the checks that need torch (they take seconds).")
@click.option(
    "--fail-on",
    type=click.Choice(["warn", "fail"]),
    default="fail",
    show_default=True,
    help="Exit 1 if a check is at least this bad.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (distdiag.doctor/1).")
@ascii_option
def command(ranks: int, reach: tuple[str, ...], no_torch: bool, fail_on: str, as_json: bool) -> int:
    """Check that this machine can run distributed jobs; list what to fix.

    Checks torch and its backends (with a real rendezvous of two local ranks), GPUs, cores, memory, limits, /dev/shm,
    host name, network interfaces, clock, disk, and environment variables that change a job.

    Exit codes: 0 fit (warnings allowed), 1 not fit, 2 bad option.
    """
    from distdiag.terms.tables import wrapped

    found = _examine(ranks, reach, not no_torch)
    if as_json:
        say_json(found)
    else:
        _, colour = wants_colour()
        width = max(len(c.name) for c in found.checks)
        for c in found.checks:
            word = click.style(c.verdict.value, fg=_COLOURS[c.verdict]) if colour else c.verdict.value
            say(f"{word}  {visible(c.name):<{width}}  {visible(c.found)}", drawn=True)
            if c.remedy:
                say("\n".join(wrapped(f"→ {c.remedy}", head=" " * (width + 8))))
        count = {v: sum(c.verdict == v for c in found.checks) for v in ("pass", "warn", "fail")}
        say(f"\n{count['fail']} failed, {count['warn']} warnings, {count['pass']} passed")
    bad = {"fail"} if fail_on == "fail" else {"fail", "warn"}
    return int(ExitCode.FAILED if found.verdict in bad else ExitCode.OK)
