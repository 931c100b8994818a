"""The pulse: a thread that records four times a second what the main thread cannot record while it waits.

It writes the heartbeat, the groups' counters and the main thread's user frames into the page, and holds the GIL for 0.1 ms per
beat. If another thread holds the GIL it misses beats, which readers notice. While the main thread changes phases, frames are read
twice a second and counters once; `counted_ns` is the time of the last count.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
from types import CodeType
from typing import Any

from distdiag.page.layout import BACKEND_FRAME, STACK, STILL_NS, Blocked, Header, word
from distdiag.recorder import pending_exception, state
from distdiag.recorder.frames import in_backend, raw_name, user_stack
from distdiag.recorder.gpu_index import nvml_index
from distdiag.recorder.state import guarded, now_ns

PERIOD_S = 0.25
WATCH_BEATS = 8  # between two checks that the monitor runs
END_S = 2.0  # how long the end of the script waits for a running beat
_SINCE, _BLOCKED_SINCE = word("phase_since_ns"), word("blocked_since_ns")
_BEATS, _HEARTBEAT, _COUNTED = word("beats"), word("heartbeat_ns"), word("counted_ns")
_BLOCKED, _GOES_ON = word("blocked"), (int(Blocked.NO), int(Blocked.DDP))  # in DDP it is likely to compute
_VERSION, _DEPTH, _STACK = word("stack_version"), word("stack_depth"), Header.stack.offset // 8
_RAW, _STACK_NS = word("raw_innermost"), word("stack_ns")
_HANDLING, _HANDLING_SITE = word("handling"), word("handling_site")
_PHASE, _STACK_PHASE = word("phase"), word("stack_phase")


class Pulse:
    """The pulse thread. It is started below `threading`: a script that joins all of `threading.enumerate()` would wait for it."""

    def __init__(self, recorder: state.Recorder) -> None:
        self.recorder, self.header = recorder, recorder.header
        self.collectives: Any = None
        self.accounting: Any = None
        self.checks: Any = None
        self.watch: Any = None  # the `Watch` of the monitor
        self.request = ""  # path of the file in which a reader asks for a profile
        self.asked: Any = None  # called when that file exists
        # held until the end: waiting for a lock is one call, waiting for an Event many
        self._going_on = threading.Lock()
        self._going_on.acquire()
        self._running = threading.Lock()  # held while the thread runs
        self._gpu: int | None = None  # NVML's index, once looked up
        # by id of the code, which is kept: True if a backend is in it
        self._raw: dict[tuple[int, bool], tuple[int, CodeType]] = {}

    def start(self) -> None:
        """Start the thread."""
        self._running.acquire()
        try:
            _thread.start_new_thread(self._run, ())
        except BaseException:
            self._running.release()
            raise

    def _run(self) -> None:
        try:
            while not self._going_on.acquire(timeout=PERIOD_S):
                self.beat()
        finally:
            self._running.release()

    def stop(self) -> None:
        """End the thread, and wait at most `END_S` until its last beat is over.

        A thread that returns from C++ while Python shuts down is ended inside C++, which aborts the process.
        """
        if self._going_on.locked():
            self._going_on.release()
        if self._running.acquire(timeout=END_S):
            self._running.release()

    def forked(self) -> None:
        """Release, in a forked child, what the thread held: the thread itself is not in the child."""
        self._running = threading.Lock()
        if self.watch is not None:
            self.watch.close()

    @guarded
    def beat(self) -> None:
        """Write one beat; the thread does so every quarter of a second."""
        words = self.recorder.page.words
        beats, t = words[_BEATS], now_ns()
        waits = words[_BLOCKED] not in _GOES_ON or t - max(words[_SINCE], words[_BLOCKED_SINCE]) > STILL_NS
        if waits or beats % 2 == 0:
            self._sample(waits)
        if (waits or beats % 4 == 0) and self.collectives is not None:
            t = now_ns()  # read after the frames, so that the operation that they wait in is counted
            self.collectives.refresh_groups()
            words[_COUNTED] = t
        if self.accounting is not None:
            self.accounting.poll()
        if beats % 4 == 0:
            self._device()
            self._signals()
        if beats % WATCH_BEATS == WATCH_BEATS - 1 and self.watch is not None:
            self.watch.check()
        if self.asked is not None and os.access(self.request, os.F_OK):
            self.asked()
        words[_BEATS] = beats + 1
        words[_HEARTBEAT] = now_ns()

    def _sample(self, still: bool) -> None:
        frame = sys._current_frames().get(self.recorder.main_thread or 0)
        if frame is None:
            return
        code, waits = frame.f_code, in_backend(frame)
        known = self._raw.get((id(code), waits))
        if known is None:
            if len(self._raw) >= 4096:
                self._raw.clear()
            name = BACKEND_FRAME + raw_name(frame) if waits else raw_name(frame)
            known = self._raw[id(code), waits] = self.recorder.page.text(name), code
        words, at = self.recorder.page.words, _STACK
        phase = words[_PHASE]
        sites = [self.recorder.site(f) for f in user_stack(frame, STACK)]
        exception = pending_exception.handled(self.recorder) if still else pending_exception.NONE
        words[_VERSION] += 1  # odd: being written
        for s in sites:
            words[at] = s
            at += 1
        words[_DEPTH] = len(sites)
        words[_STACK_PHASE] = phase
        words[_RAW] = known[0]
        words[_HANDLING], words[_HANDLING_SITE] = exception
        words[_STACK_NS] = now_ns()
        words[_VERSION] += 1

    def _signals(self) -> None:
        """Stop using a signal once the script has its own handler for it."""
        number = self.header.trace_signal
        if number and any(signal.getsignal(n) is not signal.SIG_DFL for n in (number - 1, number)):
            self.header.trace_signal = 0

    def _device(self) -> None:
        torch, device = sys.modules.get("torch"), self.recorder.device
        if torch is None or device is None or not torch.cuda.is_initialized():
            return
        properties = torch.cuda.get_device_properties(device)
        if self._gpu is None:
            self.header.gpu = self._gpu = _physical_index(properties)
        self.header.device_bytes = torch.cuda.memory_reserved(device)
        self.header.device_peak_bytes = torch.cuda.max_memory_reserved(device)
        self.header.device_total_bytes = properties.total_memory


def _physical_index(properties: Any) -> int:
    try:
        import pynvml
    except ImportError:
        return -1
    return nvml_index(properties, pynvml)
