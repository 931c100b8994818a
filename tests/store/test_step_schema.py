"""The forms of a step (page record, snapshot, row, table, minute, screen frame) have equal fields with equal names."""

from __future__ import annotations

import msgspec
import pytest

from distdiag.diagnosis.model.snapshot import RankState, Snapshot, Step
from distdiag.monitor.rows import Steps
from distdiag.page.layout import StepRecord
from distdiag.store import rows
from distdiag.store.checked import schema
from distdiag.store.frames import TABLE_COLUMNS, RankRow
from distdiag.store.rows import StepRow

COLUMNS = list(schema()["step"])
# Fields only in the page's record: ring number, flags and absolute times, which the snapshot has in seconds of the run.
TIMES_OF_DAY = {"start_ns", "end_ns", "ready_ns", "arrived_ns"}
IN_PHASES = {"forward_wait_ms", "optimizer_wait_ms"}  # subtracted from the times of these phases


def test_a_row_has_the_columns_of_the_table_in_their_order() -> None:
    assert list(StepRow.__struct_fields__) == COLUMNS


def test_every_duration_on_the_page_reaches_the_database() -> None:
    measured = {name for name, *_ in StepRecord._fields_ if name.endswith("_ns")} - TIMES_OF_DAY
    in_ms = {name.replace("_ns", "_ms") for name in measured}
    assert in_ms <= set(Step.__struct_fields__)
    assert in_ms - IN_PHASES <= set(COLUMNS)


def test_every_duration_of_a_snapshot_is_a_column() -> None:
    durations = {name for name in Step.__struct_fields__ if name.endswith("_ms")}
    assert durations - IN_PHASES <= set(COLUMNS)


def test_step_minute_has_only_columns_of_step() -> None:
    assert set(schema()["step_minute"]) - {"minute", "steps"} <= set(COLUMNS)


def test_the_screen_shows_columns_of_the_step_under_their_names() -> None:
    shown = {name for name in RankRow.__struct_fields__ if name.endswith("_ms")} - {"delta_self_ms"}
    assert shown <= set(COLUMNS)
    assert list(TABLE_COLUMNS) == list(schema()["rank"])


@pytest.mark.parametrize(
    "kind",
    [k for k in vars(rows).values() if isinstance(k, type) and issubclass(k, msgspec.Struct)],
)
def test_every_row_fits_a_table(kind: type[msgspec.Struct]) -> None:
    assert any(set(kind.__struct_fields__) <= set(columns) for columns in schema().values())


def test_a_step_keeps_the_epoch_in_which_it_ended() -> None:
    """Rows are written up to seconds later, when the rank may be in another epoch."""
    step = Step(
        step=3, end_s=1.0, step_ms=1.0, data_ms=0.0, forward_ms=0.0, backward_ms=0.0, optimizer_ms=0.0, wait_ms=0.0,
        other_ms=0.0, ready_s=None, batch=1, samples=1, loss=None, epoch=1,
    )  # fmt: skip
    steps = Steps()
    steps.add(0, [step])
    now = Snapshot(t_s=9.0, world_size=1, ranks={0: RankState(rank=0, epoch=2)}, groups={})
    assert [row.epoch for row in steps.rows(1, 9.0, now)] == [1]
