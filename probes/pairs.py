"""pairs: every pair of ranks exchanges messages, in rounds of disjoint pairs.

A collective is as slow as its slowest link, but does not show which one. In a round-robin tournament (circle method) all
ranks are busy in every round, and no two pairs share a rank; with an odd number of ranks a different one rests in each
round. A rank that is slow in nearly all its pairs is slow itself; a slow pair of two healthy ranks is a slow link.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from distdiag.probekit.command.main import run_script
from distdiag.probekit.measure.collective import exchange
from distdiag.probekit.measure.patterns import Pattern, Segment, wrong_elements
from distdiag.probekit.measure.probe import Column, Probe, Table
from distdiag.probekit.measure.sampling import NoiseMeter
from distdiag.probekit.ranks.clock import clock_ns
from distdiag.probekit.ranks.job import Job
from distdiag.probekit.verdict import decide
from distdiag.probekit.verdict.collective_result import new_result
from distdiag.probekit.verdict.result import Measure, Result, Verdict
from distdiag.terms.units import counted, size_text, time_text

SLOW_FACTOR = 1.5  # times the median pair; pairs of a healthy machine differ by less
SLOW_SHARE = 0.75  # share of a rank's pairs that must be slow to blame the rank
_SMALL_BYTES = 8
_LARGE_BYTES = 2**20


@dataclass(slots=True)
class PairRow:
    """One pair: round trip of a small message, and rate of large ones both ways at once."""

    ranks: tuple[int, int]
    round_trip_us: float
    bandwidth_gbps: float
    slow: bool = False
    correct: bool = True
    repeats_us: list[float] = field(default_factory=list)


def tournament(ranks: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs that contain every pair of `ranks` exactly once.

    n - 1 rounds for an even number of ranks; n for an odd one, with one rank resting in each.
    """
    players: list[int | None] = [*range(ranks)]
    if ranks % 2:
        players.append(None)
    half = len(players) // 2
    rounds: list[list[tuple[int, int]]] = []
    for _ in range(len(players) - 1):
        pairs: list[tuple[int, int]] = []
        for a, b in zip(players[:half], reversed(players[half:]), strict=True):
            if a is not None and b is not None:
                pairs.append((min(a, b), max(a, b)))
        rounds.append(sorted(pairs))
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def blame(times: dict[tuple[int, int], float], ranks: int) -> tuple[dict[int, tuple[int, int]], list[tuple[int, int]]]:
    """Return (slow ranks: (slow pairs, pairs), slow links between ranks that are not slow themselves), by times."""
    median = float(np.median(list(times.values())))
    slow = {pair for pair, t in times.items() if t > SLOW_FACTOR * median}
    slow_ranks: dict[int, tuple[int, int]] = {}
    if ranks >= 4:  # with three ranks, of which one is slow, the median pair is slow
        counts = {r: sum(r in pair for pair in slow) for r in range(ranks)}
        # the worst first: a healthy rank is also slow in its pairs with slow ranks
        for rank in sorted(counts, key=lambda r: -counts[r]):
            left = sum(rank in pair and not any(o in slow_ranks for o in pair) for pair in slow)
            of = ranks - 1 - len(slow_ranks)
            if of >= 2 and left / of >= SLOW_SHARE:
                slow_ranks[rank] = (counts[rank], ranks - 1)
    links = sorted(pair for pair in slow if not any(r in slow_ranks for r in pair))
    return slow_ranks, links


class Pairs(Probe):
    name = "pairs"
    messages = True
    columns = (
        Column("ranks", lambda row: f"{row.ranks[0]}-{row.ranks[1]}"),
        Column("round trip µs", lambda row: f"{row.round_trip_us:,.1f}"),
        Column(f"{size_text(_LARGE_BYTES)} both ways GB/s", lambda row: f"{row.bandwidth_gbps:.3f}"),
        Column("correct", lambda row: "yes" if row.correct else "NO"),
        Column("", lambda row: "slow" if row.slow else "", left=True),
    )

    def run(self, job: Job) -> Result | None:
        rounds = tournament(job.world_size)
        small = torch.zeros(_SMALL_BYTES // job.dtype.itemsize or 1, dtype=job.dtype, device=job.device)
        large = [job.empty(_LARGE_BYTES // job.dtype.itemsize) for _ in range(2)]
        mine: dict[int, tuple[float, float, bool, list[float]]] = {}
        noise = NoiseMeter(job)
        for i, pairs in enumerate(rounds):
            seconds = job.agree([min(2.0, job.left_s() / (len(rounds) - i) * 0.8)], "pairs: next round")[0]
            pair = next((p for p in pairs if job.rank in p), None)
            with job.step(
                f"pairs: round {i + 1} of {len(rounds)}" + (f", ranks {pair[0]} and {pair[1]}" if pair else ", resting")
            ):
                if pair is not None:
                    peer = pair[0] + pair[1] - job.rank
                    mine[peer] = _measure_pair(job, peer, small, large, max(0.02, seconds))
        host_noise = noise.stop("pairs")
        everyone = job.gather_all(mine, "pairs: collecting")
        if job.rank != 0 or host_noise is None:
            return None
        result = new_result(job, self.name)
        result.host_noise = host_noise
        for a in range(job.world_size):
            for b in range(a + 1, job.world_size):
                # the time is the lower rank's; both ends check the values
                round_trip, rate, correct, repeats = everyone[a][b]
                result.rows.append(PairRow((a, b), round_trip, rate, False, correct and everyone[b][a][2], repeats))
                result.measures.append(Measure(f"{a}-{b}", "us", repeats))
        judge(result)
        return result

    def table(self, result: Result) -> Table:
        rows: list[PairRow] = result.rows
        few = rows if len(rows) <= 28 else [r for r in rows if r.slow or not r.correct]
        return Table.of(self.columns, few)

    def drawing(self, result: Result) -> list[str]:
        return heat_map(result.rows, result.world_size) if result.world_size > 2 else []

    def headline(self, result: Result) -> str:
        rows: list[PairRow] = result.rows
        slowest = max(rows, key=lambda r: r.round_trip_us)
        median = time_text(float(np.median([r.round_trip_us for r in rows])))
        longest = f"slowest {time_text(slowest.round_trip_us)} ({slowest.ranks[0]}-{slowest.ranks[1]})"
        return f"{counted(len(rows), 'pair')}, round trip {median}, {longest}"


def judge(result: Result) -> None:
    """Name slow ranks and links; on a busy host only suspect them."""
    rows: list[PairRow] = result.rows
    noisy = decide.host_noise(result)
    slow_means = Verdict.INCONCLUSIVE if noisy else Verdict.FAIL
    unsure = "; or a rank waited for a CPU" if noisy else ""
    for r in rows:
        if not r.correct:
            result.judge(Verdict.FAIL, f"wrong values between ranks {r.ranks[0]} and {r.ranks[1]}")
    kinds = (
        ("round trip", {r.ranks: r.round_trip_us for r in rows}),
        ("transfer", {r.ranks: 1 / r.bandwidth_gbps for r in rows}),
    )
    for kind, times in kinds:
        slow_ranks, links = blame(times, result.world_size)
        median = float(np.median(list(times.values())))
        for rank, (k, m) in slow_ranks.items():
            typical = float(np.median([t for pair, t in times.items() if rank in pair])) / median
            result.judge(
                slow_means,
                f"rank {rank} is slow in {k} of {m} pairs ({kind} {typical:.1f} times the median pair's): the rank or its card, not a link{unsure}",
            )
        for a, b in links[:6]:
            result.judge(
                slow_means,
                f"the link between ranks {a} and {b} is slow ({kind} {times[a, b] / median:.1f} times the median pair's), both are fine with others{unsure}",
            )
        for r in rows:
            r.slow = r.slow or times[r.ranks] > SLOW_FACTOR * median
    if result.verdict is Verdict.PASS:
        result.reasons.append(
            f"{len(rows)} pairs, none slower than {SLOW_FACTOR:g} times the median"
            if len(rows) > 1
            else "the one pair came through, correct both ways"
        )


def _measure_pair(
    job: Job, peer: int, small: torch.Tensor, large: list[torch.Tensor], seconds: float
) -> tuple[float, float, bool, list[float]]:
    """Return (median round trip in µs, GB/s of one direction, correct, some round trips) of this rank with `peer`.

    After each batch the lower rank decides whether another follows.
    """
    pattern = Pattern(job.dtype, job.world_size)
    pattern.write(large[0], job.rank)
    large[1].zero_()
    _exchange(job, peer, large)
    corrupt = job.injected("corrupt")
    if corrupt:
        large[1][0] += 1
    correct = wrong_elements(large[1], Segment(pattern.of(peer), 0, len(large[1])), 0) is None
    delay = job.injected("delay")
    go_on = torch.ones(1, dtype=job.dtype, device=job.device)
    trips: list[float] = []
    rates: list[float] = []
    start = time.monotonic()
    while True:
        for _ in range(8):
            begin = clock_ns()
            if delay:
                time.sleep(delay.delay_s)
            if job.rank < peer:
                dist.send(small, peer, group=job.group)
                dist.recv(small, peer, group=job.group)
            else:
                dist.recv(small, peer, group=job.group)
                dist.send(small, peer, group=job.group)
            job.synchronize()
            trips.append((clock_ns() - begin) / 1e3)
        begin = clock_ns()
        _exchange(job, peer, large)
        rates.append(large[0].nbytes / (clock_ns() - begin))
        if job.rank < peer:
            go_on.fill_(float(time.monotonic() - start < seconds and len(trips) < 4000))
            dist.send(go_on, peer, group=job.group)
        else:
            dist.recv(go_on, peer, group=job.group)
        if not bool(go_on[0]):
            break
    pieces = [float(np.median(p)) for p in np.array_split(trips, min(12, max(1, len(trips) // 8)))]
    return float(np.median(trips)), float(np.median(rates)), correct, pieces


def _exchange(job: Job, peer: int, buffers: list[torch.Tensor]) -> None:
    exchange(job.group, (buffers[0], peer), (buffers[1], peer))
    job.synchronize()


def heat_map(rows: list[PairRow], ranks: int) -> list[str]:
    """Return the matrix of round trips as lines: darker is slower; at most 64 ranks wide."""
    shades = " ░▒▓█"
    shown = min(ranks, 64)
    times = {r.ranks: r.round_trip_us for r in rows}
    low = min(times.values())
    high = max(max(times.values()), SLOW_FACTOR * low)  # small differences stay invisible
    lines = [f"round trips, from {time_text(low)} (light) to {time_text(high)} (dark):"]
    for a in range(shown):
        cells = ""
        for b in range(shown):
            if a == b:
                cells += "╲╲"
                continue
            share = (times[min(a, b), max(a, b)] - low) / (high - low)
            cells += shades[min(len(shades) - 1, int(share * len(shades)))] * 2
        lines.append(f"{a:>5d} {cells}")
    if shown < ranks:
        lines.append(f"      (ranks {shown} to {ranks - 1} are in the JSON)")
    return lines


PROBE = Pairs()

if __name__ == "__main__":
    run_script(PROBE)
