"""Sizes as users write them, and nccl-tests' formulas."""

from __future__ import annotations

import pytest

from distdiag.errors import DistdiagError
from distdiag.terms.operations import algorithm_bandwidth, bus_bandwidth
from distdiag.terms.units import message_size, parse_bytes, size_text, sweep, time_text


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("1K", 1024), ("64MiB", 2**26), ("1.5M", 3 * 2**19), ("2kB", 2000), ("1g", 2**30)],
)
def test_sizes_are_parsed(text: str, size: int):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 20, "", "x", "0", "-4", "1.3", "4 parsecs", "K"])
def test_an_invalid_size_is_refused(text: str):
    with pytest.raises(DistdiagError) as e:
        parse_bytes(text, "--min-bytes")
    assert "--min-bytes" in e.value.message and e.value.hint


def test_a_sweep_ends_at_its_largest_size():
    assert sweep(1024, 64 * 2**20, 4, 4) == [1024 * 4**k for k in range(9)]
    assert sweep(1024, 3000, 2, 4) == [1024, 2048, 3000]
    assert sweep(8, 8, 4, 4) == [8]


def test_sizes_that_ranks_share_are_rounded_up_to_whole_parts():
    assert sweep(1024, 4096, 4, 4, multiple=3) == [1032, 4104]


@pytest.mark.parametrize(
    ("low", "high", "factor", "says"),
    [
        (1023, 4096, 4, "not a multiple"),
        (1024, 1022, 4, "not a multiple"),
        (8192, 4096, 4, "above"),
        (4, 8, 1, "factor"),
    ],
)
def test_invalid_bounds_are_refused(low: int, high: int, factor: float, says: str):
    with pytest.raises(DistdiagError, match=says):
        sweep(low, high, factor, 4)


@pytest.mark.parametrize(
    ("op", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_gather", 8, 0.875),
        ("reduce_scatter", 4, 0.75),
        ("all_to_all", 2, 0.5),
        ("gather", 4, 0.75),
        ("scatter", 4, 0.75),
        ("broadcast", 8, 1.0),
        ("reduce", 8, 1.0),
        ("sendrecv", 3, 1.0),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(op: str, ranks: int, factor: float):
    # 1 GB (10^9 bytes) in 2 s
    assert algorithm_bandwidth(10**9, 2.0) == pytest.approx(0.5)
    assert bus_bandwidth(op, 10**9, 2.0, ranks) == pytest.approx(0.5 * factor)


def test_one_rank_and_barriers_have_no_bus_bandwidth():
    with pytest.raises(ValueError, match="two ranks"):
        bus_bandwidth("all_reduce", 8, 1.0, 1)
    with pytest.raises(ValueError, match="no bandwidth"):
        bus_bandwidth("barrier", 8, 1.0, 2)


def test_sizes_and_times_as_text():
    assert [message_size(n) for n in (512, 1024, 1536, 25 * 2**20, 3 * 2**30)] == [
        "512 B",
        "1 KiB",
        "1.5 KiB",
        "25 MiB",
        "3 GiB",
    ]
    assert [size_text(n) for n in (512, 25 * 2**20, 2**20 - 1, None)] == ["512 B", "25.0 MiB", "1.0 MiB", "–"]
    assert [time_text(us) for us in (8.5, 312.4, 1240, 2.1e6)] == ["8.5 µs", "312 µs", "1.24 ms", "2.1 s"]
