"""Small labelled image sets, and folders of them in CIFAR-10's binary format."""

from __future__ import annotations

import hashlib
from pathlib import Path

from distdiag.train.cifar import MANIFEST, DataSet, write_binary
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
