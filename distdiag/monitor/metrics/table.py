"""The table of metrics: names, units, labels, and how each is read from a poll. Both exporters use it.

Names are OpenTelemetry's (`distdiag.rank.step.duration`, unit `s`); Prometheus gets their translation
(`distdiag_rank_step_duration_seconds`). Labels are ranks, hosts, states and the words of the contract: no path, line or text of
the job. Ranks from `MOST_RANKS` on share one series.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import msgspec

import distdiag
from distdiag.diagnosis import kinds
from distdiag.diagnosis.model.findings import Finding, Severity, State
from distdiag.diagnosis.model.snapshot import Life, RankState, Snapshot
from distdiag.diagnosis.step_times import self_ms

MOST_RANKS = 256  # with separate series; a node has 8 or 16, and node 0's monitor serves its own node only
OTHERS = "other"  # label `rank` of the series that the others share
WINDOW = 50  # steps
Value = tuple[tuple[str, ...], float]  # of the labels, in their order


class Poll(msgspec.Struct, frozen=True, kw_only=True):
    """What a full poll knows, handed from the monitor's thread to the exporters'; nothing in it changes."""

    snapshot: Snapshot
    own: frozenset[int]  # ranks of this node; those of other nodes are served by their monitors
    node: int
    started_unix_s: float
    state: str
    findings: tuple[Finding, ...]  # open
    reported: Mapping[tuple[str, str], int]  # (kind, severity) -> findings reported so far
    polls: int
    poll_s: float
    cpu_s: float
    memory_bytes: int | None = None
    database_bytes: int | None = None
    probes: Mapping[str, tuple[float | None, bool]] = {}  # name -> (bus bandwidth in bytes/s, passed)


@dataclass(frozen=True)
class Metric:
    """One metric. `unit` is UCUM's: s, By, By/s, 1 (a ratio), or a word in braces for a count."""

    name: str
    unit: str
    help: str
    values: Callable[[Ranks], Iterable[Value]]
    labels: tuple[str, ...] = ()
    counter: bool = False

    @property
    def prometheus(self) -> str:
        """Return the name for Prometheus, with its unit: the translation that OpenTelemetry defines."""
        suffix = {"s": "_seconds", "By": "_bytes", "By/s": "_bytes_per_second", "1": "_ratio"}.get(self.unit, "")
        return self.name.replace(".", "_") + suffix + ("_total" if self.counter else "")


@dataclass(frozen=True)
class Ranks:
    """A poll, and what several metrics need of this node's ranks."""

    poll: Poll

    @cached_property
    def states(self) -> dict[int, RankState]:
        s = self.poll.snapshot
        return {q: s.ranks[q] for q in sorted(self.poll.own) if q in s.ranks}

    @cached_property
    def windows(self) -> dict[int, list[tuple[int, float, float, float]]]:
        """Return of each rank's last steps: number, ms, waiting ms, own ms."""
        return {
            q: [(x.step, x.step_ms, x.wait_ms, self_ms(x)) for x in r.steps[-WINDOW:] if x.step > 1]
            for q, r in self.states.items()
        }

    @cached_property
    def slowest(self) -> Counter[int]:
        """Return in how many recent steps each rank took longest without waiting."""
        most: dict[int, tuple[float, int]] = {}
        for q, window in self.windows.items():
            for step, _, _, own in window:
                most[step] = max(most.get(step, (-1.0, -1)), (own, q))
        return Counter(q for _, q in most.values())

    def by_rank(
        self, of: Callable[[RankState], float | None], fold: Callable[[list[float]], float] = max
    ) -> Iterator[Value]:
        """Yield the value of each rank that has one; those from `MOST_RANKS` on as one."""
        others = []
        for i, (q, r) in enumerate(self.states.items()):
            value = of(r)
            if value is None:
                continue
            if i < MOST_RANKS:
                yield (str(q), r.host), value
            else:
                others.append(value)
        if others:
            yield (OTHERS, ""), fold(others)


def _step_s(x: Ranks, q: int) -> float | None:
    return statistics.median(w[1] for w in x.windows[q]) / 1e3 if x.windows[q] else None


def _waited(x: Ranks, r: RankState) -> float | None:
    total = sum(w[1] for w in x.windows[r.rank])
    return sum(w[2] for w in x.windows[r.rank]) / total if total and r.wait_measured else None


def _slowest(x: Ranks, q: int) -> float | None:
    n = len(x.windows[q])
    return x.slowest[q] / n if n and len(x.states) > 1 else None


def _blocked_s(x: Ranks, r: RankState) -> float:
    entered_s = r.blocked.entered_s if r.blocked is not None else None
    return max(0.0, x.poll.snapshot.t_s - entered_s) if entered_s is not None else 0.0


def _of_severities(counts: Mapping[tuple[str, str], int]) -> Iterator[Value]:
    """Yield every kind with every severity: a series that appears with its first finding would hide that one from `increase()`."""
    for kind in kinds.KINDS:
        for severity in Severity:
            yield (str(kind), str(severity)), counts.get((str(kind), str(severity)), 0)


def _culprits(x: Ranks) -> Iterator[Value]:
    found: Counter[tuple[int, str]] = Counter()
    for f in x.poll.findings:  # of a cycle all members, as nobody else is to blame
        found.update((q, str(f.severity)) for q in f.culprits or (f.victims if kinds.of(f).blocks else ()))
    ranks = x.poll.snapshot.ranks
    for (q, severity), n in sorted(found.items())[:MOST_RANKS]:
        yield (str(q), ranks[q].host if q in ranks else "", severity), n


def _lives(x: Ranks) -> Iterator[Value]:
    found = Counter(str(r.life) for r in x.poll.snapshot.ranks.values())
    for life in Life:
        yield (str(life),), found[str(life)]


def _last_step(x: Ranks) -> Iterator[Value]:
    ends = [r.steps[-1].end_s for r in x.states.values() if r.steps]
    if ends:
        yield (), x.poll.started_unix_s + max(ends)


def _one(of: Callable[[Poll], float | None]) -> Callable[[Ranks], Iterable[Value]]:
    return lambda x: [((), value)] if (value := of(x.poll)) is not None else []


RANK = ("rank", "host")
METRICS = (
    Metric(
        "distdiag.job.state", "", "1 for the state that this monitor's verdict is, 0 for the others",
        lambda x: [((str(s),), float(s == x.poll.state)) for s in State], ("state",),
    ),
    Metric("distdiag.job.world_size", "{rank}", "Ranks of the job", _one(lambda p: p.snapshot.world_size)),
    Metric(
        "distdiag.job.ranks", "{rank}", "Ranks that this monitor knows, by the state of their process",
        _lives, ("life",),
    ),
    Metric("distdiag.job.start.timestamp", "s", "When the run began, Unix time", _one(lambda p: p.started_unix_s)),
    Metric("distdiag.job.last_step.timestamp", "s", "When a rank of this node ended its newest step, Unix time", _last_step),
    Metric(
        "distdiag.findings", "{finding}", "Open findings", lambda x: _of_severities(
            Counter((str(f.kind), str(f.severity)) for f in x.poll.findings)
        ), ("kind", "severity"),
    ),
    Metric(
        "distdiag.findings.reported", "{finding}", "Findings reported since this monitor started",
        lambda x: _of_severities(x.poll.reported), ("kind", "severity"), counter=True,
    ),
    Metric(
        "distdiag.rank.findings", "{finding}", "Open findings whose culprit is this rank, or a cycle with it; no series without one",
        _culprits, (*RANK, "severity"),
    ),
    Metric(
        "distdiag.rank.steps", "{step}", "Optimizer steps so far", lambda x: x.by_rank(lambda r: r.step), RANK, counter=True,
    ),
    Metric(
        "distdiag.rank.step.duration", "s", f"Median of the last {WINDOW} steps",
        lambda x: x.by_rank(lambda r: _step_s(x, r.rank)), RANK,
    ),
    Metric(
        "distdiag.rank.wait", "1", f"Share of the last {WINDOW} steps that the rank waited for other ranks",
        lambda x: x.by_rank(lambda r: _waited(x, r), statistics.fmean), RANK,
    ),
    Metric(
        "distdiag.rank.slowest", "1", f"Share of the last {WINDOW} steps in which it took longest of this node's ranks, without waiting",
        lambda x: x.by_rank(lambda r: _slowest(x, r.rank)), RANK,
    ),
    Metric(
        "distdiag.rank.blocked.duration", "s", "Time since it entered the collective that it waits in; 0 if it does not wait",
        lambda x: x.by_rank(lambda r: _blocked_s(x, r)), RANK,
    ),
    Metric(
        "distdiag.rank.heartbeat.age", "s", "Time since its last sign of life",
        lambda x: x.by_rank(lambda r: r.heartbeat_age_s), RANK,
    ),
    Metric(
        "distdiag.rank.memory.usage", "By", "Resident memory of its process",
        lambda x: x.by_rank(lambda r: r.rss_bytes, sum), RANK,
    ),
    Metric(
        "distdiag.probe.bus_bandwidth", "By/s", "Bus bandwidth of the largest message of a probe recorded into this run",
        lambda x: [((name,), rate) for name, (rate, _) in x.poll.probes.items() if rate is not None], ("probe",),
    ),
    Metric(
        "distdiag.probe.passed", "", "1 if the newest result of a probe recorded into this run is above its floor",
        lambda x: [((name,), float(ok)) for name, (_, ok) in x.poll.probes.items()], ("probe",),
    ),
    Metric(
        "distdiag.monitor.info", "", "Version and node of this monitor, always 1",
        lambda x: [((distdiag.__version__, str(x.poll.node)), 1.0)], ("version", "node"),
    ),
    Metric("distdiag.monitor.polls", "{poll}", "Full polls so far", _one(lambda p: p.polls), counter=True),
    Metric("distdiag.monitor.poll.duration", "s", "Duration of the newest full poll", _one(lambda p: p.poll_s)),
    Metric(
        "distdiag.monitor.poll.timestamp", "s", "When the newest full poll ended, Unix time",
        _one(lambda p: p.started_unix_s + p.snapshot.t_s + p.poll_s),
    ),
    Metric("distdiag.monitor.cpu.time", "s", "CPU time of this monitor", _one(lambda p: p.cpu_s), counter=True),
    Metric("distdiag.monitor.memory.usage", "By", "Resident memory of this monitor", _one(lambda p: p.memory_bytes)),
    Metric("distdiag.monitor.database.size", "By", "Size of run.db", _one(lambda p: p.database_bytes)),
    Metric(
        "distdiag.monitor.shared_series.ranks", "{rank}", f'Ranks without separate series: they are in rank="{OTHERS}"',
        lambda x: [((), max(0, len(x.states) - MOST_RANKS))],
    ),
)  # fmt: skip
