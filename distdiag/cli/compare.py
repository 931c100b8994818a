"""`distdiag compare`: compare runs with the first one."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from distdiag.cli.options import ascii_option
from distdiag.errors import DistdiagError, ExitCode
from distdiag.report.words import milliseconds, number, visible
from distdiag.store import rundir
from distdiag.store.reader import open_run
from distdiag.streams import say, say_json
from distdiag.terms.tables import table, wrapped
from distdiag.terms.units import MISSING

if TYPE_CHECKING:
    from distdiag.report.compare import Comparison, Difference

# limits and names of effect sizes: Romano et al. 2006
_EFFECTS = ((0.147, "negligible"), (0.33, "small"), (0.474, "medium"), (2.0, "large"))


def _print(found: Comparison) -> None:
    runs = found.runs
    rows: list[list[str]] = [["", *(visible(c.name) for c in runs)], ["state", *(visible(c.state) for c in runs)]]
    rows.append(["ranks", *(number(c.world_size) for c in runs)])
    rows.append(["steps (without warm-up)", *(number(c.step.n if c.step else 0) for c in runs)])
    rows.append(["step ms, median", *(milliseconds(c.step.p50_ms if c.step else None) for c in runs)])
    rows.append(["  95 % interval", *(_interval(c.step.ci95_ms if c.step else None) for c in runs)])
    rows.append(["  p95", *(milliseconds(c.step.p95_ms if c.step else None) for c in runs)])
    rows.append(["training samples/s", *(number(c.samples_per_s) for c in runs)])
    rows.append(["host CPU, %", *(number(c.host_cpu_pct) for c in runs)])
    rows.append(["CPUs used by others", *(number(c.foreign_cpus, 1) for c in runs)])
    for name in runs[0].phases_ms:
        cells = []
        for c in runs:
            change = c.phases_change_ms.get(name)
            cells.append(milliseconds(c.phases_ms[name]) + (f" ({change:+.1f})" if change is not None else ""))
        rows.append([f"{name} ms", *cells])
    kinds = sorted({k for c in runs for k in c.findings})
    rows += [[visible(kind), *(c.findings.get(kind, "·") for c in runs)] for kind in kinds]
    for line in table(rows):
        say(line)
    if not kinds:
        say("no findings of severity warning or above in any run")
    for note in found.notes:
        say("\n".join(wrapped(f"note: {note}")))
    say()
    for c in runs[1:]:
        say("\n".join(wrapped(f"{c.name} against {runs[0].name}: {_sentence(c.against_baseline)}")))


def _interval(ci: tuple[float, float] | None) -> str:
    return f"{milliseconds(ci[0])}–{milliseconds(ci[1])}" if ci else MISSING


def _sentence(d: Difference | None) -> str:
    if d is None or d.change_pct is None or d.ci95_pct is None or d.cliffs_delta is None:
        return "too few steps: at least 20 are needed in each run"
    low, high = d.ci95_pct
    delta = abs(d.cliffs_delta)
    size = next(word for limit, word in _EFFECTS if delta < limit)
    return (
        f"{d.outcome}, {d.change_pct:+.1f} % of step time (95 % interval {low:+.1f} to {high:+.1f}), "
        f"effect {size} (Cliff's delta {d.cliffs_delta:+.2f})"
    )


@click.command()
@click.argument("runs", nargs=-1, metavar="RUN RUN…", type=click.Path(readable=False))
@click.option(
    "--skip",
    type=click.IntRange(0),
    help="Leave out this many steps at the start of each run.  [default: 10 if there are at least 40]",
)
@click.option(
    "--fail-above",
    type=click.FloatRange(0),
    metavar="PCT",
    help="Exit 1 if a run is slower than the first by more than PCT % (the whole 95 % interval).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (distdiag.compare/1).")
@ascii_option
def command(runs: tuple[str, ...], skip: int | None, fail_above: float | None, as_json: bool) -> int:
    """Compare RUNs with the first one: step time with a 95 % interval and effect size, phases, findings.

    Exit codes: 0 compared, 1 slower than --fail-above allows, 2 bad option or file, 3 too few steps to decide, or an
    interval that holds both zero and more than PCT % (both with --fail-above), 4 no such run.
    """
    if len(runs) < 2:
        raise DistdiagError("compare needs two runs", "distdiag compare reports/OLD reports/NEW")
    from distdiag.report.compare import compare_runs

    with contextlib.ExitStack() as stack:
        found = compare_runs([stack.enter_context(open_run(rundir.resolve(r))) for r in runs], skip, fail_above)
    if all(c.step is None for c in found.runs):
        raise DistdiagError(
            "none of these runs has recorded a step",
            "`distdiag diagnose RUN` shows what each run did",
            ExitCode.NO_DATA,
            "no_steps",
        )
    if as_json:
        say_json(found)
    else:
        _print(found)
    if fail_above is None:
        return int(ExitCode.OK)
    compared = [c.against_baseline for c in found.runs if c.against_baseline is not None]
    if any(d.ci95_pct and d.ci95_pct[0] > fail_above for d in compared):
        return int(ExitCode.FAILED)
    undecided = any(d.ci95_pct is None or d.ci95_pct[0] <= 0 <= fail_above < d.ci95_pct[1] for d in compared)
    return int(ExitCode.INCONCLUSIVE if undecided else ExitCode.OK)
