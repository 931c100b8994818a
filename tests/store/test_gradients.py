"""DDP's gradients in every reader: one definition of their cost, and the most expensive operation is first on the Comm screen."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from distdiag.report import perfetto, text
from distdiag.report.compare import compare_runs
from distdiag.report.facts import read_facts
from distdiag.store.frames import RankRow
from distdiag.store.gradients import read_gradients
from distdiag.store.reader import Run, open_run
from distdiag.store.rows import CollectiveRow, DdpRow, StepRow
from distdiag.store.writer import Writer
from distdiag.tui.data import comm_data
from distdiag.tui.data.snapshot import Request
from tests.jobs import unwrapped

MIB = 1 << 20


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Two ranks with steps of 100 ms; rank 1 arrives late, so rank 0 has 20 ms more of exposed communication."""
    with Writer(tmp_path / "run") as w:
        w.frame(4.0, "running", "", [RankRow(rank=0, step=40), RankRow(rank=1, step=40)])
        for rank in (0, 1):
            w.add(
                [
                    StepRow(
                        rank=rank, step=step, t_end_s=step / 10, step_ms=100.0, wait_ms=40.0,
                        comm_ms=50.0 + 20 * (rank == 0) if step % 8 == 0 or step < 3 else None,
                        exposed_ms=30.0 + 20 * (rank == 0) if step % 8 == 0 or step < 3 else None,
                    )
                    for step in range(1, 41)
                ]
            )  # fmt: skip
            w.add(
                [
                    DdpRow(
                        rank=rank,
                        name="Net",
                        pgroup="default_pg",
                        bytes=3 * MIB,
                        buckets=2,
                        bucket_bytes=f"{2 * MIB},{MIB}",
                    )
                ]
            )
        w.add(
            [
                CollectiveRow(pgroup="default_pg", seq=i, op="all_reduce", bytes=12, ranks=2, t_s=i / 100,
                              duration_us=100.0, skew_us=900.0, late_rank=1, step=i // 10 + 1)
                for i in range(400)
            ]
        )  # fmt: skip
    return open_run(tmp_path / "run")


def test_the_gradient_cost_is_the_smallest_of_all_ranks(run: Run) -> None:
    g = read_gradients(run)
    assert g is not None and (g.ranks, g.bytes, g.buckets, g.bucket_bytes) == (2, 3 * MIB, 2, (2 * MIB, MIB))
    assert (g.steps, g.comm_ms, g.exposed_ms, g.exposed_share) == (5, 50.0, 30.0, 0.3)  # steps 1 and 2 are warm-up
    early = read_gradients(run, t_s=1.7)
    assert early is not None and early.steps == 2
    assert run.report().gradients == g


def test_gradients_are_listed_first_on_the_comm_screen(run: Run) -> None:
    frame = run.latest_frame()
    assert frame is not None
    first, *rest = comm_data.read(run, Request(), frame, {}).ops
    assert (first.op, first.bytes, first.buckets, first.exposed_us) == ("gradients", 3 * MIB, 2, 30_000.0)
    assert first.algbw_gbps is not None and [o.op for o in rest] == ["all_reduce"]


def test_reports_comparisons_and_traces_show_gradients(run: Run) -> None:
    facts = read_facts(run)
    assert [(r.comm_ms, r.exposed_ms) for r in facts.ranks] == [(70.0, 50.0), (50.0, 30.0)]
    shown = text.render(facts)
    assert "3.0 MiB in 2 buckets" in shown and "30 % of step time is exposed" in unwrapped(shown)
    assert compare_runs([run]).runs[0].phases_ms["exposed"] == 40.0
    out = io.BytesIO()
    perfetto.write(run, out)
    steps = [e for e in json.loads(out.getvalue())["traceEvents"] if e.get("cat") == "step"]
    timed = [e["args"]["exposed_ms"] for e in steps if "exposed_ms" in e["args"]]
    assert len(timed) == 14 and len(steps) == 80


def test_a_run_without_ddp_has_no_gradients(tmp_path: Path) -> None:
    with Writer(tmp_path / "run") as w:
        w.add([StepRow(rank=0, step=1, t_end_s=0.1, step_ms=100.0)])
    with open_run(tmp_path / "run") as run:
        assert read_gradients(run) is None and run.report().gradients is None
        assert "Gradients" not in text.render(read_facts(run))
