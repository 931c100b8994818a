"""What recording costs a training step: plain and recorded steps interleaved in one run on two ranks, as a ratio.

    python benchmarks/overhead.py [--rounds 200] [--steps-per-round 10]

Each round has two blocks, in random order alike on both ranks. In one, steps are plain (hooks off, pulse silent) and
recorded (hooks and pulse) in turns, in pairs of random order, while the monitor is stopped by SIGSTOP: what neighbours on
the host do meets both alike. In the other, all steps are recorded and the monitor runs, on the cores that the ranks keep
busy. Hooks are switched by swapping the hooked methods of torch's classes for the originals and back, so that everything
else (process, memory, caches) is the same. The first figure is the median over all pairs of the ratio of their steps: what
hooks and pulse take from any one step is far less than steps differ by, so that the median moves with the mean of it and not
with the few steps that a neighbour stretched. The monitor takes milliseconds from few steps, and so the second is the median
over rounds of the ratio of means. Both have a 95 % bootstrap interval over rounds (a round is one sample: its ranks wait for
each other). The hooks alone are measured twice, in CPU microseconds a step: called one
after the other with no model between them, and as what they add to the step of a model of one weight, where the caches
are full of torch's own code when a hook's turn comes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ALLOWED_RATIO, ALLOWED_HOOKS_US, ALLOWED_BYTES = 1.005, 30.0, 8 << 20


class Switch:
    """The hooked methods and their originals, to take the recorder's hooks off and on within one process."""

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
    # as they lie in the class: a bound look-up of a C++ method would not bind again
    return {(o, n): vars(o)[n] for o, names in owners for n in names if n in vars(o)}


def _job(rounds: int, steps: int, hooks_only: bool) -> None:
    import psutil
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.optim import optimizer as optimizers
    from torch.utils.data import DataLoader, TensorDataset

    import distdiag
    from distdiag.recorder import session

    before = _methods()
    rss_before = psutil.Process().memory_info().rss
    distdiag.attach()
    switch = Switch(before, _methods())
    quiet = threading.Event()
    step_hooks = (dict(optimizers._global_optimizer_pre_hooks), dict(optimizers._global_optimizer_post_hooks))
    rss_after = psutil.Process().memory_info().rss
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    assert session.current is not None
    pulse = session.current.pulse
    beat = pulse.beat
    pulse.beat = lambda: None if quiet.is_set() else beat()  # type: ignore[method-assign]

    if hooks_only:
        net: torch.nn.Module = torch.nn.Linear(1, 1)
        data = TensorDataset(torch.zeros(4 * 256, 1))
        batch = 4
    else:
        net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 48, 3, padding=1), torch.nn.BatchNorm2d(48), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(48, 64, 3, padding=1), torch.nn.BatchNorm2d(64), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
            torch.nn.Flatten(), torch.nn.Linear(64 * 64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10),
        )  # fmt: skip
        data = TensorDataset(torch.randn(24 * 64, 3, 32, 32))
        batch = 24
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    loader = DataLoader(data, batch)

    def endless() -> Any:
        while True:
            yield from loader

    batches = endless()

    def step() -> float:
        t = time.perf_counter()
        (x,) = next(batches)
        loss = model(x).float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return time.perf_counter() - t

    monitor = _monitor() if dist.get_rank() == 0 else None

    def let_monitor(run: bool) -> None:
        if monitor is not None:
            os.kill(monitor, signal.SIGCONT if run else signal.SIGSTOP)

    def record(on: bool) -> None:
        quiet.clear() if on else quiet.set()
        (switch.on if on else switch.off)()
        for target, hooks in zip(
            (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks), step_hooks, strict=True
        ):
            target.update(hooks) if on else target.clear()

    order = random.Random(1)

    def in_turns() -> tuple[list[float], list[float]]:
        """Times of plain and of recorded steps, pair by pair."""
        let_monitor(run=False)
        step()
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(steps):
            for on in order.sample((False, True), 2):
                record(on)
                times[on].append(step())
        return times[False], times[True]

    shares: list[float] = []  # of one core, that the monitor took in each block; on the first rank

    def monitored() -> list[float]:
        let_monitor(run=True)
        record(on=True)
        step()
        began, cpu_s = time.perf_counter(), _cpu_s(monitor)
        out = [step() for _ in range(steps)]
        shares.append((_cpu_s(monitor) - cpu_s) / (time.perf_counter() - began))
        return out

    found: list[tuple[list[float], list[float], list[float]]] = []
    for _ in range(rounds + 2):
        if order.random() < 0.5:
            plain, recorded = in_turns()
            watched = monitored()
        else:
            watched = monitored()
            plain, recorded = in_turns()
        found.append((plain, recorded, watched))
    del found[:2], shares[:2]
    let_monitor(run=True)
    record(on=True)
    hooks_us = in_step_us = None
    if hooks_only:
        in_step_us = _hook_cost(step, record)
        hooks_us = _hooks_in_a_loop(model, optimizer, loader)
    all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, (found, rss_after - rss_before, hooks_us, in_step_us, shares))
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(all_ranks), flush=True)
    pulse.stop()
    dist.destroy_process_group()
    time.sleep(0.5)


def _monitor() -> int:
    """The process that watches this job."""
    from distdiag.errors import DistdiagError
    from distdiag.store.reader import open_run

    end = time.monotonic() + 30
    while True:
        try:
            return int(open_run(os.environ["DISTDIAG_RUN_DIR"]).meta["monitor_pid"] or 0)
        except (DistdiagError, KeyError):  # it is just starting
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _cpu_s(pid: int | None) -> float:
    """CPU seconds of all threads of a process so far; 0 for None."""
    if pid is None:
        return 0.0
    return sum(int(p.read_text().split()[0]) for p in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def _hook_cost(step: Callable[[], float], record: Callable[[bool], None]) -> list[float]:
    """CPU microseconds that hooks add to a step without a model: process CPU time, blocks interleaved."""
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
    """CPU microseconds of all hooks of a step with nothing between them, by blocks of 256 steps."""
    import torch

    from distdiag.recorder import session
    from distdiag.recorder.phases import DATA, forward_begins, forward_ends

    assert session.current is not None
    ph = session.current.phases
    iterator = iter(loader)
    batch = next(iterator)
    loss = torch.zeros(())
    parameter = next(model.parameters())
    parameter.grad = torch.zeros_like(parameter)

    [ready] = parameter._post_accumulate_grad_hooks.values()

    def hooks() -> None:
        t = ph.enter(DATA)
        ph.given(iterator, batch, t)
        began = forward_begins(ph, model, (batch,))
        forward_ends(ph, began, None)
        t = ph.backward_begins(loss)
        ready(parameter)
        ph.backward_ends(t, None)
        ph.optimizer_begins(optimizer)
        ph.optimizer_ends(optimizer)

    out = []
    for _ in range(400):
        t = time.thread_time()
        for _ in range(256):
            hooks()
        out.append((time.thread_time() - t) / 256 * 1e6)
    return out


def interval(
    rounds: list[list[float]], center: Callable[..., Any] | None = None, draws: int = 4000
) -> tuple[float, float, float]:
    """(median, or another center, low, high) of all values: bootstrap over rounds, 95 %."""
    import numpy as np

    center = center or np.median
    r = np.random.default_rng(0)
    values = np.asarray(rounds)
    centers = [center(values[r.integers(0, len(values), len(values))]) for _ in range(draws)]
    low, high = np.quantile(centers, (0.025, 0.975))
    return float(center(values)), float(low), float(high)


def _launch(arguments: list[str]) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "DISTDIAG_RUN_DIR": f"{folder}/run", "DISTDIAG_QUIET": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, "--job",
             *arguments],
            env=env, capture_output=True, text=True, timeout=1200, check=False,
        )  # fmt: skip
        time.sleep(1.5)  # the monitor writes its last rows
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
    if line is None:
        sys.exit(f"the job did not end well:\n{done.stdout[-500:]}\n{done.stderr[:3000]}")
    return json.loads(line[7:])


def main() -> int:
    import numpy as np  # not in the ranks: their memory is measured

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="rounds of three blocks (default 200)")
    parser.add_argument("--steps-per-round", type=int, default=10, help="steps of a block (default 10)")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--hooks", action="store_true", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.job:
        _job(o.rounds, o.steps_per_round, o.hooks)
        return 0
    ranks = _launch(["--rounds", str(o.rounds), "--steps-per-round", str(o.steps_per_round)])
    # by arm, round and step: the mean of the ranks
    plain, recorded_s, monitored_s = np.asarray([r[0] for r in ranks]).mean(0).transpose(1, 0, 2)
    rounds = len(plain)
    step_ms = float(np.median(plain)) * 1e3
    recorded, recorded_low, recorded_high = interval((recorded_s / plain).tolist())
    share, share_low, share_high = (100 * v for v in interval([[v] for v in ranks[0][4]], center=np.mean))
    ratio, low, high = interval((monitored_s.mean(1) / plain.mean(1))[:, None].tolist())
    memory = max(m for _, m, *_ in ranks)
    alone = _launch(["--rounds", "4", "--steps-per-round", "20", "--hooks"])
    hooks, in_step = ([v for r in alone for v in r[i]] for i in (2, 3))
    hook, hook_low, hook_high = interval([[v] for v in hooks])
    added, added_low, added_high = interval([[v] for v in in_step])
    passed = {
        "recorded": recorded_low <= ALLOWED_RATIO,
        "ratio": low <= ALLOWED_RATIO,
        "hooks": hook_low <= ALLOWED_HOOKS_US,
        "memory": memory <= ALLOWED_BYTES,
    }
    text = f"""# What recording costs

`python benchmarks/overhead.py --rounds {o.rounds} --steps-per-round {o.steps_per_round}` on {os.cpu_count()} cores
({platform.machine()}, {platform.system()}, no GPU), two gloo ranks; plain and recorded steps in turns, blocks of monitored steps between them, in one run.

| what | median | 95 % interval | n | allowed |
|---|---|---|---|---|
| recorded / plain step ({step_ms:.0f} ms): hooks and pulse | {recorded:.4f} | {recorded_low:.4f} – {recorded_high:.4f} | {recorded_s.size:,} pairs | {ALLOWED_RATIO} |
| monitored / plain step: the monitor, too, no core to spare | {ratio:.4f} | {low:.4f} – {high:.4f} | {rounds} rounds | {ALLOWED_RATIO} |
| the monitor, of one core, mean | {share:.2f} % | {share_low:.2f} – {share_high:.2f} % | {rounds} blocks | – |
| hooks alone, no model between them, CPU per step | {hook:.1f} µs | {hook_low:.1f} – {hook_high:.1f} µs | {len(hooks)} blocks | {ALLOWED_HOOKS_US:.0f} µs |
| the same, as added to a step of a model of one weight | {added:.1f} µs | {added_low:.1f} – {added_high:.1f} µs | {len(in_step)} blocks | – |
| extra memory of a rank at attach | {memory / 2**20:.1f} MiB | – | {len(ranks)} ranks | {ALLOWED_BYTES / 2**20:.0f} MiB |
"""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "overhead.md").write_text(text)
    print(text)
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
