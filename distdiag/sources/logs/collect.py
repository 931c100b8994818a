"""Reads the lines of all log files into events: what happened, to which rank, on which line. Bounded in memory."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from distdiag.diagnosis.model.snapshot import Site
from distdiag.guard import TOGETHER, Announce
from distdiag.sources.dumps.entries import user_site
from distdiag.sources.logs import files, tables
from distdiag.sources.logs.patterns import TABLE, Role, may_matter
from distdiag.sources.logs.prefixes import Writer, messages, plain, writer
from distdiag.sources.logs.recorded import MARK, Recorded
from distdiag.terms.untrusted import MAX_RANKS, bounded, is_rank

MAX_EVENTS = 50_000
MAX_OF_ONE = 8  # events of one kind by one writer that are kept; the rest are counted
MAX_MESSAGE = 1 << 13  # characters of one message that are read
MAX_FRAMES = 64  # most frames of one traceback
MAX_WRITERS = 1 << 16
MAX_DIGITS = 20  # most digits of a number: no field has more

_FAILURES = tuple(row for row in TABLE if row.role not in (Role.FACT, Role.ECHO))
_RANK_FIELDS = ("a", "b", "r", "waiter", "awaited", "near")
_FRAME = re.compile(r'File "(?P<filename>[^"]{1,500})", line (?P<line>\d{1,7})(?:, in (?P<name>.{1,200}))?\s*$')
_CALL = bounded(r"#\d+ (?P<name>\S+) from (?P<filename>\S{1,500}):(?P<line>\d{1,7})\s*$")
_EXCEPTION = bounded(
    r"(?:^|[\]:|)]\s?)(?P<type>(?:[A-Za-z_]\w*\.){0,8}(?:[A-Z]\w*(?:Error|Exception|Expired|Killed|Timeout|Exit)))(?:: (?P<what>.*))?$"
)
# the end of a traceback whose frames were printed: any class
_ANY = bounded(r"(?:^\s{0,3}|[\]:|)]\s?)(?P<type>(?:[A-Za-z_]\w*\.){0,8}[A-Z]\w*)(?:: (?P<what>.*))?$")
_OUTERMOST = ("<module>", "_run_module_as_main")
_COLLECTIVE = "/torch/distributed/distributed_c10d.py"
_ERRORS = bounded(r"\b(?:(?:[A-Z]\w*)?(?:Error|Exception)|ERROR|FATAL|Fatal|Aborted)\b")
_INSIDE = bounded(r"/torch/(?:distributed|csrc|nn/parallel)/")
_LOST = bounded(r"reset by peer|Broken pipe|onnection refused|onnection closed|Socket Timeout|timed out", re.IGNORECASE)
WATCHED_LINES = 40  # lines after a frame that may end its traceback
_SPAWNED = bounded(r"-- Process (\d{1,6}) terminated with the following error")
# exceptions of a launcher, or those by which a rank fails after others
_FOLLOWERS = ("ChildFailedError", "SignalException", "CalledProcessError", "ProcessRaisedException", "RayTaskError", "RayActorError",
              "ActorDiedError", "SystemExit", "ProcessExitedException")  # fmt: skip


@dataclass(slots=True)
class Event:
    """One line of interest, or one exception.

    Attributes:
        name, role: Those of its row in the table; `exception` if it has no row.
        fields: Contents of the line, by the group names of the table.
        order: Position of the line among all lines read, to order events of one file.
    """

    name: str
    role: Role
    fields: dict[str, str]
    who: Writer
    path: Path
    line: int
    order: int
    text: str = ""
    rank: int | None = None
    site: Site | None = None
    lines_after: int = 0  # how many lines the file has after it
    uncaught: bool = False  # its traceback begins at the script itself, so nothing in the script caught it
    in_collective: bool = False  # raised by a backend, inside a collective call
    of_node: bool = False  # `rank` is the rank on its node; the log does not show whether there are more nodes


@dataclass(slots=True)
class _Trace:
    """A traceback that is being printed."""

    frames: list[dict[str, object]] = field(default_factory=list)
    rank: int | None = None
    margin: int = 0  # characters in front of each of its lines
    frame_at: int | None = None  # where the line before has its frame; the next line is source code
    uncaught: bool = False


@dataclass
class Collected:
    """What all log files of a job contain.

    Attributes:
        ranks: Ranks that wrote a line, or that a line is about.
        world_size: The largest number of ranks that a line gives.
        exits: How processes ended, by the launchers' tables.
        recorded: What distdiag printed into the log, if it recorded the job.
    """

    events: list[Event] = field(default_factory=list)
    exits: list[tables.Exit] = field(default_factory=list)
    recorded: Recorded = field(default_factory=Recorded)
    unknown: deque[tuple[Path, int, str]] = field(default_factory=lambda: deque(maxlen=3))  # last lines like errors
    ranks: set[int] = field(default_factory=set)
    world_size: int | None = None
    restarts: int = 0
    torchrun: bool = False  # torchrun started the ranks, so a task of srun is a node
    dropped: int = 0
    late: bool = False  # not all lines of a file were read in detail: it took too long
    files: list[Path] = field(default_factory=list)
    bad: list[tuple[str, str]] = field(default_factory=list)


class Collector:
    """Reads files one after another; `result` has their contents."""

    def __init__(self, paths: Iterable[Path], wrapped: Mapping[Path, int] | None = None) -> None:
        self.result = Collected()
        self.paths = list(paths)
        self._bounds = files.Bounds(self.paths)
        self._wrapped = wrapped or {}  # the column at which a terminal wrapped the lines of a file
        self._of_one: dict[tuple[object, ...], int] = {}
        self._rank_of: dict[str, int] = {}  # process -> rank, from NCCL's own lines
        self._size_of: dict[str, int] = {}  # the size of the communicator in that line
        self._traces: dict[tuple[object, ...], _Trace] = {}
        self._stacks: dict[tuple[object, ...], list[dict[str, object]]] = {}
        self._table = tables.Tables()
        self._spawned: int | None = None
        self._order = 0
        self._watch_until = 0  # lines up to this one may end a traceback, whatever they contain
        self._last_error: tuple[object, ...] | None = None
        self._by_path: dict[Path, set[int]] = {}  # ranks named in the lines of a file
        self._of_nodes: set[Path] = set()  # files that name ranks on their node
        self._exceptions: dict[tuple[object, ...], Event] = {}  # the last one of each process
        self._before: dict[tuple[object, ...], Event] = {}  # the one that was being handled when the next was raised

    def read(
        self, announce: Announce = lambda _step, _bytes: None, refused: Mapping[str, str] | None = None
    ) -> Collected:
        """Return what the files contain.

        Args:
            announce: Called before each file, with its size, and before the judgement.
            refused: Files not to be read, with the reason.
        """
        out, bounds = self.result, self._bounds
        for path in self.paths:
            first, last = len(out.events), 0
            try:
                if refused and str(path) in refused:
                    raise OSError(refused[str(path)])
                announce(str(path), path.stat().st_size)
                bounds.start(path)
                column = self._wrapped.get(path)
                for number, text in (
                    files.lines(path, bounds) if column is None else files.unwrapped(path, column, bounds)
                ):
                    for message, rank in messages(plain(text)):
                        self._line(path, number, message[:MAX_MESSAGE], rank)
                    last = number
            except OSError as e:
                out.bad.append((str(path), e.strerror or str(e)))
            if bounds.late:
                out.late = True
                out.bad.append((str(path), "only its first and last lines were read in detail: reading takes too long"))
            for e in out.events[first:]:
                e.lines_after = last - e.line
            out.files.append(path)
            self._traces.clear()
            self._exceptions.clear()
            self._before.clear()
            self._spawned = None
            out.exits += self._table.take()
        announce(TOGETHER, 0)
        self._name_ranks()
        return out

    def _line(self, path: Path, number: int, text: str, rank: int | None) -> None:
        self._order += 1
        if self._order > self._watch_until and may_matter(text) is None:
            return
        if MARK in text:
            self.result.recorded.add(text, number)
            return
        who = writer(text)
        if rank is not None:
            who.rank = rank
        if who.rank is not None and len(self._by_path) < MAX_WRITERS:
            self._by_path.setdefault(path, set()).add(who.rank)
        if who.local is not None or " local_rank: " in text:
            self._of_nodes.add(path)
        source = _source(path, who)
        if self._table.line(text, str(path), number):
            if "Traceback (most recent call last)" in text:
                self._traces[source] = _Trace(rank=self._table.rank)
            return
        if text.rstrip().endswith("Last error:"):  # NCCL: the next line is the reason
            self._last_error, self._watch_until = source, self._order + 1
            return
        if (found := _SPAWNED.search(text)) is not None:
            self._spawned = int(found[1])
        if self._trace(source, text, who, path, number):
            return
        for row in TABLE:
            if row.needle in text and (m := row.regex.search(text)) is not None:
                fields = {k: v for k, v in m.groupdict().items() if v is not None}
                self._add(row.name, row.role, fields, who, path, number, text)
                if row.role is not Role.FACT:
                    break
        else:
            if self._last_error == source and self._order <= self._watch_until:
                what = re.sub(r"^(?:\[[^\]]*\]:? ?)+", "", text)[:200]
                self._add("nccl_warning", Role.HINT, {"what": what}, who, path, number, text)
            elif not who.mild and _ERRORS.search(text):
                self.result.unknown.append((path, number, text.strip()[:200]))

    def _trace(self, source: tuple[object, ...], text: str, who: Writer, path: Path, number: int) -> bool:
        """Follow tracebacks; True if the line is a frame of one."""
        if "Traceback (most recent call last)" in text:
            if len(self._traces) < MAX_WRITERS:
                self._traces[source] = _Trace(rank=self._spawned, margin=text.index("Traceback ("))
                self._spawned = None
            return True
        if "above exception" in text and (earlier := self._exceptions.pop(source, None)) is not None:
            self._before[source] = earlier
            return True
        if "Stack trace of the failed" in text and len(self._stacks) < MAX_WRITERS:
            self._stacks[source] = []
            return True
        if "#" in text and source in self._stacks and (m := _CALL.search(text)) is not None:
            self._keep_frame(self._stacks[source], m, innermost_first=True)
            return True
        if 'File "' in text and (m := _FRAME.search(text)) is not None:
            trace = self._traces.setdefault(source, _Trace()) if len(self._traces) < MAX_WRITERS else _Trace()
            self._watch_until = self._order + WATCHED_LINES
            trace.uncaught = trace.uncaught or (not trace.frames and m["name"] in _OUTERMOST)
            trace.frame_at = text.index('File "')
            self._keep_frame(trace.frames, m)
            return True
        trace = self._traces.get(source)
        if trace is not None and trace.frame_at is not None:
            at, trace.frame_at = trace.frame_at, None
            if text[at - 2 : at + 2] == "    ":
                return True
        known = trace is not None and bool(trace.frames)
        m = _EXCEPTION.search(text) if "Err" in text or "Exc" in text else None
        if m is None and known and trace is not None:
            m = _ANY.search(text) or _ANY.match(text[trace.margin :])
        if m is None:
            return False
        site = user_site(trace.frames[::-1]) if trace is not None else None
        if trace is not None:
            if trace.rank is not None and who.rank is None:
                who.rank = trace.rank
            del self._traces[source]
        innermost = str(trace.frames[-1]["filename"]) if known and trace is not None else ""
        event = self._exception(m, known, _INSIDE.search(innermost) is not None, site, who, path, number, text)
        if event is not None:
            event.uncaught = trace is not None and trace.uncaught
            event.in_collective = innermost.endswith(_COLLECTIVE)
            earlier = self._before.pop(source, None)
            if earlier is not None and earlier.name == "exception" and event.role is earlier.role is Role.CAUSE:
                self.result.events.remove(earlier)  # one failure: the last exception is what the process ended with
            self._exceptions[source] = event
        return True

    def _exception(
        self,
        m: re.Match[str],
        known: bool,
        in_torch: bool,
        site: Site | None,
        who: Writer,
        path: Path,
        number: int,
        text: str,
    ) -> Event | None:
        """Add an exception by the table's row for its message; by its type if it has no row and ended a traceback."""
        for row in _FAILURES:
            if row.needle in text and (f := row.regex.search(text)) is not None:
                fields = {k: v for k, v in f.groupdict().items() if v is not None}
                return self._add(row.name, row.role, fields, who, path, number, text, site)
        short = m["type"].rpartition(".")[2]
        if known and short not in _FOLLOWERS and not m["type"].endswith("Warning"):
            fields = {"type": short, "what": (m["what"] or "")[:300]}
            lost = short in ("DistBackendError", "DistNetworkError") or (in_torch and _LOST.search(text) is not None)
            return self._add("exception", Role.VICTIM if lost else Role.CAUSE, fields, who, path, number, text, site)
        return None

    def _keep_frame(self, frames: list[dict[str, object]], m: re.Match[str], innermost_first: bool = False) -> None:
        frame: dict[str, object] = {"filename": m["filename"], "line": int(m["line"]), "name": m["name"] or ""}
        frames.append(frame)
        if len(frames) > MAX_FRAMES:
            del frames[-1 if innermost_first else 0]

    def _add(
        self, name: str, role: Role, fields: dict[str, str], who: Writer, path: Path, number: int, text: str,
        site: Site | None = None,
    ) -> Event | None:  # fmt: skip
        out = self.result
        if name in ("nccl_rank", "lightning"):
            self._fact(fields, who)
            return None
        if name == "torchrun":
            out.torchrun = True
            return None
        if name == "restart":
            out.restarts += 1
            return None
        if who.mild and role in (Role.CAUSE, Role.VICTIM, Role.START):
            return None
        if any(len(v) > MAX_DIGITS and v.isdigit() for v in fields.values()):
            return None
        about = {int(fields[k]) for k in _RANK_FIELDS if fields.get(k, "").isdigit()}
        if not all(map(is_rank, about)):
            return None
        if name != "unique_id":  # there the numbers are those of the group
            out.ranks |= about
        key = (name, path, who.rank, who.process, who.task, who.group)
        seen = self._of_one[key] = self._of_one.get(key, 0) + 1
        if seen > MAX_OF_ONE or len(out.events) >= MAX_EVENTS:
            out.dropped += 1
            return None
        event = Event(name, role, fields, who, path, number, self._order, text[:500], who.rank, site)
        out.events.append(event)
        return event

    def _fact(self, fields: dict[str, str], who: Writer) -> None:
        out = self.result
        rank, world = int(fields["r"][:7]), int(fields["world"][:7])
        if not (is_rank(rank) and rank < world <= MAX_RANKS):
            return
        out.world_size = max(out.world_size or 0, world)
        if who.process and world >= self._size_of.get(who.process, 0) and len(self._rank_of) < MAX_WRITERS:
            self._rank_of[who.process], self._size_of[who.process] = rank, world

    def _name_ranks(self) -> None:
        """Fill in the ranks of events: by the process that wrote the line, the file's name, srun's task, the only node."""
        out = self.result
        of_file = {
            p: r
            for p, r in files.ranks_of(self.paths).items()
            if self._by_path.get(p, set()) <= {r} and p not in self._of_nodes
        }
        world = out.world_size or 0
        of_process = {p: r for p, r in self._rank_of.items() if self._size_of[p] == world}
        local = {e.who.local for e in out.events if e.who.local is not None}
        one_node = 0 < world <= 1 + max(local, default=0)
        tasks = {e.who.task for e in out.events if e.who.task is not None}
        for e in out.events:
            if e.rank is None:
                e.rank = of_process.get(e.who.process, of_file.get(e.path))
            if e.rank is None and not out.torchrun and len(tasks) > 1:
                e.rank = e.who.task
            if e.rank is None and e.who.local is not None and len(out.files) == 1:
                e.rank, e.of_node = e.who.local, not one_node
            if (call := self._stacks.get(_source(e.path, e.who))) and e.site is None and e.name == "timeout":
                e.site = user_site(call)
        out.ranks |= {r for e in out.events if (r := e.rank) is not None and is_rank(r)}
        out.ranks |= {r for ranks in self._by_path.values() for r in ranks if is_rank(r)}
        out.ranks |= set(of_process.values()) | set(of_file.values())
        out.ranks |= {x.rank for x in out.exits if x.rank is not None}


def _source(path: Path, who: Writer) -> tuple[object, ...]:
    """Return what lines of one process have in common: tracebacks of several processes may be interleaved."""
    return path, who.rank, who.process, who.task, who.local


def first_site(events: Iterable[Event]) -> Site | None:
    """Return the first known site of these events."""
    return next((e.site for e in events if e.site is not None), None)


def evidence(events: Iterable[Event]) -> tuple[str, ...]:
    """Return `file:line` of the first events."""
    return tuple(dict.fromkeys(f"{e.path}:{e.line}" for e in list(events)[:8]))
