"""Finds the log files of a job, and reads their lines in bounded memory.

Plain or compressed, of any encoding. Most lines of a log do not matter: those without any needle (a literal part of a
known message). Of lines that differ only in numbers, `Bounds` keeps some, and it limits the time. The last `TAIL_BLOCKS` of a file are always read in full: how the job ended is there.
"""

from __future__ import annotations

import bisect
import itertools
import json
import re
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO

from distdiag import guard
from distdiag.sources.dumps.content import DumpFile
from distdiag.sources.dumps.files import find
from distdiag.sources.dumps.naming import name_ranks
from distdiag.sources.logs.patterns import BEGINS, HEADS, NEEDLES, TABLE, WEAK, Role
from distdiag.sources.logs.writers import is_object, is_record
from distdiag.terms.untrusted import bounded, is_rank

BLOCK_BYTES = 1 << 16
TRACEBACK = b"Traceback (most recent call last)"
LINES_AFTER = 3  # a frame of a traceback, its source, its marks, and what was raised
MAX_LINE_BYTES = 1 << 15  # the rest of a longer line is not read
TAIL_BLOCKS = 4  # at the end of a file
NEAR_LINES = 200  # after a frame, in which an exception may follow: tracebacks of several ranks are interleaved
ALL_EQUAL = 256  # lines of a shape that are read, whoever wrote them; a shape is a line without digits
EQUAL_OF_WRITER = 16  # further lines of a shape, of one writer in one file
MAX_EQUAL = 1 << 15  # lines of a shape; those of further ranks are not judged
# of shapes with the same needles: after so many lines, of each further shape the first ones, and two of each writer
LINES_OF_GROUP, SHAPES_OF_GROUP, FIRST, MAX_LOOKED_AT = 1 << 11, 1 << 12, 4, 1 << 14
WRITER_BYTES, SHAPE_BYTES, MAX_SHAPES = 160, 512, 1 << 15
JOB_S, FILE_S, BYTES_PER_S = 4.0, 2.0, 20e6  # CPU time for the lines of all files, and of one; and for their bytes
MAX_LATE = 2.0  # times the limit at which a file is no longer read at all
UNPACK_FACTOR = 10  # a log compresses so many times, or more
MAX_BYTES = 32 << 30  # limit of one unpacked file
MAX_FILES = 1 << 16
MAX_NULS = 64 << 20  # bytes at the begin of a file that a rotation has left empty
WRAPPED_LINES, TERMINALS = 4, (60, 400)  # lines of exactly the largest length; usual widths of terminals
_SUFFIXES = {".log", ".txt", ".out", ".err", ".stderr", ".stdout", ".jsonl", ".ndjson"}
_LOG_NAMES = {"stdout", "stderr", "output", "error", "dmesg", "messages", "syslog"}
_JOB_OUTPUT = re.compile(r"\.[eo]\d{2,}")  # PBS, SGE: stderr and stdout of a job
# of a .txt that is a log, not a README
_TEXT_NAME = re.compile(r"log|out|err|rank|slurm|nccl|train|job|node|worker|pod")
_OF_A_NODE = bounded(r"(?:node|host|pod|worker|machine|server)[-_.]?\d", re.IGNORECASE)  # a number, not of a rank
_WORKER = bounded(r"attempt_(\d+)/(\d+)/[^/]+$")  # the log directory of torchrun: the number is the local rank
_BOMS = ((b"\xff\xfe\x00\x00", "utf-32-le"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))
_DIGITS = b"0123456789"
_OF_WRITER = re.compile(rb"(?:ank|RANK|ask|ode|rocess|worker|gpu|GPU|pid|\[)[s :=]{0,3}(\d{1,9})")
_RANKS = re.compile(rb"\[rank ?(\d{1,6})\]")
_JSON = re.compile(rb"\s{0,99}[{\[]\s{0,99}[\"{\[}\]]")
_TEXT = bytes(range(32, 127)) + b"\n\r\t\x1b\b\f"


def find_logs(given: Sequence[str]) -> list[Path]:
    """Return the log files among `given` and below its directories; a file that was named itself counts if it holds text."""
    files = list(find(map(Path, given)))
    named = {path for path, by_name in files if by_name}
    candidates = [path for path, by_name in files if by_name or _may_be_a_log(path)]
    return guard.matching(itertools.islice(candidates, MAX_FILES), lambda path: no_log(path, path in named) is None)


def left_out(given: Sequence[str], logs: Iterable[Path], shown: int = 5) -> list[str]:
    """Return one line on the files among `given` that are not read as logs, each with the reason; empty if all are."""
    known = set(logs)
    others = [(path, named) for path, named in find(map(Path, given)) if path not in known]
    if not others:
        return []

    def judged(announce: guard.Announce) -> bytes:  # in a child: a head alone can ask for gigabytes
        announce("what is no log", 0)
        return json.dumps([no_log(path, named) or "too many files" for path, named in others[:shown]]).encode()

    try:
        reasons = json.loads(guard.run(judged, guard.Limits()))
    except guard.Died:
        reasons = ["cannot be read"] * len(others[:shown])
    texts = [f"{path} ({reason})" for (path, _), reason in zip(others, reasons, strict=False)]
    more = f", and {len(others) - shown:,} more" if len(others) > shown else ""
    return [f"not read as a log: {', '.join(texts)}{more}"]


def _may_be_a_log(path: Path) -> bool:
    return _named_like_a_log(path) or path.suffix == ".txt"


def no_log(path: Path, named: bool) -> str | None:
    """Return why a file is not read as a log; None if it is. A file that was named itself may have any name."""
    if not named and not _may_be_a_log(path):
        return "it is not named like a log"
    like = named or _named_like_a_log(path)
    reason = _not_text(path)
    return "it has no message that distdiag knows" if reason is None and not like and not _has_message(path) else reason


def _named_like_a_log(path: Path) -> bool:
    name = path.name.lower()
    suffix = Path(name).suffix
    if suffix in (".gz", ".bz2", ".xz"):
        name = name[: -len(suffix)]
    if name in _LOG_NAMES:
        return True
    suffixes = Path(name).suffixes
    numbered = bool(suffixes) and suffixes[-1][1:].isdigit()  # train.log.3
    last = suffixes[-2 if numbered and len(suffixes) > 1 else -1] if suffixes else ""
    if (numbered and len(suffixes) == 1) or _JOB_OUTPUT.fullmatch(last):  # workerlog.3, job.e12345
        return True
    return last in _SUFFIXES and (last != ".txt" or _TEXT_NAME.search(name) is not None)


def _has_message(path: Path) -> bool:
    """True if the begin of a file has a line that shows a failure: a text file of any name may be a log."""
    text = _head(path).decode("utf-8", "replace")
    failures = (row for row in TABLE if row.role not in (Role.FACT, Role.ECHO, Role.HINT) and row.needle in text)
    return any(row.regex.search(line) for row in failures for line in text.splitlines() if row.needle in line)


def _head(path: Path) -> bytes:
    """Return the first bytes of a file; those after NUL bytes, which a file that was cut while it was written begins with."""
    try:
        with guard.opened(path) as f:
            head = f.read(BLOCK_BYTES)
            while head and not head.strip(b"\0") and f.tell() < MAX_NULS:
                head = f.read(BLOCK_BYTES)
    except (OSError, *guard.DAMAGED):
        return b""
    cut = _encoding(head) == "utf-8" and _may_be_a_log(path)  # any other file that begins with NUL bytes is no text
    return head.lstrip(b"\0") if cut else head


def _not_text(path: Path) -> str | None:
    """Return why a file cannot be a log; None for text in any encoding that is not one JSON document."""
    head = _head(path)
    if not head:
        return "empty, or cannot be read"
    if _encoding(head) != "utf-8":
        return None
    if b"\0" in head or head[:1] == b"\x80":
        return "no text"
    if _is_document(head):
        return "a JSON document"
    controls = len(head.translate(None, _TEXT + bytes(range(128, 256))))
    return None if controls <= len(head) // 20 else "no text"


def _is_document(head: bytes) -> bool:
    """True for one JSON document; False for text, also after a document, and for JSON records of which each has its line."""
    if not _JSON.match(head):
        return False
    line, _, rest = head.lstrip().partition(b"\n")
    text = line.decode("utf-8", "replace")
    if is_record(text) or (rest.strip() and is_object(text)):
        return False
    whole = head.decode("utf-8", "replace").lstrip()
    try:
        _, end = json.JSONDecoder().raw_decode(whole)
    except (ValueError, RecursionError):
        return True
    return not whole[end:].strip()


def _encoding(head: bytes) -> str:
    """Return the encoding that a file's first bytes show: UTF-8 unless it is UTF-16 or UTF-32."""
    for mark, name in _BOMS:
        if head.startswith(mark):
            return name
    if len(head) >= 64:  # without a mark: PowerShell's `>` writes such files
        for name, zeros in (("utf-16-le", head[1:64:2]), ("utf-16-be", head[0:64:2])):
            if zeros.count(0) > len(zeros) * 3 // 4 and head[:64].count(0) <= 36:
                return name
    return "utf-8"


class _Group:
    """Shapes with the same needles, and how many of their lines were read."""

    def __init__(self, needles: tuple[bytes, ...]) -> None:
        self.strong = any(needle not in WEAK for needle in needles)
        self.begins = any(needle in BEGINS for needle in needles)  # a traceback, or a frame of one
        self.traceback = TRACEBACK in needles
        self.lines_after = LINES_AFTER if any(needle in HEADS for needle in needles) else 0
        self.lines = self.shapes = self.looked_at = 0


class Bounds:
    """How much of a job's logs is read in detail: so many equal lines, for so long. One for all files.

    Attributes:
        late: True if the file's time is over; what is left of it but its end is left out.
        ranks: Those that write lines at the begin and the end of the files.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._of_needles = lru_cache(MAX_SHAPES)(_Group)
        self._sizes = {path: _size(path) for path in paths}
        self._until_s = time.thread_time() + JOB_S + sum(self._sizes.values()) / BYTES_PER_S
        self._began_s = self._file_s = 0.0
        self._skipped: set[bytes] = set()  # shapes that cannot matter, or of which enough lines were read
        self._groups: dict[bytes, _Group] = {}  # by shape
        self._counts: dict[bytes, int] = {}
        self._of_writer: dict[int, int] = {}
        self._line = 0
        self._after = self._near = -1  # up to this line, all lines count, and those that only look like errors
        self._path = Path()
        self.late = False
        self.ranks: set[int] = set()

    def start(self, path: Path) -> None:
        """Begin with a file.

        Raises:
            OSError: no time is left.
        """
        self._path, self._began_s, self.late = path, time.thread_time(), False
        self._after = self._near = -1
        self._file_s = min(FILE_S + self._sizes.get(path, 0) / BYTES_PER_S, self._until_s - self._began_s)
        if self._file_s <= 0:
            raise OSError("not read: the files before it took too long")

    def check(self) -> None:
        """Set `late`.

        Raises:
            OSError: even without looking at the lines, this file takes too long.
        """
        used_s = time.thread_time() - self._began_s
        self.late = self.late or used_s > self._file_s
        if used_s > MAX_LATE * self._file_s + FILE_S:
            raise OSError("not read to its end: it takes too long")

    def keep(self, block: bytes, raws: Sequence[bytes], all_of_them: bool) -> list[int]:
        """Return the indices of a block's lines to read: those that can matter, unless enough equal ones were read before.

        A shape is a line without its digits; whether a shape can matter is judged once. A line that only looks like an error
        counts near a frame of a traceback; of the others, the last one of each block.
        """
        shapes = block.translate(None, _DIGITS).split(b"\n")
        if max(map(len, shapes)) > SHAPE_BYTES:
            keys = [shape if len(shape) <= SHAPE_BYTES else b"%d" % hash(shape) for shape in shapes]
        else:
            keys = shapes
        first, self._line = self._line, self._line + len(raws)
        if not all_of_them and self._after < first and self._skipped.issuperset(keys):
            return []
        self._judge(keys, shapes)
        kept, weak = [], None
        for i, key in enumerate(keys, first):
            group = None if key in self._skipped and not all_of_them else self._groups.get(key)
            if group is not None and not all_of_them:
                if i > self._near and not group.strong:
                    group, weak = None, i - first
                elif not self._is_new(group, key, raws[i - first]):
                    group = None
            if group is None:
                if i <= self._after:
                    kept.append(i - first)
                continue
            if group.traceback and i > first and kept[-1:] != [i - first - 1]:
                kept.append(i - first - 1)  # the line before it may show when
            kept.append(i - first)
            self._after = max(self._after, i + group.lines_after)
            self._near = max(self._near, i + NEAR_LINES * group.begins)
        if weak is not None and (not kept or kept[-1] < weak):
            kept.append(weak)
        return kept

    def _judge(self, keys: Sequence[bytes], shapes: Sequence[bytes]) -> None:
        """Note for each new shape which needles it has."""
        if len(self._skipped) + len(self._groups) > MAX_SHAPES:
            for seen in (self._skipped, self._groups, self._counts, self._of_writer):
                seen.clear()
        new = {k: s for k, s in zip(keys, shapes, strict=True) if k not in self._groups and k not in self._skipped}
        text = b"\n".join(new.values())
        ends = list(itertools.accumulate(len(shape) + 1 for shape in new.values()))
        found: dict[int, list[bytes]] = {}
        for needle in NEEDLES:
            at = text.find(needle)
            while at >= 0:
                nth = bisect.bisect_right(ends, at)
                found.setdefault(nth, []).append(needle)
                at = text.find(needle, ends[nth])
        for nth, key in enumerate(new):
            if nth in found:
                self._groups[key] = self._of_needles(tuple(found[nth]))
            else:
                self._skipped.add(key)

    def _is_new(self, group: _Group, key: bytes, raw: bytes) -> bool:
        """True if not enough lines of this shape, or of this shape and its writer, were read; counts this one."""
        count = self._counts[key] = self._counts.get(key, 0) + 1
        group.shapes += count == 1
        most = EQUAL_OF_WRITER if group.lines < LINES_OF_GROUP else 2
        if not (count <= FIRST and group.shapes <= SHAPES_OF_GROUP) and (count > ALL_EQUAL or most == 2):
            group.looked_at += 1
            if count > MAX_EQUAL or group.looked_at > MAX_LOOKED_AT:
                self._skipped.add(key)
                return False
            head = raw[:WRITER_BYTES]
            task, colon, _ = head[:8].partition(b": ")  # of srun
            writer = hash((key, self._path, task if colon else b"", *_OF_WRITER.findall(head)))
            of_writer = self._of_writer[writer] = self._of_writer.get(writer, 0) + 1
            if of_writer > most:
                return False
        group.lines += 1
        return True


def _size(path: Path) -> int:
    """Return about how many bytes of text a file has."""
    try:
        size = path.stat().st_size
    except OSError:
        return 0
    return size * UNPACK_FACTOR if path.suffix in (".gz", ".bz2", ".xz") else size


def lines(path: Path, bounds: Bounds) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of the lines that hold a needle, and of those that may belong to one before; last an empty one.

    A carriage return ends a line, too: a progress bar writes the next message after it.

    Raises:
        OSError: the file cannot be read any further; lines before that were yielded.
    """
    number, ended = 1, None
    tail: deque[tuple[int, bytes]] = deque()
    with guard.opened(path) as f:
        try:
            for block in _blocks(f):
                tail.append((number, block))
                number += block.count(b"\n")
                if number == 1 + block.count(b"\n"):
                    bounds.ranks |= set(map(int, _RANKS.findall(block)))
                if len(tail) > TAIL_BLOCKS:
                    bounds.check()
                    first, block = tail.popleft()
                    if not bounds.late:
                        yield from _of_block(first, block, bounds, at_end=False)
        except OSError as e:
            ended = e
    for first, block in tail:
        bounds.ranks |= set(map(int, _RANKS.findall(block)))
        yield from _of_block(first, block, bounds, at_end=True)
    if ended is not None:
        raise ended
    yield number, ""  # how many there were


def _of_block(number: int, block: bytes, bounds: Bounds, at_end: bool) -> Iterator[tuple[int, str]]:
    """Yield the lines of a block whose first line has this number; those that `bounds` keeps, at the end all that can matter."""
    raws = block.split(b"\n")
    for i in bounds.keep(block, raws, at_end):
        for text in raws[i].split(b"\r"):
            if text:
                yield number + i, text[:MAX_LINE_BYTES].decode("utf-8", "replace")


def wrapped_at(path: Path) -> int | None:
    """Return the column at which a terminal has wrapped the lines of a file; None if it has not."""
    try:
        with guard.opened(path) as f:
            lengths = Counter(map(len, f.read(BLOCK_BYTES).split(b"\n")))
    except (OSError, *guard.DAMAGED):
        return None
    column = max(lengths)
    wrapped = WRAPPED_LINES <= lengths[column] <= lengths.total() * 0.8
    return column if wrapped and TERMINALS[0] <= column <= TERMINALS[1] else None


def unwrapped(path: Path, column: int, bounds: Bounds) -> Iterator[tuple[int, str]]:
    """Yield (number of the first, text) of lines that a terminal has wrapped at a column, joined again; last an empty one.

    They end when the file's time is over.

    Raises:
        OSError: as `lines`.
    """
    number, whole, first = 0, b"", 1
    with guard.opened(path) as f:
        for block in itertools.chain(_blocks(f), [b""]):  # the last one ends the last line
            bounds.check()
            if bounds.late:
                break
            joined: list[tuple[int, bytes]] = []
            for raw in block.removesuffix(b"\n").split(b"\n"):
                number += bool(block)
                first = first if whole else number
                whole += raw
                if len(raw) != column or len(whole) >= MAX_LINE_BYTES:
                    joined.append((first, whole))
                    whole = b""
            raws = [raw for _, raw in joined]
            for i in bounds.keep(b"\n".join(raws), raws, all_of_them=False):
                yield joined[i][0], raws[i].decode("utf-8", "replace")
    yield number, ""


def _blocks(f: IO[bytes]) -> Iterator[bytes]:
    """Yield blocks of whole lines, as UTF-8."""
    rest, read, encoding = b"", 0, ""
    while read < MAX_BYTES:
        try:
            block = f.read(BLOCK_BYTES)
        except (*guard.DAMAGED, MemoryError) as e:  # truncated: the part before is judged
            if rest:
                yield rest
            raise OSError(f"damaged: {e}") from e
        if not block:
            break
        read += len(block)
        encoding = encoding or _encoding(block)
        if encoding != "utf-8":
            block = block.decode(encoding, "replace").encode()
        block = rest + block
        end = block.rfind(b"\n") + 1
        if end == 0 and len(block) < 4 * MAX_LINE_BYTES:
            rest = block
            continue
        end = end or len(block)
        rest = block[end:]
        yield block[:end]
    if rest:
        yield rest


def ranks_of(paths: Iterable[Path]) -> dict[Path, int]:
    """Return the rank of each file with one rank's lines: by `rank3` in its name or path, or by its number among others."""
    files = [DumpFile(path, None, "", {}, {}, []) for path in dict.fromkeys(paths)]
    out: dict[Path, int] = {}
    workers = {f.path: int(m[2]) for f in files if (m := _WORKER.search(f.path.as_posix()))}
    if len(set(workers.values())) == len({p.parent for p in workers}):  # else of several nodes: local ranks only
        out = workers
    name_ranks(files)
    named = {f.path: f.rank for f in files if f.rank is not None and is_rank(f.rank)}
    numbers: dict[str, set[int]] = {}  # of files whose names differ in a number only
    for path, rank in named.items():
        numbers.setdefault(_shape(path), set()).add(rank)
    consecutive_ones = {s for s, ranks in numbers.items() if len(ranks) > 1 and max(ranks) <= len(ranks)}
    for path, rank in named.items():
        consecutive = _shape(path) in consecutive_ones
        if re.search(r"rank[-_.=]?\d", str(path), re.IGNORECASE) or (
            path not in out and consecutive and not _OF_A_NODE.search(path.name)
        ):
            out[path] = rank
    return out


def _shape(path: Path) -> str:
    """Return a file's name and folder without their numbers: the logs of ranks differ in nothing else."""
    return re.sub(r"\d+", "#", f"{path.parent.name}/{path.name}")
