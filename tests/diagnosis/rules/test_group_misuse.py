"""group_misuse: a rank calls a collective in a group that it does not belong to."""

from __future__ import annotations

import msgspec

from distdiag.diagnosis.model.snapshot import (
    Sample,
)
from distdiag.diagnosis.rules import group_misuse
from tests.diagnosis.made import LOOP, findings, job, only, rank


def test_a_call_by_a_non_member_is_reported_with_its_line() -> None:
    outside = Sample("not_a_member", 3, 0.0, name="all_reduce", site=LOOP)
    f = only(findings(job(rank(0), rank(1, samples=(outside,))), group_misuse))
    assert (f.kind, f.cause, f.culprits) == ("group_misuse", "not_a_member", (1,))
    assert "all_reduce" in f.message and f.where[0].line == LOOP.line
    harmless = msgspec.structs.replace(outside, name="barrier")
    assert findings(job(rank(0), rank(1, samples=(harmless,))), group_misuse) == []
