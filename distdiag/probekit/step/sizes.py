"""Sizes of a model for the memory formulas: given by the user, or counted in the model."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from distdiag.errors import DistdiagError
from distdiag.probekit.step.memory import expected_activations
from distdiag.probekit.step.possible import STAGED, micro_batches
from distdiag.train.models import count_parameters
from distdiag.train.strategies.split import cut, pieces_of
from distdiag.train.strategies.stages import IMAGE


@dataclass
class Stated:
    """`--params`, with equal stages and blocks; None: not given."""

    parameters: int  # of the whole model
    layers: int | None = None  # equal blocks
    whole: int | None = None  # activations of the global batch in one process
    # parameters that FSDP holds gathered at once: a block, and the next one, which it fetches ahead
    gathered: int | None = None
    # parameters of the largest block, whose gradients FSDP holds whole before it divides them
    block: int | None = None

    def __post_init__(self) -> None:
        self.name = f"{_count_text(self.parameters)} parameters"
        if self.layers is not None:
            self.block = -(-self.parameters // self.layers)
            self.gathered = self.block * min(2, self.layers)

    def why_not(self, strategy: str, ranks: int) -> str | None:
        """Return why the model cannot be divided in this way; None if it can."""
        if strategy in STAGED and self.layers is not None and ranks > self.layers:
            return f"{ranks} stages, but the model has {self.layers} layers"
        return None

    def largest_stage(self, ranks: int) -> int:
        layers = self.layers or self.parameters
        return round(self.parameters * -(-layers // ranks) / layers)

    def activations(self, strategy: str, ranks: int, batch: int) -> int | None:
        """Return the bytes saved for backward on the rank that has most (of a pipeline, the first); None: not known."""
        if self.whole is None:
            return None
        held = 1.0
        if strategy in ("ddp", "fsdp", *STAGED):
            held /= ranks
        if strategy == "pipeline":
            held *= min(1.0, ranks / micro_batches(ranks))
        return round(self.whole * held)


class Counted:
    """The same as `Stated`, of a model on the meta device in `dtype`, whose activations are counted in a forward."""

    def __init__(self, name: str, network: nn.Module, dtype: torch.dtype) -> None:
        from distdiag.train.strategies.sharded import blocks_of

        self.name, self.network, self.dtype = name, network.to("meta", dtype=dtype), dtype
        self.parameters = count_parameters(network)
        self.gathered = self.block = None
        blocks = [count_parameters(b) for b in blocks_of(network)]
        if blocks:
            self.block = max(blocks)
            self.gathered = max(a + b for a, b in zip(blocks, [*blocks[1:], 0], strict=True))
        self._cut = functools.cache(lambda ranks: cut(pieces_of(network), ranks, IMAGE))
        self.problem: str | None = None
        """Why activations are not known."""

    def why_not(self, strategy: str, ranks: int) -> str | None:
        if strategy in STAGED:
            try:
                self._cut(ranks)
            except DistdiagError as e:
                return e.message
            except Exception as e:  # the user's forward, on the meta device
                return f"its stages {_cannot_run(e)}"
        return None

    def largest_stage(self, ranks: int) -> int:
        return max(sum(count_parameters(p.module) for p in pieces) for pieces in self._cut(ranks).stages)

    def activations(self, strategy: str, ranks: int, batch: int) -> int | None:
        try:
            stages = self._cut(ranks) if strategy in STAGED else None
            return expected_activations(strategy, ranks, self.network, batch, IMAGE, stages, self.dtype)
        except Exception as e:  # the user's forward, on the meta device
            self.problem = f"the model {_cannot_run(e)}"
            return None


Sizes: TypeAlias = Stated | Counted


def _cannot_run(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"cannot run on the meta device: {type(error).__name__}: {first}"


def _count_text(count: int) -> str:
    """Return `7.0e9`-like counts as people write them: `7B`, `350M`, `12,345`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.4g}{unit}"
    return f"{count:,}"
