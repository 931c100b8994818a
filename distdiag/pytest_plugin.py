"""pytest plugin: a test whose ranks hang fails within seconds, with rank, file, line and condition as its failure.

Nothing in a test changes. DISTDIAG=1 in the environment has the processes recorded that a test starts and that join a process group;
the monitor, which starts with the first of them, ends the ranks of a proved hang (DISTDIAG_END_HANGS_S). So a suite without ranks
runs as before, and pytest gets no thread. Each test has its own run directory, below a temporary one.

Off with `-p no:distdiag`, with DISTDIAG=0, and for a test with `@pytest.mark.distdiag_off`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distdiag.terms.launchers import launched

if TYPE_CHECKING:
    from distdiag.diagnosis.model.findings import Finding

VERDICT_S = "3"  # a proof must hold so long: a test may expect a timeout of a second or two
TICK_NS = 10**9  # two changes of a directory within it may have the same time
_VARIABLES = ("DISTDIAG", "DISTDIAG_RUN_DIR", "DISTDIAG_QUIET", "DISTDIAG_END_HANGS_S", "DISTDIAG_NOT_PID")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "distdiag_off: distdiag does not record the ranks that this test starts")
    # if pytest itself is a rank, whoever launched it decides
    if (os.environ.get("DISTDIAG") is None or _is_worker(config)) and not launched(os.environ):
        config.pluginmanager.register(Recording(), "distdiag-recording")


def _is_worker(config: pytest.Config) -> bool:
    """True for a worker of pytest-xdist whose variables are those of this plugin in the process that started it."""
    return hasattr(config, "workerinput") and os.environ.get("DISTDIAG_NOT_PID") == str(os.getppid())


class Recording:
    """Names a run directory for each test, and turns the verdicts in it into the failure of the test."""

    def __init__(self) -> None:
        self._root: Path | None = None
        self._runs: dict[str, Path] = {}  # of tests, by name: also of earlier ones, as ranks of fixtures live on
        self._judged: set[Path] = set()  # those that are closed or have a verdict: nothing is added to them
        self._kept: set[Path] = set()  # that a report names
        self._begun: list[Path] = []  # the runs in the root when it changed last
        self._changed_ns = -1
        self._problems: list[str] = []  # why something was not recorded or judged; no test fails by it
        self._before = {name: os.environ.get(name) for name in _VARIABLES}
        # torch is perhaps imported by a conftest: ranks that are forked have the hook of this process
        os.environ.update(
            DISTDIAG="1", DISTDIAG_QUIET="1", DISTDIAG_END_HANGS_S=VERDICT_S, DISTDIAG_NOT_PID=str(os.getpid())
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        root = None if item.get_closest_marker("distdiag_off") is not None else self._directory()
        if root is None:
            os.environ["DISTDIAG"] = "0"
        else:
            name = str(len(self._runs))
            run = self._runs[name] = root / name
            os.environ["DISTDIAG_RUN_DIR"] = str(run)
        try:
            return (yield)
        finally:
            os.environ["DISTDIAG"] = "1"
            self._put({"DISTDIAG_RUN_DIR": self._before["DISTDIAG_RUN_DIR"]})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
        report = yield
        for run, finding, ended in self._verdicts():
            text = self._text(run, finding)
            if ended or report.outcome == "failed":
                self._kept.add(run)
            if report.outcome == "failed":
                report.sections.append(("distdiag", text))
            if ended and not getattr(report, "wasxfail", None):
                before = f"\n\n{report.longreprtext}" if report.outcome == "failed" else ""
                report.outcome, report.longrepr = "failed", text + before
        return report

    def _directory(self) -> Path | None:
        """Return the directory of this session's runs; None if none can be made."""
        if self._root is None:
            try:
                self._root = Path(tempfile.mkdtemp(prefix="distdiag-pytest-"))
            except OSError as e:
                self._problem(e)
        return self._root

    def _problem(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if text not in self._problems and len(self._problems) < 10:
            self._problems.append(text)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        from distdiag.terms.untrusted import visible

        for problem in self._problems:
            terminalreporter.write_line(f"distdiag: not all tests were recorded or judged: {visible(problem)}")

    def _verdicts(self) -> Iterator[tuple[Path, Finding, bool]]:
        """Yield (run, finding, the monitor ended its ranks) of new proofs, in the runs of this test and of fixtures that live on.

        A job that was not ended failed, or went on, by itself: the test decides, which may expect that.
        """
        for base in self._made():
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
                if hangs or closed:
                    self._judged.add(run)
                if hangs:
                    yield run.parent, min(hangs, key=lambda f: f.detected_s or 0.0), ended

    def _made(self) -> list[Path]:
        """Return the runs that ranks have begun: one system call after a test of a suite without ranks."""
        if self._root is None:
            return []
        try:
            changed_ns = os.stat(self._root).st_mtime_ns
            if changed_ns != self._changed_ns or time.time_ns() - changed_ns < TICK_NS:
                names = self._runs.keys() & set(os.listdir(self._root))
                self._changed_ns, self._begun = changed_ns, [self._runs[name] for name in sorted(names, key=int)]
        except OSError:  # a test has removed it
            return []
        return self._begun

    def _text(self, run: Path, finding: Finding) -> str:
        from distdiag.diagnosis.text.finding import finding_lines

        return "\n".join([*finding_lines(finding), f"  run    {run}"])

    @staticmethod
    def _put(variables: dict[str, str | None]) -> None:
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def pytest_sessionfinish(self) -> None:
        """Remove the runs of tests without a verdict."""
        kept = self._kept
        for run in self._made():
            if not any(k == run or run in k.parents for k in kept):
                shutil.rmtree(run, ignore_errors=True)
        if self._root is not None and not kept:
            shutil.rmtree(self._root, ignore_errors=True)

    def pytest_unconfigure(self) -> None:
        """Leave the environment as it was: pytest may run inside a program (`pytest.main`)."""
        self._put(self._before)
