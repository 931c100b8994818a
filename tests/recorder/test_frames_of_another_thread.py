"""The frames of the main thread, read by the pulse while the thread runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from distdiag.recorder import frames
from tests.jobs import REPOSITORY

# Functions of many frame sizes, garbage collections that run Python code in the reading thread, and the shortest time between
# switches of threads: on Python 3.11 it crashes within seconds if a collection may run while a frame object is made.
SCRIPT = """
import gc, random, sys, threading, time
from types import FrameType
from distdiag.recorder.frames import frames_of

def collected(phase, info):
    for _ in range(200):
        pass

def read():
    global samples
    kept = []
    while not done:
        kept.append(frames_of(main))
        frame = kept[-1][0]
        while frame is not None:
            assert type(frame) is FrameType
            frame = frame.f_back
        samples += 1
        if len(kept) > 2000:
            kept.clear()

class Node:
    pass

called = []
for i in range(40):
    body = "".join(f"    v{j} = given\\n" for j in range(i % 13))
    exec(f"def f{i}(depth, given):\\n    node = Node()\\n{body}    return random.choice(called)(depth - 1, node) if depth else 0")
    called.append(globals()[f"f{i}"])

sys.setswitchinterval(1e-6)
gc.set_threshold(20)
gc.callbacks.append(collected)
done, samples, main = False, 0, threading.get_ident()
threading.excepthook = lambda args: sys.exit(str(args.exc_value))
thread = threading.Thread(target=read)
thread.start()
end = time.monotonic() + 4.0
while time.monotonic() < end and thread.is_alive():
    for depth in range(30):
        random.choice(called)(depth, None)
failed, done = not thread.is_alive(), True
thread.join()
assert not failed and gc.isenabled() and samples > 1000, samples
"""


@pytest.mark.parametrize("pure", ["0", "1"])
def test_reading_the_frames_of_a_running_thread_never_crashes_it(pure: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "DISTDIAG_PURE": pure}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_thread_that_is_gone_has_no_frames() -> None:
    assert frames.frames_of(1) == [] and frames.frames_of(None) == []
