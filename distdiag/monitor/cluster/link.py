"""The thread that owns a monitor's ZeroMQ sockets: times of arrival must not depend on when the monitor polls."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from typing import Any

from distdiag.page.node_files import Own

TURN_MS = 250  # the thread checks its clock at least so often


class Link(ABC):
    """Runs `serve` in a thread until `close`; what both sides share is changed under `lock`."""

    def __init__(self, own: Own) -> None:
        import zmq

        self.own = own
        self.lock = threading.Lock()
        self.failed: str | None = None
        self.refused = self.dropped = 0  # connections that were not admitted; messages
        self._zmq, self._context = zmq, zmq.Context(io_threads=1)
        self._wake, self._ends = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), False
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Let the thread see at once what has changed."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def close(self, wait_s: float = 1.0) -> None:
        self._ends = True
        self.wake()
        self._thread.join(wait_s)

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._wake, self._zmq.POLLIN)
        try:
            self.opened(poller)
            while not self._ends:
                ready = dict(poller.poll(TURN_MS))
                if self._wake in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                self._survive(ready)
        except Exception as e:
            self._note(e)
        finally:
            self._context.destroy(linger=0)

    def _survive(self, ready: dict[Any, int]) -> None:
        try:
            self.turn(ready)
        except Exception as e:  # of one message: the others go on
            self._note(e)
            time.sleep(TURN_MS / 1e3)

    def _note(self, e: Exception) -> None:
        self.failed = f"the exchange with other nodes failed ({type(e).__name__}: {e})"

    @abstractmethod
    def opened(self, poller: Any) -> None:
        """Open the sockets and register them."""

    @abstractmethod
    def turn(self, ready: dict[Any, int]) -> None:
        """Do what is due; `ready` has the sockets with something to read."""
