"""Compare strategies on several numbers of ranks: each case in new processes, the cases in turn, in several rounds.

A machine that slows down for a minute then slows all cases, not one of them. Fresh processes make the peak of memory
the case's own, and their differences (where memory lies, which core a rank runs on) are part of the interval.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from distdiag.errors import DistdiagError, ExitCode
from distdiag.probekit.command.options import Options
from distdiag.probekit.measure.noise import over_blocks
from distdiag.probekit.ranks.launch import launch
from distdiag.probekit.step import svg
from distdiag.probekit.step.blocks import Block, check_batch
from distdiag.probekit.step.on_paper import add_activations
from distdiag.probekit.step.possible import SINGLE, STRATEGIES, Case, Machine, can_run, report
from distdiag.probekit.step.rows import judge, rows_of
from distdiag.probekit.verdict.result import Result, Verdict

ROUNDS = 5
_BLOCK_S = (0.3, 5.0)  # of measuring in one block, at least and at most
_START_S = 1.0  # of a block's processes, before the first was measured


def compare(options: Options, gpus: int, deadline_s: float) -> Result:
    """Measure all cases in turn until `deadline_s` of time.monotonic().

    Raises:
        DistdiagError: a batch that cannot be divided; the first error if no case could be measured.
    """
    for ranks in options.ranks:
        check_batch(options.batch_size, ranks)
    began = time.monotonic()
    wanted = [
        Case(strategy, ranks)
        for strategy in options.strategies or STRATEGIES
        for ranks in ([1] if strategy == SINGLE else options.ranks)
    ]
    machine = Machine(options.device, options.backend or "gloo", gpus)
    remedy = "--strategies all --ranks 1,2 measures at least one process"
    cases, reasons = can_run(wanted, machine, options.batch_size, remedy)
    turns = _Turns(options, cases, reasons, deadline_s)
    turns.run()
    if not turns.blocks:
        raise turns.error or DistdiagError("the budget ended before the first step", "give more with --budget")
    result = turns.last
    assert result is not None
    result.world_size = max(options.ranks)
    result.backend = machine.backend
    result.host_noise = over_blocks([b.noise for b in turns.blocks if b.noise is not None])
    result.rows = rows_of(turns.blocks, options.batch_size, machine.device)
    add_activations(result.rows, options, options.batch_size)
    judge(result)
    for case, error in turns.failed.items():
        result.judge(Verdict.INCONCLUSIVE, f"{case} failed: {error.message}")
    if unmeasured := [str(c) for c in turns.cases if not any(b.case == c for b in turns.blocks)]:
        text = f"the budget ended before {', '.join(unmeasured)}: give more with --budget"
        result.judge(Verdict.INCONCLUSIVE, text)
    result.details["rounds"] = max(r.rounds for r in result.rows)
    result.details |= {"model": options.model or "SimpleCNN", "global_batch": options.batch_size}
    report(result, turns.reasons)
    result.elapsed_s = time.monotonic() - began
    if options.svg:
        svg.write(result, options.svg)
    return result


class _Turns:
    """All cases in turn, in rounds of alternating direction."""

    def __init__(self, options: Options, cases: Sequence[Case], reasons: dict[Case, str], deadline_s: float) -> None:
        self.options, self.cases, self.deadline_s = options, list(cases), deadline_s
        self.reasons = dict(reasons)
        self.failed: dict[Case, DistdiagError] = {}
        self.error: DistdiagError | None = None
        self.blocks: list[Block] = []
        self.last: Result | None = None
        self._start_s = _START_S

    def run(self) -> None:
        for number in range(ROUNDS):
            least_s = len(self.cases) * (self._start_s + _BLOCK_S[0])
            if number and time.monotonic() + least_s > self.deadline_s:
                return  # an incomplete round could not be compared
            for i, case in enumerate(list(self.cases) if number % 2 == 0 else list(reversed(self.cases))):
                left = len(self.cases) * (ROUNDS - number) - i
                share = (self.deadline_s - time.monotonic()) / max(1, left) - self._start_s
                if number == 0 and i and time.monotonic() > self.deadline_s:
                    return
                self._measure(case, min(max(share, _BLOCK_S[0]), _BLOCK_S[1]))

    def _measure(self, case: Case, seconds: float) -> None:
        options = dataclasses.replace(
            self.options, nproc=case.processes, strategies=[case.strategy], ranks=[case.ranks], block_s=seconds
        )
        began = time.monotonic()
        try:
            (result,) = launch(options, case.processes, began + seconds + self._start_s)
        except DistdiagError as e:
            self.error = self.error or e
            self.cases.remove(case)
            self.blocks = [b for b in self.blocks if b.case != case]
            self.reasons[case] = e.message
            if e.code != ExitCode.USAGE:  # it should have worked
                self.failed[case] = e
            return
        self._start_s = 0.5 * self._start_s + 0.5 * max(0.1, time.monotonic() - began - seconds)
        self.blocks += result.rows
        self.last = result
