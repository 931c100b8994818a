"""Small labelled image sets, and folders of them in CIFAR-10's binary format."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import numpy as np

from distdiag.train.cifar import IMAGE_BYTES, MANIFEST, DataSet, ImageSet
from distdiag.train.synthetic import generate


def small_set(train: int = 40, test: int = 20) -> DataSet:
    return DataSet("small", generate(train, seed=1), generate(test, seed=2), "small")


def write_manifest(folder: Path) -> None:
    files = sorted(p for p in folder.iterdir() if p.name != MANIFEST)
    sums = (f"{hashlib.md5(p.read_bytes()).hexdigest()}  {p.name}\n" for p in files)
    (folder / MANIFEST).write_text("".join(sums))


def binary_folder(parent: Path, train: int = 40, test: int = 20) -> Path:
    data = small_set(train, test)
    folder = parent / "small"
    folder.mkdir(parents=True)
    write_binary(folder, data.train, data.test)
    return folder


def write_binary(folder: Path, train: ImageSet, test: ImageSet) -> None:
    """Write a data set in the binary format, in five batches with their MD5SUMS, into an existing folder."""
    bounds = np.linspace(0, len(train), 6).astype(int)
    parts = [("test_batch", test, slice(None))]
    parts += [(f"data_batch_{i}", train, slice(a, b)) for i, (a, b) in enumerate(itertools.pairwise(bounds), 1)]
    for name, images, rows in parts:
        planes = images.images[rows].transpose(0, 3, 1, 2).reshape(-1, IMAGE_BYTES)
        content = np.concatenate([images.labels[rows, None].astype(np.uint8), planes], axis=1).tobytes()
        (folder / f"{name}.bin").write_bytes(content)
    write_manifest(folder)
