"""CIFAR-10 on disk, in the python and the binary format; every file's MD5 is checked before it is decoded.

Format: https://www.cs.toronto.edu/~kriz/cifar.html. An image is 3072 bytes, the red, green and blue plane of 32x32; the
binary format puts the label (0 to 9) in one byte before it, the python format pickles {b"data": array, b"labels": list}.

Your own images in either format are read if their folder has a file MD5SUMS (`md5sum data_batch* test_batch* > MD5SUMS`).
"""

from __future__ import annotations

import hashlib
import io
import itertools
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distdiag.errors import DistdiagError

IMAGE_BYTES = 3 * 32 * 32
CLASSES = 10
MANIFEST = "MD5SUMS"
PYTHON_FOLDER = "cifar-10-batches-py"
BINARY_FOLDER = "cifar-10-batches-bin"

# name: (MD5, bytes), as published
PYTHON_FILES: dict[str, tuple[str, int]] = {
    "data_batch_1": ("c99cafc152244af753f735de768cd75f", 31035704),
    "data_batch_2": ("d4bba439e000b95fd0a9bffe97cbabec", 31035320),
    "data_batch_3": ("54ebc095f3ab1f0389bbae665268c751", 31035999),
    "data_batch_4": ("634d18415352ddfa80567beed471001a", 31035696),
    "data_batch_5": ("482c414d41f54cd18b22e5b47cb7c3cb", 31035623),
    "test_batch": ("40351d587109b95175f43aff81a1287e", 31035526),
    "batches.meta": ("5ff9c542aee3614f3951f8cda6e48888", 158),
}
BINARY_FILES: dict[str, tuple[str, int]] = {
    "data_batch_1.bin": ("5dd7e06a14cb22eb9f671a540d1b7c25", 30730000),
    "data_batch_2.bin": ("5ea93a67294ea407fff1d09f752e9692", 30730000),
    "data_batch_3.bin": ("942cd6a4bcdd0dd3c604fbe906cb4421", 30730000),
    "data_batch_4.bin": ("ae636b3ba5c66a11e91e8cb52e771fcb", 30730000),
    "data_batch_5.bin": ("53f37980c15c3d472c316c40844f3f0d", 30730000),
    "test_batch.bin": ("803d5f7f4d78ea53de84dbe85f74fb6d", 30730000),
}


@dataclass(frozen=True)
class ImageSet:
    """Labelled images: `images` uint8 (n, 32, 32, 3), `labels` uint8 (n,)."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class DataSet:
    """A training and a test set.

    Args:
        name: What it is; "CIFAR-10" only for the published files.
        fingerprint: MD5 over the MD5s of its files: the same data, the same fingerprint, in either format of one kind.
    """

    name: str
    train: ImageSet
    test: ImageSet
    fingerprint: str


class _Placeholder:
    """What a pickle gets for a name of numpy's: it can be passed on, and neither called nor changed."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("it changes what it did not make")


class _Function(_Placeholder):
    """Base of the functions that a pickle may call; instances, so that it cannot set their attributes."""

    __slots__ = ()


class _MakeDtype(_Function):
    __slots__ = ()

    def __call__(self, code: Any, *_: Any) -> _Dtype:
        name = code.decode("latin-1") if isinstance(code, bytes) else code
        if not isinstance(name, str) or name not in _NUMBERS:
            raise pickle.UnpicklingError(f"it wants an array of {name!r:.40}, not of numbers")
        return _Dtype(name)


class _Dtype:
    """A dtype of plain numbers; its state holds the byte order."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else None
        if order not in ("|", "<", ">", "=", b"|", b"<", b">", b"="):
            raise pickle.UnpicklingError("a dtype of unknown byte order")
        self.name = (order.decode("latin-1") if isinstance(order, bytes) else order) + self.name


class _MakeArray(_Function):
    __slots__ = ()

    def __call__(self, *_: Any) -> _Array:
        return np.ndarray.__new__(_Array, (0,), np.uint8)


class _Array(np.ndarray):
    """An array of numbers made from the bytes in a pickle; numpy's own code would take any dtype and any buffer."""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes):
            raise pickle.UnpicklingError("an array without bytes or of unknown dtype")
        plain = np.dtype(dtype.name)
        if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
            raise pickle.UnpicklingError("an array of unknown shape")
        if math.prod(shape) * plain.itemsize != len(data):
            raise pickle.UnpicklingError(f"an array with {len(data):,} bytes of another shape")
        super().__setstate__((1, shape, plain, fortran is True or fortran == 1, data))  # type: ignore[misc]


class _Encode(_Function):
    __slots__ = ()

    def __call__(self, text: Any, encoding: Any = "latin1") -> bytes:
        if not isinstance(text, str) or encoding != "latin1":
            raise pickle.UnpicklingError("it encodes other than bytes")
        return text.encode("latin-1")


_NUMBERS = frozenset(f"{kind}{size}" for kind in "iuf" for size in (1, 2, 4, 8)) - {"f1"}


class _ArraysOnly(pickle.Unpickler):
    """Opens a pickle of arrays of numbers, lists, dicts and bytes; any other name in it is refused.

    Nothing of numpy's is handed to the pickle: `np.ndarray` called with a buffer and an object dtype reads any address.
    """

    _allowed: Mapping[tuple[str, str], _Placeholder] = {
        ("numpy.core.multiarray", "_reconstruct"): _MakeArray(),
        ("numpy._core.multiarray", "_reconstruct"): _MakeArray(),
        ("numpy", "ndarray"): _Placeholder(),
        ("numpy", "dtype"): _MakeDtype(),
        ("_codecs", "encode"): _Encode(),  # how Python 3 writes bytes in protocol 2
    }

    def find_class(self, module_name: str, global_name: str) -> Any:
        found = self._allowed.get((module_name, global_name))
        if found is None:
            raise pickle.UnpicklingError(f"it wants to run {module_name}.{global_name}")
        return found


def load_restricted_pickle(content: bytes) -> Any:
    """Return the object in a pickle of arrays of numbers, lists, dicts and bytes.

    Raises:
        pickle.UnpicklingError: it names any other function or class, which is not called, or another kind of array.
    """
    return _ArraysOnly(io.BytesIO(content), encoding="bytes").load()


def locate(folder: Path) -> Path:
    """Return the folder that holds the batches: `folder` itself or the published name below it.

    Raises:
        DistdiagError: it does not exist, is no folder, or holds no batches.
    """
    download = "`--data generated` trains without any data; the real set: https://www.cs.toronto.edu/~kriz/cifar.html"
    if not folder.exists():
        raise DistdiagError(f"no such folder: {folder}", download)
    if not folder.is_dir():
        hint = (
            f"unpack it and name the folder: tar -xf {folder}"
            if ".tar" in folder.name
            else "name the folder it lies in"
        )
        raise DistdiagError(f"{folder} is a file, not a folder of CIFAR-10", hint)
    for candidate in (folder, folder / PYTHON_FOLDER, folder / BINARY_FOLDER):
        if any((candidate / name).exists() for name in (*PYTHON_FILES, *BINARY_FILES, MANIFEST)):
            return candidate
    archives = sorted(folder.glob("cifar-10-*.tar.gz"))
    hint = f"unpack the archive: tar -xf {archives[0]} -C {folder}" if archives else download
    raise DistdiagError(f"{folder} holds no CIFAR-10 (data_batch_1 … test_batch)", hint)


def read_data_set(folder: Path, remedy: str | None = None) -> DataSet:
    """Return all images and labels of a folder; each file is checked.

    Args:
        folder: As `locate` takes it.
        remedy: Hint for a damaged folder; default: to unpack the published archive again.

    Raises:
        DistdiagError: a file is missing, truncated, corrupt, unreadable or not of the format; the message names the file.
    """
    folder = locate(folder)
    expected, own = _expected_files(folder)
    remedy = remedy or (
        f"write its checksums anew if it is meant to be so: (cd {folder} && md5sum data_batch* test_batch* > {MANIFEST})"
        if own
        else f"unpack it again from the archive (MD5 c58f30108f718f92721af3b95e74349a) in place of {folder}"
    )
    train: list[ImageSet] = []
    test: list[ImageSet] = []
    for name, (md5, size_bytes) in expected.items():
        content = _read_checked(folder / name, md5, size_bytes, remedy)
        if name.startswith("batches.meta"):
            continue
        batch = _decode(folder / name, content, remedy)
        (test if name.startswith("test_batch") else train).append(batch)
    fingerprint = hashlib.md5("".join(md5 for md5, _ in expected.values()).encode()).hexdigest()
    return DataSet(
        name=f"{folder.name} (not CIFAR-10)" if own else "CIFAR-10",
        train=_joined(train),
        test=_joined(test),
        fingerprint=fingerprint,
    )


def _expected_files(folder: Path) -> tuple[dict[str, tuple[str, int | None]], bool]:
    """Return the files that must exist with MD5 and size, and whether it is the user's own set (by its manifest)."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        binary = any((folder / name).exists() for name in BINARY_FILES)
        return dict(BINARY_FILES if binary else PYTHON_FILES), False
    files: dict[str, tuple[str, int | None]] = {}
    try:
        for line in manifest.read_text().splitlines():
            md5, _, name = line.partition(" ")
            name = name.strip().lstrip("*")
            if line.strip() and (len(md5) != 32 or not name or "/" in name):
                raise ValueError(line)
            if name:
                files[name] = (md5.lower(), None)
    except (OSError, ValueError) as e:
        raise DistdiagError(
            f"{manifest} is not what md5sum writes: {e}",
            f"remove it, or write it anew: md5sum data_batch* test_batch* > {MANIFEST}",
        ) from None
    kinds = {name.partition("_batch")[0] for name in files}
    if not {"data", "test"} <= kinds:
        raise DistdiagError(
            f"{manifest} names no data_batch… or no test_batch…", "a data set has both; see `md5sum --help`"
        )
    return files, True


def _read_checked(path: Path, md5: str, size_bytes: int | None, remedy: str) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DistdiagError(f"{path} is missing: the folder is incomplete", remedy) from None
    except OSError as e:
        raise DistdiagError(f"{path} cannot be read: {e.strerror}", f"see its permissions: ls -l {path}") from None
    found = hashlib.md5(content).hexdigest()
    if found == md5:
        return content
    if size_bytes is not None and len(content) < size_bytes:
        raise DistdiagError(f"{path} is truncated: {len(content):,} of {size_bytes:,} bytes", remedy)
    raise DistdiagError(f"{path} is corrupt: its MD5 is {found}, not {md5}", remedy)


def _decode(path: Path, content: bytes, remedy: str) -> ImageSet:
    try:
        if path.suffix == ".bin":
            rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + IMAGE_BYTES)
            planes, labels = rows[:, 1:], rows[:, 0].copy()
        else:
            batch = load_restricted_pickle(content)
            planes, labels = batch[b"data"], np.asarray(batch[b"labels"], np.int64)
        if not isinstance(planes, np.ndarray) or planes.dtype != np.uint8:
            raise ValueError("its images are no array of bytes")
        if planes.ndim != 2 or planes.shape[1] != IMAGE_BYTES or labels.shape != planes.shape[:1] or not len(labels):
            raise ValueError(f"images {planes.shape}, labels {labels.shape}")
        if labels.min() < 0 or labels.max() >= CLASSES:
            raise ValueError(f"labels from {labels.min()} to {labels.max()}, not 0 to {CLASSES - 1}")
    except Exception as e:  # a damaged pickle raises what it likes
        reason = f"it lacks {e}" if isinstance(e, KeyError) else str(e)
        raise DistdiagError(f"{path} is not in CIFAR-10's format: {reason}", remedy) from None
    images = planes.view(np.ndarray).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return ImageSet(np.ascontiguousarray(images), labels.astype(np.uint8))


def _joined(parts: list[ImageSet]) -> ImageSet:
    return ImageSet(np.concatenate([p.images for p in parts]), np.concatenate([p.labels for p in parts]))


def write_binary(folder: Path, train: ImageSet, test: ImageSet) -> None:
    """Write a data set in the binary format, in five batches with their MD5SUMS, into an existing folder."""
    sums: list[str] = []
    bounds = np.linspace(0, len(train), 6).astype(int)
    parts = {
        f"data_batch_{i + 1}.bin": ImageSet(train.images[a:b], train.labels[a:b])
        for i, (a, b) in enumerate(itertools.pairwise(bounds))
    }
    for name, part in (parts | {"test_batch.bin": test}).items():
        planes = part.images.transpose(0, 3, 1, 2).reshape(len(part), IMAGE_BYTES)
        content = np.concatenate([part.labels[:, None].astype(np.uint8), planes], axis=1).tobytes()
        (folder / name).write_bytes(content)
        sums.append(f"{hashlib.md5(content).hexdigest()}  {name}\n")
    (folder / MANIFEST).write_text("".join(sums))
