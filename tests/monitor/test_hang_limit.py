"""DISTDIAG_END_HANGS_S ends nobody unless it is a time."""

from __future__ import annotations

import pytest

from distdiag.monitor.hang_limit import VARIABLE, HangLimit


@pytest.mark.parametrize(
    ("value", "limit_s"),
    [("3", 3.0), ("0.5", 0.5), ("nan", None), ("-1", None), ("inf", None), ("soon", None), ("", None)],
)
def test_only_a_time_is_a_limit(monkeypatch: pytest.MonkeyPatch, value: str, limit_s: float | None) -> None:
    monkeypatch.setenv(VARIABLE, value)
    assert HangLimit().limit_s == limit_s
