"""`distdiag run`: torchrun and `-m distdiag.run` in one command."""

from __future__ import annotations

import difflib
import os
import re
import sys
from itertools import pairwise
from typing import Any

import click

from distdiag import nvml
from distdiag.command_line import SETTINGS, check_script, read, recording_options
from distdiag.errors import DistdiagError, need_torch
from distdiag.terms.metrics_targets import parse_metrics
from distdiag.terms.units import parse_keep


@click.command(context_settings=SETTINGS | {"ignore_unknown_options": True, "allow_interspersed_args": False})
@recording_options
@click.argument("rest", nargs=-1, type=click.UNPROCESSED, metavar="[TORCHRUN OPTIONS] SCRIPT|-m MODULE [ARGS]…")
def command(rest: tuple[str, ...], **options: Any) -> None:
    """Launch an unchanged training script on all local ranks with torchrun, and record it.

    torchrun's options (--nproc-per-node, --nnodes, …) go before the script, next to distdiag's. Without them,
    distdiag starts one rank per GPU, or two ranks on a machine without GPUs.

    \b
    distdiag run --nproc-per-node 4 train.py --epochs 3
    distdiag run --run-dir runs/a -m mypackage.train
    """
    launcher, script = split(list(rest))
    _check_names(launcher)
    _check_number(launcher)
    later = read(_among_torchruns, launcher, "distdiag run")
    launcher = list(later["rest"])
    options = {name: later[name] or value for name, value in options.items()}
    if options["keep"]:
        parse_keep(options["keep"])  # reported once here, not by each rank
    parse_metrics(options["metrics"])
    check_script(script, "distdiag run [torchrun options] SCRIPT [ARGS…]")
    need_torch("a job")
    if not any(a.split("=")[0].replace("_", "-") in ("--nproc-per-node", "--nnodes", "--standalone") for a in launcher):
        launcher = ["--standalone", "--nproc-per-node", str(_local_ranks()), *launcher]
    elif not any(a.split("=")[0].replace("_", "-") in _RENDEZVOUS for a in launcher):
        launcher = ["--standalone", *launcher]
    ours: list[str] = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        ours += [option] if value is True else [option, str(value)] if value else []
    command_line = [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", "distdiag.run", *ours, *script]
    sys.stdout.flush()
    os.execv(sys.executable, command_line)  # signals and the exit code are torchrun's own


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@recording_options
@click.argument("rest", nargs=-1, type=click.UNPROCESSED)
def _among_torchruns(**_options: Any) -> None:
    """Separate distdiag's options from torchrun's: both may come in any order before the script."""


_RENDEZVOUS = {
    "--nnodes", "--standalone", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--master-addr",
    "--master-port", "--node-rank",
}  # fmt: skip
_OTHERS = {
    "--nproc-per-node", "--max-restarts", "--monitor-interval", "--start-method", "--role", "--log-dir", "--redirects", "--tee",
    "--local-ranks-filter", "--local-addr", "--run-dir", "--name", "--keep", "--metrics", "--nodes-port", "--help",
}  # fmt: skip
_FLAGS = {"--standalone", "--no-python", "--run-path", "--virtual-local-rank", "--quiet", "--share", "--tape"}


def _check_names(options: list[str]) -> None:
    """Check that no option is a wrong or shortened name of one that is known; any other may be one of a newer torchrun."""
    known = sorted(_RENDEZVOUS | _FLAGS | _OTHERS)
    for name in (a.split("=")[0].replace("_", "-") for a in options if a.startswith("--")):
        longer = [k for k in known if k.startswith(name)] or difflib.get_close_matches(name, known, 1, 0.8)
        if longer and name not in known:
            raise DistdiagError(f"no option {name}", f"did you mean {longer[0]}?")


def _check_number(options: list[str]) -> None:
    """Check the number of ranks: for 0 torchrun has an AssertionError without a text."""
    words = [word for a in options for word in a.split("=", 1)]
    for name, value in pairwise(words):
        if name.replace("_", "-") == "--nproc-per-node" and re.fullmatch(r"-?\d+", value) and int(value) < 1:
            raise DistdiagError(f"{name} {value}: no rank", "give 1 or more, or leave it out: one rank per GPU")


def split(rest: list[str]) -> tuple[list[str], list[str]]:
    """Split into torchrun's options and the script with its arguments.

    The script is the first word that is neither an option nor an option's value.
    """
    i = 0
    while i < len(rest):
        a = rest[i]
        if a == "-m" or not a.startswith("-"):
            break
        if a == "--":
            return rest[:i], rest[i + 1 :]
        i += 1 if "=" in a or a.replace("_", "-") in _FLAGS else 2
    return rest[:i], rest[i:]


def _local_ranks() -> int:
    """Return one rank per GPU, or two without GPUs."""
    try:
        return max(1, nvml.load().nvmlDeviceGetCount())
    except Exception:  # no driver or library: NVML raises various errors
        return 2
