"""Lets a job control its stand-in device: keep it busy, and stop the watchdogs."""

from __future__ import annotations

from typing import Any

from stream_backend import install


def busy(tensor: Any, seconds: float) -> None:
    """Launch a kernel on the current stream that writes `tensor` after this time; the host continues."""
    install.loaded[0].busy(tensor, int(seconds * 1000))


def freeze_watchdogs(frozen: bool) -> None:
    """Stop all watchdogs of this process from noticing completions, or let them continue."""
    install.loaded[0].freeze_watchdogs(frozen)
