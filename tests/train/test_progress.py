"""The speed that the training job prints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distdiag.train import progress as progress_module


def test_a_rate_counts_training_time_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """18 steps, a validation of 30 s, 2 more steps: the rate covers only the 20 steps."""
    now = 100.0
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now)
    alone: Any = SimpleNamespace(rank=0, sum=lambda t: t)
    logged: dict[str, float] = {}
    recorder: Any = SimpleNamespace(log=lambda **values: logged.update(values))
    progress = progress_module.Progress(SimpleNamespace(quiet=False), alone, recorder, torch.device("cpu"))  # type: ignore[arg-type]

    def trains(steps: int) -> None:
        nonlocal now
        for _ in range(steps):
            now += 0.5
            progress.add(torch.tensor(1.0), torch.zeros(8, 10), torch.zeros(8, dtype=torch.long))

    trains(18)
    with progress.paused():
        now += 30.0
        progress.validated(0, 18, 1.0, 0.5)
    trains(2)
    progress.report(1, 20, 0.1)
    assert logged["samples_per_s"] == pytest.approx(20 * 8 / 10.0)
    assert "16 samples/s" in capsys.readouterr().out
