"""The busiest Python thread of a rank besides its main one: it takes the GIL and a core from the training.

The kernel tells how long each thread was on a CPU; its line is read while it is.
"""

from __future__ import annotations

import time

from distdiag.recorder import state
from distdiag.recorder.frames import frames_of, other_threads, user_stack
from distdiag.recorder.state import now_ns

LEAST = 0.1  # of the time since the poll before; a thread that computes less is not recorded
# unless a busy host leaves the process little: then this much of the time, and this share of what the process computes
LEAST_SCARCE, LEAST_OF_PROCESS = 0.03, 0.3
MOST = 64  # threads; a rank with more is not judged, as each costs a read
NAMES = 32  # of threads that a page keeps: a job may start a new one for each step


class BusyThread:
    """Looks once a second which thread computed most."""

    def __init__(self, recorder: state.Recorder) -> None:
        self.recorder = recorder
        self._t, self._used_ns = now_ns(), dict[int, int]()
        self._process_ns = time.process_time_ns()
        self._names: set[str] = set()

    def poll(self) -> None:
        """Write the thread that computed most since the last poll into the page; called by the pulse."""
        # its own attributes: a subclass may have properties, and this thread must not run the job's code
        threads = other_threads(self.recorder.main_thread).items()
        of = {native: (ident, t) for ident, t in threads if (native := vars(t).get("_native_id"))}
        t, before = now_ns(), self._used_ns
        self._used_ns = {i: used for i in of if (used := _used_ns(i)) is not None} if len(of) <= MOST else {}
        ran_ns = {i: used - before[i] for i, used in self._used_ns.items() if i in before}
        elapsed_ns, self._t = t - self._t, t
        process_ns, before_ns = time.process_time_ns(), self._process_ns
        self._process_ns = process_ns
        busiest = max(ran_ns, key=lambda i: ran_ns[i], default=0)
        share = ran_ns[busiest] / max(elapsed_ns, 1) if busiest else 0.0
        header = self.recorder.header
        of_process = ran_ns.get(busiest, 0) / max(process_ns - before_ns, 1)
        busy = share >= LEAST or (share >= LEAST_SCARCE and of_process >= LEAST_OF_PROCESS)
        frames = frames_of(of[busiest][0]) if busiest and busy else []
        if not frames:  # a greenlet has none, and computes in the main thread
            header.thread_permille = 0
            return
        name = str(vars(of[busiest][1]).get("_name"))
        users = user_stack(frames[0], 1)
        if len(self._names) < NAMES:
            self._names.add(name)
        header.thread = self.recorder.page.text(name if name in self._names else "Thread")
        header.thread_site = self.recorder.site(users[0]) if users else 0
        header.thread_permille = min(1000, round(1000 * share))


def _used_ns(thread: int) -> int | None:
    """Return how long a thread of this process was on a CPU; None if it has ended or the kernel does not tell."""
    try:
        with open(f"/proc/self/task/{thread}/schedstat", "rb", buffering=0) as f:
            return int(f.read(64).split()[0])
    except (OSError, ValueError, IndexError):
        return None
