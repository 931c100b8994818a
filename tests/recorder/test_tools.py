"""Tools that slow a rank down are seen while they are on."""

from __future__ import annotations

import tracemalloc

import torch

from distdiag.recorder.pulse import _tools


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
