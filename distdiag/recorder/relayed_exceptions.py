"""Exceptions that pass on the error of another process: of a DataLoader's worker, or of a rank in a distributed checkpoint.

Both have the original traceback as text. What is recorded is the original error and, in the process it belongs to, its frames.
"""

from __future__ import annotations

import re
import traceback

_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')
_WORKER = " in DataLoader worker process"
_ENDED = "DataLoader worker (pid"  # torch's own error, of a worker that has ended
_CHECKPOINT = "CheckpointException ranks:"
_RANK = re.compile(r"^Traceback \(most recent call last\): \(RANK (\d+)\)\n", re.MULTILINE)
_HEAD = 400  # characters of a text in which these marks are
Frames = list[tuple[str, int, str]]  # file, line, function; outermost first


def text_of(error: BaseException) -> str:
    """Return an exception as Python prints it: of an ended DataLoader worker the cause, which names the signal that ended it."""
    own, *causes = (
        "".join(traceback.format_exception_only(e)).strip() for e in (error, error.__cause__) if e is not None
    )
    return next((text.rstrip(" .") for text in causes if _ENDED in own and _ENDED in text), own)


def original(text: str, rank: int) -> tuple[str, Frames]:
    """Return (text of the original error, frames that its text has and that belong to this rank).

    torch.distributed.checkpoint raises on all ranks if one fails. On the others the text names the rank that failed.
    """
    if _WORKER in text[:_HEAD]:
        return text.splitlines()[-1] + " (in a DataLoader worker)", _frames(text)
    parts = _RANK.split(text) if _CHECKPOINT in text[:_HEAD] else []
    failed = {int(parts[i]): parts[i + 1] for i in range(1, len(parts) - 1, 2)}
    if not failed:
        return text, []
    if rank in failed:
        return _error(failed[rank]) + " (in a distributed checkpoint)", _frames(failed[rank])
    other, traceback = next(iter(failed.items()))
    return f"CheckpointException: rank {other} failed: {_error(traceback)}", []


def _frames(text: str) -> Frames:
    return [(file, int(line), function) for file, line, function in _FRAME.findall(text)]


def _error(traceback: str) -> str:
    """Return the line after the frames of a traceback: `OSError: [Errno 122] Disk quota exceeded`."""
    lines = traceback.rstrip().splitlines()
    return next((line for line in lines if line and not line[0].isspace()), lines[-1] if lines else "")
