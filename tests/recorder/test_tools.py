"""Tools that slow a rank down are seen while they are on."""

from __future__ import annotations

import sys
import tracemalloc
from types import ModuleType

import pytest
import torch

from distdiag.recorder.pulse import _tools


def test_a_torch_that_is_still_importing_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "torch.autograd.profiler", "tracemalloc"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert _tools() == 0


def test_tools_are_seen_while_they_are_on() -> None:
    before = _tools()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert _tools() == before | 1
    with torch.autograd.set_detect_anomaly(True):
        assert _tools() == before | 2
    if not tracemalloc.is_tracing():
        tracemalloc.start()
        assert _tools() == before | 4
        tracemalloc.stop()
    assert _tools() == before
