"""Frames of a process seen from outside, and which of them are the user's."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

import msgspec

from distdiag.diagnosis.model.snapshot import Site
from distdiag.terms.activity import by_frame
from distdiag.terms.frames import PACKAGE, USER, in_recorder, in_torch, owner, users

_CONSOLE_SCRIPT = re.compile(r"(?:^|/)bin/[\w.-]+$")  # torchrun itself: no rank's code
# in which a thread waits for one that it started
_FOR_A_THREAD = re.compile(
    r"^(?:threading\.(?:join|_wait_for_tstate_lock)|_base\.(?:result|wait|as_completed)|thread\.shutdown|pool\.\w+)$"
)


class Frame(msgspec.Struct, frozen=True):
    """One Python frame."""

    function: str
    file: str
    line: int
    values: dict[str, str] = {}  # text of its local variables, where they were read
    objects: dict[str, int] = {}  # addresses of the same

    @property
    def name(self) -> str:
        """The code object's own name: `evaluate` of `Trainer.evaluate`."""
        return self.function.rpartition(".")[2]

    @property
    def site(self) -> Site:
        return Site(self.file, self.line, self.name)

    @property
    def in_torch(self) -> str:
        """Path of the file below torch's package; empty if it is not torch's."""
        return in_torch(self.file)

    @property
    def raw_name(self) -> str:
        """Module and function, by which `terms.activity` knows what a frame does: `queue.get`."""
        return f"{PurePosixPath(self.file).stem}.{self.name}"

    @property
    def recorders(self) -> bool:
        """True for distdiag's own frames in a recorded rank: around a call that it records, around the script, in its threads."""
        return in_recorder(self.file)

    @property
    def packages(self) -> bool:
        """True if the file is an installed package's."""
        return owner(self.file) == PACKAGE or (owner(self.file) == USER and not users(self.file))

    @property
    def users(self) -> bool:
        """True if the file is neither Python's nor torch's nor an installed package's."""
        return users(self.file) and not _CONSOLE_SCRIPT.search(self.file)


class Stack(msgspec.Struct, frozen=True):
    """One thread.

    Attributes:
        frames: Python frames, innermost first.
        native: Names of the native functions inside the innermost Python frame, innermost first; empty where not read.
        idle: True if it did not run; None where not known.
    """

    frames: tuple[Frame, ...]
    native: tuple[str, ...] = ()
    idle: bool | None = None
    name: str = ""

    @property
    def main(self) -> bool:
        """True for the main thread; by its outermost frame where threads have no names."""
        if self.name:
            return self.name == "MainThread"
        return bool(self.frames) and self.frames[-1].name not in ("_bootstrap", "_bootstrap_inner")

    @property
    def waits(self) -> bool:
        """True if it waits for another thread or for I/O, by its innermost frames, as those of an idle pool do."""
        return any(by_frame(f.raw_name) in ("lock", "queue", "socket") for f in self.frames[:1])

    def users(self) -> Iterator[Frame]:
        """Yield the user's frames, innermost first; those of packages only if there are no others.

        Of a forked process only its own: the frames outside of its bootstrap are its parent's.
        """
        own = list(itertools.takewhile(lambda f: f.raw_name != "process._bootstrap", self.frames))
        found = [f for f in own if f.users]
        yield from found or [f for f in own if f.packages]


class Process(msgspec.Struct, frozen=True):
    """The threads of one process at one moment."""

    pid: int
    threads: tuple[Stack, ...]
    rank: int | None = None
    local: int | None = None  # the rank on its node, by its command
    parent: int = 0  # pid of the process that started it; 0 where not known

    @property
    def judged(self) -> Stack:
        """The thread that the verdict is about: the main one, unless it only waits while another is in a collective.

        One that waits for a thread it started is judged by that thread, if no other runs code of the user's. So is a worker of Ray
        Train: its main thread has no line of the user's.
        """
        main = next((t for t in reversed(self.threads) if t.main), self.threads[0])  # faulthandler lists it last
        if not main.frames or _in_collective(main):
            return main
        rest = [t for t in self.threads if t is not main]
        inner = list(itertools.takewhile(lambda f: not f.users, main.frames))
        hidden = len(inner) == len(main.frames)
        others = [t for t in rest if _in_collective(t)] if hidden or main.waits else []
        if hidden or any(_FOR_A_THREAD.match(f.raw_name) for f in inner):
            others = others or [t for t in rest if any(f.users for f in t.frames) and not t.waits]
        return others[0] if len(others) == 1 else main

    @property
    def data_worker(self) -> bool:
        """True for a worker process of a DataLoader."""
        return any(f.in_torch == "utils/data/_utils/worker.py" for t in self.threads if t.main for f in t.frames)


def _in_collective(stack: Stack) -> bool:
    return any(f.in_torch == "distributed/distributed_c10d.py" for f in stack.frames)
