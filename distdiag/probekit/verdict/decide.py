"""Decide: pass, fail or inconclusive, and why.

A failure needs proof: wrong values (noise cannot cause them), or a whole 95 % interval on the wrong side, on a quiet host.
On a noisy host it is inconclusive. Without a floor or a baseline, a probe passes unless something is wrong.
"""

from __future__ import annotations

from collections import defaultdict

from distdiag.probekit.verdict.result import Result, Row, Verdict
from distdiag.terms.operations import family
from distdiag.terms.units import message_size, time_text

LATE_FAILS_US = 1_000.0  # a rank that is always this late costs a step more than most collectives
_LOW_SHARE = 0.10  # of plain TCP between the same ranks; less is a fault, not slowness
_LARGE_BYTES = 4 * 2**20
NOISE = "others used"  # start of the reason for a busy host
FEW = 8  # iterations; with fewer, the interval is the range, no rank is late, and no floor is missed


def judge_collective(result: Result, floor_gbps: float | None, skipped_bytes: list[int]) -> None:
    rows: list[Row] = result.rows
    wrong_values(result, rows)
    noisy = host_noise(result)
    timed_fail = Verdict.INCONCLUSIVE if noisy else Verdict.FAIL
    late_rank(result, rows, timed_fail)
    against_ceilings(result, rows, timed_fail)
    if floor_gbps is not None:
        against_floor(result, rows, floor_gbps, noisy or bool(skipped_bytes))
    if skipped_bytes:
        result.judge(
            Verdict.INCONCLUSIVE,
            f"the budget ended before {', '.join(map(message_size, skipped_bytes))}: give more with --budget",
        )
    if result.verdict is Verdict.PASS:
        result.reasons.insert(0, sound(result, rows))


def wrong_values(result: Result, rows: list[Row]) -> None:
    by_rank: dict[int, list[tuple[Row, str]]] = defaultdict(list)
    for row in rows:
        for w in row.wrong:
            source = f", in the part of rank {w.source_rank}" if w.source_rank is not None else ""
            text = f"{message_size(row.bytes)}, {w.case}: {w.elements:,} of {row.elements:,} elements, the first at {w.first}{source}"
            by_rank[w.rank].append((row, text))
    for rank, found in sorted(by_rank.items()):
        sizes = len({id(row) for row, _ in found})
        result.judge(Verdict.FAIL, f"wrong values on rank {rank} at {sizes} of {len(rows)} sizes ({found[0][1]})")


def host_noise(result: Result) -> bool:
    """Add the verdict on noise; True if others used so much CPU that the times prove nothing."""
    noise = result.host_noise
    if noise is None or not noise.noisy:
        return False
    foreign = f"{noise.foreign_cpus:.1f}" if noise.foreign_cpus is not None else "?"
    blocks = f" ({noise.noisy_blocks} of {noise.blocks} blocks)" if noise.blocks > 1 else ""
    result.judge(
        Verdict.INCONCLUSIVE,
        f"{NOISE} {foreign} of {noise.cpus} CPUs while this was measured{blocks}: the times are those of a busy "
        "host; measure again when it is idle",
    )
    return True


def late_rank(result: Result, rows: list[Row], fail: Verdict) -> None:
    by_rank: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        if row.late_rank is not None and row.skew_us >= LATE_FAILS_US:
            by_rank[row.late_rank].append(row)
    for rank, late in by_rank.items():
        if len(late) * 2 < len(rows):
            continue
        skew_us = sorted(r.skew_us for r in late)[len(late) // 2]
        share = min(r.late_share for r in late)
        result.judge(
            fail,
            f"rank {rank} arrives {time_text(skew_us)} after the first, in {share:.0%} of the operations at "
            f"{len(late)} of {len(rows)} sizes: the others wait for it",
        )


def against_ceilings(result: Result, rows: list[Row], fail: Verdict) -> None:
    best = best_row(rows)
    if best is None or best.busbw_gbps is None or result.device != "cpu":
        return
    memcpy = result.ceilings.get("memcpy_gbps")
    tcp = result.ceilings.get("tcp_both_ways_gbps")
    if memcpy and best.busbw_gbps > 1.2 * memcpy:
        result.judge(
            Verdict.INCONCLUSIVE,
            f"{best.busbw_gbps:.1f} GB/s is above what one rank can copy in memory ({memcpy:.1f}): not plausible",
        )
    large = [r for r in rows if r.bytes >= _LARGE_BYTES]
    operation = family(result.probe)
    reducing = operation is not None and operation.reduces
    reduces_slowly = reducing and result.dtype in ("float16", "bfloat16")
    if tcp and large and not reduces_slowly:
        highest = max(r.busbw_ci95_gbps[1] for r in large if r.busbw_ci95_gbps)
        if highest < _LOW_SHARE * tcp:
            result.judge(
                fail, f"at most {highest:.3f} GB/s: {highest / tcp:.0%} of plain TCP between the same ranks ({tcp:.2f})"
            )


def against_floor(result: Result, rows: list[Row], floor_gbps: float, unsure: bool) -> None:
    """Fail only if the whole interval is below the floor.

    `unsure`: the host was busy, or sizes are missing that may reach more.
    """
    best = best_row(rows)
    if best is None or best.busbw_ci95_gbps is None:
        result.judge(Verdict.INCONCLUSIVE, "nothing was measured to compare with the floor")
        return
    low, high = best.busbw_ci95_gbps
    found = f"bus bandwidth {best.busbw_gbps:.3f} GB/s [{low:.3f}, {high:.3f}] at {message_size(best.bytes)}"
    if high < floor_gbps:
        sure = not unsure and best.iterations >= FEW
        result.judge(Verdict.FAIL if sure else Verdict.INCONCLUSIVE, f"{found} is below the floor of {floor_gbps:g}")
    elif low < floor_gbps:
        text = f"{found}: the interval contains the floor of {floor_gbps:g}; more --budget narrows it"
        result.judge(Verdict.INCONCLUSIVE, text)
    else:
        result.reasons.append(f"{found} is above the floor of {floor_gbps:g}")


def best_row(rows: list[Row]) -> Row | None:
    moved = [r for r in rows if r.busbw_gbps is not None]
    return max(moved, key=lambda r: r.busbw_gbps or 0.0, default=None)


def sound(result: Result, rows: list[Row]) -> str:
    text = f"correct at all {len(rows)} sizes on every rank" if len(rows) > 1 else "every rank completed it"
    best = best_row(rows)
    if best is not None and best.busbw_gbps:
        text += f"; best bus bandwidth {best.busbw_gbps:.2f} GB/s at {message_size(best.bytes)}"
        tcp = result.ceilings.get("tcp_both_ways_gbps")
        if tcp and result.device == "cpu":
            text += f", {best.busbw_gbps / tcp:.0%} of plain TCP"
    return text + "; no rank late"
