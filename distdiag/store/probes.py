"""Read the bus bandwidth out of a probe's recorded result."""

from __future__ import annotations

import msgspec


class _Row(msgspec.Struct):
    busbw_gbps: float | None = None


class _Result(msgspec.Struct):
    rows: list[_Row] = []


_decode = msgspec.json.Decoder(_Result)


def bus_bandwidth(result: str) -> float | None:
    """Return the bus bandwidth of the largest message, bytes/s (GB = 10^9); None if the probe measures none."""
    try:
        rates = [row.busbw_gbps for row in _decode.decode(result).rows if row.busbw_gbps is not None]
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return rates[-1] * 1e9 if rates else None
