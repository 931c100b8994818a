"""A job that runs on, but slowly: the rank that the straggler reports of Megatron or NVRx name, and iterations that take longer from a line on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import median

from distdiag.diagnosis.model.findings import Finding, Severity
from distdiag.sources.logs.build import finding
from distdiag.sources.logs.facts import Collected, Fact
from distdiag.terms.units import duration
from distdiag.terms.untrusted import bounded, is_rank, numbers

GROWN = 1.25  # of the host memory in use: its last to its first value
FACTOR = 1.5  # of the slowest to the fastest rank, of iterations to those before, of the most memory to the next
LEAST = 3  # reports; iterations before and after, apart from the first one
_RANK = bounded(r"\brank=(\d{1,7})")
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
        if name == "gpu_scores" and (slowest := _by_scores(series)) is not None:
            return [slowest]
        last = series[-LEAST:]
        if name != "straggler_report" or len(last) < LEAST:
            continue
        named = {f.fields[key] for f in last for key in ("r", "least")}
        far = all(float(f.fields["most_ms"]) >= FACTOR * max(float(f.fields["least_ms"]), 1e-3) for f in last)
        if len(named) == 1 and far and is_rank(rank := int(min(named))):
            return [_slowest(rank, last)]
    return []


def most_memory(found: Collected) -> tuple[str, str]:
    """Return (which process Ray lists as the one that held far more memory than any other, what to do then); empty if none did."""
    for (name, _, _), series in found.series.items():
        table = {f.fields["pid"]: f for f in series if name == "memory_user"}  # of each process its last line
        first, second, *_ = [*sorted(table.values(), key=lambda f: -float(f.fields["gb"])), None, None]
        if first is None or second is None:
            continue
        most_gb, next_gb = float(first.fields["gb"]), float(second.fields["gb"])
        if most_gb >= FACTOR * next_gb:
            what = f"{first.fields['command']} (pid {first.fields['pid']})"
            return (
                f"; {what} held most of it: {most_gb:,.0f} GB, the next process {next_gb:,.0f} GB (line {first.line:,})",
                f"see what {what} keeps from step to step (data, results, a leak): the process that Ray killed need not be the cause; else give the job more host memory",
            )
    return "", ""


def _by_scores(series: Sequence[Fact]) -> Finding | None:
    """Return the one rank that NVRx calls slow in each of its last reports; None if there is none."""
    reports: list[tuple[set[int], list[Fact]]] = [(set(), [])]
    for f in series:
        reports[-1][1].append(f)
        named = f.fields.get("ranks", "")
        reports[-1][0].update(map(int, _RANK.findall(named)) if "rank=" in named else numbers(named))
        reports += [(set(), [])] if "over" in f.fields else []
    last = reports[-1 - LEAST : -1]
    ranks = set[int]().union(*(slow for slow, _ in last))
    if len(last) < LEAST or len(ranks) != 1 or not all(slow for slow, _ in last) or not is_rank(rank := min(ranks)):
        return None
    facts = [f for _, report in last for f in report if "ranks" in f.fields]
    score = next((f for f in last[-1][1] if f.fields.get("r") == str(rank)), None)
    on = f" on {score.fields['host']}" if score else ""
    shown = f"; its GPU's score is {score.fields['score']}, 1 is the fastest" if score else ""
    message = f"rank {rank}{on} is the one slow rank in each of NVRx's last {LEAST} straggler reports{shown}"
    return finding(
        "straggler", "forward", facts, message, _OTHER, culprits=[rank], cost=_COST, severity=Severity.WARNING
    )


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
