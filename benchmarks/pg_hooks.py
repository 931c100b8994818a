"""Compares torch's hooks of process groups (`register_pre_hook`, torch 2.14 and newer) with our patches of its methods.

    python benchmarks/pg_hooks.py [--rounds 30]

One process, one rank, gloo. First, which operations a hook sees: eager, functional, compiled, from DDP's reducer. Then CPU
microseconds per all_reduce: plain, with a pre-hook and a post-hook in Python that only count, with patches of the same two methods that
only count, and with ours, which record the call and its wait; warm, and with caches that a copy of 16 MiB empties before each call. The variants take turns. Medians over rounds of 50
calls, with a 95 % bootstrap interval.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS, HOOK = 50, 77
RESULTS = Path(__file__).parent / "results" / "pg_hooks.md"


def seen(pg: Any) -> dict[str, list[str]]:
    """Return the operations that a pre-hook sees, by who issues them."""
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    from torch.nn.parallel import DistributedDataParallel

    names: list[str] = []
    x = torch.ones(64)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    compiled = torch.compile(
        lambda t: functional.wait_tensor(functional.all_reduce(t, "sum", pg)), backend="aot_eager", fullgraph=True
    )
    ways: dict[str, Callable[[], Any]] = {
        "eager": lambda: dist.all_reduce(x),
        "functional": lambda: functional.wait_tensor(functional.all_reduce(x, "sum", pg)),
        "compiled, traced": lambda: compiled(x),
        "compiled": lambda: compiled(x),
        "DDP's reducer": lambda: model(torch.ones(4, 8)).sum().backward(),
    }
    pg.register_pre_hook(HOOK, lambda args: names.append(args.name.name))
    found = {}
    for way, issue in ways.items():
        names.clear()
        issue()
        found[way] = list(names)
    pg.unregister_pre_hook(HOOK)
    return found


class Variants:
    """An all_reduce without anything of ours, with torch's hooks, and with our patches."""

    def __init__(self, pg: Any, plain: tuple[Any, Any], patched: tuple[Any, Any]) -> None:
        import torch

        empty = self._counted(plain[0]), self._counted(plain[1])
        self.pg, self.methods = pg, {"plain": plain, "hooks": plain, "empty patches": empty, "our patches": patched}
        self.x, self.large = torch.ones(8), torch.ones(4 << 20)
        self.calls = 0

    def _hook(self, args: Any) -> None:
        self.calls += args.op_id >= 0

    def _counted(self, original: Any) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return original(*args, **kwargs)

        return method

    def round_us(self, variant: str, cold: bool) -> float:
        import torch.distributed as dist

        dist.ProcessGroup.allreduce, dist.Work.wait = self.methods[variant]  # type: ignore[method-assign]
        if variant == "hooks":
            self.pg.register_pre_hook(HOOK, self._hook)
            self.pg.register_post_hook(HOOK, self._hook)
        spent_ns = self.calls = 0
        for _ in range(CALLS):
            if cold:
                self.large.add_(1)
            began = time.thread_time_ns()
            dist.all_reduce(self.x)
            spent_ns += time.thread_time_ns() - began
        if variant == "hooks":
            self.pg.unregister_pre_hook(HOOK)
            self.pg.unregister_post_hook(HOOK)
        assert self.calls == (2 * CALLS if variant in ("hooks", "empty patches") else 0)
        return spent_ns / CALLS / 1e3

    def measured(self, rounds: int, cold: bool) -> dict[str, list[float]]:
        """Return microseconds per call of each round, by variant; the order rotates."""
        names = list(self.methods)
        out: dict[str, list[float]] = {name: [] for name in names}
        for i in range(rounds):
            for j in range(len(names)):
                name = names[(i + j) % len(names)]
                out[name].append(self.round_us(name, cold))
        return out


def interval(values: list[float]) -> str:
    """Return the median with its 95 % bootstrap interval."""
    import numpy as np

    draws = np.random.default_rng(0).choice(values, (2000, len(values)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return f"{np.median(values):.1f} ({low:.1f}–{high:.1f})"


def table(seen_by: dict[str, list[str]], costs: dict[str, dict[str, list[float]]], rounds: int) -> str:
    import torch

    lines = [f"# `python benchmarks/pg_hooks.py --rounds {rounds}`", ""]
    load = f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
    lines += [f"torch {torch.__version__}, n = {rounds} rounds of {CALLS} calls, one rank; {load}", ""]
    lines += ["| issued by | a hook sees |", "|---|---|"]
    lines += [f"| {way} | {', '.join(names) or 'nothing'} |" for way, names in seen_by.items()]
    lines += ["", "| CPU µs per all_reduce | " + " | ".join(costs) + " |", "|---|" + "---|" * len(costs)]
    names = list(costs["warm"])
    for name in names:
        lines.append(f"| {name} | " + " | ".join(interval(of[name]) for of in costs.values()) + " |")
    for name in names[1:]:
        added = ([a - b for a, b in zip(of[name], of["plain"], strict=True)] for of in costs.values())
        lines.append(f"| {name} add | " + " | ".join(map(interval, added)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    import torch
    import torch.distributed as dist

    if not hasattr(dist.ProcessGroup, "register_pre_hook"):
        raise SystemExit(f"torch {torch.__version__} has no hooks of process groups")
    torch.set_num_threads(1)
    plain = vars(dist.ProcessGroup)["allreduce"], vars(dist.Work)["wait"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    seen_by = seen(dist.group.WORLD)
    with tempfile.TemporaryDirectory() as folder:
        import distdiag

        distdiag.attach(folder)
        patched = vars(dist.ProcessGroup)["allreduce"], vars(dist.Work)["wait"]
        variants = Variants(dist.group.WORLD, plain, patched)
        variants.measured(3, cold=False)  # warm up
        costs = {"warm": variants.measured(rounds, cold=False), "cold caches": variants.measured(rounds, cold=True)}
        text = table(seen_by, costs, rounds)
    print(text)
    RESULTS.write_text(text)
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
