"""CIFAR-10 on disk: both formats are read equally; damage is named; a malicious pickle runs nothing."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from distdiag.errors import DistdiagError
from distdiag.train.cifar import (
    BINARY_FILES,
    MANIFEST,
    PYTHON_FILES,
    load_restricted_pickle,
    read_data_set,
    write_binary,
)
from tests.jobs import shared
from tests.train.images import binary_folder, python_batch, small_set, write_manifest, write_python


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_both_formats_hold_the_same_images(tmp_path: Path, protocol: int) -> None:
    data = small_set()
    (a := tmp_path / "a").mkdir()
    (b := tmp_path / "b").mkdir()
    write_python(a, data, protocol=min(protocol, 4))
    write_binary(b, data.train, data.test)
    for folder in (a, b):
        read = read_data_set(folder)
        for part, expected in ((read.train, data.train), (read.test, data.test)):
            assert np.array_equal(part.images, expected.images)
            assert np.array_equal(part.labels, expected.labels)
        assert read.name == f"{folder.name} (not CIFAR-10)"


def test_the_published_files_are_cifar10() -> None:
    data = read_data_set(shared("cifar-10-batches-py"))
    assert data.name == "CIFAR-10"
    assert np.bincount(data.train.labels).tolist() == [5000] * 10
    assert np.bincount(data.test.labels).tolist() == [1000] * 10
    mean = data.train.images.mean(axis=(0, 1, 2)) / 255
    assert mean == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)


def test_the_binary_checksums_are_those_of_the_published_images() -> None:
    """The binary files, converted from the published python ones, have the expected checksums."""
    import hashlib

    folder = shared("cifar-10-batches-py")
    for name in ("data_batch_3", "test_batch"):
        batch = load_restricted_pickle((folder / name).read_bytes())
        labels = np.array(batch[b"labels"], np.uint8)[:, None]
        content = np.concatenate([labels, batch[b"data"]], axis=1).tobytes()
        assert (hashlib.md5(content).hexdigest(), len(content)) == BINARY_FILES[name + ".bin"]


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


def test_a_truncated_file_differs_from_a_corrupt_one(tmp_path: Path) -> None:
    whole = shared("cifar-10-batches-py")
    for name in PYTHON_FILES:
        (tmp_path / name).symlink_to(whole / name)
    (tmp_path / "data_batch_1").unlink()
    with pytest.raises(DistdiagError, match="data_batch_1 is missing"):
        read_data_set(tmp_path)
    (tmp_path / "data_batch_1").write_bytes((whole / "data_batch_1").read_bytes()[:1000])
    with pytest.raises(DistdiagError, match="data_batch_1 is truncated: 1,000 of 31,035,704 bytes") as raised:
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
        (b"\x0a" + bytes(3072), "labels from 10 to 10, not 0 to 9"),
        (bytes(3072), "cannot reshape"),
        (b"", "labels (0,)"),
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


@pytest.mark.parametrize(
    "batch",
    [
        [1, 2],
        {b"labels": [1]},
        {b"labels": [1], b"data": np.zeros((2, 3072), np.uint8)},
        {b"labels": [1], b"data": np.zeros((1, 3072), np.float32)},
        {b"labels": [1], b"data": b"x"},
        {b"labels": [-1], b"data": np.zeros((1, 3072), np.uint8)},
    ],
)
def test_pickled_content_without_batches_is_refused(tmp_path: Path, batch: object) -> None:
    write_python(tmp_path, small_set())
    (tmp_path / "data_batch_5").write_bytes(pickle.dumps(batch, protocol=2))
    write_manifest(tmp_path)
    with pytest.raises(DistdiagError, match=r"data_batch_5 is not in CIFAR-10's format"):
        read_data_set(tmp_path)


class _Touches:
    """A pickle that creates a file when opened by anything but the restricted reader."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mknod, (str(self.path),)


def test_a_pickle_runs_no_code(tmp_path: Path) -> None:
    trace = tmp_path / "it_ran"
    hostile = pickle.dumps({b"labels": [1], b"data": _Touches(trace)}, protocol=2)
    pickle.loads(hostile)
    assert trace.exists(), "the test's own pickle must be able to do harm"
    trace.unlink()
    with pytest.raises(pickle.UnpicklingError, match=r"it wants to run posix\.mknod"):
        load_restricted_pickle(hostile)
    (folder := tmp_path / "folder").mkdir()
    write_python(folder, small_set())
    (folder / "test_batch").write_bytes(hostile)
    write_manifest(folder)
    with pytest.raises(DistdiagError, match="test_batch is not in CIFAR-10's format"):
        read_data_set(folder)
    assert not trace.exists()


@pytest.mark.parametrize("target", ["os.system", "builtins.eval", "numpy.load", "builtins.getattr", "torch.load"])
def test_names_outside_the_list_are_refused(target: str) -> None:
    module, _, name = target.rpartition(".")
    with pytest.raises(pickle.UnpicklingError, match=re.escape(target)):
        load_restricted_pickle(f"c{module}\n{name}\n.".encode())


_OBJECTS = b"cnumpy\ndtype\n(X\x01\x00\x00\x00OI00\nI01\ntR"
_ARRAY = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tC\x01btR"
_U1 = b"cnumpy\ndtype\n(X\x02\x00\x00\x00u1I00\nI01\ntR"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\x80\x03cnumpy\nndarray\n(K\x01\x85" + _OBJECTS + b"C\x08AAAAAAAAtR.", id="a buffer of pointers"),
        pytest.param(b"\x80\x03cnumpy\nndarray\n(K\x01\x85" + _U1 + b"C\x08AAAAAAAAtR.", id="calls ndarray"),
        pytest.param(b"\x80\x03" + _ARRAY + b"(K\x01K\x01\x85" + _OBJECTS + b"I00\nC\x08AAAAAAAAtb.", id="objects"),
        pytest.param(b"\x80\x03" + _ARRAY + b"(K\x01J\xff\xff\xff\x7f\x85" + _U1 + b"I00\nC\x08AAAAAAAAtb.", id="too few bytes"),
        pytest.param(b"\x80\x03" + _ARRAY + b"(K\x01J\xff\xff\xff\xff\x85" + _U1 + b"I00\nC\x08AAAAAAAAtb.", id="a size below 0"),
        pytest.param(b"\x80\x03" + _ARRAY + b"(K\x01K\x01\x85X\x01\x00\x00\x00OI00\nC\x08AAAAAAAAtb.", id="a dtype by name"),
        pytest.param(b"\x80\x03cnumpy\ndtype\n}X\x01\x00\x00\x00aK\x01sb.", id="changes dtype"),
        pytest.param(b"\x80\x03c_codecs\nencode\n(X\x01\x00\x00\x00aX\x05\x00\x00\x00utf-7tR.", id="another codec"),
    ],
)  # fmt: skip
def test_a_pickle_cannot_make_arrays_of_pointers(content: bytes) -> None:
    """In its own process: numpy's constructor would read any address that the pickle names."""
    code = """
import pickle, sys
from distdiag.train.cifar import load_restricted_pickle
try:
    print(repr(load_restricted_pickle(sys.stdin.buffer.read())))
except (pickle.UnpicklingError, TypeError, ValueError):
    sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", code], input=content, capture_output=True, timeout=60)
    assert done.returncode == 7, (done.returncode, done.stdout, done.stderr)


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


def test_a_published_name_with_other_content_is_never_called_cifar10(tmp_path: Path) -> None:
    """Without a manifest only the published checksums pass, so a custom set cannot be mistaken for the real one."""
    for name in PYTHON_FILES:
        (tmp_path / name).write_bytes(python_batch(small_set().test))
    with pytest.raises(DistdiagError, match="data_batch_1 is truncated"):
        read_data_set(tmp_path)
