"""A reader's request for a profile of one rank, and the rank's answer: two small files next to its page.

Only this user can enter the directory of the pages, and both files must belong to this user and be closed to others, else they are
not read. Every number has a range. The request names no path: the rank writes into its own run directory.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distdiag import files

MAX_STEPS = 50
MAX_NUMBER = 9_999
MAX_BYTES = 256 * 1024  # of either file
MAX_LINES = 400  # of the user's code, in an answer
MAX_WAIT_NS = 3_600_000_000_000  # until a request's deadline
WAITING, RECORDING, SAVING, DONE, FAILED = "waiting", "recording", "saving", "done", "failed"
STATES = (WAITING, RECORDING, SAVING, DONE, FAILED)
_MAX_INT = 1 << 62


@dataclass(slots=True)
class Request:
    """A request to a rank for a profile.

    Attributes:
        number: Number of the profile in its run: the results are in RUN/profile/NUMBER.
        first_step: The first step to be recorded; a rank that is past it begins with its next step.
        steps: How many steps.
        deadline_ns: Monotonic clock; nothing begins after it, and recording ends at the first step boundary after it.
    """

    number: int
    first_step: int
    steps: int
    deadline_ns: int


@dataclass(slots=True)
class Answer:
    """State of a rank's profile, and its measurements in addition to the trace.

    Attributes:
        boundaries: [step, wall clock in ns at its end], from the end of the step before the first one recorded.
        lines: [file, line, function, samples]: the main thread's innermost user frame, most frequent first.
        start_ms, stop_ms: What starting and stopping cost the training thread.
        save_ms: How long a thread needed to write the trace, nearly all of it with the GIL.
    """

    number: int
    state: str
    detail: str = ""
    step: int = 0
    boundaries: list[list[int]] = field(default_factory=list)
    lines: list[list[Any]] = field(default_factory=list)
    samples: int = 0
    start_ms: float | None = None
    stop_ms: float | None = None
    save_ms: float | None = None
    rss_peak_bytes: int | None = None
    device_peak_bytes: int | None = None


def request_path(pages: Path, rank: int) -> Path:
    return pages / f"r{rank}.profile"


def answer_path(pages: Path, rank: int) -> Path:
    return pages / f"r{rank}.profiled"


def results(run_dir: Path, number: int) -> Path:
    """Return the directory of the results of one profile."""
    return run_dir / "profile" / str(number)


def trace_path(run_dir: Path, number: int, rank: int) -> Path:
    """Return the file into which a rank writes its trace."""
    return results(run_dir, number) / f"rank_{rank}.json"


def write(path: Path, value: Request | Answer) -> None:
    """Write a request or an answer atomically.

    Raises:
        OSError: it cannot be written.
    """
    files.write(path.parent, path.name, json.dumps(asdict(value)).encode())


def _read(path: Path) -> dict[str, Any]:
    """Return the object in a small file of this user that no other user can write.

    Raises:
        OSError: it cannot be read.
        ValueError: it belongs to another user, is too large, or is not a JSON object.
    """
    with open(files.open_to_read(path.parent, path.name), "rb") as f:
        found = os.fstat(f.fileno())
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise ValueError(f"{path.name} is not a file of this user, or others can write it")
        data = f.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"{path.name} is too large")
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return value


def _count(value: Any, least: int = 0, most: int = _MAX_INT) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r:.40} is not a whole number from {least} to {most}")
    return value


def take_request(path: Path, now_ns: int) -> Request:
    """Read a request and remove its file, whatever is in it.

    Raises:
        OSError, ValueError: it is not a request of this user, or a number is out of range.
    """
    try:
        value = _read(path)
    finally:
        path.unlink(missing_ok=True)
    return Request(
        number=_count(value.get("number"), 1, MAX_NUMBER),
        first_step=_count(value.get("first_step"), 1),
        steps=_count(value.get("steps"), 1, MAX_STEPS),
        deadline_ns=_count(value.get("deadline_ns"), 1, now_ns + MAX_WAIT_NS),
    )


def read_answer(path: Path) -> Answer | None:
    """Return a rank's answer; None if there is none, or it is damaged or not this user's."""
    try:
        value = _read(path)
        state, detail = value.get("state"), value.get("detail")
        if state not in STATES or not isinstance(detail, str):
            return None
        boundaries = [[_count(step), _count(ns)] for step, ns in value["boundaries"][: MAX_STEPS + 2]]
        lines = [
            [str(file)[:4096], _count(line), str(function)[:400], _count(n)]
            for file, line, function, n in value["lines"][:MAX_LINES]
        ]
        return Answer(
            number=_count(value.get("number"), 1, MAX_NUMBER),
            state=state,
            detail=detail[:400],
            step=_count(value.get("step")),
            boundaries=boundaries,
            lines=lines,
            samples=_count(value.get("samples")),
            **{key: _measure(value.get(key)) for key in ("start_ms", "stop_ms", "save_ms")},
            **{key: _bytes(value.get(key)) for key in ("rss_peak_bytes", "device_peak_bytes")},
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _measure(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value < 1e12 else None


def _bytes(value: Any) -> int | None:
    return None if value is None else _count(value)
