"""Reads the lines of all log files into facts: what happened, who wrote it, on which line. Bounded in memory."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path

from distdiag.diagnosis.model.snapshot import Site
from distdiag.guard import TOGETHER, Announce
from distdiag.sources.dumps.entries import user_site
from distdiag.sources.logs import lines
from distdiag.sources.logs.patterns import TABLE, Role
from distdiag.sources.logs.recorded import MARK, Recorded
from distdiag.sources.logs.tables import Tables
from distdiag.sources.logs.writers import Writer, messages, plain, time_of, writer
from distdiag.terms.untrusted import MAX_INT, MAX_RANKS, bounded, is_rank

MAX_FACTS = 50_000
MAX_OF_ONE = 8  # facts of one kind by one writer that are kept; the rest are counted
MAX_MESSAGE = 1 << 13  # characters of one message that are read
MAX_FRAMES = 64  # most frames of one traceback
MAX_WRITERS = 1 << 16
MAX_DIGITS = 20  # most digits of a number: no field has more

_FAILURES = tuple(row for row in TABLE if row.role is not Role.FACT)
_RANK_FIELDS = ("a", "b", "r", "waiter", "awaited", "near")
_FRAME = re.compile(r'File "(?P<filename>[^"]{1,500})", line (?P<line>\d{1,7})(?:, in (?P<name>.{1,200}))?\s*$')
_RICH = bounded(
    r"^\S* ?│ (?P<filename>/\S{1,400}):(?P<line>\d{1,7}) in (?P<name>\S{1,200})"
)  # a frame of rich's tracebacks
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
LOST = bounded(r"reset by peer|Broken pipe|onnection refused|onnection closed|Socket Timeout|timed out", re.IGNORECASE)
_PREFIXES = bounded(r"^(?:\[[^\]]*\]:? ?){0,9}")
# an open quotation in a sentence, a list or a call, a raise statement, or the middle of a sentence
_PROSE = bounded(r"(?:\w |[\[{,] ?|[a-z_]\()[\"'](?=[^\"']{0,400}$)|\braise \w|[a-z] $")
_MILD = bounded(r"(?<!NCCL )\b(?:WARN(?:ING)?|INFO|DEBUG)\b")  # levels of the program's own log
_LOUD = bounded(r"[A-Za-z](?:Error|Exception)\b|Traceback|File \"|frame #")
_SECTION = bounded(
    r"-----(?:Begin|End) global rank (?P<r>\d+) STD|^==> \S{0,200}?(?:rank[-_.=]?(?P<of_file>\d+)\S*)? <=="
)
_SPAWNED = bounded(r"-- Process (\d{1,6}) terminated with the following error")
_DIGIT = bounded(r"\d+")
_OF_RANK = bounded(r"\(RANK (\d{1,6})\)")  # a checkpoint's exception, of another rank
# exceptions of a launcher, or those by which a rank fails after others
_FOLLOWERS = ("CheckpointException", "ChildFailedError", "SignalException", "CalledProcessError", "ProcessRaisedException", "RayTaskError", "RayActorError",
              "ActorDiedError", "SystemExit", "ProcessExitedException")  # fmt: skip


@dataclass(slots=True)
class Fact:
    """What one line, one table or one exception shows.

    Attributes:
        name, role: Those of its row in the table; `exception` if it has no row, `ended` from a launcher's table.
        fields: Contents of the line, by the group names of the table.
        order: Position of the line among all lines read.
        rank: The rank it is about: the writer, unless the line names another.
        at: Clock and seconds, of the writer's newest line with a time: it happened then or later.
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
    at: tuple[str, float] | None = None
    run: tuple[int, int] = (0, 0)  # launch and attempt, of those appended to one file
    quiet_lines: int = 0  # how many lines without any error end the file
    uncaught: bool = False  # its traceback begins at the script itself, so nothing in the script caught it
    in_collective: bool = False  # raised by a backend, inside a collective call
    of_node: bool = False  # `rank` is the rank on its node; the log does not show whether there are more nodes

    def number(self, key: str) -> int | None:
        """Return a field as a number; None if the line lacks it, or it exceeds any count."""
        text = self.fields.get(key, "")
        digits = text.removeprefix("-")
        return int(text) if digits.isdecimal() and len(digits) <= 18 and int(digits) < MAX_INT else None


@dataclass(slots=True)
class _Line:
    """One message, with all that is known of it."""

    path: Path
    number: int
    text: str
    who: Writer
    source: tuple[object, ...]  # what lines of one process have in common: tracebacks may be interleaved


@dataclass(slots=True)
class _Trace:
    """A traceback that is being printed."""

    frames: list[dict[str, object]] = field(default_factory=list)
    rank: int | None = None
    who: Writer | None = None  # of its first line
    margin: int = 0  # characters in front of each of its lines
    frame_at: int | None = None  # where the line before has its frame; the next line is source code
    uncaught: bool = False
    ignored: bool = False  # by Python, in a destructor


@dataclass
class Collected:
    """What all log files of a job contain.

    Attributes:
        ranks: Ranks that wrote a line, or that a line is about.
        world_size: The largest number of ranks that a line gives.
        recorded: What distdiag printed into the log, if it recorded the job.
        rank_of: Rank of a process, by its label and host, or its pid; None if several ranks have it.
        in_world: Rank of a process, by NCCL's label, in the largest communicator that its lines show, and its size.
    """

    facts: list[Fact] = field(default_factory=list)
    recorded: Recorded = field(default_factory=Recorded)
    unknown: deque[tuple[Path, int, str]] = field(default_factory=lambda: deque(maxlen=3))  # last lines like errors
    ranks: set[int] = field(default_factory=set)
    world_size: int | None = None
    left_out: int = 0  # runs and attempts in the files before those that are judged
    torchrun: bool = False  # torchrun started the ranks, so a task of srun is a node
    late: bool = False  # not all lines of a file were read in detail: it took too long
    files: list[Path] = field(default_factory=list)
    bad: list[tuple[str, str]] = field(default_factory=list)
    rank_of: dict[object, int | None] = field(default_factory=dict)
    in_world: dict[str, tuple[int, int]] = field(default_factory=dict)  # (size, rank)
    by_path: dict[Path, set[int]] = field(default_factory=dict)  # ranks named in the lines of a file
    of_nodes: set[Path] = field(default_factory=set)  # files that name ranks on their node

    def named(self, *names: str) -> list[Fact]:
        """Return the facts of these names."""
        return [f for f in self.facts if f.name in names]

    def is_rank_of(self, process: object, rank: int) -> None:
        """Note the rank of a process, which a line names together."""
        if process in self.rank_of:
            self.rank_of[process] = rank if self.rank_of[process] == rank else None
        elif len(self.rank_of) < MAX_WRITERS:
            self.rank_of[process] = rank


class Collector:
    """Reads files one after another; `result` has their contents."""

    def __init__(self, paths: Iterable[Path], wrapped: Mapping[Path, int] | None = None) -> None:
        self.result = Collected()
        self.paths = list(paths)
        self._bounds = lines.Bounds()
        self._wrapped = wrapped or {}  # the column at which a terminal wrapped the lines of a file
        self._of_one: dict[tuple[object, ...], int] = {}
        self._traces: dict[tuple[object, ...], _Trace] = {}
        self._stacks: dict[tuple[object, ...], list[dict[str, object]]] = {}
        self._times: dict[tuple[object, ...], tuple[str, float]] = {}  # of each process's newest line
        self._table = Tables()
        self._spawned: int | None = None
        self._ignored = -1
        self._section: int | None = None  # the rank whose lines follow
        self._run = (0, 0)
        self._loud = 0  # the last line with an error
        self._order = 0
        self._last_error: tuple[tuple[object, ...], int] | None = None  # whose line, and which, is NCCL's reason
        self._exceptions: dict[tuple[object, ...], Fact] = {}  # the last one of each process
        self._before: dict[tuple[object, ...], Fact] = {}  # the one that was being handled when the next was raised

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
            first, last = len(out.facts), 0
            try:
                if refused and str(path) in refused:
                    raise OSError(refused[str(path)])
                announce(str(path), path.stat().st_size)
                bounds.start(path)
                column = self._wrapped.get(path)
                for number, text in (
                    lines.lines(path, bounds) if column is None else lines.unwrapped(path, column, bounds)
                ):
                    for message, rank, pod in messages(plain(text)):
                        self._read_line(path, number, message[:MAX_MESSAGE], rank, pod)
                    last = number
            except OSError as e:
                out.bad.append((str(path), e.strerror or str(e)))
            if bounds.late:
                out.late = True
                out.bad.append(
                    (str(path), "only its first and last lines were read in detail: it has too many different errors")
                )
            self._end_rows(path, at_end=True)
            for fact in out.facts[first:]:
                fact.quiet_lines = last - self._loud
            out.facts[first:] = self._of_last_run(out.facts[first:])
            out.files.append(path)
            for of_file in (self._traces, self._exceptions, self._before, self._times):
                of_file.clear()
            self._spawned = self._section = None
            self._run, self._loud = (0, 0), 0
        for fact in out.named("timeout"):
            if fact.site is None and (stack := self._stacks.get(_source(fact.path, fact.who))):
                fact.site = user_site(stack)
        out.ranks |= set(filter(is_rank, bounds.ranks))
        announce(TOGETHER, 0)
        return out

    def _of_last_run(self, facts: list[Fact]) -> list[Fact]:
        """Return the facts of a file's last launch, and of its last attempt if that one failed by itself."""
        launches = {f.run[0] for f in facts if f.role is not Role.HINT}
        launch = max(launches, default=0)
        attempts = {f.run[1] for f in facts if f.run[0] == launch and f.role in (Role.CAUSE, Role.WAIT)}
        attempt = max(attempts, default=0)
        self.result.left_out += len(launches) - 1 + attempt if launches else 0
        return [f for f in facts if f.run[0] == launch and f.run[1] >= attempt]

    def _next_run(self, launch: bool) -> None:
        """Note that what follows is of another launch, or attempt, if this one has had an error."""
        if any(f.run == self._run for f in self.result.facts[-1:]):
            number, attempt = self._run
            self._run = (number + 1, 0) if launch else (number, attempt + 1)

    def _read_line(self, path: Path, number: int, text: str, rank: int | None, pod: str) -> None:
        self._order += 1
        out = self.result
        if MARK in text:
            out.recorded.add(text, number)
            return
        if _LOUD.search(text) is not None:
            self._loud = number
        who = writer(text)
        if rank is not None:
            who.rank = rank
        who.process = who.process or pod
        if (section := _SECTION.search(text)) is not None:
            named = section["r"] or section["of_file"]
            self._section = int(named) if named and "--End" not in text else None
        elif who.rank is None:
            who.rank = self._section
        if who.rank is not None and len(out.by_path) < MAX_WRITERS:
            out.by_path.setdefault(path, set()).add(who.rank)
            if who.process:
                out.is_rank_of((who.process, who.host), who.rank)
            if who.pid is not None:
                out.is_rank_of(who.pid, who.rank)
        if who.local is not None or " local_rank: " in text:
            out.of_nodes.add(path)
        out.torchrun = out.torchrun or who.by_torchrun
        line = _Line(path, number, text, who, _source(path, who))
        if who.at is not None and len(self._times) < MAX_WRITERS:
            self._times[line.source] = who.at
        if self._table.line(text, number):
            self._end_rows(path)
            if "Traceback (most recent call last)" in text:
                self._traces[line.source] = _Trace(rank=self._table.rank)
        elif text.rstrip().endswith("Last error:"):  # NCCL: the next line is the reason
            self._last_error = line.source, self._order + 1
        elif (found := _SPAWNED.search(text)) is not None:
            self._spawned = int(found[1])
        elif not self._of_traceback(line) and not self._ends_traceback(line):
            self._look_up(line)

    def _look_up(self, line: _Line) -> None:
        """Add the facts of the rows that fit a line."""
        text = line.text
        for row in TABLE:
            if row.needle in text and (m := row.regex.search(text)) is not None:
                if row.role in (Role.CAUSE, Role.VICTIM, Role.EXIT) and _told(text[: m.start()], row.role):
                    continue
                self._add(row.name, row.role, m.groupdict(), line)
                if row.role is not Role.FACT:
                    return
        if self._last_error == (line.source, self._order):
            self._add("nccl_warning", Role.HINT, {"what": _PREFIXES.sub("", text, count=1)[:200]}, line)
        elif not line.who.mild and _ERRORS.search(text):
            self.result.unknown.append((line.path, line.number, text.strip()[:200]))

    def _of_traceback(self, line: _Line) -> bool:
        """True if a line begins a traceback, or is a frame of one, or the source of a frame."""
        source, text = line.source, line.text
        if "Exception ignored in" in text:
            self._ignored = self._order
            return True
        if "Traceback (most recent call last)" in text:
            if len(self._traces) < MAX_WRITERS:
                other = _OF_RANK.search(text)
                rank = int(other[1]) if other else self._spawned
                self._traces[source] = _Trace(rank=rank, who=line.who, margin=text.index("Traceback ("))
                self._traces[source].ignored = self._order == self._ignored + 1
                self._traces[_source(line.path, Writer())] = self._traces[source]  # its other lines may have no prefix
                self._spawned = None
            return True
        if "above exception" in text and (earlier := self._exceptions.pop(source, None)) is not None:
            self._before[source] = earlier
            return True
        if "Stack trace of the failed" in text and len(self._stacks) < MAX_WRITERS:
            self._stacks[source] = []
            return True
        if "#" in text and source in self._stacks and (m := _CALL.search(text)) is not None:
            _keep_frame(self._stacks[source], m, innermost_first=True)
            return True
        if 'File "' in text and (m := _FRAME.search(text)) is not None:
            trace = self._traces.setdefault(source, _Trace()) if len(self._traces) < MAX_WRITERS else _Trace()
            anonymous = _source(line.path, Writer())
            if source != anonymous and self._traces.get(anonymous) is trace:
                del self._traces[anonymous]
            trace.uncaught = trace.uncaught or (not trace.frames and m["name"] in _OUTERMOST)
            trace.frame_at = text.index('File "')
            _keep_frame(trace.frames, m)
            return True
        trace = self._traces.get(source)
        if trace is not None and (m := _RICH.search(text)) is not None:
            trace.margin = 0
            _keep_frame(trace.frames, m)
            return True
        if trace is None or trace.frame_at is None:
            return False
        at, trace.frame_at = trace.frame_at, None
        return text[at - 2 : at + 2] == "    "

    def _ends_traceback(self, line: _Line) -> bool:
        """Add the exception in a line, with the traceback before it; True if there is one."""
        text, trace = line.text, self._traces.get(line.source)
        m = _EXCEPTION.search(text) if "Err" in text or "Exc" in text else None
        known = trace is not None and bool(trace.frames)
        if m is None and trace is not None and known:
            m = _ANY.search(text) or _ANY.match(text[trace.margin :])
        if m is None:
            return False
        trace = self._traces.pop(line.source, None) or _Trace()
        if trace.ignored:
            return True
        if trace.who is not None and line.source == _source(line.path, Writer()):
            line.who = replace(trace.who, at=line.who.at or trace.who.at)
        if trace.rank is not None:
            line.who = replace(line.who, rank=trace.rank)
        innermost = str(trace.frames[-1]["filename"]) if trace.frames else ""
        fact = self._exception(m, innermost, line)
        if fact is not None:
            fact.site = user_site(trace.frames[::-1])
            fact.uncaught = trace.uncaught
            fact.in_collective = innermost.endswith(_COLLECTIVE)
            earlier = self._before.pop(line.source, None)
            if earlier is not None and earlier.name == "exception" and fact.role is earlier.role is Role.CAUSE:
                self.result.facts.remove(earlier)  # one failure: the last exception is what the process ended with
            self._exceptions[line.source] = fact
        return True

    def _exception(self, m: re.Match[str], innermost: str, line: _Line) -> Fact | None:
        """Add an exception by the row for its message; by its type if it has no row and ended a traceback."""
        text = line.text
        for row in _FAILURES:
            if row.needle in text and (f := row.regex.search(text)) is not None:
                return self._add(row.name, row.role, f.groupdict(), line)
        short = m["type"].rpartition(".")[2]
        if not innermost or short in _FOLLOWERS or m["type"].endswith("Warning"):
            return None
        name, role = "exception", Role.CAUSE
        if short in ("DistBackendError", "DistNetworkError"):
            name, role = "dist_error", Role.VICTIM
        elif _INSIDE.search(innermost) is not None and LOST.search(text) is not None:
            name, role = ("dist_error" if short.startswith("Dist") else "lost"), Role.VICTIM
        return self._add(name, role, {"type": short, "what": (m["what"] or "")[:300]}, line)

    def _add(self, name: str, role: Role, groups: Mapping[str, str | None], line: _Line) -> Fact | None:
        out, who = self.result, line.who
        fields = {k: v for k, v in groups.items() if v is not None}
        if name in ("nccl_rank", "lightning"):
            self._size(int(fields["r"][:7]), int(fields["world"][:7]), who.process)
        elif name == "torchrun":
            out.torchrun = True
        elif name in ("restart", "launch"):
            self._next_run(name == "launch")
        if role is Role.FACT or (who.mild and role in (Role.CAUSE, Role.VICTIM, Role.START)):
            return None
        if any(len(v) > MAX_DIGITS and v.isdigit() for v in fields.values()):
            return None
        if name == "ended" and who.rank is not None:
            out.is_rank_of(int(fields.get("pid", "-1")), who.rank)
            out.is_rank_of((line.path, int(fields.get("local", "-1"))), who.rank)
        about = {int(fields[k]) for k in _RANK_FIELDS if fields.get(k, "").isdigit()}
        if not all(map(is_rank, about)):
            return None
        if name != "unique_id":  # there the numbers are those of the group
            out.ranks |= about
        kind = fields.get("type", "") + _DIGIT.sub("#", fields.get("what", "")[:60]) if name == "exception" else ""
        key = (name, kind, line.path, who.rank, who.process, who.task, who.group)
        seen = self._of_one[key] = self._of_one.get(key, 0) + 1
        if seen > MAX_OF_ONE or len(out.facts) >= MAX_FACTS:
            return None
        at = who.at or self._times.get(line.source)
        fact = Fact(name, role, fields, who, line.path, line.number, self._order, line.text[:500], at=at, run=self._run)
        out.facts.append(fact)
        return fact

    def _end_rows(self, path: Path, at_end: bool = False) -> None:
        """Add how processes ended, from a launcher's table of several lines."""
        for row in self._table.take(at_end):
            who = Writer(rank=row.rank, host=row.fields.get("host", ""), at=time_of(row.fields.get("time", "")))
            self._add("ended", Role.EXIT, row.fields, _Line(path, row.line, "", who, (path,)))

    def _size(self, rank: int, world: int, process: str) -> None:
        """Note the number of ranks, and the rank of a process, from the line of a communicator."""
        out = self.result
        if not (is_rank(rank) and rank < world <= MAX_RANKS):
            return
        out.world_size = max(out.world_size or 0, world)
        if process and len(out.in_world) < MAX_WRITERS:
            out.in_world[process] = max((world, rank), out.in_world.get(process, (0, 0)), key=itemgetter(0))


def _told(before: str, role: Role) -> bool:
    """True if a message is told, not given: in a sentence, a quotation, or a line of the program's log that is no error."""
    told = _PROSE.search(before)
    if told is not None and (role is not Role.EXIT or told[0][-1] in "\"'"):
        return True
    return role is Role.CAUSE and _MILD.search(before) is not None


def _keep_frame(frames: list[dict[str, object]], m: re.Match[str], innermost_first: bool = False) -> None:
    frames.append({"filename": m["filename"], "line": int(m["line"]), "name": m["name"] or ""})
    if len(frames) > MAX_FRAMES:
        del frames[-1 if innermost_first else 0]


def _source(path: Path, who: Writer) -> tuple[object, ...]:
    return path, who.rank, who.process, who.task, who.local
