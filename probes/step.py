"""step: the time of one training step under each strategy, on one model and one global batch.

Every strategy takes the same step. Reported are time, speed-up, efficiency, memory per rank, and the share of exposed
communication. On the CPU, where torch's DataParallel silently runs one process, replicas on threads replace it and are labelled as
such. `--ranks 1,2,4` compares numbers of ranks in interleaved rounds.
"""

from __future__ import annotations

from distdiag.probekit.command.main import run_script
from distdiag.probekit.command.options import Options
from distdiag.probekit.measure.probe import Probe, Table
from distdiag.probekit.measure.sampling import NoiseMeter
from distdiag.probekit.ranks.job import Job
from distdiag.probekit.ranks.user_object import find_function
from distdiag.probekit.step import show
from distdiag.probekit.step.blocks import Batch, Block, make_batch, measure
from distdiag.probekit.step.on_paper import add_activations
from distdiag.probekit.step.possible import DEFAULT, SINGLE, Case, Machine, can_run, report
from distdiag.probekit.step.rows import judge, rows_of
from distdiag.probekit.verdict.collective_result import new_result
from distdiag.probekit.verdict.result import Result, Verdict

_LEAST_SECONDS = 0.2


class Step(Probe):
    name = "step"
    min_ranks = 1
    default_ranks = 2
    share_in_all = 4.0

    def preload(self) -> None:
        import torch._dynamo  # noqa: F401  # by DDP and torch.optim at their first use: two seconds of CPU

    def check(self, options: Options) -> None:
        from distdiag.train.models import MODELS

        if options.model and options.model not in MODELS:
            find_function("--model", options.model)

    def run(self, job: Job) -> Result | None:
        batch = make_batch(job)
        if job.options.block_s:  # one case of a comparison
            case = Case(job.options.strategies[0], job.options.ranks[0])
            block = measure(job, case, batch, job.options.block_s, fresh=True)
            if block is None:
                return None
            result = new_result(job, self.name)
            result.rows = [block]
            return result
        noise = NoiseMeter(job)
        cases, reasons = _cases(job, len(batch[0]))
        blocks, unmeasured = _measure_all(job, cases, batch)
        host_noise = noise.stop("step")
        if job.rank != 0 or host_noise is None:
            return None
        result = new_result(job, self.name)
        result.host_noise = host_noise
        result.rows = rows_of(blocks, len(batch[0]), job.device.type)
        add_activations(result.rows, job.options, len(batch[0]))
        result.details |= {"model": job.options.model or "SimpleCNN", "global_batch": len(batch[0])}
        report(result, reasons)
        judge(result)
        if unmeasured:
            names = ", ".join(c.strategy for c in unmeasured)
            result.judge(Verdict.INCONCLUSIVE, f"the budget ended before {names}: give more with --budget")
        return result

    def table(self, result: Result) -> Table:
        return show.table(result)

    def drawing(self, result: Result) -> list[str]:
        return show.drawing(result)

    def headline(self, result: Result) -> str:
        return show.headline(result)


def _cases(job: Job, batch: int) -> tuple[list[Case], dict[Case, str]]:
    """Return the cases that can run on this job's ranks, and the reasons of the others."""
    import torch

    gpus = torch.cuda.device_count() if job.device.type == "cuda" else 0
    in_all = {SINGLE: 1} | ({"dataparallel": max(1, gpus)} if job.device.type == "cuda" else {})
    wanted = [Case(name, in_all.get(name, job.world_size)) for name in job.options.strategies or DEFAULT]
    machine = Machine(job.device.type, job.backend, gpus)
    return can_run(wanted, machine, batch, "add --nproc 2, or single to --strategies")


def _measure_all(job: Job, cases: list[Case], batch: Batch) -> tuple[list[Block], list[Case]]:
    """Return the blocks (on rank 0), and the cases for which the budget was too small."""
    blocks: list[Block] = []
    for i, case in enumerate(cases):
        seconds = job.agree([job.left_s() * 0.85 / (len(cases) - i)], "step: next strategy")[0]
        if seconds < _LEAST_SECONDS and i:
            return blocks, cases[i:]
        block = measure(job, case, batch, max(_LEAST_SECONDS, seconds), fresh=False)
        if block is not None:
            blocks.append(block)
    return blocks, []


PROBE = Step()

if __name__ == "__main__":
    run_script(PROBE)
