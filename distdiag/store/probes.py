"""Read the figures out of a probe's recorded result."""

from __future__ import annotations

import msgspec


class _Row(msgspec.Struct):
    busbw_gbps: float | None = None


class _Result(msgspec.Struct):
    rows: list[_Row] = []
    hosts: list[str] = []


_decode = msgspec.json.Decoder(_Result)


def hosts_and_bandwidth(result: str) -> tuple[list[str], float | None]:
    """Return the hosts of a probe, and the bus bandwidth of its largest message, bytes/s; None if it measures none."""
    try:
        found = _decode.decode(result)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return [], None
    rates = [row.busbw_gbps for row in found.rows if row.busbw_gbps is not None]
    return found.hosts, rates[-1] * 1e9 if rates else None
