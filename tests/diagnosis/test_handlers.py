"""A rank that makes a collective call in a handler of a signal."""

from __future__ import annotations

import pytest

from distdiag.diagnosis.culprit.handlers import handler
from distdiag.diagnosis.model.snapshot import Site, Snapshot
from tests.diagnosis.waits import call, key, only, rank, snapshot, summary

FILE = "/job/train.py"
SOURCE = """import signal

def on_alarm(number, frame):
    barrier()

def train():
    loss.backward()
    opt.step()

signal.signal(signal.SIGALRM, on_alarm)
train()
"""
STEP, BACKWARD = Site(FILE, 8, "train"), Site(FILE, 7, "train")
SAVE = Site(FILE, 4, "on_alarm", STEP)
MODULE = Site(FILE, 11, "<module>")
STACK = (Site(FILE, 4, "on_alarm"), STEP, MODULE)


def stuck(theirs: tuple[Site, ...] = (BACKWARD, MODULE)) -> Snapshot:
    known = {key(BACKWARD): 8}
    return snapshot(
        rank(0, call("barrier", 9, SAVE), sites={**known, key(SAVE): 1}, user_stack=STACK),
        rank(1, call("all_reduce", 9, theirs[0]), sites=known, user_stack=theirs),
    )


def test_a_call_in_a_handler_of_a_signal_is_named_as_such() -> None:
    f = only(stuck(), source={FILE: SOURCE}.get)
    assert summary(f) == ("deadlock", "missing_rank", (0,), (1,))
    assert "rank 0 made its call in `on_alarm`, a handler of a signal (set at train.py:10); " in f.message
    assert "the signal arrived at train.py:8 in train" in f.message and "let `on_alarm` only set a flag" in f.advice
    assert "a condition" not in f.message + f.advice


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (SOURCE, True),
        (SOURCE.replace("signal.signal(signal.SIGALRM, on_alarm)", "w.hook(on_alarm)"), False),
        (SOURCE.replace("opt.step()", "on_alarm(0, None)"), False),
    ],
    ids=["handler", "hook", "called"],
)
def test_a_function_is_a_handler_if_it_is_set_and_not_called(text: str, found: bool) -> None:
    assert (handler(STACK, {FILE: text}.get) is not None) is found


def test_handlers_on_both_sides_blame_nobody_by_it() -> None:
    assert "handler" not in only(stuck(STACK), source={FILE: SOURCE}.get).message
