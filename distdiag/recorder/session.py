"""Makes a process a recorded rank, and ends the recording.

The order is always the same: first the page (so that a crash in the next line is seen), then the monitor, then the hooks once torch
is imported. Nothing here may delay the user's job, print into it, or end it.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import importlib
import os
import platform
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from distdiag import files, procfs
from distdiag.page import directories, profile_files
from distdiag.page.layout import STACK, LifeWord, Phase, SampleKind, page_path
from distdiag.page.writer import PageWriter
from distdiag.recorder import frames, relayed_exceptions, run_claim, state
from distdiag.recorder.after_import import after_import
from distdiag.recorder.descriptors import KeptFile
from distdiag.recorder.frames import USER, absolute, kind_of, kind_of_file, user_stack
from distdiag.recorder.other_nodes import OtherNodes
from distdiag.recorder.pulse import Pulse
from distdiag.recorder.start_monitor import NotStarted, Watch, start_monitor
from distdiag.recorder.state import Recorder, guarded, now_ns, switched_off
from distdiag.recorder.torch_names import LACKING
from distdiag.terms import secrets
from distdiag.terms.launchers import LAUNCHERS, TORCHRUN, number
from distdiag.terms.untrusted import cut, visible
from distdiag.torch_modules import own_imports
from distdiag.unpatched import Lock, wall_ns


class Session:
    def __init__(self, recorder: Recorder, run_dir: Path, pages: Path) -> None:
        self.recorder = recorder
        self.run_dir = run_dir
        self.pages = pages
        self.page_locks: list[KeptFile] = []  # locks that protect the page directories from removal
        self.handler_files: list[KeptFile] = []  # files for signal handlers of this process, not of its forked children
        self.pulse = Pulse(recorder)
        self.accounting: Any = None
        self.server: Any = None
        self.profile: Any = None  # the last profile that a reader requested
        self.other_nodes: OtherNodes | None = None  # unless all ranks are on this node
        self._previous_excepthook = sys.excepthook
        self._previous_threadhook = threading.excepthook

    # -- hooks ---------------------------------------------------------------------------------------

    @guarded
    @own_imports()
    def install(self) -> None:
        if self.accounting is not None:
            return
        import torch

        from distdiag.recorder.fast import accounts

        recorder = self.recorder
        accounts.time_collections(recorder.page)
        facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
        missing = [] if torch.distributed.is_available() else ["torch.distributed"]
        if not missing:
            from torch._C import _distributed_c10d as c10d

            from distdiag.recorder.hooks import functional, process_groups, wrap_collectives, wrapping

            collectives = wrap_collectives.install(recorder)
            recorder.part("hooks of flight recorders", _install, "flight_recorders")
            missing += process_groups.install(collectives)
            recorder.part("keys of stores", _install, "store_keys", recorder)
            after_import(functional.MODULE, lambda: functional.install(collectives))
            self.accounting = recorder.part("steps", _install, "install", recorder, collectives)
            self.pulse.collectives, self.pulse.accounting = collectives, self.accounting
            # last: all of ours is imported; no frame is compiled before
            after_import("torch._dynamo", guarded(wrapping.skip_all_of_ours))
            if accounts.MISFIT:
                recorder.failed(RuntimeError(accounts.MISFIT))
            facts["hooks"] = "compiled" if accounts.COMPILED else "Python"
            if not hasattr(c10d, "_dump_fr_trace_json"):
                missing.append("flight recorder (JSON)")
            if not hasattr(c10d, "_WorkerServer"):
                missing.append("worker server")
            if torch.distributed.is_initialized():
                process_groups.initialised(collectives)
        self.recorder.note(**facts)
        self.recorder.lacks([*missing, *LACKING])
        self._witness()

    @guarded
    def _witness(self) -> None:
        from distdiag.recorder import witness

        path = self._socket()
        self.server = witness.start(path)
        if self.server is not None:
            self.recorder.header.witness = self.recorder.page.text(str(path))

    @guarded
    def take_profile(self) -> None:
        from distdiag.recorder import profile

        profile.take(self)

    def _socket(self) -> Path:
        return self.pages / f"r{self.recorder.header.rank}.sock"

    @guarded
    def stacks_on_signals(self) -> None:
        """Let faulthandler write stacks without the GIL, on a free signal and on fatal signals, into files next to the page.

        It writes in C, in the signal handler. If the job uses faulthandler itself, its settings remain.
        """
        rank, h = self.recorder.header.rank, self.recorder.header
        number = signal.SIGRTMIN + 13
        if signal.getsignal(number) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
            trace = self._create_file(f"r{rank}.trace").fd  # the workers of a DataLoader write their stacks to it, too
            faulthandler.register(number, file=trace, all_threads=True, chain=False)
            h.trace_signal = number
            # the main thread's native frames, by the compiled module
            if frames._native is not None and signal.getsignal(number - 1) is signal.SIG_DFL:
                frames._native.install(number - 1, self._create_handler_file(f"r{rank}.native"))
        if not faulthandler.is_enabled():
            faulthandler.enable(file=self._create_handler_file(f"r{rank}.fatal"), all_threads=True)
            _off_for_script()

    def _create_file(self, name: str) -> KeptFile:
        """Create a file next to the page; it stays open for the life of the process."""
        return KeptFile(files.open_own(self.pages, name, os.O_RDWR | os.O_TRUNC))

    def _create_handler_file(self, name: str) -> int:
        """Create a file that forked children do not write to, and return its descriptor."""
        self.handler_files.append(self._create_file(name))
        return self.handler_files[-1].fd

    # -- the end --------------------------------------------------------------------------------------

    def excepthook(self, kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        self.record_exception(error, tb)
        self._previous_excepthook(kind, error, tb)

    def thread_excepthook(self, args: threading.ExceptHookArgs) -> None:
        self._thread_ended(args.exc_value, args.exc_traceback)
        self._previous_threadhook(args)

    @guarded
    def _thread_ended(self, error: BaseException | None, tb: TracebackType | None) -> None:
        """Record the exception that ends a thread of the script, with the user's innermost line: the main thread goes on."""
        users = [(f.f_code, line) for f, line in traceback.walk_tb(tb) if kind_of(f.f_code) == USER]
        if error is None or isinstance(error, SystemExit) or not users:
            return
        text = "".join(traceback.format_exception_only(type(error), error)).strip()[:200]
        (code, line), page = users[-1], self.recorder.page
        site = page.site(absolute(code.co_filename), line, code.co_name)
        page.write_sample(SampleKind.THREAD_ENDED, self.recorder.header.step, 0.0, name=text, site=site)

    @guarded
    def record_exception(self, error: BaseException, tb: TracebackType | None) -> None:
        """Record the exception that ends the script: its text and the user's frames, innermost first."""
        self.recorder.header.trace_signal = 0
        recorder, h = self.recorder, self.recorder.header
        last, relayed = relayed_exceptions.original(relayed_exceptions.text_of(error), h.rank)
        last = f"KeyboardInterrupt, then {last}" if _interrupted(error) else last
        inner = [
            recorder.page.site(file, line, name) for file, line, name in reversed(relayed) if kind_of_file(file) == USER
        ]
        h.exception = recorder.page.text(last[:2000])
        h.exception_ns = now_ns()
        self._record_frames(tb, inner)
        h.life = LifeWord.RAISED
        h.exit_code = 1

    def _record_frames(self, tb: TracebackType | None, inner: list[int]) -> None:
        """Record the user's frames that an exception went through, innermost first, after those of `inner`."""
        recorder, h = self.recorder, self.recorder.header
        passed = [(f, f.f_code, line) for f, line in traceback.walk_tb(tb)]
        wanted = set(map(id, user_stack(passed[-1][0] if passed else None, 64)))
        sites = inner + [
            recorder.page.site(absolute(code.co_filename), line, code.co_name)
            for f, code, line in reversed(passed)
            if id(f) in wanted
        ]
        for i, s in enumerate(sites[:STACK]):
            h.exception_stack[i] = s
        h.exception_depth = min(len(sites), STACK)

    @guarded
    def exiting(self, code: int | None = None, tb: TracebackType | None = None) -> None:
        """Record that the interpreter shuts down: a later abort is not how the script ended. `tb`: of a SystemExit."""
        h = self.recorder.header
        if code is not None:
            h.exit_code = code
        if tb is not None:
            self._record_frames(tb, [])
        if h.life != LifeWord.RAISED:
            h.life = LifeWord.EXITING
            h.phase = Phase.DONE
            h.phase_since_ns = now_ns()
        h.trace_signal = 0  # its handler ends with the interpreter
        if self.profile is not None:
            self.profile.end()
        self.pulse.stop()
        if self.other_nodes is not None:
            self.other_nodes.stop()

    def close(self) -> None:
        if self.recorder.header.life != LifeWord.RAISED and (error := _unhandled()) is not None:
            self.record_exception(error, error.__traceback__)
        self.exiting()
        if self.server is not None:
            server, self.server = self.server, None
            try:
                from distdiag.recorder import witness

                witness.stop(server, self._socket())
            except (Exception, KeyboardInterrupt) as e:  # a second Ctrl-C, while the process ends by the first
                self.recorder.failed(e)

    def detach(self) -> None:
        """Stop recording a script that continues. Its state is unknown from now on, while its process group exists."""
        h, group_left = self.recorder.header, self.recorder.header.life == LifeWord.LEFT_GROUP
        self.close()
        if self.accounting is not None:
            self.accounting.ledger.main_thread = 0  # from now on the hooks ignore every thread
        dist = sys.modules.get("torch.distributed")
        if not group_left and dist is not None and dist.is_available() and dist.is_initialized():
            h.life = LifeWord.DETACHED


current: Session | None = None
of_test = False  # a rank of a pytest: most end within a second, for less CPU time than a monitor takes to start; the pulse starts it
_lock = Lock()
DIRECTORY_HINT = "choose a writable directory with --run-dir"


def start(run_dir: str | None, name: str | None, rank: int, world_size: int, local_rank: int) -> Session | None:
    """Make this process a recorded rank: page, monitor, pulse; hooks once torch is imported.

    Returns None with DISTDIAG=0 and, after a line on stderr, if no page can be created (disk full, read-only directory). The job
    continues.
    """
    global current
    if switched_off():
        return None
    with _lock:
        if current is not None:
            return current
        try:
            current = _start(run_dir, name, rank, world_size, local_rank)
        except Exception as e:
            if state.RAISE:
                raise
            if local_rank == 0:
                of_directory = isinstance(e, OSError) and not isinstance(e, NotStarted)
                report_not_recorded(e, DIRECTORY_HINT if of_directory else "")
            return None
    if "torch" not in sys.modules or hasattr(sys.modules["torch"], "distributed"):
        after_import("torch", current.install)
    return current


def _install(module: str, *args: Any) -> Any:
    return importlib.import_module(f"distdiag.recorder.hooks.{module}").install(*args)


def report_not_recorded(error: Exception, hint: str = DIRECTORY_HINT) -> None:
    """Print on stderr why nothing is recorded and what to do, one line each; nothing if the job has closed its stderr."""
    reason: object = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        reason = f"{error.filename}: {error.strerror}" if isinstance(error.filename, str) else error.strerror
    goes_on = "the job itself continues"
    lines = (f"distdiag: this job is not recorded: {reason}", f"hint: {hint}; {goes_on}" if hint else goes_on)
    with contextlib.suppress(Exception):  # closed, on a full disk, or the script's own object
        if sys.stderr is not None:
            sys.stderr.write("".join(f"{cut(visible(line))}\n" for line in lines))
            sys.stderr.flush()


def _start(run_dir: str | None, name: str | None, rank: int, world_size: int, local_rank: int) -> Session:
    label = name or run_claim.script_name()
    claim = run_claim.claim_rank(run_dir, label, rank, world_size)
    directory, pages = claim.run_dir, claim.pages
    directories.make(pages, directory)
    held = [directories.hold(pages)]
    try:
        writer = PageWriter(page_path(pages, rank))
    except OSError:  # the directory filled up after it was chosen
        pages = claim.overflow
        directories.make(pages, directory)
        held.append(directories.hold(pages))
        writer = PageWriter(page_path(pages, rank))
    h = writer.header
    h.pid = os.getpid()
    h.rank, h.local_rank, h.world_size = rank, local_rank, world_size
    h.local_world_size = run_claim.local_world_size(rank, world_size)
    h.node = claim.node
    h.attempt = number("TORCHELASTIC_RESTART_COUNT") or 0
    h.started_wall_ns, h.started_mono_ns = wall_ns(), now_ns()
    h.phase_since_ns = h.started_mono_ns
    h.heartbeat_ns = h.started_mono_ns
    h.process_start_ticks = procfs.start_ticks("self") or 0
    h.host = writer.text(socket.gethostname())
    h.script = writer.text(label)
    recorder = Recorder(writer)
    state.current = recorder
    session = Session(recorder, directory, pages)
    session.page_locks = [KeptFile(fd) for fd in held if fd is not None]
    session.recorder.note(python=platform.python_version(), command=_command())
    writer.publish()
    os.register_at_fork(after_in_child=lambda: _in_child(session))
    sys.excepthook = session.excepthook
    threading.excepthook = session.thread_excepthook
    atexit.register(session.close)
    run_claim.link_pages(directory, claim.pages)
    session.stacks_on_signals()
    of_node = directory, claim.pages, claim.node, claim.overflow
    if not of_test:
        start_monitor(*of_node)
    session.pulse.watch = Watch(*of_node)
    session.pulse.request = str(profile_files.request_path(pages, rank))
    session.pulse.asked = session.take_profile
    if 0 < h.local_world_size < world_size:
        session.other_nodes = OtherNodes(directory, claim.pages, claim.node, h.local_world_size, world_size)
        session.pulse.other_nodes = session.other_nodes
    session.pulse.start()
    return session


def _off_for_script() -> None:
    """Let `faulthandler.is_enabled()` be False until the script enables it: many enable only one that is off."""
    enable, is_enabled = faulthandler.enable, faulthandler.is_enabled

    @functools.wraps(enable)
    def first(*args: Any, **kwargs: Any) -> None:
        faulthandler.enable, faulthandler.is_enabled = enable, is_enabled
        enable(*args, **kwargs)

    faulthandler.enable, faulthandler.is_enabled = first, functools.wraps(is_enabled)(lambda: False)


def _unhandled() -> BaseException | None:
    """Return what ended the script, although its own hook took the place of ours, or a second Ctrl-C came first."""
    error = getattr(sys, "last_value", None)
    first = getattr(error, "__traceback__", None)
    if first is None:
        return None
    frame = first.tb_frame
    script = getattr(sys.modules.get("__main__"), "__dict__", None)
    # of the script, or of `python -m`; that of an error which IPython or pytest has shown is theirs
    return error if frame.f_globals is script or frame.f_code.co_filename == "<frozen runpy>" else None


def _interrupted(error: BaseException) -> bool:
    """True if this was raised while Ctrl-C unwound the script: what fails then is the cleaning up."""
    earlier: BaseException | None = error
    for _ in range(32):  # a chain may be a circle
        earlier = earlier.__cause__ or earlier.__context__ if earlier is not None else None
        if isinstance(earlier, KeyboardInterrupt):
            return True
    return False


def _command() -> str:
    arguments = sys.argv
    with contextlib.suppress(OSError):
        for process in ("self", str(os.getppid())):
            text = Path("/proc", process, "cmdline").read_bytes().decode("utf-8", "replace")
            arguments = text.rstrip("\0").split("\0")
            if "from multiprocessing." not in text:  # that of `mp.spawn` names no script: its parent's does
                break
    return " ".join(arguments if secrets.kept() else secrets.mask(arguments))[:2000]


@guarded
def _in_child(session: Session) -> None:
    """Detach a forked child (mostly a DataLoader worker) from its parent's page."""
    global current
    session.recorder.page.make_private()
    current = None
    state.current = None
    session.server = None  # its threads are not in the child
    for lock in session.page_locks:
        lock.close()
    session.page_locks = []
    for file in session.handler_files:
        file.mute()
    session.pulse.forked()
    session.other_nodes = None
    atexit.unregister(session.close)


def from_environment() -> tuple[int, int, int]:
    """Return (rank, world_size, local_rank) as set by torchrun, srun, mpirun or the initialised process group; else 0, 1, 0."""
    torch = sys.modules.get("torch")
    dist = getattr(torch, "distributed", None)
    if dist is not None and dist.is_available() and dist.is_initialized():
        rank, world, local = dist.get_rank(), dist.get_world_size(), number(TORCHRUN.local)
        return rank, world, rank if local is None else local
    for launcher in LAUNCHERS:
        rank, world, local = (number(variable) for variable in launcher[:3])
        if rank is not None and world is not None:
            return rank, world, rank if local is None else local
    return 0, 1, 0
