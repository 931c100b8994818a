"""Body of every rank of a probe command: connect, run one probe or all, return the results."""

from __future__ import annotations

import time
import traceback

from distdiag.errors import DistdiagError, ExitCode
from distdiag.probekit.command import catalog
from distdiag.probekit.command.options import Options
from distdiag.probekit.measure.probe import Probe, load_probe
from distdiag.probekit.ranks.environment import RankPlace
from distdiag.probekit.ranks.job import Job, joined
from distdiag.probekit.verdict.result import Result


def run_rank(place: RankPlace, options: Options, deadline_s: float, arrival_limit_s: float) -> list[Result]:
    """Return the results on rank 0, elsewhere an empty list.

    Measuring ends at `deadline_s` of rank 0's time.monotonic(). Any error of this rank is raised as a DistdiagError;
    the traceback of an unexpected one has been printed.
    """
    try:
        probes = [load_probe(n) for n in (catalog.PROBES if options.name == catalog.ALL else [options.name])]
        for probe in probes:
            probe.preload()
        with joined(place, options, arrival_limit_s) as job:
            job.deadline_s = deadline_s
            if options.name == catalog.ALL:
                return run_all(job, probes)
            began = time.monotonic()
            result = probes[0].run(job)
            if result is None:
                return []
            result.elapsed_s = time.monotonic() - began
            return [result]
    except DistdiagError:
        raise
    except Exception as e:
        traceback.print_exc()
        text = f"rank {place.rank}: {type(e).__name__}: {e}".splitlines()[0]
        raise DistdiagError(text, "the traceback is above", ExitCode.FAILED, "crashed") from None


def run_all(job: Job, probes: list[Probe]) -> list[Result]:
    """Run every probe in its share of the remaining budget. A probe that is not possible here passes with that reason."""
    end_s = job.deadline_s
    results: list[Result] = []
    for i, probe in enumerate(probes):
        left = job.agree([end_s - time.monotonic()], "sharing out the budget")[0]
        share = left * probe.share_in_all / sum(p.share_in_all for p in probes[i:])
        job.deadline_s = time.monotonic() + share
        began = time.monotonic()
        try:
            if job.world_size < probe.min_ranks:
                raise DistdiagError(f"needs {probe.min_ranks} ranks", "--nproc 2")
            probe.check(job.options)
            result = probe.run(job)
        except DistdiagError as e:
            if e.code in (ExitCode.TIMEOUT, ExitCode.FAILED):  # later results cannot be trusted
                raise
            why = f"not possible here: {e.message}"
            result = Result(probe.name, job.world_size, job.backend, job.device.type, reasons=[why])
        if job.rank == 0 and result is not None:
            result.elapsed_s = time.monotonic() - began
            results.append(result)
    return results
