"""For every test: a fresh mark in the environment, and a look for processes that outlived the test.

With `-n 2`, files whose tests are marked `job` run one after the other on one worker, as each of them wants both cores, and
all others beside them on the other, which takes its share of jobs when it has no more of those: they mostly wait.
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
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests.jobs import REPOSITORY, TEST_MARK, kill_marked, marked

# A runner in the background of a shell ignores Ctrl-C, and every process below it would, too; the tests of it must not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Without kept bytecode, each of the hundreds of processes that tests start would compile our sources again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The recorder counts its failures and goes on; in our own tests it raises them. Before any import of the package.
os.environ["DISTDIAG_RAISE"] = "1"

_GRACE_S = 5.0  # a monitor writes its last rows after the last rank is gone


def _orphans(mark: str) -> dict[int, str]:
    # Python's own helper for shared memory lives as long as the process that started it.
    return {pid: command for pid, command in marked(mark).items() if "multiprocessing.resource_tracker" not in command}


class _JobsInARow(LoadScopeScheduling):
    """Whole files to workers: every other one takes those with jobs first, the rest take them last."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        jobs_first = self.nodes.index(node) % 2 == 0
        wanted = next((file for file in self.workqueue if _has_jobs(file) == jobs_first), None)
        if wanted is not None:
            self.workqueue.move_to_end(wanted, last=False)
        super()._assign_work_unit(node)


@functools.cache
def _has_jobs(file: str) -> bool:
    return "mark.job" in (REPOSITORY / file).read_text()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return _JobsInARow(config, log)


@pytest.fixture(autouse=True)
def no_orphans() -> Iterator[None]:
    """Fail a test that leaves a process behind, and end the process."""
    before = os.environ.get(TEST_MARK)
    mark = os.environ[TEST_MARK] = uuid.uuid4().hex
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(TEST_MARK, None)
        else:
            os.environ[TEST_MARK] = before
    end = time.monotonic() + _GRACE_S
    while left := _orphans(mark):
        if time.monotonic() > end:
            kill_marked(mark)
            pytest.fail(f"processes outlived the test: {left}")
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def no_outer_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code under test in this process must not see the run directory of the person's shell."""
    for name in [n for n in os.environ if n.startswith("DISTDIAG_") and n != "DISTDIAG_RAISE"]:
        monkeypatch.delenv(name)


@pytest.fixture
def frozen_heap() -> Iterator[None]:
    """For tests that fork: a child must not collect what this process made, some of which has threads here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
