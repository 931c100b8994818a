"""Input: the batched pipeline equals the per-sample definition, ranks share an epoch, and an epoch can start at any position."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from distdiag.train.batches import (
    MEAN,
    STD,
    BatchedInput,
    Share,
    WorkersInput,
    augment,
    batches_per_epoch,
    derived_seed,
    normalise,
)
from distdiag.train.batches import (
    test_batches as share_of_test_set,
)
from distdiag.train.faults import Faults, parse_fault
from distdiag.train.shared_memory import SharedPixels, TensorImages
from tests.train.images import small_set

NO_FAULTS = Faults((), 0, 1)


@pytest.fixture(scope="module")
def images() -> TensorImages:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (70, 32, 32, 3), dtype=torch.uint8, generator=generator)
    return TensorImages(pixels, torch.arange(70))  # the label identifies the image


def make(kind: str, images: TensorImages, rank: int = 0, world_size: int = 1, workers: int = 0, batches: int = 0):
    count = batches or batches_per_epoch(len(images), world_size, 8, 1)
    share = Share(images, 8, rank, world_size, 5, count)
    if kind == "batched":
        return BatchedInput(share, True, NO_FAULTS)
    return WorkersInput(share, workers, False, NO_FAULTS)


def test_augment_is_pad_crop_flip_per_sample() -> None:
    images = torch.randint(0, 256, (16, 32, 32, 3), dtype=torch.uint8)
    result = augment(images, torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    top, left = torch.randint(9, (2, 16), generator=generator).tolist()
    mirrored = torch.rand(16, generator=generator) < 0.5
    assert 0 < mirrored.sum() < 16
    for i in range(16):
        padded = torch.zeros(40, 40, 3, dtype=torch.uint8)
        padded[4:36, 4:36] = images[i]
        expected = padded[top[i] : top[i] + 32, left[i] : left[i] + 32]
        assert torch.equal(result[i], expected.flip(1) if mirrored[i] else expected)


@pytest.mark.parametrize("channels_last", [True, False])
def test_normalise_equals_the_definition_in_both_memory_formats(channels_last: bool) -> None:
    images = torch.randint(0, 256, (4, 32, 32, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    result = normalise(images.contiguous(memory_format=memory_format))
    expected = (images / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    assert torch.allclose(result, expected, atol=1e-5)
    assert result.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("kind", ["batched", "workers"])
def test_ranks_share_an_epoch_without_overlap_and_each_epoch_has_its_own_order(kind: str, images: TensorImages) -> None:
    orders = {}
    for epoch in (0, 1):
        for rank in (0, 1):
            labels = [batch[1] for batch in make(kind, images, rank, 2).epoch(epoch)]
            assert [len(x) for x in labels] == [8] * 4
            orders[epoch, rank] = torch.cat(labels).tolist()
        assert not set(orders[epoch, 0]) & set(orders[epoch, 1])
    assert orders[0, 0] != orders[1, 0]


def test_both_inputs_take_the_samples_of_the_same_sampler(images: TensorImages) -> None:
    a, b = ([y.tolist() for _, y in make(kind, images, 1, 2).epoch(3)] for kind in ("batched", "workers"))
    assert a == b


@pytest.mark.parametrize("kind", ["batched", "workers"])
def test_an_epoch_resumed_at_any_batch_continues_as_if_run_from_its_start(kind: str, images: TensorImages) -> None:
    whole = list(make(kind, images).epoch(2))
    for start in (3, 7):
        rest = list(make(kind, images).epoch(2, start))
        assert len(rest) == 8 - start
        for (x, y), (x_rest, y_rest) in zip(islice(whole, start, None), rest, strict=True):
            assert torch.equal(x, x_rest)
            assert torch.equal(y, y_rest)


def test_worker_processes_change_nothing(images: TensorImages) -> None:
    alone, workers = (list(make("workers", images, workers=n).epoch(1)) for n in (0, 2))
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(alone, workers, strict=True))


def test_augmentation_differs_between_epochs_and_ranks(images: TensorImages) -> None:
    one = TensorImages(images.images[:1].expand(70, -1, -1, -1), images.labels)
    seen = [next(iter(make("batched", one, rank, 2).epoch(epoch)))[0] for rank in (0, 1) for epoch in (0, 1)]
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])
    assert len({derived_seed(*parts) for parts in ((0, 1), (1, 0), (0, 1, 0), (1, 1))}) == 4


def test_a_limited_epoch_is_visible_in_the_loaders_length(images: TensorImages) -> None:
    assert len(list(make("batched", images, batches=5).epoch(0))) == 5
    source = make("workers", images, batches=5)
    assert len(source.epoch(0)) == len(list(source.epoch(0))) == 5


@pytest.mark.parametrize("kind", ["batched", "workers"])
def test_a_slow_input_is_slow_once_per_batch(kind: str, images: TensorImages, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("distdiag.train.faults.time.sleep", slept.append)
    slow = Faults((parse_fault("straggler@rank0:20ms:data"),), 0, 1)
    share = Share(images, 8, 0, 1, 5, 4)
    source = BatchedInput(share, True, slow) if kind == "batched" else WorkersInput(share, 0, False, slow)
    assert len(list(source.epoch(0))) == 4
    assert slept == [0.02] * 4


@pytest.mark.parametrize(
    ("samples", "world_size", "batch_size", "accumulate", "expected"),
    [(50_000, 2, 64, 1, 390), (50_000, 3, 64, 4, 260), (100, 2, 64, 1, 0), (101, 2, 17, 1, 3), (64, 1, 16, 3, 3)],
)
def test_batches_per_epoch_are_computed(
    samples: int, world_size: int, batch_size: int, accumulate: int, expected: int
) -> None:
    assert batches_per_epoch(samples, world_size, batch_size, accumulate) == expected


def test_every_test_image_is_on_exactly_one_rank(images: TensorImages) -> None:
    seen = [y for rank in range(3) for _, y in share_of_test_set(images, 10, rank, 3, True)]
    assert sorted(torch.cat(seen).tolist()) == list(range(70))


def test_pixels_are_shared_not_copied() -> None:
    data = small_set()
    published = SharedPixels.publish(data)
    opened = SharedPixels.open(published.address)
    assert opened.train.images.numpy().tobytes() == data.train.images.tobytes()
    assert opened.test.images.numpy().tobytes() == data.test.images.tobytes()
    assert opened.train.labels.tolist() == data.train.labels.tolist()
    assert opened.test.labels.tolist() == data.test.labels.tolist()
    published.train.images[3, 2, 1, 0] = 77
    assert opened.train.images[3, 2, 1, 0] == 77
    assert opened.train.images.data_ptr() != published.train.images.data_ptr()


def test_another_process_sees_the_same_pages(tmp_path: Path) -> None:
    published = SharedPixels.publish(small_set())
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        SharedPixels.open(published.address).train.images[0, 0, 0, 0] = 123
        os.write(sending, b"x")
        os._exit(0)
    assert os.read(receiving, 1) == b"x"
    os.waitpid(child, 0)
    os.close(receiving)
    os.close(sending)
    assert published.train.images[0, 0, 0, 0] == 123


def test_padding_is_black() -> None:
    white = torch.full((64, 32, 32, 3), 255, dtype=torch.uint8)
    result = augment(white, torch.Generator().manual_seed(0))
    assert set(result.unique().tolist()) == {0, 255}
    assert F.pad(white[:1], (0, 0, 4, 4, 4, 4)).shape == (1, 40, 40, 3)
