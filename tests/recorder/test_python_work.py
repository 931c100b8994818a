"""Classes of torch's that a job has subclassed in Python: they work, and the wait of such a Work is recorded, too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from distdiag.recorder.hooks.wrap_collectives import _wrap, _wrap_python_wait
from distdiag.recorder.hooks.wrapping import around, as_c_method


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


@pytest.mark.parametrize("recorded", [True, False])
def test_a_subclass_has_torchs_methods_that_it_does_not_override(
    recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of such an object, C++ calls the method that Python has under its name, if that is no C++ function: ours."""
    collectives: Any = SimpleNamespace(begin=lambda *_: None, failed=None)
    for name in ("allreduce", "broadcast"):
        original = getattr(c10d.ProcessGroup, name)
        ours = as_c_method(_wrap(collectives, name, original), original)
        monkeypatch.setattr(c10d.ProcessGroup, name, ours if recorded else around(original, c_method=True))

    class Counts(c10d.ProcessGroup):
        calls = 0

        def allreduce(self, tensors: Any, options: Any) -> Any:
            self.calls += 1
            return super().allreduce(tensors, options)

    made: Any = (Counts, c10d.ProcessGroupGloo)  # torch's stubs have other arguments
    group, backend = made[0](0, 1), made[1](c10d.HashStore(), 0, 1)
    group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)
    group.allreduce([torch.ones(1)], c10d.AllreduceOptions()).wait()
    group.broadcast([torch.ones(1)], c10d.BroadcastOptions()).wait()
    assert group.calls == 1
