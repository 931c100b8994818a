"""An interrupt that comes while a hook runs reaches the job with the traceback that it has without distdiag."""

from __future__ import annotations

import _thread
import ast
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distdiag.recorder import state
from distdiag.recorder.fast import accounts
from distdiag.recorder.hooks.wrap_collectives import wrap_wait
from distdiag.recorder.hooks.wrapping import around
from tests.jobs import ONE_RANK, REPOSITORY, clean_env


class _Signal(int):
    arrives = property(_thread.interrupt_main)  # no call, after which Python would raise at once: as in C++


ERROR = ValueError("Connection closed by peer")


def blocked(*_: object) -> None:
    """Raise as C++ does in which a Ctrl-C was pending."""
    _ = _Signal(signal.SIGINT).arrives
    raise ERROR


def _around(ended: Callable[..., None]) -> Callable[..., Any]:
    return around(blocked, lambda *_: 1, ended)


def _wait(ended: Callable[..., None]) -> Callable[..., Any]:
    return wrap_wait(SimpleNamespace(wait_ends=ended), blocked, lambda _: (1, True))  # type: ignore[arg-type]


def of_recorder(function: str) -> Callable[..., Any]:
    """Return a function of the recorder's; `arrives(number)` in it raises a signal."""
    names = {"__name__": "distdiag.recorder.test", "arrives": signal.raise_signal}
    return eval(function, names)  # type: ignore[no-any-return]


def ours(error: BaseException) -> list[str]:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [f.f_code.co_name for f in frames if str(f.f_globals.get("__name__")).startswith("distdiag.")]


@pytest.mark.parametrize("wrapper", [_around, _wait])
def test_an_error_of_c_code_with_a_pending_interrupt_is_raised_first(wrapper: Callable[..., Any]) -> None:
    ended: list[object] = []
    call = wrapper(lambda *args: ended.append(args[0]))
    ERROR.__traceback__ = None
    raised: list[BaseException] = []

    def job() -> None:
        try:
            call(object())
        except ValueError as e:
            raised.append(e)

    with pytest.raises(KeyboardInterrupt) as caught:
        job()
    assert raised == [ERROR] or caught.value.__context__ is ERROR  # the job's code is the next that runs
    assert (ours(ERROR), ERROR.__context__, ours(caught.value)) == ([], None, [])
    assert ended == [1]


@pytest.mark.parametrize("at_begin", [True, False])
def test_an_interrupt_in_a_hook_leaves_no_frame_of_ours(at_begin: bool) -> None:
    hook = state.guarded(of_recorder("lambda *_, numbers=[2]: arrives(numbers.pop()) if numbers else 0"))
    call = around(lambda: 0, hook) if at_begin else around(lambda: 0, ends=hook)
    with pytest.raises(KeyboardInterrupt) as caught:
        call()
    assert ours(caught.value) == []


@pytest.mark.parametrize("in_c", [False, True])
def test_what_a_handler_of_the_job_raises_in_a_hook_is_no_failure_of_ours(
    monkeypatch: pytest.MonkeyPatch, in_c: bool
) -> None:
    """A job limits a call by SIGALRM, whose handler raises."""

    def handler(*_: object) -> None:
        raise TimeoutError("too slow")

    if in_c and not accounts.COMPILED:
        pytest.skip("the hooks were not compiled at the install")
    monkeypatch.setattr(state, "RAISE", False)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        slow = of_recorder(f"lambda *_: arrives({int(signal.SIGUSR1)})")
        hook = state.guarded(slow)
        if in_c:
            words = SimpleNamespace(words=memoryview(bytearray(8 << 20)).cast("Q"))
            hook = accounts.fast_hook(accounts.ledger(words, 0), "sync_ends", slow)  # type: ignore[arg-type]
        with pytest.raises(TimeoutError) as caught:
            around(lambda *_: 0, hook)(1, 2)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "handler" and ours(caught.value) == []


SCRIPT = r"""
import collections, os, random, signal, subprocess, sys, time, traceback
import torch, torch.distributed as dist, torch.distributed._functional_collectives as functional
from distdiag.recorder.hooks.wrapping import _wrappers

TIMES = 400
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=0, world_size=1)
group, t, entries = dist.group.WORLD, torch.ones(4, 4), {(c.co_filename, c.co_firstlineno) for c in _wrappers}
loader = torch.utils.data.DataLoader(torch.zeros(4, 2))

def make():
    global ddp, optimizer
    torch.set_grad_enabled(True)  # the interrupt came in no_grad
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)

def work():
    for x in loader:
        pass
    ddp(t).sum().backward()
    dist.all_reduce(t, async_op=True).wait()
    functional.wait_tensor(functional.all_reduce(t, "sum", group))
    optimizer.step()
    dist.barrier()

def ours(error):
    frames = [f for f, _ in traceback.walk_tb(error.__traceback__) if str(f.f_globals.get("__name__")).startswith("distdiag.")]
    # a signal in the first instruction of a wrapper cannot be caught there
    last = traceback.extract_tb(error.__traceback__)[-1]
    return [f.f_code for f in frames] if (last.filename, last.lineno) not in entries else []

make()
for _ in range(40):
    work()
code = f"import os, random, sys, time\nfor line in sys.stdin:\n time.sleep(random.random() * 0.01)\n os.kill({os.getpid()}, 2)"
sender = subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, bufsize=0)
interrupts, found = 0, collections.Counter()
while interrupts < TIMES:
    try:
        sender.stdin.write(b"go\n")
        while True:
            work()
    except KeyboardInterrupt as e:
        interrupts += 1
        found.update(map(str, ours(e)))
        make()
    except RuntimeError:  # DDP's state is what an interrupt has left
        make()
sender.terminate()
print(interrupts, {str(where): n for where, n in found.items()})
"""


@pytest.mark.job
@pytest.mark.parametrize("pure", ["", "1"], ids=["C", "Python"])
def test_interrupts_at_random_moments_leave_no_frame_of_ours(pure: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    env = clean_env(tmp_path / "home", {"PYTHONPATH": str(REPOSITORY), **ONE_RANK, "DISTDIAG_PURE": pure})
    done = subprocess.run(
        [sys.executable, "-m", "distdiag.run", "--run-dir", "R", "--quiet", "script.py"],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    interrupts, _, found = done.stdout.partition(" ")
    assert interrupts == "400", done.stderr[-2000:]
    # one in the first instruction of a wrapper cannot be taken out; each `make` begins a first forward, which has one in every module
    assert sum(ast.literal_eval(found).values()) <= 4, found
