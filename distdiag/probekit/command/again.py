"""Repeat a probe that was slower than its baseline, in new processes: one run may be unlucky."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from distdiag.errors import DistdiagError
from distdiag.probekit.command.options import DEFAULT_BUDGET_S, Options
from distdiag.probekit.verdict import baseline
from distdiag.probekit.verdict.result import Measure, Result

_SPARE_S = 60.0  # beyond the budget, before the second measurement counts as failed


def command_of(result: Result, options: Options, save: Path) -> list[str]:
    """Return the command line that repeats `result`'s probe with the same options and saves its values in `save`."""
    words: list[object] = [sys.executable, "-m", "distdiag", "probe", result.probe]
    words += ["--ranks", ",".join(map(str, options.ranks))] if options.ranks else ["--nproc", result.world_size]
    words += ["--device", result.device, "--dtype", options.dtype, "--min-bytes", options.min_bytes]
    words += ["--max-bytes", options.max_bytes, "--factor", options.factor, "--timeout", options.timeout_s]
    words += ["--precision", options.precision * 100, "--step-ms", options.step_ms]
    words += ["--budget", options.budget_s if options.ranks else min(options.budget_s, DEFAULT_BUDGET_S)]
    words += ["--save", save, "--json", "--no-record"]
    if result.backend in ("gloo", "nccl"):
        words += ["--backend", result.backend]
    if result.probe == options.name:  # with `all`, the option belongs to another probe
        words += ["--batch-size", options.batch_size]
    words += ["--share-gpus"] * options.share_gpus
    for option, value in (
        ("--dataset", options.dataset),
        ("--model", options.model),
        ("--workers", ",".join(map(str, options.workers))),
        ("--strategies", ",".join(options.strategies)),
    ):
        words += [option, value] if value else []
    return [str(w) for w in words]


def measure(result: Result, options: Options) -> list[Measure] | None:
    """Return the values of a second measurement; None if it failed, ran under other conditions, or on a busy host."""
    with tempfile.TemporaryDirectory(prefix="distdiag-probe-") as made:
        save = Path(made) / "again.json"
        try:
            subprocess.run(
                command_of(result, options, save), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, timeout=options.budget_s + _SPARE_S, check=False,
            )  # fmt: skip
            entries = baseline.load(str(save))
        except (subprocess.TimeoutExpired, OSError, DistdiagError):
            return None
    mine = baseline.key_of(result)
    return next((e.measures for e in entries if e.key == mine and not e.noisy), None)
