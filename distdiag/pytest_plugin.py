"""pytest plugin: a test whose ranks hang fails within seconds, with rank, file, line and condition as its failure.

Nothing in a test changes. DISTDIAG=1 in the environment has the processes recorded that a test starts and
that join a process group; the monitor, which starts with the first of them, ends the ranks of a proved hang
(DISTDIAG_END_HANGS_S). So a suite without ranks runs as before, and pytest gets no thread. Each test has its
own run directory, below a temporary one.

Off with `-p no:distdiag`, with DISTDIAG=0, and for a test with `@pytest.mark.distdiag_off`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distdiag.terms.launchers import launched

if TYPE_CHECKING:
    from distdiag.diagnosis.model.findings import Finding

VERDICT_S = "3"  # a proof must hold so long: a test may expect a timeout of a second or two


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
        self._problems: list[str] = []  # why something was not recorded or judged; no test fails by it
        self._environment = pytest.MonkeyPatch()
        # torch is perhaps imported by a conftest: ranks that are forked have the hook of this process
        self._environment.setenv("DISTDIAG", "1")
        self._environment.setenv("DISTDIAG_NOT_PID", str(os.getpid()))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        root = None if item.get_closest_marker("distdiag_off") is not None else self._directory()
        variables = {"DISTDIAG": "0"}
        if root is not None:
            run = self._runs.setdefault(name := str(len(self._runs)), root / name)
            variables = {
                "DISTDIAG": "1", "DISTDIAG_RUN_DIR": str(run), "DISTDIAG_QUIET": "1", "DISTDIAG_END_HANGS_S": VERDICT_S,
                "DISTDIAG_NOT_PID": str(os.getpid()),
            }  # fmt: skip
        with pytest.MonkeyPatch.context() as environment:
            for name, value in variables.items():
                environment.setenv(name, value)
            return (yield)

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
        """Yield (run, finding, True if the monitor ended its ranks) of new proofs, also in runs of fixtures.

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
        """Return the runs that ranks have begun, by one listing: few tests start ranks."""
        try:
            names = set(os.listdir(self._root)) if self._root is not None else set()
        except OSError:  # a test has removed it
            return []
        return [self._runs[name] for name in sorted(self._runs.keys() & names, key=int)]

    def _text(self, run: Path, finding: Finding) -> str:
        from distdiag.diagnosis.text.finding import finding_lines

        return "\n".join([*finding_lines(finding), f"  run    {run}"])

    def pytest_sessionfinish(self) -> None:
        """Remove the runs of tests without a verdict."""
        kept = self._kept
        for run in self._runs.values():
            if not any(k == run or run in k.parents for k in kept):
                shutil.rmtree(run, ignore_errors=True)
        if self._root is not None and not kept:
            shutil.rmtree(self._root, ignore_errors=True)

    def pytest_unconfigure(self) -> None:
        """Leave the environment as it was: pytest may run inside a program (`pytest.main`)."""
        self._environment.undo()
