"""Reads the lines of a log file that can matter, in bounded memory and time.

Most lines do not matter: those without any needle (a literal part of a known message). Of lines that differ only in numbers,
`Bounds` keeps some, and it limits the bytes that are read in detail. The last `TAIL_BLOCKS` of a file are always read in full:
how the job ended is there.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO

from distdiag import guard
from distdiag.sources.logs import folded
from distdiag.sources.logs.patterns import BEGINS, HEADS, NEEDLES, WEAK

BLOCK_BYTES = 1 << 16
TRACEBACK = b"Traceback (most recent call last)"
LINES_AFTER = 3  # a frame of a traceback, its source, its marks, and what was raised
MAX_LINE_BYTES = 1 << 15  # the rest of a longer line is not read
LISTS, LIST_LINES = (b"error stack:", b"Missing ranks:"), 64  # the calls of MPI, innermost last; a line for each rank
TAIL_BLOCKS = 4  # at the end of a file
HEAD_BYTES = 1 << 13  # that may show when it was begun
NEAR_LINES = 200  # after a frame, in which an exception may follow: tracebacks of several ranks are interleaved
ALL_EQUAL = 256  # lines of a shape that are read, whoever wrote them; a shape is a line without digits
EQUAL_OF_WRITER = 16  # further lines of a shape, of one writer in one file
MAX_EQUAL = 1 << 15  # lines of a shape; those of further ranks are not judged
# of shapes with the same needles: after so many lines, of each further shape the first ones, and two of each writer
LINES_OF_GROUP, SHAPES_OF_GROUP, FIRST, MAX_LOOKED_AT = 1 << 11, 1 << 12, 4, 1 << 14
WRITER_BYTES, SHAPE_BYTES, MAX_SHAPES = 160, 512, 1 << 15
# bytes of all files that are read in detail; each line takes as long as so many more
MAX_DETAIL, LINE_COST = (64 << 20, 400)
MAX_BYTES = 32 << 30  # limit of one unpacked file
WRAPPED_LINES, TERMINALS = 4, (60, 400)  # lines of exactly the largest length; usual widths of terminals
BEGIN, RULES = 4, b"=-*#+|~"  # bytes by which the begin of a whole line is known; ends of lines that draw a rule
_BOMS = ((b"\xff\xfe\x00\x00", "utf-32-le"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))
_DIGITS = b"0123456789"
_COLOURS = re.compile(rb"\x1b\[[;]{0,30}[A-Za-z]")  # without digits; they may stand inside a needle
_COMMON = (b"\x1b[m", b"\x1b[;m", b"\x1b[K")  # of these; cheaper to remove
_OF_WRITER = re.compile(rb"(?:ank|RANK|ask|ode|rocess|worker|gpu|GPU|pid|\[)[s :=]{0,3}(\d{1,9})")
_PIDS = re.compile(
    rb"pid=(?P<pid>\d{1,9})(?:, ip=(?P<ip>[\w.:]{3,60}))?[^)\n]{0,60}\)(?:\x1b\[[\d;]{0,9}m)?(?: ?\[[rR]ank ?|[^\n(]{0,40}\b(?:(?:world|global)_rank|rank(?=[=:] ?\d{1,6}[, ]{1,2}(?:local_rank|world_size)))[=:] ?)(?P<of_pid>\d{1,6})\b"
    rb"|\b[Rr]ank[ =:]{0,2}(?P<rank>\d{1,6})\b[^\n\d]{0,20}\b(?:pid|PID)[ =:]{1,2}(?P<after>\d{1,9})"
)
_IP_BEFORE = re.compile(rb"\bip=([\w.:]{3,60}), $")  # as Ray Train lists its workers
_RANKS = re.compile(rb"\[(?:rank[ =]?|\d{1,3},(?=\d{1,6}\]<std))(\d{1,6})(?:/\d{1,6})?\]")


def encoding_of(head: bytes) -> str:
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
        self.lines_after = LIST_LINES if not set(needles).isdisjoint(LISTS) else self.lines_after
        self.lines = self.shapes = self.looked_at = 0


class Bounds:
    """How much of a job's logs is read in detail: so many equal lines, so many bytes. One for all files.

    Attributes:
        late: True if lines of the file were left out that differ from those before; its end is read even so.
        ranks: Those that write lines at the begin and the end of the files.
        pids, on_host: Rank of each pid, and ranks of each address, that such a line names with it.
        head: The first bytes of the file.
        tail: The last blocks of the file, each with the number of its first line.
    """

    def __init__(self) -> None:
        self._of_needles = lru_cache(MAX_SHAPES)(_Group)
        self._skipped: set[bytes] = set()  # shapes that cannot matter, or of which enough lines were read
        self._groups: dict[bytes, _Group] = {}  # by shape
        self._counts: dict[bytes, int] = {}
        self._of_writer: dict[int, int] = {}
        self._detailed = 0
        self._line = 0
        self._after = self._near = -1  # up to this line, all lines count, and those that only look like errors
        self._path = Path()
        self.late = False
        self.ranks: set[int] = set()
        self.pids: dict[int, int] = {}
        self.on_host: dict[str, set[int]] = {}
        self.head = b""
        self.tail: deque[tuple[int, bytes]] = deque()

    def start(self, path: Path) -> None:
        self._path, self.late, self.head, self.tail, self.pids = path, False, b"", deque(), {}
        self._after = self._near = -1

    def note_writers(self, block: bytes) -> None:
        """Note the ranks that write lines, and their pids."""
        self.ranks |= set(map(int, _RANKS.findall(block)))
        for m in _PIDS.finditer(block) if b"pid" in block or b"PID" in block else ():
            rank, pid = int(m["rank"] or m["of_pid"]), int(m["after"] or m["pid"])
            self.pids[pid] = rank if self.pids.get(pid, rank) == rank else -1
            before = _IP_BEFORE.search(block, max(0, m.start() - WRITER_BYTES), m.start())
            ip = m["ip"] or (before[1] if before else b"")
            if ip and len(self.on_host) < MAX_SHAPES:
                self.on_host.setdefault(ip.decode(), set()).add(rank)

    def keep(self, block: bytes, raws: Sequence[bytes], all_of_them: bool) -> list[int]:
        """Return the indices of a block's lines to read: those that can matter, unless enough equal ones were read before.

        A shape is a line without its digits; whether a shape can matter is judged once. A line that only looks like an error
        counts near a frame of a traceback; of the others, the last one of each block.
        """
        text = block.translate(None, _DIGITS)
        if b"\x1b" in text:
            for colour in _COMMON:
                text = text.replace(colour, b"")
            text = _COLOURS.sub(b"", text) if b"\x1b" in text else text
        shapes = text.split(b"\n")
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
            ends_open = group.strong and raws[i - first].endswith((b":", b":\r"))  # the rest of its message follows
            self._after = max(self._after, i + max(group.lines_after, LINES_AFTER * ends_open))
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
        if self._detailed > MAX_DETAIL:
            self.late = True
            return False
        self._detailed += len(raw) + LINE_COST
        group.lines += 1
        return True


def lines(path: Path, bounds: Bounds, column: int | None = None) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of the lines that hold a needle, and of those that may belong to one before; last an empty one.

    A carriage return ends a line, too: a progress bar writes the next message after it.

    Args:
        column: That at which a terminal has wrapped the lines.

    Raises:
        OSError: the file cannot be read any further; lines before that were yielded.
    """
    number, ended, rich = 1, None, False
    tail = bounds.tail
    with guard.opened(path) as f:
        try:
            for block in _blocks(f) if column is None else folded.at_column(_blocks(f), column):
                if number == 1:
                    bounds.note_writers(block)
                    bounds.head = block[:HEAD_BYTES]
                    rich = folded.is_rich(block)
                if (rich and folded.ERROR in block) or (folded.RARE in block and folded.RICH in block):
                    block = folded.of_rich(block)
                tail.append((number, block))
                number += block.count(b"\n")
                if len(tail) > TAIL_BLOCKS:
                    yield from _of_block(*tail.popleft(), bounds, at_end=False)
        except OSError as e:
            ended = e
    for first, block in tail:
        if first > 1:  # the first block is noted above
            bounds.note_writers(block)
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
    """Return the column at which a terminal has wrapped the lines of a file; None if it has not.

    JSON records are whole, and may be equally long.
    """
    head = guard.head(path, BLOCK_BYTES)
    raws = head.split(b"\n")
    column = max((len(raw) for raw in raws if not raw.endswith(b"}")), default=0)
    rests = [rest[:BEGIN] for raw, rest in itertools.pairwise(raws) if len(raw) == column]
    rules = sum(len(raw) == column and (raw[-1:] in RULES or raw[-1] > 127) for raw in raws)  # of a table or a box
    begin = Counter(raw[:BEGIN] for raw in raws).most_common(1)[0][0]  # of a whole line: the rest of one seldom has it
    wrapped = WRAPPED_LINES <= len(rests) <= len(raws) * 0.8 and rests.count(begin) * 2 < len(rests) > 2 * rules
    wrapped = wrapped and not folded.is_rich(head)
    return column if wrapped and TERMINALS[0] <= column <= TERMINALS[1] else None


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
        encoding = encoding or encoding_of(block)
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
