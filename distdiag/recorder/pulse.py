"""The pulse: a thread that records four times a second what the main thread cannot record while it waits.

It writes the heartbeat, the groups' counters and the main thread's user frames into the page, and holds the GIL for 0.1 ms per
beat. If another thread holds the GIL it misses beats, which readers notice. While the main thread changes phases, frames are read
twice a second and counters once; `counted_ns` is the time of the last count.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import CodeType, FrameType
from typing import Any

from distdiag.page.layout import BACKEND_FRAME, STACK, STILL_NS, Blocked, Header, word
from distdiag.recorder import state
from distdiag.recorder.busy_thread import BusyThread
from distdiag.recorder.frames import (
    USER,
    absolute,
    frames_of,
    in_backend,
    kept,
    kind_of,
    other_thread_works,
    raw_name,
    user_stack,
)
from distdiag.recorder.state import guarded, now_ns
from distdiag.unpatched import Lock, start_new_thread

PERIOD_S = 0.25
WATCH_BEATS = 8  # between two checks that the monitor runs
FIRST_WATCH = 3  # the beat of the first one, a second after the start
END_S = 10.0  # how long the end of the script waits for a running beat; on busy cores one takes seconds
_SINCE, _BLOCKED_SINCE = word("phase_since_ns"), word("blocked_since_ns")
_BEATS, _HEARTBEAT, _COUNTED = word("beats"), word("heartbeat_ns"), word("counted_ns")
_BLOCKED, _GOES_ON = word("blocked"), (int(Blocked.NO), int(Blocked.DDP))  # in DDP it is likely to compute
_VERSION, _DEPTH, _STACK = word("stack_version"), word("stack_depth"), Header.stack.offset // 8
_RAW, _STACK_NS = word("raw_innermost"), word("stack_ns")
_HANDLING, _HANDLING_SITE = word("handling"), word("handling_site")
_PHASE, _STACK_PHASE, _GC_OFF = word("phase"), word("stack_phase"), word("gc_off")

_NONE = (0, 0)
_SHOWN = 400  # characters
_FRAMES = 200  # of the traceback: a recursion may have thousands


class Pulse:
    """The pulse thread. It is started below `threading`: a script that joins all of `threading.enumerate()` would wait for it."""

    def __init__(self, recorder: state.Recorder) -> None:
        self.recorder, self.header = recorder, recorder.header
        self.collectives: Any = None
        self.accounting: Any = None
        self.watch: Any = None  # the `Watch` of the monitor
        self.other_nodes: Any = None  # the `OtherNodes` of this rank, until it has begun
        self.request = ""  # path of the file in which a reader asks for a profile
        self.asked: Any = None  # called when that file exists
        # held until the end: waiting for a lock is one call, waiting for an Event many
        self._going_on = Lock()
        self._going_on.acquire()
        self._running = Lock()  # held while the thread runs
        self._busy = BusyThread(recorder)
        self._gpu: int | None = None  # NVML's index, once looked up
        # by id of the code, which is kept: True if a backend is in it
        self._raw: dict[tuple[int, bool], tuple[int, CodeType]] = {}

    def start(self) -> None:
        self._running.acquire()
        try:
            start_new_thread(self._run, ())
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

        A thread that returns from C++ while Python shuts down is ended inside C++, which aborts the process. One that is ended in a
        beat may leave a garbage collection unfinished, after which Python starts no other: what the script holds is never freed, and
        a file that it left open loses its last buffer.
        """
        first = self._going_on.locked()
        if first:
            self._going_on.release()
        if self._running.acquire(timeout=END_S if first else 0):
            self._running.release()

    def forked(self) -> None:
        """Release, in a forked child, what the thread held: the thread itself is not in the child."""
        self._running = Lock()
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
            words[_GC_OFF] = not gc.isenabled()
            self._busy.poll()
            self.header.tools = _tools()
            self._device()
            self._signals()
        if beats % WATCH_BEATS == FIRST_WATCH and self.watch is not None:
            self.watch.check()
        if self.other_nodes is not None and self.other_nodes.begin():
            self.other_nodes = None
        if self.asked is not None and os.access(self.request, os.F_OK):
            self.asked()
        words[_BEATS] = beats + 1
        words[_HEARTBEAT] = now_ns()

    def _sample(self, still: bool) -> None:
        frames = frames_of(self.recorder.main_thread)
        users = user_stack(frames[0], STACK) if frames else []
        if not users and other_thread_works(self.recorder.main_thread):
            return
        # no frame: the thread that trained has ended, as in a worker of Ray Train
        raw = self._raw_of(frames[0]) if frames else 0
        words, at = self.recorder.page.words, _STACK
        phase = words[_PHASE]
        sites = [self.recorder.site(f) for f in users]
        exception = _handled(self.recorder) if still else _NONE
        words[_VERSION] += 1  # odd: being written
        for s in sites:
            words[at] = s
            at += 1
        words[_DEPTH] = len(sites)
        words[_STACK_PHASE] = phase
        words[_RAW] = raw
        words[_HANDLING], words[_HANDLING_SITE] = exception
        words[_STACK_NS] = now_ns()
        words[_VERSION] += 1

    def _raw_of(self, frame: FrameType) -> int:
        code, waits = frame.f_code, in_backend(frame)
        known = self._raw.get((id(code), waits))
        if known is None:
            name = BACKEND_FRAME + raw_name(frame) if waits else raw_name(frame)
            known = kept(self._raw, (id(code), waits), (self.recorder.page.text(name), code))
        return known[0]

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
            try:
                import pynvml

                self._gpu = nvml_index(properties, pynvml)
            except ImportError:
                self._gpu = -1
            self.header.gpu = self._gpu
        self.header.device_bytes = torch.cuda.memory_reserved(device)
        self.header.device_peak_bytes = torch.cuda.max_memory_reserved(device)
        self.header.device_total_bytes = properties.total_memory


def _tools() -> int:
    """Return which tools that slow a job down are on: see `Header.tools`."""
    profiler = getattr(sys.modules.get("torch.autograd.profiler"), "_is_profiler_enabled", False)
    # torch may still be importing
    asked = (("torch", "is_anomaly_enabled"), ("tracemalloc", "is_tracing"))
    anomaly, traced = (getattr(sys.modules.get(module), name, bool)() for module, name in asked)
    return bool(profiler) | bool(anomaly) << 1 | bool(traced) << 2


def _handled(recorder: state.Recorder) -> tuple[int, int]:
    """Return (text, site) of the exception that the main thread handles, as heap offsets; `_NONE` if user code has no part in it.

    A collective in `finally:` or `except:` hides the exception that led there: its traceback is printed only after the collective,
    which the other ranks never enter.
    """
    found: Any = sys._current_exceptions().get(recorder.main_thread or 0)
    error = found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12
    if not isinstance(error, BaseException):
        return _NONE
    raised, tb = None, error.__traceback__
    for _ in range(_FRAMES):
        if tb is None:
            break
        if kind_of(tb.tb_frame.f_code) == USER:
            raised = tb
        tb = tb.tb_next
    if raised is None:
        return _NONE
    code = raised.tb_frame.f_code
    return recorder.page.text(_text_of(error)), recorder.page.site(
        absolute(code.co_filename), raised.tb_lineno, code.co_name
    )


def _text_of(error: BaseException) -> str:
    """Return `KeyError: 'device'`. No method of the exception is called: this thread must not run the job's code."""
    name, args = type(error).__name__, vars(BaseException)["args"].__get__(error)
    if len(args) != 1 or type(args[0]) not in (str, int, float):
        return name
    return f"{name}: {args[0]!r}"[:_SHOWN] if isinstance(error, KeyError) else f"{name}: {args[0]}"[:_SHOWN]


def nvml_index(properties: Any, nvml: Any) -> int:
    """Return NVML's index of a GPU (of the whole card for a MIG slice); -1 if NVML does not know it.

    CUDA and NVML number GPUs differently: CUDA_VISIBLE_DEVICES hides and reorders them (by number, UUID or MIG UUID), and CUDA's
    default order is not that of the PCI bus. The UUID is the same in both.
    """
    uuid = str(getattr(properties, "uuid", "") or "")
    uuid = uuid.removeprefix("GPU-").removeprefix("MIG-")
    if not uuid:
        return -1
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return -1
    try:
        try:
            return nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        except nvml.NVMLError:
            part = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
            return nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part))
    except nvml.NVMLError:
        return -1
    finally:
        nvml.nvmlShutdown()
