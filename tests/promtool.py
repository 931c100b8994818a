"""Prometheus' programs, for tests; a test is skipped where they are missing."""

from __future__ import annotations

import shutil

import pytest


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on this machine (Debian: apt install prometheus)")
    return found


def promtool() -> str:
    return program("promtool")
