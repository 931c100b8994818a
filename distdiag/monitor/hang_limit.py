"""DISTDIAG_END_HANGS_S: end the ranks of a job whose hang is proved and has lasted so long. Off unless it is set; the pytest plugin does."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

from distdiag.diagnosis.engine import Diagnosis
from distdiag.diagnosis.model.findings import Certainty, Severity, State
from distdiag.monitor.evidence import signals
from distdiag.monitor.ranks.state import RankView

VARIABLE = "DISTDIAG_END_HANGS_S"


class HangLimit:
    """Ends the ranks of one node. A suspected hang is never ended: it may recover."""

    def __init__(self) -> None:
        self.limit_s: float | None = None
        self.ended = False
        try:
            limit_s = float(os.environ[VARIABLE])
        except (KeyError, ValueError):
            return
        if math.isfinite(limit_s) and limit_s >= 0:
            self.limit_s = limit_s

    def due(self, now_s: float, diagnosis: Diagnosis) -> bool:
        """True once, when it is time to end the ranks."""
        if self.limit_s is None or diagnosis.state != State.DEADLOCKED:
            return False
        proved = [
            record.finding.detected_s
            for record in diagnosis.records.values()
            if record.reported and record.finding.cleared_s is None
            and record.finding.severity == Severity.ERROR and record.finding.certainty == Certainty.PROVED
            and record.finding.detected_s is not None
        ]  # fmt: skip
        if not proved or now_s - min(proved) < self.limit_s:
            return False
        self.limit_s = None
        return True

    def end(self, views: Iterable[RankView]) -> list[int]:
        """End the ranks; return those that were."""
        ranks = signals.end({v.rank: (v.header.pid, v.reader.path) for v in views if v.ending is None})
        self.ended = bool(ranks)
        return ranks
