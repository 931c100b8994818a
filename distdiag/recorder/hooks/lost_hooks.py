"""Finds parameters that DDP no longer averages, because their autograd node is not that on which DDP has put its hook.

A parameter gets a new node when its data are converted to another dtype or moved to another device (`.half()`, `.to()`); DDP, which
holds the old ones, gives no error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import graph

from distdiag.recorder.hooks.tensor_samples import capturing, gradient
from distdiag.recorder.torch_names import private
from distdiag.recorder.unseen import has_memory

if TYPE_CHECKING:
    from distdiag.recorder.hooks.wrapped_model import Model

_edge = private(graph, "get_gradient_edge", None)
MOST = 24  # parameters that are checked: some microseconds each


def hooked(ddp: Any, trained: list[tuple[str, Any]]) -> list[tuple[str, Any, Any]]:
    """Return some of the parameters with their nodes, which DDP keeps alive; none where it uses the nodes in another way."""
    if getattr(ddp, "mixed_precision", None) is not None or getattr(ddp, "_use_python_reducer", False):
        return []  # the first converts in each forward, the second has its hooks elsewhere
    some = trained[:: max(1, len(trained) // MOST)][:MOST]
    return [(name, p, node) for name, p in some if (node := _node(p)) is not None]


def lost(models: list[Model]) -> tuple[list[str], int]:
    """Return the names of parameters with a gradient and a new node, and of how many: those in no module that was wrapped later."""
    names, n, later = [], 0, frozenset[int]()
    for m in [] if capturing() or torch.is_inference_mode_enabled() else reversed(models):
        own = [x for x in m.hooked if id(x[1]) not in later and gradient(x[1]) is not None]
        new = [name for name, p, node in own if replaced(p, node)]
        names, n, later = new + names, n + len(own), later | m.built_with
    return names, n


def replaced(p: Any, node: Any) -> bool:
    return _node(p) not in (node, None)


def _node(p: Any) -> Any:
    """Return the node that accumulates a parameter's gradient; None if it has none."""
    return _edge(p).node if _edge and p.requires_grad and p.is_leaf and has_memory(type(p)) else None
