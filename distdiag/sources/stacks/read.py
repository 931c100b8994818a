"""Parses what `py-spy dump` (text or --json), faulthandler and gdb (`bt`, `py-bt`) print of one or more processes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from distdiag.sources.logs.writers import without_prefix
from distdiag.sources.stacks.frames import Frame, Process, Stack
from distdiag.terms.untrusted import MAX_INT, MAX_TEXT, bounded

MAX_FRAMES = 1024  # of one thread; Python's own limit of recursion is 1,000
MAX_THREADS = 1024
# a launcher's prefix may end in a space, which is left in the line; a title such as `sglang::scheduler_TP2` has the rank, too
_PROCESS = bounded(
    r"^ ?Process (\d+)(?:: |$)(?:.{0,4000}(?:--local[-_]rank[= ]|::[A-Za-z]{1,40}_TP)(?P<local>\d{1,6})(?:_EP\d{1,6})?(?!\w))?"
)
_PARENT = bounded(r"^ ?Parent Process (\d+)(?:: |$)")  # of py-spy dump --subprocesses
_SPY_THREAD = bounded(r'^ ?Thread (?:0x[0-9A-Fa-f]+|\d+) \((idle|active)[^)]{0,40}\)(?:: "(.{0,200})")?')
_SPY_FRAME = re.compile(r"^ {4,5}(\S.*) \((\S.*):(\d{1,9})\)$")
_NATIVE = re.compile(r"^(?: {4,5}(\S.*) \([^():]*\)$|#\d+ +(?:0x[0-9a-f]+ in )?(\S.*?) \()")
_THREAD = bounded(
    r"^ ?(?:(?:Current thread|Thread) 0x[0-9a-f]+ ?(?:\[.{0,64}\] )?\(most recent call first\):"  # of faulthandler
    r"|Thread \d+ \((?:Thread 0x|LWP)|(?P<py_bt>Traceback \(most recent call first\):))"  # of gdb
)
_FRAME = bounded(r'^ {2,3}File "(.{1,4096})", line (\d+)(,?) in (.{1,4096})$')  # with a comma: of gdb

# what a person or a script writes above the stacks of a rank: `== rank 6 (pid 61300) on node-2 ==`, `# RANK=6`, `$ py-spy dump … # rank 6`
_TITLE = bounded(
    r"^(?:.{0,1000}\b(?:py-spy|pystack|gdb)\b.{0,1000}#|)(?:[\W_]{0,80}\b(?:stacks?|traces?|dump|of|for|from|on|the|global|world|(?:node|host|pid)[ =:]{1,2}[\w.-]{1,99})\b){0,6}"
    r"[\W_]{0,80}(?<![A-Za-z])(?P<local>local[ _-]?)?rank[ _#=:-]{0,3}(?P<rank>\d{1,6})(?:/\d{1,6})?(?:[\s,;|()\[\]-]{1,4}"
    r"(?:@ ?|(?:of|pid|on|node|host|at|gpu|device|process|(?:local|global)[ _-]?rank)[ =:#]{1,2})[\w.:-]{1,253}){0,5}[\W_]*$",
    re.IGNORECASE,
)
_COMMAND = bounded(r"^\W{0,9}(?:Timeout \(|(?:\S+ ){0,20}(?:\S*/)?(?:py-spy|pystack|gdb) )")
_NONE = (None, None)  # rank and local rank
_DEAD = -1  # in place of a pid
_FATAL = bounded(r"^ ?Fatal Python error: ")  # of faulthandler: what follows are the last stacks of a process
_OUTERMOST = ("<module>", "_run_module_as_main")  # frame of a main thread
_SOURCE_OF_C = re.compile(r"\.(?:c|cc|cpp|cu|h|hpp|rs|pyx|so(?:\.[\d.]+)?)$")

_Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=MAX_INT)]


class _Local(msgspec.Struct):
    name: _Text
    addr: Any = 0  # of 64 bits: more than other readers of JSON accept
    repr: str | None = None


class _SpyFrame(msgspec.Struct):
    name: str
    filename: str
    line: int
    module: str | None = None  # the library of a native frame
    locals: list[_Local] | None = None


class _SpyThread(msgspec.Struct):
    pid: _Number
    frames: list[_SpyFrame]
    active: bool = True
    thread_name: str | None = None


# Made here, by one thread: msgspec reads a type's fields at its first use, and two threads that do so at once crash the process.
_decode = msgspec.json.Decoder(list[_SpyThread]).decode


class NoStacks(Exception):
    """The text has no stack."""


def from_json(data: bytes | str) -> list[Process]:
    """Return the processes in the output of `py-spy dump --json`, without their ranks.

    Raises:
        NoStacks: it is something else.
    """
    try:
        threads = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise NoStacks(str(e)[:200]) from e
    by_pid: dict[int, list[Stack]] = {}
    for t in threads[:MAX_THREADS]:
        native = [f.module is not None or _SOURCE_OF_C.search(f.filename) is not None for f in t.frames]
        inner = native.index(False) if False in native else len(native)
        python = (_frame(f) for f, is_native in zip(t.frames, native, strict=True) if not is_native)
        frames = tuple(f for f in python if not f.recorders)
        stack = Stack(frames[:MAX_FRAMES], tuple(f.name for f in t.frames[:inner]), not t.active, t.thread_name or "")
        if frames:
            by_pid.setdefault(t.pid, []).append(stack)
    if not by_pid:
        raise NoStacks("it has no Python frame")
    return [Process(pid, tuple(stacks)) for pid, stacks in by_pid.items()]


def _frame(f: _SpyFrame) -> Frame:
    found = [x for x in f.locals or () if x.repr is not None]
    values, objects = {x.name: x.repr or "" for x in found}, {x.name: x.addr for x in found if type(x.addr) is int}
    return Frame(f.name[:MAX_TEXT], f.filename[:MAX_TEXT], max(f.line, 0), values, objects)


def from_text(text: str, dead: bool = True) -> list[Process]:
    """Return the processes in a text, in its order; their rank where a launcher puts it in front of each line, or a title above them.

    Args:
        dead: Also those that a fatal error ended there.

    Raises:
        NoStacks: it has none.
    """
    lines: dict[tuple[int | None, int | None], list[str]] = {}  # by prefix: the lines of ranks may be mixed
    all_ = [without_prefix(line) for line in text.splitlines()]
    prefixed = any(x[:2] != _NONE and (_SPY_FRAME.match(x[2]) or _FRAME.match(x[2])) for x in all_)
    title = titled = _NONE
    pid = ""
    for line, (rank, local, rest) in zip(text.splitlines(), all_, strict=True):
        if not prefixed and (m := _TITLE.match(line)):
            title = (None, int(m["rank"])) if m["local"] else (int(m["rank"]), None)
        elif (m := _PROCESS.match(line)) or _THREAD.match(line) or _SPY_THREAD.match(line):
            if title != _NONE:
                titled, title, pid = title, _NONE, m[1] if m else ""
            elif m and m[1] != pid:  # a title is of one process
                titled, pid = _NONE, m[1]
        elif line.strip() and not _COMMAND.match(line):  # a line of a log: a title is right above its stacks
            title = _NONE
        lines.setdefault((rank, local) if (rank, local) != _NONE else titled, []).append(rest)
    found = [p for prefix, own in lines.items() for p in _processes(own, *prefix, dead)]
    if not found:
        raise NoStacks("it has no stack")
    return found


def _processes(lines: list[str], rank: int | None, local: int | None, dead: bool) -> Iterator[Process]:
    """Yield the processes; without a line that names the next, the first thread of a dump follows the last of a main thread's frames."""
    found: list[tuple[int, int | None, list[_Open]]] = [(0, local, [_Open()])]
    parents = dict(_parents(lines))
    for line in lines:
        _, local, threads = found[-1]
        if m := _PROCESS.match(line):
            found.append((int(m[1]), int(m["local"]) if m["local"] else local, [_Open()]))
        elif m := _SPY_THREAD.match(line):
            threads.append(_Open(m[2] or "", m[1] == "idle"))
        elif m := _THREAD.match(line):
            # faulthandler and gdb list the main thread last
            if (last := threads[-1].frames) and last[-1].function in _OUTERMOST:
                found.append((0, local, threads := [_Open()]))
            if last or not m["py_bt"]:  # else its native frames are above
                threads.append(_Open())
            threads[-1].by_gdb = bool(m["py_bt"])
        elif m := _SPY_FRAME.match(line):
            threads[-1].add(Frame(m[1][:MAX_TEXT], m[2][:MAX_TEXT], int(m[3])))
        elif m := _FRAME.match(line):
            if threads[-1].by_gdb == bool(m[3]):
                threads[-1].add(Frame(m[4], m[1], int(m[2])))
        elif (m := _NATIVE.match(line)) and not threads[-1].frames:
            threads[-1].native.append((m[1] or m[2])[:MAX_TEXT])
        elif not dead and _FATAL.match(line):
            found.append((_DEAD, local, [_Open()]))
        elif found[-1][0] == _DEAD and line.strip():  # its last stack is over
            found.append((0, local, [_Open()]))
    for pid, here, threads in found:
        if pid == _DEAD:
            continue
        stacks = tuple(t.stack() for t in threads[:MAX_THREADS] if t.frames)
        if stacks:
            yield Process(pid, stacks, rank, here, parents.get(pid, 0))


def _parents(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Yield the pids of processes and of their parents."""
    pid = 0
    for line in lines:
        if m := _PROCESS.match(line):
            pid = int(m[1])
        elif m := _PARENT.match(line):
            yield pid, int(m[1])


class _Open:
    def __init__(self, name: str = "", idle: bool | None = None) -> None:
        self.name, self.idle = name, idle
        self.frames: list[Frame] = []
        self.native: list[str] = []
        self.by_gdb = False

    def add(self, frame: Frame) -> None:
        if len(self.frames) < MAX_FRAMES and not frame.recorders:
            self.frames.append(frame)

    def stack(self) -> Stack:
        """Return it, without the native frames around Python's innermost one, which gdb lists, too."""
        inner = itertools.takewhile(lambda name: not name.startswith("_PyEval_"), self.native)
        return Stack(tuple(self.frames), tuple(inner), self.idle, self.name)
