"""The correctness check finds a wrong element, a swapped chunk, a shifted offset and another rank's part."""

from __future__ import annotations

import pytest
import torch

from distdiag.probekit.measure.patterns import Pattern, Segment, wrong_elements

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8, torch.float64]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("ranks", [2, 3, 8, 100, 300])
def test_sums_over_all_ranks_are_exact(dtype: torch.dtype, ranks: int):
    pattern = Pattern(dtype, ranks)
    n = 2 * pattern.period + 7
    total = torch.zeros(n, dtype=dtype)
    part = torch.empty(n, dtype=dtype)
    for rank in range(ranks):
        pattern.write(part, rank)
        total += part  # in the dtype itself, as a backend does
    assert wrong_elements(total, Segment(pattern.total(), 0, n), 0) is None
    assert int(pattern.total().max()) > 0


@pytest.mark.parametrize("dtype", TYPES)
def test_ranks_differ_at_nearly_every_position(dtype: torch.dtype):
    pattern = Pattern(dtype, 4)
    same = (pattern.of(0) == pattern.of(1)).float().mean()
    assert same < 0.05


def filled(pattern: Pattern, rank: int, n: int) -> torch.Tensor:
    out = torch.empty(n, dtype=pattern.dtype)
    pattern.write(out, rank)
    return out


def test_one_wrong_element_is_found_with_its_index():
    pattern = Pattern(torch.float32, 2)
    x = filled(pattern, 1, 5000)
    x[4321] += 1
    assert wrong_elements(x, Segment(pattern.of(1), 0, 5000), 0) == (1, 4321)


@pytest.mark.parametrize("shift", [1, 2, 64, 1024, 4096])
def test_a_shift_is_found(shift: int):
    pattern = Pattern(torch.bfloat16, 2)
    x = torch.roll(filled(pattern, 0, 8192), shift)
    assert wrong_elements(x, Segment(pattern.of(0), 0, 8192), 0) is not None


def test_swapped_chunks_and_another_ranks_part_are_found():
    pattern = Pattern(torch.float32, 2)
    x = filled(pattern, 0, 4096)
    swapped = torch.cat([x[2048:], x[:2048]])
    assert wrong_elements(swapped, Segment(pattern.of(0), 0, 4096), 0) is not None
    assert wrong_elements(x, Segment(pattern.of(1), 0, 4096), 0) is not None


def test_a_segment_may_begin_anywhere_in_the_pattern_and_in_the_result():
    pattern = Pattern(torch.int32, 3)
    whole = filled(pattern, 2, 10_000)
    result = torch.cat([torch.zeros(10, dtype=torch.int32), whole[777:5777]])
    assert wrong_elements(result, Segment(pattern.of(2), 777, 5000), 10) is None
    assert wrong_elements(result, Segment(pattern.of(2), 778, 5000), 10) is not None


def test_patterns_work_for_odd_and_tiny_sizes():
    pattern = Pattern(torch.float32, 2)
    for n in (1, 2, 3, pattern.period - 1, pattern.period, pattern.period + 1):
        assert wrong_elements(filled(pattern, 1, n), Segment(pattern.of(1), 0, n), 0) is None
