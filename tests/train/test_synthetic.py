"""The generated set: deterministic, balanced, and neither trivial nor unlearnable."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from distdiag.train.batches import normalise
from distdiag.train.cifar import ImageSet
from distdiag.train.models import build_model
from distdiag.train.synthetic import generate


def test_the_same_seed_gives_the_same_images() -> None:
    a, b, c = generate(60, seed=1), generate(60, seed=1), generate(60, seed=2)
    assert np.array_equal(a.images, b.images)
    assert np.array_equal(a.labels, b.labels)
    assert not np.array_equal(a.images, c.images)
    assert a.images.shape == (60, 32, 32, 3)
    assert a.images.dtype == np.uint8


def test_classes_are_balanced_and_in_random_order() -> None:
    labels = generate(1000, seed=1).labels
    assert np.bincount(labels).tolist() == [100] * 10
    assert len(set(labels[:50].tolist())) > 5


def tensors(images: ImageSet) -> tuple[torch.Tensor, torch.Tensor]:
    return normalise(torch.from_numpy(images.images).permute(0, 3, 1, 2)), torch.from_numpy(images.labels).long()


def test_a_convolutional_model_learns_what_a_linear_one_does_not() -> None:
    (x, y), (x_test, y_test) = tensors(generate(1280, seed=1)), tensors(generate(300, seed=2))

    flat, flat_test = x.flatten(1), x_test.flatten(1)  # ridge regression in its dual form: images, not pixels, squared
    weights = torch.linalg.solve(flat @ flat.T + 100 * torch.eye(len(flat)), F.one_hot(y, 10).float())
    linear = ((flat_test @ flat.T @ weights).argmax(1) == y_test).float().mean().item()

    torch.manual_seed(0)
    model = build_model("simple").to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    for images, labels in zip(x.split(32), y.split(32), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    with torch.no_grad():
        convolutional = (model.eval()(x_test).argmax(1) == y_test).float().mean().item()
    assert linear < 0.3
    assert convolutional > linear + 0.1
