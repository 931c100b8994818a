"""What a cgroup says, of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from distdiag import cgroups


@pytest.mark.parametrize(
    ("folder", "name", "text", "n"),
    [
        (".", "cpuset.cpus.effective", "0-1,4\n", 3),
        ("job", "cpuset.cpus.effective", "7\n", 1),
        ("cpuset/job", "cpuset.effective_cpus", "0-15\n", 16),
        (".", "cpuset.cpus.effective", "\n", None),
        (".", "cpuset.cpus", "0\n", None),
    ],
)
def test_the_cpus_of_a_cgroup(folder: str, name: str, text: str, n: int | None, tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    (root / folder).mkdir(parents=True)
    (root / folder / name).write_text(text)
    own.write_text("4:cpuset,cpu:/job\n0::/job\n")
    assert cgroups.cpus(root, own) == n
