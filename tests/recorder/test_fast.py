"""The hooks in C and in Python write the same: a job's record does not depend on a C compiler."""

from __future__ import annotations

import json
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distdiag.page.layout import SampleKind
from distdiag.page.writer import PageWriter
from distdiag.recorder import state
from distdiag.recorder.fast import accounts
from distdiag.recorder.hooks.replica_checksums import checksum_due
from tests.jobs import launch

pytestmark = [
    pytest.mark.job,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not accounts.COMPILED, reason="the hooks were not compiled at the install"),
]

# Every case that a hook distinguishes: another site, no gradients, accumulation, another optimizer, one within another, a thread, no tensor, NaN, an
# exception, no loader, a named phase, a gradient that moves or is missing.
SCRIPT = """
import json, sys, threading, warnings
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
import distdiag
from distdiag.recorder import session
from distdiag.recorder.fast import accounts

handle = distdiag.attach()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
second = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.01)

class Around(torch.optim.SGD):  # its step contains another's
    def step(self):
        second.step()
around = Around(second.param_groups[0]["params"], 0.01)
data = TensorDataset(torch.randn(42, 4), torch.arange(42))

def train(x):
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()

for epoch in range(6):
    for x, y in DataLoader(data, 4):
        train(x)
    with torch.no_grad():
        for x in DataLoader(TensorDataset(torch.randn(8, 4)), 2):
            model(x[0])
for x, y in DataLoader(data, 4):  # another place, twice in one step, the first without averaging
    with model.no_sync():
        model(x).sum().backward()
    loss = model(x).sum()
    with model.no_sync():  # too late: the forward has decided
        loss.backward()
    optimizer.step()
    second.step()
    around.step()
    optimizer.zero_grad(set_to_none=False)
for k in range(9):  # no loader, a loss in a tuple, a loss of another type
    loss = model(torch.randn(3, 4)).double().mean() if k % 2 else model(torch.randn(3, 4)).mean()
    torch.autograd.backward((loss,))
    optimizer.step()
for x, y in DataLoader(data, 4):
    try:
        model(x[:, :3] if len(x) == 2 else x).sum().backward()
    except RuntimeError:
        model(x).sum().backward()
    optimizer.step()
with handle.phase("validate"):
    model(torch.randn(3, 4))
other = threading.Thread(target=train, args=(torch.randn(5, 4),))
other.start(); other.join()
for x, y in DataLoader(data, 4):
    train(x)
with torch.inference_mode():
    model(torch.randn(2, 4))
handle.step(samples=7)
model.module[0].weight.register_hook(lambda g: g * float("nan"))
for x, y in DataLoader(data, 4):
    train(x)

page, h = session.current.recorder.page, session.current.recorder.header
def text(at):
    n = int.from_bytes(page.page.heap[at : at + 2], "little")
    return bytes(page.page.heap[at + 2 : at + 2 + n]).decode() if at else ""
pages = page.page
json.dump({
    "compiled": accounts.COMPILED,
    "errors": [h.errors, text(h.error)],
    "counts": [h.step, h.micro_steps, h.n_steps, h.dropped, h.n_models, h.life, h.phase, h.blocked],
    "steps": [(s.step, s.samples, s.batch, s.elements, s.loss_known, repr(s.loss) if s.loss_known else "") for s in pages.steps if s.number],
    "accounts": [[s.data_ns > 0, s.forward_ns > 0, s.backward_ns > 0, s.optimizer_ns > 0, s.wait_ns > 0, s.ready_ns > 0,
                  s.end_ns - s.start_ns >= s.data_ns + s.forward_ns + s.backward_ns + s.optimizer_ns]
                 for s in pages.steps if s.number],
    "sites": [(text(s.site), text(s.op), s.count) for s in pages.sites[: h.n_sites]],
    "models": [(m.forwards, m.synced_backwards, m.vain_no_syncs, text(m.site)) for m in pages.models[: h.n_models]],
    "loaders": [(text(l.site), l.iterations, l.batches, l.in_training, l.exhausted, l.fed, l.n_first, list(l.first), l.given, l.elements, l.sampled_epoch)
                for l in pages.loaders[: h.n_loaders]],
    "samples": [(s.kind, s.step, repr(s.value), s.key, text(s.site)) for s in pages.samples if s.number],
}, open(sys.argv[1], "w"))
dist.destroy_process_group()
"""


def recorded(folder: Path, pure: bool) -> dict[str, Any]:
    folder.mkdir()
    script = folder.parent / "script.py"
    script.write_text(SCRIPT)
    env = {"DISTDIAG_RUN_DIR": str(folder / "R"), "DISTDIAG_PURE": "01"[pure]}
    with launch([script, "found.json"], nproc=1, cwd=folder, timeout=60, env=env, fork_ranks=True) as job:
        assert job.wait() == 0, job.tail()
    return json.loads((folder / "found.json").read_text())


def test_c_and_python_hooks_write_the_same(tmp_path: Path) -> None:
    compiled, python = recorded(tmp_path / "c", pure=False), recorded(tmp_path / "p", pure=True)
    assert (compiled.pop("compiled"), python.pop("compiled")) == (True, False)
    assert compiled["errors"] == [0, ""]
    assert all(0 < x[8] <= x[9] for x in compiled["loaders"]), "batches of all epochs, and their elements"
    assert compiled["models"][0][2] == 11, "backward passes that averaged although in no_sync()"
    assert len(compiled["steps"]) > 100 and len(compiled["sites"]) > 8
    for what, value in python.items():
        assert compiled[what] == value, what
    checked = [step for kind, step, *_ in compiled["samples"] if kind == SampleKind.PARAMETERS]
    due = [0, *(step for step in range(compiled["steps"][-1][0] + 1) if checksum_due(step))]
    assert checked == due and due[-1] == 96


def test_a_compiled_module_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    import distdiag.recorder.fast._hot as compiled

    assert accounts.misfit(compiled) == ""
    other = SimpleNamespace(**{name: getattr(compiled, name) for name in dir(compiled)})
    other.CONSTANTS = compiled.CONSTANTS | {"BACKWARD": 5}
    assert accounts.misfit(other).endswith("CONSTANTS")
    other.CONSTANTS, other.RECORD = compiled.CONSTANTS, compiled.RECORD[:-1]
    assert accounts.misfit(other).endswith("RECORD")
    other.RECORD, other.Ledger = compiled.RECORD, object
    assert "Ledger has no" in accounts.misfit(other)


def test_an_index_outside_the_page_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "current", state.Recorder(PageWriter(tmp_path / "page")))
    ledger = accounts.ledger(state.current.page, threading.get_ident())
    asked: list[str] = []

    def hook(name: str, *args: Any) -> None:
        accounts.fast_hook(ledger, name, lambda *_: asked.append(name), place)(*args)

    class Module:
        require_backward_grad_sync = True

    place, model, module, iterator = accounts.CallFrame(), accounts.ModelWords(), Module(), object()
    far = 2**40
    ledger.loader, ledger.batches_at = id(iterator), far
    hook("data_ends", iterator, [torch.zeros(2)], 1)
    model.ref, model.forward, model.forward_count, model.forwards_at, model.synced_at = (
        weakref.ref(module), place, far, far, far
    )  # fmt: skip
    ledger.models[id(module)] = model
    hook("forward_begins", module, ())
    hook("forward_ends", module, 1)
    place.code, place.instruction = sys._getframe().f_code, -1
    ledger.pending.append(model)
    ledger.count_at, ledger.trained = far, True
    hook("backward_begins", torch.zeros(()))
    assert asked == ["data_ends", "forward_begins", "forward_ends", "backward_begins"]


def test_a_gradient_is_checked_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient with gaps in its memory may have the address of the previous one."""
    monkeypatch.setattr(state, "current", state.Recorder(PageWriter(tmp_path / "page")))
    words = accounts.GradientWords()
    words.n, words.stride, words.plain = 4, 1, True
    ledger, asked = accounts.ledger(state.current.page, 0), []
    ready = accounts.fast_hook(ledger, "gradient_is_ready", asked.append, words)
    memory = torch.zeros(8)
    whole, gaps = SimpleNamespace(grad=memory[:4]), SimpleNamespace(grad=memory[::2])
    ready(whole)
    assert asked == []
    ready(gaps)
    assert asked == [gaps]


def test_an_error_in_c_is_counted_and_does_not_reach_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PageWriter(tmp_path / "page")
    monkeypatch.setattr(state, "current", state.Recorder(page))
    ledger = accounts.ledger(page, 0)
    asked: list[tuple[Any, ...]] = []
    ends = accounts.fast_hook(ledger, "sync_ends", lambda *args: asked.append(args))
    ends(1, 2)  # a wrong number of arguments for this hook: the slow path is called
    assert asked == [(1, 2)]
    monkeypatch.setattr(state, "RAISE", False)
    assert ends("no time", None, None) is None and page.header.errors == 1
    monkeypatch.setattr(state, "RAISE", True)
    with pytest.raises(TypeError):
        ends("no time", None, None)  # raised in our own tests
    with pytest.raises(ValueError, match="no hook"):
        accounts.fast_hook(ledger, "no such hook", print)
    with pytest.raises(TypeError, match="CallFrame"):
        accounts.fast_hook(ledger, "backward_begins", print, object())


@pytest.mark.parametrize("in_c", [True, False])
def test_an_error_of_the_slow_path_is_counted_and_ctrl_c_reaches_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_c: bool
) -> None:
    page = PageWriter(tmp_path / "page")
    monkeypatch.setattr(state, "current", state.Recorder(page))
    monkeypatch.setattr(state, "RAISE", False)

    def slow(error: BaseException, _: int) -> None:
        raise error

    ledger = accounts.ledger(page, 0)
    hook = accounts.fast_hook(ledger, "sync_ends", slow) if in_c else state.guarded(slow)
    assert hook(ValueError("wrong"), 2) is None and page.header.errors == 1
    assert b"ValueError: wrong at test_fast.py" in bytes(page.page.heap)
    with pytest.raises(KeyboardInterrupt):
        hook(KeyboardInterrupt(), 2)
    assert page.header.errors == 1
