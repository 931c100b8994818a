"""For every test: a fresh mark in the environment, and a look for processes that outlived the test.

With `-n 2 --dist loadgroup`, tests marked `job` run one after the other on one worker, as each of them wants both cores;
all others run beside them on the other.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator

import pytest

from tests.jobs import TEST_MARK, kill_marked, marked

_GRACE_S = 5.0  # a monitor writes its last rows after the last rank is gone


def _orphans(mark: str) -> dict[int, str]:
    # Python's own helper for shared memory lives as long as the process that started it.
    return {pid: command for pid, command in marked(mark).items() if "multiprocessing.resource_tracker" not in command}


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("job"):
            item.add_marker(pytest.mark.xdist_group("jobs"))


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
    for name in [n for n in os.environ if n.startswith("DISTDIAG_")]:
        monkeypatch.delenv(name)
