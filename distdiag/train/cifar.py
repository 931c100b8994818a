"""CIFAR-10 on disk, in the python and the binary format; the digest of every file is checked before it is decoded.

Format: https://www.cs.toronto.edu/~kriz/cifar.html. An image is 3072 bytes, the red, green and blue plane of 32x32; the
binary format puts the label (0 to 9) in one byte before it, the python format pickles {b"data": array, b"labels": list}.

Only the published pickles are opened. Your own images are read in the binary format, if their folder has a file MD5SUMS
(`md5sum *_batch*.bin > MD5SUMS`).
"""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distdiag.errors import DistdiagError

IMAGE_BYTES = 3 * 32 * 32
CLASSES = 10
MANIFEST = "MD5SUMS"
PYTHON_FOLDER = "cifar-10-batches-py"
BINARY_FOLDER = "cifar-10-batches-bin"

PYTHON_FILES = {  # SHA-256 of the published files: no other pickle has it, so none is run
    "data_batch_1": "54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd",
    "data_batch_2": "766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8",
    "data_batch_3": "0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9",
    "data_batch_4": "3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b",
    "data_batch_5": "d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154",
    "test_batch": "f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831",
}
BINARY_FILES = {  # MD5, as published
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
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
    name: str  # "CIFAR-10" only for the published files
    train: ImageSet
    test: ImageSet
    fingerprint: str  # digest over the digests of its files: the same data, the same fingerprint
    source: str = "memory"  # where it was found
    notice: str | None = None  # a line to print if it is not the requested one


def locate(folder: Path) -> Path:
    """Return the folder that holds the batches: `folder` itself or the published name below it."""
    for candidate in (folder, folder / PYTHON_FOLDER, folder / BINARY_FOLDER):
        if any((candidate / name).exists() for name in (*PYTHON_FILES, *BINARY_FILES, MANIFEST)):
            return candidate
    hint = "`--data generated` trains without any data; the real set: https://www.cs.toronto.edu/~kriz/cifar.html"
    if not folder.exists():
        raise DistdiagError(f"no such folder: {folder}", hint)
    if not folder.is_dir():
        hint = f"unpack it and name the folder: tar -xf {folder}" if ".tar" in folder.name else "name its folder"
        raise DistdiagError(f"{folder} is a file, not a folder of CIFAR-10", hint)
    if archives := sorted(folder.glob("cifar-10-*.tar.gz")):
        hint = f"unpack the archive: tar -xf {archives[0]} -C {folder}"
    raise DistdiagError(f"{folder} holds no CIFAR-10 (data_batch_1 … test_batch)", hint)


def read_data_set(folder: Path, remedy: str | None = None) -> DataSet:
    """Return all images and labels of a folder; each file is checked. `remedy` is the hint for a damaged one.

    Raises:
        DistdiagError: a file is missing, corrupt, unreadable or not of the format; the message names the file.
    """
    source, folder = str(folder), locate(folder)
    own = (folder / MANIFEST).exists()
    published = BINARY_FILES if any((folder / name).exists() for name in BINARY_FILES) else PYTHON_FILES
    digests = _manifest(folder / MANIFEST) if own else published
    anew = f"write its checksums anew if it is meant to be so: (cd {folder} && md5sum *_batch*.bin > {MANIFEST})"
    again = f"unpack it again from the archive (MD5 c58f30108f718f92721af3b95e74349a) in place of {folder}"
    parts: dict[bool, list[ImageSet]] = {False: [], True: []}
    for name, digest in digests.items():
        parts[name.startswith("test_batch")].append(_read(folder / name, digest, remedy or (anew if own else again)))
    train, test = (ImageSet(*map(np.concatenate, zip(*((p.images, p.labels) for p in of_part), strict=True)))
                   for of_part in parts.values())  # fmt: skip
    name = f"{folder.name} (not CIFAR-10)" if own else "CIFAR-10"
    return DataSet(name, train, test, hashlib.md5("".join(digests.values()).encode()).hexdigest(), source)


def _manifest(path: Path) -> dict[str, str]:
    """Return the MD5 of each file that a user's own set must have."""
    files: dict[str, str] = {}
    try:
        for line in filter(str.strip, path.read_text().splitlines()):
            md5, _, name = line.partition(" ")
            name = name.strip().lstrip("*")
            if len(md5) != 32 or not name or "/" in name:
                raise ValueError(line)
            files[name] = md5.lower()
    except (OSError, ValueError) as e:
        hint = f"remove it, or write it anew: md5sum *_batch*.bin > {MANIFEST}"
        raise DistdiagError(f"{path} is not what md5sum writes: {e}", hint) from None
    if not {"data", "test"} <= {name.partition("_batch")[0] for name in files}:
        raise DistdiagError(
            f"{path} names no data_batch… or no test_batch…", "a data set has both; see `md5sum --help`"
        )
    if pickled := next((name for name in files if not name.endswith(".bin")), None):
        hint = "write an image as its label and 3,072 bytes, into data_batch_1.bin … and test_batch.bin"
        raise DistdiagError(f"{path} names {pickled}: your own images are read in the binary format only", hint)
    return files


def _read(path: Path, digest: str, remedy: str) -> ImageSet:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DistdiagError(f"{path} is missing: the folder is incomplete", remedy) from None
    except OSError as e:
        raise DistdiagError(f"{path} cannot be read: {e.strerror}", f"see its permissions: ls -l {path}") from None
    kind = "MD5" if len(digest) == 32 else "SHA256"
    if (found := hashlib.new(kind, content).hexdigest()) != digest:
        raise DistdiagError(f"{path} is corrupt: its {kind} is {found}, not {digest}", remedy)
    try:
        if path.suffix == ".bin":
            rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + IMAGE_BYTES)
            planes, labels = rows[:, 1:], rows[:, 0].copy()
        else:
            batch = pickle.loads(content, encoding="bytes")  # a published file, by its SHA-256
            planes, labels = batch[b"data"], np.asarray(batch[b"labels"], np.uint8)
        if not len(labels) or labels.max() >= CLASSES:
            raise ValueError(f"labels up to {labels.max()}, not 0 to {CLASSES - 1}" if len(labels) else "no images")
    except ValueError as e:
        raise DistdiagError(f"{path} is not in CIFAR-10's format: {e}", remedy) from None
    return ImageSet(np.ascontiguousarray(planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), labels)
