"""Flight-recorder dump files: found, opened without executing anything, and told which rank they are of.

Pickles come from other people's clusters: the unpickler here knows no class at all, so a file that asks for one
(`os.system`) is an error that names it. JSON and pickle, plain or gzipped, NCCL, gloo and other backends, format
versions 1.x and 2.x; see torch/csrc/distributed/c10d/FlightRecorderDetail.hpp for what the fields mean.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

import msgspec

MAX_BYTES = 2 << 30  # of one dump, unpacked; a ring of 20,000 entries with stacks has some 100 MB
_OTHER = {".log", ".txt", ".md", ".py", ".html", ".db", ".csv", ".yaml", ".yml", ".toml", ".sh", ".out", ".err"}
_OTHER |= {".db-wal", ".db-shm", ".where", ".png", ".svg", ".sqlite", ".ini", ".cfg"}


class Foreign(Exception):
    """Why a file is no usable dump; one line, for people."""


@dataclass(slots=True)
class DumpFile:
    """One rank's dump as read: builtin containers only.

    Attributes:
        rank: From the content or the name; None until known.
        groups: Group name -> (description, global ranks or None where not recorded).
        status: The recorder's own group number -> (last enqueued, last completed); of NCCL the number counts
            collectives or messages, whichever came last, of gloo both.
        entries: As recorded, oldest first; the oldest may be overwritten.
    """

    path: Path
    rank: int | None
    version: str
    groups: dict[str, tuple[str, tuple[int, ...] | None]]
    status: dict[str, tuple[int, int]]
    entries: list[dict[str, Any]]
    modified_ns: int = 0
    damaged: int = 0  # entries that could not be understood


class _NoClasses(pickle.Unpickler):
    """Builtin containers and scalars only: nothing is imported, so nothing can be called."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise Foreign(f"the pickle asks for {module_name}.{global_name}; dumps hold plain data only, nothing was run")

    def persistent_load(self, pid: Any, /) -> Any:
        raise Foreign("the pickle refers to outside objects")


def load_pickle(data: bytes) -> Any:
    """Plain data from a pickle.

    Raises:
        Foreign: it asks for a class or function, is cut short, or is no pickle.
    """
    try:
        return _NoClasses(io.BufferedReader(io.BytesIO(data))).load()  # type: ignore[arg-type]  # with peek: 3 x faster
    except Foreign:
        raise
    except (EOFError, pickle.UnpicklingError, IndexError) as e:
        short = isinstance(e, EOFError) or "truncated" in str(e) or "ran out" in str(e).lower()
        raise Foreign("cut short" if short else f"not a flight-recorder dump ({_one_line(e)})") from e
    except (MemoryError, RecursionError, OverflowError) as e:
        raise Foreign(f"the pickle is malformed ({type(e).__name__})") from e
    except Exception as e:
        raise Foreign(f"not a flight-recorder dump ({_one_line(e)})") from e


def _one_line(e: BaseException) -> str:
    return " ".join(str(e).split())[:120] or type(e).__name__


def _unpack(data: bytes) -> bytes:
    """gzip, with a bound: a small file may unpack to terabytes."""
    stream = zlib.decompressobj(wbits=31)
    try:
        out = stream.decompress(data, MAX_BYTES)
    except zlib.error as e:
        raise Foreign(f"damaged gzip ({_one_line(e)})") from e
    if stream.unconsumed_tail:
        raise Foreign(f"unpacks to more than {MAX_BYTES >> 30} GiB")
    if not stream.eof:
        raise Foreign("cut short (gzip)")
    return out


def read(path: Path) -> DumpFile:
    """One dump.

    Raises:
        Foreign: the file is hostile, truncated, or something else.
    """
    try:
        stat = path.stat()
        if not S_ISREG(stat.st_mode):
            raise Foreign("not a file")
        if stat.st_size > MAX_BYTES:
            raise Foreign(f"larger than {MAX_BYTES >> 30} GiB")
        data = path.read_bytes()
    except OSError as e:
        raise Foreign(e.strerror or str(e)) from e
    if not data:
        raise Foreign("empty")
    if data[:2] == b"\x1f\x8b":
        data = _unpack(data)
    start = data[:64].lstrip()[:1]
    if start in (b"{", b"["):
        try:
            content = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            text = _one_line(e)
            raise Foreign("cut short" if "truncated" in text else f"damaged JSON ({text})") from e
    else:
        content = load_pickle(data)
    dump = _understand(path, content)
    dump.modified_ns = stat.st_mtime_ns
    return dump


def _understand(path: Path, content: Any) -> DumpFile:
    if isinstance(content, dict) and "entries" not in content and isinstance(content.get("dump"), dict):
        content = {**content["dump"], "rank": content.get("rank")}
    if isinstance(content, list):  # torch 2.1 and 2.2: the bare list of entries
        content = {"entries": content, "version": "1.0"}
    if not isinstance(content, dict) or not ("entries" in content or "pg_status" in content):
        raise Foreign("not a flight-recorder dump: no entries")
    entries = content.get("entries")
    entries = [] if entries is None else entries
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries[:1] + entries[-1:]):
        raise Foreign("not a flight-recorder dump: its entries are no list of records")
    damaged = 0
    if not is_modern(entries):
        entries, damaged = modern(entries)
    rank = content.get("rank")
    return DumpFile(
        path=path,
        rank=rank if isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 else None,
        version=str(content.get("version", "")),
        groups=_groups(content.get("pg_config")),
        status=_status(content.get("pg_status")),
        entries=entries,
        damaged=damaged,
    )


_ranks_of: dict[str, tuple[int, ...] | None] = {}


def _ranks(value: Any) -> tuple[int, ...] | None:
    """`[0, 1]` as list or text, in its order; None where empty or not understood. A thousand dumps hold the same texts."""
    if isinstance(value, str):
        if value not in _ranks_of:
            if len(_ranks_of) > 65536:
                _ranks_of.clear()
            found = re.findall(r"\d+", value)
            _ranks_of[value] = tuple(dict.fromkeys(int(x) for x in found)) or None
        return _ranks_of[value]
    if isinstance(value, (list, tuple)) and all(isinstance(x, int) for x in value):
        return tuple(dict.fromkeys(value)) or None
    return None


def _groups(value: Any) -> dict[str, tuple[str, tuple[int, ...] | None]]:
    out: dict[str, tuple[str, tuple[int, ...] | None]] = {}
    if isinstance(value, dict):
        for name, info in value.items():
            if isinstance(info, dict):
                out[str(info.get("name", name))] = (str(info.get("desc", "")), _ranks(info.get("ranks")))
            else:  # 1.2: group number -> ranks
                out[str(name)] = ("", _ranks(info))
    return out


def _status(value: Any) -> dict[str, tuple[int, int]]:
    out: dict[str, tuple[int, int]] = {}
    if isinstance(value, dict):
        for number, s in value.items():
            try:
                out[str(number)] = (int(s["last_enqueued_collective"]), int(s["last_completed_collective"]))
            except (KeyError, TypeError, ValueError):
                continue
    return out


_NEEDED = ("process_group", "collective_seq_id", "p2p_seq_id", "is_p2p", "profiling_name", "state", "retired")


def is_modern(entries: list[dict[str, Any]]) -> bool:
    """True where first and last entry have the fields of 2.x: the rest is then not looked at before it is needed."""
    return not entries or all(n in e for e in (entries[0], entries[-1]) for n in _NEEDED)


def modern(entries: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """Entries with the fields of 2.x, each checked; those without a group, number or name are counted and left out."""
    out, damaged = [], 0
    for old in entries:
        e = dict(old) if isinstance(old, dict) else {}
        name = e.get("profiling_name")
        group = e.get("process_group", e.get("pg_name", e.get("pg_id")))
        if isinstance(group, (list, tuple)) and len(group) == 2:
            group = (str(group[0]), str(group[1]))
        elif isinstance(group, (str, int)):
            group = (str(group), "")
        number = e.get("collective_seq_id", e.get("seq_id"))
        if not isinstance(name, str) or not isinstance(group, tuple) or type(number) is not int:
            damaged += 1
            continue
        e["process_group"], e["collective_seq_id"] = group, number
        e["is_p2p"] = bool(e.get("is_p2p", name.rpartition(":")[2].startswith(("send ", "recv "))))
        if type(e.get("p2p_seq_id")) is not int:
            e["p2p_seq_id"] = number if e["is_p2p"] else 0
        e["retired"] = e.get("retired") is True
        e.setdefault("state", "completed" if e["retired"] else "scheduled")
        out.append(e)
    return out, damaged


# -- which files, and of which rank ------------------------------------------------------------------------------------


def find(paths: Iterable[Path]) -> Iterator[tuple[Path, bool]]:
    """Files of `paths`, directories included with what is below; True where a file was named itself."""
    for path in paths:
        if not path.is_dir():
            yield path, True
            continue
        for folder, below, names in os.walk(path):
            below.sort()
            for name in sorted(names):
                if not name.startswith("."):
                    yield Path(folder, name), False


def likely(path: Path) -> bool:
    """False for files beside dumps that are certainly something else, by their ending."""
    return not any(s in _OTHER for s in (path.suffix.lower(), "".join(path.suffixes[-1:]).lower()))


_RANK = re.compile(r"rank[-_.=]?(\d+)(?!\d)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")


def name_ranks(files: Sequence[DumpFile]) -> None:
    """Set `rank` of every file that does not tell it: `rank3`, else the number in which the names differ, else what the
    recorder's groups leave; else the same by the folders that the files lie in."""
    unnamed = [f for f in files if f.rank is None]
    for f in unnamed:
        if m := list(_RANK.finditer(f.path.name)):
            f.rank = int(m[-1][1])
    shapes: dict[tuple[Path, str], list[DumpFile]] = {}
    for f in unnamed:
        if f.rank is None:
            shapes.setdefault((f.path.parent, ""), []).append(f)
    for alike in shapes.values():
        _by_position(alike)
    for f in files:
        if f.rank is None:
            own = set.intersection(*(set(r) for _, r in f.groups.values() if r)) if any(f.groups.values()) else set()
            if len(own) == 1:  # the recorder lists only the groups that the rank is in
                f.rank = own.pop()
    for f in files:
        if f.rank is None:
            ranks = [m[-1] for part in reversed(f.path.parts[:-1]) if (m := _RANK.findall(part))]
            if ranks and _plausible(f, int(ranks[0])):
                f.rank = int(ranks[0])
    nowhere = [f for f in files if f.rank is None]
    if len({f.path for f in nowhere}) > 1:
        top = Path(os.path.commonpath([f.path for f in nowhere]))
        _by_position(nowhere, [f.path.parent.relative_to(top).as_posix() for f in nowhere])


def _by_position(files: list[DumpFile], names: list[str] | None = None) -> None:
    """The last number in the names (their own by default) that is different in all and lies in the groups of the file."""
    names = [_stem(f.path) for f in files] if names is None else names
    numbers = [[int(x) for x in _NUMBER.findall(name)] for name in names]
    for back in range(1, 1 + min((len(n) for n in numbers), default=0)):
        column = [n[-back] for n in numbers]
        if len(set(column)) < len(column):
            continue
        if all(_plausible(f, r) for f, r in zip(files, column, strict=True)):
            for f, r in zip(files, column, strict=True):
                f.rank = r
            return
    for f, ns in zip(files, numbers, strict=True):
        if ns and _plausible(f, ns[-1]):
            f.rank = ns[-1]


def _stem(path: Path) -> str:
    name = path.name
    while (suffix := Path(name).suffix) and not suffix[1:].isdigit():
        name = name[: -len(suffix)]
    return name


def _plausible(f: DumpFile, rank: int) -> bool:
    return all(rank in ranks for _, ranks in f.groups.values() if ranks)


@contextmanager
def _bounded(paths: list[Path]) -> Iterator[None]:
    """Reading may take some 50 times the files' size, not all the memory that a crafted pickle asks for."""
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        now = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limit = now + (3 << 30) + 50 * sum(p.stat().st_size for p in paths if p.is_file())
        if soft != resource.RLIM_INFINITY and soft <= limit:
            limit = soft
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (ImportError, OSError, ValueError):
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def read_all(paths: Iterable[Path]) -> tuple[list[DumpFile], list[tuple[str, str]], list[str]]:
    """All dumps under `paths`; files that should have been dumps with the reason; names of others beside them."""
    files: list[DumpFile] = []
    bad: list[tuple[str, str]] = []
    others: list[str] = []
    wanted: list[Path] = []
    for path, named in find(paths):
        if named or likely(path):
            wanted.append(path)
        else:
            others.append(str(path))
    with _bounded(wanted):
        for path in wanted:
            try:
                files.append(read(path))
            except Foreign as e:
                bad.append((str(path), str(e)))
    name_ranks(files)
    return files, bad, others
