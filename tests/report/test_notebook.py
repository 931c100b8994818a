"""What `open_run()` shows in a notebook: the verdict, pictures, and frames with units."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from IPython.core.error import UsageError
from matplotlib.figure import Figure

import distdiag
from distdiag import notebook
from distdiag.diagnosis.model.findings import Where
from distdiag.errors import DistdiagError
from distdiag.report.plot import excess
from distdiag.report.steps import read_steps
from distdiag.terms.units import unit_of
from tests.report.runs import DEADLOCK, STRAGGLER, make_run
from tests.report.test_html import HOSTILE, Page


def test_the_verdict_in_a_cell_says_what_diagnose_says(tmp_path: Path) -> None:
    with distdiag.open_run(make_run(tmp_path / "R", findings=(DEADLOCK, STRAGGLER))) as run:
        words = Page(run._repr_html_()).words
    for text in ("1 error", DEADLOCK.message, DEADLOCK.advice, "train.py:88 in evaluate (rank 1)", "cleared: 1"):
        assert text in words
    assert "made no progress" in words  # the job is over
    assert STRAGGLER.message not in words


def test_text_of_the_job_is_no_markup_in_a_cell(tmp_path: Path) -> None:
    hostile = msgspec.structs.replace(
        DEADLOCK, message=HOSTILE, advice=HOSTILE, cost=HOSTILE, where=(Where(1, HOSTILE, 3, HOSTILE, "user_code"),)
    )
    with distdiag.open_run(make_run(tmp_path / "R", findings=(hostile,))) as run:
        html = run._repr_html_()
    page = Page(html)
    assert set(page.tags) == {"div", "p", "b", "br", "span"}
    assert {name for name, _ in page.attributes} == {"class", "style"}
    assert "<script>alert(1)</script>" in page.words and "\\x1b" in page.words and "\x1b" not in html


def test_pictures_are_figures_and_need_steps(tmp_path: Path) -> None:
    with distdiag.open_run(make_run(tmp_path / "R", slow_rank=2)) as run:
        for draw in (run.plot.steps, run.plot.heat, run.plot.ranks):
            figure = draw()
            assert isinstance(figure, Figure) and figure is not draw()
            assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    with distdiag.open_run(make_run(tmp_path / "E", steps=0)) as run:
        for draw in (run.plot.steps, run.plot.heat, run.plot.ranks):
            with pytest.raises(DistdiagError, match="too few steps"):
                draw()


def test_the_heat_map_lights_the_row_of_the_slow_rank(tmp_path: Path) -> None:
    with distdiag.open_run(make_run(tmp_path / "R", slow_rank=2, slow_ms=20.0, steps=1000)) as run:
        ranks, first, per, cells = excess(read_steps(run))
    assert ranks == [0, 1, 2, 3] and first == 1 and per == 3 and cells.shape == (4, 334)
    assert np.allclose(cells[2], 20.0, atol=0.5) and np.all(np.abs(cells[[0, 1, 3]]) < 0.5)


def test_frames_have_units(tmp_path: Path) -> None:
    with distdiag.open_run(make_run(tmp_path / "R")) as run:
        units = run.steps_frame().attrs["units"]
        assert run.table("host").attrs["units"]["disk_read_bytes_per_s"] == "bytes/s"
    assert units["step_ms"] == "ms" and units["t_end_s"] == "s" and units["rss_bytes"] == "bytes"
    assert "rank" not in units and "loss" not in units
    assert unit_of("duration_us") == "µs" and unit_of("samples_per_s") == "1/s" and unit_of("class") is None


@pytest.mark.parametrize(
    ("line", "problem"), [("-n x", "'x'"), ("-n 0", "0"), ("--ranks 2", "ranks"), ("'", "quotation")]
)
def test_wrong_options_of_the_cell_command_are_one_line(line: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as raised:
        notebook.cell_magic(line, "pass")
    assert "\n" not in str(raised.value)


def test_the_extension_imports_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registered = {}

    class Shell:
        def register_magic_function(self, function: object, kind: str, name: str) -> None:
            registered[name] = (function, kind)

    monkeypatch.setitem(sys.modules, "torch", None)
    distdiag.load_ipython_extension(Shell())
    assert registered == {"distdiag": (notebook.cell_magic, "cell")}


@pytest.mark.job
def test_a_cell_without_a_process_group_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="joined no process group"):
        notebook.cell_magic("-n 1", "print('alone')")
