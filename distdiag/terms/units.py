"""Sizes, durations and shares as text, and sizes from text."""

from __future__ import annotations

import contextlib
import math
import re
from typing import TypeGuard

from distdiag.errors import DistdiagError

MISSING = "–"  # shown where nothing was measured

# torch's scalar types as the flight recorder and the profiler name them: (Python's name, bytes of one element)
SCALAR_TYPES = {
    "Float": ("float32", 4), "Double": ("float64", 8), "Half": ("float16", 2), "BFloat16": ("bfloat16", 2),
    "Int": ("int32", 4), "Long": ("int64", 8), "Short": ("int16", 2), "Byte": ("uint8", 1), "Char": ("int8", 1),
    "Bool": ("bool", 1),
}  # fmt: skip
# element sizes of the types that probes take
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int32": 4, "int64": 8, "uint8": 1}
DTYPE_ALIASES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp64": "float64", "int": "int32", "long": "int64"}  # fmt: skip

_UNIT = {"": 1, "b": 1, "k": 2**10, "kib": 2**10, "m": 2**20, "mib": 2**20, "g": 2**30, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}  # fmt: skip


# of a column or key, by the end of its name
_OF_NAMES = (
    ("_bytes_per_s", "bytes/s"), ("_per_s", "1/s"), ("_unix_s", "seconds since 1970"), ("_bytes", "bytes"), ("_ns", "ns"), ("_us", "µs"),
    ("_ms", "ms"), ("_s", "s"), ("_pct", "%"), ("_mhz", "MHz"), ("_w", "W"), ("_c", "°C"), ("_gbps", "GB/s"),
)  # fmt: skip


def unit_of(name: str) -> str | None:
    """Return the unit of a column or key, which is in its name: `ms` for `step_ms`; None if it has none."""
    return next((unit for end, unit in _OF_NAMES if f"_{name}".endswith(end)), None)


def is_number(value: float | None) -> TypeGuard[float]:
    """True if a value was measured: neither None nor NaN."""
    return value is not None and not math.isnan(value)


def parse_bytes(text: str, option: str = "size") -> int:
    """Return the bytes of `4096`, `64K`, `64KiB` (2^10), `64kB` (10^3), `1.5M`.

    Raises:
        DistdiagError: not a size, or below one byte.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    unit = _UNIT.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise DistdiagError(f"{option} '{text}' is not a size", "write bytes, or 64K, 1M, 1GiB (powers of 1,024)")
    size = float(match[1]) * unit
    if not 1 <= size < 1 << 63 or (unit == 1 and size != int(size)):
        raise DistdiagError(
            f"{option} {text} is not a whole number of bytes from 1 to 2^63",
            "the least is one element, e.g. 4 for float32",
        )
    return int(size)


def parse_keep(text: str) -> int:
    """Return the bytes of a `--keep` size: `500M`, `2G`, `1000000`.

    Raises:
        DistdiagError: no size, or below 1 MiB.
    """
    with contextlib.suppress(DistdiagError):
        if (value := parse_bytes(text)) >= 1 << 20:
            return value
    raise DistdiagError(
        f"--keep {text} is no size of at least 1M", "give bytes, or a number with K, M or G: --keep 500M"
    )


def size_text(size_bytes: float | None) -> str:
    """Return `512 B`, `4.0 KiB`, `25.0 MiB`; `–` if not measured."""
    if not is_number(size_bytes):
        return MISSING
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1023.95:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def message_size(size_bytes: float) -> str:
    """Return `4 KiB`, `1.5 MiB`: like `size_text`, without `.0`."""
    return size_text(size_bytes).replace(".0 ", " ")


def rate_text(bytes_per_s: float | None) -> str:
    """Return `180.0 MB/s` (10^6 bytes, as disks and network cards are rated); `–` if not measured."""
    return f"{bytes_per_s / 1e6:,.1f} MB/s" if is_number(bytes_per_s) else MISSING


def percent(share: float | None) -> str:
    """Return a share between 0 and 1 as `12 %`; `–` if not measured."""
    return f"{share * 100:.0f} %" if is_number(share) else MISSING


def duration(seconds: float | None) -> str:
    """Return `0.06 s`, `31.4 s`, `12 min 04 s`, `3 h 12 min`; `–` if not measured."""
    if not is_number(seconds):
        return MISSING
    if seconds < 120:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{int(seconds) // 60} min {int(seconds) % 60:02} s"
    return f"{int(seconds) // 3600:,} h {int(seconds) % 3600 // 60:02} min"


def rough_duration(seconds: float) -> str:
    """Return `0.4 s`, `31 s`, `12 min`, `3 hours`: rounded, for sentences about what a job does."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds >= 7200:
        return rough_time(seconds)
    return f"{seconds:.0f} s" if seconds < 180 else f"{seconds / 60:.0f} min"


def rough_time(s: float) -> str:
    """Return `40 s`, `3 hours`, `12 days`: in its largest fitting unit, for limits and for what may last days."""
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if s >= 2 * size:
            return f"{s / size:.0f} {unit}"
    return f"{s:.0f} s"


def time_text(us: float) -> str:
    """Return microseconds as `85 µs`, `1.24 ms`, `2.1 s`."""
    if us < 1_000:
        return f"{us:.3g} µs" if us < 100 else f"{us:.0f} µs"
    if us < 1_000_000:
        return f"{us / 1e3:.3g} ms"
    return f"{us / 1e6:.3g} s"


def milliseconds(v: float | None, sign: str = "-") -> str:
    """Return `231.6`; whole from 1,000 ms, whole seconds with their unit from 100 s; `–` if not measured."""
    if not is_number(v):
        return MISSING
    if abs(v) < 999.95:
        return f"{v:{sign}.1f}"
    return f"{v:{sign}.0f}" if abs(v) < 99_999.5 else f"{v / 1000:{sign}.0f}s"


def delta(v: float | None) -> str:
    """Return a difference in ms, always signed."""
    return milliseconds(v, "+")


def integer(v: float | None, grouped: bool = False) -> str:
    if not is_number(v):
        return MISSING
    return f"{int(v):,}" if grouped else str(int(v))


def decimal(v: float | None, digits: int = 1) -> str:
    return f"{v:,.{digits}f}" if is_number(v) else MISSING


def counted(n: float | None, word: str, plural: str = "") -> str:
    """Return `1 rank`, `3 ranks`; `– ranks` if not measured."""
    many = plural or f"{word}s"
    return f"{int(n):,} {word if n == 1 else many}" if n is not None and is_number(n) else f"{MISSING} {many}"


def gib(v: float | None) -> str:
    """Return bytes as GiB = 2^30."""
    if not is_number(v):
        return MISSING
    g = v / 2**30
    return f"{g:.2f}" if g < 9.995 else f"{g:.1f}"


def clock(t_s: float | None) -> str:
    """Time since the run began as `00:04:31`, days in front where there are any."""
    if t_s is None or math.isnan(t_s):
        return "--:--:--"
    t = max(0, int(t_s))
    days = f"{t // 86400}d " if t >= 86400 else ""
    return f"{days}{t % 86400 // 3600:02}:{t % 3600 // 60:02}:{t % 60:02}"


def sweep(min_bytes: int, max_bytes: int, factor: float, item_bytes: int, multiple: int = 1) -> list[int]:
    """Return message sizes from `min_bytes` to `max_bytes`, each `factor` times the one before.

    Args:
        item_bytes: Bytes of one element.
        multiple: Round the number of elements up to a multiple of this (world size, if each rank holds an equal part).

    Raises:
        DistdiagError: a bound is not a multiple of the element, or the bounds are swapped.
    """
    for option, size in (("--min-bytes", min_bytes), ("--max-bytes", max_bytes)):
        if size % item_bytes:
            raise DistdiagError(
                f"{option} {size} is not a multiple of the element's {item_bytes} bytes",
                f"use {size - size % item_bytes or item_bytes}, or another --dtype",
            )
    if min_bytes > max_bytes:
        raise DistdiagError(f"--min-bytes {min_bytes} is above --max-bytes {max_bytes}", "swap them, or leave one out")
    if factor <= 1:
        raise DistdiagError(f"--factor {factor:g} must be above 1", "2 doubles the size at every row, 4 is the default")
    unit = item_bytes * multiple
    sizes: list[int] = []
    size = float(min_bytes)
    while size < max_bytes * 0.999:
        sizes.append(max(unit, -(-int(size) // unit) * unit))
        size *= factor
    sizes.append(max(unit, -(-max_bytes // unit) * unit))
    return sorted(set(sizes))
