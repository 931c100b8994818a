"""FSDP2: every rank keeps a part of each parameter, gradient and optimizer state, and gathers layers when needed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from distdiag.train.strategies.base import Strategy

_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class FullySharded(Strategy):
    """`fully_shard` around each block of the model and around the rest.

    Parameters and communication stay float32; with amp, autocast computes in bfloat16. So batch norm keeps float32 weights
    and statistics, which FSDP's mixed precision would cast.
    """

    network: FSDPModule  # type: ignore[assignment]
    shares_batches = True

    def build(self, network: nn.Module) -> nn.Module:
        device = self.ranks.device
        # FSDP shards contiguous parameters only, so they stay NCHW; the images may be NHWC
        network = self.setup.faults.apply_to_model(network).to(device)
        self.skeleton = copy.deepcopy(network).to("meta")
        mesh = init_device_mesh(device.type, (self.ranks.world_size,))
        for block in blocks_of(network):
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        fully_shard(network, mesh=mesh, reshard_after_forward=True)
        return network

    @contextmanager
    def gradient_exchange(self, completes_step: bool) -> Iterator[None]:
        self.network.set_requires_gradient_sync(completes_step)
        yield

    def whole_network(self) -> nn.Module:
        state, _ = get_state_dict(self.network, (), options=StateDictOptions(full_state_dict=True))  # type: ignore[arg-type]
        whole = self._assembled(state)
        self._broadcast_buffers(whole)
        return whole

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        model, optimizer_state = get_state_dict(self.network, optimizer, options=_FULL)  # type: ignore[arg-type]
        return {"model": model, "optimizer": optimizer_state}

    def load(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
        set_state_dict(
            self.network, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=_FULL  # type: ignore[arg-type]
        )  # fmt: skip


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """Return the modules that are gathered as one: residual blocks, and the other children that have parameters."""
    blocks: list[nn.Module] = []
    for child in network.children():
        inner = list(child.children()) if isinstance(child, nn.Sequential) else []
        composite = [m for m in inner if list(m.children())]
        blocks += composite or ([child] if list(child.parameters()) else [])
    return blocks
