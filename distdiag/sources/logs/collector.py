"""Reads the lines of all log files into facts: what happened, who wrote it, on which line. Bounded in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from distdiag.guard import TOGETHER, Announce, stored_bytes
from distdiag.sources.logs import ends, lines
from distdiag.sources.logs.facts import MAX_WRITERS, Collected, Fact, Line, source_of
from distdiag.sources.logs.gpu_memory import held_by_left
from distdiag.sources.logs.hosts import LASTING
from distdiag.sources.logs.learned import Learned
from distdiag.sources.logs.message import Pattern, Role
from distdiag.sources.logs.patterns import MESSAGES, TABLE
from distdiag.sources.logs.recorded import MARK, Recorded
from distdiag.sources.logs.tables import Tables, rank_of
from distdiag.sources.logs.tracebacks import PASSES_OVER, PREFIX, PROSE, Tracebacks
from distdiag.sources.logs.writers import Writer, messages, plain, time_of
from distdiag.terms.ranks import grouped
from distdiag.terms.untrusted import bounded, is_rank

MAX_FACTS = 50_000
MAX_OF_ONE = 8  # facts of one kind by one writer that are kept; the rest are counted
MAX_MESSAGE = 1 << 13  # characters of one message that are read
MAX_DIGITS = 20  # most digits of a number: no field has more

_RANK_FIELDS = ("a", "b", "r", "waiter", "awaited", "near")
_ERRORS = bounded(r"\b(?:(?:[A-Z]\w*)?(?:Error|Exception)|ERROR|FATAL|Fatal|Aborted)\b")
_MILD = bounded(r"(?<!NCCL )\b(?:WARN(?:ING)?|INFO|DEBUG)\b")  # levels of the program's own log
_STACK = ("frame #", "Exception raised from ")  # of C++: the message comes before it
_SECTION = bounded(
    r"-----(?:Begin|End) global rank (?P<r>\d+) STD|^==> \S{0,200}?(?:rank[-_.=]?(?P<of_file>\d+)\S*)? <=="
)
# `kubectl describe`: what follows is of one pod
_POD = bounded(
    r"^(?:Name:\s{2,40}(?P<pod>\S{1,253})\s*$|[$#] kubectl .{0,99}?\bdescribe pods?[ /](?P<of>\w[\w.-]{0,252})\b)"
)
_STATE = bounded(r"^\s{2,99}(?P<last>Last )?State:\s{2,40}(?P<state>\w+)")
# Horovod's stall inspector: a rank, and what the others wait for
_MISSING = bounded(r"(?:^|[:\s])(?P<ranks>\d{1,6}): \[(?P<tensors>[\w.][^\]]*)")
# torchrun writes the line
_OF_LAUNCHER = bounded(r"torch/distributed/(?:run|launcher/\w+|elastic/(?:agent|multiprocessing)/[\w/]+)\.py:\d")
# a process of vLLM or SGLang
_ENGINE = bounded(r"(?:Engine_?[Cc]ore|Worker[_ ](?:DP|PP|TP|EP)\d|VllmWorker|(?:DP|PP|TP|EP)\d)")
_STATE_LINES = 5
# a begin, or an end
_TURN = bounded(r"<\|(?:im_start|start_header_id)\|>(?P<who>\w{1,20})|<\|(?:im_end|eot_id|end_of_text)\|>")
_GOES_ON = (" exited on", "(stopped sending heartbeats):")  # of prterun, jax
# how Ray describes an actor that died, before it says how
_ACTOR = bounded(r"^\s{1,16}(?P<key>actor_id|pid|ip|name): \[?(?P<value>[\w.:]{1,60})")
_OF_VERL = bounded(r"_(?P<nth_node>\d{1,6}):(?P<on_node>\d{1,4})$")  # how it names its workers
_DIGIT = bounded(r"\d+")
_REPEATED = bounded(r" ?\[repeated (\d{1,7})x across cluster\]")  # by Ray, in the place of equal lines
_STOPS = ("cancelled", "preempted")  # in the order of time; LSF writes its report before the job's output
# an exception of torch_npu: a line before this one, and the codes of CANN after it
_NPU_HEAD = bounded(r"\(PID:(?P<pid>\d{1,9}), Device:\d{1,6}, RankID:\d{1,6}\) ERR\d|\bRankID:\d{1,6}\) ERR\d")
_NPU_CODE = bounded(r"^(?:[\w.-]{1,80}: )?E[A-Z]\d{4}: (?:\[PID: (?P<pid>\d{1,9})\])?")


class Collector:
    """Reads files one after another; `result` has their contents."""

    def __init__(self, paths: Iterable[Path], wrapped: Mapping[Path, int] | None = None) -> None:
        self.result = Collected()
        self.paths = list(paths)
        self._bounds = lines.Bounds()
        self._wrapped = wrapped or {}  # the column at which a terminal wrapped the lines of a file
        self._of_one: dict[tuple[object, ...], int] = {}
        self._learned = Learned(self.result, self._of_one)
        self._times: dict[tuple[object, ...], tuple[str, float]] = {}  # of each process's newest line
        self._table = Tables()
        self._tracebacks = Tracebacks(self.result, self._add)
        self._section: int | None = None  # the rank whose lines follow
        self._actor: dict[str, str] = {}
        self._earlier = 0  # of `kubectl describe`: the last line on a pod's earlier container
        self._missing: tuple[tuple[object, ...], int] = (), 0  # whose lines name missing ranks, and up to which
        self._of_launchers = False  # the numbers of ranks in front of the lines are those of launchers: of nodes
        self._order = 0
        self._sample = 0  # up to this line, at most, they are those of a sample
        self._begun = ""  # of a message that the next line continues
        self._of_npu: tuple[int | None, int] = None, 0  # the rank of an exception that the next line continues
        self._last_error: tuple[tuple[object, ...], int] | None = None  # whose line, and which, is NCCL's reason

    def read(
        self, announce: Announce = lambda _step, _bytes: None, refused: Mapping[str, str] | None = None
    ) -> Collected:
        """Return what the files contain, except those that `guard.judged` has refused."""
        out, bounds, left = self.result, self._bounds, ends.MOST_LINES
        for path in self.paths:
            first, number = len(out.facts), 0
            bounds.start(path)
            try:
                if refused and str(path) in refused:
                    raise OSError(refused[str(path)])
                announce(str(path), stored_bytes(path))
                for number, text in lines.lines(path, bounds, self._wrapped.get(path)):
                    for message, who in messages(plain(text)):
                        self._read_line(path, number, message[:MAX_MESSAGE], who)
            except OSError as e:
                out.bad.append((str(path), e.strerror or str(e)))
            if bounds.late:
                out.late = True
                why = "only its first and last lines were read in detail: it has too many different errors"
                out.bad.append((str(path), why))
            self._end_rows(path, at_end=True)
            # else it is wrapped
            new = [f for f in out.facts[first:] if f.name != "timeout_cut" or f.line + 1 >= number]
            out.facts[first:] = self._of_one_run(path, new)
            failed = min((f.line for f in out.facts[first:] if f.role not in (Role.FACT, Role.HINT)), default=None)
            left = out.ends[path].read(bounds.head, bounds.tail, failed, left)
            out.facts[first:] = self._since_stop(path, out.facts[first:])
            stopped = any(f.name == "cancelled" for f in out.facts[first:])
            retries = any(b"etry" in block for _, block in bounds.tail)
            if stopped or retries:
                out.ends[path].pace = ends.pace(bounds.tail)
            out.files.append(path)
            for pid, named in bounds.pids.items():
                if is_rank(named):
                    out.is_rank_of(pid, named)
            self._tracebacks.end_of_file()
            if path in out.recorded:
                out.recorded[path].flush()
            self._times.clear()
            self._sample = 0
            self._section, self._earlier, self._actor, self._of_npu = None, 0, {}, (None, 0)
            self._learned.pod, self._learned.begun_by, self._learned.run = "", "", (0, 0)
        for fact in out.named("timeout"):
            self._tracebacks.place(fact)
        out.ranks |= set(filter(is_rank, bounds.ranks))
        for host, ranks in bounds.on_host.items():
            out.on_host.setdefault(host, set()).update(filter(is_rank, ranks))
        announce(TOGETHER, 0)
        return out

    def _of_one_run(self, path: Path, facts: list[Fact]) -> list[Fact]:
        """Return the facts of a file's last launch, and of its last attempt that failed by itself, not by what one before left."""
        launches = {f.run[0] for f in facts if f.role is not Role.HINT}
        launch = max(launches, default=0)
        here = (f for f in facts if f.run[0] == launch and f.role in (Role.CAUSE, Role.WAIT))
        attempts = grouped((f.run[1], f) for f in here)
        follow = set[int]()
        attempt = max(attempts, default=0)
        while len(attempts) > 1 and (own := [f for f in attempts[attempt] if f.role is Role.CAUSE]):
            if not all(f.message.by_left or held_by_left(f, self.result) for f in own):
                break  # else it failed by processes of an earlier attempt, which have not ended
            follow.add(attempt)
            self.result.followed.insert(0, attempts.pop(attempt)[0])
            self.result.ends[path].restart = 0  # it did not help
            attempt = max(attempts)
        failed = {f.run for f in facts if f.role is not Role.HINT and f.run < (launch, attempt)}
        self.result.left_out += len(failed)
        causes = (f for f in facts if f.role in (Role.CAUSE, Role.STOP) and (f.run[0] < launch or f.run[1] < attempt))
        self.result.before += {f.run: f for f in reversed(list(causes))}.values()
        # a rerun is about an earlier run
        last = [f for f in facts if f.name == "rerun" or (f.run[0] == launch and f.run[1] not in follow)]
        return [f for f in last if f.name == "rerun" or f.run[1] >= attempt or not LASTING.isdisjoint(f.fields)]

    def _since_stop(self, path: Path, facts: list[Fact]) -> list[Fact]:
        """Return the facts after the last stop from outside after which the job was started again, and then failed."""
        for stop in (f for f in reversed(facts) if f.name in _STOPS):
            failed = [f.line for f in facts if f.line > stop.line and f.role not in (Role.FACT, Role.HINT)]
            if failed and self.result.ends[path].went_on(stop.line, min(failed)):
                self.result.left_out += 1
                self.result.before.append(stop)
                return [f for f in facts if f.line > stop.line]
        return facts

    def _read_line(self, path: Path, number: int, text: str, who: Writer) -> None:
        text = _without_count(text, who)
        if text.rstrip().endswith(_GOES_ON):  # the rest is on the next line
            self._begun = f"{text.rstrip()} "
            return
        text, self._begun = self._begun + text, ""
        self._order += 1
        out = self.result
        if MARK in text:
            out.recorded.setdefault(path, Recorded()).add(text, number)
            return
        if self._in_sample(text, number):
            return
        self._describe(text, number)
        if who.loose:
            self._of_launchers = self._of_launchers or _OF_LAUNCHER.search(text) is not None
            who.rank = None if self._of_launchers else who.rank
        who.process = who.process or (self._learned.pod if who.rank is None else "")
        if (section := _SECTION.search(text)) is not None:
            named = section["r"] or section["of_file"]
            self._section = int(named) if named and "--End" not in text else None
        elif who.rank is None:
            who.rank = self._section
        if "RankID:" in text or "[PID: " in text or self._of_npu[1]:
            self._exception_of_npu(text, number, who)
        if who.rank is not None:
            self._learn_rank(path, who, who.rank)
        if who.local is not None or " local_rank: " in text:
            out.of_nodes.add(path)
        out.per_node = out.per_node or who.by_torchrun
        line = Line(path, number, text, who, source_of(path, who), self._order)
        if who.at is not None and len(self._times) < MAX_WRITERS:
            self._times[line.source] = who.at
        self._learned.since_stop(line)
        if self._table.line(text, number):
            self._end_rows(path)
            if "Traceback (most recent call last)" in text:
                self._tracebacks.start(line.source, self._table.rank)
        elif text.rstrip().endswith("Last error:"):  # NCCL: the next line is the reason
            self._last_error = line.source, self._order + 1
        elif text.rstrip().endswith("Missing ranks:"):
            self._missing = line.source, self._order + lines.LINES_AFTER
        elif not self._tracebacks.belongs(line) and not self._tracebacks.ends(line):
            self._look_up(line)

    def _in_sample(self, text: str, number: int) -> bool:
        """True for the lines of a turn of a conversation in the data, which may quote a log; a model's own turn may lack its end."""
        inside = number <= self._sample
        if "<|" in text and (inside or PREFIX.sub("", text, count=1).startswith("<|")):
            turns = [m["who"] for m in _TURN.finditer(text)]
            if turns:
                self._sample = 0 if turns[-1] in (None, "assistant") else number + lines.NEAR_LINES
            return True
        return inside

    def _exception_of_npu(self, text: str, number: int, who: Writer) -> None:
        """Give all lines of an exception of torch_npu the rank that its second line names."""
        rank, until = self._of_npu
        self._of_npu = None, 0
        if (m := _NPU_HEAD.search(text)) is not None:
            if m["pid"] and who.rank is not None:
                self.result.is_rank_of(int(m["pid"]), who.rank)
            self._of_npu = who.rank, number + 1
            for f in self.result.facts[-1:]:
                if f.who.rank is None and f.line == number - 1 and "HCCL" in f.text:  # it is another one's
                    self._of_one.pop((f.name, "", f.path, None, f.who.process, f.who.task, f.who.group), None)
                    f.who = replace(f.who, rank=who.rank)
        elif (m := _NPU_CODE.match(text)) is not None and who.rank is None:
            of_pid = self.result.rank_of.get(int(m["pid"])) if m["pid"] else None
            who.rank = of_pid if of_pid is not None else rank if number == until else None

    def _learn_rank(self, path: Path, who: Writer, rank: int) -> None:
        """Note what else a line that shows its rank names: label, host, file, process."""
        out = self.result
        out.per_node |= who.task not in (None, rank)
        named: list[tuple[dict[Any, set[int]], object]]
        named = [(out.of_label, who.label), (out.on_host, who.host), (out.by_path, path)]
        for of_name, name in named:
            if name and len(of_name) < MAX_WRITERS:
                of_name.setdefault(name, set()).add(rank)
        if who.process:
            out.is_rank_of((who.process, who.host), rank)
        if who.pid is not None:
            out.is_rank_of(who.pid, rank)

    def _describe(self, text: str, number: int) -> None:
        """Note which pod or actor a description is of, and which lines are on a container that was restarted since."""
        if (m := _ACTOR.match(text)) is not None:
            if m["key"] == "actor_id":
                self._actor = {"actor_id": m["value"]}
            elif m["key"] == "name":
                self._actor |= named.groupdict() if self._actor and (named := _OF_VERL.search(m["value"])) else {}
            elif self._actor:
                self._actor["host" if m["key"] == "ip" else "pid"] = m["value"]
        if (m := _POD.match(text)) is not None:
            self._learned.pod, self._earlier = m["pod"] or m["of"], 0
        elif self._learned.pod and (m := _STATE.match(text)) is not None:
            self._earlier = number + _STATE_LINES if m["last"] and self._earlier < 0 else -(m["state"] != "Waiting")

    def _look_up(self, line: Line) -> None:
        text = line.text
        for row in TABLE:
            if row.needle in text and (m := row.regex.search(text)) is not None:
                if row.role is not Role.FACT and "│" in text[: m.start()]:
                    continue  # a panel of rich quotes a sample
                if row.role in (Role.CAUSE, Role.VICTIM, Role.EXIT) and _mentioned(text[: m.start()], row):
                    continue
                if row.role is Role.CAUSE and PASSES_OVER.search(text) is not None:
                    continue
                self._add(row.name, row.role, m.groupdict(), line)
                if row.role is not Role.FACT:
                    return
        source, until = self._missing
        if source == line.source and self._order <= until and (m := _MISSING.search(text)) is not None:
            self._missing = source, self._order + lines.LINES_AFTER
            self._add("horovod_stall", Role.WAIT, m.groupdict(), line)
        elif "Fatal Python error: Aborted" in text:  # its stack is that of the failure by which it aborted
            self._tracebacks.aborted(line)
        elif self._last_error == (line.source, self._order):
            self._add("nccl_warning", Role.HINT, {"what": PREFIX.sub("", text, count=1)[:200]}, line)
        else:
            mild = line.who.mild or "Warning: " in text or PREFIX.sub("", text, count=1).startswith(_STACK)
            if not mild and _ERRORS.search(text) and PASSES_OVER.search(text) is None:
                self.result.unknown.append((line.path, line.number, text.strip()[:200]))

    def _add(self, name: str, role: Role, groups: Mapping[str, str | None], line: Line) -> Fact | None:
        out, who = self.result, line.who
        fields = {k: v for k, v in groups.items() if v is not None}
        if name in ("lost_worker", "host_oom", "node_lost") and "pid" not in fields:
            keys = ("host",) if name == "node_lost" else ("host", "pid", "nth_node", "on_node")
            fields |= {key: self._actor[key] for key in keys if key in self._actor}
            self._actor = {}
        if role is Role.FACT:
            self._learned.take(name, fields, line)
            return None
        if "server" in fields and len(out.servers) < MAX_WRITERS:  # of a warning, too
            out.servers.add(fields["server"])
        if who.mild and role in (Role.CAUSE, Role.VICTIM, Role.START):
            return None
        if any(len(v) > MAX_DIGITS and v.isdigit() for v in fields.values()):
            return None
        if name == "ended" and who.rank is not None:
            out.is_rank_of(int(fields.get("pid", "-1")), who.rank)
            out.is_rank_of((line.path, int(fields.get("local", "-1"))), who.rank)
        about = {int(fields[k]) for k in _RANK_FIELDS if fields.get(k, "").isdigit()}
        if not all(map(is_rank, about)):
            return None
        if not (MESSAGES[name].of_group or "group" in fields):
            out.ranks |= about
        kind = fields.get("type", "") + _DIGIT.sub("#", fields.get("what", "")[:60]) if name == "exception" else ""
        kind = " ".join(fields) if name == "host_report" else fields["ranks"] if name.startswith("horovod_") else kind
        key = (name, kind, line.path, who.rank, who.process, who.task, who.group)
        if name == "lost_worker" and self._learned.shut.get(line.path, line.number) < line.number:
            return None  # its client reports the end of a process that was asked to exit
        if "what(): " in line.text and out.facts:  # the runtime of C++ prints the exception by which it ends again
            last, near = out.facts[-1], line.number - lines.LINES_AFTER
            if (last.name, last.fields, last.path) == (name, fields, line.path) and last.line >= near:
                return None
        seen = self._of_one[key] = self._of_one.get(key, 0) + 1
        if seen > MAX_OF_ONE or len(out.facts) >= MAX_FACTS:
            return None
        at, run = who.at or self._times.get(line.source), self._learned.run
        fact = Fact(name, role, fields, who, line.path, line.number, self._order, line.text[:500], at=at, run=run)
        if name in _STOPS or name == "node_lost":
            self._learned.stopped = line.path, self._learned.run
            self._learned.stopped_at = time_of(fields.get("when", ""))
        fact.engine = _ENGINE.match(who.process) is not None
        (out.past if role is Role.EXIT and line.number <= self._earlier else out.facts).append(fact)
        if name == "fatal":
            self._tracebacks.fatal(fact, line.source)
        if name.startswith("hccl_"):
            self._tracebacks.of_hccl(fact, line.source)
        return fact

    def _end_rows(self, path: Path, at_end: bool = False) -> None:
        """Add how processes ended, from a launcher's table of several lines."""
        for line, row in self._table.take(at_end):
            who = Writer(rank=rank_of(row), host=row.get("host", ""), at=time_of(row.get("time", "")))
            self._add("ended", Role.EXIT, row, Line(path, line, "", who, (path,), self._order))


def _without_count(text: str, who: Writer) -> str:
    """Return a line without Ray's count of those that it left out, which its writer gets."""
    if "x across cluster]" in text and (m := _REPEATED.search(text)) is not None:
        text, who.repeated = text[: m.start()], int(m[1])
    return text


def _mentioned(before: str, row: Pattern) -> bool:
    """True if a message is only mentioned: in a sentence, a quotation, or a line of the program's log that is no error."""
    prose = PROSE.search(before)
    if prose is not None and (row.role is not Role.EXIT or prose[0][-1] in "\"'"):
        return True
    return row.role is Role.CAUSE and not MESSAGES[row.name].whole_node and _MILD.search(before) is not None
