"""The frames of a rank at a line that it entered after its last sample."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from distdiag.diagnosis.model.snapshot import Call, Site
from distdiag.monitor.ranks.state import RankView, _with_innermost
from distdiag.page.layout import Blocked

MODULE, MAIN, SHARE = Site("job.py", 40, "<module>"), Site("job.py", 36, "main"), Site("job.py", 17, "share")
SAMPLED = (SHARE, MAIN, MODULE)


@pytest.mark.parametrize(
    ("entered", "frames"),
    [
        (Site("job.py", 34, "main"), (Site("job.py", 34, "main"), MODULE)),  # `share` has returned
        (Site("job.py", 19, "share"), (Site("job.py", 19, "share"), MAIN, MODULE)),
        (Site("job.py", 44, "<module>"), (Site("job.py", 44, "<module>"),)),
        (Site("job.py", 8, "other"), (Site("job.py", 8, "other"), MAIN, MODULE)),
    ],
)
def test_only_callers_of_the_line_entered_last_are_below_it(entered: Site, frames: tuple[Site, ...]) -> None:
    assert _with_innermost(entered, SAMPLED, SAMPLED[1:]) == frames


@pytest.mark.parametrize(("entered_s", "place"), [(5.2, SHARE), (4.8, None)])
@pytest.mark.parametrize("completed_s", [None, 5.3])
def test_a_call_that_a_rank_has_left_is_where_it_was_last_too(
    entered_s: float, place: Site | None, completed_s: float | None
) -> None:
    call = Call(op="all_reduce", group="default_pg", seq=1, site=SHARE, entered_s=entered_s, completed_s=completed_s)
    view = SimpleNamespace(header=SimpleNamespace(blocked=Blocked.NO), history=SimpleNamespace(calls=[call]))
    assert (RankView._entered(cast("Any", view), 5.0) or None) == place
