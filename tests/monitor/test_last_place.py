"""The frames of a rank at a line that it entered after its last sample."""

from __future__ import annotations

import pytest

from distdiag.diagnosis.model.snapshot import Site
from distdiag.monitor.ranks.state import _with_innermost

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
