"""Finds flight-recorder dump files, and reads them without executing anything.

JSON and pickle, plain or gzipped, from NCCL, gloo and other backends. The files come from unknown clusters, so `verdict` calls
this in a child process with limits (`guard`).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from distdiag.guard import Announce, regular
from distdiag.sources.dumps.content import DumpFile, parse
from distdiag.sources.dumps.naming import name_ranks
from distdiag.sources.dumps.pickles import BadDump, load_pickle, one_line

MAX_BYTES = 2 << 30  # limit of one unpacked dump; a ring of 20,000 entries with stacks has some 100 MB
UNPACKED_BYTES, UNPACK_FACTOR = 64 << 20, 200  # limits of gzip's expansion; real dumps compress 5 to 100 times
_OTHER = {".log", ".txt", ".md", ".py", ".html", ".db", ".csv", ".yaml", ".yml", ".toml", ".sh", ".out", ".err"}
_OTHER |= {".db-wal", ".db-shm", ".where", ".png", ".svg", ".sqlite", ".ini", ".cfg"}
_OTHER |= {".pt", ".pth", ".ckpt", ".safetensors", ".npz", ".npy", ".parquet", ".tar", ".zip"}  # large, and never dumps

_OF_A_RUN = {"run.db", "run.db.where", ".node_0"}  # each marks a directory that distdiag recorded a run in


def _unpack(data: bytes) -> bytes:
    """Return the content of a gzip stream, up to a limit: a small file may unpack to terabytes."""
    stream = zlib.decompressobj(wbits=31)
    limit = min(MAX_BYTES, UNPACKED_BYTES + UNPACK_FACTOR * len(data))
    try:
        out = stream.decompress(data, limit)
    except zlib.error as e:
        raise BadDump(f"damaged gzip ({one_line(e)})") from e
    if stream.unconsumed_tail:
        raise BadDump(f"unpacks to more than {limit >> 20:,} MiB")
    if not stream.eof:
        raise BadDump("cut short (gzip)")
    return out


def _content(path: Path) -> tuple[bytes, int]:
    """Return the bytes of a regular file and its time of modification in ns."""
    try:
        with regular(path) as f:
            stat = os.fstat(f.fileno())
            if stat.st_size > MAX_BYTES:
                raise BadDump(f"larger than {MAX_BYTES >> 30} GiB")
            return f.read(stat.st_size), stat.st_mtime_ns
    except OSError as e:
        raise BadDump(e.strerror or str(e)) from e


def read(path: Path, announce: Announce = lambda _step, _bytes: None) -> DumpFile:
    """Return one dump.

    Raises:
        BadDump: the file is hostile, cut short, or not a dump.
    """
    try:
        size = path.stat().st_size
    except OSError:
        size = 0  # `_content` reports the reason
    announce(str(path), min(size, MAX_BYTES))
    data, modified_ns = _content(path)
    if not data:
        raise BadDump("empty")
    if data[:2] == b"\x1f\x8b":
        data = _unpack(data)
        announce(str(path), len(data))
    start = data[:64].lstrip()[:1]
    if start in (b"{", b"["):
        try:
            content = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            text = one_line(e)
            raise BadDump("cut short" if "truncated" in text else f"damaged JSON ({text})") from e
        except MemoryError as e:
            raise BadDump("needs too much memory for its size") from e
    else:
        content = load_pickle(data)
    dump = parse(path, content)
    dump.modified_ns = modified_ns
    return dump


def find(paths: Iterable[Path]) -> Iterator[tuple[Path, bool]]:
    """Yield the files of `paths` and below its directories; True with those that were named themselves.

    A run directory of distdiag below a given directory is skipped: its dumps may be of ranks that continued, and run.db has its verdict.
    """
    for path in paths:
        if not os.path.isdir(path):
            yield path, True
            continue
        for folder, below, names in os.walk(path):
            if not _OF_A_RUN.isdisjoint(names):
                below.clear()
                continue
            below.sort()
            for name in sorted(names):
                if not name.startswith(".") and name != "run.json":
                    yield Path(folder, name), False


def likely(path: Path) -> bool:
    """False if the suffix shows that the file is not a dump."""
    return not any(s in _OTHER for s in (path.suffix.lower(), "".join(path.suffixes[-1:]).lower()))


def read_all(
    paths: Iterable[Path], announce: Announce, refused: Mapping[str, str] | None
) -> tuple[list[DumpFile], list[tuple[str, str]], list[str]]:
    """Return all dumps under `paths`, the files that are not dumps with the reason, and the names of files not read."""
    files: list[DumpFile] = []
    bad: list[tuple[str, str]] = []
    others: list[str] = []
    for path, named in find(paths):
        if not (named or likely(path)):
            others.append(str(path))
        elif refused and str(path) in refused:
            bad.append((str(path), refused[str(path)]))
        else:
            try:
                files.append(read(path, announce))
            except BadDump as e:
                bad.append((str(path), str(e)))
    name_ranks(files)
    return files, bad, others
