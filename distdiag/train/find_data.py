"""Find the training data: in a given folder, in the user's cache, by download, or generate them.

Only local rank 0 of each node does this; the other ranks wait for it in a collective, and share its pixels.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tarfile
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from distdiag.errors import DistdiagError, need
from distdiag.files import replacing
from distdiag.train import synthetic
from distdiag.train.cifar import BINARY_FOLDER, PYTHON_FOLDER, DataSet, ImageSet, read_data_set

ENV_DATA = "DISTDIAG_DATA"
GENERATED = "generated"
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
ARCHIVE_MD5 = "c58f30108f718f92721af3b95e74349a"
NETWORK_DEADLINE_S = 4.0  # for an answer from the server, with name resolution


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "distdiag"


def find_data(named: str, *, show_progress: bool, url: str = URL, archive_md5: str = ARCHIVE_MD5) -> DataSet:
    """Return the training data: from `named`, DISTDIAG_DATA, the cache or a download; without a network the generated set.

    Raises:
        DistdiagError: the folder of `--data` or DISTDIAG_DATA, or the cached one, is missing or damaged.
    """
    if named == GENERATED:
        with _locked_cache() as cache:
            return _generated(cache, None)
    for origin, folder in (("--data", named), (ENV_DATA, os.environ.get(ENV_DATA, ""))):
        if folder:
            path = Path(folder).expanduser()
            return replace(read_data_set(path), source=f"{origin} {path}")
    with _locked_cache() as cache:
        if cache is None:
            return _generated(None, "the cache directory cannot be written")
        for name in (PYTHON_FOLDER, BINARY_FOLDER):
            if (cache / name).is_dir():
                remedy = f"remove it, it is downloaded again: rm -r {cache / name}"
                return read_data_set(cache / name, remedy)
        if (reason := why_unreachable(url)) is None:
            try:
                return read_data_set(download(cache, url, archive_md5, show_progress))
            except (OSError, ValueError, tarfile.TarError, DistdiagError) as e:
                reason = f"the download failed: {' '.join(str(e).split())[:200]}"
        return _generated(cache, reason)


@contextmanager
def _locked_cache() -> Iterator[Path | None]:
    """Lock the cache directory for one process at a time; None if it cannot be written.

    It is a lock of the kernel, so it is released when its holder ends, in any way.
    """
    cache = cache_directory()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / ".lock").open("w")
    except OSError:
        yield None
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield cache


def why_unreachable(url: str, deadline_s: float = NETWORK_DEADLINE_S) -> str | None:
    """Return None if the server of `url` answers within `deadline_s` seconds, else the reason.

    The request runs in a thread: without a network, name resolution may take minutes and ignores timeouts.
    """
    try:
        need(("pooch",), "the download")
    except DistdiagError as e:
        return f"{e.message}; {e.hint}"
    import requests  # as pooch does: the same proxies and certificates as the download

    answer: list[str | None] = []

    def ask() -> None:
        try:
            response = requests.head(url, timeout=deadline_s, allow_redirects=True)
            answer.append(None if response.ok else f"the server answers {response.status_code}")
        except requests.RequestException:
            answer.append("no network")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(deadline_s)
    return answer[0] if answer else "no network"


def download(cache: Path, url: str = URL, archive_md5: str = ARCHIVE_MD5, show_progress: bool = True) -> Path:
    """Download the archive, check it, unpack it, and only then give it its final name.

    Raises:
        OSError, ValueError, tarfile.TarError: it was interrupted, has a wrong checksum, or the disk is full; no file of it
            remains.
    """
    import pooch

    pooch.get_logger().setLevel("ERROR")
    if show_progress:
        print(f"distdiag: downloading CIFAR-10 (163 MiB) from {url}", file=sys.stderr)
    for stale in cache.glob("download-*"):  # we hold the lock, so their writer is gone
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="download-", dir=cache) as made:
        pooch.retrieve(
            url, known_hash=f"md5:{archive_md5}", fname="archive.tar.gz", path=made,
            processor=pooch.Untar(extract_dir="."), progressbar=show_progress and sys.stderr.isatty(),
        )  # fmt: skip
        return Path(made, PYTHON_FOLDER).rename(cache / PYTHON_FOLDER)


def _generated(cache: Path | None, reason: str | None) -> DataSet:
    """Return the generated set, cached on disk if there is room, else in memory only."""
    notice = reason and (
        f"no CIFAR-10 here ({reason}): training on {synthetic.NAME}, "
        f"{synthetic.TRAIN_IMAGES:,} images of 10 classes; `--data DIR` reads the real set"
    )
    file, source = cache / synthetic.FILE if cache else None, "memory"
    try:
        with open(file or "", "rb") as f, np.load(f) as kept:  # refuses pickles
            arrays = [kept[name] for name in kept.files]
        source = str(file)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):  # missing, or damaged: generate it
        train = synthetic.generate(synthetic.TRAIN_IMAGES, seed=1)
        test = synthetic.generate(synthetic.TEST_IMAGES, seed=2)
        arrays = [train.images, train.labels, test.images, test.labels]
        with suppress(OSError):  # a full disk: use memory
            if file is not None:
                with replacing(file.parent, file.name, own=False) as part, part.open("wb") as f:
                    np.savez(f, *arrays)
                source = str(file)
    train, test = ImageSet(*arrays[:2]), ImageSet(*arrays[2:])
    return DataSet(synthetic.NAME, train, test, f"{synthetic.FILE} {len(train)} {len(test)}", source, notice)
