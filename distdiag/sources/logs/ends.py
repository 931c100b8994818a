"""What the end of each log file shows: progress (steps, epochs), losses, words that the job ended well, the last errors."""

from __future__ import annotations

import bisect
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from distdiag.sources.logs.message import FOLLOWERS
from distdiag.sources.logs.writers import Time, Writer, messages, plain, time_of
from distdiag.terms.untrusted import MAX_INT, bounded

OTHERS = 20  # lines of progress of any process after which a failure is past
# lines read: of all files, of one with a failure, of any other, at least, before a failure
MOST_LINES, OF_FILE, LAST, LEAST, BEFORE = (1 << 12, 256, 12, 4, 128)
# steps of one process after which nothing from before them is in flight: a rank goes on without the others until its next collective,
# at most to the end of its accumulated gradients or of the kernels that its host has queued
MANY_STEPS = 100
FEW = 3  # lines of progress by which its pace is known; equal lines that are a monitor's
MOST_WITHOUT_TIME = 64  # lines at the begin of a file
Key = tuple[int | None, int | None]  # rank and task of a process
Name = tuple[str, object]  # how a process is known in one file
NO_NAME: Name = "", None
_NUMBER = bounded(r"\d+")
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
    r"(?:Error|Exception)(?::|$)|\b(?:ERROR|FATAL|[Ff]ailed|[Tt]imed? ?out|NCCL WARN|Loading)\b|\bResult\(metrics=|\b(?:validation|test) loss at iteration\b"
)
# an error that a program logs, with the time and level of a logger: it went on after that
_LOGGED = bounded(r"\d\d:\d\d:\d\d.{0,60}?\bERROR\b(?!.{0,99}(?:Traceback|distributed[./]elastic))")
_RULE = bounded(r"^(?:\[[^\]]*\]:? ?|(?:Rank )?\d{1,6}: )?[^\w`]*$")  # a line that only separates others
# not a line of the program
_OF_LIBRARY = bounded(r"NCCL INFO|\.(?:cpp|cc):\d|Missing ranks:|/site-packages/|WARN|[Ww]arning\b|OMP_NUM_THREADS")
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
# of torchrun: then only its shutdown follows
_AGENT = bounded(r"worker group successfully finished|WorkerState\.SUCCEEDED")
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
    # Ray Train, nccl-tests
    ("file", bounded(r"\[State Transition\] SHUTTING_DOWN -> FINISHED\b|^Result\(metrics=.{0,900}, error=None\)|^# Out of bounds values : 0 OK\b")),
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
    r"(?i:complete|succe|finish|done|passed|reached|stopped|runtime|exit|return|shutdown|100%|error=none|out of bounds|training (?:time|speed)|ran \d)"
)
# a shell's prompt: the command before it is over; one that shows another file, and any other
_PROMPT = bounded(r"^(?:\S{0,80}\$|\S{1,80}#) (?P<shows>(?:tail|head|cat|zcat|less|grep|sed|awk)\s)?\S")
_SHOWS = re.compile(rb"(?m)^(?:\S{0,80}\$|\S{1,80}#) (?:tail|head|cat|zcat|less|grep|sed|awk)\s")
# Hugging Face's summary of a training; a bar of tqdm without a name may be drawn once more after that
_SUMMARY = bounded(
    r"'train_runtime': '?(?P<s>\d{1,9}(?:\.\d{1,6})?)\b.{0,200}'train_steps_per_second': '?(?P<rate>\d{1,9}(?:\.\d{1,6})?)\b"
)
_DRAWN = bounded(r"^\d%\|\D{0,30}(\d{1,12})$")
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


@dataclass(slots=True)
class Loss:
    """How often a rank's last losses are NaN, from which line on, and whether one before them is finite."""

    line: int = 0
    times: int = 0
    finite: bool = False
    shown: str = ""  # what is NaN there
    step: str = ""  # of that line


@dataclass(frozen=True, slots=True)
class Pace:
    """Times of the end of a file: of its progress, and of what comes after that.

    Attributes:
        last_s: When the program wrote last. What is repeated after the last progress, as a monitor's heartbeat, does not count.
        longest_s: Longest time between two lines of progress.
        end_s: Time of the last line.
        retries: (number, text) of the lines after the last progress, if one process wrote them all, and each says that it tries again.
    """

    last_s: float
    longest_s: float
    end_s: float
    retries: tuple[tuple[int, str], ...]


@dataclass
class FileEnd:
    """What the end of one file shows, by the numbers of its lines; of each list the last line comes first.

    Attributes:
        progress: Negative numbers of lines with progress, by process; those of all processes with None.
        moved: (negative number of a line, its step), where that differs from the last one's: of ranks it does not.
        steps: (negative number of a line, training step that it shows) of each process.
        well: The last line of each scope that says that it ended well.
        restart: The last line by which a launcher started the ranks again, or a step was tried again.
        said, earlier, fatal: By rank and task: the last line, the last one before a failure, the last error (with its number).
    """

    restart: int = 0
    begins: Time | None = None  # its first time
    progress: dict[Name | None, list[int]] = field(default_factory=dict)
    moved: list[tuple[int, str]] = field(default_factory=list)
    steps: dict[Name, list[tuple[int, int]]] = field(default_factory=dict)
    times: list[Time] = field(default_factory=list)  # of the lines with progress
    bars: list[tuple[int, re.Match[str]]] = field(default_factory=list)  # of no rank
    loss: dict[int | None, Loss] = field(default_factory=dict)  # the last ones of each rank
    well: dict[str, int] = field(default_factory=dict)
    quits: dict[Name, int] = field(default_factory=dict)  # the processes that have ended well, and their last line
    said: dict[Key, str] = field(default_factory=dict)
    earlier: dict[Key, str] = field(default_factory=dict)
    fatal: dict[Key, tuple[int, str]] = field(default_factory=dict)
    error: tuple[int, str, Writer] | None = None  # of its last lines
    took: dict[int, tuple[float, str]] = field(default_factory=dict)  # of a rank's last lines: seconds, and for what
    stepped_at: int | None = None  # the last line of progress before a failure
    # the newest words of an end before the first failure: number and text; (0, "") if progress is newer
    over: tuple[int, str] | None = None
    finished: int | None = None  # the line by which the whole job ended well; 0 if none did
    tested: bool = False  # it ends with the summary of pytest or unittest
    pace: Pace | None = None
    _stepped: set[Key] = field(default_factory=set)  # those with progress, from the end
    _next: str = ""  # the line after the one that is read

    def read(self, head: bytes, tail: Sequence[tuple[int, bytes]], after: int | None, budget: int) -> int:
        """Read the end of the file, its last line first; return what is left of the budget.

        Args:
            head: The first bytes of the file.
            tail: (number of the first line, lines) of its last blocks.
            after: The first line with a failure; None if the file has none: then only its last words count.
            budget: Lines of all files that are still read.
        """
        lines = map(plain, head.decode("utf-8", "replace").splitlines()[:MOST_WITHOUT_TIME])
        timed = (text for text in lines if "{" in text or time_of(text) is not None)
        self.begins = next((who.at for text in timed for _, who in messages(text) if who.at is not None), None)
        most = LAST if after is None else max(LEAST, min(OF_FILE, budget // 8))
        before, nth = False, 0
        started = after is None or _shown_before(after, head, tail)  # the whole log is what a shell shows
        for number, raw, source in _backward(tail):
            if number <= (after or 0) and not before:  # what came before a failure is asked for its loss only
                most, before = BEFORE, True
            if most < LAST and budget > 0 and any(not loss.finite for loss in self.loss.values()):
                most, budget = most + 1, budget - 1
            if most <= 0:
                break
            if not raw.strip() or raw.startswith(b"frame #"):  # of the stacks of C++
                continue
            counts = budget <= 0 or _OF_C10.match(raw) is None
            most, nth = most - counts, nth + counts
            budget -= after is not None or not counts
            text = plain(raw[-2000:].rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace"))
            started = started or before or self._starts(text)
            for message, who in messages(text):
                key, progress = (who.rank, who.task), _progress(message)
                self._loss(number, message, who)
                if not source:
                    self._said(key, message, before and number < (after or 0))
                self._finish(number, message, progress is not None)
                if progress:
                    self._stepped.add(key)
                elif key not in self._stepped and _FATAL.search(message) and not _passes(message, who):
                    self.fatal.setdefault(key, (number, PREFIX.sub("", message).strip()))
                if "Exception ignored in" in message:
                    self.error = None
                if nth <= FEW and _LAST_ERROR.search(message) and not _passes(message, who):
                    self.error = number, message.strip(), who
                if before:
                    self._before(number, message, progress)
                elif not source:
                    self._line(number, message, who, progress)
                shown = before or (progress is not None and not source)
                if shown and who.rank is None and (m := _BAR.search(message)) is not None:
                    self.bars.append((number, m))
        return budget

    def _starts(self, text: str) -> bool:
        """True if a line is a shell's command that may start a job; after one that shows another file, drop what was read."""
        prompt = _PROMPT.match(text)
        if prompt is None or prompt["shows"] is None:
            return prompt is not None
        vars(self).update(vars(FileEnd(self.restart, self.begins)))
        return False

    def _before(self, number: int, text: str, progress: re.Match[str] | None) -> None:
        """Note what a line before the first failure shows: progress, or that the work was done by then."""
        if progress and self.stepped_at is None:
            self.stepped_at = number
        if self.over is None and (progress or number <= self.restart):
            self.over = 0, ""
        elif self.over is None and any(scope in ("job", "file", "part") for scope, _ in _words_of_end(text)):
            self.over = number, PREFIX.sub("", text).strip()
        if _AGENT.search(text) is not None:
            self.well.setdefault("agent", number)

    def _finish(self, number: int, text: str, goes_on: bool) -> None:
        """Note the last line by which the whole job ended well, unless it goes on, or more work begins, after that."""
        if self.finished is not None:
            return
        if goes_on or _BEGINS.search(text) or number <= self.restart:
            self.finished = 0
        elif any(scope in ("job", "file") and _OF_PART.search(text[:at]) is None for scope, at in _words_of_end(text)):
            self.finished = number

    def _said(self, key: Key, text: str, before: bool) -> None:
        """Keep a line that is no error: the last one of a process, and its last one before a failure, unless it went on after that."""
        if not before and key in self.said:
            return
        if (_LOGGED.search(text) or _NO_PROGRESS.search(text) is None) and not ("File " in text or _RULE.match(text)):
            self.said.setdefault(key, text)
            if before and _OF_LIBRARY.search(text) is None:
                self.earlier.setdefault(key, "" if key in self._stepped else text)

    def _loss(self, number: int, text: str, who: Writer) -> None:
        # a summary's mean leaves out what is not finite
        if not ("oss" in text or "norm" in text) or "train_runtime" in text:
            return
        m = _LOSS.search(text) or _MEASURED.search(text)
        if m is None:
            return
        loss = self.loss.setdefault(who.rank, Loss())
        what = m.groupdict().get("what", "the loss")
        zero = what == "the loss" and _ZERO.search(text) is not None
        loss.finite |= m[m.lastindex or 1].lower() != "nan" and not zero
        if not loss.finite:
            step = _STEP.search(text)
            loss.line, loss.times, loss.step = number, loss.times + 1, step["step"] or "" if step else ""
            loss.shown = "the loss is 0, and the norm of the gradient NaN" if zero else f"{what} is NaN"

    def _line(self, number: int, text: str, who: Writer, progress: re.Match[str] | None) -> None:
        shown, self._next = f"{text} {self._next}" if text.startswith("Ran ") else text, text.strip()
        names = names_of(who, who.rank)
        for scope, _ in _words_of_end(text):
            if scope in ("rank", "process"):
                for name in [("pid", pid[1])] if (pid := _PID.search(text)) else names:
                    self.quits.setdefault(name, number)
            if scope != "rank" and (scope != "exit" or names == [NO_NAME]):
                self.well.setdefault(scope, number)
        if _OF_END.search(text) is not None and _TESTED.search(shown) is not None:
            self.tested = True
            self.well.setdefault("file", number)
        if who.rank is not None and (m := _TOOK.search(text)) is not None:
            self.took.setdefault(who.rank, (float(m["s"]), PREFIX.sub("", text).strip()))
        if len(self.moved) == 1 and (m := _SUMMARY.search(text)) is not None:
            bar = _DRAWN.match(self.moved[0][1])
            if bar is not None and abs(int(bar[1]) - float(m["s"]) * float(m["rate"])) <= 1 + 0.01 * float(m["s"]):
                self.moved, self.progress = [], {}  # the bar shows the steps that were made: it is no new progress
        if progress is None:
            return
        shown = (at := _SHOWN.match(text, progress.start())) and at[0]
        if shown and self.moved and self.moved[-1][1] == shown:
            self.moved.pop()  # the first line counts: a bar may be drawn again after the end
        if shown:
            self.moved.append((-number, shown))
        if who.at is not None:
            self.times.append(who.at)
        for name in (*names, None):
            self.progress.setdefault(name, []).append(-number)
        if (m := _STEP.search(text)) is not None:
            self.steps.setdefault(names[0], []).append((-number, int(m["step"] or m["bar"])))

    @property
    def nameless(self) -> str:
        """Return its last line before its first failure that names no rank; empty if it shows a step, or steps followed."""
        text = self.earlier.get((None, None), "")
        return "" if _progress(text) else PREFIX.sub("", text).strip()

    @property
    def stepped(self) -> bool:
        """True if a line shows progress, before or after a failure."""
        return bool(self.progress) or self.stepped_at is not None

    @property
    def whole(self) -> int:
        """Return the line that says that the job, its launcher or this file's part ended well; 0 if none does."""
        lines = (self.well[scope] for scope in reversed(self.well) if scope in WHOLE)
        return next((line for line in lines if not self.moved_after(line)), 0)

    def moving(self, line: int) -> str:
        """Return which progress bar moved on after a line, and how far it came; empty if none did."""
        last = next((m for number, m in self.bars if number > line and m["n"] != m["of"]), None)
        if last is None or not any(m["what"] == last["what"] and int(m["n"]) < int(last["n"]) for _, m in self.bars):
            return ""
        return f"`{last['what']}`: {int(last['n']):,} of {int(last['of']):,}, {last['left']} left"

    def after(self, line: int, name: Name | None = None) -> int:
        """Return how many lines of progress come after a line."""
        return bisect.bisect_left(self.progress.get(name, ()), -line)

    def between(self, first: int, last: int, name: Name | None = None) -> int:
        """Return how many lines of progress are between two lines."""
        return self.after(first, name) - self.after(last, name)

    def moved_after(self, line: int) -> bool:
        """True if it shows after a line progress that it has not shown before."""
        return -self.moved[0][0] > line if self.moved else self.after(line) > 0

    def went_on(self, first: int, last: int | None = None) -> bool:
        """True if more progress than can be in flight is between two lines: a synchronous job makes it only with all its ranks.

        The same progress of several ranks is shown in as many lines.
        """
        newest = (-last, MAX_INT) if last is not None else (-MAX_INT, 0)
        if len({shown for line, shown in self.moved if newest[0] < line < -first}) >= OTHERS:
            return True
        for steps in self.steps.values():
            shown = steps[bisect.bisect_right(steps, newest) : bisect.bisect_left(steps, (-first, 0))]
            if sum(max(0, new[1] - old[1]) for new, old in itertools.pairwise(shown)) >= MANY_STEPS:
                return True
        return False


def names_of(who: Writer, rank: int | None) -> list[Name]:
    """Return by what a process can be known in one file: its rank, its label, its number on the node; or that it has no name."""
    names = (("rank", rank), ("process", who.process or None), ("task", who.task), ("local", who.local))
    return [(kind, name) for kind, name in names if name is not None] or [NO_NAME]


def _backward(tail: Sequence[tuple[int, bytes]]) -> Iterator[tuple[int, bytes, bool]]:
    """Yield (number, line, whether it is the source code of a traceback's frame) of blocks of lines, the last one first."""
    for first, block in reversed(tail):
        raws = block.split(b"\n")
        for i in range(len(raws) - 1, -1, -1):
            yield first + i, raws[i], i > 0 and b'File "' in raws[i - 1]


def _shown_before(line: int, head: bytes, tail: Sequence[tuple[int, bytes]]) -> bool:
    """True if a shell's command that shows a file comes before a line, in the begin or the end of the file."""
    blocks = ((1, head), *tail)
    shown = ((first, block[: m.start()]) for first, block in blocks for m in _SHOWS.finditer(block))
    return any(first + before.count(b"\n") < line for first, before in shown)


def _passes(text: str, who: Writer) -> bool:
    """True if a program has not ended by what it reports: it only warns, or tries again."""
    return who.mild or _NO_END.search(text) is not None


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
