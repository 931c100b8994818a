"""Test values: integers that encode rank and position, small enough to be exact in every element type.

With arbitrary floats, mixed-up ranks, chunks or offsets would stay unnoticed. Here element p of rank r is
((p + 37 r) mod m), m prime: a power-of-two chunk at a wrong offset never fits. Sums over all ranks stay below the largest
integer up to which the type is exact (256 for bfloat16), so results are compared for equality.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# all integers up to this are exact
_EXACT_UP_TO = {
    torch.bfloat16: 2**8,
    torch.float16: 2**11,
    torch.float32: 2**24,
    torch.float64: 2**53,
    torch.int32: 2**31 - 1,
    torch.int64: 2**63 - 1,
    torch.uint8: 2**8 - 1,
}
_RANK_STRIDE = 37
_PRIMES = (2, 3, 5, 7, 13, 31, 61, 127, 251, 509, 1021, 2039, 4093)


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` expected elements of a result: the periodic `values` from position `start` on."""

    values: torch.Tensor  # one period
    start: int = 0
    count: int = 0
    source_rank: int | None = None


class Pattern:
    """The values of all ranks for one element type and world size."""

    def __init__(self, dtype: torch.dtype, world_size: int) -> None:
        limit = _EXACT_UP_TO[dtype]
        self.dtype = dtype
        self.world_size = world_size
        fitting = [p for p in _PRIMES if (p - 1) * world_size <= limit]
        self.modulus = fitting[-1] if fitting else 2
        # more ranks than the type can count: only every gate-th rank contributes to a position
        self.gate = -(-world_size // limit)
        self.period = self.modulus * self.gate

    def of(self, rank: int) -> torch.Tensor:
        """Return one period of `rank`'s values, int64."""
        position = torch.arange(self.period)
        value = (position // self.gate + _RANK_STRIDE * rank) % self.modulus
        return value * ((position + rank) % self.gate == 0) if self.gate > 1 else value

    def total(self) -> torch.Tensor:
        """Return one period of the sum over all ranks, int64."""
        total = torch.zeros(self.period, dtype=torch.int64)
        for rank in range(self.world_size):
            total += self.of(rank)
        return total

    def write(self, into: torch.Tensor, rank: int) -> None:
        """Fill the one-dimensional `into` with `rank`'s values from position 0 on."""
        period = self.of(rank).to(self.dtype).to(into.device)
        whole = len(into) // self.period
        if whole:
            into[: whole * self.period].view(whole, self.period).copy_(period.expand(whole, self.period))
        into[whole * self.period :].copy_(period[: len(into) - whole * self.period])


def wrong_elements(result: torch.Tensor, segment: Segment, offset: int) -> tuple[int, int] | None:
    """Return (number, first position) of elements of `result` from `offset` on that are not `segment`'s, or None."""
    part = result[offset : offset + segment.count]
    period = len(segment.values)
    values = torch.roll(segment.values, -(segment.start % period)).to(part.dtype).to(part.device)
    whole = len(part) // period
    differs = []
    if whole:
        differs.append((part[: whole * period].view(whole, period) != values).view(-1))
    differs.append(part[whole * period :] != values[: len(part) - whole * period])
    count = sum(int(d.sum()) for d in differs)
    if not count:
        return None
    first = int(torch.cat(differs).to(torch.uint8).argmax())
    return count, offset + first
