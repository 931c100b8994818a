"""A tape in memory and as bytes: `read_tape`, `to_bytes`, `judge`.

The file is a line that names the version and the compression, then a stream of records, each with its length before it: `Head`, `Source`,
`Frame`. A tape may come from anybody: its sizes are bounded and every value has a type.
"""

from __future__ import annotations

import lzma
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from distdiag import guard
from distdiag.diagnosis.engine import Diagnosis, Record
from distdiag.diagnosis.model.findings import Check, Finding
from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.errors import DistdiagError
from distdiag.tapes.delta import apply, difference
from distdiag.terms.untrusted import MAX_RANKS

ZLIB, LZMA = b"distdiag-tape 1 zlib\n", b"distdiag-tape 1 lzma\n"
_BEGIN = b"distdiag-tape "
LENGTH = struct.Struct("<I")
MAX_FILE = 64 << 20  # bytes of a file that is read
MAX_BYTES = 512 << 20  # of its contents
MAX_RECORD = 64 << 20
MAX_MEMORY = 4 << 30  # of the process that reads and judges it
MAX_FRAMES = 1_000_000
# a window of 4 MiB: preset 9 takes 0.7 GiB to compress anything
_FILTER = {"id": lzma.FILTER_LZMA2, "preset": 6 | lzma.PRESET_EXTREME, "dict_size": 4 << 20}
_HINT = "a tape is written by `distdiag run --tape`, and kept by `distdiag report RUN --tape FILE`"


class Answer(msgspec.Struct, frozen=True, order=True):
    """What one finding states, without its times and its wording."""

    kind: str
    cause: str
    severity: str
    certainty: str
    culprits: tuple[int, ...]
    where: tuple[str, ...]  # "rank file:line", sorted
    cleared: bool

    def __str__(self) -> str:
        ranks = ",".join(map(str, self.culprits)) or "–"
        cleared = " (cleared)" if self.cleared else ""
        return f"{self.severity} {self.kind}/{self.cause or '–'} {self.certainty}{cleared}, ranks {ranks}  {', '.join(self.where)}"


class Head(msgspec.Struct, frozen=True, kw_only=True, tag="head"):
    """What a tape is of."""

    version: str = ""  # of distdiag
    earlier: tuple[Finding, ...] = ()  # open findings of a monitor that was killed
    job: str = ""  # of the collection
    backend: str = ""
    job_hash: str = ""  # of the job's file
    expected: tuple[Answer, ...] | None = None  # the verdict of the live run; None if it was not noted


class Source(msgspec.Struct, frozen=True, tag="source"):
    """A source file that the diagnosis asked for; None: it could not be read."""

    path: str
    text: str | None


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag="frame", omit_defaults=True):
    """One snapshot, as a difference to the one before."""

    change: Any
    final: bool = False
    answers: int = 0  # findings that were reported, changed or cleared by it when it was live


Item = Head | Source | Frame
_ITEM = msgspec.msgpack.Decoder(Item)
_ENCODER = msgspec.msgpack.Encoder()
EMPTY = Snapshot(t_s=0.0, world_size=0, ranks={}, groups={})


class Tape(msgspec.Struct, frozen=True, kw_only=True):
    """The snapshots of a job, in order, and all else that the diagnosis read."""

    head: Head = Head()
    snapshots: tuple[Snapshot, ...]
    sources: dict[str, str | None] = {}
    final: bool = False
    moments: tuple[int, ...] = ()  # indices of snapshots at which a finding changed when it was live


class Poll(msgspec.Struct, frozen=True):
    """What one snapshot changed."""

    t_s: float
    state: str
    changed: tuple[Finding, ...]
    checks: tuple[Check, ...]  # what could be judged so far, and why not


class Verdict(msgspec.Struct, frozen=True):
    """The findings that the snapshots of a tape lead to."""

    findings: tuple[Finding, ...]
    failures: tuple[str, ...] = ()  # exceptions in our own rules
    polls: tuple[Poll, ...] = ()

    @property
    def answers(self) -> tuple[Answer, ...]:
        return answers(self.findings)


def answers(findings: Iterable[Finding]) -> tuple[Answer, ...]:
    """Return what findings state, in a fixed order."""
    return tuple(
        sorted(
            Answer(
                f.kind, f.cause or "", str(f.severity), str(f.certainty or ""), tuple(f.culprits),
                tuple(sorted({f"{w.rank} {w.file}:{w.line}" for w in f.where})), f.cleared_s is not None,
            )
            for f in findings
        )
    )  # fmt: skip


def judge(tape: Tape, every_poll: bool = False) -> Verdict:
    """Give the snapshots of a tape to a new diagnosis."""
    diagnosis = Diagnosis(source=tape.sources.get)
    for finding in tape.head.earlier:
        diagnosis.records[finding.key] = Record(finding, reported=True)
    polls = []
    for i, snapshot in enumerate(tape.snapshots, 1):
        changed = diagnosis.update(snapshot, final=tape.final and i == len(tape.snapshots))
        if every_poll:
            polls.append(Poll(snapshot.t_s, str(diagnosis.state), tuple(changed), diagnosis.checks.all))
    return Verdict(tuple(diagnosis.findings), tuple(diagnosis.failures), tuple(polls))


def judge_file(path: Path, every_poll: bool = False) -> Verdict:
    """Read and judge a tape that may come from anybody; see `guarded`."""
    return guarded(path, lambda tape: judge(tape, every_poll=every_poll), Verdict)


def guarded(path: Path, work: Callable[[Tape], Any], kind: Any) -> Any:
    """Return what `work` makes of a tape that may come from anybody, of type `kind`; in a process with limits.

    A difference of ten bytes makes a snapshot of all ranks: a file of 40 KB can ask for all memory.

    Raises:
        DistdiagError: it cannot be read, or exceeds the limits.
    """

    def child(announce: guard.Announce) -> bytes:
        announce("judge it", path.stat().st_size * 64)
        try:
            return b"+" + _ENCODER.encode(work(read_tape(path)))
        except DistdiagError as e:
            return b"-" + e.message.encode("utf-8", "backslashreplace")

    try:
        answer = guard.run(child, guard.Limits(memory_bytes=MAX_MEMORY, memory_per_byte=0))
    except (guard.Died, OSError) as e:
        raise DistdiagError(f"{path} cannot be judged: {getattr(e, 'reason', e)}", _HINT) from e
    if answer[:1] == b"-":
        raise DistdiagError(answer[1:].decode(), _HINT)
    return msgspec.msgpack.decode(answer[1:], type=kind)


# -- bytes ------------------------------------------------------------------------------------------------


def encoded(item: Item) -> bytes:
    """Return one record of the stream, with its length before it."""
    data = _ENCODER.encode(item)
    return LENGTH.pack(len(data)) + data


def to_bytes(tape: Tape) -> bytes:
    """Return a tape as a file's contents, compressed as well as possible."""
    items: list[Item] = [tape.head, *(Source(path, text) for path, text in tape.sources.items())]
    last, moments = len(tape.snapshots) - 1, set(tape.moments)
    for i, (old, new) in enumerate(zip((EMPTY, *tape.snapshots), tape.snapshots, strict=False)):
        items.append(Frame(change=difference(old, new), final=tape.final and i == last, answers=int(i in moments)))
    return LZMA + lzma.compress(b"".join(map(encoded, items)), filters=[_FILTER])


def is_tape(path: Path) -> bool:
    """True if a file begins as a tape does, of whatever version."""
    try:
        with guard.regular(path) as file:
            return file.read(len(_BEGIN)) == _BEGIN
    except OSError:
        return False


def read_tape(path: Path) -> Tape:
    """Read a tape.

    Raises:
        DistdiagError: it cannot be read, is not a tape, is too large, or its snapshots cannot be decoded.
    """
    try:
        with guard.regular(path) as file:
            data = file.read(MAX_FILE + 1)
    except OSError as e:
        raise DistdiagError(f"no tape at {path} ({e.strerror or e})", _HINT) from e
    try:
        return from_bytes(data)
    except (msgspec.MsgspecError, ValueError, zlib.error, lzma.LZMAError, EOFError, RecursionError) as e:
        reason = str(e).splitlines()[0][:200] if str(e) else type(e).__name__
        raise DistdiagError(f"{path} is not a tape that can be read: {reason}", _HINT) from e


def from_bytes(data: bytes) -> Tape:
    """Return the tape in a file's contents. A last record that is cut off, as a kill leaves it, is left out.

    Raises:
        ValueError: it is no tape, or exceeds the bounds.
    """
    head, final, moments = Head(), False, []
    snapshots: list[Snapshot] = []
    sources: dict[str, str | None] = {}
    for item in _items(_decompressed(data)):
        if isinstance(item, Head):
            head = item
        elif isinstance(item, Source):
            sources[item.path] = item.text
        else:
            if len(snapshots) >= MAX_FRAMES:
                raise ValueError("too many snapshots")
            moments += [len(snapshots)] * bool(item.answers)
            final = item.final
            snapshots.append(_checked(apply(Snapshot, snapshots[-1] if snapshots else EMPTY, item.change)))
    return Tape(head=head, snapshots=tuple(snapshots), sources=sources, final=final, moments=tuple(moments))


def _checked(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot if its ranks are numbers of ranks: rules count up to `world_size`."""
    ranks = [*snapshot.ranks, *(r for group in snapshot.groups.values() for r in group.ranks)]
    if not 0 <= snapshot.world_size <= MAX_RANKS or not all(0 <= r < MAX_RANKS for r in ranks):
        raise ValueError("ranks out of range")
    if any(rank != state.rank for rank, state in snapshot.ranks.items()):
        raise ValueError("a rank under another number")
    return snapshot


def _decompressed(data: bytes) -> bytes:
    if len(data) > MAX_FILE:
        raise ValueError(f"larger than {MAX_FILE >> 20} MiB")
    if data.startswith(ZLIB):
        out = zlib.decompressobj().decompress(data[len(ZLIB) :], MAX_BYTES + 1)
    elif data.startswith(LZMA):
        limit = 256 << 20  # of memory: what preset 9 takes, four times
        out = lzma.LZMADecompressor(memlimit=limit).decompress(data[len(LZMA) :], MAX_BYTES + 1)
    else:
        raise ValueError("it does not begin as one")
    if len(out) > MAX_BYTES:
        raise ValueError(f"its contents are larger than {MAX_BYTES >> 20} MiB")
    return out


def _items(data: bytes) -> Iterator[Item]:
    at = 0
    while at + LENGTH.size <= len(data):
        (length,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size
        if length > MAX_RECORD:
            raise ValueError("a record is too large")
        if at + length > len(data):
            return
        yield _ITEM.decode(data[at : at + length])
        at += length
