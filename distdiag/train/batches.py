"""Two input pipelines: whole batches as tensor operations on shared pixels, or a Dataset and a DataLoader with workers.

Both give uint8 images (n, 3, 32, 32) and int64 labels. `normalise` converts them to floats on the device, which saves three
quarters of the transfer to a GPU. Order and augmentation depend only on (seed, epoch, rank or sample, position), so an epoch
can be resumed at any batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from distdiag.train.faults import Faults
from distdiag.train.shared_memory import TensorImages

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]

PADDING = 4  # pixels around the image before a random crop of 32x32
MEAN = (0.4914, 0.4822, 0.4465)  # of CIFAR-10's training set, per channel, pixels in [0, 1]
STD = (0.2470, 0.2435, 0.2616)


def derived_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2^63), a hash of the parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Shard(DistributedSampler):
    """The samples of one rank in one epoch, from any position on; `count` of them are used, the rest is less than a step."""

    def __init__(self, samples: int, rank: int, world_size: int, seed: int, count: int) -> None:
        super().__init__(range(samples), world_size, rank, shuffle=True, seed=seed)  # type: ignore[arg-type]
        self.count = count
        self.start = 0

    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__())[self.start : self.count])

    def __len__(self) -> int:
        return self.count - self.start


def batches_per_epoch(samples: int, world_size: int, batch_size: int, accumulate: int) -> int:
    """Return the batches of each rank in one epoch: only full batches and full optimizer steps; 0 if there is none."""
    share = -(-samples // world_size)
    return share // batch_size // accumulate * accumulate


@dataclass(frozen=True)
class Share:
    """What one rank loads: `batches` batches of each epoch."""

    data: TensorImages
    batch_size: int
    rank: int
    world_size: int
    seed: int
    batches: int

    def sampler(self) -> Shard:
        return Shard(len(self.data), self.rank, self.world_size, self.seed, self.batches * self.batch_size)


class BatchedInput:
    """Batches from shared pixels, without per-sample Python and worker processes (about 10 us of CPU per sample)."""

    def __init__(self, share: Share, channels_last: bool, faults: Faults) -> None:
        self._share, self._channels_last, self._faults = share, channels_last, faults
        self._shard = share.sampler()

    def epoch(self, epoch: int, start: int = 0) -> Iterable[Batch]:
        self._shard.set_epoch(epoch)
        order = torch.tensor(list(self._shard), dtype=torch.long)
        return self._cut(order.split(self._share.batch_size), epoch, start)

    def _cut(self, parts: tuple[torch.Tensor, ...], epoch: int, start: int) -> Iterator[Batch]:
        generator, share = torch.Generator(), self._share
        for position, indices in enumerate(parts[start:], start):
            self._faults.on_loading()
            generator.manual_seed(derived_seed(share.seed, epoch, share.rank, position))
            images = augment(share.data.images.index_select(0, indices), generator).permute(0, 3, 1, 2)
            if not self._channels_last:
                images = images.contiguous()
            yield images, share.data.labels[indices]


def augment(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return random crops of the images padded by 4 black pixels, mirrored with probability 1/2; uint8 (n, 32, 32, 3)."""
    n = len(images)
    padded = F.pad(images, (0, 0, PADDING, PADDING, PADDING, PADDING))
    shifts = 2 * PADDING + 1
    s0, s1, s2, s3 = padded.stride()
    windows = padded.as_strided((n, shifts, shifts, 32, 32, 3), (s0, s1, s2, s1, s2, s3))
    top, left = torch.randint(shifts, (2, n), generator=generator)
    cropped = windows[torch.arange(n), top, left]
    mirrored = (torch.rand(n, generator=generator) < 0.5).nonzero().view(-1)
    return cropped.index_copy_(0, mirrored, cropped.index_select(0, mirrored).flip(2))


class AugmentedImages(Dataset):
    """A Dataset with one sample at a time, as in most projects."""

    def __init__(self, data: TensorImages, seed: int) -> None:
        self._data, self._seed = data, seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(derived_seed(self._seed, self.epoch, index))
        image = augment(self._data.images[index : index + 1], generator)[0]
        return image.permute(2, 0, 1), self._data.labels[index]


class WorkersInput:
    """A Dataset and a DataLoader, whose workers are restarted in each epoch to get its number."""

    def __init__(self, share: Share, workers: int, pin_memory: bool, faults: Faults) -> None:
        self._dataset = AugmentedImages(share.data, share.seed)
        self._batch_size, self._faults, self._sampler = share.batch_size, faults, share.sampler()
        self._loader = DataLoader(
            self._dataset,
            batch_size=share.batch_size,
            sampler=self._sampler,
            num_workers=workers,
            drop_last=True,
            pin_memory=pin_memory,
            generator=torch.Generator().manual_seed(share.seed),  # separate from the generator of dropout
        )

    def epoch(self, epoch: int, start: int = 0) -> Iterable[Batch]:
        self._sampler.set_epoch(epoch)
        self._sampler.start = start * self._batch_size
        self._dataset.epoch = epoch
        return self._slowed() if self._faults.slows_loading else self._loader

    def _slowed(self) -> Iterator[Batch]:
        for batch in self._loader:
            self._faults.on_loading()
            yield batch


def test_batches(
    data: TensorImages, batch_size: int, rank: int, world_size: int, channels_last: bool
) -> Iterator[Batch]:
    """Yield this rank's share of the test set: every image on exactly one rank."""
    for indices in torch.arange(rank, len(data), world_size).split(batch_size):
        images = data.images[indices].permute(0, 3, 1, 2)
        yield images if channels_last else images.contiguous(), data.labels[indices]


def normalise(images: torch.Tensor) -> torch.Tensor:
    """Return uint8 pixels as float32 with mean 0 and deviation 1 per channel, in the same memory format."""
    mean = torch.tensor(MEAN, device=images.device) * 255
    scale = 1 / (torch.tensor(STD, device=images.device) * 255)
    pixels = images.permute(0, 2, 3, 1)
    if not pixels.is_contiguous():
        return images.float().sub_(mean.view(3, 1, 1)).mul_(scale.view(3, 1, 1))
    # whole rows of 32 pixels: a last dimension of 3 is too short for vector instructions (5 times slower)
    rows = pixels.reshape(len(images), 32, 96).float().sub_(mean.repeat(32)).mul_(scale.repeat(32))
    return rows.view(len(images), 32, 32, 3).permute(0, 3, 1, 2)
