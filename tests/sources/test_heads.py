"""Which files are logs and traces is decided by their heads, in a child process: nothing in a directory blocks or kills the command."""

from __future__ import annotations

import json
import lzma
import os
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest

from distdiag import guard
from distdiag.cli import main
from distdiag.sources.logs.files import find_logs, no_log, ranks_of
from distdiag.traces import files as traces
from tests.jobs import distdiag
from tests.traces.test_files import write_rank

FAILED = "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"


def odd_files(folder: Path, suffix: str) -> None:
    """Make what a directory may hold instead of files, under names that logs or traces have."""
    os.mkfifo(folder / f"fifo{suffix}")
    for device in ("zero", "tty", "ptmx", "random"):
        (folder / f"{device}{suffix}").symlink_to(f"/dev/{device}")
    (folder / f"loop{suffix}").symlink_to(f"loop{suffix}")
    (folder / f"up{suffix}").symlink_to(folder)
    (folder / f"folder{suffix}").mkdir()
    (folder / f"folder{suffix}" / "up").symlink_to(folder)
    with open(folder / f"line{suffix}", "wb") as file:
        file.truncate(8 << 30)  # one line of zeros, a sparse file


def test_a_directory_of_odd_files_is_judged_by_its_log(tmp_path: Path) -> None:
    odd_files(tmp_path, ".log")
    odd_files(tmp_path, ".json")
    (tmp_path / "real.log").write_text(FAILED)
    done = distdiag("diagnose", str(tmp_path))
    assert done.returncode == 1 and "rank 1" in done.stdout, done.stderr
    named = [tmp_path / f"{name}{suffix}" for name in ("fifo", "tty", "line") for suffix in (".log", ".json")]
    done = distdiag("diagnose", *named)
    assert done.returncode in (2, 4) and "hint: " in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", ["fifo", "zero"])
def test_no_file_of_a_directory_blocks_or_never_ends(tmp_path: Path, kind: str) -> None:
    """A FIFO without a writer, and a device behind a link; all named themselves, and in their directory."""
    odd = [tmp_path / name for name in ("x.log", "x.json", "trace_0.pt.trace.json", "nccl_trace_rank_0", "run.db")]
    for path in odd:
        os.mkfifo(path) if kind == "fifo" else path.symlink_to("/dev/zero")
    for given in ([tmp_path], odd):
        done = distdiag("diagnose", *given, timeout=20)
        assert done.returncode in (2, 4) and "hint: " in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("kind", ["fifo", "zero"])
def test_only_a_regular_file_is_opened(tmp_path: Path, kind: str) -> None:
    """`open` of a FIFO without a writer blocks, and a device never ends: both are refused before a byte is read."""
    odd = tmp_path / "x"
    os.mkfifo(odd) if kind == "fifo" else odd.symlink_to("/dev/zero")
    code = (
        "import sys, pathlib\nfrom distdiag import guard\n"
        "for read in (guard.regular, guard.opened):\n"
        "    try:\n        with read(pathlib.Path(sys.argv[1])):\n            print('opened')\n"
        "    except OSError as e:\n        print(e.filename, e.strerror)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(odd)], capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout == f"{odd} not a regular file\n" * 2


def bomb(dictionary: int = 40) -> bytes:
    """Return an .xz file whose decoder needs 4 GiB (code 40), as its 19th byte tells."""
    data = bytearray(lzma.compress(FAILED.encode(), format=lzma.FORMAT_XZ))
    size = 4 * (data[12] + 1)
    header = data[12 : 12 + size - 4]
    assert header[2:4] == b"\x21\x01"  # LZMA2, one byte of properties
    header[4] = dictionary
    data[12 : 12 + size] = header + struct.pack("<I", zlib.crc32(header))
    return bytes(data)


def test_a_head_that_asks_for_gigabytes_costs_its_own_file_only(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(bomb(20))
    assert find_logs([str(tmp_path / "a.log")])  # as it would be without the size: 4 MiB
    (tmp_path / "a.log").write_bytes(bomb())
    (tmp_path / "b.log").write_text(FAILED)
    assert find_logs([str(tmp_path)]) == [tmp_path / "b.log"]
    assert main(["diagnose", str(tmp_path)]) == 1


@pytest.mark.parametrize("how", ["abort", "endless", "exit"])
def test_a_file_that_kills_its_reader_is_no_match(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the first and the last one; the others keep their order."""
    limits = guard.Limits(cpu_s=0.05)
    monkeypatch.setattr(guard, "Limits", lambda: limits)
    paths = [tmp_path / f"{n}" for n in range(7)]

    def test(path: Path) -> bool:
        if path.name in "036":
            if how == "abort":
                os.abort()
            if how == "exit":
                os._exit(0)
            while True:
                pass
        return path.name != "4"

    assert [p.name for p in guard.matching(iter([*paths, *paths]), test)] == ["1", "2", "5"]
    assert guard.matching([], test) == []


def test_the_next_files_are_not_read_after_many_deaths(tmp_path: Path) -> None:
    paths = [tmp_path / f"{n}" for n in range(100)]
    assert guard.matching(paths, lambda path: path.name == "99" or os._exit(1)) == []


def test_a_file_that_grows_is_read_up_to_a_limit(tmp_path: Path) -> None:
    log, ended = tmp_path / "job.log", threading.Event()
    log.write_text(FAILED)

    def write() -> None:
        with log.open("a") as file:
            while not ended.is_set() and file.tell() < 64 << 20:
                file.write("more of the same\n" * 5000)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert no_log(log, True) is None and find_logs([str(log)]) == [log]
        assert main(["diagnose", str(log)]) == 1
    finally:
        ended.set()
        writer.join()


def test_of_a_large_directory_the_first_files_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names beyond the limit cost a line of a list each: no file is opened."""
    monkeypatch.setattr(traces, "MAX_FILES", 3)
    for rank in range(5):
        write_rank(tmp_path, rank, name=f"rank{rank}.json")
    assert [p.name for p in traces.find([str(tmp_path)])] == ["rank0.json", "rank1.json", "rank2.json"]


def test_a_trace_is_known_by_its_head_whatever_its_name_promises(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, name="rank0.json")  # gzipped
    (tmp_path / "rank1.json.gz").write_text(json.dumps({"schemaVersion": 1, "deviceProperties": [], "traceEvents": []}))
    (tmp_path / "rank2.json.gz").write_bytes(b"\x1f\x8b" + bytes(100))
    assert [p.name for p in traces.find([str(tmp_path)])] == ["rank0.json", "rank1.json.gz"]


def test_the_ranks_of_four_times_as_many_files_take_no_sixteen_times_as_long() -> None:
    def seconds(count: int) -> float:
        paths = [Path(f"/logs/{n}.log") for n in range(count)]
        began = time.process_time()
        assert len(ranks_of(paths)) == count
        return time.process_time() - began

    few, many = (min(seconds(count) for _ in range(2)) for count in (1500, 6000))
    assert many < 9 * few
