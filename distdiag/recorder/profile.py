"""Takes a profile of this rank on request: torch's profiler for a few steps, started and stopped between two steps.

The pulse finds the request (`page/profile_files.py`) and imports this module; before that, nothing is imported and nothing
runs. The training thread starts and stops the profiler, because it records the thread that starts it. Meanwhile, and until
the trace is saved, a thread of ours samples the line that the training thread is in. No failure reaches the job.

Python stacks are not recorded by the profiler (`with_stack`): its tracer makes every Python call several times slower.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

from distdiag import files, procfs
from distdiag.page import profile_files
from distdiag.page.profile_files import DONE, FAILED, MAX_LINES, RECORDING, SAVING, WAITING, Answer, Request
from distdiag.recorder.frames import absolute, frames_of, line_of, user_frame
from distdiag.recorder.module_marks import ModuleMarks
from distdiag.recorder.state import Recorder, guarded, now_ns
from distdiag.unpatched import Lock, get_ident, now_s, start_new_thread, wall_ns

SAMPLE_S = 0.01  # 20 to 40 µs a sample
MEMORY_SAMPLES = 10  # samples of the line per sample of the memory
END_S = 30.0  # how long the end of the script waits for a trace that is being saved
SPARE_BYTES = 256 << 20  # free space required on the file system: a profile must not fill the disk
_LOG_LEVEL = "KINETO_LOG_LEVEL"


class Session(Protocol):
    """What is needed here of a `session.Session`, which uses this file."""

    recorder: Recorder
    run_dir: Path
    pages: Path
    accounting: Any
    profile: Any


@guarded
def take(session: Session) -> None:
    """Accept the request in this rank's file; the profile begins at the requested step."""
    rank = session.recorder.header.rank
    request = profile_files.take_request(profile_files.request_path(session.pages, rank), now_ns())
    profile = Profile(session, request)
    reason = _refusal(session)
    if reason:
        profile.answer(FAILED, reason)
        return
    session.profile = profile
    profile.answer(WAITING)
    session.accounting.watch_steps(profile.step_ended)


def _refusal(session: Session) -> str:
    """Return why no profile can be taken now; "" if one can."""
    torch = sys.modules.get("torch")
    if session.accounting is None or torch is None:
        return "torch is not imported yet, or this torch has no torch.distributed"
    if session.profile is not None and not session.profile.given_up():
        return "another profile is being taken"
    if not torch.profiler.kineto_available():
        return "this build of torch has no Kineto"
    if _profiler_of_job(torch):
        return "the job uses its own profiler right now"
    return ""


def _profiler_of_job(torch: Any) -> bool:
    """True if a `torch.profiler` of the job is warming up: it will be enabled soon, and Kineto has one configuration.

    One that is recording is found when ours starts: only its own thread knows about it.
    """
    cls, warmup = torch.profiler.profile, torch.profiler.ProfilerAction.WARMUP
    objects = gc.get_objects()
    # some hundred: checking each of 200,000 objects takes five times as long
    types = {id(t): t for t in map(type, objects)}
    ours = {i for i, t in types.items() if issubclass(t, cls)}
    for o in objects if ours else ():
        if id(type(o)) in ours and getattr(o, "current_action", None) == warmup:
            prepared = getattr(o, "profiler", None)
            if prepared is not None and prepared.kineto_results is None:
                return True
    return False


class Profile:
    """One profile of this rank, from the request to the saved trace."""

    def __init__(self, session: Session, request: Request) -> None:
        self.session, self.request, self.recorder = session, request, session.recorder
        self.over = False
        self._profiler: Any = None
        self._found = Answer(number=request.number, state=WAITING)
        self._stopped = Lock()  # held until the recording ends
        self._saved = Lock()  # held while the thread runs
        self._lines: Counter[tuple[str, int, str]] = Counter()
        self._originals: dict[str, Any] = {}
        self._marks: ModuleMarks | None = None

    def given_up(self) -> bool:
        """True if it is over, or has not begun by its deadline and never will."""
        if not self.over and self._profiler is None and not self._saved.locked():
            self.over = now_ns() > self.request.deadline_ns
        return self.over

    def answer(self, word: str, detail: str = "") -> None:
        """Write the state of the profile; a file system error costs only that."""
        self.over = word in (DONE, FAILED)
        found = self._found
        found.state, found.detail, found.step = word, detail, int(self.recorder.header.step)
        try:
            profile_files.write(profile_files.answer_path(self.session.pages, self.recorder.header.rank), found)
        except OSError:
            self.recorder.header.dropped += 1

    # -- in the training thread -------------------------------------------------------------------------

    def step_ended(self, step: int) -> None:
        """Start, continue or stop at the end of a step."""
        try:
            if get_ident() != self.recorder.main_thread or self.over:
                return
            request, last = self.request, self.request.first_step + self.request.steps - 1
            late = now_ns() > request.deadline_ns
            if self._profiler is not None:
                self._found.boundaries.append([step, wall_ns()])
                if step >= last or late:
                    self._stop("")
            elif step >= last:
                self._fail(f"it was at step {step} when the request came, past step {last}")
            elif late:
                self._fail(f"it did not reach step {request.first_step} in time")
            elif step >= request.first_step - 1:
                self._start(step)
        except Exception as e:
            self._fail(f"{type(e).__name__}: {e}")

    def _start(self, step: int) -> None:
        import torch
        from torch.autograd import profiler

        began = now_s()
        if torch.autograd._profiler_enabled():
            return self._fail("the job uses its own profiler right now")
        device = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else None
        made = profiler.profile(use_kineto=True, use_device=device)
        quiet = _LOG_LEVEL not in os.environ  # Kineto prints a line on stderr at each start and stop
        if quiet:
            os.environ[_LOG_LEVEL] = "99"
        try:
            made.__enter__()
        finally:
            if quiet:
                os.environ.pop(_LOG_LEVEL, None)
        self._profiler = made
        self._give_way(profiler)
        self._marks = ModuleMarks()
        self._marks.start()
        self._stopped.acquire()
        self._saved.acquire()
        try:
            start_new_thread(self._run, ())
        except BaseException:
            self._stopped.release()
            self._saved.release()
            self._leave()
            raise
        self._found.start_ms = (now_s() - began) * 1e3
        self._found.boundaries.append([step, wall_ns()])
        self.answer(RECORDING)

    def _give_way(self, profiler: Any) -> None:
        """Stop ours before the job starts its own profiler: the second one would raise."""

        def first(name: str) -> Any:
            original = getattr(profiler, name)

            def starts(*args: Any, **kwargs: Any) -> Any:
                if get_ident() == self.recorder.main_thread:
                    self._stop("the job started its own profiler")
                return original(*args, **kwargs)

            self._originals[name] = original
            return starts

        for name in ("_prepare_profiler", "_enable_profiler"):
            if hasattr(profiler, name):
                setattr(profiler, name, first(name))

    def _leave(self) -> Any:
        """Stop the profiler and undo all changes; return the profiler."""
        self.session.accounting.watch_steps(None)
        from torch.autograd import profiler

        for name, original in self._originals.items():
            setattr(profiler, name, original)
        self._originals = {}
        if self._marks is not None:
            self._marks.stop()
            self._marks = None
        made, self._profiler = self._profiler, None
        if made is not None:
            made.__exit__(None, None, None)
        return made

    def _stop(self, failed: str) -> None:
        """End the recording; the thread saves what was recorded, unless it `failed`."""
        began = now_s()
        try:
            made = self._leave()
            self._result = None if failed or made is None else made.kineto_results
        except Exception as e:
            self._result, failed = None, f"{type(e).__name__}: {e}"
        self._found.stop_ms = (now_s() - began) * 1e3
        self._failed = failed
        if self._stopped.locked():
            self._stopped.release()

    def _fail(self, reason: str) -> None:
        if self._profiler is not None:
            return self._stop(reason)
        try:
            self.session.accounting.watch_steps(None)
        finally:
            self.answer(FAILED, reason)

    @guarded
    def end(self) -> None:
        """End the profile with the script: stop recording, and wait until a trace that is being saved is complete."""
        if self._profiler is not None and get_ident() == self.recorder.main_thread:
            self._stop(f"the script ended in step {self.recorder.header.step + 1}")
        elif not self.over and not self._saved.locked():
            self._fail(f"the script ended after step {self.recorder.header.step}")
        if self._saved.acquire(timeout=END_S):
            self._saved.release()

    # -- in a separate thread --------------------------------------------------------------------------

    _result: Any = None
    _failed = ""

    def _run(self) -> None:
        try:
            while not self._stopped.acquire(timeout=SAMPLE_S):
                self._sample()
            self._save()
        except Exception as e:
            self._failed = self._failed or f"{type(e).__name__}: {e}"
        finally:
            self._result = None
            try:
                self.answer(FAILED if self._failed else DONE, self._failed)
            finally:
                self._saved.release()

    def _sample(self) -> None:
        found = self._found
        frames = frames_of(self.recorder.main_thread)  # kept while they are read
        frame = user_frame(frames[0]) if frames else None
        if found.samples % MEMORY_SAMPLES == 0:
            resident = int(procfs.read("/proc/self/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")
            found.rss_peak_bytes = max(found.rss_peak_bytes or 0, resident)
        found.samples += 1
        if frame is not None and len(self._lines) < 10_000:
            code = frame.f_code
            self._lines[absolute(code.co_filename), line_of(frame), code.co_name] += 1

    def _save(self) -> None:
        """Write the trace into the run directory.

        Kineto's `save` reports no error, so the file is checked. It holds the GIL nearly all the time: 99 ms for three steps of a
        ResNet-18 (2.5 MB) on two overloaded cores.
        """
        if self._failed or self._result is None:
            return
        found, rank = self._found, self.recorder.header.rank
        found.lines = [[*place, n] for place, n in self._lines.most_common(MAX_LINES)]
        torch = sys.modules["torch"]
        if torch.cuda.is_initialized():
            found.device_peak_bytes = torch.cuda.max_memory_allocated(self.recorder.device)
        self.answer(SAVING)
        run_dir = self.session.run_dir.absolute()
        path = profile_files.trace_path(run_dir, self.request.number, rank)
        with files.entered(run_dir, str(path.parent.relative_to(run_dir)), make=True, own=True):
            pass
        disk = os.statvfs(path.parent)
        if disk.f_bavail * disk.f_frsize < SPARE_BYTES:
            self._failed = f"less than {SPARE_BYTES >> 20} MiB are free on the disk of {path.parent}"
            return
        began = now_s()
        with files.replacing(run_dir, str(path.relative_to(run_dir))) as part:
            self._result.save(str(part))
            if not _complete(part):
                raise OSError(f"the trace could not be written completely to {path.parent}")
        found.save_ms = (now_s() - began) * 1e3


def _complete(path: Path) -> bool:
    with path.open("rb") as f:
        f.seek(max(0, os.fstat(f.fileno()).st_size - 64))
        return f.read().rstrip().endswith(b"}")
