"""A reader's request for a profile of one rank, and the rank's answer: two small files next to its page.

Only this user can enter the directory of the pages, and both files must belong to this user and be closed to others, else they are
not read. Every number has a range. The request names no path: the rank writes into its own run directory.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distdiag import files
from distdiag.page.small_files import count, read_object

MAX_STEPS = 50
MAX_NUMBER = 9_999
MAX_LINES = 400  # of the user's code, in an answer
MAX_WAIT_NS = 3_600_000_000_000  # until a request's deadline
WAITING, RECORDING, SAVING, DONE, FAILED = "waiting", "recording", "saving", "done", "failed"
STATES = (WAITING, RECORDING, SAVING, DONE, FAILED)


@dataclass(slots=True)
class Request:
    """A request to a rank for a profile."""

    number: int  # of the profile in its run: the results are in RUN/profile/NUMBER
    first_step: int  # to be recorded; a rank that is past it begins with its next step
    steps: int
    deadline_ns: int  # monotonic clock; nothing begins after it, and recording ends at the first step boundary after it


@dataclass(slots=True)
class Answer:
    """State of a rank's profile, and its measurements in addition to the trace."""

    number: int
    state: str
    detail: str = ""
    step: int = 0
    # [step, wall clock in ns at its end], from the end of the step before the first one recorded
    boundaries: list[list[int]] = field(default_factory=list)
    # [file, line, function, samples]: the main thread's innermost user frame, most frequent first
    lines: list[list[Any]] = field(default_factory=list)
    samples: int = 0
    start_ms: float | None = None  # what starting cost the training thread
    stop_ms: float | None = None
    save_ms: float | None = None  # how long a thread needed to write the trace, nearly all of it with the GIL
    rss_peak_bytes: int | None = None
    device_peak_bytes: int | None = None


def request_path(pages: Path, rank: int) -> Path:
    return pages / f"r{rank}.profile"


def answer_path(pages: Path, rank: int) -> Path:
    return pages / f"r{rank}.profiled"


def results(run_dir: Path, number: int) -> Path:
    return run_dir / "profile" / str(number)


def trace_path(run_dir: Path, number: int, rank: int) -> Path:
    return results(run_dir, number) / f"rank_{rank}.json"


def write(path: Path, value: Request | Answer) -> None:
    """Write a request or an answer atomically.

    Raises:
        OSError: it cannot be written.
    """
    files.write(path.parent, path.name, json.dumps(asdict(value)).encode())


def take_request(path: Path, now_ns: int) -> Request:
    """Read a request and remove its file, whatever is in it.

    Raises:
        OSError, ValueError: it is not a request of this user, or a number is out of range.
    """
    try:
        value = read_object(path)
    finally:
        path.unlink(missing_ok=True)
    return Request(
        number=count(value.get("number"), 1, MAX_NUMBER),
        first_step=count(value.get("first_step"), 1),
        steps=count(value.get("steps"), 1, MAX_STEPS),
        deadline_ns=count(value.get("deadline_ns"), 1, now_ns + MAX_WAIT_NS),
    )


def read_answer(path: Path) -> Answer | None:
    """Return a rank's answer; None if there is none, or it is damaged or not this user's."""
    try:
        return answer_of(read_object(path))
    except (OSError, ValueError):
        return None


def answer_of(value: dict[str, Any]) -> Answer | None:
    """Return the answer in an object of JSON; None if it is damaged."""
    try:
        state, detail = value.get("state"), value.get("detail")
        if state not in STATES or not isinstance(detail, str):
            return None
        boundaries = [[count(step), count(ns)] for step, ns in value["boundaries"][: MAX_STEPS + 2]]
        lines = [
            [str(file)[:4096], count(line), str(function)[:400], count(n)]
            for file, line, function, n in value["lines"][:MAX_LINES]
        ]
        return Answer(
            number=count(value.get("number"), 1, MAX_NUMBER),
            state=state,
            detail=detail[:400],
            step=count(value.get("step")),
            boundaries=boundaries,
            lines=lines,
            samples=count(value.get("samples")),
            **{key: _measure(value.get(key)) for key in ("start_ms", "stop_ms", "save_ms")},
            **{
                key: None if value.get(key) is None else count(value[key])
                for key in ("rss_peak_bytes", "device_peak_bytes")
            },
        )
    except (ValueError, TypeError, KeyError):
        return None


def _measure(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value < 1e12 else None
