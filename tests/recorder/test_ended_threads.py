"""The exception that ends a thread of the script is recorded, with the user's line."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from distdiag.page.layout import SampleKind
from distdiag.page.reader import PageReader
from distdiag.page.writer import PageWriter
from distdiag.recorder.session import Session
from distdiag.recorder.state import Recorder


def dump() -> None:
    raise OSError(28, "No space left on device")


def write() -> None:
    dump()


def leave() -> None:
    raise SystemExit(3)


def test_the_exception_that_ends_a_thread_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    page = PageWriter(tmp_path / "page")
    page.publish()
    session = Session(Recorder(page), tmp_path, tmp_path)
    monkeypatch.setattr(threading, "excepthook", session.thread_excepthook)
    for work in (write, leave, print):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [args.exc_type for args in shown] == [OSError, SystemExit], (
        "the hook that was there is called, as without distdiag"
    )
    reader = PageReader(page.path)
    sample = reader.read().samples[0]
    site = reader.site(sample.site)[0]
    assert (page.header.n_samples, sample.kind, site[2]) == (1, SampleKind.THREAD_ENDED, "dump")
    assert reader.text(sample.name) == "OSError: [Errno 28] No space left on device"
    reader.close()
