"""A source file that a page names is read only if it is a regular file, and only its start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distdiag import source_files


def test_the_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(b"import torch\r\n    x = 1  # \xe9\n\nlast")
    lines = [source_files.line(str(path), n) for n in range(-1, 7)]
    assert lines == ["", "", "import torch", "x = 1  # �", "", "last", "", ""]
    assert source_files.text(str(tmp_path / "missing.py")) is None


@pytest.mark.timeout(20)
def test_a_pipe_does_not_hold_up_the_monitor_and_a_device_does_not_fill_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "train.py")
    for path in (str(tmp_path / "train.py"), "/dev/zero", "/dev/stdin", "a\0b", "<stdin>", str(tmp_path)):
        assert source_files.text(path) is None and source_files.line(path, 1) == ""
    monkeypatch.setattr(source_files, "MOST_BYTES", 5)
    (tmp_path / "large.py").write_text("a = 1234\n")
    assert source_files.text(str(tmp_path / "large.py")) == "a = 1"
