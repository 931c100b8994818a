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


@pytest.mark.parametrize("stop", [KeyboardInterrupt, KeyError])
def test_what_fails_while_an_interrupt_unwinds_the_script_is_no_failure_of_it(
    stop: type[BaseException], tmp_path: Path
) -> None:
    session = Session.__new__(Session)
    session.recorder = Recorder(PageWriter(tmp_path / "page"))
    session.recorder.page.publish()
    try:
        try:
            raise stop
        finally:
            dump()  # as torch's writer, which writes the end of a file that is not complete
    except OSError as e:
        session.record_exception(e, e.__traceback__)
    reader = PageReader(tmp_path / "page")
    h = reader.header()
    first = "KeyboardInterrupt, then " if stop is KeyboardInterrupt else ""
    assert reader.text(h.exception) == f"{first}OSError: [Errno 28] No space left on device"
    reader.close()
