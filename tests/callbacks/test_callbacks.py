"""The callbacks without their frameworks: what each event does, with stand-ins for the base classes. The real ones: `make realcode`."""

from __future__ import annotations

import copy
import importlib
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import distdiag
from distdiag.callbacks import Names
from tests.jobs import clean_env

BASES = {
    "lightning": ("lightning.pytorch.callbacks", "Callback"),
    "transformers": ("transformers", "TrainerCallback"),
    "accelerate": ("accelerate.tracking", "GeneralTracker"),
}


class Recorded:
    """A handle that keeps its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.calls.append(f"begin {name}")
        yield
        self.calls.append(f"end {name}")

    def epoch(self, number: int) -> None:
        self.calls.append(number)

    def meta(self, **facts: Any) -> None:
        self.calls.append(facts)

    log = meta


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    made = Recorded()
    monkeypatch.setattr(distdiag, "attach", lambda: made)
    return made


def module(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """Import a callback with a stand-in of its framework."""
    path, base = BASES[name]
    parts = path.split(".")
    for i in range(len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[: i + 1]), types.ModuleType(parts[i]))
    setattr(sys.modules[path], base, type(base, (), {}))
    monkeypatch.delitem(sys.modules, f"distdiag.callbacks.{name}", raising=False)
    made = importlib.import_module(f"distdiag.callbacks.{name}")
    monkeypatch.delitem(sys.modules, f"distdiag.callbacks.{name}")
    return made


def test_lightning(monkeypatch: pytest.MonkeyPatch, handle: Recorded) -> None:
    callback = module(monkeypatch, "lightning").DistdiagCallback()
    trainer = SimpleNamespace(max_steps=-1, current_epoch=3)
    callback.on_validation_start(trainer, None)  # the sanity check
    callback.on_validation_end(trainer, None)
    callback.on_fit_start(trainer, object())
    callback.on_train_epoch_start(trainer, None)
    callback.on_test_start(trainer, None)
    callback.on_exception(trainer, None, ValueError())
    assert handle.calls == ["begin validate", "end validate", {"model": "object"}, 3, "begin validate", "end validate"]
    trainer.max_steps = 70
    callback.on_fit_start(trainer, object())
    assert handle.calls[-1] == {"model": "object", "max_steps": 70}


def test_transformers(monkeypatch: pytest.MonkeyPatch, handle: Recorded) -> None:
    callback = module(monkeypatch, "transformers").DistdiagCallback()
    state = SimpleNamespace(max_steps=60, epoch=None)
    control = SimpleNamespace(should_save=False, should_evaluate=False)
    callback.on_train_begin(None, state, control)
    for state.epoch in (None, 0.9999999, 2.5):
        callback.on_epoch_begin(None, state, control)
    assert handle.calls == [{"max_steps": 60}, 0, 1, 2]
    handle.calls.clear()
    callback.on_step_end(None, state, control)
    assert handle.calls == []
    control.should_save = control.should_evaluate = True
    callback.on_step_end(None, state, control)  # it evaluates first
    callback.on_prediction_step(None, state, control)
    callback.on_prediction_step(None, state, control)
    control.should_evaluate = False
    callback.on_evaluate(None, state, control, metrics={})
    callback.on_save(None, state, control)
    assert handle.calls == ["begin validate", "end validate", "begin checkpoint", "end checkpoint"]


def test_accelerate(monkeypatch: pytest.MonkeyPatch, handle: Recorded) -> None:
    names = module(monkeypatch, "accelerate").DistdiagTracker()
    names.store_init_configuration({"lr": 0.1, "token": "x"})
    assert list(names.epochs(range(2))) == [0, 1]
    with names.phase("validate"):
        names.log({"loss": 0.5, "text": "no number"}, step=3)
    assert handle.calls == [{"lr": 0.1}, 0, 1, "begin validate", {"loss": 0.5}, "end validate"]
    assert names.tracker is handle and names.name == "distdiag"


def test_a_copied_callback_has_its_own_handle(handle: Recorded) -> None:
    names = Names()
    names.enter("validate")
    for other in (pickle.loads(pickle.dumps(names)), copy.deepcopy(names)):
        assert other.phase == "" and other._handle is None
    names.leave()
    names.leave()
    assert handle.calls == ["begin validate", "end validate"]


@pytest.mark.parametrize("name", BASES)
def test_without_the_framework_only_its_own_module_fails(name: str, tmp_path: Any) -> None:
    hidden = BASES[name][0].partition(".")[0]
    program = (
        f"import sys; sys.modules[{hidden!r}] = None; import distdiag.callbacks\n"
        f"assert not {{'torch', 'distdiag.recorder'}} & set(sys.modules)\n"
        f"try:\n    import distdiag.callbacks.{name}\nexcept ModuleNotFoundError as e:\n    print(e)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=clean_env(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0 and hidden in ended.stdout, ended.stderr


def test_names_outside_of_a_rank_raise_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """DISTDIAG=0: the handle records nothing, and every call of it is allowed."""
    from distdiag.recorder.handle import Handle

    monkeypatch.setattr(distdiag, "attach", lambda: Handle(None))
    names = Names()
    names.enter("validate")
    names.enter("checkpoint")
    names.handle.epoch(3)
    names.handle.meta(max_steps=5)
    names.leave()
    assert names.handle.run_dir is None
