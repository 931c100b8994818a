"""Options of the training job: one dataclass, whose field docstrings are the help of the command line."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import click

from distdiag.command_line import SETTINGS, flag, option, options_of, read
from distdiag.errors import DistdiagError
from distdiag.terms.units import counted
from distdiag.train.faults import InjectedFault, parse_fault


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Options of `python -m distdiag.train`; all have working defaults."""

    epochs: int = option(10, low=1)
    """Passes over the training set"""

    max_steps: int = option(0)
    """Optimizer steps after which training ends, even within an epoch; 0: no limit"""

    batch_size: int = option(64, low=1)
    """Samples per forward pass: on each rank with ddp and fsdp, in all with the other strategies"""

    model: str = option("simple", type=click.Choice(("simple", "resnet18", "resnet34")))
    """Network: simple (3 convolutions, 2.5 M parameters), resnet18 (11 M), resnet34 (21 M)"""

    data: str = option("")
    """Folder of CIFAR-10 in its python or binary format; 'generated': the generated set.
    Default: DISTDIAG_DATA, else the user's cache, else a download, else (no network) the generated set"""

    loader: str = option("batched", type=click.Choice(("batched", "workers")))
    """Input pipeline: batched (whole batches as tensor operations on pixels shared by the ranks of a node)
    or workers (a Dataset and a DataLoader with worker processes)"""

    workers: int = option(2)
    """Worker processes per rank of `--loader workers`; 0 loads in the training process"""

    strategy: str = option("auto", type=click.Choice(("auto", "single", "dp", "ddp", "fsdp", "model", "pipeline")))
    """How a step is divided over the ranks. single: one process; dp: copies in one process; ddp: a copy on each rank; fsdp: parameters
    sharded over the ranks; model: layers over the ranks; pipeline: layers over the ranks, in micro-batches;
    auto: ddp under torchrun, else single"""

    bucket_mb: float = option(25.0)
    """With ddp: MiB of gradients in one all_reduce"""

    schedule: str = option("1f1b", type=click.Choice(("gpipe", "1f1b", "interleaved")))
    """With pipeline: gpipe (all forwards, then all backwards), 1f1b (a backward as soon as one can run) or
    interleaved (two stages on each rank)"""

    micro_batches: int = option(4, low=1)
    """With pipeline: parts that a batch is divided into"""

    lr: float = option(0.05)
    """Peak learning rate, reached after the warm-up; from there it follows a cosine to 0"""

    momentum: float = option(0.9)
    """Momentum of SGD (Nesterov)"""

    weight_decay: float = option(5e-4)
    """Weight decay of SGD"""

    warmup_steps: int = option(100)
    """Optimizer steps of linear warm-up, at most a fifth of the run"""

    clip: float = option(0.0)
    """Largest norm of the gradient; 0: no clipping"""

    accumulate: int = option(1, low=1)
    """Batches per optimizer step; gradients are exchanged with the last of them only"""

    amp: str = option("auto", type=click.Choice(("auto", "off", "bf16", "fp16")))
    """Mixed precision; auto: bf16 where the hardware multiplies it (CUDA, or a CPU with AVX512-BF16 or AMX), else off"""

    channels_last: bool = option(True)
    """Memory format NHWC, faster for convolutions on CPU and on tensor cores"""

    device: str = option("auto", type=click.Choice(("auto", "cpu", "cuda")))
    """Device of every rank; auto: a GPU if there is one"""

    seed: int = option(0)
    """Seed of initial weights, order and augmentation; ranks derive their own from it"""

    timeout_s: float = option(0.0)
    """Seconds after which a collective fails; 0: torch's default (gloo 30 min, NCCL 10 min)"""

    validate_every: int = option(1)
    """Epochs between validations on the test set, and one at the end; 0: never"""

    log_every: int = option(20, low=1)
    """Optimizer steps between progress lines"""

    checkpoint_every: int = option(0, low=-1)
    """Optimizer steps between checkpoints; 0: at the end of every epoch; -1: never"""

    checkpoint_dir: str = option("")
    """Directory of the checkpoints. Default: `checkpoints` in the run directory; without one, ./checkpoints"""

    keep_checkpoints: int = option(2, low=1)
    """Number of checkpoints to keep"""

    resume: str = option("")
    """Checkpoint to resume from: a file, or a directory (its newest checkpoint)"""

    monitor: bool = option(False)
    """Record the run, for `distdiag tui` and `distdiag diagnose`"""

    run_dir: str = option("")
    """Run directory. Default: DISTDIAG_RUN_DIR, else (with `--monitor`) ./reports/TIME-NAME"""

    keep: str = option("", metavar="SIZE")
    """Size bound of the run's database, e.g. 500M; older rows are thinned beyond it. Default: 2G"""

    name: str = option("", metavar="NAME")
    """Name of the run. Default: the model's"""

    inject: tuple[InjectedFault, ...] = option((), multiple=True, metavar="FAULT")
    """Fault to inject; may be repeated. deadlock@rank1:step30, kill@…, crash@…, nan@… (same form),
    stall@rank1:step30:10s, straggler@rank1:20ms[:data|forward|backward|optimizer], unused, uneven[@rank1]"""

    quiet: bool = option(False)
    """Print no progress lines, only the start and the end"""


def _build(name: str, kind: Any, attrs: dict[str, Any]) -> dict[str, Any]:
    """Return click's arguments for one field: its type's, and the default in its help."""
    default, low, named = attrs["default"], attrs.pop("low", 0), flag(name)
    if "Default:" not in attrs["help"] and name not in ("inject", "resume"):
        attrs["help"] += f" (default: {('off', 'on')[default] if kind is bool else default})"
    if kind is bool:
        attrs["flags"] = (f"{named}/--no-{named[2:]}",)
    elif kind in (int, float):
        attrs |= {"type": _number(kind, named, low), "metavar": "N" if kind is int else "X"}
    elif "type" not in attrs:
        attrs = {"metavar": "PATH"} | attrs
    return attrs


def _number(kind: type, option: str, lowest: float) -> Any:
    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            hint = f"for example {option} {kind(max(lowest, 1))}"
            raise DistdiagError(f"{option} takes {what}, not '{text}'", hint) from None
        if not math.isfinite(value) or value < lowest:
            least = f"{option} must be at least {kind(lowest)}, not {text}"
            raise DistdiagError(least, f"{option} {kind(max(lowest, 1))} works")
        return value

    return convert


def build_command() -> click.Command:
    return click.Command(
        None,
        context_settings=SETTINGS,
        params=[one for _, one in options_of(TrainConfig, _build)],
        help="Train CIFAR-10 on all ranks of a torchrun job (or in one process), recorded with --monitor.",
        # `--`: torchrun would read --monitor as an abbreviation of its option --monitor-interval
        epilog="Example: torchrun --standalone --nproc-per-node 2 -m distdiag.train -- --monitor --max-steps 200",
    )


# options that only one strategy uses
_ONLY_WITH = {"bucket_mb": "ddp", "schedule": "pipeline", "micro_batches": "pipeline"}


def check_strategy(config: TrainConfig, world_size: int, launched: bool) -> None:
    strategy = config.strategy
    ranks = counted(world_size, "rank")
    staged = strategy in ("model", "pipeline")
    torchrun = "torchrun --standalone --nproc-per-node 2 -m distdiag.train -- …"
    if strategy in ("single", "dp") and world_size > 1:
        hint = f"python -m distdiag.train --strategy {strategy} …, or --strategy ddp"
        raise DistdiagError(f"--strategy {strategy} trains in one process, this job has {ranks}", hint)
    if strategy in ("ddp", "fsdp") and not launched:
        raise DistdiagError(f"--strategy {strategy} needs a launcher", torchrun)
    if staged and world_size < 2:
        raise DistdiagError(f"--strategy {strategy} divides the layers over ranks, this job has {ranks}", torchrun)
    defaults = {f.name: f.default for f in fields(TrainConfig)}
    for name, only in _ONLY_WITH.items():
        if getattr(config, name) != defaults[name] and strategy != only:
            raise DistdiagError(f"{flag(name)} has no effect with --strategy {strategy}", f"--strategy {only}")
    if config.amp == "fp16" and strategy in ("fsdp", "model", "pipeline"):
        raise DistdiagError(f"--amp fp16 is not supported with --strategy {strategy}", "--amp bf16")
    if staged and any(f.kind in ("unused", "uneven") for f in config.inject):
        raise DistdiagError(
            f"--inject unused and uneven need whole models, not --strategy {strategy}", "--strategy ddp"
        )
    if strategy == "pipeline":
        _check_micro_batches(config, world_size)


def _check_micro_batches(config: TrainConfig, world_size: int) -> None:
    count = config.micro_batches
    if config.batch_size % count:
        fits = config.batch_size // count * count or count
        raise DistdiagError(
            f"a batch of {config.batch_size} cannot be divided into {count} equal micro-batches",
            f"--batch-size {fits} works",
        )
    if config.schedule == "1f1b" and count < world_size:
        raise DistdiagError(
            f"--schedule 1f1b with {world_size} ranks needs at least {world_size} micro-batches, not {count}",
            f"--micro-batches {world_size}, or --schedule gpipe",
        )
    if config.schedule == "interleaved" and count % world_size:
        raise DistdiagError(
            f"--schedule interleaved needs a multiple of {world_size} micro-batches, not {count}",
            f"--micro-batches {max(1, count // world_size) * world_size}",
        )


def parse_arguments(argv: Sequence[str] | None = None) -> TrainConfig:
    """Parse a command line into a configuration; check what needs neither torch nor disk access.

    Raises:
        DistdiagError: unknown option, value out of range, or a fault on a rank or step that does not exist.
        SystemExit: `--help` was printed.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    given = read(build_command(), arguments[1:] if arguments[:1] == ["--"] else arguments, "python -m distdiag.train")
    given["inject"] = tuple(parse_fault(spec) for specs in given["inject"] for spec in specs.split(","))
    config = TrainConfig(**given)
    world_size = int(os.environ.get("WORLD_SIZE", "1") or 1)
    launched = "RANK" in os.environ
    if config.strategy == "auto":
        config = replace(config, strategy="ddp" if launched else "single")
    check_strategy(config, world_size, launched)
    for fault in config.inject:
        if fault.rank is not None and fault.rank >= world_size:
            raise DistdiagError(
                f"--inject {fault.spec}: there is no rank {fault.rank}, the job has {world_size}",
                f"name a rank from 0 to {world_size - 1}, or start more: torchrun --nproc-per-node {fault.rank + 1} …",
            )
        if fault.step is not None and 0 < config.max_steps < fault.step:
            raise DistdiagError(
                f"--inject {fault.spec}: the job ends at step {config.max_steps}",
                f"name a step up to {config.max_steps}",
            )
    return config
