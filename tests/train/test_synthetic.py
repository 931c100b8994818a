"""The generated set: the same everywhere, balanced, and neither trivial nor unlearnable."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from distdiag.train.batches import normalise
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


def test_a_convolutional_model_learns_what_a_linear_one_cannot() -> None:
    train, test = generate(1500, seed=1), generate(300, seed=2)
    x, y = normalise(torch.from_numpy(train.images).permute(0, 3, 1, 2)), torch.from_numpy(train.labels).long()
    x_test, y_test = normalise(torch.from_numpy(test.images).permute(0, 3, 1, 2)), torch.from_numpy(test.labels).long()

    flat, target = x.flatten(1).double(), F.one_hot(y, 10).double()
    weights = torch.linalg.solve(flat.T @ flat + 100 * torch.eye(flat.shape[1]).double(), flat.T @ target)
    linear = ((x_test.flatten(1).double() @ weights).argmax(1) == y_test).float().mean().item()

    torch.manual_seed(0)
    model = build_model("simple").to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    for i in range(45):
        part = slice(32 * i % 1472, 32 * i % 1472 + 32)
        optimizer.zero_grad()
        F.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
    with torch.no_grad():
        convolutional = (model.eval()(x_test).argmax(1) == y_test).float().mean().item()
    assert linear < 0.25
    assert convolutional > linear + 0.15
