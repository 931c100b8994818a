"""Every rank (ddp) or every device of one process (dp) has a copy of the model and a part of the batch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from distdiag.probekit.measure.noise import usable_cpus
from distdiag.probekit.measure.thread_data_parallel import ThreadDataParallel
from distdiag.train.strategies.base import Strategy


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
        device = self.ranks.device
        # broadcasts rank 0's weights and buffers
        self.model = DistributedDataParallel(
            self.model,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=self.setup.config.bucket_mb,
            process_group=self.ranks.group,
        )

    def gradient_exchange(self, completes_step: bool) -> AbstractContextManager[Any]:
        return nullcontext() if completes_step else self.model.no_sync()
