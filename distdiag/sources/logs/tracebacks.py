"""Reads tracebacks of several lines, of several processes at once: what was raised, and where; and the stacks of a fatal error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from distdiag.diagnosis.consequences import AWAITS_WORKERS, CONNECTION_LOST, OF_OTHERS
from distdiag.diagnosis.known_errors import OF_SHAPES, remedy
from distdiag.sources.dumps.entries import user_site
from distdiag.sources.logs.build import OF_NODE
from distdiag.sources.logs.facts import MAX_WRITERS, Collected, Fact, Line, source_of
from distdiag.sources.logs.meanings import LOG, LOGS
from distdiag.sources.logs.message import FOLLOWERS, Role
from distdiag.sources.logs.patterns import TABLE
from distdiag.sources.logs.writers import Writer
from distdiag.terms.untrusted import bounded, is_rank, numbers

MAX_FRAMES = 64  # most frames of one traceback

_FAILURES = tuple(row for row in TABLE if row.role is not Role.FACT)
_FRAME = re.compile(r'File "(?P<filename>[^"]{1,500})", line (?P<line>\d{1,7})(?:,? in (?P<name>.{1,200}))?\s*$')
# a frame of rich's tracebacks
_RICH = bounded(r"^\S* ?│ (?P<filename>/\S{1,400}):(?P<line>\d{1,7}) in (?P<name>\S{1,200})")
_CALL = bounded(r"#\d+ (?P<name>\S+) from (?P<filename>\S{1,500}):(?P<line>\d{1,7})\s*$")
_EXCEPTION = bounded(
    r"(?:^|[\]:|)]\s?)(?P<type>(?:[A-Za-z_]\w*\.){0,8}(?:_?[A-Z]\w*(?:Error|Exception|Expired|Killed|Timeout|Exit)))(?:: (?P<what>.*))?$"
)
# the end of a traceback whose frames were printed: any class
_ANY = bounded(r"(?:^\s{0,3}|[\]:|)]\s?)(?P<type>(?:[A-Za-z_]\w*\.){0,8}[A-Z]\w*)(?:: (?P<what>.*))?$")
_OUTERMOST = ("<module>", "_run_module_as_main")
# of a person, or quoted: no launcher starts a rank so; and an import, which a script began and whose error it caught
_NO_SCRIPT = bounded(r"^<(?:stdin|console|python-input-)|/__init__\.py$")
_OF_NCCL = bounded(r"\bnccl[A-Z]\w{2,40} failed: ")  # of a library that calls it, as torch's DistBackendError
_COLLECTIVE = "/torch/distributed/distributed_c10d.py"
_PIPE = "/multiprocessing/connection.py"  # its other end was closed: by a process that ended
_STARTS = ("/threading.py", "/multiprocessing/popen_fork.py", "/subprocess.py")  # of threads and processes
_NO_MORE = bounded(r"can't start new thread|Resource temporarily unavailable")
_SPAWNS = "the process that spawns the ranks"
# frames of processes that start ranks, and are none
_LAUNCHERS = {
    "/accelerate/commands/launch.py": "accelerate",  # runs torchrun's code
    "/torch/distributed/launcher/api.py": "torchrun",
    "/torch/distributed/run.py": "torchrun",
    "/torch/distributed/elastic/agent/server/api.py": "torchrun",
    "/deepspeed/launcher/runner.py": "deepspeed",
    "/torch/multiprocessing/spawn.py": _SPAWNS,
}
# files of inference engines
_ENGINE = bounded(
    r"/(?:vllm|sglang|tensorrt_llm|lmdeploy)/(?:\w{1,40}/){0,6}(?:engine|entrypoints|executor|worker|v1|srt|_torch|pytorch)/"
)
# functions that gather the parameters of all ranks, or save them with all ranks
_GATHERS = bounded(
    r"(?!\w{0,80}load)(?!\w{0,80}set_)\w{0,80}(?:state_dict|save_state|save_pretrained|save_16bit_model|save_fp16_model|summon_full_params|unshard_fsdp_state_params)\w{0,40}$"
)
# helpers in which one rank, most often rank 0, works first, and the others wait for it
_FIRST = bounded(r"\b\w{0,40}(?:main|master|process|zero|rank_?0)_first\b")
_PACKAGE = bounded(r"/(?:site|dist)-packages/(?!torch/)(\w{1,80})/")
_UNPICKLES = bounded(
    r" (?:_tensor_to_object|_?unpickler?|find_class)$|/(?:pickle|cloudpickle)\.py (?:load|loads|find_class)$|/torch/serialization\.py _?load$"
)
_INSIDE = bounded(r"/torch/(?:distributed|csrc|nn/parallel)/")
# torch puts it before the lines of an exception that nobody caught, as `grep Error` leaves them
_HOOK = bounded(r"\[rank\d{1,6}\]: $")
# functions that load a checkpoint of the job; and those that load the weights of a model that was fetched
_RESUMES = bounded(r"load_(?:\w{1,20}_)?(?:checkpoint|ckpt|optim)|(?:^|_)(?:resume|restore)")
_DOWNLOADED = bounded(r"from_pretrained|_and_dispatch")
PREFIX = bounded(r"^(?:\[[^\]]*\]:? ?){0,9}")
# a logger's line before the traceback of `logger.exception`
_ANNOUNCES = bounded(
    r"^(?=.{0,200}(?:\bERROR|\bCRITICAL|[Ee]xception)\b).{0,200}\b[Rr]ank[ =:]{0,2}(?P<rank>\d{1,6})\b"
)
# a line of the program's log that is no error: of logging, absl, loguru; not NCCL's
_WARNS = bounded(
    r"^(?!.{0,200}(?:ERROR|CRITICAL|NCCL WARN)).{0,80}?(?:\b(?:WARN(?:ING)?|INFO|DEBUG)\b|(?:^|[\]>|)] ?)[WI]\d{4} \d\d:\d\d:\d\d)"
)
_REPORTS = bounded(r"^.{0,200}\b(?:ERROR|CRITICAL|WARN(?:ING)?|[Ee]xception)\b")
# whatever its level: the program passes over what failed
PASSES_OVER = bounded(
    r"(?i:^(?=.{0,300}(?:error|exception|fail|could ?n[o']t|can ?not|can't|unable|corrupt|invalid|broken|bad\b)).{0,300}\b(?:skip(?:ped|ping|s)?|ignor(?:ed|ing|es)|falling back)\b)"
)
# of a barrier of JAX: the processes that did not come, one a line
_TASKS = bounded(r"(?:# of tasks that|The first task at|/job:\S{1,200}/task:(?P<task>\d{1,6})$)")
_SPAWNED = bounded(r"-- Process (\d{1,6}) terminated with the following error")
# what follows is its traceback
_RAY = bounded(r"\bray::[^\s(]{1,200}(?:\(\))? \(pid=(?P<pid>\d{1,9}), ip=(?P<ip>[\w.:]{3,60})")
_LISTED = bounded(r"ranks: ?dict_keys\(\[([\d, ]{1,900})\]")
_OF_RANK = bounded(r"\(RANK (\d{1,6})\)")  # a checkpoint's exception, of another rank
# exceptions by which a program asks what there is: the one that its handler raises shows more
_QUESTIONS = ("KeyError", "AttributeError", "IndexError", "StopIteration", "Empty")
# an open quotation in a sentence, a list or a call, a raise statement, or the middle of a sentence
PROSE = bounded(r"(?:\w |[\[{,] ?|[a-z_]\()[\"'](?=[^\"']{0,400}$)|\braise \w|[a-z] $")
LINES_BEFORE = 8  # that a GPU's runtime prints between its error and the abort
# the frames that faulthandler prints, innermost first; of the thread that failed, or of another one
_THREAD = bounded(r"(?P<current>Current thread|Thread) 0x[0-9a-f]+.{0,80}\(most recent call first\)")


@dataclass(slots=True)
class _Trace:
    """A traceback that is being printed."""

    frames: list[dict[str, object]] = field(default_factory=list)
    rank: int | None = None
    who: Writer | None = None  # of its first line
    at: tuple[str, float] | None = None  # of the line before it
    margin: int = 0  # characters in front of each of its lines
    frame_at: int | None = None  # where the line before has its frame; the next line is source code
    uncaught: bool = False
    ignored: bool = False  # by Python, in a destructor
    passed_on: bool = False  # by Ray, to the process that called it
    warned: bool = False  # it follows a warning of the program's log
    logged: bool = False  # it follows an error of the program's log
    fatal: Fact | None = None  # it is the stack of this error, innermost frame first
    other_thread: bool = False


class Tracebacks:
    """Reads the tracebacks of one file at a time.

    Args:
        add: Adds a fact of a line; None if it is none, or one too many.
    """

    def __init__(
        self, found: Collected, add: Callable[[str, Role, Mapping[str, str | None], Line], Fact | None]
    ) -> None:
        self._found, self._add = found, add
        self._traces: dict[tuple[object, ...], _Trace] = {}
        self._stacks: dict[tuple[object, ...], list[dict[str, object]]] = {}
        self._fatal: dict[tuple[object, ...], Fact] = {}  # the fatal error of each process, until its stack was read
        self._spawned: int | None = None
        # of a checkpoint's exception: the ranks that it lists, those whose tracebacks it has, and what these raised
        self._listed, self._of_rank, self._raised = set[int](), set[int](), list[Fact]()
        self._announced = -1, -1  # the rank that a logger's line reports to have failed, and which line
        self._ignored = -1  # the line before a traceback
        self._warned: tuple[tuple[object, ...], int] = (), -1  # whose line, and which, is before a traceback
        # the last report of an error: its source, line and time
        self._timed: tuple[object, int, tuple[str, float] | None] = None, -1, None
        self._exceptions: dict[tuple[object, ...], Fact] = {}  # the last one of each process
        self._unended: dict[tuple[object, ...], tuple[Fact, int]] = {}  # exceptions whose message ends with a colon
        self._before: dict[tuple[object, ...], Fact] = {}  # the one that was being handled when the next was raised

    def start(self, source: tuple[object, ...], rank: int | None) -> None:
        """Begin a traceback in a launcher's table."""
        self._traces[source] = _Trace(rank=rank)

    def end_of_file(self) -> None:
        """Forget what belongs to the lines of one file."""
        for of_file in (self._traces, self._exceptions, self._before, self._fatal, self._unended):
            of_file.clear()
        self._spawned = None
        for f in [f for f in self._raised if f in self._found.facts][:1]:
            rest = self._listed - self._of_rank - {f.rank for f in self._found.facts if f.name == "exception"}
            self._found.facts += [replace(f, who=replace(f.who, rank=rank), inferred=True) for rank in sorted(rest)]
        self._listed, self._of_rank, self._raised = set(), set(), []

    def place(self, timeout: Fact) -> None:
        """Set where a collective was called, by the stack that its watchdog printed."""
        stack = self._stacks.get(source_of(timeout.path, timeout.who), [])
        timeout.site = timeout.site or user_site(stack)
        timeout.within = timeout.within or _helper(stack)
        timeout.saves = timeout.saves or _gathers(reversed(stack))

    def fatal(self, fact: Fact, source: tuple[object, ...]) -> None:
        """Note a fatal error: its stack may follow."""
        self._fatal[source] = fact

    def aborted(self, line: Line) -> None:
        """Note a process that aborts: the stack that follows is that of the failure which it has just reported."""
        f = next(reversed(self._found.facts), None)
        near = f is not None and source_of(f.path, f.who) == line.source and line.number - f.line <= LINES_BEFORE
        if f is not None and near and f.role is Role.CAUSE and f.site is None:
            self._fatal[line.source] = f

    def of_hccl(self, fact: Fact, source: tuple[object, ...]) -> None:
        """Set where a process waited in HCCL, by the exception that it printed before the reason."""
        raised = self._exceptions.get(source)
        if raised is not None and "HCCL" in raised.text:
            fact.site, fact.within = raised.site, raised.within

    def belongs(self, line: Line) -> bool:
        """True if a line begins a traceback, or is a frame of one, or the source of a frame."""
        return self._goes_on(line) or self._begins(line) or self._in_stack(line) or self._is_frame(line)

    def _goes_on(self, line: Line) -> bool:
        """True if the line continues the message of an exception."""
        unended, order = self._unended.pop(line.source, (None, -2))
        others = LINES_BEFORE * (line.source != _anonymous(line))  # of other ranks, between lines that name theirs
        if unended is None or line.order - order > len(self._traces) + 1 + others:
            return False
        text = PREFIX.sub("", line.text).strip()
        if unended.name == "jax_barrier":
            if (m := _TASKS.match(text)) is None:
                return False
            unended.fields["ranks"] = f"{unended.fields.get('ranks', '')} {m['task'] or ''}".strip()
            self._unended[line.source] = unended, line.order
            return True
        unended.fields["what"] += f" {text}"[:300]
        return True

    def _begins(self, line: Line) -> bool:
        """True if the line begins a traceback, or announces one."""
        source, text = line.source, line.text
        if "Exception ignored in" in text:
            self._ignored = line.order
            return True
        if "Traceback (most recent call last)" in text:
            if len(self._traces) < MAX_WRITERS:
                self._traceback(line)
            return True
        if "ray::" in text and (m := _RAY.search(text)) is not None and len(self._traces) < MAX_WRITERS:
            there = replace(line.who, pid=int(m["pid"]), process=f"process {m['pid']} on {m['ip']}")
            self._traces[source] = self._traces[_anonymous(line)] = _Trace(who=there, passed_on=True)
            return True
        if "above exception" in text and (earlier := self._exceptions.pop(source, None)) is not None:
            self._before[source], earlier.direct = earlier, "direct cause" in text
            return True
        if _REPORTS.search(text) is not None:
            self._timed = source, line.order, line.who.at
        if "ank" in text and (of_logger := _ANNOUNCES.search(text)) is not None:
            self._announced = int(of_logger["rank"]), line.order
        if _WARNS.search(text) is not None or PASSES_OVER.search(text) is not None:
            self._warned = source, line.order
        if (found := _SPAWNED.search(text)) is not None:
            self._spawned = int(found[1])
            return True
        return False

    def _traceback(self, line: Line) -> None:
        other = _OF_RANK.search(line.text)
        rank = int(other[1]) if other else self._spawned
        if other and rank is not None:
            self._of_rank.add(rank)
        if rank is None and line.who.rank is None and self._announced[1] == line.order - 1:
            rank = self._announced[0]
        trace = _Trace(rank=rank, who=line.who, margin=line.text.index("Traceback ("))
        if self._timed[:2] == (line.source, line.order - 1):  # of the program's own log, which has this traceback
            trace.at, trace.logged = self._timed[2], True
        trace.ignored = line.order == self._ignored + 1
        by, warned_at = self._warned
        if line.order == warned_at + 1:  # unless both sources name a process, and not the same one
            trace.warned = all(x == y or {x, y} & {None, ""} for x, y in zip(by, line.source, strict=True))
        self._traces[line.source] = self._traces[_anonymous(line)] = trace  # its other lines may have no prefix
        self._spawned = None

    def _in_stack(self, line: Line) -> bool:
        """True if the line begins the stack of a thread or of C++, or is a frame of the latter."""
        source, text = line.source, line.text
        if source in self._fatal and "(most recent call first)" in text and (m := _THREAD.search(text)) is not None:
            self._traces[source] = _Trace(fatal=self._fatal[source], other_thread=m["current"] == "Thread")
            return True
        if "Stack trace of the failed" in text and len(self._stacks) < MAX_WRITERS:
            self._stacks[source] = self._stacks[_anonymous(line)] = []  # its other lines may have no prefix
            return True
        if "#" in text and source in self._stacks and (m := _CALL.search(text)) is not None:
            _keep_frame(self._stacks[source], m, innermost_first=True)
            return True
        return False

    def _is_frame(self, line: Line) -> bool:
        """True if the line is a frame of a traceback, or the source of a frame."""
        source, text = line.source, line.text
        if 'File "' in text and (m := _FRAME.search(text)) is not None:
            trace = self._traces.setdefault(source, _Trace()) if len(self._traces) < MAX_WRITERS else _Trace()
            anonymous = _anonymous(line)
            if source != anonymous and self._traces.get(anonymous) is trace:
                del self._traces[anonymous]
            outermost = m["name"] in _OUTERMOST and not _NO_SCRIPT.search(m["filename"])
            trace.uncaught = trace.uncaught or (not trace.frames and outermost)
            trace.frame_at = text.index('File "')
            _keep_frame(trace.frames, m, innermost_first=trace.fatal is not None)
            if trace.fatal is not None and not trace.other_thread:
                trace.fatal.site = user_site(trace.frames)
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

    def ends(self, line: Line) -> bool:
        """Add the exception in a line, with the traceback before it; True if there is one."""
        text, source = line.text, line.source
        if source not in self._traces and _EXCEPTION.match(text):  # its message names the rank, its frames do not
            source = _anonymous(line)
        trace = self._traces.get(source)
        m = _EXCEPTION.search(text) if "Err" in text or "Exc" in text else None
        known = trace is not None and bool(trace.frames)
        if m is None and trace is not None and known:
            m = _ANY.search(text) or _ANY.match(text[trace.margin :])
        if m is None:
            return False
        trace = self._traces.pop(source, None) or _Trace()
        if trace.ignored:
            return True
        if trace.fatal is not None:
            return False
        if trace.who is not None and (trace.passed_on or line.source == _anonymous(line)):
            line.who = replace(trace.who, at=line.who.at or trace.who.at)
        if trace.at is not None and line.who.at is None:
            line.who = replace(line.who, at=trace.at)
        if trace.rank is not None:
            line.who = replace(line.who, rank=trace.rank)
        innermost = str(trace.frames[-1]["filename"]) if trace.frames else ""
        fact = self._exception(m, innermost, line)
        if fact is not None:
            fact.site = user_site(trace.frames[::-1])
            fact.within, fact.saves = _helper(trace.frames), _gathers(trace.frames)
            if trace.rank in self._of_rank and fact.role is Role.CAUSE:
                self._raised.append(fact)
            if (launcher := _launcher(trace.frames)) and fact.who.rank is None and not fact.who.process:
                self._found.per_node = self._found.per_node or launcher in OF_NODE
                of_task = "" if fact.who.task is not None else launcher
                fact.who, fact.site = replace(fact.who, process=of_task), fact.site if launcher == _SPAWNS else None
            fact.uncaught, fact.warned, fact.logged = trace.uncaught, trace.warned, trace.logged
            fact.engine = fact.engine or any(_ENGINE.search(str(frame["filename"])) for frame in trace.frames)
            fact.package = m[1] if (m := _PACKAGE.search(innermost)) is not None else ""
            fact.unpickles = any(_UNPICKLES.search(f"{frame['filename']} {frame['name']}") for frame in trace.frames)
            names = [str(frame["name"]) for frame in trace.frames]
            fact.resumes = any(map(_RESUMES.search, names)) and not any(map(_DOWNLOADED.search, names))
            fact.in_collective = innermost.endswith(_COLLECTIVE)
            fact.in_backward = innermost.endswith(("/torch/autograd/graph.py", "/torch/autograd/__init__.py"))
            fact.serves = innermost.endswith("/torch/distributed/rendezvous.py")
            earlier = self._before.pop(line.source, None)
            if earlier is not None and fact.role is earlier.role is Role.CAUSE:
                fact = self._chained(earlier, fact)
            if fact.name == "jax_barrier" or (fact.name == "exception" and fact.fields.get("what", "").endswith(":")):
                self._unended[line.source] = fact, line.order
            self._exceptions[line.source] = fact
        return True

    def _chained(self, earlier: Fact, fact: Fact) -> Fact:
        """Return which of two exceptions counts, the second of which was raised while the first was handled.

        The first one is the reason; one of a known kind counts more than any other, and one with its own remedy more than one of shapes.
        """
        if earlier.name != "exception" and (fact.name in ("exception", earlier.name) or not earlier.direct):
            self._found.facts.remove(fact)
            earlier.site, earlier.uncaught = earlier.site or fact.site, fact.uncaught
            return earlier
        self._found.facts.remove(earlier)  # one failure: the process ended with the last exception
        if earlier.name != "exception" or fact.name != "exception":
            return fact
        fact.warned = fact.warned or earlier.warned
        first, last = (f"{f.fields['type']}: {f.fields['what']}".removesuffix(": ") for f in (earlier, fact))
        fact.site = earlier.site or fact.site
        named = remedy(first, "") == OF_SHAPES != remedy(last, OF_SHAPES)
        if earlier.direct or named or earlier.fields["type"] in _QUESTIONS:
            fact.fields["cause"] = earlier.fields.get("cause", first)
        elif first != last:
            fact.fields, fact.text = earlier.fields | {"then": last}, earlier.text
        return fact

    def _exception(self, m: re.Match[str], innermost: str, line: Line) -> Fact | None:
        """Add an exception by the row for its message; by its type if it has no row, and ended a traceback or was not caught."""
        text = line.text
        for row in _FAILURES:
            if row.needle in text and (f := row.regex.search(text)) is not None:
                prose = PROSE.search(text[: f.start()])
                if prose is None or prose[0][-1] not in "\"'":  # else in quotes, in the text of another exception
                    return self._add(row.name, row.role, f.groupdict(), line)
        short = m["type"].rpartition(".")[2]
        if short == FOLLOWERS[0] and (listed := _LISTED.search(text)) is not None:
            self._listed |= set(filter(is_rank, numbers(listed[1])))
        if short in FOLLOWERS or short.endswith("Warning"):
            return None
        if not (innermost or (_HOOK.search(text[: m.start("type")]) and not PASSES_OVER.search(text))):
            return None
        name, role = "exception", Role.CAUSE
        if innermost.endswith(_STARTS) and _NO_MORE.search(text) is not None:
            return self._add("thread_limit", role, {"what": f"{short}: {m['what']}"}, line)
        if (
            short in ("DistBackendError", "DistNetworkError")
            or _OF_NCCL.search(text)
            or OF_OTHERS.search(text) is not None
        ):
            name, role = "dist_error", Role.VICTIM
        elif short == "TimeoutError" and innermost.endswith(AWAITS_WORKERS):
            name, role = "rpc_late", Role.WAIT
        elif innermost.endswith(_PIPE) and short in ("EOFError", "ConnectionResetError", "BrokenPipeError"):
            name, role = "pipe_lost", Role.VICTIM
        elif _INSIDE.search(innermost) is not None and CONNECTION_LOST.search(text) is not None:
            name, role = ("dist_error" if short.startswith("Dist") else "lost"), Role.VICTIM
        return self._add(name, role, {"type": short, "what": (m["what"] or "")[:600]}, line)


def _anonymous(line: Line) -> tuple[object, ...]:
    """Return the source of a line that has only its launcher's label."""
    return source_of(line.path, Writer(label=line.who.label))


def _helper(frames: Iterable[dict[str, object]]) -> str:
    """Return the function on a stack in which one rank goes first; empty if there is none."""
    return next((m[0] for frame in frames if (m := _FIRST.search(str(frame["name"]))) is not None), "")


def _gathers(frames: Iterable[dict[str, object]]) -> str:
    """Return the outermost function on a stack, the outermost frame first, that gathers, saves or logs with all ranks; empty if there is none."""
    names = (LOG if frame["name"] in LOGS else str(frame["name"]) for frame in frames)
    return next((name for name in names if name == LOG or _GATHERS.match(name) is not None), "")


def _launcher(frames: Sequence[dict[str, object]]) -> str:
    """Return what the process is, if it raised an exception while it started the ranks; else empty."""
    if any(frame["name"] in ("_wrap", "join") for frame in frames):  # in the child, or of one
        return ""
    files = [str(frame["filename"]) for frame in frames]
    return next((name for end, name in _LAUNCHERS.items() if any(f.endswith(end) for f in files)), "")


def _keep_frame(frames: list[dict[str, object]], m: re.Match[str], innermost_first: bool = False) -> None:
    frames.append({"filename": m["filename"], "line": int(m["line"]), "name": m["name"] or ""})
    if len(frames) > MAX_FRAMES:
        del frames[-1 if innermost_first else 0]
