"""Hashes the samples of an epoch, to compare which samples ranks read, in whatever order and batches.

A sample is the index that a sampler draws, if what the data set has in memory is known (`data_set_content`); else the values that come,
which masks and augmentation change. Of all hashes the lowest are kept: ranks that read the same samples keep the same ones, and of parts
that have none in common, none (a bottom-k sketch: Broder, "On the resemblance and containment of documents", 1997).
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from distdiag.page.layout import EPOCH_SAMPLES
from distdiag.recorder.state import guarded
from distdiag.recorder.unseen import has_memory

MOST = 1 << 15  # samples that are hashed of an epoch, at most: a third of a microsecond each
READ_BYTES = 256  # of each, in its middle
WORKERS = 16  # with more, nothing records which worker gave a sample


class EpochSamples:
    """The lowest hashes of the samples of one epoch of one rank, how often each came, and from which workers (bits 16 to 31)."""

    def __init__(self, workers: int = 0, find: Callable[[], int] | None = None) -> None:
        self.times: dict[int, int] = {}
        self.content = 0  # of the data set, if indices are hashed
        self._find = find  # called when the first are drawn: the sampler has asked for the data set's length by then
        self._workers, self._batches = workers, 0
        self._limit, self._samples = 1 << 32, 0

    def add(self, tensor: torch.Tensor | None) -> bool:
        """Add the rows of a batch's tensor; False if that cannot be done, or there are too many."""
        if self.content:
            return self._samples <= MOST
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
        crc32, read = zlib.crc32, min(size, READ_BYTES)
        self._keep((crc32(memory[i : i + read]) for i in range((size - read) // 2, n * size, size)), worker)
        return True

    def drawn(self, indices: Any) -> Any:
        self._draw(indices if type(indices) is list else [indices])
        return indices

    @guarded
    def _draw(self, indices: list[Any]) -> None:
        if self._find is not None:
            self.content, self._find = self._find(), None
        if not self.content:
            return
        self._samples += len(indices) if all(type(i) is int for i in indices) else MOST + 1
        if self._samples <= MOST:
            self._keep(zlib.crc32(b"%d" % i, self.content) for i in indices)

    def _keep(self, keys: Iterable[int], worker: int = 0) -> None:
        times = self.times
        for key in keys:
            if key < self._limit:
                times[key] = times.get(key, 0) + 1 | worker
                if len(times) > EPOCH_SAMPLES:
                    del times[max(times)]
                    self._limit = max(times) + 1

    def write(self, slot: Any) -> None:
        """Write them into a loader's slot, if there are enough to compare."""
        if len(self.times) == EPOCH_SAMPLES:
            for i, (key, times) in enumerate(self.times.items()):
                slot.epoch_samples[i] = key << 32 | times
            slot.sampled_epoch = slot.iterations | bool(self.content) << 32
