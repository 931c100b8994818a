"""The times of a training step: one table of their columns, words and colours, for the store, the screens and the report.

A step is recorded as how long each part took, not when. The column of a time is `NAME_ms`, in run.db, in rows and in frames.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    name: str  # the column is `NAME_ms`
    about: str  # what it is, one line
    word: str = ""  # in a legend; the name if empty
    short: str = ""  # in the head of a narrow column
    letter: str = ""  # in a bar without colours
    # of its area on dark and light ground (Okabe and Ito's: distinct with every kind of colour vision)
    colour: tuple[str, str] = ("", "")
    metric: str = ""  # title of the heat map that shows it; empty if none does
    # it is one of the parts that sum up to the step, which follow each other as in a training loop
    part: bool = False
    ddp: bool = False  # DDP measured it, in one step of many

    @property
    def column(self) -> str:
        return f"{self.name}_ms"


STEP_PARTS = (
    StepPart(name="self", about="step - wait: the rank's own time", metric="self ms (step - wait)"),
    StepPart(
        name="wait", word="waiting", short="wait", letter="·", colour=("#34383e", "#bcc1c8"), metric="wait ms",
        about="waiting for other ranks in collectives",
    ),
    StepPart(
        name="data", short="data", letter="d", colour=("#e69f00", "#e69f00"), metric="data ms", part=True,
        about="waiting for the next batch",
    ),
    StepPart(name="h2d", about="copies to the device", colour=("#f0e442", "#f0e442"), part=True),
    StepPart(
        name="forward", short="fwd", letter="f", colour=("#56b4e9", "#56b4e9"), metric="forward ms", part=True,
        about="forward pass, with the collectives that it calls itself",
    ),
    StepPart(
        name="backward", short="bwd", letter="b", colour=("#0072b2", "#0072b2"), metric="backward ms", part=True,
        about="backward pass, without waiting for other ranks",
    ),
    StepPart(
        name="optimizer", short="opt", letter="o", colour=("#009e73", "#009e73"), metric="optimizer ms", part=True,
        about="optimizer step, without waiting for other ranks",
    ),
    StepPart(
        name="other", short="oth", letter="x", colour=("#9a9a9a", "#8a8a8a"), part=True,
        about="the rest of the step, and copies to the device",
    ),
    StepPart(name="late", about="arrival after the first rank", metric="late ms, arrival after the first rank"),
    StepPart(name="step", about="from the end of one optimizer step to the end of the next", metric="step ms"),
    StepPart(name="comm", about="averaging the gradients", ddp=True),
    StepPart(name="exposed", about="the part of it that no computation hides", ddp=True),
)  # fmt: skip

# A step in a profile: what a rank did at each moment.
PROFILE_PARTS = (
    StepPart(
        name="compute", short="comp", letter="c", colour=("#56b4e9", "#56b4e9"),
        about="operators on the CPU, or kernels on the GPU",
    ),
    StepPart(
        name="hidden", word="overlap", short="overlap", letter="+", colour=("#0072b2", "#0072b2"),
        about="communication while something is computed",
    ),
    StepPart(
        name="transfer", word="communication", short="comm", letter="n", colour=("#e69f00", "#e69f00"),
        about="communication that no computation hides",
    ),
    next(p for p in STEP_PARTS if p.name == "wait"),
    StepPart(
        name="idle", short="idle", letter=" ", colour=("#1d2125", "#e4e7ea"),
        about="neither computation nor communication",
    ),
)  # fmt: skip

BY_NAME = {p.name: p for p in (*PROFILE_PARTS, *STEP_PARTS)}
RATE = "training samples of all ranks; pauses count as time, the first step does not"  # what `throughput` is
PHASES = tuple(p.name for p in STEP_PARTS if p.part)
TIMES = tuple(p.column for p in STEP_PARTS if not p.ddp)  # columns of every step, ms
DDP_TIMES = tuple(p.column for p in STEP_PARTS if p.ddp)  # columns of the steps that DDP timed, ms


def throughput(samples: float, seconds: float) -> float | None:
    """Return samples per second; None if none were counted.

    Args:
        samples: Of the steps after the first one, which has the start of DDP and compilation in it, if there are others.
            Batches of a validation are not among them.
        seconds: Those steps took, from end to end: with validations and checkpoints between them.
    """
    return samples / seconds if samples > 0 and seconds > 0 else None


def exposed_share(times: Iterable[tuple[float, float]]) -> float:
    """Return the share of step time that communication takes which no computation hides: the sum of the times by that of the steps.

    Args:
        times: Of the steps that DDP timed, those times on the rank with the least, and of the step, ms.
    """
    exposed_ms, step_ms = (sum(column) for column in zip(*times, strict=True))
    return exposed_ms / step_ms if step_ms > 0 else 0.0


def split(step: Any) -> dict[str, float]:
    """Return the parts of a step (anything with the columns as attributes), ms, and its waiting for other ranks, last.

    They sum up to the step: waiting happens inside parts, mostly in backward, and is taken out of backward as far as no time
    outside of all parts explains it.
    """
    parts = {name: getattr(step, f"{name}_ms") or 0.0 for name in PHASES}
    wait = step.wait_ms or 0.0
    apart = max(0.0, (step.step_ms or 0.0) - sum(parts.values()))
    parts["backward"] = max(0.0, parts["backward"] - max(0.0, wait - apart))
    return parts | {"wait": wait}
