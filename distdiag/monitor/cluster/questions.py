"""Questions of readers to all nodes: a reader asks the monitor of node 0 on a unix socket, and it asks the others.

Only this user can enter the directory of the socket. A reader needs no pyzmq and no key.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from distdiag.monitor.cluster.messages import Ask, BadMessage, unpack
from distdiag.page import directories, node_files
from distdiag.worker_server import peer_of

MOST_QUESTION, MOST_ANSWER = 8000, 128 << 20
SPARE_S = 2.0  # added to a reader's limit at each step of the way


class _OfRank(Protocol):
    @property
    def rank(self) -> int: ...


T = TypeVar("T", bound=_OfRank)

# by node: what it answered, or why it did not; the ranks for which it may answer
Answers = dict[int, tuple[bytes, str, tuple[int, ...]]]


class Questions:
    """Takes questions, one reader at a time, in a thread."""

    def __init__(self, pages: Path, ask: Callable[[Ask], Answers]) -> None:
        self._ask = ask
        self._path = pages / node_files.LOCAL
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        with contextlib.suppress(FileNotFoundError):  # of the monitor before us
            os.unlink(self._path)
        self._socket.bind(str(self._path))
        os.chmod(self._path, 0o600)
        self._socket.listen(4)
        threading.Thread(target=self._serve, name="Questions", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                reader, _ = self._socket.accept()
            except OSError:
                return
            with reader, contextlib.suppress(OSError, ValueError, msgspec.MsgspecError, RecursionError):
                reader.settimeout(SPARE_S)
                if peer_of(reader)[1] == os.getuid():
                    question = msgspec.json.decode(reader.recv(MOST_QUESTION), type=Ask)
                    found = self._ask(question)
                    reader.settimeout(question.timeout_s + SPARE_S)
                    reader.sendall(msgspec.msgpack.encode(found))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def asked_at(run_dir: Path) -> Path | None:
    """Return where this host's monitor takes questions to other nodes; None if none of them sends its state to it."""
    pages = next(iter(directories.of_run(run_dir).get(0, ())), None)
    if pages is None or not directories.is_marked(pages) or not (pages / node_files.LOCAL).exists():
        return None
    return pages / node_files.LOCAL


def ask_all(run_dir: Path, question: Ask) -> Answers:
    """Return what the other nodes of a run answer; empty if there is nobody to ask.

    Raises:
        OSError: the monitor does not answer.
    """
    where = asked_at(run_dir)
    if where is None:
        return {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.settimeout(question.timeout_s + 3 * SPARE_S)
        s.connect(str(where))
        if peer_of(s)[1] != os.getuid():
            return {}
        s.sendall(msgspec.json.encode(question))
        data, end = bytearray(), time.monotonic() + question.timeout_s + 3 * SPARE_S
        while (part := s.recv(1 << 20)) and len(data) <= MOST_ANSWER and time.monotonic() < end:
            data += part
    try:
        return msgspec.msgpack.decode(data, type=Answers)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise OSError(f"not an answer: {e}") from None


def ask_each(run_dir: Path, question: Ask, kind: type[T], most_bytes: int) -> tuple[list[T], list[str]]:
    """Ask the other nodes; return (what their ranks have sent, by node; what is wrong with which node)."""
    found: list[T] = []
    silent = []
    try:
        answers = ask_all(run_dir, question)
    except OSError as e:
        return [], [f"the other nodes could not be asked: {e.strerror or e}"]
    for node, (data, error, ranks) in sorted(answers.items()):
        try:
            sent = [] if error else msgspec.msgpack.decode(unpack(data, most_bytes), type=list[kind])
            own = {x.rank: x for x in sent if x.rank in ranks}
            found += own.values()
            if refused := len(sent) - len(own):
                error = f"refused {refused} of its {len(sent)} answers: for ranks of other nodes, or for one rank twice"
        except (BadMessage, msgspec.MsgspecError, ValueError, RecursionError):
            error = "what it sent cannot be read"
        if error:
            silent.append(f"node {node}: {error}")
    return found, silent
