"""Base of all strategies: divide one step over the ranks, and gather the state for validation and checkpoints."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distdiag.train.config import TrainConfig
from distdiag.train.faults import Faults
from distdiag.train.precision import autocast
from distdiag.train.ranks import Ranks


@dataclass(frozen=True)
class Setup:
    """Arguments of every strategy."""

    config: TrainConfig
    ranks: Ranks
    network: nn.Module  # the whole model with its initial weights, equal on all ranks, on the CPU
    amp: str  # "off", "bf16" or "fp16", already resolved
    faults: Faults
    copies: int = 0  # with dp: of the model; 0: one for each GPU, or for each CPU


class Strategy:
    """Trains the whole model in this process; other strategies override methods.

    Attributes:
        network: The whole model without a wrapper. With stages: this rank's stage.
        model: The module whose forward is called.
        skeleton: The whole model without memory (meta device), for strategies whose ranks hold a part of it.
    """

    shares_batches = False  # True: each rank takes a part of every global batch
    skeleton: nn.Module

    def __init__(self, setup: Setup) -> None:
        self.setup, self.ranks = setup, setup.ranks
        self.network = self.build(setup.network)
        self.model: nn.Module = self.network
        self.wrap()
        self.scaler = torch.amp.GradScaler(self.ranks.device.type, enabled=setup.amp == "fp16")

    # -- what is trained --------------------------------------------------------------------------------------

    def build(self, network: nn.Module) -> nn.Module:
        """Return the module whose parameters this rank trains, on its device."""
        if self.setup.config.channels_last:
            network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return self.setup.faults.apply_to_model(network).to(self.ranks.device)

    def wrap(self) -> None:
        """Put the parallel wrapper around `self.model`."""

    @property
    def data_rank(self) -> int:
        return self.ranks.rank if self.shares_batches else 0

    @property
    def data_ranks(self) -> int:
        return self.ranks.world_size if self.shares_batches else 1

    def about(self) -> list[str]:
        """Return lines that rank 0 prints before the training starts."""
        return []

    def summary(self) -> list[str]:
        """Return lines that rank 0 prints after the last step. Collective."""
        return []

    # -- one step ---------------------------------------------------------------------------------------------

    def backward(
        self, images: torch.Tensor, labels: torch.Tensor, completes_step: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Run forward and backward of one batch; gradients are added up until `completes_step`.

        Returns:
            Mean loss and outputs, or None on a rank that does not compute the outputs.
        """
        with self.gradient_exchange(completes_step):
            with autocast(self.setup.amp, self.ranks.device):
                outputs = self.model(images)
                loss = F.cross_entropy(outputs, labels)
            self.scaler.scale(loss / self.setup.config.accumulate).backward()
        return loss, outputs

    def gradient_exchange(self, completes_step: bool) -> AbstractContextManager[Any]:
        """Return the context of forward and backward: without `completes_step`, gradients are not exchanged."""
        return nullcontext()

    def optimize(self, optimizer: torch.optim.Optimizer) -> None:
        if self.setup.config.clip > 0:
            self.scaler.unscale_(optimizer)
            self.clip(self.setup.config.clip)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad(set_to_none=True)

    def clip(self, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(self.network.parameters(), max_norm)

    # -- its state --------------------------------------------------------------------------------------------

    def whole_network(self) -> nn.Module:
        """Return the whole model with the current weights and rank 0's buffers, on every rank. Collective."""
        self._broadcast_buffers(self.network)
        return self.network

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return weights and optimizer state for a checkpoint; complete on rank 0. Collective."""
        return {"model": self.network.state_dict(), "optimizer": optimizer.state_dict()}

    def load(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
        """Restore the state that `state` returned.

        Raises:
            RuntimeError: the weights are of another model.
        """
        self.network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def _assembled(self, state: dict[str, Any]) -> nn.Module:
        """Return `self.skeleton` with the weights of a whole model's state; its memory is freed with it."""
        whole = copy.deepcopy(self.skeleton).to_empty(device=self.ranks.device)
        whole.load_state_dict(state)
        return whole

    def _broadcast_buffers(self, network: nn.Module) -> None:
        """Copy rank 0's running statistics to all ranks: between steps each rank has its own."""
        if self.ranks.control is not None:
            for buffer in network.buffers():
                dist.broadcast(buffer, src=0)
