"""Print on the job's stderr: errors and warnings when they are found, corrections, a summary at the end."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from distdiag import files
from distdiag.diagnosis import kinds
from distdiag.diagnosis.engine import Diagnosis
from distdiag.diagnosis.model.findings import ATTEMPT, STOPPED_BY, Finding, Severity, State, at_least
from distdiag.diagnosis.text.finding import brief_lines, finding_lines, in_the_past
from distdiag.launcher import PRINTED_ON, VERDICT, stderr_id
from distdiag.streams import PLAINER, needs_ascii
from distdiag.terms.tables import WIDTH, wrapped
from distdiag.terms.units import counted

JUST_S = 10.0  # a launcher needs some of them to end the other ranks of a crash; what is older may have scrolled away
_MARK = "[distdiag] "
_WIDTH = WIDTH - len(_MARK)


def _marked(lines: Sequence[str]) -> str:
    return "".join(f"{_MARK}{line}".rstrip() + "\n" for line in lines)


def _short(f: Finding) -> str:
    return f"{f.severity} {f.kind}: {f.message}"


class Announcer:
    """Prints whole lines at once; stops when the stream is closed."""

    def __init__(self, run_dir: Path, quiet: bool) -> None:
        self.run_dir = run_dir
        self.quiet = quiet
        self._printed: dict[str, tuple[str, float]] = {}  # message, and when, by the monotonic clock
        self._corrected: set[str] = set()
        self.encoding = "ascii" if needs_ascii(sys.stderr) else "utf-8"

    def _write(self, text: str) -> None:
        if self.quiet:
            return
        try:
            os.write(2, text.encode(self.encoding, PLAINER))
        except OSError:
            self.quiet = True

    def mark_printed(self, key: str) -> None:
        """Mark a finding as printed, by an earlier monitor of this run."""
        self._printed[key] = "", 0.0

    def finding(self, f: Finding) -> None:
        """Print an error once, and a correction if it is cleared; likewise a warning that the job makes no progress.

        Of other warnings the first of each kind is printed: who is slow may change all the time.
        """
        if not at_least(f.severity, Severity.WARNING):
            return
        passing = f.severity == Severity.WARNING and kinds.of(f).state is not State.STALLED
        if f.cleared_s is not None:
            if not passing and f.key in self._printed and f.key not in self._corrected:
                self._corrected.add(f.key)
                self._write("\n" + _marked(wrapped(f"cleared, the job continues: {_short(f)}", _WIDTH)))
            return
        if f.key in self._printed or (passing and f.kind in self._printed):
            return
        self._printed |= dict.fromkeys((f.key, f.kind) if passing else (f.key,), (f.message, time.monotonic()))
        # begin with a newline: a progress bar may have left the cursor at the end of its line
        self._write("\n" + _marked(finding_lines(f, _WIDTH)))

    def summary(self, diagnosis: Diagnosis, own: Sequence[Finding] = (), node: int = 0) -> None:
        """Print how the job ended, the newest error in full, the other findings in brief, and the command for the rest.

        The same lines go into `verdict.txt`; the launcher prints them again if its traceback came after them. What a crash
        has just printed in full is one line here. Nodes other than the first name the directory of the whole verdict.
        """
        every = [f for f in (*diagnosis.findings, *own) if at_least(f.severity, Severity.WARNING)]
        every.sort(key=lambda f: (f.severity != Severity.ERROR, -(f.detected_s or 0.0)))  # as `diagnose` shows them
        found, cleared = ([f for f in every if (f.cleared_s is not None) == gone] for gone in (False, True))
        where = self.run_dir
        with contextlib.suppress(ValueError):
            where = self.run_dir.relative_to(Path.cwd())
        state = "the job ended" if diagnosis.state == State.ENDED else f"the job {diagnosis.state}"
        text = diagnosis.state_text if [diagnosis.state_text] != [f.message for f in found[:1]] else ""
        stopped = text.startswith(STOPPED_BY)
        state = "" if text.startswith(ATTEMPT) else "the job was " if stopped else f"{state}: " if text else state
        lines = wrapped(state + text, _WIDTH)
        full = slice(0, 0)  # the lines of an error in full
        if found:
            counts = {s: sum(f.severity == s for f in found) for s in (Severity.ERROR, Severity.WARNING)}
            lines.append(", ".join(counted(n, s) for s, n in counts.items() if n) + " found:")
            for i, f in enumerate(map(in_the_past, found[:8])):
                if i == 0 and f.severity == Severity.ERROR:
                    begin = len(lines)
                    lines += finding_lines(f, _WIDTH)
                    full = slice(begin, len(lines))
                    continue
                lines += wrapped(_short(f), _WIDTH, "  ") + brief_lines(f, _WIDTH) * (f.severity == Severity.WARNING)
            if len(found) > 8:
                lines.append(f"  … and {len(found) - 8} more")
        elif not node:
            infos = [f for f in diagnosis.findings if f.severity == Severity.INFO and f.cleared_s is None]
            if diagnosis.state != State.ENDED:  # what could not be seen may be why nothing is found
                infos += {f.key: f for f in own if f.cause == "device_waits"}.values()
            nothing = f"no error or warning found; {len(infos)} info:" if infos else "nothing found"
            lines.append(nothing if diagnosis.state == State.ENDED or stopped else "no rule explains it")
            lines += [line for f in infos[:8] for line in wrapped(_short(f), _WIDTH, "  ")]
        if cleared:
            lines.append("cleared before the end:")
            lines += [
                line for f in cleared[:8] for line in wrapped(f"{_short(in_the_past(f))} (cleared)", _WIDTH, "  ")
            ]
        shown = list(lines)
        message, at_s = self._printed.get(found[0].key, ("", 0.0)) if full.stop else ("", 0.0)
        if full.stop and message == found[0].message and time.monotonic() - at_s < JUST_S:
            shown[full] = wrapped(_short(found[0]), _WIDTH, "  ")
        if node:
            lines, shown = ([f"node {node}: {line}" for line in each] for each in (lines, shown))
            where = where.parent
        last = [f"verdict: distdiag diagnose {where}", f"report:  distdiag report {where}"]
        text = _marked(lines + last)
        self._write("\n" + _marked(shown + last))
        with contextlib.suppress(OSError):
            if not self.quiet:  # first: the launcher reads it once there is a verdict
                files.write(self.run_dir, PRINTED_ON, stderr_id().encode())
            files.write(self.run_dir, VERDICT, text.encode(self.encoding, PLAINER))
