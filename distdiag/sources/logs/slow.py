"""A job that runs on, but slowly: the rank that Megatron's straggler reports name, and iterations that take longer from a line on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import median

from distdiag.diagnosis.model.findings import Finding, Severity
from distdiag.sources.logs.build import finding
from distdiag.sources.logs.facts import Collected, Fact
from distdiag.terms.units import duration
from distdiag.terms.untrusted import is_rank

SERIES = ("iteration", "straggler_report", "host_memory")
GROWN = 1.25  # of the host memory in use: its last to its first value
FACTOR = 1.5  # of the slowest to the fastest rank, and of iterations to those before
LEAST = 3  # reports; iterations before and after, apart from the first one
KEPT = 512  # of one series: the first and the last ones
_COST = "all ranks wait for it in every step"
_CLOCK = "see why that GPU is clocked down (`nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER` on its node: heat, a power limit); repair it, or take the node out"
_OTHER = "see that rank's GPU (`nvidia-smi -q -d PERFORMANCE`) and its host (other processes, cores), and test it alone; take the node out if it stays slow"


def keep(series: list[Fact], f: Fact) -> None:
    """Add a line to its series."""
    series.append(f)
    if len(series) > KEPT:
        del series[KEPT // 2]


def growth(found: Collected) -> tuple[str, str]:
    """Return (how the host memory in use rises in a log before its host ran out of it, what to do then); empty if it does not."""
    for (name, _, _), series in found.series.items():
        gb = [float(f.fields["gb"]) for f in series] if name == "host_memory" else []
        if len(gb) >= LEAST and gb[-1] == max(gb) >= GROWN * gb[0]:
            lines = f"lines {series[0].line:,} to {series[-1].line:,}"
            return (
                f"; before that, the host memory in use rises from {gb[0]:,.0f} to {gb[-1]:,.0f} GB in the log ({lines})",
                "; if it rises from step to step, find what grows: more memory only delays the end",
            )
    return "", ""


def findings(found: Collected) -> list[Finding]:
    """Return the rank that all of the last reports name as the slowest one, by far."""
    for (name, _, _), series in found.series.items():
        last = series[-LEAST:]
        if name != "straggler_report" or len(last) < LEAST:
            continue
        named = {f.fields[key] for f in last for key in ("r", "least")}
        far = all(float(f.fields["most_ms"]) >= FACTOR * max(float(f.fields["least_ms"]), 1e-3) for f in last)
        if len(named) == 1 and far and is_rank(rank := int(min(named))):
            return [_slowest(rank, last)]
    return []


def _slowest(rank: int, reports: Sequence[Fact]) -> Finding:
    f = reports[-1].fields
    clock = f.get("low") == str(rank) and float(f["clock"]) * FACTOR <= float(f["clocks"])
    message = f"rank {rank} is the slowest one in each of Megatron's last {LEAST} straggler reports: {_ms(f['most_ms'])} for an iteration's work, the fastest rank {_ms(f['least_ms'])}"
    if clock:
        message += f"; its GPU runs at {float(f['clock']):,.0f} MHz, another one at {float(f['clocks']):,.0f} MHz"
    if clock and f.get("hot") == str(rank):
        message += f", and is the hottest ({float(f['temperature']):.0f} C)"
    return finding("straggler", "forward", reports, message, _CLOCK if clock else _OTHER, culprits=[rank], cost=_COST, severity=Severity.WARNING)  # fmt: skip


def _ms(text: str) -> str:
    return duration(float(text) / 1e3)


def notes(found: Collected) -> list[str]:
    """Return that iterations take longer from a line on, to the end, with the same batch size."""
    for (name, _, _), series in found.series.items():
        if name != "iteration" or len({f.fields.get("batch") for f in series}) != 1:
            continue
        if any(int(a.fields["step"]) >= int(b.fields["step"]) for a, b in itertools.pairwise(series)):
            continue  # another run
        times = [float(f.fields["ms"]) for f in series]
        before = list(itertools.accumulate(times[1:], max))  # the first one starts everything
        after = list(itertools.accumulate(reversed(times), min))[::-1]
        jumps = (n for n in range(1 + LEAST, len(times) - LEAST + 1) if after[n] >= FACTOR * before[n - 2])
        if (n := next(jumps, None)) is not None:
            old, new = median(times[1:n]), median(times[n:])
            f = series[n]
            return [f"an iteration takes {new / old:.2g} times as long from line {f.line:,} on (iteration {int(f.fields['step']):,}): {duration(new / 1e3)}, {duration(old / 1e3)} before; if no setting changed there, a rank, the network or the storage became slow"]  # fmt: skip
    return []
