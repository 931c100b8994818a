"""Keep one copy of the pixels per node: local rank 0 creates anonymous memory, the other ranks map it.

A memfd has no name that could be left behind, and is not limited by /dev/shm (64 MB in a container by default). The other
ranks open it through /proc/PID/fd, which the kernel allows for processes of the same user.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np
import torch

from distdiag.train.cifar import DataSet


@dataclass(frozen=True)
class PixelAddress:
    """What another process needs to map the pixels, and their description."""

    path: str  # /proc/PID/fd/N
    name: str
    fingerprint: str
    train_images: int
    test_images: int


@dataclass(frozen=True)
class TensorImages:
    """Labelled images in shared memory: `images` uint8 (n, 32, 32, 3), `labels` int64 (n,)."""

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)


class SharedPixels:
    """A data set in memory that several processes share."""

    source: str = "rank 0 of the node"  # where the process that published it has found it
    notice: str | None = None  # a line to print if it is not the requested one

    def __init__(self, descriptor: int, address: PixelAddress) -> None:
        self.address = address
        self._descriptor = descriptor
        total = address.train_images + address.test_images
        memory = mmap.mmap(descriptor, total * (1 + 32 * 32 * 3))
        pixels = torch.frombuffer(memory, dtype=torch.uint8)
        labels = pixels[:total].long()
        images = pixels[total:].view(total, 32, 32, 3)
        split = address.train_images
        self.train = TensorImages(images[:split], labels[:split])
        self.test = TensorImages(images[split:], labels[split:])

    @classmethod
    def publish(cls, data: DataSet) -> SharedPixels:
        """Copy a data set into memory that other processes can map.

        Raises:
            OSError: no memory.
        """
        descriptor = os.memfd_create("distdiag-pixels")
        with os.fdopen(os.dup(descriptor), "wb") as f:
            for part in (data.train.labels, data.test.labels, data.train.images, data.test.images):
                f.write(np.ascontiguousarray(part).data.cast("B"))
        address = PixelAddress(
            f"/proc/{os.getpid()}/fd/{descriptor}", data.name, data.fingerprint, len(data.train), len(data.test)
        )
        published = cls(descriptor, address)
        published.source, published.notice = data.source, data.notice
        return published

    @classmethod
    def open(cls, address: PixelAddress) -> SharedPixels:
        """Map the pixels that another process of this machine has published.

        Raises:
            OSError: the process is gone, or /proc is not accessible.
        """
        return cls(os.open(address.path, os.O_RDWR), address)
