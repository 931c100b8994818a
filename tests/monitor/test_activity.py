"""Classifies what a rank does, from its innermost frame and the text of its line."""

from __future__ import annotations

import pytest

from distdiag.monitor.ranks.state import activity_of
from distdiag.page.layout import Phase


@pytest.mark.parametrize(
    ("frame", "line", "phase", "idle", "word"),
    [
        ("job.serve", 'command = json.loads(self.store.get(f"cmd/{i}"))', Phase.OTHER, True, "socket"),
        ("env.step", "obs = self.proc.stdout.readline().split()", Phase.OTHER, True, "socket"),
        ("env.step", "obs = self.proc.stdout.readline().split()", Phase.OTHER, False, "user_code"),
        ("job.serve", "kv_store.wait(['ready'])", Phase.OTHER, True, "socket"),
        ("job.serve", "command = inbox.get()", Phase.OTHER, True, "queue"),
        ("job.serve", "command = table.get(key)", Phase.OTHER, False, "user_code"),  # it computes
        ("queue.get", "item = q.get()", Phase.OTHER, True, "queue"),
        ("threading.wait", "done.wait()", Phase.OTHER, True, "lock"),
        ("job.main", "answer = input('go on? ')", Phase.OTHER, True, "stdin"),
        ("job.main", "torch.save(state, path)", Phase.OTHER, False, "checkpoint"),
        ("job.main", "for x in loader:", Phase.DATA, False, "data"),
    ],
)
def test_activity_is_classified_by_frame_and_line(frame: str, line: str, phase: Phase, idle: bool, word: str) -> None:
    assert activity_of(frame, line, phase, idle) == word
