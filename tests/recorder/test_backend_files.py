"""Frames of a process group written in Python belong to the backend, not to the user's code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType

import pytest

from distdiag.recorder import frames

SPIN = "def spin(then):\n    return then()\n"


@pytest.fixture(autouse=True)
def no_backends() -> Iterator[None]:
    yield
    frames._backend.clear()
    frames._backend_folders = ()
    frames._kinds.clear()


def function(file: Path) -> Callable[[Callable[[], object]], object]:
    names: dict[str, Callable[[Callable[[], object]], object]] = {}
    exec(compile(SPIN, str(file), "exec"), names)
    return names["spin"]


def here() -> FrameType:
    return sys._getframe(1)


def test_the_user_frame_is_the_caller_of_the_backend(tmp_path: Path) -> None:
    spin = function(tmp_path / "device.py")
    before = spin(here)
    assert isinstance(before, FrameType)
    assert frames.user_stack(before, 4)[0] is before and not frames.in_backend(before)
    frames.backend_files(str(tmp_path / "device.py"), "")
    inner = spin(lambda: sys._getframe(1))
    assert isinstance(inner, FrameType)
    assert frames.in_backend(inner) and not frames.in_backend(inner.f_back)
    assert frames.user_stack(inner, 4)[0].f_code.co_filename == __file__


def test_a_backend_that_waits_in_the_standard_library_is_recognised(tmp_path: Path) -> None:
    frames.backend_files(str(tmp_path / "device.py"), "")
    in_stdlib = function(Path(frames._STDLIB[0]) / "threading.py")
    inner = function(tmp_path / "device.py")(partial(in_stdlib, here))
    assert isinstance(inner, FrameType) and inner.f_code.co_filename.endswith("threading.py")
    assert frames.in_backend(inner)
    called_by_user = in_stdlib(here)
    assert isinstance(called_by_user, FrameType) and not frames.in_backend(called_by_user)


def test_a_backends_package_is_backend_code_unless_it_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    frames.backend_files(str(tmp_path / "project" / "groups.py"), "project")
    assert frames.kind_of_file(str(tmp_path / "project" / "groups.py")) == frames.BACKEND
    assert frames.kind_of_file(str(tmp_path / "project" / "train.py")) == frames.USER
    frames.backend_files(str(tmp_path / "lib" / "device" / "groups.py"), "device")
    assert frames.kind_of_file(str(tmp_path / "lib" / "device" / "stream.py")) == frames.BACKEND
    frames.backend_files(frames.__file__, "distdiag.recorder")
    assert frames.kind_of_file(frames.__file__) == frames.LIBRARY


def test_another_process_knows_backend_code_by_the_paths_that_were_recorded(tmp_path: Path) -> None:
    """The monitor reads the stack of a rank that a signal killed: no backend is loaded there."""
    frames.backend_files(str(tmp_path / "device.py"), "")
    frames.backend_files(str(tmp_path / "lib" / "device" / "groups.py"), "device")
    paths = frames.backend_paths()
    frames._backend.clear()
    frames._backend_folders = ()
    assert not frames.is_users(str(tmp_path / "device.py"), paths)
    assert not frames.is_users(str(tmp_path / "lib" / "device" / "stream.py"), paths)
    assert frames.is_users(str(tmp_path / "train.py"), paths)
    assert not frames.is_users(frames._STDLIB[0] + "threading.py", ())
