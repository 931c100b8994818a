"""Finds flight-recorder dump files, and reads them without executing anything.

JSON and pickle, plain or compressed, from NCCL, gloo and other backends. The files come from unknown clusters, so `verdict` calls
this in a child process with limits (`guard`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from distdiag import guard
from distdiag.files import walk
from distdiag.guard import Announce
from distdiag.sources.dumps.content import DumpFile, parse
from distdiag.sources.dumps.naming import name_ranks
from distdiag.sources.dumps.pickles import BadDump, load_pickle, one_line

CHUNK_BYTES = 1 << 20  # a read takes memory for all that it asks for
MAX_BYTES = 2 << 30  # limit of one unpacked dump; a ring of 20,000 entries with stacks has some 100 MB
UNPACKED_BYTES, UNPACK_FACTOR = 64 << 20, 200  # limits of a small file's expansion; real dumps compress 5 to 100 times
_OTHER = {".log", ".txt", ".md", ".py", ".html", ".db", ".csv", ".yaml", ".yml", ".toml", ".sh", ".out", ".err"}
_OTHER |= {".db-wal", ".db-shm", ".where", ".png", ".svg", ".sqlite", ".ini", ".cfg"}
_OTHER |= {".pt", ".pth", ".ckpt", ".safetensors", ".npz", ".npy", ".parquet", ".tar", ".zip"}  # large, and never dumps

_OF_A_RUN = {"run.db", "run.db.where", ".node_0"}  # each marks a directory that distdiag recorded a run in


def read(path: Path, announce: Announce = lambda _step, _bytes: None) -> DumpFile:
    """Return one dump.

    Raises:
        BadDump: the file is hostile, cut short, or not a dump.
    """
    data = bytearray()
    try:
        stored = min(guard.stored_bytes(path), MAX_BYTES)
        announce(str(path), stored)
        limit = min(MAX_BYTES, UNPACKED_BYTES + UNPACK_FACTOR * stored)
        with guard.opened(path) as f:
            modified_ns = os.fstat(f.fileno()).st_mtime_ns
            while len(data) <= limit and (chunk := f.read(CHUNK_BYTES)):
                data += chunk
    except OSError as e:
        raise BadDump(e.strerror or one_line(e)) from e
    except guard.DAMAGED as e:
        raise BadDump("cut short" if isinstance(e, EOFError) else f"damaged ({one_line(e)})") from e
    if len(data) > limit:
        raise BadDump(f"holds more than {limit >> 20:,} MiB")
    if not data:
        raise BadDump("empty")
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
        for folder, below, names in walk(Path(path)):
            if not _OF_A_RUN.isdisjoint(names):
                below.clear()
                continue
            below.sort()
            for name in sorted(names):
                if not name.startswith(".") and name != "run.json":
                    yield Path(folder, name), False


def likely(path: Path) -> bool:
    """False if the suffix shows that the file is not a dump."""
    return path.suffix.lower() not in _OTHER


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
