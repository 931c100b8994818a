"""What is known of one rank for a profile: its trace, and what distdiag recorded next to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distdiag.traces.analyse import Entry, Message
from distdiag.traces.read import Trace


@dataclass(slots=True)
class Recorded:
    """What one rank recorded.

    Attributes:
        boundaries: (step, wall clock in ns at its end), ascending.
        lines: (file, line, function, samples) of the training thread.
        measured: Further fields of `RankTimes`.
    """

    trace: Trace
    boundaries: Sequence[tuple[int, int]]
    entries: Sequence[Entry] = ()
    lines: Sequence[tuple[str, int, str, int]] = ()
    samples: int = 0
    measured: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Message] = ()
