"""Small labelled image sets, and folders of them in both formats of CIFAR-10."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import numpy as np

from distdiag.train.cifar import MANIFEST, DataSet, ImageSet, write_binary
from distdiag.train.synthetic import generate


def small_set(train: int = 40, test: int = 20) -> DataSet:
    return DataSet("small", generate(train, seed=1), generate(test, seed=2), "small")


def write_manifest(folder: Path) -> None:
    files = sorted(p for p in folder.iterdir() if p.name != MANIFEST)
    sums = (f"{hashlib.md5(p.read_bytes()).hexdigest()}  {p.name}\n" for p in files)
    (folder / MANIFEST).write_text("".join(sums))


def python_batch(images: ImageSet, protocol: int = 2) -> bytes:
    """Return a file like the published ones: bytes for keys, an array of planes, a list of labels."""
    planes = images.images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    batch = {b"batch_label": b"x", b"labels": images.labels.tolist(), b"data": np.ascontiguousarray(planes)}
    return pickle.dumps(batch, protocol=protocol)


def write_python(folder: Path, data: DataSet, protocol: int = 2) -> None:
    bounds = np.linspace(0, len(data.train), 6).astype(int)
    for i in range(5):
        part = ImageSet(data.train.images[bounds[i] : bounds[i + 1]], data.train.labels[bounds[i] : bounds[i + 1]])
        (folder / f"data_batch_{i + 1}").write_bytes(python_batch(part, protocol))
    (folder / "test_batch").write_bytes(python_batch(data.test, protocol))
    write_manifest(folder)


def binary_folder(parent: Path, train: int = 40, test: int = 20) -> Path:
    data = small_set(train, test)
    folder = parent / "small"
    folder.mkdir(parents=True)
    write_binary(folder, data.train, data.test)
    return folder
