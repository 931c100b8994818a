"""The accounts of a step (times, counts, flags) that the hooks share, and the choice between C and Python.

Between two hooks the step's computation empties the caches, and a Python function then costs ten times what it costs in a loop.
So each hook is a `fast_hook` around a Python function, the slow path, which handles every case. The fast path in `c/` handles
the common case (nothing new, nothing on a device, no error) and calls the slow path otherwise. Without the compiled module the
slow path does everything, and the classes here replace those in C.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from distdiag.page.layout import STEPS, Blocked, LifeWord, Page, Phase, StepRecord, word
from distdiag.recorder import state, unseen
from distdiag.recorder.frames import user_frame
from distdiag.recorder.state import now_ns

if TYPE_CHECKING:
    from distdiag.page.writer import PageWriter

_LIFE, _STARTING, _RUNNING = word("life"), int(LifeWord.STARTING), int(LifeWord.RUNNING)
_STEP, _EPOCH, _DEVICE_BYTES = word("step"), word("epoch"), word("device_bytes")
_WORDS = ("phase", "phase_since_ns", "blocked", "blocked_at", "blocked_site", "blocked_since_ns", "step", "micro_steps", "n_steps", "n_calls", "epoch", "device_bytes", "life")  # fmt: skip
FINGERPRINTS = 6  # batches of an epoch of which a fingerprint is taken


class Ledger:
    """The accounts of the current step, and other state shared by hooks. Times are in ns."""

    def __init__(self, page: PageWriter) -> None:
        self._page = page
        self.main_thread = 0
        self.idle = int(Phase.OTHER)  # phase after a hook's own phase ends: OTHER, or the one that the job named
        self.data_ns = self.forward_ns = self.backward_ns = self.optimizer_ns = 0
        self.wait_ns = 0  # the main thread's waiting for other ranks
        self.forward_wait_ns = 0  # its part in forward: DDP's broadcast of buffers
        self.optimizer_wait_ns = 0  # its part in optimizer steps: the collectives that they call
        self.arrived_ns = 0  # when this step's first wait for other ranks began; 0: not yet
        self.ready_ns = 0  # when the gradient that is typically the last was ready
        self.last_ready_ns = 0  # when the last wait for a collective began
        self.step_start_ns = now_ns()
        self.optimizer_start_ns = 0
        self.samples = self.batch = self.elements = 0  # elements: of the first tensor of the step's batches
        self.loss: float | None = None
        self.reduced_elements = 0  # over all ranks, between the last backward and the optimizer's step
        self.next_event = 0  # the next step with a check before the optimizer
        self.always = True  # every step has one
        self.bad_losses = 0  # consecutive losses that are not finite
        # id of the iterator of the newest batch, and the index of its batch count; 0: unknown
        self.loader = self.batches_at = 0
        self.trained = False  # a backward pass has followed a batch of the loader that gave the last one
        # site of the last backward that averaged gradients, and the index of its count; -1: not counted
        self.counted_site, self.count_at = 0, -1
        self.cuda = False  # each forward may be the first on a device
        self.on_device = False  # phases are timed on a device
        # the first tensor of the newest batch, while it exists
        self.newest: Callable[[], torch.Tensor | None] | None = None
        # the same of what entered a DDP module first in this step
        self.entered: Callable[[], torch.Tensor | None] | None = None
        self.lead: Callable[[], Any] | None = None  # the optimizer whose steps are the job's
        self.lead_misses = 0
        self.averaged_by: Any = None  # the model with the last averaged gradients
        self.models: dict[int, Any] = {}  # by id of the DDP module
        self.pending: list[Any] = []  # models after a forward with gradients whose backward has not averaged them yet
        self.later: list[Any] = []  # values being copied from a device

    def close_step(self, t: int) -> None:
        """Write the record of the step that ends at `t`; begin the next."""
        words = self._page.words
        ready = self.ready_ns or self.last_ready_ns
        step = words[_STEP] + 1
        self._page.write_step(
            step, words[_EPOCH], self.step_start_ns, t, self.data_ns, 0, self.forward_ns, self.backward_ns, self.optimizer_ns,
            self.wait_ns, ready if ready > self.step_start_ns else 0, self.samples, self.batch, self.loss,
            words[_DEVICE_BYTES], self.forward_wait_ns, self.arrived_ns, self.optimizer_wait_ns, self.elements,
        )  # fmt: skip
        words[_STEP] = step
        self.begin_step(t)

    def begin_step(self, t: int) -> None:
        """Begin a step at `t` with empty accounts."""
        self.step_start_ns = t
        self.data_ns = self.forward_ns = self.backward_ns = self.optimizer_ns = self.wait_ns = self.ready_ns = 0
        self.forward_wait_ns = self.arrived_ns = self.optimizer_wait_ns = 0
        self.samples = self.batch = self.elements = 0
        self.loss = None
        words = self._page.words
        if words[_LIFE] == _STARTING:
            words[_LIFE] = _RUNNING


class CallFrame:
    """A user frame and its distance from the hook that looks for it."""

    def __init__(self) -> None:
        self.code: CodeType | None = None
        self.depth, self.instruction, self.site = 0, -1, 0


class ModelWords:
    """State of a DDP module that its hooks need: weak reference, site of its forward, index of its counts in the page."""

    def __init__(self) -> None:
        self.ref: Any = None
        self.forward: Any = None
        self.group_at, self.forward_count = -1, -1
        self.forwards_at = self.synced_at = self.forward_site = 0


class GradientWords:
    """Which elements of a gradient are read: every `stride`-th of `n`.

    `plain`: the parameter is a dense float32 tensor on the CPU.
    """

    def __init__(self) -> None:
        self.n, self.stride, self.plain = 0, 1, False


_IN_PYTHON = Ledger, ModelWords, GradientWords, CallFrame


def assumed() -> dict[str, Any]:
    """Return the constants of the page, and of the classes here, that the C code must have."""
    numbers = {field: word(field) - word("phase") for field in _WORDS}
    phases = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER, Phase.VALIDATE)
    for member in (*phases, Blocked.DDP, LifeWord.STARTING, LifeWord.RUNNING):
        numbers[member.name] = int(member)
    return {
        "CONSTANTS": numbers | {"FINGERPRINTS": FINGERPRINTS, "SLOW_IS_GUARDED": 1},
        "RECORD": tuple(field[0] for field in StepRecord._fields_),
    }


def misfit(module: Any) -> str:
    """Return a text about the first constant in which a compiled module differs from this package; "" if none does."""
    for name, value in assumed().items():
        if getattr(module, name, None) != value:
            return f"compiled hooks of another version: {name}"
    for cls in _IN_PYTHON:
        made = cls(None) if cls is _IN_PYTHON[0] else cls()  # type: ignore[arg-type, call-arg]
        missing = [name for name in vars(made) if name != "_page" and not hasattr(getattr(module, cls.__name__), name)]
        if missing:
            return f"compiled hooks of another version: {cls.__name__} has no {missing[0]}"
    return "" if hasattr(module, "CollectionTimer") else "compiled hooks of another version: no CollectionTimer"


def _compiled() -> tuple[Any, str]:
    """Return the compiled module (None if it is not used), and why an existing one is not used."""
    if os.environ.get("DISTDIAG_PURE") == "1" or "t" in sys.abiflags:
        return None, ""
    try:
        found = importlib.import_module("distdiag.recorder.fast._hot")
    except ImportError:  # not compiled, or for another Python
        return None, ""
    problem = misfit(found)
    return (None, problem) if problem else (found, "")


_c, MISFIT = _compiled()
COMPILED = _c is not None
if not TYPE_CHECKING and _c is not None:
    Ledger, CallFrame, ModelWords, GradientWords = _c.Ledger, _c.CallFrame, _c.ModelWords, _c.GradientWords


def ledger(page: PageWriter, main_thread: int | None) -> Ledger:
    """Return the ledger of a page. Its hooks run in the main thread only."""
    unseen.install()
    if _c is None:
        made = Ledger(page)
    else:
        made = _c.Ledger(
            page.words, word("phase"), Page.steps.offset // 8, STEPS, state.failed, torch.Tensor, torch.float32, torch.strided,
            torch.is_grad_enabled, unseen.function_modes, unseen.dispatch_modes, unseen.unseen,
        )  # fmt: skip
    made.main_thread = main_thread or 0
    return made


def time_collections(page: PageWriter) -> None:
    """Time the collections of the oldest generation into the page from now on, if the hooks are compiled.

    A callback in Python would swallow a Ctrl-C that comes during a collection: see `c/module.c`.
    """
    if _c is not None:
        gc.callbacks.append(_c.CollectionTimer(page.words, word("gc_ns"), word("gc_count")))


def fast_hook(shared: Ledger, name: str, slow: Callable[..., Any], of: Any = None) -> Callable[..., Any]:
    """Return a hook: its fast path is the C function `name`, which may read `of`; `slow` handles every other case, guarded."""
    return state.guarded(slow) if _c is None else _c.fast_hook(shared, name, slow, of)


class LastCallSite(CallFrame):
    """Finds the call site from which the user last called one function of torch. The next call is likely at the same site and depth.

    With cold caches, walking up the stack with a lookup per frame takes longer than the rest of a hook.
    """

    def __init__(self, recorder: state.Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def find(self) -> int:
        """Return the heap offset of the innermost user frame; call it from the slow path of a hook only.

        The frame of the hook, which replaces torch's method, is the second above this one.
        """
        try:
            f = sys._getframe(self.depth + 2)
            if f.f_code is self.code and f.f_lasti == self.instruction:
                return self.site
        except ValueError:  # fewer frames than before
            pass
        f = start = sys._getframe(2)
        user = user_frame(start)
        self.site = self._recorder.site(user)
        self.code, self.depth = None, 0
        if user is not None:
            self.code, self.instruction = user.f_code, user.f_lasti
            while f is not user and f is not None:
                self.depth += 1
                f = f.f_back
        return self.site
