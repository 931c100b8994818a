"""The bytes that the view writes to a terminal for each frame, which an ssh connection must carry."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tui import ALLOWED_BYTES, measure_bytes, writer


@pytest.mark.parametrize("size", ALLOWED_BYTES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_a_frame_with_new_numbers_of_every_rank_is_small(tmp_path: Path, size: tuple[int, int]) -> None:
    """At ten frames a second a frame of 48 KiB is 4 Mbit/s: a slow connection carries it."""
    with writer(tmp_path / "run", ranks=64, hz=2.0):
        per_frame = measure_bytes(tmp_path / "run", size, frames=8)
    assert 100 < per_frame <= ALLOWED_BYTES[size]
