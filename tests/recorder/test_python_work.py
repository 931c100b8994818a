"""The wait of a Work written in Python, as some backends return, is recorded, too."""

from __future__ import annotations

from typing import Any

import pytest
from torch._C import _distributed_c10d as c10d

from distdiag.recorder.hooks.wrap_collectives import _wrap_python_wait


class Waits:
    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    def wait_begins(self, work: Any) -> tuple[int, bool]:
        self.seen.append(("begins", work))
        return 7, True

    def wait_ends(self, number: int, blocked: bool, error: BaseException | None) -> None:
        self.seen.append(("ends", (number, blocked, error)))


def test_a_wait_that_python_overrides_is_recorded_once_with_its_error() -> None:
    class Done(c10d.Work):
        def wait(self, timeout: Any = None) -> bool:
            if timeout == "late":
                raise RuntimeError(timeout)
            return True

    class Later(Done):
        pass

    waits = Waits()
    for _ in range(2):
        _wrap_python_wait(waits, Later)  # type: ignore[arg-type]
    work = Later()
    assert work.wait() is True
    assert waits.seen == [("begins", work), ("ends", (7, True, None))]
    with pytest.raises(RuntimeError) as raised:
        work.wait("late")
    assert waits.seen[3] == ("ends", (7, True, raised.value))
    _wrap_python_wait(waits, c10d.Work)  # type: ignore[arg-type]
    assert Done.wait.__name__ == "wait"
