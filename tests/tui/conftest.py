"""Synthetic runs shared by the tests of this folder, and a frozen clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from distdiag.store import liveness, reader
from tests.tui.synthetic import NOW, Scenario, make

MakeRun = Callable[..., Path]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    """`runs(scenario, monitor="live")` returns a run directory; equal ones are written once, and must not be changed."""
    base = tmp_path_factory.mktemp("runs")
    made: dict[tuple[Scenario, str], Path] = {}

    def get(sc: Scenario, monitor: str = "live") -> Path:
        if (sc, monitor) not in made:
            made[(sc, monitor)] = make(base / str(len(made)) / "reports" / sc.name, sc, monitor)
        return made[(sc, monitor)]

    return get


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeze the wall clock at `NOW`, and hide the rest of the environment from the screens."""
    for module in (reader, liveness):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: NOW))
    for name in ("NO_COLOR", "FORCE_COLOR", "TEXTUAL_THEME", "COLORFGBG", "COLUMNS", "LINES", "DISTDIAG_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Path]:
    """Change to the folder with `reports/`, so that screens show the same short path everywhere."""

    def go(run: Path) -> Path:
        monkeypatch.chdir(run.parents[1])
        return run.relative_to(run.parents[1])

    return go
