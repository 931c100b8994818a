"""Options of `distdiag probe step --params` and `--paper`: memory on paper, without running a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import click

from distdiag.command_line import Parsed, count, flag, option
from distdiag.errors import DistdiagError
from distdiag.terms.units import parse_bytes

RANKS = [1, 8, 64]  # without --ranks
DTYPES = {"float32": (4, 0), "bfloat16": (2, 4), "float16": (2, 4)}  # bytes of a value, of its float32 copy
OPTIMIZERS = {"adamw": 2, "sgd": 1}  # float32 values for each parameter: two moments, or momentum
_COUNT = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
# options that measure, compare or start ranks
_MEASURING = (
    "nproc", "device", "backend", "share_gpus", "budget_s", "quick", "inject", "save", "against", "svg", "run_dir"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PerParameter:
    """Bytes for each parameter of the model."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def parse_parameters(text: str) -> int:
    """Return the number of parameters: `7e9`, `7B`, `350M`."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE]\+?[0-9]{1,2})?)\s*([kKmMbBgGtT]?)\s*", text)
    value = float(match[1]) * _COUNT[match[2].lower()] if match else 0.0
    if not 1 <= value <= 1e18:
        raise DistdiagError(f"--params {text} is not a number of parameters", "write 7e9, 7B or 350M")
    return round(value)


def _parse_per_parameter(text: str) -> PerParameter:
    try:
        weights, gradients, state = (float(part) for part in text.split(","))
    except ValueError:
        weights = gradients = state = -1.0
    if not (0 < weights < 1e3 and 0 <= gradients < 1e3 and 0 <= state < 1e3):
        hint = "weights, gradients, optimizer state in bytes, e.g. 2,2,12"
        raise DistdiagError(f"--bytes-per-param {text}: not three sizes", hint)
    return PerParameter(weights, gradients, state)


def byte_size(name: str) -> Parsed:
    """Return the type of an option that takes a size in bytes."""
    return Parsed("text", lambda text: parse_bytes(text, name))


@dataclass(frozen=True, slots=True)
class Paper:
    """The model and the machine, from the options; None: not given.

    Attributes:
        parameters: None: counted in `--model`.
        per_parameter: From `--dtype` and `--optimizer`, or `--bytes-per-param`.
        link: Bus bandwidth in GB/s, or the file of a saved `probe allreduce`.
        step_ms: Computing time of one step.
    """

    parameters: int | None = option(None, "--params", type=Parsed("text", parse_parameters), metavar="N")
    """parameters of the model: 7e9, 7B, 350M"""
    memory_bytes: int | None = option(None, "--memory", type=byte_size("--memory"), metavar="SIZE")
    """of one device, e.g. 80GiB (default: this host's smallest GPU)"""
    optimizer: str | None = option(None, type=click.Choice(list(OPTIMIZERS)))
    """default adamw; sgd is with momentum"""
    per_parameter: PerParameter = option(
        PerParameter(2, 2, 12), "--bytes-per-param", type=Parsed("text", _parse_per_parameter), metavar="W,G,O"
    )
    """weights, gradients, optimizer state (default by --dtype: bfloat16 2,2,12; float32 4,4,8)"""
    layers: int | None = option(type=Parsed("count", count), metavar="N")
    """equal blocks, of which FSDP gathers two at once"""
    activations_bytes: int | None = option(None, "--activations", type=byte_size("--activations"), metavar="SIZE")
    """saved for backward, of the whole --batch-size in one process"""
    link: str | None = option(metavar="GBPS|FILE")
    """bus bandwidth between ranks, or a saved `probe allreduce` (--save, or --json -o)"""
    dtype: str = "bfloat16"
    step_ms: float | None = None


FLAGS = {f.name: (*f.metadata["flags"], f"--{f.name}")[0] for f in fields(Paper) if f.metadata}


def make_paper(given: Mapping[str, Any], own: Mapping[str, Any], counted: bool, probe: str) -> Paper | None:
    """Return the options of `--params` or `--paper`; None if neither is given.

    `given` are the values of the other options, `own` those of `Paper`'s options; `counted` if `--paper` was given.
    """
    stated = "parameters" in own
    if not stated and not counted:
        if own:
            text = f"{FLAGS[next(name for name in FLAGS if name in own)]} is for memory on paper, not for measuring"
            raise DistdiagError(text, "add --params 7e9, or --paper")
        return None
    mode = "--params" if stated else "--paper"
    if probe != "step":
        text = f"{mode} computes the memory of a training step, not {probe}"
        raise DistdiagError(text, "distdiag probe step --params 7e9")
    for name in _MEASURING:
        if given.get(name):
            used = flag(name.removesuffix("_s"))
            machine = "; --memory and --ranks describe the machine" if name in ("device", "backend", "nproc") else ""
            raise DistdiagError(f"{mode} runs nothing: {used} does not apply", f"leave {used} out{machine}")
    if given.get("output_format") == "nccl-tests":
        raise DistdiagError(f"{mode} measures no collective", "--as json or csv")
    if stated and "model" in given:
        hint = f"--paper --model {given['model']}, or --params alone"
        raise DistdiagError("--params and --model both give the model", hint)
    for name in () if stated else ("layers", "activations_bytes"):
        if name in own:
            hint = f"leave {FLAGS[name]} out, or --params 7e9"
            raise DistdiagError(f"{FLAGS[name]} is counted in the model", hint)
    if own.get("layers") == 0:
        raise DistdiagError("--layers 0: a model has at least one", "the number of equal blocks, e.g. 32")
    dtype = given.get("dtype", "bfloat16")
    known = {"dtype": dtype, "step_ms": given.get("step_ms")}
    if "per_parameter" in own:
        if "optimizer" in own:
            raise DistdiagError("--bytes-per-param already contains the optimizer", "leave --optimizer out")
        return Paper(**known, **own)
    if dtype not in DTYPES:
        raise DistdiagError(f"--dtype {dtype} is not supported on paper", "one of " + ", ".join(DTYPES))
    size, copy = DTYPES[dtype]
    own = {"optimizer": "adamw", **own}
    per_parameter = PerParameter(size, size, copy + 4 * OPTIMIZERS[own["optimizer"]])
    return Paper(**known, **own, per_parameter=per_parameter)
