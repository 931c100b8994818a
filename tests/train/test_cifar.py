"""CIFAR-10 on disk: both formats are read; damage is named; a malicious pickle runs nothing."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from distdiag.errors import DistdiagError
from distdiag.train.cifar import (
    BINARY_FILES,
    MANIFEST,
    PYTHON_FILES,
    read_data_set,
)
from tests.jobs import shared
from tests.train.images import binary_folder, small_set, write_binary, write_manifest


def test_the_binary_format_holds_the_images(tmp_path: Path) -> None:
    data = small_set()
    write_binary(tmp_path, data.train, data.test)
    read = read_data_set(tmp_path)
    for part, expected in ((read.train, data.train), (read.test, data.test)):
        assert np.array_equal(part.images, expected.images)
        assert np.array_equal(part.labels, expected.labels)
    assert read.name == f"{tmp_path.name} (not CIFAR-10)"


def test_the_published_files_are_cifar10() -> None:
    data = read_data_set(shared("cifar-10-batches-py"))
    assert data.name == "CIFAR-10"
    assert np.bincount(data.train.labels).tolist() == [5000] * 10
    assert np.bincount(data.test.labels).tolist() == [1000] * 10
    mean = data.train.images.mean(axis=(0, 1, 2)) / 255
    assert mean == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)


def test_the_binary_checksums_are_those_of_the_published_images() -> None:
    """The binary files, converted from the published python ones, have the expected checksums."""
    data = read_data_set(shared("cifar-10-batches-py"))
    batches = {"data_batch_3.bin": (data.train, slice(20_000, 30_000)), "test_batch.bin": (data.test, slice(None))}
    for name, (part, rows) in batches.items():
        planes = part.images[rows].transpose(0, 3, 1, 2).reshape(-1, 3072)
        content = np.concatenate([part.labels[rows][:, None], planes], axis=1).tobytes()
        assert hashlib.md5(content).hexdigest() == BINARY_FILES[name]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_truncate, r"data_batch_2\.bin is corrupt: its MD5 is [0-9a-f]{32}, not [0-9a-f]{32}"),
        (_flip_a_bit, r"data_batch_2\.bin is corrupt"),
        (Path.unlink, r"data_batch_2\.bin is missing: the folder is incomplete"),
        (lambda p: p.write_bytes(b""), r"data_batch_2\.bin is corrupt"),
    ],
)
def test_damage_names_the_file_and_the_remedy(tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    folder = binary_folder(tmp_path)
    damage(folder / "data_batch_2.bin")
    with pytest.raises(DistdiagError) as raised:
        read_data_set(folder)
    assert re.search(words, raised.value.message)
    assert str(folder) in raised.value.message
    assert "md5sum" in raised.value.hint
    assert raised.value.code == 2


def test_a_truncated_published_file_is_corrupt(tmp_path: Path) -> None:
    whole = shared("cifar-10-batches-py")
    for name in PYTHON_FILES:
        (tmp_path / name).symlink_to(whole / name)
    (tmp_path / "data_batch_1").unlink()
    with pytest.raises(DistdiagError, match="data_batch_1 is missing"):
        read_data_set(tmp_path)
    (tmp_path / "data_batch_1").write_bytes((whole / "data_batch_1").read_bytes()[:1000])
    with pytest.raises(DistdiagError, match="data_batch_1 is corrupt: its SHA256") as raised:
        read_data_set(tmp_path)
    assert "unpack it again" in raised.value.hint


@pytest.mark.parametrize(
    ("make", "words", "hint"),
    [
        (lambda d: d / "absent", "no such folder", "generated"),
        (lambda d: (d / "notes.txt").write_text("x") and d / "notes.txt", "is a file, not a folder", "folder"),
        (
            lambda d: (d / "cifar-10-python.tar.gz").write_text("x") and d / "cifar-10-python.tar.gz",
            "is a file",
            "tar -xf",
        ),
        (lambda d: (d / "cifar-10-python.tar.gz").write_text("x") and d, "holds no CIFAR-10", "tar -xf"),
        (lambda d: d, "holds no CIFAR-10", "generated"),
    ],
)
def test_a_folder_without_data_is_an_error_with_a_hint(
    tmp_path: Path, make: Callable[[Path], Path], words: str, hint: str
) -> None:
    with pytest.raises(DistdiagError) as raised:
        read_data_set(make(tmp_path))
    assert words in raised.value.message
    assert hint in raised.value.hint


def test_the_folder_may_be_named_by_its_parent(tmp_path: Path) -> None:
    data = small_set()
    (inner := tmp_path / "cifar-10-batches-bin").mkdir()
    write_binary(inner, data.train, data.test)
    assert len(read_data_set(tmp_path).train) == len(data.train)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x0a" + bytes(3072), "labels up to 10, not 0 to 9"),
        (bytes(3072), "cannot reshape"),
        (b"", "no images"),
    ],
)
def test_binary_content_without_images_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    folder = binary_folder(tmp_path)
    (folder / "data_batch_4.bin").write_bytes(content)
    write_manifest(folder)
    with pytest.raises(DistdiagError) as raised:
        read_data_set(folder)
    assert "data_batch_4.bin is not in CIFAR-10's format" in raised.value.message
    assert words in raised.value.message


class _Touches:
    """A pickle that creates a file when opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mknod, (str(self.path),)


@pytest.mark.parametrize("manifest", [False, True])
def test_a_pickle_runs_no_code(tmp_path: Path, manifest: bool) -> None:
    trace = tmp_path / "it_ran"
    hostile = pickle.dumps({b"labels": [1], b"data": _Touches(trace)}, protocol=2)
    pickle.loads(hostile)
    assert trace.exists(), "the test's own pickle must be able to do harm"
    trace.unlink()
    (folder := tmp_path / "folder").mkdir()
    for name in PYTHON_FILES:
        (folder / name).write_bytes(hostile)
    if manifest:
        write_manifest(folder)
    words = "are read in the binary format only" if manifest else "data_batch_1 is corrupt"
    with pytest.raises(DistdiagError, match=words):
        read_data_set(folder)
    assert not trace.exists()


def test_an_invalid_manifest_is_an_error(tmp_path: Path) -> None:
    folder = binary_folder(tmp_path)
    (folder / MANIFEST).write_text("hello\n")
    with pytest.raises(DistdiagError, match="is not what md5sum writes"):
        read_data_set(folder)
    (folder / MANIFEST).write_text("0" * 32 + "  ../../etc/passwd\n")
    with pytest.raises(DistdiagError, match="is not what md5sum writes"):
        read_data_set(folder)
    (folder / MANIFEST).write_text("0" * 32 + "  data_batch_1.bin\n")
    with pytest.raises(DistdiagError, match=r"names no data_batch… or no test_batch…"):
        read_data_set(folder)
