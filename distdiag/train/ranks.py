"""This process's rank, device and process groups."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from distdiag.errors import DistdiagError
from distdiag.train.config import TrainConfig

T = TypeVar("T")

# A separate gloo group for small Python objects: one rank may take an hour to download the data, which must not cause a
# timeout, and NCCL would send them through the GPU.
CONTROL_TIMEOUT = timedelta(hours=12)


@dataclass
class Ranks:
    rank: int
    local_rank: int
    world_size: int
    node: str  # identity of the machine
    device: torch.device
    backend: str  # of the default group; "none" for a single process without a launcher
    control: dist.ProcessGroup | None  # for Python objects and barriers outside the step; None without process groups
    group: dist.ProcessGroup | None = None  # of the step's communication; None: the default group

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank, on every rank."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def together(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank; if it fails on one, all ranks raise that error.

        Otherwise a rank with, say, a damaged file would end, and the others would wait for it.

        Raises:
            DistdiagError: the error of the lowest rank on which `action` failed.
        """
        error: DistdiagError | None = None
        result: T | None = None
        try:
            result = action()
        except DistdiagError as e:
            error = e
        for found in filter(None, self.gather(error)):
            raise found
        return result  # type: ignore[return-value]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` over all ranks, in place, and return them."""
        if self.control is not None:
            dist.all_reduce(values)
        return values

    def barrier(self) -> None:
        """Wait for every rank, on the control group, which has no short timeout."""
        if self.control is not None:
            dist.barrier(group=self.control)

    def leave(self) -> None:
        if self.control is not None:
            self.barrier()
            self.control = None
            dist.destroy_process_group()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def join_ranks(config: TrainConfig) -> Ranks:
    """Initialise torch.distributed from the launcher's environment; a single process without a launcher skips it.

    Raises:
        DistdiagError: no such device, an incomplete environment, a used port, or missing ranks.
    """
    environment = os.environ.get
    launched = "RANK" in os.environ
    rank, world_size = int(environment("RANK", "0")), int(environment("WORLD_SIZE", "1"))
    local_rank = int(environment("LOCAL_RANK", str(rank)))
    local_world_size = int(environment("LOCAL_WORLD_SIZE", "1"))
    device, backend = choose_device(config.device, local_rank, local_world_size)
    node = environment("GROUP_RANK") or socket.gethostname()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not launched:
        return Ranks(0, 0, 1, node, device, "none", None)
    timeout = timedelta(seconds=config.timeout_s) if config.timeout_s else None
    try:
        dist.init_process_group(backend, timeout=timeout)
        control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT, group_desc="control")
    except (dist.DistError, RuntimeError, ValueError) as e:
        raise _explained(e) from None
    assert isinstance(control, dist.ProcessGroup)
    return Ranks(rank, local_rank, world_size, node, device, backend, control)


def choose_device(wanted: str, local_rank: int, local_world_size: int) -> tuple[torch.device, str]:
    """Return the device of a rank and its backend: NCCL with a GPU per rank, else gloo.

    NCCL refuses two ranks on one GPU; gloo supports CUDA tensors in all operations that this job uses.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and not gpus:
        raise DistdiagError("--device cuda: torch sees no GPU", "--device cpu, or `distdiag doctor` for the reason")
    if wanted == "cpu" or not gpus:
        return torch.device("cpu"), "gloo"
    backend = "nccl" if local_world_size <= gpus and dist.is_nccl_available() else "gloo"
    return torch.device("cuda", local_rank % gpus), backend


def _explained(error: Exception) -> DistdiagError:
    text = " ".join(str(error).split())
    port = os.environ.get("MASTER_PORT", "?")
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return DistdiagError(
            f"port {port} is used by another process",
            "torchrun --standalone chooses a free one; or set another MASTER_PORT",
        )
    if "environment variable" in text:
        return DistdiagError(
            f"the launcher's environment is incomplete: {text[:200]}", "start it with torchrun --standalone …"
        )
    where = f"{os.environ.get('MASTER_ADDR', '?')}:{port}"
    return DistdiagError(
        f"the ranks could not connect at {where}: {text[:200]}", "`distdiag doctor` checks names, ports and interfaces"
    )
