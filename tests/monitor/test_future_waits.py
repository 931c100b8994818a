"""A rank that waits for the future of a collective has no frame of torch: its own line shows the wait."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distdiag.diagnosis.model.snapshot import Site
from distdiag.monitor.ranks.follow import RankHistory


@pytest.mark.parametrize(
    ("line", "raw", "waits"),
    [
        ("w.get_future().wait()", "train.average", True),
        ("futures.wait()", "train.average", True),
        ("torch.futures.collect_all([w.get_future() for w in works]).wait()", "train.average", True),
        ("torch.futures.wait_all(handles)", "train.average", True),
        ("grad = fut.value()[0]", "train.average", True),
        ("futures.wait()", "threading.wait", False),  # a future of concurrent.futures waits in Python
        ("process.wait()", "train.average", False),
        ("futures.append(w.get_future())", "train.average", False),
    ],
)
def test_the_line_shows_that_a_future_is_waited_for(line: str, raw: str, waits: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"def average(works):\n    {line}\n")
    history = RankHistory.__new__(RankHistory)
    decoder: Any = SimpleNamespace(
        text=lambda _: raw, header=SimpleNamespace(raw_innermost=0), stack=lambda: (Site(str(script), 2, "average"),)
    )
    history._decoder = decoder
    assert history.in_cpp_wait() is waits
