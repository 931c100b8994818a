"""Hashes the samples of an epoch, to compare which samples ranks read, in whatever order and batches.

Of all hashes the lowest are kept: ranks that read the same samples keep the same ones, and of parts that have none in common, none
(a bottom-k sketch: Broder, "On the resemblance and containment of documents", 1997).
"""

from __future__ import annotations

import ctypes
import zlib
from typing import Any

import torch

from distdiag.page.layout import EPOCH_SAMPLES
from distdiag.recorder.unseen import has_memory

MOST = 1 << 15  # samples that are hashed of an epoch, at most: a third of a microsecond each
READ_BYTES = 256  # of each, in its middle
WORKERS = 16  # with more, nothing records which worker gave a sample


class EpochSamples:
    """The lowest hashes of the samples of one epoch of one rank, how often each came, and from which workers (bits 16 to 31)."""

    def __init__(self, workers: int = 0) -> None:
        self.times: dict[int, int] = {}
        self._workers, self._batches = workers, 0
        self._limit, self._samples = 1 << 32, 0

    def add(self, tensor: torch.Tensor | None) -> bool:
        """Add the rows of a batch's tensor; False if that cannot be done, or there are too many."""
        if tensor is None or tensor.device.type != "cpu" or not has_memory(type(tensor)):
            return False
        if tensor.layout is not torch.strided or tensor.is_nested or not tensor.dim():
            return False
        n, at = tensor.shape[0], tensor.data_ptr()
        # workers give their batches in turn
        worker = 1 << 16 + self._batches % self._workers if 1 < self._workers <= WORKERS else 0
        self._batches += 1
        self._samples += n
        if not (n and at and tensor.is_contiguous()) or self._samples > MOST:
            return False
        size = tensor.numel() // n * tensor.element_size()
        memory = memoryview((ctypes.c_uint8 * (n * size)).from_address(at))
        times, crc32, read = self.times, zlib.crc32, min(size, READ_BYTES)
        for i in range((size - read) // 2, n * size, size):
            key = crc32(memory[i : i + read])
            if key < self._limit:
                times[key] = times.get(key, 0) + 1 | worker
                if len(times) > EPOCH_SAMPLES:
                    del times[max(times)]
                    self._limit = max(times) + 1
        return True

    def write(self, slot: Any) -> None:
        """Write them into a loader's slot, if there are enough to compare."""
        if len(self.times) == EPOCH_SAMPLES:
            for i, (key, times) in enumerate(self.times.items()):
                slot.epoch_samples[i] = key << 32 | times
            slot.sampled_epoch = slot.iterations
