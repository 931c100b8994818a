"""The request for a profile and the rank's answer: read only if they are this user's, and every number is in range."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from distdiag.page import directories
from distdiag.page.profile_files import (
    DONE,
    MAX_WAIT_NS,
    Answer,
    Request,
    answer_path,
    read_answer,
    request_path,
    take_request,
    write,
)

NOW = 10**12
GOOD = {"number": 1, "first_step": 5, "steps": 3, "deadline_ns": NOW + 1}


def test_a_request_is_taken_once(tmp_path: Path) -> None:
    path = request_path(tmp_path, 3)
    write(path, Request(**GOOD))
    assert path.stat().st_mode & 0o777 == 0o600
    assert take_request(path, NOW) == Request(**GOOD)
    assert not path.exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0}, {"steps": 51}, {"steps": True}, {"steps": 1.0}, {"steps": None}, {"number": 0},
        {"number": 10_000}, {"number": "../../x"}, {"first_step": 0}, {"first_step": 1 << 63},
        {"deadline_ns": NOW + MAX_WAIT_NS + 1},
    ],
)  # fmt: skip
def test_a_request_out_of_range_is_refused_and_removed(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = request_path(tmp_path, 0)
    path.write_text(json.dumps({**GOOD, **wrong}))
    path.chmod(0o600)
    with pytest.raises(ValueError):
        take_request(path, NOW)
    assert not path.exists()


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "[" * 100_000, "x" * 300_000, '{"number": ' + "9" * 5000 + "}"])
def test_a_damaged_request_is_refused(tmp_path: Path, text: str) -> None:
    path = request_path(tmp_path, 0)
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ValueError):
        take_request(path, NOW)
    assert not path.exists()


def test_a_request_that_others_can_write_a_link_or_a_pipe_is_refused(tmp_path: Path) -> None:
    path = request_path(tmp_path, 0)
    path.write_text(json.dumps(GOOD))
    path.chmod(0o666)
    with pytest.raises(ValueError):
        take_request(path, NOW)
    (tmp_path / "real").write_text(json.dumps(GOOD))
    path.symlink_to(tmp_path / "real")
    with pytest.raises(OSError):
        take_request(path, NOW)
    assert (tmp_path / "real").exists()
    os.mkfifo(path, 0o600)
    with pytest.raises(ValueError):
        take_request(path, NOW)


def test_an_answer_round_trips_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    path = answer_path(tmp_path, 0)
    given = Answer(2, DONE, "", 9, [[8, NOW], [9, NOW + 5]], [["/a.py", 3, "f", 7]], 9, 1.5, 2.0, 3.0, rss_peak_bytes=5)
    write(path, given)
    assert read_answer(path) == given
    good = json.loads(path.read_text())
    for wrong in ({"state": "x"}, {"boundaries": 3}, {"boundaries": [[1]]}, {"lines": [[1, -1, 2, 3]]}, {"step": -1}):
        path.write_text(json.dumps({**good, **wrong}))
        assert read_answer(path) is None
    path.unlink()
    assert read_answer(path) is None


def test_a_page_directory_with_a_request_and_an_answer_can_be_removed(tmp_path: Path) -> None:
    directory = tmp_path / "pages"
    directories.make(directory)
    write(request_path(directory, 0), Request(**GOOD))
    write(answer_path(directory, 0), Answer(1, DONE))
    answer_path(directory, 0).with_suffix(".profiledpart").write_text("")  # left by a killed rank
    assert directories.remove(directory)
