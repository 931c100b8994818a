"""The rules: one file per finding kind, named after it. Each module is a `Rule`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.kinds import Kind
from distdiag.diagnosis.model.findings import Abstained, Finding
from distdiag.diagnosis.rules import (
    comm_bound,
    deadlock,
    duplicate_data,
    gpu,
    group_misuse,
    input_bound,
    memory,
    mismatch,
    nonfinite,
    rank_lost,
    replica_drift,
    stall,
    straggler,
    timeout,
    uneven_batches,
    unused_parameters,
)


class Rule(Protocol):
    """The interface of a rule module.

    Attributes:
        kind: Kind of its findings; `kinds` declares when they are evaluated, reported and cleared.
        limits: Frozen dataclass; under each field its unit, meaning and source. None: it has no number.
    """

    @property
    def kind(self) -> Kind: ...

    @property
    def limits(self) -> Any: ...

    def evaluate(self, facts: Facts) -> Iterable[Finding | Abstained]:
        """Yield findings, and reasons why there is none."""
        ...


# In the order of evaluation: a rule sees in `facts.found` what those before it have found.
RULES: tuple[Rule, ...] = (
    timeout,
    mismatch,
    deadlock,
    rank_lost,
    stall,
    unused_parameters,
    group_misuse,
    uneven_batches,
    duplicate_data,
    replica_drift,
    nonfinite,
    memory,
    gpu,
    straggler,
    input_bound,
    comm_bound,
)
