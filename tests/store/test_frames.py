"""Packed frames round-trip, by row and by column, at any number of ranks."""

from __future__ import annotations

import math
import zlib

import msgspec
import pytest

from distdiag.store.frames import RankRow, pack, unpack_table


def test_every_field_round_trips() -> None:
    full = RankRow(
        **{  # type: ignore[arg-type]
            name: f"{name} ✓\x1b[31m" if "str" in str(kind) else i + 0.5 if "float" in str(kind) else 2**40 + i
            for i, (name, kind) in enumerate(RankRow.__annotations__.items())
            if name != "rank"
        },
        rank=7,
    )
    empty = RankRow(rank=3)
    for got, put in zip(unpack_table(pack([full, empty])).rows(), (full, empty), strict=True):
        assert got == put
    table = unpack_table(pack([full, empty]))
    assert (table.row(0), table.row(1)) == (full, empty)
    assert table.rows([1, 0, 1]) == [empty, full, empty]
    assert table.words("host")[1] == "" and math.isnan(table.numbers("step")[1])


def test_a_column_that_nobody_measured_reads_as_not_measured() -> None:
    table = unpack_table(pack([RankRow(rank=r) for r in range(3)]))
    assert len(table) == 3 and table.words("severity") == [None] * 3
    assert all(math.isnan(v) for v in table.numbers("loss"))
    assert list(table.numbers("rank")) == [0, 1, 2]


def test_a_frame_without_ranks_round_trips() -> None:
    assert unpack_table(pack([])).rows() == []


def test_many_different_texts_round_trip() -> None:
    rows = [RankRow(rank=r, host=f"host{r}") for r in range(70_000)]
    assert unpack_table(pack(rows)).words("host")[69_999] == "host69999"


@pytest.mark.parametrize("blob", [b"", b"x", zlib.compress(b"x"), zlib.compress(msgspec.msgpack.encode([1]))])
def test_invalid_blobs_raise_the_documented_errors(blob: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, zlib.error)):
        unpack_table(blob)
