"""Measures each hook of a step with cold caches: a convolution runs before and inside every hook, as a real step's computation would.

    python benchmarks/cold_hooks.py [--rounds 250]

A hook costs ten times more in a training step than in a loop, because the step's computation has emptied the caches. Here a
convolution of several MiB empties them before each hook and, if a hook wraps a method of torch's, replaces that method; the same is
measured around the method without its hook, and subtracted. One process, one rank. Output: CPU microseconds per hook, as means
of the lower 95 % of the rounds (the rest was interrupted), with a 95 % bootstrap interval. They repeat within a few per cent; the
time of whole steps needs thousands of them for that. The code before a hook in a real step may already have loaded some of
its cache lines, so these values are upper bounds.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

now_ns = time.perf_counter_ns


class Caches:
    """Empties the caches, and replaces torch's methods while a hook is measured."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        self._torch = torch
        self._large = torch.nn.Conv2d(48, 64, 3, padding=1), torch.randn(24, 48, 16, 16)
        self._small = torch.nn.Linear(1, 1), torch.zeros(1, 1)
        self.measuring = False
        self.inside_ns = 0

    def empty(self) -> None:
        with self._torch.no_grad():
            for layer, x in (self._large, self._small):  # finally a little Python and torch, as before any hook
                layer(x)

    def instead_of(self, method: Callable[..., Any], value: Any) -> Callable[..., Any]:
        """Return `method`, replaced while a hook is measured: then the caches are emptied, and `value` is returned."""

        def either(*args: Any, **kwargs: Any) -> Any:
            if not self.measuring:
                return method(*args, **kwargs)
            t = now_ns()
            self.empty()
            self.inside_ns += now_ns() - t
            return value

        # with a file name of torch's: a hook skips that frame and looks for the user's above it
        either.__code__ = either.__code__.replace(co_filename=self._torch.__file__)
        return either

    def time_ns(self, call: Callable[..., Any], *args: Any) -> int:
        self.empty()
        self.inside_ns, self.measuring = 0, True
        t = now_ns()
        call(*args)
        taken = now_ns() - t - self.inside_ns
        self.measuring = False
        return taken


def measure(rounds: int) -> dict[str, tuple[list[int], list[int]]]:
    """Return the nanoseconds of each hook by round, and of the same without it."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

    import distdiag
    from distdiag.recorder import session

    caches = Caches()
    plain = {}
    methods: list[tuple[Any, str, Any]] = [
        (LoaderIterator, "__next__", [torch.zeros(8, 3, 8, 8)]), (DDP, "forward", None), (DDP, "_sync_buffers", None),
        (torch.autograd, "backward", None),
    ]  # fmt: skip
    for owner, name, value in methods:
        plain[name] = caches.instead_of(vars(owner)[name], value)
        setattr(owner, name, plain[name])
    distdiag.attach()
    dist.init_process_group("gloo")
    model = DDP(
        torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.Flatten(), torch.nn.Linear(512, 10)
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batches = iter(DataLoader(TensorDataset(torch.randn(8 * 400, 3, 8, 8)), 8))
    current = session.current
    assert current is not None and current.accounting is not None
    current.pulse.stop()
    for _ in range(300):  # until the checks of a job's first steps are over
        (x,) = next(batches)
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
    parameter = next(model.parameters())
    [gradient_is_ready] = parameter._post_accumulate_grad_hooks.values()
    loss, x = torch.zeros(()), torch.zeros(8, 3, 8, 8)

    def nothing(*_: Any) -> None:
        pass

    def calls(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: f(*args)

    hooks: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
        "next batch": (LoaderIterator.__next__, plain["__next__"], (batches,)),
        "forward": (DDP.forward, plain["forward"], (model, x)),
        "broadcast of buffers in it": (DDP._sync_buffers, plain["_sync_buffers"], (model,)),
        "backward": (calls(torch.autograd.backward), calls(plain["backward"]), (loss,)),
        "last gradient in it": (gradient_is_ready, nothing, (parameter,)),
        "optimizer, before": (current.accounting.optimizer_begins, nothing, (optimizer, (), {})),
        "optimizer, after": (current.accounting.optimizer_ends, nothing, (optimizer, (), {})),
        "a beat of the pulse (four a second)": (current.pulse.beat, nothing, ()),
    }
    taken: dict[str, tuple[list[int], list[int]]] = {name: ([], []) for name in hooks}
    for _ in range(rounds):
        for name, (hooked, without, args) in hooks.items():
            taken[name][0].append(caches.time_ns(hooked, *args))
            taken[name][1].append(caches.time_ns(without, *args))
    dist.destroy_process_group()
    return taken


def microseconds(hooked: Any, without: Any, draws: int = 2000) -> tuple[float, Any]:
    """Return (mean, its bootstrap draws) of what a hook adds."""
    import numpy as np

    def mean(x: Any) -> Any:
        x = np.sort(x, axis=-1)
        return x[..., : int(0.95 * x.shape[-1])].mean(-1) / 1e3

    rng = np.random.default_rng(0)
    hooked, without = np.asarray(hooked), np.asarray(without)
    picks = rng.integers(0, len(hooked), (draws, len(hooked)))
    return float(mean(hooked) - mean(without)), mean(hooked[picks]) - mean(without[picks])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=250)
    options = parser.parse_args()
    if options.rounds < 20:
        parser.error("--rounds: at least 20, for an interval")
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
            "DISTDIAG_QUIET": "1", "DISTDIAG_RUN_DIR": f"{folder}/run",
        }  # fmt: skip
        taken = measure(options.rounds)
    import numpy as np

    print("| hook | µs, caches cold | 95 % interval | n |\n|---|---|---|---|")
    total, draws = 0.0, np.zeros(2000)
    for name, (hooked, without) in taken.items():
        mean, each = microseconds(hooked, without)
        low, high = np.quantile(each, (0.025, 0.975))
        print(f"| {name} | {mean:.1f} | {low:.1f} – {high:.1f} | {options.rounds} |")
        if "pulse" not in name:
            total, draws = total + mean, draws + each
    low, high = np.quantile(draws, (0.025, 0.975))
    print(f"| **all of a step** | **{total:.0f}** | {low:.0f} – {high:.0f} | {options.rounds} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
