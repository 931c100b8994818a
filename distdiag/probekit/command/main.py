"""The probe command, from arguments to exit code, for `distdiag probe` and every script in probes/."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from distdiag.errors import DistdiagError, ExitCode, need_torch
from distdiag.probekit.command import catalog, node_check
from distdiag.probekit.command.options import Options, check_backend, check_ranks, parse, place_ranks
from distdiag.probekit.measure.probe import Probe, load_probe
from distdiag.probekit.ranks import environment
from distdiag.probekit.verdict.result import SCHEMA, Result, Verdict, worst
from distdiag.streams import say, say_error, say_json, tolerate

if TYPE_CHECKING:
    from distdiag.probekit.ranks.environment import RankPlace

_RANK_ZERO_FIRST_S = 1.5  # for rank 0 to print: a launcher ends all ranks when one fails
_TEARDOWN_S = 0.7  # of the budget, for process groups, results and interpreter shutdown
_ARRIVAL_LIMIT_S = 60.0  # other nodes may start later
_CODES = {Verdict.PASS: ExitCode.OK, Verdict.FAIL: ExitCode.FAILED, Verdict.INCONCLUSIVE: ExitCode.INCONCLUSIVE}


def main(argv: list[str] | None = None, name: str | None = None) -> int:
    """Run one probe command (`name` if its script is the caller); return its exit code. No known error is raised."""
    tolerate()
    arguments = sys.argv[1:] if argv is None else argv
    form, words = node_check.split_form(arguments)
    if form in node_check.FORMS:
        return node_check.run(words, name, form, environment.process_started_s())
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hides torch's warnings; must be set before its import
    as_json = "--json" in words or form == "json"
    place = None
    try:
        if name is None and (not arguments or arguments[0] == "list"):
            return _list(as_json)
        place = environment.detect()
        return _run(parse(arguments, name, prog=f"distdiag probe {name}" if name else "distdiag probe"), place)
    except SystemExit as e:  # --help; a signal that ended the ranks
        return int(e.code or 0)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # the reader of stdout (head, less) has ended; without this, Python reports it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except DistdiagError as e:
        _report(e, as_json, place)
        if place is not None:
            _leave_rank(e.code)
        return int(e.code)


def run_script(probe: Probe) -> NoReturn:
    sys.exit(main(name=probe.name))


def _report(e: DistdiagError, as_json: bool, place: RankPlace | None) -> None:
    """Print the error on rank 0; a timeout on every rank, because rank 0 may be missing."""
    first = place is None or place.rank == 0
    if as_json and first:
        say_json(e.as_json(SCHEMA), flush=True)
    if first or e.kind == "timeout":
        say_error(e.message, e.hint, flush=True)
    if not first:
        time.sleep(_RANK_ZERO_FIRST_S)


def _list(as_json: bool) -> int:
    if as_json:
        probes = catalog.PROBES | {catalog.ALL: "all of them"}
        say_json(json.dumps({"schema": "distdiag.probes/1", "probes": probes}, indent=2))
        return 0
    for probe, text in catalog.PROBES.items():
        say(f"{probe:14s}{text}")
    say(f"{catalog.ALL:14s}the whole health check in one budget: one verdict, one line per probe")
    return 0


def _run(options: Options, place: RankPlace | None) -> int:
    from distdiag.probekit.command import rendering, running_job
    from distdiag.probekit.command.again import measure as measure_again
    from distdiag.probekit.verdict import baseline

    rendering.check_output(options)
    reference = baseline.load(options.against) if options.against else None
    run = running_job.find_run(options) if options.paper is None and (place is None or place.rank == 0) else None
    if run is not None and run.live:
        say(run.warning(options), err=True)

    results = _measure(options, place)
    if place is not None and place.rank != 0:
        _leave_rank(ExitCode.OK)
    if reference is not None:
        # not for ranks of a launcher, which cannot start others, nor for injected faults
        again = partial(measure_again, options=options) if place is None and not options.inject else None
        for result in results:
            baseline.compare(result, reference, options.tolerance, again)
    if run is not None:
        run.shown_against_job(results)
    rendering.write(results, options)
    if options.save:
        baseline.save(options.save, results)
        say(f"baseline written: distdiag probe {options.name} --against {options.save}", err=True)
    if run is not None and not options.no_record:
        say(run.record(results), err=True)
    code = _CODES[worst([r.verdict for r in results])]
    if place is not None:
        _leave_rank(code)
    return int(code)


def _measure(options: Options, place: RankPlace | None) -> list[Result]:
    """Return the results of ranks that are started here, or of a launcher's ranks if this process is one."""
    if options.paper is not None:
        return _on_paper(options, place)
    deadline_s = environment.process_started_s() + options.budget_s - _TEARDOWN_S
    whole = options.name == catalog.ALL
    if options.name == "gpu":
        from distdiag.probekit.measure import gpus

        with gpus.nvml():  # reports a missing GPU before torch is imported
            pass
    if place is None:
        # torch is imported only now, after the options were checked
        gpus = _gpu_count()
        probe = None if whole else load_probe(options.name)
        # on one rank `all` has no collectives: only on request
        fewest = probe.min_ranks if probe else min(2, options.nproc or 2)
        nproc = place_ranks(options, gpus, fewest, probe.default_ranks if probe else 2)
        if probe is not None:
            probe.check(options)
        if options.ranks:  # of `step`
            from distdiag.probekit.step.rounds import compare

            return [compare(options, gpus, deadline_s)]
        from distdiag.probekit.ranks.launch import launch

        return launch(options, nproc, deadline_s)
    if options.ranks:
        text = f"--ranks starts its own ranks, but {place.launcher} has started this one"
        raise DistdiagError(text, "run it without a launcher, or leave --ranks out")
    from distdiag.probekit.ranks.work import run_rank

    gpus = _gpu_count()
    if not options.device:
        options.device = "cuda" if gpus >= place.local_world_size and gpus > 0 else "cpu"
    check_backend(options, gpus)
    probe = None if whole else load_probe(options.name)
    check_ranks(options, place.world_size, probe.min_ranks if probe else 1)
    if probe is not None:
        probe.check(options)
    arrival_s = max(_ARRIVAL_LIMIT_S, options.timeout_s) if options.timeout_s == 10.0 else options.timeout_s
    return run_rank(place, options, deadline_s, arrival_s)


def _on_paper(options: Options, place: RankPlace | None) -> list[Result]:
    """Return the memory of a training step by formula; no rank is started."""
    if place is not None:
        text = f"memory on paper needs no ranks, but {place.launcher} has started this one"
        raise DistdiagError(text, "run it without a launcher")
    load_probe(options.name).check(options)
    from distdiag.probekit.step.on_paper import compute

    return [compute(options)]


def _gpu_count() -> int:
    """Return the number of GPUs that torch can use, without initialising CUDA: ranks are forked from this process.

    torch asks NVML. Without NVML it would initialise CUDA, so then a subprocess asks.
    """
    need_torch("a probe")
    import torch

    if not torch.version.cuda:
        return 0
    by_nvml = getattr(torch.cuda, "_device_count_nvml", lambda: -1)()
    if by_nvml >= 0:
        return int(by_nvml)
    if not glob.glob("/dev/nvidia[0-9]*"):
        return 0
    ask = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    answer = subprocess.run(ask, capture_output=True, text=True, timeout=120, check=False).stdout.strip()
    return int(answer) if answer.isdigit() else 0


def _leave_rank(code: ExitCode) -> None:
    """End a rank of a launcher without interpreter shutdown.

    There, gloo jobs that have destroyed their process group sometimes abort (SIGABRT, "terminate called without an active
    exception"), and the launcher would report a failure.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))
