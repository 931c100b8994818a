"""The keys of a store that the main thread waits for, and has set, as the hooks write them into the page."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._C import _distributed_c10d as c10d

from distdiag.page.layout import KEY_BYTES
from distdiag.page.reader import PageReader
from distdiag.page.writer import PageWriter
from distdiag.recorder.hooks import store_keys
from distdiag.recorder.state import Recorder


@pytest.fixture
def page(tmp_path: Path) -> Iterator[PageReader]:
    before = dict(vars(c10d.Store))
    writer = PageWriter(tmp_path / "page")
    writer.publish()
    store_keys.install(Recorder(writer))
    reader = PageReader(writer.path)
    yield reader
    reader.close()
    for name in (*store_keys._WAIT, *store_keys._SET, "check"):
        if name in before:
            setattr(c10d.Store, name, before[name])


def test_the_key_is_known_while_the_main_thread_waits_for_it(page: PageReader) -> None:
    store, seen = c10d.PrefixStore("cache", c10d.HashStore()), []

    def set_later() -> None:
        end = time.monotonic() + 20
        while not page.header().store_key and time.monotonic() < end:
            time.sleep(0.01)
        seen.append(page.header().store_key)
        store.set("ready/3f", "path")

    thread = threading.Thread(target=set_later)
    thread.start()
    store.wait(["ready/3f"])
    thread.join()
    assert seen == [b"ready/3f"]
    h = page.header()
    assert not h.store_key and not h.store_set, "another thread has set it"
    assert store.get("ready/3f") == b"path"


def test_the_key_that_was_set_last_and_its_line(page: PageReader) -> None:
    store = c10d.HashStore()
    store.set("a", "1")
    store.set("steps/" + 100 * "x" + "/9", "1")
    h = page.header()
    assert len(h.store_set) <= KEY_BYTES and h.store_set.startswith(b"steps/xx") and h.store_set.endswith(b"x/9")
    assert page.site(h.store_set_site)[0][2] == "test_the_key_that_was_set_last_and_its_line"


def test_a_failed_wait_waits_no_longer(page: PageReader) -> None:
    from datetime import timedelta

    store = c10d.HashStore()
    with pytest.raises(Exception, match=r"(?i)time"):
        store.wait(["never"], timedelta(milliseconds=20))
    assert not page.header().store_key


def test_a_key_that_is_asked_for_again_and_again_is_waited_for(page: PageReader) -> None:
    store = c10d.HashStore()
    for _ in range(store_keys._ASKED - 1):
        assert not store.check(["done/4"])
    assert not page.header().store_key, "a look is no wait"
    store.check(["other"])
    for _ in range(store_keys._ASKED):
        store.check(["done/4"])
    h = page.header()
    assert h.store_key == b"done/4" and h.store_asked_ns and not h.n_store
    store.set("done/4", "1")
    assert not page.header().store_key, "it does something else"
    for _ in range(store_keys._ASKED):
        store.check(["done/5"])
    store.set("done/5", "1")
    assert store.check(["done/5"])
    h = page.header()
    assert not h.store_key and h.n_store == 3
