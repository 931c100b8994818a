"""Probe inside the training: a few operations between two steps, on a separate group, at most 1 % of the time.

It measures the network of this job now, for comparison with the job's own collectives. Call
`InTrainingProbe(names, every).maybe_run(step)` after every optimizer step, on every rank; rank 0 writes each result into
table `probe` of the run.
"""

from __future__ import annotations

import math
import os
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distdiag.errors import DistdiagError
from distdiag.probekit.in_job import running_job
from distdiag.probekit.measure.collective import Collective, Ranks, all_gather_single
from distdiag.probekit.measure.patterns import Pattern
from distdiag.probekit.measure.probe import load_probe
from distdiag.probekit.ranks.clock import clock_ns, kernel_identity
from distdiag.probekit.verdict.collective_result import slowest, stamps_row
from distdiag.probekit.verdict.result import Result, Row, Verdict, WrongValues
from distdiag.streams import say
from distdiag.terms.statistics import interval_of_median

GROUP_DESCRIPTION = "distdiag-probe"  # readers leave this group's collectives out of the job's own
SIZES_BYTES = (64 * 2**10, 4 * 2**20)
MOST_SHARE = 0.01  # of the training's time
_ITERATIONS = 5
_LOCKED_S = 0.2  # if the database is locked for longer, the result is dropped: the training waits meanwhile


class InTrainingProbe(Ranks):
    """Collectives measured between the steps of a running job.

    Every rank creates one after `init_process_group`, calls `maybe_run(step)` after every step, and `close()` before
    the process group is destroyed. With one rank, or no names, it does nothing.

    Args:
        names: Probes, from `catalog.parse_collectives`.
        every: Optimizer steps between two measurements; more if they would exceed the share of time.
        run_dir: Run in which rank 0 records the results; default DISTDIAG_RUN_DIR; if both are missing, not recorded.
        share: Largest share of the time since creation that measurements may take.
    """

    def __init__(
        self, names: Sequence[str], every: int, run_dir: str | Path | None = None, share: float = MOST_SHARE
    ) -> None:
        self.active = bool(names) and every > 0 and dist.is_initialized() and dist.get_world_size() > 1
        self.every = max(1, every)
        self.share = share
        self.runs = 0
        self.spent_s = 0.0
        self.not_recorded = 0
        if not self.active:
            return
        backend = dist.get_backend()
        nccl = "nccl" in backend
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        self.backend = "nccl" if nccl else "gloo"
        self.dtype = torch.float32
        # a separate group: operations on the job's group would shift its sequence numbers
        self.group: Any = dist.new_group(backend=self.backend, group_desc=GROUP_DESCRIPTION)
        self._run_dir = Path(run_dir) if run_dir else Path(p) if (p := os.environ.get("DISTDIAG_RUN_DIR")) else None
        self._run: running_job.RunBeside | None = None
        self._probes = [p for n in names if isinstance(p := load_probe(n), Collective)]
        self._same_clock = len(set(self._gather(kernel_identity("time")))) == 1
        self._wrong: dict[str, list[WrongValues]] = {}
        self._check()
        self._measure_all()  # warms up connections and caches
        began = time.monotonic()
        self._measure_all()
        self._cost_s = time.monotonic() - began
        self._created_s = time.monotonic()
        self._next_step: int | None = None
        self._last: tuple[int, float] | None = None  # step and time of the last decision, for the mean step time

    def maybe_run(self, step: int) -> list[Result]:
        """Measure if it is due; return the results on rank 0, else []. Never raises a database error.

        All ranks must call it with the same step. Between measurements it only compares two integers.
        """
        if not self.active:
            return []
        if self._next_step is None:
            self._next_step = self._multiple(step)
        if step < self._next_step:
            return []
        began = time.monotonic()
        run, self._next_step = self._decide(step, began)
        results: list[Result] = []
        if run:
            self.runs += 1
            measured = self._measure_all()
            self._cost_s = max(self._cost_s, time.monotonic() - began)
            if self.rank == 0:
                results = [self._result(probe, rows, step) for probe, rows in measured]
                self._record(results)
        self.spent_s += time.monotonic() - began
        return results

    def close(self) -> None:
        """Destroy the group; call it before the job's process group is destroyed."""
        if self.active:
            self.active = False
            dist.destroy_process_group(self.group)

    # ------------------------------------------------------------------ inside

    def _multiple(self, step: int) -> int:
        """Return the first multiple of `every` that is not below `step`."""
        return -(-step // self.every) * self.every

    def _decide(self, step: int, now_s: float) -> tuple[bool, int]:
        """Return rank 0's decision on every rank: (measure now, step of the next decision)."""
        decision = torch.zeros(2, dtype=torch.int64, device=self.device)
        if self.rank == 0:
            elapsed_s = now_s - self._created_s
            allowed_s = self.share * elapsed_s - self.spent_s
            run = self._cost_s <= allowed_s
            last_step, last_s = self._last or (0, self._created_s)
            step_s = (now_s - last_s) / max(1, step - last_step)
            self._last = (step, now_s)
            missing_s = self._cost_s - (allowed_s - self._cost_s if run else allowed_s)
            wait = math.ceil(max(0.0, missing_s) / self.share / max(step_s, 1e-6))
            decision[0], decision[1] = int(run), self._multiple(step + max(self.every, wait))
        dist.broadcast(decision, 0, group=self.group)
        return bool(decision[0]), int(decision[1])

    def _measure_all(self) -> list[tuple[Collective, list[Row]]]:
        """Return the rows of every probe on rank 0; no rows elsewhere."""
        found: list[tuple[Collective, list[Row]]] = []
        for probe in self._probes:
            sizes = SIZES_BYTES if probe.moves else (0,)
            rows = [row for size in sizes if (row := self._measure(probe, size)) is not None]
            found.append((probe, rows))
        return found

    def _measure(self, probe: Collective, size: int) -> Row | None:
        elements = size // self.dtype.itemsize // self.world_size * self.world_size
        buffers = probe.buffers(self, elements)
        stamps = torch.zeros(2, _ITERATIONS, dtype=torch.int64)
        probe.call(self, buffers, 0)
        self.synchronize()
        for i in range(_ITERATIONS):
            stamps[0, i] = clock_ns()
            probe.call(self, buffers, 0)
            self.synchronize()
            stamps[1, i] = clock_ns()
        everyone = torch.empty(self.world_size * stamps.numel(), dtype=torch.int64, device=self.device)
        all_gather_single(everyone, stamps.view(-1).to(self.device), group=self.group)
        if self.rank != 0:
            return None
        us = everyone.view(self.world_size, 2, _ITERATIONS).cpu().numpy() / 1e3
        entered, left = us[:, 0], us[:, 1]
        interval = interval_of_median(slowest(entered, left))
        ci95_us, item_bytes = (interval.low, interval.high), self.dtype.itemsize
        row = stamps_row(
            probe.op, elements * item_bytes, item_bytes, entered, left, ci95_us, self._wrong.get(probe.name, [])
        )
        row.busbw_ci95_gbps = None  # of five iterations
        if not self._same_clock:
            row.skew_us, row.wire_us, row.late_rank = math.nan, math.nan, None
        return row

    def _check(self) -> None:
        """Check the values of every probe once, at creation."""
        pattern = Pattern(self.dtype, self.world_size)
        for probe in self._probes:
            if probe.moves:
                mine = probe.wrong_here(self, pattern, 1000 * self.world_size, "at creation")
                self._wrong[probe.name] = [w for of_rank in self._gather(mine) for w in of_rank]

    def _gather(self, value: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, value, group=self.group)
        return everyone

    def _result(self, probe: Collective, rows: list[Row], step: int) -> Result:
        result = Result(probe.name, self.world_size, self.backend, self.device.type, "float32", rows=rows)
        result.versions = {"torch": str(torch.__version__)}
        result.details = {"inside": True, "step": step, "every": self.every, "spent_s": self.spent_s}
        wrong = self._wrong.get(probe.name)
        if wrong:
            result.judge(Verdict.FAIL, f"wrong values on rank {wrong[0].rank}")
        else:
            last = rows[-1]
            rate = f"{last.busbw_gbps:.2f} GB/s" if last.busbw_gbps is not None else f"{last.time_us.p50:.0f} us"
            result.reasons.append(f"{rate} between steps {step} and {step + 1}")
        return result

    def _record(self, results: list[Result]) -> None:
        """Write the results into table `probe`, with the speed of the job's own calls; count those that cannot be written."""
        try:
            if self._run is None and self._run_dir is not None:  # the monitor creates it
                self._run = running_job.read_run(self._run_dir)
            if self._run is not None:
                for result in results:
                    result.details["job"] = self._run.own_calls(result.probe)
                self._run.insert(results, _LOCKED_S)
                return
        except sqlite3.Error:
            pass
        except DistdiagError as e:
            if self.runs == 1:
                say(f"distdiag: probe results are not recorded yet: {e}", err=True)
        self.not_recorded += len(results)
