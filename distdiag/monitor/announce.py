"""Print on the job's stderr: errors and stalls when they happen, corrections, a summary at the end."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from distdiag import files
from distdiag.diagnosis import kinds
from distdiag.diagnosis.engine import Diagnosis
from distdiag.diagnosis.model.findings import STOPPED_BY, Finding, Severity, State, at_least
from distdiag.diagnosis.text.finding import finding_lines, in_the_past, printable
from distdiag.launcher import PRINTED_ON, VERDICT, stderr_id
from distdiag.streams import PLAINER, needs_ascii


class Announcer:
    """Prints whole lines at once; stops when the stream is closed."""

    def __init__(self, run_dir: Path, quiet: bool) -> None:
        self.run_dir = run_dir
        self.quiet = quiet
        self._printed: set[str] = set()
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
        self._printed.add(key)

    def finding(self, f: Finding) -> None:
        """Print an error, or a warning that the job makes no progress, once; and a correction if it is cleared."""
        stalled = kinds.of(f).state is State.STALLED and at_least(f.severity, Severity.WARNING)
        if not stalled and not at_least(f.severity, Severity.ERROR):
            return
        if f.cleared_s is not None:
            if f.key in self._printed and f.key not in self._corrected:
                self._corrected.add(f.key)
                self._write(f"\n[distdiag] cleared, the job continues: {f.severity} {f.kind}: {printable(f.message)}\n")
            return
        if f.key in self._printed:
            return
        self._printed.add(f.key)
        lines = finding_lines(f)
        # begin with a newline: a progress bar may have left the cursor at the end of its line
        self._write("\n" + "\n".join(["[distdiag]" + (" " + line).rstrip() for line in lines]) + "\n")

    def summary(self, diagnosis: Diagnosis, own: Sequence[Finding] = (), node: int = 0) -> None:
        """Print how the job ended, the first error in full, one line per other finding, and the command for the rest.

        The same lines go into `verdict.txt`; the launcher prints them again if its traceback came after them.
        Nodes other than the first judge only their own ranks and name the directory of the verdict on all
        ranks.

        Args:
            own: Findings about distdiag itself.
        """
        every = [f for f in (*diagnosis.findings, *own) if at_least(f.severity, Severity.WARNING)]
        every.sort(key=lambda f: f.severity != Severity.ERROR)
        found, cleared = ([f for f in every if (f.cleared_s is not None) == gone] for gone in (False, True))
        where = self.run_dir
        with contextlib.suppress(ValueError):
            where = self.run_dir.relative_to(Path.cwd())
        state = "the job ended" if diagnosis.state == State.ENDED else f"the job {diagnosis.state}"
        text = diagnosis.state_text
        stopped = text.startswith(STOPPED_BY)
        lines = [f"the job was {text}" if stopped else f"{state}: {text}" if text else state]
        if found:
            counts = {s: sum(f.severity == s for f in found) for s in (Severity.ERROR, Severity.WARNING)}
            lines.append(", ".join(f"{n} {s}{'s' if n > 1 else ''}" for s, n in counts.items() if n) + " found:")
            for i, f in enumerate(found[:8]):
                if i == 0 and f.severity == Severity.ERROR:
                    lines += finding_lines(in_the_past(f))
                    continue
                lines.append(f"  {f.severity} {f.kind}: {printable(f.message)}")
            if len(found) > 8:
                lines.append(f"  … and {len(found) - 8} more")
        elif not node:
            infos = [f for f in diagnosis.findings if f.severity == Severity.INFO and f.cleared_s is None]
            if diagnosis.state != State.ENDED:  # what could not be seen may be why nothing is found
                infos += {f.key: f for f in own if f.cause == "device_waits"}.values()
            nothing = "no error or warning found" if infos else "nothing found"
            lines.append(nothing if diagnosis.state == State.ENDED or stopped else "no rule explains it")
            lines += [f"  {f.severity} {f.kind}: {printable(f.message)}" for f in infos[:8]]
        if cleared:
            lines.append("cleared before the end:")
            lines += [f"  {f.severity} {f.kind}: {printable(f.message)} (cleared)" for f in cleared[:8]]
        if node:
            lines = [f"node {node}: {line}" for line in lines]
            where = where.parent
        lines.append(f"verdict: distdiag diagnose {where}    report: distdiag report {where}")
        text = "".join(f"[distdiag] {line}\n" for line in lines)
        self._write("\n" + text)
        with contextlib.suppress(OSError):
            if not self.quiet:  # first: the launcher reads it once there is a verdict
                files.write(self.run_dir, PRINTED_ON, stderr_id().encode())
            files.write(self.run_dir, VERDICT, text.encode(self.encoding, PLAINER))
