"""Runs work on untrusted files in a child process with limits: what kills the child costs only that file.

A pickle of a few hundred bytes can ask for all memory, never end, or crash the interpreter in C
(hashing a deeply nested tuple). No check in the same process survives the last of these.
"""

from __future__ import annotations

import bz2
import errno
import faulthandler
import gzip
import lzma
import mmap
import os
import resource
import select
import signal
import struct
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any

import msgspec

from distdiag.errors import in_own_tests
from distdiag.terms.signals import signal_name
from distdiag.terms.untrusted import all_encodable

WALL_FACTOR, WALL_S = 10.0, 60.0  # the deadline: for a disk that does not respond, or an overloaded machine
DEATHS = 2  # of the child, after which each file is first tried alone
TOGETHER = ""  # name of the step that judges all files at once
HEADS = 64  # files of which only the head is read share the limits of one step
MAX_DEATHS = 16  # of children that only look at the heads of files; what is left then is not looked at
DAMAGED = (EOFError, zlib.error, lzma.LZMAError)  # what unpacking raises, in addition to OSError
DISK_PACKS, SPARSE_BYTES = 16, 1 << 20  # file systems that compress pack a log 5 to 15 times
_PACKED = ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ", lzma.open))


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may take (reading a file, judging what was read), by the size of its input in bytes."""

    cpu_s: float = 3.0
    cpu_s_per_byte: float = 1e-6  # reading a dump takes 0.03 µs a byte on a slow core
    memory_bytes: int = 384 << 20
    memory_per_byte: int = 50  # plain data take 5 to 20 times the size of their pickle


_ANNOUNCE, _RESULT, _FAILED = b"A", b"R", b"F"
_HEADER = struct.Struct("=cdQ")  # kind, deadline of the step in seconds, bytes that follow

Announce = Callable[[str, int], None]
# of `judged`: (announce, files not to read with the reason, the only file to read or None) -> result
Work = Callable[[Announce, Mapping[str, str], str | None], Any]


class Died(Exception):
    """The child ended without a result.

    Attributes:
        step: The last step that it announced.
        reason: Why it ended, for a message.
        details: The traceback of an exception.
    """

    def __init__(self, step: str, reason: str, details: str = "") -> None:
        super().__init__(f"{step}: {reason}\n{details}".strip())
        self.step, self.reason, self.details = step, reason, details


@contextmanager
def regular(path: Path) -> Iterator[IO[bytes]]:
    """Open an untrusted file for reading; its content can still be damaged or huge.

    Raises:
        OSError: it cannot be read, or is no regular file: a FIFO or a terminal would block, a device never ends.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb") as file:
        if not S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield file


def stored_bytes(path: Path) -> int:
    """Return the size of a file by which its reading is limited: of a sparse one, which a small archive can hold, by what the disk holds.

    Raises:
        OSError: it does not exist, or may not be looked at.
    """
    found = path.stat()
    held = found.st_blocks * 512 * DISK_PACKS  # 0: nothing is stored, or this file system does not tell
    if found.st_size <= SPARSE_BYTES or not (held or _only_a_hole(path)):
        return found.st_size
    return min(found.st_size, SPARSE_BYTES + held)


def _only_a_hole(path: Path) -> bool:
    """True if a file stores not one byte; a file system that does not know says that its first one is stored."""
    with regular(path) as file:
        try:
            file.seek(0, os.SEEK_DATA)
        except OSError as e:
            return e.errno == errno.ENXIO
    return False


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open an untrusted file for reading, unpacked if it is compressed, by its first bytes.

    Raises:
        OSError: as `regular`.
    """
    with regular(path) as raw:
        head = raw.peek(8)  # type: ignore[attr-defined]
        unpack = next((unpack for magic, unpack in _PACKED if head.startswith(magic)), None)
        if unpack is None:
            yield raw
        else:
            with unpack(raw) as unpacked:
                yield unpacked  # type: ignore[misc]


def head(path: Path, size: int) -> bytes:
    """Return the first bytes of an untrusted file, unpacked; none if it cannot be read."""
    try:
        with opened(path) as file:
            return file.read(size)
    except (OSError, *DAMAGED):
        return b""


def matching(paths: Iterable[Path], test: Callable[[Path], bool]) -> list[Path]:
    """Return the files for which `test` is true, in their order; it reads their heads, in a child process.

    A head alone can ask for gigabytes (the dictionary of an .xz file). A file that kills the child is no match, and the next child
    begins after it.
    """
    files = list(dict.fromkeys(paths))
    answers = mmap.mmap(-1, len(files) + 1)  # shared with the children: 0 no answer, 1 no match, 2 a match

    def work(announce: Announce) -> bytes:
        for nth in range(begin, len(files)):
            if nth == begin or nth % HEADS == 0:
                announce(str(files[nth]), 0)
            answers[nth] = 1 + test(files[nth])
        return b""

    begin = deaths = 0
    while begin < len(files) and deaths < MAX_DEATHS:
        try:
            run(work, Limits())
            break
        except Died as e:
            if e.details and in_own_tests():
                raise
            begin, deaths = answers.find(b"\0", begin) + 1, deaths + 1
    return [path for path, answer in zip(files, answers[:], strict=False) if answer == 2]


def judged(work: Work, files: Callable[[], Iterable[str]], limits: Limits, kind: Any) -> Any:
    """Return the result of `work` on all files but those that kill the child, which are refused with the reason.

    Args:
        work: Announces the path of each file before it reads it, and `TOGETHER` before it judges all.
        files: The files to try alone, after the child has died `DEATHS` times or in the step `TOGETHER`.
        kind: Type of the result: plain data or a record.

    Raises:
        Died: the files together exceed the limits, or their analysis failed.
    """
    refused: dict[str, str] = {}
    deaths = 0
    while True:
        try:
            answer = run(lambda announce: _encoded(work(announce, refused, None)), limits)
            return msgspec.msgpack.decode(answer, type=kind)
        except Died as e:
            if e.details and in_own_tests():
                raise
            deaths += 1
            if e.step not in refused and e.step != TOGETHER:
                refused[e.step] = e.reason
            elif deaths > DEATHS:
                raise
            if e.step == TOGETHER or deaths == DEATHS:
                deaths = DEATHS
                _try_alone(work, files(), refused, limits)


def _encoded(answer: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(answer)
    except UnicodeEncodeError:  # a path or a name that is not UTF-8
        return msgspec.msgpack.encode(all_encodable(msgspec.to_builtins(answer)))


def _try_alone(work: Work, files: Iterable[str], refused: dict[str, str], limits: Limits) -> None:
    """Add to `refused` every file that cannot be read and judged alone."""
    for path in files:
        if path not in refused:
            try:
                run(lambda announce, path=path: _encoded(work(announce, {}, path)), limits)
            except Died as e:
                refused[path] = e.reason


def run(work: Callable[[Announce], bytes], limits: Limits) -> bytes:
    """Run `work` in a forked child and return its result.

    Args:
        work: Calls `announce(name, input_bytes)` before each step, which sets the limits of that step. It must not
            print or write files: the child has neither.

    Raises:
        Died: a step crashed, raised, or exceeded its limits.
    """
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():  # Python 3.12 warns of other threads: the child takes no lock that they may hold
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _child(work, write_end, limits)
    os.close(write_end)
    ended = False
    try:
        step, result = _result(read_end)
        if result is None:
            ended = True
            raise Died(step, _death(os.waitpid(pid, 0)[1]))
        return result
    finally:
        os.close(read_end)
        if not ended:  # its pid is not reused before the parent has waited for it
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _child(work: Callable[[Announce], bytes], pipe: int, limits: Limits) -> None:
    status = 1
    try:
        faulthandler.disable()  # a crash is an answer here, nothing to print
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

        def announce(step: str, input_bytes: int) -> None:
            cpu_s = limits.cpu_s + input_bytes * limits.cpu_s_per_byte
            _limit_memory(limits.memory_bytes + input_bytes * limits.memory_per_byte)
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            _send(pipe, _ANNOUNCE, max(WALL_S, WALL_FACTOR * cpu_s), os.fsencode(step))

        _send(pipe, _RESULT, 0.0, work(announce))
        status = 0
    except MemoryError:
        _send(pipe, _FAILED, 0.0, b"needs too much memory\0")
    except BaseException as e:
        last = traceback.extract_tb(e.__traceback__)[-1]
        reason = f"{type(e).__name__} in {os.path.basename(last.filename)}:{last.lineno}"
        _send(pipe, _FAILED, 0.0, f"{reason}\0{traceback.format_exc()}".encode("utf-8", "backslashreplace"))
    finally:
        os._exit(status)


def _limit_memory(more_bytes: int) -> None:
    """Allow `more_bytes` of address space in addition to what is in use."""
    with suppress(OSError, ValueError):
        used = int(Path("/proc/self/statm").read_bytes().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        wanted = used + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _send(pipe: int, kind: bytes, deadline_s: float, body: bytes) -> None:
    data = memoryview(_HEADER.pack(kind, deadline_s, len(body)) + body)
    while data:
        data = data[os.write(pipe, data) :]


def _result(pipe: int) -> tuple[str, bytes | None]:
    """Return the child's last step and its result; None instead of a result if the child ended without one.

    Raises:
        Died: it reports an exception, or exceeds its deadline.
    """
    step, received, wall_s = "", bytearray(), WALL_S
    deadline = time.monotonic() + wall_s
    while True:
        while len(received) >= _HEADER.size:
            kind, step_s, size = _HEADER.unpack_from(received)
            end = _HEADER.size + size
            if len(received) < end:
                break
            body = bytes(received[_HEADER.size : end])
            del received[:end]
            if kind == _RESULT:
                return step, body
            if kind == _FAILED:
                reason, _, details = body.decode("utf-8", "replace").partition("\0")
                raise Died(step, reason, details)
            step, wall_s = os.fsdecode(body), step_s
            deadline = time.monotonic() + wall_s
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            raise Died(step, f"took more than {wall_s:.0f} s")
        chunk = os.read(pipe, 1 << 20)
        if not chunk:
            return step, None
        received += chunk


def _death(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGPROF:
            return "takes too long to read: an ordinary file of this size needs a fraction of a second"
        return f"crashes its reader ({signal_name(number)})"
    return f"ends its reader (status {os.waitstatus_to_exitcode(status)})"
