"""Records whether each finding kind could be judged so far, and why not: the rules' abstentions, by kind and cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from distdiag.diagnosis.model.findings import Abstained, Check, Finding


@dataclass
class Checks:
    """One entry per kind, and one per cause that a rule abstained from."""

    _known: dict[tuple[str, str | None], Check] = field(default_factory=dict)

    def take(self, kind: str, outcomes: Sequence[Finding | Abstained]) -> None:
        """Add one evaluation of a rule."""
        abstained = [x for x in outcomes if isinstance(x, Abstained)]
        if not any(x.cause is None for x in abstained):
            self._set(kind, Abstained("", checked=True))
        for x in abstained:
            self._set(kind, x)

    def _set(self, kind: str, x: Abstained) -> None:
        before = self._known.get((kind, x.cause))
        if before is not None and before.checked and not x.checked:
            return  # what was judged last says more than that the job has ended, or stalls
        self._known[kind, x.cause] = Check(kind=kind, cause=x.cause, checked=x.checked, reason=x.reason)

    @property
    def all(self) -> tuple[Check, ...]:
        """Every check, in the order of the rules' first evaluation."""
        return tuple(self._known.values())
