"""One rank as every reader shows it: a row of the `rank` table, and of the screen frames kept for time travel."""

from __future__ import annotations

import zlib

import msgspec


class RankRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Newest state of one rank; field names are the columns of table `rank`, then what only the screen needs.

    `array_like` makes field order the format of `frame.ranks`: append fields, never reorder.
    """

    rank: int
    node: int = 0
    local_rank: int = 0
    host: str = ""
    pid: int | None = None
    gpu: int | None = None
    life: str = "missing"
    exit_code: int | None = None
    signal: int | None = None
    exception: str | None = None
    t_s: float | None = None
    heartbeat_age_s: float | None = None
    phase: str | None = None
    phase_age_s: float | None = None
    step: int | None = None
    epoch: int | None = None
    file: str | None = None
    line: int | None = None
    function: str | None = None
    waiting_op: str | None = None
    waiting_group: str | None = None
    waiting_seq: int | None = None
    waiting_bytes: int | None = None
    waiting_age_s: float | None = None
    rss_bytes: int | None = None
    dropped: int | None = None
    recorder_errors: int | None = None
    recorder_error: str | None = None
    # --- beyond the table: medians over the rank's last (up to 50) steps, ms
    step_ms: float | None = None
    self_ms: float | None = None  # step - wait
    delta_self_ms: float | None = None  # against median_low of the other ranks
    wait_ms: float | None = None
    data_ms: float | None = None
    h2d_ms: float | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    other_ms: float | None = None
    samples_per_s: float | None = None
    loss: float | None = None
    device_bytes: int | None = None  # torch's allocator, peak reserved, on this rank's device
    last_op: str | None = None  # the newest collective issued, completed or not
    last_group: str | None = None
    last_seq: int | None = None
    last_bytes: int | None = None
    severity: str | None = None  # of the worst open finding that has this rank among its culprits
    cpu_pct: float | None = None
    late_ms: float | None = None
    slowest_in: int | None = None  # of the last 50 steps, how many this rank was the slowest of
    activity: str | None = None  # words of findings.Where.state


TABLE_COLUMNS = RankRow.__struct_fields__[:28]  # what table `rank` holds

_encode = msgspec.msgpack.Encoder()
_decode = msgspec.msgpack.Decoder(list[RankRow])


def pack(rows: list[RankRow]) -> bytes:
    """The blob of `frame.ranks`."""
    return zlib.compress(_encode.encode(rows), 1)


def unpack(blob: bytes) -> list[RankRow]:
    """Inverse of `pack`.

    Raises:
        msgspec.DecodeError, zlib.error: the blob was written by something else.
    """
    return _decode.decode(zlib.decompress(blob))
