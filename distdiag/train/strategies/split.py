"""Cut a model into stages of about equal work."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from distdiag.errors import DistdiagError


@dataclass(frozen=True)
class Piece:
    """One step of a model's forward."""

    name: str  # path of the module in the model, which its parameters' names begin with; "" for one without parameters
    module: nn.Module


def pieces_of(network: nn.Module) -> list[Piece]:
    """Return the steps of a model's forward: from its method `pieces()`, or the children of an `nn.Sequential`."""
    own: Callable[[], list[Piece]] | None = getattr(network, "pieces", None)  # type: ignore[assignment]
    if callable(own):
        return own()
    if isinstance(network, nn.Sequential):
        return [Piece(name if list(m.parameters()) else "", m) for name, m in network.named_children()]
    raise DistdiagError(
        f"{type(network).__name__} cannot be cut into stages",
        "make it an nn.Sequential, or leave out model and pipeline",
    )


class Stage(nn.Module):
    """Consecutive pieces of a model; its state has the names of the whole model."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(p.module for p in pieces)
        self.names = [p.name for p in pieces]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for piece in self.pieces:
            x = piece(x)
        return x

    def whole_state(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers on the CPU, by their names in the whole model."""
        return {
            f"{name}.{key}": value.cpu()
            for name, piece in zip(self.names, self.pieces, strict=True)
            for key, value in piece.state_dict().items()
        }

    def load_whole_state(self, state: dict[str, torch.Tensor]) -> None:
        for name, piece in zip(self.names, self.pieces, strict=True):
            prefix = f"{name}."
            piece.load_state_dict(
                {k.removeprefix(prefix): v for k, v in state.items() if name and k.startswith(prefix)}
            )


@dataclass(frozen=True)
class Cut:
    """How a model is divided."""

    stages: list[list[Piece]]
    shares: list[float]  # of the model's forward FLOPs in each stage; they add up to 1
    shapes: list[tuple[int, ...]]  # of one sample (without the batch dimension) before each stage and after the last


def cut(pieces: Sequence[Piece], stages: int, sample_shape: tuple[int, ...]) -> Cut:
    """Divide `pieces` into `stages` so that the largest stage has as few forward FLOPs as possible."""
    starts = [i for i, p in enumerate(pieces) if p.name]
    if len(starts) < stages:
        raise DistdiagError(
            f"{stages} stages, but the model has {len(starts)} layers with parameters",
            f"start at most {len(starts)} ranks, or take a larger --model",
        )
    flops, shapes = _measure(pieces, sample_shape)
    # a stage begins with a layer that has parameters, so that every stage has some
    best: tuple[int, tuple[int, ...]] | None = None
    for inner in itertools.combinations(starts[1:], stages - 1):
        bounds = (0, *inner, len(pieces))
        largest = max(sum(flops[a:b]) for a, b in itertools.pairwise(bounds))
        if best is None or largest < best[0]:
            best = (largest, bounds)
    assert best is not None
    bounds, total = best[1], max(1, sum(flops))
    spans = list(itertools.pairwise(bounds))
    return Cut(
        [list(pieces[a:b]) for a, b in spans],
        [sum(flops[a:b]) / total for a, b in spans],
        [shapes[b] for b in bounds],
    )


def _measure(pieces: Sequence[Piece], sample_shape: tuple[int, ...]) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return (forward FLOPs of each piece, shape of one sample before each piece and after the last)."""
    flops: list[int] = []
    shapes = [sample_shape]
    first = next((p for piece in pieces for p in piece.module.parameters()), None)
    x = torch.empty(2, *sample_shape, device=first.device if first is not None else None)  # batch norm refuses one
    with torch.no_grad():
        for piece in pieces:
            was_training = piece.module.training
            with FlopCounterMode(display=False) as counter:
                x = piece.module.eval()(x)
            piece.module.train(was_training)
            flops.append(counter.get_total_flops())
            shapes.append(tuple(x.shape[1:]))
    return flops, shapes
