"""Every rank (ddp) or every device of one process (dp) has a copy of the model and a part of the batch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from distdiag.errors import DistdiagError
from distdiag.probekit.measure.noise import usable_cpus
from distdiag.probekit.measure.thread_data_parallel import ThreadDataParallel
from distdiag.train.strategies.base import Strategy
from distdiag.train.sync_batch_norm import convert_sync_batch_norm


class DataParallelThreads(Strategy):
    """`torch.nn.DataParallel` over all GPUs of one process; on a CPU, where torch's does nothing, threads."""

    def wrap(self) -> None:
        if self.ranks.device.type == "cuda":
            gpus = self.setup.copies or torch.cuda.device_count()
            self.model = DataParallel(self.network, device_ids=list(range(gpus)))
            self._copies = f"{gpus} GPUs"
        else:
            threads = self.setup.copies or max(2, usable_cpus())
            self.model = ThreadDataParallel(self.network, threads)
            self._copies = f"{threads} CPU threads, because torch's DataParallel uses one copy on a CPU"

    def about(self) -> list[str]:
        return [f"DataParallel: one process, one copy of the model for each of {self._copies}"]


class DistributedDataParallelism(Strategy):
    """`DistributedDataParallel`: its hooks average the gradients over the ranks during backward, bucket by bucket."""

    model: DistributedDataParallel
    shares_batches = True

    def wrap(self) -> None:
        config, device = self.setup.config, self.ranks.device
        # broadcasts rank 0's weights and buffers
        self.model = DistributedDataParallel(
            self.model,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=config.bucket_mb,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            static_graph=config.static_graph,
            find_unused_parameters=config.find_unused_parameters,
            process_group=self.ranks.group,
        )
        if config.compress != "none":
            self._compress(config.compress)

    def build(self, network: Any) -> Any:
        if self.setup.config.sync_bn:
            network = convert_sync_batch_norm(network, self.ranks.device)
        return super().build(network)

    def _compress(self, how: str) -> None:
        """Register one of torch's communication hooks."""
        if how == "bf16" and self.ranks.backend != "nccl":
            raise DistdiagError(f"--compress bf16: {self.ranks.backend} cannot sum bfloat16", "--compress fp16")
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        if how == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10)
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            hook = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[how]
            self.model.register_comm_hook(None, hook)

    def gradient_exchange(self, completes_step: bool) -> AbstractContextManager[Any]:
        return nullcontext() if completes_step else self.model.no_sync()
