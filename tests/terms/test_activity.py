"""One table of what ranks do: each word has a wording for the screen."""

from __future__ import annotations

import pytest

from distdiag.diagnosis.model.findings import Where
from distdiag.terms.activity import ACTIVITIES, by_frame, refined
from distdiag.tui.panels import sites_text


@pytest.mark.parametrize("word", ["checkpoint", "device", "waits_for_device", *(a.word for a in ACTIVITIES)])
def test_the_screen_words_every_activity(word: str) -> None:
    (shown,) = sites_text([Where(3, "/home/me/train.py", 88, "main", word)], 1)
    assert shown.startswith("rank 3: train.py:88 in main (") and "_" not in shown
    plain = {"stopped", "exited", "killed", "crashed", "finished"}
    assert word in plain or f"({word})" not in shown, "a sentence, not the recorded word"


def test_the_line_refines_what_the_frame_shows() -> None:
    assert refined("lock", "debugpy.wait_for_client()") == "debugger"
    assert refined("lock", "item = inbox.get()") == "queue"
    assert refined("lock", "pool.map(work, parts)") == "worker"
    assert refined("socket", "subprocess.run(['sync'])") == "process"
    assert refined("socket", "asyncio.run(main())") == "event_loop"
    assert refined("socket", "while (item := self.queue.get()) is not None:") == "queue"
    assert refined("socket", "page = session.get(url)") == "socket"
    assert refined("data", "asyncio.run(main())") == "data"


def test_who_polls_a_lock_file_waits_for_its_owner() -> None:
    assert by_frame("file_baton.wait") == by_frame("_api.acquire") == "lock_file"
