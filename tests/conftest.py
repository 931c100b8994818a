"""For every test: a fresh mark in the environment, and a check for processes that outlived the test.

Files with real jobs (marked `job`) mostly wait: three job tests at a time and the other files, which compute, keep two cores busy.
So `make test` has four workers: the second starts with all other files, and takes over job tests at the end. Job tests are assigned
one by one: with whole files, one worker would end minutes before the others. Files whose tests share a job come first, as a whole.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests.jobs import REPOSITORY, TEST_MARK, kill_marked, marked

# A runner in the background of a shell ignores Ctrl-C, and its children inherit that; the tests of Ctrl-C must not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Keep bytecode: otherwise each of the hundreds of processes that tests start would compile our sources again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The recorder counts its failures and continues; in our own tests it raises them. Set before the package is imported.
os.environ["DISTDIAG_RAISE"] = "1"

# Tests fork ranks from this process. A fork after OpenMP has started threads has no such threads, but believes that it has: it waits
# for them for ever or crashes as soon as it computes with more than one. With one thread, none is ever started here.
os.environ["OMP_NUM_THREADS"] = "1"

# A busy machine must not fail a property: its examples have no time limit, and are the same in every run (`make fuzz` draws others).
settings.register_profile("ours", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ours")

_GRACE_S = 5.0  # a monitor writes its last rows after the last rank has ended


def _orphans(mark: str, older: set[str]) -> dict[int, str]:
    # Python's own helper for shared memory lives as long as the process that started it.
    found = marked(mark, older)
    return {pid: command for pid, command in found.items() if "multiprocessing.resource_tracker" not in command}


class _JobsInARow(LoadScopeScheduling):
    """Assigns files and single job tests to workers, the largest first; the second worker runs job tests last, the others first."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        text = _text(file)
        return nodeid if "mark.job" in text and 'scope="module"' not in text else file

    def _assign_work_unit(self, node: WorkerController) -> None:
        jobs_first = self.nodes.index(node) != 1
        units = (unit for unit in self.workqueue if _has_jobs(unit) == jobs_first)
        wanted = max(units, key=lambda unit: len(self.workqueue[unit]), default=None)
        if wanted is not None:
            self.workqueue.move_to_end(wanted, last=False)
        super()._assign_work_unit(node)


def _has_jobs(unit: str) -> bool:
    return "mark.job" in _text(unit.partition("::")[0])


@functools.cache
def _text(file: str) -> str:
    return (REPOSITORY / file).read_text()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return _JobsInARow(config, log)


@pytest.fixture(autouse=True)
def no_orphans() -> Iterator[None]:
    """Fail a test that leaves a process behind, and kill the process."""
    before = os.environ.get(TEST_MARK)
    mark = os.environ[TEST_MARK] = uuid.uuid4().hex
    older = set(os.listdir("/proc"))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(TEST_MARK, None)
        else:
            os.environ[TEST_MARK] = before
    end = time.monotonic() + _GRACE_S
    while left := _orphans(mark, older):
        if time.monotonic() > end:
            kill_marked(mark)
            pytest.fail(f"processes outlived the test: {left}")
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def no_outer_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the run directory of the user's shell from code under test in this process."""
    for name in [n for n in os.environ if n.startswith("DISTDIAG_") and n != "DISTDIAG_RAISE"]:
        monkeypatch.delenv(name)


@pytest.fixture
def frozen_heap() -> Iterator[None]:
    """For tests that fork: a child must not garbage-collect this process's objects, some of which have threads here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
