"""Drop failures after which the process or job went on.

Progress and words that the job ended well come after a failure that was caught, retried, restarted from, or only quoted: such a
failure is a note, not a finding. How launchers report an end counts more.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from distdiag.sources.logs.ends import FEW, NO_NAME, FileEnd, names_of
from distdiag.sources.logs.facts import Collected, Fact
from distdiag.sources.logs.join import KERNEL, active_again
from distdiag.sources.logs.message import Role
from distdiag.sources.logs.writers import Time, apart
from distdiag.terms.ranks import grouped
from distdiag.terms.untrusted import MAX_INT, bounded

OWN_LINES, NAMELESS = 1, 3  # lines of progress after which a failure is past: of its process, of no name
SURVIVED = 3  # different exceptions that end their programs, and not the job
# a job that goes on for so long after an event of its node has survived it; a timeout that follows from one is reported no later
SURVIVED_S, REPORTED_S = 600.0, 3600.0
# clocks without a zone differ by up to so much, in such steps; progress is shown so late
ZONES_S, ZONE_S, SHOWN_S = 14 * 3600.0, 1800.0, 300.0
_PENDING = bounded(r"nodes are available|pull")  # what a scheduler of pods reports, and tries again
_FOLLOW = (Role.WAIT, Role.VICTIM, Role.START, Role.EXIT)
_ENDS = (Role.CAUSE, *_FOLLOW)
_OF_PROCESS = ("exit", "process", "server")  # words of an end that say nothing of the job
Ends = Mapping[Path, FileEnd]


class _Last:
    """The last lines that show how files and processes ended."""

    def __init__(self, facts: Sequence[Fact], ends: Ends) -> None:
        self.last: dict[object, int] = {}  # by file, and by file and process
        exits = [f for f in facts if f.role is Role.EXIT]
        self.exits = {name for f in exits for name in (f.rank, f.number("pid"))} - {None}
        self.exit = {f.path for f in exits}
        self.began = _begins(facts, ends)
        for f in (f for f in facts if f.role in _ENDS):
            own = [(f.path, name) for name in names_of(f.who, f.rank)] if f.role is not Role.EXIT else []
            for key in (f.path, *own):
                self.last[key] = max(f.line, self.last.get(key, 0))

    def after(self, key: object, line: int) -> bool:
        """True if a failure comes after a line."""
        return self.last.get(key, 0) > line


def _begins(facts: Sequence[Fact], ends: Ends) -> dict[Path, int]:
    """Return the line of each file at which its last run begins: steps follow after a launcher has reported its ranks' end.

    Ranks that wait or lose a connection later may be of the same run.
    """
    out: dict[Path, int] = {}
    failed: dict[Path, Fact] = {}  # the next failure, read backward
    for f in sorted((f for f in facts if f.role in _ENDS), key=lambda f: -f.line):
        after, end = failed.get(f.path), ends[f.path]
        failed[f.path] = f
        if f.role is not Role.EXIT or after is None or after.role not in (Role.CAUSE, Role.EXIT) or f.path in out:
            continue
        few = any(end.between(f.line, after.line, name) >= FEW for name in end.progress if name)
        if (f.message.of_ranks and few) or end.went_on(f.line, after.line):
            out[f.path] = f.line + 1
    return out


def split(found: Collected) -> tuple[list[Fact], list[Fact]]:
    """Return (facts that count, failures that are past): the process or the job went on after them, or ended well."""
    # a scheduler reports that a request waits, in the log of a job that ran: Ray starts all its ranks at once
    ends, stepped = found.ends, found.steps
    waited = {id(f) for f in found.named("not_started") if stepped and _PENDING.search(f.fields["what"]) is not None}
    waited |= {id(f) for f in found.named("not_scheduled") if stepped or found.ranks}
    found.facts = [f for f in found.facts if id(f) not in waited]
    facts = [f for f in found.facts if f.role in _ENDS or f.role is Role.STOP]
    last = _Last(facts, ends)
    job = any("job" in end.well and not last.after(path, end.well["job"]) for path, end in ends.items())
    past = {id(f) for f in facts if job or _ended_well(f, ends[f.path], last) or _went_on(f, ends[f.path], last)}
    past |= _of_programs(facts, ends)
    # the files that only the kernel or the host of a node writes: no rank, no step and no other failure is in them
    with_steps = {path for path, end in ends.items() if end.progress}
    of_job = {f.path for f in facts if not f.message.of_node} | with_steps | found.by_path.keys()
    own = {f.path for f in facts if ends[f.path].over is None} - of_job
    for f in (f for f in facts if f.path in own):
        f.of_host = True
        past |= {id(f)} if _outlived(f, ends, own) else set()
    left = [f for f in facts if id(f) not in past]
    past |= {id(f) for f in left if active_again(f, left)}
    left = [f for f in left if id(f) not in past]
    named = [f for f in left if f.role in _FOLLOW and names_of(f.who, f.rank) != [NO_NAME]]
    final = [f for f in named if not ends[f.path].went_on(f.line)]  # the job ended with these, or hung
    over: dict[Path, int] = {}  # the line at which a launcher saw a run end, before the last one
    of_ranks = with_steps & found.of_file.keys()
    finals = grouped((f.path, f.line) for f in final)
    causes = {f.path: f.line for f in sorted(left, key=lambda f: f.line) if f.role is Role.CAUSE}  # the last ones
    for f in (f for f in left if f.role is not Role.STOP):
        end, until = ends[f.path], min((line for line in finals.get(f.path, ()) if line >= f.line), default=None)
        elsewhere = of_ranks - {f.path} if not final and f.path in found.of_file else set[Path]()
        progress = elsewhere or end.after(f.line) or (f.of_host and with_steps)
        f.doubtful = end.went_on(f.line, until) if final else bool(progress) and not f.uncaught
        if final and f.doubtful and f.role is Role.CAUSE:
            # of no known process, or long before the last cause: it did not end the job, which went on after it
            newest = causes.get(f.path, 0)
            if names_of(f.who, f.rank) == [NO_NAME] or (newest > f.line and end.went_on(f.line, newest)):
                past.add(id(f))
        if not final and (_others_went_on(f, end, last) or any(_survived(f.who.at, ends[p]) for p in elsewhere)):
            past.add(id(f))
            if f.role is Role.EXIT and end.went_on(f.line):
                over[f.path] = max(f.line, over.get(f.path, 0))
    past |= {id(f) for f in left if f.line <= over.get(f.path, 0)}
    of_kernel = {id(f) for f in facts if f.path in own or KERNEL.search(f.text) is not None}
    last = _Last([f for f in facts if id(f) not in of_kernel], ends)
    others = [(path, end) for path, end in ends.items() if path not in own]
    parts = ((p, line) for p, end in others for scope, line in end.well.items() if scope not in _OF_PROCESS)
    well = any(not last.after(p, line) for p, line in parts) or any(end.over and end.over[0] for _, end in others)
    if well and past | of_kernel >= {id(f) for f in facts}:
        for f in (f for f in facts if id(f) not in past):
            f.of_host = True
        past |= of_kernel
    for f in (f for f in facts if id(f) in past):
        f.doubtful = not ends[f.path].went_on(f.line) and not any(_survived(f.at, end) for end in ends.values())
    return [f for f in found.facts if id(f) not in past], [f for f in facts if id(f) in past]


def _of_programs(facts: Sequence[Fact], ends: Ends) -> set[int]:
    """Return the exceptions of programs that the job runs, as its tasks or tests, where each may end by an exception.

    No process of the job has their number: it comes further between different ones, and after them. Ranks that fail one after
    another leave the others in the same step.
    """
    raised = (f for f in facts if f.name == "exception" and f.uncaught and names_of(f.who, f.rank) == [NO_NAME])
    out = set[int]()
    for path, own in grouped((f.path, f) for f in raised).items():
        moved = [-line for line, _ in ends[path].moved]
        until = [*(f.line for f in own[1:]), MAX_INT]
        lasted = [f for f, end in zip(own, until, strict=True) if any(f.line < line < end for line in moved)]
        lasted += [f for f in own if ends[path].went_on(f.line)]
        if len({(f.fields["type"], f.site) for f in lasted}) >= SURVIVED:
            out |= {id(f) for f in lasted}
    return out


def name_shared_stores(found: Collected) -> None:
    """Add to a rendezvous that was lost the line by which its launcher could not serve it: it trained with the store of another one.

    torchrun serves the store of its c10d rendezvous; if the port is in use, it becomes a client of the process that has it.
    """
    for taken in [f for f in (*found.facts, *found.past) if f.name == "port_in_use"]:
        lost = [f for f in found.named("keep_alive", "rendezvous") if "ConnectionError" in f.text]
        lost = [f for f in lost if f.path == taken.path and f.line > taken.line]
        if lost and found.ends[taken.path].between(taken.line, min(f.line for f in lost)):
            for f in lost:
                f.fields.setdefault("taken", f"{taken.line:,}")
            for facts in (found.facts, found.past):
                facts[:] = [f for f in facts if (f.name, f.path) != (taken.name, taken.path)]


def _outlived(f: Fact, ends: Ends, own: Collection[Path]) -> bool:
    """True if the job began later than an event of its node, or survived it, by the times in the lines."""
    if (at := f.who.at) is None:
        return False
    others = [end for path, end in ends.items() if path not in own]
    begins = [end.begins for end in others if end.begins is not None]
    began = min((apart(at, t) for t in begins), default=0.0)
    zoned = at[0] == "utc" and all(t[0] == "utc" for t in begins)
    f.early = began > REPORTED_S + ZONES_S * (not zoned)
    return f.early or any(_survived(at, end, zoned) for end in others)


def _survived(at: Time | None, end: FileEnd, zoned: bool = True) -> bool:
    """True if a file shows progress for so long after a failure that the job survived it.

    With other zones than the lines seem to have (not `zoned`), it may be what the last line was followed by.
    """
    apart_s = [apart(at, t) for t in end.times if not zoned or t[0] == at[0]] if at is not None else []
    if len(apart_s) < FEW or apart_s[FEW - 1] <= 0 or apart_s[0] < SURVIVED_S:  # the last line comes first
        return False
    before_s = max(SHOWN_S, 2 * max(new - old for new, old in itertools.pairwise(apart_s)))
    fits = (apart_s[0] + before_s) % ZONE_S < before_s + SHOWN_S
    return zoned or not fits or apart_s[0] > ZONES_S + before_s


def _ended_well(f: Fact, end: FileEnd, last: _Last) -> bool:
    """True if the lines after a failure say that the job, or its file's part of it, ended well; or that it was started again."""
    for scope in ("file", "part", "process"):
        line = end.well.get(scope, 0)
        elsewhere = last.exit if scope == "process" else last.exit - {f.path}
        if line > f.line and not last.after(f.path, line) and not elsewhere:
            return True
    served = end.after(f.line) > 0 and not (f.uncaught or last.exit)  # one whose engine failed stops so, too
    if served and (line := end.well.get("server", 0)) > f.line and not last.after(f.path, line):
        return True
    if "agent" in end.well and f.role in (Role.VICTIM, Role.START) and f.who.rank is None:
        return True
    again = max(end.restart, last.began.get(f.path, 0))
    if again == last.began.get(f.path) and f.line < again:
        return True
    return again > f.line and not last.after(f.path, again) and end.after(again) > 0


def _went_on(f: Fact, end: FileEnd, last: _Last) -> bool:
    """True if the process that failed made progress later, and its end, if it is known, has another reason."""
    if f.uncaught or f.role is Role.STOP:
        return False
    if f.warned and end.after(f.line):
        return True
    for name in names_of(f.who, f.rank):
        if name != NO_NAME and end.after(f.line, name) >= OWN_LINES:
            if f.role is Role.EXIT:
                return True
            ended = f.rank in last.exits or f.who.pid in last.exits
            return not ended or end.between(f.line, last.last[f.path, name], name) > 0
    return False


def _others_went_on(f: Fact, end: FileEnd, last: _Last) -> bool:
    """True if any process made more progress than the job can without the one that failed."""
    if f.logged and f.rank is None and not f.uncaught and end.after(f.line) >= NAMELESS:
        return True
    if names_of(f.who, f.rank) != [NO_NAME]:
        return end.went_on(f.line)
    nameless = not last.exit and end.after(f.line, NO_NAME) >= NAMELESS
    # one that seems to have ended its process may be of a sample's text, or of the program's log
    return (nameless and not f.uncaught) or (end.went_on(f.line) and not (f.uncaught and last.exit))
