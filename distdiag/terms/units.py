"""Sizes, element types and durations as a person writes them, and back."""

from __future__ import annotations

import re

from distdiag.errors import DistdiagError

ITEM_BYTES: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float64": 8,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
}
DTYPE_ALIASES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp64": "float64", "int": "int32", "long": "int64"}  # fmt: skip

_UNIT = {"": 1, "b": 1, "k": 2**10, "kib": 2**10, "m": 2**20, "mib": 2**20, "g": 2**30, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}  # fmt: skip


def parse_bytes(text: str, option: str = "size") -> int:
    """Bytes from `4096`, `64K`, `64KiB` (2^10), `64kB` (10^3), `1.5M`.

    Raises:
        DistdiagError: not a size, or below one byte.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    unit = _UNIT.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise DistdiagError(f"{option} '{text}' is not a size", "write bytes, or 64K, 1M, 1GiB (powers of 1,024)")
    size = float(match[1]) * unit
    if size < 1 or size != int(size):
        raise DistdiagError(
            f"{option} {text} is not a whole number of bytes above 0", "the least is one element, e.g. 4 for float32"
        )
    return int(size)


def size_text(size_bytes: float) -> str:
    """`512 B`, `1 KiB`, `1.5 MiB`: at most three digits, no trailing `.0`."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.4g} {unit}" if value < 100 else f"{value:.0f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def time_text(us: float) -> str:
    """Microseconds for people: `85 µs`, `1.24 ms`, `2.1 s`."""
    if us < 1_000:
        return f"{us:.3g} µs" if us < 100 else f"{us:.0f} µs"
    if us < 1_000_000:
        return f"{us / 1e3:.3g} ms"
    return f"{us / 1e6:.3g} s"


def sweep(min_bytes: int, max_bytes: int, factor: float, item_bytes: int, multiple: int = 1) -> list[int]:
    """Message sizes from `min_bytes` to `max_bytes`, each `factor` times the last; the last is `max_bytes`.

    Args:
        item_bytes: Bytes of one element.
        multiple: Elements come in this multiple (world size, where each rank holds an equal part): rounded up.

    Raises:
        DistdiagError: bounds that are not a multiple of the element or the wrong way round.
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
