"""`distdiag dump`: the stacks of all ranks, now, as one tree."""

from __future__ import annotations

import shlex

import click

from distdiag.cli.options import ascii_option
from distdiag.errors import DistdiagError, ExitCode
from distdiag.streams import say, say_json, say_wrapped


@click.command()
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one object (distdiag.stacks/1) instead of the tree.")
@click.option(
    "--timeout", "timeout_s", default=5.0, show_default=True, metavar="SECONDS", help="Wait this long for each rank."
)
@click.option("--no-save", is_flag=True, help="Print only; write no files into the run directory.")
@ascii_option
def command(run: str | None, as_json: bool, timeout_s: float, no_save: bool) -> int:
    """Print the stacks and in-flight collectives of every rank, now.

    Asks each rank's C++ worker server, which answers even if Python is stuck. Merges the stacks into one tree, in which `>` marks
    your own code, and saves them in the run directory: stacks/latest.json, flight_recorder/rank_N.json, flight_recorder/torchfrtrace/ (readable by
    torchfrtrace). On node 0, also the ranks of nodes that do not see RUN. RUN: default reports/latest.
    """
    from concurrent.futures import ThreadPoolExecutor

    from distdiag.diagnosis.model.findings import rank_list
    from distdiag.diagnosis.text.finding import printable
    from distdiag.monitor.evidence import dump
    from distdiag.store import rundir, stacks
    from distdiag.terms.units import counted

    if timeout_s <= 0:
        hint = "give the time in seconds, for example --timeout 5"
        raise DistdiagError(f"--timeout {timeout_s:g} is not above 0", hint)
    run_dir = rundir.resolve(run)
    with ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(dump.of_other_nodes, run_dir, timeout_s)
        now_s, dumps = dump.take(run_dir, timeout_s)
        there, nodes_silent = elsewhere.result()
    here = {d.rank for d in dumps}
    dumps = sorted([*dumps, *(d for d in there if d.rank not in here)], key=lambda d: d.rank)
    silent = [d.rank for d in dumps if not d.answered]
    found = dump.merged(now_s, dumps)
    if as_json:
        import msgspec

        say_json({"schema": "distdiag.stacks/1", "run": str(run_dir.absolute()), **msgspec.to_builtins(found)})
    else:
        for line in stacks.tree_lines(stacks.merge(found)):
            say(line)
    if not no_save:
        try:
            written = dump.save(run_dir, now_s, dumps)
            recorded = (len(written) - 1) // 2  # each rank in two formats
            folder = printable(str(run_dir / "flight_recorder"))
            say_wrapped(f"saved: the stacks in {printable(str(written[0]))}", err=True)
            if recorded:
                say_wrapped(
                    f"saved: the flight records of {counted(recorded, 'rank')} in {folder} (JSON, and for torchfrtrace)",
                    err=True,
                )
        except OSError as e:
            say_wrapped(f"distdiag: not saved: {e.strerror or e}", err=True)
    if silent:
        say_wrapped(f"distdiag: no answer from {rank_list(silent)} within {timeout_s:g} s", err=True)
    for reason in nodes_silent:
        say_wrapped(f"distdiag: {printable(reason)}", err=True)
    if not no_save:
        say_wrapped(f"next: distdiag diagnose {printable(shlex.quote(str(run_dir)))}", err=True)
    return int(ExitCode.TIMEOUT if silent or nodes_silent else ExitCode.OK)
