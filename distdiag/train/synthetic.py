"""The generated data set, for training without CIFAR-10 and without a network.

Ten kinds of pattern (stripes, checks, discs, …) in random colours, positions and sizes, with noise. SimpleCNN learns them in a
few hundred steps; a linear model cannot, because no single pixel has a meaning. The set is never called CIFAR-10.
"""

from __future__ import annotations

import numpy as np

from distdiag.train.cifar import CLASSES, ImageSet

NAME = "generated patterns (not CIFAR-10)"
FILE = "generated-patterns-v1.npz"  # contains the version
TRAIN_IMAGES = 10_000
TEST_IMAGES = 2_000


def generate(count: int, seed: int) -> ImageSet:
    """Return `count` labelled images, ten classes in equal shares and random order; deterministic for a seed."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(count) % CLASSES).astype(np.uint8)
    images = np.empty((count, 32, 32, 3), np.uint8)
    for start in range(0, count, 1000):  # bounds the memory
        images[start : start + 1000] = _draw(labels[start : start + 1000], rng)
    return ImageSet(images, labels)


def _draw(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    n = len(labels)

    def uniform(low: float, high: float, *shape: int) -> np.ndarray:
        return rng.uniform(low, high, (n, *(shape or (1, 1)))).astype(np.float32)

    y, x = np.meshgrid(np.arange(32, dtype=np.float32), np.arange(32, dtype=np.float32), indexing="ij")
    fine, coarse = uniform(3.5, 5.5), uniform(8.0, 12.0)
    shift_x, shift_y = uniform(0, 12), uniform(0, 12)
    dx, dy = x - uniform(11, 21), y - uniform(11, 21)
    radius, width = uniform(6, 11), uniform(1.5, 2.5)
    distance, box = np.hypot(dx, dy), np.maximum(abs(dx), abs(dy))

    def stripes(position: np.ndarray, period: np.ndarray) -> np.ndarray:
        return np.sin(2 * np.pi * position / period) > 0

    # every kind is mirror-symmetric, so that a random flip keeps the label
    kinds = [
        stripes(y + shift_y, fine),
        stripes(y + shift_y, coarse),
        stripes(x + shift_x, fine),
        stripes(x + shift_x, coarse),
        stripes(x + shift_x, fine) ^ stripes(y + shift_y, fine),
        stripes(x + shift_x, coarse) ^ stripes(y + shift_y, coarse),
        distance < radius,
        abs(distance - radius) < width,
        (np.minimum(abs(dx), abs(dy)) < width) & (box < radius),
        abs(box - radius) < width,
    ]
    mask = np.stack(kinds)[labels, np.arange(n)][..., None].astype(np.float32)

    background = uniform(30, 225, 1, 1, 3)
    step = uniform(40, 110, 1, 1, 1) * np.where(uniform(0, 1, 1, 1, 3) < 0.5, -1, 1)
    images = background + mask * step
    images += np.repeat(np.repeat(rng.normal(0, 20, (n, 4, 4, 3)), 8, axis=1), 8, axis=2)  # patches of light
    images += rng.normal(0, 25, images.shape)  # grain
    return np.clip(images, 0, 255).astype(np.uint8)
