"""Where the data come from: named folder, environment, cache, download, and without a network the generated set."""

from __future__ import annotations

import hashlib
import http.server
import multiprocessing
import socket
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from distdiag.errors import DistdiagError
from distdiag.train import cifar, find_data, synthetic
from distdiag.train.find_data import cache_directory, why_unreachable
from tests.train.images import binary_folder, small_set, write_binary


@pytest.fixture(autouse=True)
def small_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(synthetic, "TRAIN_IMAGES", 50)
    monkeypatch.setattr(synthetic, "TEST_IMAGES", 20)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


class _Archive:
    """A server on loopback with an archive like the published one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (inner := directory / cifar.PYTHON_FOLDER).mkdir(parents=True)
        write_binary(inner, small_set().train, small_set().test)
        path = directory / "archive.tar.gz"
        with tarfile.open(path, "w:gz") as tar:
            tar.add(inner, cifar.PYTHON_FOLDER)
        self.content = path.read_bytes()
        self.md5 = hashlib.md5(self.content).hexdigest()
        self.truncate_to: int | None = None
        self.gets = 0
        archive = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.send_response(200)
                self.end_headers()

            def do_GET(self) -> None:
                archive.gets += 1
                self.send_response(200)
                self.send_header("Content-Length", str(len(archive.content)))
                self.end_headers()
                self.wfile.write(archive.content[: archive.truncate_to])

            def log_message(self, *_: object) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/archive.tar.gz"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def find(self, named: str = "") -> cifar.DataSet:
        return find_data.find_data(named, show_progress=False, url=self.url, archive_md5=self.md5)


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[_Archive]:
    made = _Archive(tmp_path / "server")
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def no_network() -> str:
    """An address that refuses connections at once."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{s.getsockname()[1]}/archive.tar.gz"


def left_in_cache() -> list[str]:
    return sorted(p.name for p in cache_directory().iterdir())


def test_the_order_is_option_environment_cache(
    tmp_path: Path, archive: _Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = cache_directory() / cifar.PYTHON_FOLDER
    cached.mkdir(parents=True)
    write_binary(cached, small_set(train=30).train, small_set().test)
    assert len(archive.find().train) == 30
    monkeypatch.setenv("DISTDIAG_DATA", str(binary_folder(tmp_path / "environment", train=31)))
    assert len(archive.find().train) == 31
    named = binary_folder(tmp_path / "option", train=32)
    found = archive.find(str(named))
    assert len(found.train) == 32
    assert found.source == f"--data {named}"
    assert found.notice is None
    assert archive.gets == 0


def test_a_download_is_checked_unpacked_and_kept(archive: _Archive) -> None:
    found = archive.find()
    assert np.array_equal(found.train.images, small_set().train.images)
    assert left_in_cache() == [".lock", cifar.PYTHON_FOLDER]
    assert archive.find().source == found.source == str(cache_directory() / cifar.PYTHON_FOLDER)
    assert archive.gets == 1


@pytest.mark.parametrize("fault", ["breaks off", "wrong checksum"])
def test_a_failed_download_leaves_nothing_and_trains_on_the_generated_set(archive: _Archive, fault: str) -> None:
    (cache_directory() / "download-of-a-killed-process").mkdir(parents=True)
    if fault == "breaks off":
        archive.truncate_to = 1000
    else:
        archive.md5 = "0" * 32
    found = archive.find()
    assert archive.gets >= 1
    assert found.name == synthetic.NAME
    assert found.notice is not None
    assert "the download failed" in found.notice
    assert "\n" not in found.notice
    assert left_in_cache() == [".lock", synthetic.FILE]


def test_without_a_network_the_generated_set_is_made_once_and_announced(no_network: str) -> None:
    first = find_data.find_data("", show_progress=False, url=no_network)
    assert first.name == synthetic.NAME
    assert "CIFAR-10" not in first.name.replace("not CIFAR-10", "")
    assert first.notice is not None
    assert first.notice.startswith("no CIFAR-10 here (no network)")
    assert "--data DIR" in first.notice
    file = cache_directory() / synthetic.FILE
    made = file.stat().st_mtime_ns
    again = find_data.find_data("", show_progress=False, url=no_network)
    assert file.stat().st_mtime_ns == made
    assert again.source == first.source == str(file)
    assert again.fingerprint == first.fingerprint
    assert np.array_equal(again.train.images, first.train.images)
    assert np.array_equal(again.test.labels, synthetic.generate(20, seed=2).labels)


@pytest.mark.parametrize("damage", ["overwritten", "cut off", "a pickle"])
def test_a_damaged_generated_set_is_generated_again(no_network: str, damage: str) -> None:
    find_data.find_data("generated", show_progress=False)
    file = cache_directory() / synthetic.FILE
    hostile = np.array([len], dtype=object)  # numpy would pickle it
    if damage == "a pickle":
        np.savez(file, hostile, hostile, hostile, hostile)
    else:
        file.write_bytes(b"x" if damage == "overwritten" else file.read_bytes()[:5000])
    found = find_data.find_data("generated", show_progress=False, url=no_network)
    assert found.notice is None  # it was requested
    assert np.array_equal(found.train.images, synthetic.generate(50, seed=1).images)


def test_an_unwritable_cache_does_not_stop_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: str
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = find_data.find_data("", show_progress=False, url=no_network)
    assert found.source == "memory"
    assert found.notice is not None
    assert "cannot be written" in found.notice


def test_a_full_disk_does_not_stop_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(find_data.np, "savez", full)
    found = find_data.find_data("generated", show_progress=False)
    assert found.source == "memory"
    assert left_in_cache() == [".lock"]


@pytest.mark.parametrize("by", ["option", "environment"])
def test_a_named_folder_that_does_not_exist_is_an_error(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "environment":
        monkeypatch.setenv("DISTDIAG_DATA", str(tmp_path / "absent"))
    with pytest.raises(DistdiagError, match="no such folder"):
        find_data.find_data(str(tmp_path / "absent") if by == "option" else "", show_progress=False)


def test_a_damaged_cache_is_an_error_that_names_what_to_remove(archive: _Archive) -> None:
    archive.find()
    (cache_directory() / cifar.PYTHON_FOLDER / "data_batch_1.bin").write_bytes(b"x")
    with pytest.raises(DistdiagError, match=r"data_batch_1\.bin is corrupt") as raised:
        archive.find()
    assert raised.value.hint.endswith(f"rm -r {cache_directory() / cifar.PYTHON_FOLDER}")


def test_a_server_that_never_answers_counts_as_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        assert why_unreachable(url, deadline_s=0.3) == "no network"


def _find_generated(queue: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    queue.put(find_data.find_data("generated", show_progress=False).source)


def test_several_processes_make_the_generated_set_once() -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_find_generated, args=(queue,)) for _ in range(4)]
    for p in processes:
        p.start()
    sources = {queue.get(timeout=60) for _ in processes}
    for p in processes:
        p.join(60)
        assert p.exitcode == 0
    assert sources == {str(cache_directory() / synthetic.FILE)}
    assert left_in_cache() == [".lock", synthetic.FILE]
