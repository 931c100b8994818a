"""The strategies by name, and the reason why one cannot run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distdiag.errors import DistdiagError
from distdiag.probekit.verdict.result import Result
from distdiag.terms.ranks import by_value
from distdiag.terms.units import counted

SINGLE = "single"
STRATEGIES = (SINGLE, "single-threads", "dataparallel", "ddp", "fsdp", "model", "pipeline")
DEFAULT = STRATEGIES[:5]  # without --strategies and --ranks
IN_ONE_PROCESS = STRATEGIES[:3]
STAGED = ("model", "pipeline")
LABELS = {
    SINGLE: "single process", "single-threads": "single process", "dataparallel": "DataParallel", "ddp": "DDP",
    "fsdp": "FSDP (fully_shard)", "model": "model parallel", "pipeline": "pipeline (1F1B)",
}  # fmt: skip
ALL = "all"
_ALIASES = {"threads": "single-threads", "dp": "dataparallel"}
_LEAST_MICRO_BATCHES = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One strategy on one number of ranks: processes, or threads or devices of one process."""

    strategy: str
    ranks: int

    @property
    def processes(self) -> int:
        return 1 if self.strategy in IN_ONE_PROCESS else self.ranks

    def __str__(self) -> str:
        if self.strategy == SINGLE:
            return self.strategy
        words = {"single-threads": ("thread",), "dataparallel": ("copy", "copies")}
        return f"{self.strategy} on {counted(self.ranks, *words.get(self.strategy, ('rank',)))}"


@dataclass(frozen=True, slots=True)
class Machine:
    device: str
    backend: str
    gpus: int


def parse_strategies(text: str) -> list[str]:
    """Parse `--strategies`: names, their short forms, or `all`."""
    names: list[str] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        for name in STRATEGIES if word == ALL else (_ALIASES.get(word, word),):
            if name not in STRATEGIES:
                raise DistdiagError(f"--strategies: no '{word}'", f"of {', '.join(STRATEGIES)}; or {ALL}")
            if name not in names:
                names.append(name)
    return names


def micro_batches(ranks: int) -> int:
    """Return the micro-batches of a pipeline over `ranks` ranks: at least one for each, as 1F1B needs."""
    return max(_LEAST_MICRO_BATCHES, ranks)


def why_not(case: Case, machine: Machine, batch: int) -> str | None:
    """Return why `case` cannot run on this machine; None if it can."""
    cuda = machine.device == "cuda"
    if case.strategy == SINGLE:
        return None
    if case.strategy == "single-threads" and cuda:
        return "one process uses a whole GPU"
    if case.ranks < 2:
        one = {"single-threads": "one thread is the single process", "dataparallel": "one copy is the single process"}
        layers = "one rank has all layers: there is nothing to divide"
        default = "one rank has no other to exchange gradients with"
        return layers if case.strategy in STAGED else one.get(case.strategy, default)
    if case.strategy == "dataparallel" and cuda and machine.gpus < case.ranks:
        return f"{case.ranks} copies need {case.ranks} GPUs, this host has {machine.gpus}"
    if case.strategy in ("fsdp", *STAGED) and cuda and machine.backend == "gloo":
        return "on CUDA it needs NCCL, and so a GPU for each rank"
    if case.strategy == "pipeline" and batch % micro_batches(case.ranks):
        return f"a batch of {batch} cannot be divided into {micro_batches(case.ranks)} equal micro-batches"
    return None


def can_run(wanted: Sequence[Case], machine: Machine, batch: int, remedy: str) -> tuple[list[Case], dict[Case, str]]:
    """Return the cases that can run, and the reason of each that cannot."""
    reasons = {case: why for case in wanted if (why := why_not(case, machine, batch))}
    if len(reasons) == len(wanted):
        case, why = next(iter(reasons.items()))
        raise DistdiagError(f"{case}: {why}", remedy)
    return [case for case in wanted if case not in reasons], reasons


def report(result: Result, reasons: Mapping[Case, str]) -> None:
    """Add the cases that are not possible, with their reasons."""
    entries = [{"strategy": case.strategy, "ranks": case.ranks, "reason": why} for case, why in reasons.items()]
    result.details["not_possible"] = entries
    for why, cases in by_value(reasons).items():
        result.notes.append(f"not possible: {', '.join(map(str, cases))}: {why}")
