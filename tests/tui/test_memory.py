"""Mem/GPU: the history of one GPU, process and host, read in pieces; what throttled a GPU, and when."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from distdiag.store.reader import open_run
from distdiag.store.rows import GpuRow, HostRow
from distdiag.store.writer import Writer
from distdiag.tui.data import samples
from distdiag.tui.draw.charts import Chart, Curve, buckets, draw
from distdiag.tui.draw.lines import plain
from distdiag.tui.draw.text import integer
from tests.tui.conftest import MakeRun
from tests.tui.drive import showing
from tests.tui.synthetic import Scenario

pytestmark = pytest.mark.usefixtures("frozen")


def _run_with_gpus(path: Path, seconds: int, gpus: int = 3) -> Path:
    """Return a run in which GPU g uses g percent more in each second."""
    w = Writer(path)
    for t in range(seconds):
        w.add([GpuRow(t_s=t + 0.5, node=0, gpu=g, utilization_pct=float(t % 50 * g)) for g in range(gpus)])
    assert w.close(), w.last_error
    return path


def test_reading_in_pieces_equals_one_read(tmp_path: Path) -> None:
    with open_run(_run_with_gpus(tmp_path, 40)) as run:
        whole = samples.Series("gpu", {"node": 0, "gpu": 2})
        made = whole.read(run, 40.0)
        pieces = samples.Series("gpu", {"node": 0, "gpu": 2})
        for end in (3.0, 3.6, 20.0, 12.0, 40.0, 40.0):
            found = pieces.read(run, end)
        assert made == found
        assert made.times == tuple(t + 0.5 for t in range(40))
        assert made["utilization_pct"] == tuple(2.0 * t for t in range(40)) and set(made["power_w"]) == {None}
        assert whole.read(run, 3.6).times == (0.5, 1.5, 2.5, 3.5)
        absent = samples.Series("gpu", {"node": 0, "gpu": 7})
        assert absent.read(run, 40.0).times == ()


def test_a_long_history_stays_bounded_and_complete(tmp_path: Path) -> None:
    with open_run(_run_with_gpus(tmp_path, 6000, 1)) as run:
        at_once = samples.Series("gpu", {"node": 0, "gpu": 0})
        grown = samples.Series("gpu", {"node": 0, "gpu": 0})
        for end in range(50, 6001, 50):
            grown.read(run, float(end))
        for series in (at_once, grown):
            times = series.read(run, 6000.0).times
            assert samples.POINTS / 2 <= len(times) <= 2 * samples.POINTS
            assert times[0] == 0.5 and times[-1] > 5950 and list(times) == sorted(set(times))


def test_the_cache_forgets_rows_that_the_cursor_left_long_ago(tmp_path: Path) -> None:
    cache: dict = {}
    with open_run(_run_with_gpus(tmp_path, 3, 40)) as run:
        for gpu in range(40):
            assert samples.read(run, cache, 3.0, "gpu", node=0, gpu=gpu).times == (0.5, 1.5, 2.5)
    assert len(cache["samples"]) == samples.KEPT


def test_rare_samples_are_one_curve_and_a_pause_is_a_gap() -> None:
    """A busy machine samples every eight seconds, then every second while a reader is open."""
    times = [*range(0, 64, 8), *range(64, 100), *range(160, 180)]
    found = buckets(Curve("", times, [1.0] * len(times), "", bridge_s=12.0), 180.0, 1.0, 180)
    assert None not in found[8:98] and set(found[101:158]) == {None}


def test_a_span_is_marked_and_leaves_the_clocks_readable() -> None:
    chart = Chart("clock", "MHz", (Curve("", range(60), [1.0] * 60, ""),), integer, spans=((40.0, 58.0, "warning"),))
    axis = draw(chart, 0.0, 60.0, 60, 6)[-1]
    text = plain(axis)
    assert "00:00:00" in text and "00:01:00" in text
    marked = "".join(t for t, style, _ in axis if style == "warning")
    assert marked.startswith("▲▲") and "00:01" in marked and plain(axis).index("▲") > 30


def _screen(run: Path, size: tuple[int, int], *keys: str) -> str:
    async def work() -> str:
        async with showing(run, size) as d:
            return await d.press("4", *keys)

    return asyncio.run(work())


def test_the_charts_follow_the_cursor(runs: MakeRun) -> None:
    run = runs(Scenario(ranks=8))
    first, third = _screen(run, (120, 30)), _screen(run, (120, 30), *["down"] * 3)
    assert "rank 5, gpu 5, H100 on node000   never throttled" in first
    assert "rank 2, gpu 2, H100 on node000   ▲ throttled by thermal (software) in 50% of the samples" in third
    for title in ("utilization", "memory GiB", "power W", "temperature °C", "SM clock MHz", "host CPU"):
        assert f" {title}  " in third
    assert "▲▲▲" in third and "▲▲▲" not in first


def test_a_cpu_job_has_charts_of_process_and_host(runs: MakeRun) -> None:
    text = _screen(runs(Scenario(ranks=2, gpus=False)), (120, 34))
    for title in ("process CPU", "process memory GiB", "disk MB/s", "host CPU", "host memory GiB", "host network MB/s"):
        assert f" {title}  " in text
    assert "throttled" not in text


def test_with_many_ranks_the_charts_shrink_first(runs: MakeRun) -> None:
    run = runs(Scenario(ranks=64))
    large, small = _screen(run, (120, 30)), _screen(run, (80, 24))
    assert "rank 5, gpu 5" in large and large.count("node0") > 6 and large.count("└") == 3
    assert "└" not in small and "rows 1–" in small


def test_a_gpu_that_no_rank_uses_has_its_history(tmp_path: Path) -> None:
    from tests.tui.synthetic import fill

    w = Writer(tmp_path)
    fill(w, Scenario(ranks=2))
    for t in range(10):
        w.add([GpuRow(t_s=262.0 + t, node=0, gpu=6, name="H100", utilization_pct=30.0, throttle="power cap")])
        w.add([HostRow(t_s=262.5 + t, node=0, host="node000", cpu_pct=10.0)])
    assert w.close(), w.last_error
    text = _screen(tmp_path, (120, 34), "end")
    assert "gpu 6, H100 on node000   ▲ throttled by power cap in 100% of the samples" in text
    assert "process CPU" not in text
