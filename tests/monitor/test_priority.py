"""The monitor runs at low priority while the job is well, and at its ordinary one while something may be wrong."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from distdiag.monitor import priority
from distdiag.monitor.priority import LOW, Priority


def test_a_poll_of_a_healthy_job_has_low_priority_and_the_next_can_have_the_ordinary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = tmp_path / "autogroup"
    monkeypatch.setattr(priority, "_AUTOGROUP", share)
    own, seen = os.getpriority(os.PRIO_PROCESS, 0), []

    def poll() -> bool:
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        seen.append((nice, share.read_text() if share.exists() else None))
        return nice == LOW

    monitors = Priority()
    assert [monitors.run(poll, low) for low in (False, True, True, False)] == [False, True, True, False]
    assert seen == [(own, None), (LOW, "10"), (LOW, "10"), (own, "0")]
    assert not Priority(always_ordinary=True).run(poll, low=True)


def test_a_kernel_without_autogroups_and_a_failing_poll_are_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(priority, "_AUTOGROUP", tmp_path / "absent" / "autogroup")

    def broken() -> bool:
        raise ValueError("a poll")

    monitors = Priority()
    for low in (True, False):
        with pytest.raises(ValueError, match="a poll"):
            monitors.run(broken, low)
    assert monitors.run(lambda: True, low=True)
