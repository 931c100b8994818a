"""A call that raised on a rank has not completed, whenever the monitor reads that."""

from __future__ import annotations

from pathlib import Path

import pytest

from distdiag.diagnosis.model.snapshot import Group
from distdiag.monitor.collectives import Collectives
from distdiag.monitor.ranks.state import RankView
from distdiag.page.layout import page_path
from distdiag.page.writer import PageWriter


@pytest.mark.parametrize("failed", [True, False])
def test_a_call_that_raised_is_none_that_completed_with_other_arguments(tmp_path: Path, failed: bool) -> None:
    matched = Collectives()
    for rank, op in enumerate(("barrier", "all_reduce")):
        page = PageWriter(page_path(tmp_path, rank))
        page.header.rank = rank
        group = page.page.groups[0]
        group.name, group.description = page.text("0"), page.text("default_pg")
        page.header.n_groups = 1
        page.publish()
        site = page.site("/job/train.py", 10 + rank, "main")
        number = page.write_call(page.text(op), 0, 1, 0, -1, 0, 0, site, -1, *[0] * 6, 0, -1, -1, 1, 0, 0, 0, 1)
        page.call_left(number, 9, 5, failed=failed)
        view = RankView(page.path, rank)
        view.refresh(1.0)
        matched.add(rank, view.history.closed_calls)
        view.reader.close()
    made = matched._rows_on_host({"default_pg": Group(name="default_pg", ranks=(0, 1), backend="gloo")}, None)
    assert len(made) == len(matched.completed_conflicts) == (not failed)
