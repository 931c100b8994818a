"""Drop failures after which the process or job went on.

The end of each file is read for progress (steps, epochs) and for words that the job ended well. They come after a failure that was
caught, retried, restarted from, or only quoted: such a failure is a note, not a finding. How launchers report an end counts more.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from distdiag.sources.logs.facts import Collected, Fact, Loss, Pace
from distdiag.sources.logs.join import KERNEL, active_again
from distdiag.sources.logs.message import Role
from distdiag.sources.logs.tracebacks import FOLLOWERS
from distdiag.sources.logs.writers import Writer, apart, messages, plain, time_of
from distdiag.terms.untrusted import MAX_INT, bounded

# lines read: of all files, of one with a failure, of any other, at least, before a failure
MOST_LINES, OF_FILE, LAST, LEAST, BEFORE = (1 << 12, 256, 12, 4, 128)
# lines of progress after which a failure is past: of its process, of no name, of others
OWN_LINES, NAMELESS, OTHERS = (1, 3, 20)
# steps of one process after which nothing from before them is in flight: a rank goes on without the others until its next collective,
# at most to the end of its accumulated gradients or of the kernels that its host has queued
MANY_STEPS = 100
SURVIVED = 3  # different exceptions that end their programs, and not the job
FEW = 3  # lines of progress by which its pace is known; equal lines that are a monitor's
MOST_WITHOUT_TIME = 64  # lines at the begin of a file
# a job that goes on for so long after an event of its node has survived it; a timeout that follows from one is reported no later
SURVIVED_S, REPORTED_S = 600.0, 3600.0
# clocks without a zone differ by up to so much, in such steps; progress is shown so late
ZONES_S, ZONE_S, SHOWN_S = 14 * 3600.0, 1800.0, 300.0
Time = tuple[str, float]  # clock, seconds
_NAMELESS: tuple[str, object] = "", None  # how a process without a name is known
_PENDING = bounded(r"nodes are available|pull")  # what a scheduler of pods reports, and tries again
_NUMBER = bounded(r"\d+")
_ENDS = (Role.CAUSE, Role.WAIT, Role.VICTIM, Role.START, Role.EXIT)
_FOLLOW = (Role.WAIT, Role.VICTIM, Role.START, Role.EXIT)
_PROGRESS = bounded(
    r"\b(?:[Ss]teps?|[Ee]poch|EPOCH|[Ii]ter(?:ation)?s?|it|[Bb]atch|global_step)\b\W{0,3} {0,9}\d|\d%\||\d(?:it/s|s/it)\b|\bloss\W{1,3}\d|'loss': |\b(?:Decode|Prefill) batch\b|\bgeneration throughput: (?!0\.0\b)\d|\bPOST /\S{1,200} HTTP/\d\.\d\W{1,3}2\d\d\b|\bCheckpoint successfully created\b"
)
# the number of a training step, in a line that shows its loss
_STEP = bounded(
    r"^(?=.{0,999}\b(?:loss|lr|grad))(?!.{0,999}\b(?i:eval|valid|test)).{0,999}?(?:\b(?:global_)?(?:[Ss]teps?|[Ii]t(?:er(?:ation)?s?)?)\b\W{0,12}(?P<step>\d{1,9})|[\[ |](?P<bar>\d{1,9})/\d{1,9}(?:\]| \[\d))"
)
# warnings of torch's C++ code: at the end of a job they may be many
_OF_C10 = re.compile(rb"Exception raised from |(?:\[rank\d{1,6}\]:)?\[[IW]\d{4} ")
_PID = bounded(r"\b[Pp]rocess (\d{1,9})\b")
_SHOWN = bounded(r"\D{0,30}\d{1,12}(?:\D{1,40}\d{1,12})?")  # how far it is
_NO_PROGRESS = bounded(
    r"(?:Error|Exception)(?::|$)|\b(?:ERROR|FATAL|[Ff]ailed|[Tt]imed? ?out|NCCL WARN|Loading)\b|\bResult\(metrics="
)
# an error that a program logs, with the time and level of a logger: it went on after that
_LOGGED = bounded(r"\d\d:\d\d:\d\d.{0,60}?\bERROR\b(?!.{0,99}(?:Traceback|distributed[./]elastic))")
_RULE = bounded(r"^(?:\[[^\]]*\]:? ?|(?:Rank )?\d{1,6}: )?[^\w`]*$")  # a line that only separates others
_OF_LIBRARY = bounded(
    r"NCCL INFO|\.(?:cpp|cc):\d|Missing ranks:|/site-packages/|WARN|[Ww]arning\b|OMP_NUM_THREADS"
)  # not a line of the program
PREFIX = bounded(r"^(?:\d{1,6}: )?(?:\[[^\]]*\](?:<std\w{3}>)?:? ?){0,3}")
_TOOK = bounded(r"\b(?:in|took|after) (?P<s>\d{1,6}(?:\.\d{1,6})?) ?s(?:ec(?:onds)?)?\b")
# an error of the last lines: an exception, or what a tool reports; a program that tries again, or only warns, has not ended by it
_LAST_ERROR = bounded(
    r"^(?!.{0,99}\b(?:"
    + "|".join(FOLLOWERS)
    + r"))(?:\[[^\]]*\]:? ?){0,3}(?:[A-Za-z_][\w.]{0,80}(?:Error|Exception)(?:: |$)|(?!wandb)[a-z][\w./-]{0,60}(?:\[\d+\])?: (?:fatal |internal )?(?i:error|fatal)\b)"
)
_NO_END = bounded(
    r"(?i:\bretr(?:y|ies|ying)\b|\bignor|\bwarn|\bskip|\bfalling back\b|\b(?:no|0) errors?\b|error_|['\"][^'\"]{0,60}error)"
)
_RETRIES = bounded(r"(?i:\bretr(?:y|ies|ying)\b|\btry(?:ing)? again\b)")
_OF_SLURM = bounded(r"slurmstepd: |srun: |CANCELLED")
# a message by which a program ends, of a logger or a runtime; not a launcher's report of an end
_FATAL = bounded(
    r"^(?=.{0,120}(?:\b(?:ERROR|FATAL|CRITICAL|panicked at|terminate called after|Segmentation fault)\b|\bfailed: ))(?!.{0,300}(?:distributed[./]elastic|srun: |slurmstepd|return code|exit ?code|ChildFailed))"
)
_LOSS = bounded(
    r"(?<!\w)(?:lm |train[_/ ]?)?loss(?:/[\w/]{1,40})?['\"]?(?: is |[\s:=]{1,4})(?:tensor\()?(nan|[-+]?(?:inf|\d))",
    re.IGNORECASE,
)
# of a line that has no loss of that name: those of one rank, of all, and the norm of the gradient
_MEASURED = bounded(
    r"(?<![\w/.-])(?P<what>(?![\w/.-]{0,40}(?i:eval|val|test))[\w/.-]{0,40}(?:[_/.-]loss|grad[_ ]?norm))['\"]?[\s:=]{1,4}(?:tensor\()?((?i:nan)|[-+]?(?:inf|\d))"
)
# how a trainer shows it that leaves NaN out of the loss
_ZERO = bounded(r"\bloss['\"]?[\s:=]{1,4}0(?:\.0{1,9})?(?![\d.e]).{0,80}?\bgrad_?norm['\"]?[\s:=]{1,4}nan\b")
_BUT = r"(?!.{0,60}(?:(?<!without )(?<!no )error(?!s?\W{1,2}(?:None|0)\b)|fail|code:? ?-?[1-9]|killed|signal|cancel))"
_AGENT = bounded(
    r"worker group successfully finished|WorkerState\.SUCCEEDED"
)  # of torchrun: then only its shutdown follows
# words that a job ended well, by how much they say: of the whole job; of the lines before them; perhaps only of a part of the job; of its
# launcher; of one process, whose work this may have been, or which has ended
_WELL = (
    ("job", bounded(r"(?i:\b(?:Job)?State[=: ]{1,4}COMPLETED\b|\bCOMPLETED[\s|]{1,9}0:0\b|\bjob '?[\w.-]{1,80}'? (?:succeeded|finished successfully)|\bphase: {1,9}Succeeded|\b\w{1,40}Job \S{1,253} (?:is )?successfully completed\b)")),
    ("file", bounded(r"(?i:\b(?:train(?:ing|er)?|run|job|fit|experiment|all (?:epochs|steps))(?: (?:run|job|loop|has|have|is|was|successfully)){0,3} (?:finished(?! (?:iter|epoch|step))|completed|complete(?=\W{0,3}(?:$|\d(?!\d{0,2}%))|[,;.!] [a-z])|done|succeeded)\b)" + _BUT)),
    ("part", bounded(r"(?i:\b(?:train(?:ing|er)?|run|job|fit|workflow|experiment|all (?:epochs|steps|done))\b.{0,24}\b(?:finished(?! (?:iter|epoch|step))|(?<!to )completed?|done|succeeded)\b)" + _BUT)),
    ("file", bounded(r"max_(?:steps|epochs)=\d{1,9}`? reached|`Trainer\.fit` stopped: (?:early stopping|`trainer\.should_stop` was set)|\bReporting training SUCCESS\s*$|(?:^|=) ?\d{1,6} passed\b|^\{'train_runtime': " + _BUT)),
    ("file", bounded(r"(?:^|[\]:|)>-] ?)(?i:finished), (?:cleaning up|destroying|shutting down)\b|\b(?i:all (?:ranks|workers|processes|nodes) (?:have |are )?(?:finished|completed|done))(?:\W{0,3}$|,? (?:without|with no) errors?\b|,? successfully\b|, (?:cleaning up|destroying|shutting down)\b)" + _BUT)),
    ("file", bounded(r"^(?!.{0,200}\b(?i:eval|val|test|warm|load|sav)).{0,200}?(?:^|[\]:|)>-] ?)(?i:(?:all )?(?:done|finished|completed?)[,:;.!]).{0,60}\b\d[\d,]{0,12} (?:iterations|iters|steps|epochs|updates)\b" + _BUT)),
    ("file", bounded(r"(?:^|[\]:|)>-] ?)\[?exiting program (?:after \d{1,12} (?:iterations|minutes)|at iteration \d{1,12})(?:\]|\W{0,3}$)")),  # Megatron
    # fairseq; torchvision and DETR, detectron2; YOLO
    ("file", bounded(r"(?i:\b(?:done|finished|completed) training\b)(?! (?:iter|epoch|step))|(?:^|[\]:|)>-] ?)(?:(?:Total )?[Tt]raining time:? |[Dd]one in |Overall training speed: \d{1,12} iterations in )\d{0,4}\D{0,8}\d{1,4}:\d\d:\d\d\b|\b\d{1,6} epochs completed in \d" + _BUT)),
    ("file", bounded(r"(?i:\btraining progress|\bepochs)\b[^|]{0,20}: {1,9}100%\|[^|]{0,80}\| *(\d{1,15})/\1 \[")),  # the bar of all loops
    ("part", bounded(r"(?i:\btrain\w{0,3}|\bepochs?|\bsteps?)\b[^|]{0,20}: {1,9}100%\|[^|]{0,80}\| *(\d{1,15})/\1 \[")),  # the bar of a loop
    ("agent", _AGENT),
    ("server", bounded(r"\bINFO\b.{0,80}(?:Application shutdown complete|Finished server process)")),
    ("exit", bounded(r"^(?:\[?[\dT:.,+Z /-]{8,40}\]? ?)?(?:[A-Z]{4,8}:? )?\W{0,9}(?i:(?:the )?(?:launcher|torchrun|srun|mpirun|job|command|script|program|container)?:? ?(?:exit(?:ed)?|return(?:ed)?)[ _-]?(?:with )?(?:code|status)?(?: is)?[ =:]{0,3}0)\W{0,3}$")),
    ("rank", bounded(r"(?:^|[\]:|)>-] ?)(?:Done|DONE|Finished|FINISHED)[.!]?\s*$")),
    ("process", bounded(r"(?i:\b(?:exit(?:s|ed|ing)?|return(?:ed)?|finished) ?(?:with )?(?:code|status)?[ =:]{0,9}(?:0\b(?![.:\d])|successfully))")),
)  # fmt: skip
WHOLE = ("job", "file", "agent", "exit")  # of these, nothing is left to do after the line
# one of them is in every line that such a pattern, or `_TESTED`, matches: these take long
_OF_END = bounded(
    r"(?i:complete|succe|finish|done|passed|reached|stopped|runtime|exit|return|shutdown|100%|training (?:time|speed)|ran \d)"
)
# a shell's prompt: the command before it is over; one that shows another file, and any other
_PROMPT = bounded(r"^(?:\S{0,80}\$|\S{1,80}#) (?P<shows>(?:tail|head|cat|zcat|less|grep|sed|awk)\s)?\S")
_SHOWS = re.compile(rb"(?m)^(?:\S{0,80}\$|\S{1,80}#) (?:tail|head|cat|zcat|less|grep|sed|awk)\s")
# a bar of tqdm: what it counts, how far it is
_BAR = bounded(
    r"^(?P<what>[A-Za-z][^|%]{2,80}?):? {1,9}\d{1,3}%\|.{0,80}?\| *(?P<n>\d{1,15})/(?P<of>\d{1,15}) \[[\d:]{4,12}<(?P<left>[\d:]{4,12})\b"
)
# pytest; unittest, with its next line: all failures were wanted
_TESTED = bounded(
    r"^=* ?\d{1,6} passed(?!.{0,80}\bfailed\b).{0,80} in \d{1,9}(?:\.\d{1,3})?s\b"
    r"|^Ran [1-9]\d{0,5} tests? in \d{1,9}(?:\.\d{1,3})?s OK(?: \([^)]{1,80}\))?$"
)
# more work begins; the words of an end are only of a part
_BEGINS = bounded(
    r"(?i:\binitiali[sz]ing distributed|\b(?:start|begin|running|launch)\w{0,4} (?:\w{1,20} ){0,2}(?:train|trial|fold|run\b|epoch|eval|valid|test|infer)|\b(?:trial|fold|stage|phase) \d)"
)
_OF_PART = bounded(
    r"(?i:\b(?:eval|val|test|warm|load|sav|pre|data|dry|sanity|profil|tun|bench|trial|sub|epoch|download|upload|setup|compil)[^\]:|>)]{0,60}$)"
)


@dataclass
class Later:
    """What the ends of the files show, by the numbers of their lines.

    Attributes:
        progress: Negative numbers of lines with progress, by file and process; those of all processes with None.
        moved: (negative number of a line, its step) of each file, where that differs from the last one's: of ranks it does not.
        steps: (negative number of a line, training step that it shows) of each file and process.
        well: Last lines by (file, what they speak of) that say that it ended well.
        restarts: The last line of each file by which a launcher started the ranks again, or a step was tried again.
    """

    progress: dict[tuple[Path, object], list[int]] = field(default_factory=dict)
    moved: dict[Path, list[tuple[int, str]]] = field(default_factory=dict)
    steps: dict[Path, dict[object, list[tuple[int, int]]]] = field(default_factory=dict)
    well: dict[tuple[Path, str], int] = field(default_factory=dict)
    restarts: dict[Path, int] = field(default_factory=dict)
    # by file: the processes that have ended well, and their last line
    quits: dict[Path, dict[tuple[str, object], int]] = field(default_factory=dict)
    begins: dict[Path, Time] = field(default_factory=dict)  # the first time in each file
    times: dict[Path, list[Time]] = field(default_factory=dict)  # of the lines with progress, the last one first
    took: dict[int, tuple[float, str]] = field(default_factory=dict)  # as in `Collected`
    bars: dict[Path, list[tuple[int, re.Match[str]]]] = field(default_factory=dict)  # of no rank, the last one first
    loss: dict[tuple[Path, int | None], Loss] = field(default_factory=dict)  # the last ones of each rank
    said: dict[tuple[Path, int | None, int | None], str] = field(default_factory=dict)  # the last line by rank and task
    earlier: dict[tuple[Path, int | None, int | None], str] = field(default_factory=dict)  # the last before a failure
    errors: dict[Path, tuple[int, str, Writer]] = field(default_factory=dict)  # of a file's last lines
    left: int = MOST_LINES
    fatal: dict[tuple[Path, int | None, int | None], tuple[int, str]] = field(default_factory=dict)  # as `said`
    stepped: set[tuple[Path, int | None, int | None]] = field(default_factory=set)  # those with progress, from the end
    began: bool = False  # there is progress before a failure
    stepped_at: dict[Path, int] = field(default_factory=dict)  # the last line of progress before a failure
    over: dict[Path, tuple[int, str]] = field(default_factory=dict)  # as in `Collected`
    finished: dict[Path, int] = field(default_factory=dict)  # the line by which the whole job ended well; 0 if none did
    tests: set[Path] = field(default_factory=set)  # files that end with the summary of pytest or unittest
    _next: str = ""  # the line after the one that is read
    _head: bytes = b""
    # ranks whose losses in the file that is read are all NaN, so far
    _nan: set[int | None] = field(default_factory=set)

    def begin(self, path: Path, head: bytes) -> None:
        """Note the time that the begin of a file shows."""
        self._head = head
        lines = head.decode("utf-8", "replace").splitlines()[:MOST_WITHOUT_TIME]
        timed = (text for text in map(plain, lines) if "{" in text or time_of(text) is not None)
        times = (who.at for text in timed for _, who in messages(text) if who.at is not None)
        if (first := next(times, None)) is not None:
            self.begins[path] = first

    def read(self, path: Path, tail: Sequence[tuple[int, bytes]], after: int | None) -> None:
        """Read the end of a file, its last line first.

        Args:
            tail: (number of the first line, lines) of its last blocks.
            after: The first line with a failure; None if the file has none: then only its last words count.
        """
        most = LAST if after is None else max(LEAST, min(OF_FILE, self.left // 8))
        self._nan, before, nth = set(), False, 0
        started = after is None or self._shown_before(after, tail)  # the whole log is what a shell shows
        for first, block in reversed(tail):
            raws = block.split(b"\n")
            for number, raw in zip(range(first + len(raws) - 1, first - 1, -1), reversed(raws), strict=True):
                if number <= (after or 0) and not before:  # what came before a failure is asked for its loss only
                    most, before = BEFORE, True
                if self._nan and most < LAST and self.left > 0:
                    most, self.left = most + 1, self.left - 1
                if most <= 0:
                    return
                if raw.strip() and not raw.startswith(b"frame #"):  # of the stacks of C++
                    counts = self.left <= 0 or _OF_C10.match(raw) is None
                    most, nth = most - counts, nth + counts
                    self.left -= after is not None or not counts
                    last = raw[-2000:].rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")
                    code = number > first and b'File "' in raws[number - first - 1]  # a traceback's line of source
                    started = started or before or self._starts(path, plain(last))
                    for text, who in messages(plain(last)):
                        self._loss(path, number, text, who)
                        key = path, who.rank, who.task
                        if not code:
                            self._said(key, text, before and number < (after or 0))
                        progress = _progress(text)
                        self._finish(path, number, text, progress is not None)
                        if progress:
                            self.stepped.add(key)
                        elif key not in self.stepped and _FATAL.search(text) and not (who.mild or _NO_END.search(text)):
                            self.fatal.setdefault(key, (number, PREFIX.sub("", text).strip()))
                        if "Exception ignored in" in text:
                            self.errors.pop(path, None)
                        if nth <= FEW and _LAST_ERROR.search(text) and not (who.mild or _NO_END.search(text)):
                            self.errors[path] = number, text.strip(), who
                        if not before and not code:
                            self._line(path, number, text, who, progress)
                        elif before:
                            self._before(path, number, text, progress)
                            self._bar(path, number, text, who)

    def _shown_before(self, line: int, tail: Sequence[tuple[int, bytes]]) -> bool:
        """True if a shell's command that shows a file comes before a line, in the begin or the end of the file."""
        blocks = ((1, self._head), *tail)
        shown = ((first, block[: m.start()]) for first, block in blocks for m in _SHOWS.finditer(block))
        return any(first + before.count(b"\n") < line for first, before in shown)

    def _starts(self, path: Path, text: str) -> bool:
        """True if a line is a shell's command that may start a job; after one that shows another file, drop what was read."""
        prompt = _PROMPT.match(text)
        if prompt is None or prompt["shows"] is None:
            return prompt is not None
        by_keys: list[dict[Any, Any]] = [self.progress, self.well, self.loss, self.said, self.fatal]
        for by_key in by_keys:
            for key in [key for key in by_key if key[0] == path]:
                del by_key[key]
        for by_path in (self.steps, self.times, self.errors, self.bars, self.finished):
            by_path.pop(path, None)
        self.stepped = {key for key in self.stepped if key[0] != path}
        return False

    def _before(self, path: Path, number: int, text: str, progress: re.Match[str] | None) -> None:
        """Note what a line before the first failure shows: progress, or that the work was done by then."""
        self.began = self.began or progress is not None
        if progress:
            self.stepped_at.setdefault(path, number)
        if progress or number <= self.restarts.get(path, 0):
            self.over.setdefault(path, (0, ""))
        elif path not in self.over and any(scope in ("job", "file", "part") for scope, _ in _words_of_end(text)):
            self.over[path] = number, PREFIX.sub("", text).strip()
        if _AGENT.search(text) is not None:
            self.well.setdefault((path, "agent"), number)

    def _finish(self, path: Path, number: int, text: str, goes_on: bool) -> None:
        """Note the last line by which the whole job ended well, unless it goes on, or more work begins, after that."""
        if path in self.finished:
            return
        if goes_on or _BEGINS.search(text) or number <= self.restarts.get(path, 0):
            self.finished[path] = 0
        elif any(scope in ("job", "file") and _OF_PART.search(text[:at]) is None for scope, at in _words_of_end(text)):
            self.finished[path] = number

    def _said(self, key: tuple[Path, int | None, int | None], text: str, before: bool) -> None:
        """Keep a line that is no error: the last one of a process, and its last one before a failure, unless it went on after that."""
        if not before and key in self.said:
            return
        if (_LOGGED.search(text) or _NO_PROGRESS.search(text) is None) and not ("File " in text or _RULE.match(text)):
            self.said.setdefault(key, text)
            if before and _OF_LIBRARY.search(text) is None:
                self.earlier.setdefault(key, "" if key in self.stepped else text)

    def nameless(self, path: Path) -> str:
        """Return the last line of a file before its first failure that names no rank; empty if it shows a step, or steps followed."""
        text = self.earlier.get((path, None, None), "")
        return "" if _progress(text) else PREFIX.sub("", text).strip()

    def _loss(self, path: Path, number: int, text: str, who: Writer) -> None:
        # a summary's mean leaves out what is not finite
        if not ("oss" in text or "norm" in text) or "train_runtime" in text:
            return
        m = _LOSS.search(text) or _MEASURED.search(text)
        if m is None:
            return
        loss = self.loss.setdefault((path, who.rank), Loss())
        what = m.groupdict().get("what", "the loss")
        zero = what == "the loss" and _ZERO.search(text) is not None
        loss.finite |= m[m.lastindex or 1].lower() != "nan" and not zero
        if not loss.finite:
            step = _STEP.search(text)
            loss.line, loss.times, loss.step = number, loss.times + 1, step["step"] or "" if step else ""
            loss.shown = "the loss is 0, and the norm of the gradient NaN" if zero else f"{what} is NaN"
        (self._nan.discard if loss.finite else self._nan.add)(who.rank)

    def _line(self, path: Path, number: int, text: str, who: Writer, progress: re.Match[str] | None) -> None:
        shown, self._next = f"{text} {self._next}" if text.startswith("Ran ") else text, text.strip()
        for scope, _ in _words_of_end(text):
            if scope in ("rank", "process"):
                pid = _PID.search(text)
                for name in [("pid", pid[1])] if pid else _names(who, who.rank):
                    self.quits.setdefault(path, {}).setdefault(name, number)
            if scope != "rank" and (scope != "exit" or _names(who, who.rank) == [_NAMELESS]):
                self.well.setdefault((path, scope), number)
        if _OF_END.search(text) is not None and _TESTED.search(shown) is not None:
            self.tests.add(path)
            self.well.setdefault((path, "file"), number)
        if who.rank is not None and (m := _TOOK.search(text)) is not None:
            self.took.setdefault(who.rank, (float(m["s"]), PREFIX.sub("", text).strip()))
        if progress is None:
            return
        self._bar(path, number, text, who)
        shown = (at := _SHOWN.match(text, progress.start())) and at[0]
        moved = self.moved.setdefault(path, [])
        if shown and moved and moved[-1][1] == shown:
            moved.pop()  # the first line counts: a bar may be drawn again after the end
        if shown:
            moved.append((-number, shown))
        if who.at is not None:
            self.times.setdefault(path, []).append(who.at)
        names = _names(who, who.rank)
        for key in (*names, None):
            self.progress.setdefault((path, key), []).append(-number)
        if (m := _STEP.search(text)) is not None:
            self.steps.setdefault(path, {}).setdefault(names[0], []).append((-number, int(m["step"] or m["bar"])))

    def _bar(self, path: Path, number: int, text: str, who: Writer) -> None:
        if who.rank is None and (m := _BAR.search(text)) is not None:
            self.bars.setdefault(path, []).append((number, m))

    def moving(self, path: Path, line: int) -> str:
        """Return which progress bar moved on after a line, and how far it came; empty if none did."""
        bars = self.bars.get(path, ())
        last = next((m for number, m in bars if number > line and m["n"] != m["of"]), None)
        if last is None or not any(m["what"] == last["what"] and int(m["n"]) < int(last["n"]) for _, m in bars):
            return ""
        return f"`{last['what']}`: {int(last['n']):,} of {int(last['of']):,}, {last['left']} left"

    def after(self, path: Path, line: int, key: object = None) -> int:
        """Return how many lines of progress come after a line."""
        return bisect.bisect_left(self.progress.get((path, key), ()), -line)

    def between(self, path: Path, first: int, last: int, key: object = None) -> int:
        """Return how many lines of progress are between two lines."""
        return self.after(path, first, key) - self.after(path, last, key)

    def done(self, path: Path) -> bool:
        """True if a file shows progress, and after it says that the whole job ended well, and no more work began."""
        return self.finished.get(path, 0) > 0 and self.has_steps

    @property
    def has_steps(self) -> bool:
        """True if a line shows progress, before or after a failure."""
        return self.began or bool(self.progress)

    def ended(self, errors: Collection[tuple[Path, int, str]], ranks: int) -> bool:
        """True if each file with progress, and one at least, ends with words that the job, its launcher or that file's part ended well.

        Args:
            errors: (file, line, text) of the last lines that look like errors.
            ranks: Those of the job: if so many have ended well, it has, too.
        """
        last = {(path, line) for (path, scope), line in self.well.items() if scope in WHOLE}
        for path, of_names in self.quits.items():
            if max(Counter(kind for kind, _ in of_names).values()) >= ranks > 1:
                last.add((path, max(of_names.values())))
        last -= {(path, line) for path, line in last if any(p == path and number > line for p, number, _ in errors)}
        ended = {path for path, line in last if not self.moved_after(path, line)}
        return bool(ended) and ended >= {path for path, _ in self.progress}

    def moved_after(self, path: Path, line: int) -> bool:
        """True if a file shows after a line progress that it has not shown before."""
        moved = self.moved.get(path)
        return -moved[0][0] > line if moved else self.after(path, line) > 0

    def went_on(self, path: Path, first: int, last: int | None = None) -> bool:
        """True if more progress than can be in flight is between two lines: a synchronous job makes it only with all its ranks.

        The same progress of several ranks is shown in as many lines.
        """
        newest = (-last, MAX_INT) if last is not None else (-MAX_INT, 0)
        if len({shown for line, shown in self.moved.get(path, ()) if newest[0] < line < -first}) >= OTHERS:
            return True
        for steps in self.steps[path].values() if path in self.steps else ():
            shown = steps[bisect.bisect_right(steps, newest) : bisect.bisect_left(steps, (-first, 0))]
            if sum(max(0, new[1] - old[1]) for new, old in itertools.pairwise(shown)) >= MANY_STEPS:
                return True
        return False


def _progress(text: str) -> re.Match[str] | None:
    """Return where a line shows progress; None if it does not."""
    m = _PROGRESS.search(text)
    return m if m is not None and _NO_PROGRESS.search(text) is None else None


@lru_cache(1 << 10)
def _words_of_end(text: str) -> list[tuple[str, int]]:
    """Return (scope, place) of the words of a line that a job ended well, of those in `_WELL`."""
    found = ((scope, regex.search(text)) for scope, regex in _WELL) if _OF_END.search(text) is not None else ()
    return [(scope, m.start()) for scope, m in found if m is not None]


def pace(tail: Sequence[tuple[int, bytes]]) -> Pace | None:
    """Return the times of the end of a file; None if there is too little progress, or the lines have no time."""
    raws = [item for first, block in tail for item in enumerate(block.split(b"\n"), first)]
    texts = [plain(raw[:2000].decode("utf-8", "replace")) for _, raw in raws]
    steps = [i for i, text in enumerate(texts) if _PROGRESS.search(text) is not None and time_of(text) is not None]
    times = [at[1] for i in steps if (at := time_of(texts[i])) is not None and at[0] == "iso"]
    if len(times) < FEW or len(times) < len(steps):
        return None
    after = [(raws[i][0], texts[i]) for i in range(steps[-1] + 1, len(texts))]
    after = [line for line in after if line[1].strip() and _OF_SLURM.search(line[1]) is None]
    rest = [text for _, text in after]
    shapes = Counter(_NUMBER.sub("#", text) for text in rest)
    own = [text for text in rest if shapes[_NUMBER.sub("#", text)] < FEW]
    if any(map(_words_of_end, own)):
        return None
    last, end = ([at[1] for text in some if (at := time_of(text)) and at[0] == "iso"] for some in (own, rest))
    names = {(who.rank, who.name) for text in rest for _, who in messages(text)}
    alone = len(rest) >= FEW and len(names) == 1 and names != {(None, "")} and all(map(_RETRIES.search, rest))
    longest_s, end_s = max(b - a for a, b in itertools.pairwise(times)), max([times[-1], *end])
    if alone:
        return Pace(times[-1], longest_s, end_s, tuple(after))
    return Pace(max([times[-1], *last]), longest_s, end_s, ())


def _names(who: Writer, rank: int | None) -> list[tuple[str, object]]:
    """Return by what a process can be known in one file: its rank, its label, its number on the node; or that it has no name."""
    names = (("rank", rank), ("process", who.process or None), ("task", who.task), ("local", who.local))
    return [(kind, name) for kind, name in names if name is not None] or [_NAMELESS]


class _Ends:
    """The last lines that show how files and processes ended."""

    def __init__(self, facts: Sequence[Fact], later: Later) -> None:
        self.last: dict[object, int] = {}  # by file, and by file and process
        exits = [f for f in facts if f.role is Role.EXIT]
        self.exits = {name for f in exits for name in (f.rank, f.number("pid"))} - {None}
        self.exit = {f.path for f in exits}
        self.began = _begins(facts, later)
        for f in (f for f in facts if f.role in _ENDS):
            own = [(f.path, name) for name in _names(f.who, f.rank)] if f.role is not Role.EXIT else []
            for key in (f.path, *own):
                self.last[key] = max(f.line, self.last.get(key, 0))

    def after(self, key: object, line: int) -> bool:
        """True if a failure comes after a line."""
        return self.last.get(key, 0) > line


def _begins(facts: Sequence[Fact], later: Later) -> dict[Path, int]:
    """Return the line of each file at which its last run begins: steps follow after a launcher has reported its ranks' end.

    Ranks that wait or lose a connection later may be of the same run.
    """
    out: dict[Path, int] = {}
    failed: dict[Path, Fact] = {}  # the next failure, read backward
    for f in sorted((f for f in facts if f.role in _ENDS), key=lambda f: -f.line):
        after = failed.get(f.path)
        failed[f.path] = f
        if f.role is not Role.EXIT or after is None or after.role not in (Role.CAUSE, Role.EXIT) or f.path in out:
            continue
        few = any(later.between(p, f.line, after.line, key) >= FEW for p, key in later.progress if p == f.path and key)
        if (f.message.of_ranks and few) or later.went_on(f.path, f.line, after.line):
            out[f.path] = f.line + 1
    return out


def split(found: Collected, later: Later) -> tuple[list[Fact], list[Fact]]:
    """Return (facts that count, failures that are past): the process or the job went on after them, or ended well."""
    # a scheduler reports that a request waits, in the log of a job that ran: Ray starts all its ranks at once
    waited = {
        id(f) for f in found.named("not_started") if later.has_steps and _PENDING.search(f.fields["what"]) is not None
    }
    waited |= {id(f) for f in found.named("not_scheduled") if later.has_steps or found.ranks}
    found.facts = [f for f in found.facts if id(f) not in waited]
    facts = [f for f in found.facts if f.role in _ENDS or f.role is Role.STOP]
    ends = _Ends(facts, later)
    job = any(scope == "job" and not ends.after(path, line) for (path, scope), line in later.well.items())
    past = {id(f) for f in facts if job or _ended_well(f, later, ends) or _went_on(f, later, ends)}
    past |= _of_programs(facts, later)
    # the files that only the kernel or the host of a node writes: no rank, no step and no other failure is in them
    of_job = {f.path for f in facts if not f.message.of_node} | {p for p, _ in later.progress}
    own = {f.path for f in facts} - of_job - later.over.keys() - found.by_path.keys()
    for f in (f for f in facts if f.path in own):
        f.of_host = True
        past |= {id(f)} if _outlived(f, later, own) else set()
    left = [f for f in facts if id(f) not in past]
    past |= {id(f) for f in left if active_again(f, left)}
    left = [f for f in left if id(f) not in past]
    named = [f for f in left if f.role in _FOLLOW and _names(f.who, f.rank)[0][0]]
    final = [f for f in named if not later.went_on(f.path, f.line)]  # the job ended with these, or hung
    over: dict[Path, int] = {}  # the line at which a launcher saw a run end, before the last one
    with_steps = {p for p, _ in later.progress}
    of_ranks = with_steps & found.of_file.keys()
    finals: dict[Path, list[int]] = {}
    for end in final:
        finals.setdefault(end.path, []).append(end.line)
    causes = {f.path: f.line for f in sorted(left, key=lambda f: f.line) if f.role is Role.CAUSE}  # the last ones
    for f in (f for f in left if f.role is not Role.STOP):
        until = min((line for line in finals.get(f.path, ()) if line >= f.line), default=None)
        elsewhere = of_ranks - {f.path} if not final and f.path in found.of_file else set[Path]()
        progress = elsewhere or later.after(f.path, f.line) or (f.of_host and with_steps)
        f.doubtful = later.went_on(f.path, f.line, until) if final else bool(progress) and not f.uncaught
        if final and f.doubtful and f.role is Role.CAUSE:
            # of no known process, or long before the last cause: it did not end the job, which went on after it
            last = causes.get(f.path, 0)
            if not _names(f.who, f.rank)[0][0] or (last > f.line and later.went_on(f.path, f.line, last)):
                past.add(id(f))
        if not final and (_others_went_on(f, later, ends) or any(_survived(f.who.at, later, p) for p in elsewhere)):
            past.add(id(f))
            if f.role is Role.EXIT and later.went_on(f.path, f.line):
                over[f.path] = max(f.line, over.get(f.path, 0))
    past |= {id(f) for f in left if f.line <= over.get(f.path, 0)}
    of_kernel = {id(f) for f in facts if f.path in own or KERNEL.search(f.text) is not None}
    ends = _Ends([f for f in facts if id(f) not in of_kernel], later)
    parts = ((p, line) for (p, scope), line in later.well.items() if scope not in ("exit", "process", "server"))
    well = any(p not in own and not ends.after(p, line) for p, line in parts)
    well = well or any(number for p, (number, _) in later.over.items() if p not in own)
    if well and past | of_kernel >= {id(f) for f in facts}:
        for f in (f for f in facts if id(f) not in past):
            f.of_host = True
        past |= of_kernel
    for f in (f for f in facts if id(f) in past):
        f.doubtful = not later.went_on(f.path, f.line) and not any(_survived(f.at, later, p) for p in later.times)
    return [f for f in found.facts if id(f) not in past], [f for f in facts if id(f) in past]


def _of_programs(facts: Sequence[Fact], later: Later) -> set[int]:
    """Return the exceptions of programs that the job runs, as its tasks or tests, where each may end by an exception.

    No process of the job has their number: it comes further between different ones, and after them. Ranks that fail one after
    another leave the others in the same step.
    """
    raised: dict[Path, list[Fact]] = {}
    for f in facts:
        if f.name == "exception" and f.uncaught and not _names(f.who, f.rank)[0][0]:
            raised.setdefault(f.path, []).append(f)
    out = set[int]()
    for path, own in raised.items():
        moved = [-line for line, _ in later.moved.get(path, ())]
        ends = [*(f.line for f in own[1:]), MAX_INT]
        lasted = [f for f, end in zip(own, ends, strict=True) if any(f.line < line < end for line in moved)]
        lasted += [f for f in own if later.went_on(path, f.line)]
        if len({(f.fields["type"], f.site) for f in lasted}) >= SURVIVED:
            out |= {id(f) for f in lasted}
    return out


def name_shared_stores(found: Collected, later: Later) -> None:
    """Add to a rendezvous that was lost the line by which its launcher could not serve it: it trained with the store of another one.

    torchrun serves the store of its c10d rendezvous; if the port is in use, it becomes a client of the process that has it.
    """
    for taken in [f for f in (*found.facts, *found.past) if f.name == "port_in_use"]:
        lost = [f for f in found.named("keep_alive", "rendezvous") if "ConnectionError" in f.text]
        lost = [f for f in lost if f.path == taken.path and f.line > taken.line]
        if lost and later.between(taken.path, taken.line, min(f.line for f in lost)):
            for f in lost:
                f.fields.setdefault("taken", f"{taken.line:,}")
            for facts in (found.facts, found.past):
                facts[:] = [f for f in facts if (f.name, f.path) != (taken.name, taken.path)]


def _outlived(f: Fact, later: Later, own: Collection[Path]) -> bool:
    """True if the job began later than an event of its node, or survived it, by the times in the lines."""
    if (at := f.who.at) is None:
        return False
    began = min((apart(at, t) for p, t in later.begins.items() if p not in own), default=0.0)
    zoned = at[0] == "utc" and all(t[0] == "utc" for p, t in later.begins.items() if p not in own)
    f.early = began > REPORTED_S + ZONES_S * (not zoned)
    return f.early or any(_survived(at, later, p, zoned) for p in later.times if p not in own)


def _survived(at: Time | None, later: Later, path: Path, zoned: bool = True) -> bool:
    """True if a file shows progress for so long after a failure that the job survived it.

    With other zones than the lines seem to have (not `zoned`), it may be what the last line was followed by.
    """
    apart_s = [apart(at, t) for t in later.times.get(path, ()) if not zoned or t[0] == at[0]] if at is not None else []
    if len(apart_s) < FEW or apart_s[FEW - 1] <= 0 or apart_s[0] < SURVIVED_S:  # the last line comes first
        return False
    before_s = max(SHOWN_S, 2 * max(new - old for new, old in itertools.pairwise(apart_s)))
    fits = (apart_s[0] + before_s) % ZONE_S < before_s + SHOWN_S
    return zoned or not fits or apart_s[0] > ZONES_S + before_s


def _ended_well(f: Fact, later: Later, ends: _Ends) -> bool:
    """True if the lines after a failure say that the job, or its file's part of it, ended well; or that it was started again."""
    for scope in ("file", "part", "process"):
        line = later.well.get((f.path, scope), 0)
        elsewhere = ends.exit if scope == "process" else ends.exit - {f.path}
        if line > f.line and not ends.after(f.path, line) and not elsewhere:
            return True
    served = later.after(f.path, f.line) > 0 and not (f.uncaught or ends.exit)  # one whose engine failed stops so, too
    if served and (line := later.well.get((f.path, "server"), 0)) > f.line and not ends.after(f.path, line):
        return True
    if (f.path, "agent") in later.well and f.role in (Role.VICTIM, Role.START) and f.who.rank is None:
        return True
    again = max(later.restarts.get(f.path, 0), ends.began.get(f.path, 0))
    if again == ends.began.get(f.path) and f.line < again:
        return True
    return again > f.line and not ends.after(f.path, again) and later.after(f.path, again) > 0


def _went_on(f: Fact, later: Later, ends: _Ends) -> bool:
    """True if the process that failed made progress later, and its end, if it is known, has another reason."""
    if f.uncaught or f.role is Role.STOP:
        return False
    if f.warned and later.after(f.path, f.line):
        return True
    for name in _names(f.who, f.rank):
        if name[0] and later.after(f.path, f.line, name) >= OWN_LINES:
            if f.role is Role.EXIT:
                return True
            ended = f.rank in ends.exits or f.who.pid in ends.exits
            return not ended or later.after(f.path, f.line, name) > later.after(f.path, ends.last[f.path, name], name)
    return False


def _others_went_on(f: Fact, later: Later, ends: _Ends) -> bool:
    """True if any process made more progress than the job can without the one that failed."""
    if f.logged and f.rank is None and not f.uncaught and later.after(f.path, f.line) >= NAMELESS:
        return True
    if _names(f.who, f.rank)[0][0]:
        return later.went_on(f.path, f.line)
    nameless = not ends.exit and later.after(f.path, f.line, ("", None)) >= NAMELESS
    # one that seems to have ended its process may be of a sample's text, or of the program's log
    return (nameless and not f.uncaught) or (later.went_on(f.path, f.line) and not (f.uncaught and ends.exit))
