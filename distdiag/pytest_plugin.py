"""pytest plugin: a test whose ranks hang fails within seconds, with rank, file, line and condition as its failure.

Nothing in a test changes. DISTDIAG=1 in the environment has the processes recorded that a test starts and that join a process group;
the monitor, which starts once one of them has lived for a second, ends the ranks of a proved hang (DISTDIAG_END_HANGS_S). So a suite
without ranks runs as before, and pytest gets no thread. A test costs three comparisons of a time, and one that lasted long enough for
ranks to join a system call: whether they have made the run directory that is named to them. If so, the next test names another.

Off with `-p no:distdiag`, with DISTDIAG=0, and for a test with `@pytest.mark.distdiag_off`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distdiag.terms.launchers import launched

if TYPE_CHECKING:
    from distdiag.diagnosis.model.findings import Finding

VERDICT_S = 3  # a proof must hold so long: a test may expect a timeout of a second or two
JOINS_S = 0.02  # no rank starts and joins in less
OFF = "distdiag_off"
_VARIABLES = ("DISTDIAG", "DISTDIAG_RUN_DIR", "DISTDIAG_QUIET", "DISTDIAG_END_HANGS_S", "DISTDIAG_NOT_PID")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{OFF}: distdiag does not record the ranks that this test starts")
    # if pytest itself is a rank, whoever launched it decides
    if (os.environ.get("DISTDIAG") is None or _is_worker(config)) and not launched(os.environ):
        config.pluginmanager.register(Recording(), "distdiag-recording")


def _is_worker(config: pytest.Config) -> bool:
    """True for a worker of pytest-xdist whose variables are those of this plugin in the process that started it."""
    return hasattr(config, "workerinput") and os.environ.get("DISTDIAG_NOT_PID") == str(os.getppid())


class Recording:
    """Names a run directory for the ranks of each test, and turns the verdicts in it into the failure of the test."""

    def __init__(self) -> None:
        self._long = False  # the test has lasted so long that ranks can have joined
        self._run = ""  # the directory for ranks that start now: they make it
        self._begun: list[Path] = []  # those that ranks have made
        self._open: list[Path] = []  # those in which a rank or a monitor may live: of fixtures also after the test
        self._judged: set[Path] = set()  # those closed, ended by the monitor, or over when this test began
        self._kept: set[Path] = set()  # that a report names
        self._problems: list[str] = []  # why something was not recorded or judged; no test fails by it
        self._before = {name: os.environ.get(name) for name in _VARIABLES}
        self._root: Path | None = None
        try:
            self._root = Path(tempfile.mkdtemp(prefix="distdiag-pytest-"))
        except OSError as e:
            self._problem(e)
            os.environ["DISTDIAG"] = "0"
            return
        os.environ.update(
            DISTDIAG="1", DISTDIAG_QUIET="1", DISTDIAG_END_HANGS_S=str(VERDICT_S), DISTDIAG_NOT_PID=str(os.getpid())
        )
        if "torch" in sys.modules:  # by a conftest; ranks that are forked have the hook of this process
            from distdiag import everywhere

            everywhere.install()
        self._next()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self._root is not None and any(OFF in item.keywords for item in session.items):
            session.config.pluginmanager.register(Off())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
        report = yield
        if call.duration >= JOINS_S:
            self._long = True
        # a hang that was ended took longer; what a test ended by itself is shown only if it failed
        if call.duration >= VERDICT_S or report.outcome == "failed":
            self._next()
            self._judge(report)
        elif call.when == "teardown" and self._long and self._next():
            self._judge(report)
        if call.when == "teardown":
            self._long = False
            if self._open:
                self._open = [base for base in self._open if not _ended(base)]
                over = (run for base in self._open for run in _runs(base) if _over(run))
                self._judged.update(db for run in over for db in (run / "run.db", *run.glob("node_*/run.db")))
        return report

    def _judge(self, report: pytest.TestReport) -> None:
        for run, finding, ended in self._verdicts():
            text = self._text(run, finding)
            if ended or report.outcome == "failed":
                self._kept.add(run)
            if report.outcome == "failed":
                report.sections.append(("distdiag", text))
            if ended and not getattr(report, "wasxfail", None):
                before = f"\n\n{report.longreprtext}" if report.outcome == "failed" else ""
                report.outcome, report.longrepr = "failed", text + before

    def _next(self) -> bool:
        """Name another directory if ranks have made the present one, or none is named; True if they have."""
        if self._root is None:
            return False
        made = os.path.lexists(self._run)
        if made:
            self._begun.append(Path(self._run))
            self._open.append(Path(self._run))
        if made or not self._run:
            self._run = os.environ["DISTDIAG_RUN_DIR"] = os.path.join(self._root, str(len(self._begun)))
        return made

    def _problem(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if text not in self._problems and len(self._problems) < 10:
            self._problems.append(text)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for problem in self._problems:
            from distdiag.terms.untrusted import visible

            terminalreporter.write_line(f"distdiag: not all tests were recorded or judged: {visible(problem)}")

    def _verdicts(self) -> Iterator[tuple[Path, Finding, bool]]:
        """Yield (run, finding, the monitor ended its ranks) of new proofs, in the runs of this test and of fixtures that live on.

        A job that was not ended failed, or went on, by itself: the test decides, which may expect that.
        """
        for base in self._open:
            for run in sorted(base.glob("**/run.db")):
                if run in self._judged:
                    continue
                from distdiag.diagnosis.model.findings import Certainty, Severity
                from distdiag.store.opening import RunUnreadable
                from distdiag.store.reader import open_run

                try:
                    with open_run(run) as opened:
                        ended = opened.meta.get("hang_ended_s") is not None
                        closed = opened.meta.get("monitor_ended") == "1"
                        hangs = [
                            f for f in opened.findings()
                            if f.severity == Severity.ERROR and f.certainty == Certainty.PROVED and f.cleared_s is None
                        ]  # fmt: skip
                except RunUnreadable:
                    continue
                except Exception as e:  # a defect of ours, and not of the test
                    self._problem(e)
                    continue
                if ended or closed:
                    self._judged.add(run)
                if hangs:
                    yield run.parent, min(hangs, key=lambda f: f.detected_s or 0.0), ended

    def _text(self, run: Path, finding: Finding) -> str:
        from distdiag.diagnosis.text.finding import finding_lines

        return "\n".join([*finding_lines(finding), f"  run    {run}"])

    def pytest_unconfigure(self) -> None:
        """Remove the runs without a verdict, and leave the environment as it was: pytest may run inside a program (`pytest.main`)."""
        self._next()
        for run in self._begun:
            _ended(run)
            if not any(k == run or run in k.parents for k in self._kept):
                shutil.rmtree(run, ignore_errors=True)
        if self._root is not None and not self._kept:
            shutil.rmtree(self._root, ignore_errors=True)
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _runs(base: Path) -> list[Path]:
    """Return the runs of the jobs that this directory was named to."""
    return [base, *sorted(base.glob("attempt_*"))]


def _joined(run: Path) -> bool:
    return any(run.glob(".node_*"))


def _over(run: Path) -> bool:
    """True if ranks have joined this run, and none of them lives; its monitor may still judge them."""
    from distdiag.page import directories
    from distdiag.page.reader import is_mapped

    pages = [page for found in directories.of_run(run).values() for d in found for page in d.glob("rank_*.page")]
    alive = any(map(is_mapped, pages))
    return not alive and _joined(run)


def _ended(base: Path) -> bool:
    """Remove the pages in memory of ranks that have ended; True if all have. A monitor does so, but not every rank lives to get one."""
    from distdiag.page import directories

    found = [d for run in _runs(base) for pages in directories.of_run(run).values() for d in pages]
    return not [d for d in found if directories.monitor_runs(d) or not directories.remove(d)] and _joined(base)


class Off:
    """Switches distdiag off for the tests that are marked so; registered only if there are any."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = os.environ["DISTDIAG"]
        if OFF in item.keywords:
            os.environ["DISTDIAG"] = "0"
        try:
            return (yield)
        finally:
            os.environ["DISTDIAG"] = before
