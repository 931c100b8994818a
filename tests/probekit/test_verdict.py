"""A failure needs proof: wrong values always fail, timings only on a quiet host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distdiag.probekit.measure.noise import BlockNoise
from distdiag.probekit.ranks.watchdog import Note, hang_error, never_arrived
from distdiag.probekit.verdict import collective_result, decide
from distdiag.probekit.verdict.collective_result import bucket_advice, make_row, tail_cause
from distdiag.probekit.verdict.result import Result, Verdict, WrongValues, worst

WRONG = [WrongValues(rank=1, elements=3, first=17, case="odd size", source_rank=0)]


def judged(result: Result, floor: float | None = None, skipped: list[int] | None = None) -> Result:
    decide.judge_collective(result, floor, skipped or [])
    return result


def test_a_valid_result_passes_with_its_reasons(make_row: Any, make_result: Any):
    result = judged(make_result([make_row(1024, 300.0), make_row(2**26, 40_000.0)]))
    assert result.verdict is Verdict.PASS
    assert "correct at all 2 sizes" in result.reasons[0] and "1.68 GB/s at 64 MiB" in result.reasons[0]
    assert "93% of plain TCP" in result.reasons[0]


@pytest.mark.parametrize("noisy", [False, True])
def test_wrong_values_fail_even_on_a_busy_host(make_row: Any, make_result: Any, noisy: bool):
    result = judged(make_result([make_row(correct=False, wrong=WRONG), make_row(4096)], noisy))
    assert result.verdict is Verdict.FAIL
    assert result.reasons[0].startswith("wrong values on rank 1 at 1 of 2 sizes")
    assert "odd size" in result.reasons[0] and "first at 17" in result.reasons[0] and "rank 0" in result.reasons[0]


def test_a_busy_host_is_inconclusive(make_row: Any, make_result: Any):
    result = judged(make_result([make_row()], noisy=True))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "1.4 of 2 CPUs" in result.reasons[0]


@pytest.mark.parametrize(("noisy", "expected"), [(False, Verdict.FAIL), (True, Verdict.INCONCLUSIVE)])
def test_a_rank_that_is_always_late_is_named(make_row: Any, make_result: Any, noisy: bool, expected: Verdict):
    rows = [make_row(2**k, skew_us=5100.0, late_rank=1, late_share=0.97) for k in (10, 14, 18)]
    result = judged(make_result(rows, noisy))
    assert result.verdict is expected
    assert any("rank 1 arrives 5.1 ms after the first, in 97%" in r for r in result.reasons)


def test_a_rank_late_at_one_size_of_many_is_not_named(make_row: Any, make_result: Any):
    rows = [make_row(2**10, skew_us=5100.0, late_rank=1)] + [make_row(2**k) for k in range(11, 16)]
    assert judged(make_result(rows)).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("p50", "noisy", "expected"),
    [
        (40_000.0, False, Verdict.PASS),  # 1.68 GB/s
        (80_000.0, False, Verdict.FAIL),  # 0.84: the whole interval is below
        (67_000.0, False, Verdict.INCONCLUSIVE),  # 1.0016: the interval contains it
        (80_000.0, True, Verdict.INCONCLUSIVE),
    ],
)
def test_the_floor_fails_only_if_the_whole_interval_is_below(
    make_row: Any, make_result: Any, p50: float, noisy: bool, expected: Verdict
):
    result = judged(make_result([make_row(2**26, p50)], noisy), floor=1.0)
    assert result.verdict is expected
    assert any("floor of 1" in r for r in result.reasons)


@pytest.mark.parametrize(("iterations", "skipped"), [(7, []), (100, [2**27])])
def test_a_floor_needs_enough_iterations_and_all_sizes(
    make_row: Any, make_result: Any, iterations: int, skipped: list[int]
):
    result = judged(make_result([make_row(2**26, 80_000.0, iterations=iterations)]), 1.0, skipped)
    assert result.verdict is Verdict.INCONCLUSIVE and any("below the floor of 1" in r for r in result.reasons)


def test_far_below_plain_tcp_fails_and_above_memory_is_not_plausible(make_row: Any, make_result: Any):
    slow = judged(make_result([make_row(2**26, 1_000_000.0)]))
    assert slow.verdict is Verdict.FAIL and "of plain TCP" in slow.reasons[0]
    fast = judged(make_result([make_row(2**26, 1_000.0)]))
    assert fast.verdict is Verdict.INCONCLUSIVE and "not plausible" in fast.reasons[0]


def test_sizes_that_the_budget_did_not_reach_are_inconclusive(make_row: Any, make_result: Any):
    result = judged(make_result([make_row()]), skipped=[2**24, 2**26])
    assert result.verdict is Verdict.INCONCLUSIVE and "16 MiB, 64 MiB" in result.reasons[0]


def test_the_worst_verdict_wins():
    assert worst([Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE]) is Verdict.FAIL
    assert worst([Verdict.PASS, Verdict.INCONCLUSIVE]) is Verdict.INCONCLUSIVE
    assert worst([]) is Verdict.INCONCLUSIVE


# ---------------------------------------------------------------------- stamps to rows


def job(ranks: int = 2) -> Any:
    import torch

    return SimpleNamespace(world_size=ranks, dtype=torch.float32)


def test_skew_and_wire_time_are_separate_and_the_late_rank_is_not_the_one_that_waits(make_stamps: Any):
    row, _, blocks = make_row("all_reduce", 4096, make_stamps(200, 5000.0, 300.0), [], job())
    assert row.late_rank == 1 and row.late_share > 0.99
    assert row.skew_us == pytest.approx(5000, abs=10)
    assert row.wire_us == pytest.approx(300, abs=10)
    assert row.time_us.p50 == pytest.approx(5300, abs=20)  # of the slowest rank: the early rank, which waits
    assert row.busbw_gbps == pytest.approx(4096 / 5.3e-3 / 1e9, rel=0.01)
    assert len(blocks) >= 4


def test_a_microsecond_later_is_not_late(make_stamps: Any):
    row, _, _ = make_row("all_reduce", 4096, make_stamps(200, 40.0, 300.0), [], job())
    assert row.late_rank is None and row.skew_us == pytest.approx(40, abs=5)


def test_noisy_blocks_are_left_out_if_enough_clean_ones_remain(make_stamps: Any):
    clean, busy = BlockNoise(0.0, 2, 2), BlockNoise(1.5, 2, 2)
    stamps = make_stamps(80, 0.0, 300.0, [clean, busy, clean, clean])
    stamps.left_us[:, stamps.block == 1] += 4000
    row, _, _ = make_row("all_reduce", 4096, stamps, [], job())
    assert (row.noisy, row.dropped_iterations, row.iterations) == (False, 20, 60)
    assert row.time_us.max < 1000

    few = make_stamps(20, 0.0, 300.0, [busy, busy, busy, clean])
    row, _, _ = make_row("all_reduce", 4096, few, [], job())
    assert (row.noisy, row.iterations) == (True, 20)
    noise = collective_result.total_noise([few], [row])
    assert noise.noisy and noise.noisy_blocks == 3


def test_pauses_of_a_busy_host_are_not_quiet(make_stamps: Any):
    """Each size had enough clean blocks, but others used the CPUs during half of all."""
    clean, busy = BlockNoise(0.0, 2, 2), BlockNoise(1.5, 2, 2)
    for blocks, noisy in (([clean, busy, busy, clean], True), ([clean, busy, clean, clean], False)):
        stamps = make_stamps(80, 0.0, 300.0, blocks)
        row, _, _ = make_row("all_reduce", 4096, stamps, [], job())
        assert not row.noisy
        assert collective_result.total_noise([stamps], [row]).noisy is noisy


# ---------------------------------------------------------------------- wording


@pytest.mark.parametrize(
    ("extra_ms", "tick_ms", "says"),
    [(3.9, 4, "scheduler tick"), (10.2, 10, "scheduler tick"), (40.5, 4, "delayed acknowledgement"), (204, 4, "retransmission"), (20, 4, None)],
)  # fmt: skip
def test_known_tails_are_named_with_their_remedy(extra_ms: float, tick_ms: float, says: str | None):
    cause = tail_cause(extra_ms, tick_ms)
    assert (cause is None) if says is None else (cause is not None and says in cause and ":" in cause)


@pytest.mark.parametrize(
    ("changes", "half", "given"),
    [({}, 300e3, True), ({"late_rank": 1}, 300e3, False), ({"size": 2**18}, 300e3, False), ({}, 60e6, False)],
)
def test_bucket_advice_needs_enough_sizes(
    make_row: Any, make_result: Any, changes: dict[str, Any], half: float, given: bool
):
    size = changes.pop("size", 2**26)
    result = make_result([make_row(1024, 300.0), make_row(size, 40_000.0, **changes)])
    result.fit = {
        "latency_us": 200.0, "latency_ci95": (190, 210), "bandwidth_gbps": 1.5, "bandwidth_ci95": (1.4, 1.6),
        "half_bandwidth_bytes": half, "worst_error": 0.1,
    }  # fmt: skip
    lines = collective_result.explanation("all_reduce", result)
    assert any("bucket_cap_mb" in line for line in lines) is given
    assert any(line.startswith("fit: ") for line in lines) and any("memcpy 20.00" in line for line in lines)


def test_the_fit_gives_bucket_advice():
    assert "reaches 99%" in bucket_advice(300_000) and "bucket_cap_mb=3 or more" in bucket_advice(300_000)
    assert "raise bucket_cap_mb to" in bucket_advice(20 * 2**20)


# ---------------------------------------------------------------------- hangs


def test_ranks_that_never_arrived_are_named():
    waiting = Note(5, "allreduce", True, 12)
    assert never_arrived({0: waiting, 1: Note(4, "drop", False)}, 2) == ([1], [])
    assert never_arrived({0: waiting}, 3) == ([1, 2], [1, 2])
    assert never_arrived({0: waiting, 1: Note(5, "allreduce", True, 11)}, 2) == ([1], [])
    assert never_arrived({0: waiting, 1: waiting}, 2) == ([], [])


def test_a_hang_names_ranks_places_and_interface():
    notes = {0: Note(5, "allreduce 1 KiB", True), 2: Note(4, "elsewhere", False)}
    e = hang_error("allreduce 1 KiB", 3.0, notes, 3, "lo 127.0.0.1 (GLOO_SOCKET_IFNAME=lo)")
    assert e.code == 5 and e.message == "allreduce 1 KiB: ranks 1, 2 never arrived within 3 s; rank 0 waited"
    assert "rank 2 is at 'elsewhere'" in e.hint and "rank 1 is silent" in e.hint and "lo 127.0.0.1" in e.hint
    stuck = hang_error("x", 3.0, {0: notes[0], 1: notes[0]}, 2, "eth0")
    assert "all 2 ranks are in it" in stuck.message and "eth0" in stuck.hint
