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
REPORT_LINES = 16  # one report lists no more than the five worst and best ranks, and headings
LEAST = 3  # reports; iterations before and after, apart from the first one
_RANK = bounded(r"(?:\brank=|\()(\d{1,7})")
KEPT = 512  # of one series: the first and the last ones
_CLOCK = "see why that GPU is clocked down (`nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER` on its node: heat, a power limit); repair it, or take the node out"
_OTHER = "see that rank's GPU (`nvidia-smi -q -d PERFORMANCE`) and its host (other processes, cores), and test it alone; take the node out if it stays slow"


def keep(series: list[Fact], f: Fact) -> None:
    series.append(f)
    if len(series) > KEPT:
        del series[KEPT // 2]


def growth(found: Collected) -> tuple[str, str]:
    """Return (how the host memory in use rises in a log before its host ran out of it, what to do then); empty if it does not."""
    rising: list[tuple[float, int | None, str]] = []
    of_ranks: set[int | None] = set()  # that show their own memory
    for (name, _, rank), series in found.series.items():
        gb = [float(f.fields["gb"]) for f in series] if name == "host_memory" else []
        own = bool(gb) and all("own" in f.fields for f in series)
        of_ranks |= {rank} if own else set()
        always = len(gb) >= 2 * LEAST and all(b > a for a, b in itertools.pairwise(gb)) and not own
        if len(gb) >= LEAST and gb[-1] == max(gb) and (always or gb[-1] >= GROWN * gb[0]):
            lines = f"lines {series[0].line:,} to {series[-1].line:,}"
            rises = f"rises from {gb[0]:,.0f} to {gb[-1]:,.0f} GB in the log ({lines})"
            rising.append((gb[-1] / max(gb[0], 1e-3), rank if own else None, rises))
    if not rising:
        return "", ""
    _, rank, rises = max(rising, key=lambda x: x[0])
    if rank is not None and len(rising) == 1 < len(of_ranks):
        advice = f"; look for what rank {rank} alone keeps from step to step (its data, a cache): more memory only delays the end"
        return f"; before that, the memory of rank {rank}, and of no other rank so much, {rises}", advice
    advice = "; if it rises from step to step, find what grows: more memory only delays the end"
    whose = "host memory in use" if rank is None else f"memory of rank {rank}"
    return f"; before that, the {whose} {rises}", advice


def findings(found: Collected) -> list[Finding]:
    """Return the rank that all of the last reports name as the slowest one, by far."""
    for (name, _, _), series in found.series.items():
        if name == "gpu_scores" and (slowest := _by_scores(series, found.named("throttled"))) is not None:
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
            most = f"{most_gb:,.0f} GB, the next process {next_gb:,.0f} GB (line {first.line:,})"
            return (
                f"; {what} held most of it: {most}",
                f"see what {what} keeps from step to step (data, results, a leak): the process that Ray killed need not be the cause; else give the job more host memory",
            )
    return "", ""


def _reports(series: Sequence[Fact]) -> list[tuple[set[int], list[Fact]]]:
    """Return the last reports of NVRx: the ranks that each calls slow, and its lines."""
    reports: list[tuple[set[int], list[Fact]]] = []
    for f in series:
        last = reports[-1][1][-1] if reports else None
        # its warning comes before its scores, or after them
        over = last is not None and "ranks" in last.fields and "r" in f.fields and "r" in reports[-1][1][0].fields
        if last is None or over or "over" in last.fields or f.line - last.line > REPORT_LINES:
            reports.append((set(), []))
        reports[-1][1].append(f)
        named = f.fields.get("ranks", "")
        reports[-1][0].update(map(int, _RANK.findall(named) or numbers(named)))
    return reports[-LEAST:]


def _one_slow(series: Sequence[Fact]) -> tuple[int, str, str] | None:
    """Return (the one rank that the last report of NVRx calls slow, its host, its score), if the reports before name no other; else None."""
    last = _reports(series)
    ranks = set[int]().union(*(slow for slow, _ in last))
    if len(ranks) != 1 or not last[-1][0] or not is_rank(rank := min(ranks)):
        return None
    own = (f.fields for f in last[-1][1] if f.fields.get("r") == str(rank))
    score = next(own, {})  # relative to the others; compared with itself, it comes second
    on = f" on {score['host']}" if score else ""
    return rank, on, f"; its GPU's score is {score['score']}, 1 is the fastest" if score else ""


def _by_scores(series: Sequence[Fact], throttled: Sequence[Fact]) -> Finding | None:
    """Return the one rank that NVRx calls slow in each of its last reports, or in the last one, if a GPU is throttled; None if there is none."""
    last, one = _reports(series), _one_slow(series)
    every = len(last) == LEAST and all(slow for slow, _ in last)
    if one is None or not (every or throttled):
        return None
    rank, on, shown = one
    facts = [f for _, report in last for f in report if "ranks" in f.fields]
    where = f"each of NVRx's last {LEAST} straggler reports" if every else "NVRx's last straggler report"
    message = f"rank {rank}{on} is the one slow rank in {where}{shown}"
    for f in sorted(throttled, key=lambda f: -len(f.fields["what"]))[:1]:  # the one that names the reason
        message += f"; nvidia-smi shows that a GPU is throttled: `{f.fields['what']}: Active` ({f.of_line})"
    return _straggler(rank, facts, message, _CLOCK if throttled else _OTHER)


def _straggler(rank: int, facts: Sequence[Fact], message: str, advice: str) -> Finding:
    kind, cost = "straggler", "all ranks wait for it in every step"
    return finding(kind, "forward", facts, message, advice, culprits=[rank], cost=cost, severity=Severity.WARNING)


def _slowest(rank: int, reports: Sequence[Fact]) -> Finding:
    f = reports[-1].fields
    clock = f.get("low") == str(rank) and float(f["clock"]) * FACTOR <= float(f["clocks"])
    most, least = (duration(float(f[key]) / 1e3) for key in ("most_ms", "least_ms"))
    message = f"rank {rank} is the slowest one in each of Megatron's last {LEAST} straggler reports: {most} for an iteration's work, the fastest rank {least}"
    if clock:
        message += f"; its GPU runs at {float(f['clock']):,.0f} MHz, another one at {float(f['clocks']):,.0f} MHz"
    if clock and f.get("hot") == str(rank):
        message += f", and is the hottest ({float(f['temperature']):.0f} C)"
    return _straggler(rank, reports, message, _CLOCK if clock else _OTHER)


def notes(found: Collected) -> list[str]:
    """Return which rank few reports call slow; or that iterations take longer from a line on, to the end, with the same batch size."""
    for (name, _, _), series in found.series.items():
        one = _one_slow(series) if name == "gpu_scores" else None
        if one is not None and _by_scores(series, found.named("throttled")) is None:
            return [f"NVRx's last straggler report calls rank {one[0]}{one[1]} slow{one[2]}: {_OTHER}"]
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
