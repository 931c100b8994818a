"""The job that `overhead.py` starts on its ranks: its steps with the hooks on and off, and timers around the hooks."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# the methods in `_methods` that run in the steps of this job
STEP_METHODS = {"forward", "_sync_buffers", "__iter__", "__next__", "backward", "prepare_for_backward"}
POLLS_CHANGE_S = (32.0, 130.0)  # ages of a monitor (s) after which it polls less often, plus a margin


class Switch:
    """Switches the recorder's hooks off and on within one process: hooked methods and their originals."""

    def __init__(self, before: dict[tuple[Any, str], Any], after: dict[tuple[Any, str], Any]) -> None:
        self.pairs = [(owner, name, before[owner, name], after[owner, name]) for owner, name in before
                      if before[owner, name] is not after[owner, name]]  # fmt: skip

    def on(self) -> None:
        for owner, name, _, hooked in self.pairs:
            setattr(owner, name, hooked)

    def off(self) -> None:
        for owner, name, plain, _ in self.pairs:
            setattr(owner, name, plain)


def _methods() -> dict[tuple[Any, str], Any]:
    import torch
    from torch._C import _distributed_c10d as c10d
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader, dataloader

    owners: list[tuple[Any, list[str]]] = [
        (c10d.ProcessGroup, [n for n in dir(c10d.ProcessGroup) if not n.startswith("__")]),
        (c10d.Work, ["wait"]),
        (c10d.Reducer, ["prepare_for_backward"]),
        (DDP, ["forward", "_sync_buffers"]),
        (DataLoader, ["__iter__"]),
        (dataloader._BaseDataLoaderIter, ["__next__"]),
        (torch.autograd, ["backward"]),
    ]
    # from the class dictionary: a bound C++ method would not bind again
    return {(o, n): vars(o)[n] for o, names in owners for n in names if n in vars(o)}


class Clocks:
    """Measures the time of our code: timers around hooked methods, minus timers around the originals inside.

    Timers take time themselves, part of it between two of theirs: so they can also be put around nothing (`hooks(False)`).
    """

    def __init__(self) -> None:
        self.ns = 0
        self.on = True
        self._originals: dict[tuple[Any, str], Any] = {}
        self._methods: list[tuple[Any, str, Any, Any]] = []  # owner, name, with hook, without
        self._optimizer: list[tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]]] = []

    def around(
        self, f: Callable[..., Any], sign: int = 1, clock: Callable[[], int] = time.perf_counter_ns
    ) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            t = clock()
            try:
                return f(*args, **kwargs)
            finally:
                self.ns += sign * (clock() - t)

        return _as_torch(timed)

    def inside(self) -> None:
        """Put timers around what the hooks call; before attach()."""
        import torch

        for (owner, name), original in _methods().items():
            if name in STEP_METHODS:
                self._originals[owner, name] = inner = self.around(original, -1)
                setattr(owner, name, inner)
        register = torch.Tensor.register_post_accumulate_grad_hook

        def registers(parameter: Any, hook: Any) -> Any:
            timed, nothing = self.around(hook), self.around(lambda _: None)
            return register(parameter, _as_torch(lambda p: timed(p) if self.on else nothing(p)))

        torch.Tensor.register_post_accumulate_grad_hook = registers

    def outside(self) -> None:
        """Put timers around the hooks and the pulse; after attach()."""
        from torch.optim import optimizer

        from distdiag.recorder import session

        for key, hooked in _methods().items():
            if key in self._originals:
                self._methods.append((*key, self.around(hooked), self.around(self._originals[key])))
        for hooks in (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks):
            timed = {k: self.around(hook) for k, hook in hooks.items()}
            self._optimizer.append((hooks, timed, dict.fromkeys(hooks, self.around(lambda *_: None))))
        assert session.current is not None
        # its own thread: its wait for the GIL takes nothing from the main thread
        beat = self.around(session.current.pulse.beat, clock=time.thread_time_ns)
        session.current.pulse.beat = lambda: beat() if self.on else None  # type: ignore[method-assign]

    def hooks(self, on: bool) -> None:
        """Put timers around hooks, or around nothing."""
        self.on = on
        for owner, name, hooked, plain in self._methods:
            setattr(owner, name, hooked if on else plain)
        for hooks, timed, nothing in self._optimizer:
            hooks.update(timed if on else nothing)


def _as_torch(f: Any) -> Any:
    """Compile with a file name of torch's: a hook skips that frame and looks for the user's above it."""
    import torch

    f.__code__ = f.__code__.replace(co_filename=torch.__file__)
    return f


def job(rounds: int, steps: int, batch: int, hooks_only: bool, by_clocks: bool) -> None:
    import psutil
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.optim import optimizer as optimizers
    from torch.utils.data import DataLoader, TensorDataset

    import distdiag
    from distdiag.recorder import session

    clocks = Clocks()
    if by_clocks:
        clocks.inside()
    before = _methods()
    rss_before = psutil.Process().memory_info().rss
    distdiag.attach()
    switch = Switch(before, _methods())
    if by_clocks:
        clocks.outside()
    quiet = threading.Event()
    step_hooks = [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
    rss_after = psutil.Process().memory_info().rss
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    assert session.current is not None
    pulse = session.current.pulse
    beat = pulse.beat
    pulse.beat = lambda: None if quiet.is_set() else beat()  # type: ignore[method-assign]

    if hooks_only:
        net: torch.nn.Module = torch.nn.Linear(1, 1)
        data = TensorDataset(torch.zeros(batch * 256, 1))
    else:
        net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 48, 3, padding=1), torch.nn.BatchNorm2d(48), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(48, 64, 3, padding=1), torch.nn.BatchNorm2d(64), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
            torch.nn.Flatten(), torch.nn.Linear(64 * 64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10),
        )  # fmt: skip
        data = TensorDataset(torch.randn(batch * 64, 3, 32, 32))
    model = DDP(net)
    step_hooks += [p._post_accumulate_grad_hooks for p in model.parameters() if p._post_accumulate_grad_hooks]
    kept = [dict(hooks) for hooks in step_hooks]
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    loader = DataLoader(data, batch)

    def endless() -> Any:
        while True:
            yield from loader

    batches = endless()

    def step() -> tuple[float, float]:
        """Return (wall, CPU) seconds of a step of this process, over all its threads."""
        cpu, t = time.process_time(), time.perf_counter()
        (x,) = next(batches)
        loss = model(x).float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return time.perf_counter() - t, time.process_time() - cpu

    if by_clocks:
        order = random.Random(1)  # equal on both ranks
        _print_of_all([_taken(step, clocks, steps, order) for _ in range(rounds + 2)][2:])
        return
    monitor = _monitor() if dist.get_rank() == 0 else None

    def record(on: bool) -> None:
        quiet.clear() if on else quiet.set()
        (switch.on if on else switch.off)()
        for target, hooks in zip(step_hooks, kept, strict=True):
            target.update(hooks) if on else target.clear()

    order = random.Random(1)

    def round_of_pairs() -> list[tuple[bool, float, float, float]]:
        """Run plain and recorded steps in pairs; return per step: whether recorded, wall seconds, CPU seconds,
        and the monitor's CPU seconds meanwhile (only on the first rank)."""
        step()
        done = []
        before = _cpu_s(monitor)
        for _ in range(steps):
            for on in order.sample((False, True), 2):
                record(on)
                wall, cpu = step()
                now = _cpu_s(monitor)
                done.append((on, wall, cpu, now - before))
                before = now
        record(on=True)
        return done

    def recorded_until(monitor_age_s: float) -> float:
        """Train until the monitor has this age; return its CPU seconds."""
        going = torch.ones(1)
        while going:
            for _ in range(20):
                step()
            going[0] = time.monotonic() - began_s < monitor_age_s
            dist.broadcast(going, 0)
        return _cpu_s(monitor)

    began_s = time.monotonic()
    ages = [] if hooks_only else [(age_s, recorded_until(age_s)) for age_s in (5.0, *POLLS_CHANGE_S)]
    found = [round_of_pairs() for _ in range(rounds + 2)][2:]
    hooks_us = in_step_us = None
    if hooks_only:
        in_step_us = _hook_cost(step, record)
        hooks_us = _hooks_in_a_loop(model, optimizer, loader)
    pulse.stop()
    _print_of_all((found, rss_after - rss_before, hooks_us, in_step_us, ages))


def _print_of_all(mine: Any) -> None:
    """Send the results of all ranks to `_launch`, and end."""
    import torch.distributed as dist

    all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, mine)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(all_ranks), flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


def _taken(
    step: Callable[[], tuple[float, float]], clocks: Clocks, n: int, order: random.Random
) -> tuple[float, float]:
    """Return (time of our code, length) of a step in ns, from a block with hooks and one without."""
    ns: dict[bool, float] = {}
    total_s: dict[bool, float] = {}
    for on in order.sample((True, False), 2):
        clocks.hooks(on)
        step()
        before = clocks.ns
        total_s[on] = sum(step()[0] for _ in range(n))
        ns[on] = (clocks.ns - before) / n
    return ns[True] - ns[False], total_s[True] * 1e9 / n


def _monitor() -> int:
    """Return the process that monitors this job."""
    from distdiag.errors import DistdiagError
    from distdiag.store.reader import open_run

    end = time.monotonic() + 30
    while True:
        try:
            return int(open_run(os.environ["DISTDIAG_RUN_DIR"]).meta["monitor_pid"] or 0)
        except (DistdiagError, KeyError):  # the monitor is just starting
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _cpu_s(pid: int | None) -> float:
    """Return the CPU seconds of all threads of a process so far; 0 for None."""
    if pid is None:
        return 0.0
    return sum(int(p.read_text().split()[0]) for p in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def _hook_cost(step: Callable[[], Any], record: Callable[[bool], None]) -> list[float]:
    """Return the CPU microseconds that hooks add to a step without a model: process CPU time, blocks interleaved."""
    n, out = 60, []

    def cpu(recorded: bool) -> float:
        record(recorded)
        step()
        t = time.thread_time()
        for _ in range(n):
            step()
        return (time.thread_time() - t) / n * 1e6

    for _ in range(30):
        a, b = cpu(False), cpu(True)
        out.append(b - a)
    return out


def _hooks_in_a_loop(model: Any, optimizer: Any, loader: Any) -> list[float]:
    """Return the CPU microseconds of all hooks of a step with nothing between them, in blocks of 256 steps."""
    import torch

    from distdiag.recorder import session
    from distdiag.recorder.hooks import step as step_hooks

    assert session.current is not None
    accounting = session.current.accounting
    iterator = iter(loader)
    batch = next(iterator)
    loss = torch.zeros(())
    parameter = next(model.parameters())
    parameter.grad = torch.zeros_like(parameter)

    [ready] = parameter._post_accumulate_grad_hooks.values()
    following = step_hooks.loader_next(accounting, lambda _: batch)
    forward = step_hooks.ddp_forward(accounting, lambda *_: None)
    backward = step_hooks.autograd_backward(accounting, lambda *_: ready(parameter))

    def hooks() -> None:
        following(iterator)
        forward(model, batch)
        backward(loss)
        accounting.optimizer_begins(optimizer)
        accounting.optimizer_ends(optimizer)

    out = []
    for _ in range(400):
        t = time.thread_time()
        for _ in range(256):
            hooks()
        out.append((time.thread_time() - t) / 256 * 1e6)
    return out


if __name__ == "__main__":
    kind, n_rounds, n_steps, n_images = sys.argv[1:]
    job(int(n_rounds), int(n_steps), int(n_images), hooks_only=kind == "hooks", by_clocks=kind == "clocks")
