"""Options of `distdiag probe step --params`: memory on paper, without running a model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from distdiag.errors import DistdiagError
from distdiag.terms.units import DTYPE_ALIASES, parse_bytes

RANKS = [1, 8, 64]  # without --ranks
DTYPES = {"float32": (4, 0), "bfloat16": (2, 4), "float16": (2, 4)}  # bytes of a value, of its float32 copy
OPTIMIZERS = {"adamw": 2, "sgd": 1}  # float32 values for each parameter: two moments, or momentum
_COUNT = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
# options that measure, compare or start ranks, with their defaults
_MEASURING: dict[str, Any] = {
    "nproc": None, "device": None, "backend": None, "share_gpus": False, "budget": None, "quick": False, "inject": (),
    "save": None, "against": None, "svg": None, "run_dir": None,
}  # fmt: skip
_OWN = ("memory", "optimizer", "bytes_per_param", "layers", "activations", "link")


@dataclass(frozen=True, slots=True)
class PerParameter:
    """Bytes for each parameter of the model."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class Paper:
    """The model and the machine, from the options; None: not given.

    Args:
        parameters: Number of parameters; None: counted in `--model`.
        per_parameter: From `--dtype` and `--optimizer`, or `--bytes-per-param`.
        memory_bytes: Memory of one device.
        layers: Number of equal blocks that contain the parameters.
        activations_bytes: Activations of the whole global batch in one process.
        link: Bus bandwidth in GB/s, or the file of a saved `probe allreduce`.
        step_ms: Computing time of one step.
    """

    parameters: int | None
    per_parameter: PerParameter
    dtype: str
    optimizer: str | None
    memory_bytes: int | None = None
    layers: int | None = None
    activations_bytes: int | None = None
    link: str | None = None
    step_ms: float | None = None


def parse_paper(args: SimpleNamespace, probe: str) -> Paper | None:
    """Return the options of `--params` or `--paper`; None if neither is given.

    Raises:
        DistdiagError: a wrong value, or options that exclude each other.
    """
    if not args.params and not args.paper:
        given = next((name for name in _OWN if getattr(args, name) is not None), None)
        if given:
            raise DistdiagError(
                f"{_option(given)} is for memory on paper, not for measuring", "add --params 7e9, or --paper"
            )
        return None
    mode = "--params" if args.params else "--paper"
    if probe != "step":
        raise DistdiagError(
            f"{mode} computes the memory of a training step, not {probe}", "distdiag probe step --params 7e9"
        )
    _refuse_measuring(args, mode)
    if args.params and args.model:
        raise DistdiagError(
            "--params and --model both give the model", f"--paper --model {args.model}, or --params alone"
        )
    if not args.params:
        for name in ("layers", "activations"):
            if getattr(args, name) is not None:
                raise DistdiagError(
                    f"{_option(name)} is counted in the model", f"leave {_option(name)} out, or --params 7e9"
                )
    if args.layers == 0:
        raise DistdiagError("--layers 0: a model has at least one", "the number of equal blocks, e.g. 32")
    if args.bytes_per_param and args.optimizer:
        raise DistdiagError("--bytes-per-param already contains the optimizer", "leave --optimizer out")
    given_dtype: str = args.dtype or "bfloat16"
    dtype = DTYPE_ALIASES.get(given_dtype, given_dtype)
    return Paper(
        parse_parameters(args.params) if args.params else None,
        _per_parameter(args.bytes_per_param, dtype, args.optimizer or "adamw"),
        dtype,
        None if args.bytes_per_param else args.optimizer or "adamw",
        parse_bytes(args.memory, "--memory") if args.memory else None,
        args.layers,
        parse_bytes(args.activations, "--activations") if args.activations else None,
        args.link,
        args.step_ms,
    )


def parse_parameters(text: str) -> int:
    """Return the number of parameters: `7e9`, `7B`, `350M`.

    Raises:
        DistdiagError: not such a number, or below 1.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE]\+?[0-9]{1,2})?)\s*([kKmMbBgGtT]?)\s*", text)
    count = float(match[1]) * _COUNT[match[2].lower()] if match else 0.0
    if not 1 <= count <= 1e18:
        raise DistdiagError(f"--params {text} is not a number of parameters", "write 7e9, 7B or 350M")
    return round(count)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _refuse_measuring(args: SimpleNamespace, mode: str) -> None:
    for name, default in _MEASURING.items():
        if getattr(args, name) != default:
            hint = f"leave {_option(name)} out"
            if name in ("device", "backend", "nproc"):
                hint += "; --memory and --ranks describe the machine"
            raise DistdiagError(f"{mode} runs nothing: {_option(name)} does not apply", hint)
    if args.output_format == "nccl-tests":
        raise DistdiagError(f"{mode} measures no collective", "--as json or csv")


def _per_parameter(text: str | None, dtype: str, optimizer: str) -> PerParameter:
    if text is None:
        if dtype not in DTYPES:
            raise DistdiagError(f"--dtype {dtype} is not supported on paper", "one of " + ", ".join(DTYPES))
        size, copy = DTYPES[dtype]
        return PerParameter(size, size, copy + 4 * OPTIMIZERS[optimizer])
    try:
        weights, gradients, state = (float(part) for part in text.split(","))
    except ValueError:
        weights = gradients = state = -1.0
    if not (0 < weights < 1e3 and 0 <= gradients < 1e3 and 0 <= state < 1e3):
        raise DistdiagError(
            f"--bytes-per-param {text}: not three sizes", "weights, gradients, optimizer state in bytes, e.g. 2,2,12"
        )
    return PerParameter(weights, gradients, state)
