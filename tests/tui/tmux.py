"""A real terminal for the app: its own tmux server, keys typed into it, its screen read back."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest


class Terminal:
    """One tmux session; `with terminal(command) as t`."""

    def __init__(self, socket: str, process_env: Mapping[str, str]) -> None:
        self._socket = socket
        self._env = dict(process_env)

    def tmux(self, *arguments: str) -> str:
        """Run one tmux command on this server."""
        done = subprocess.run(
            ["tmux", "-L", self._socket, *arguments], capture_output=True, text=True, env=self._env, timeout=30
        )
        return done.stdout

    def screen(self) -> str:
        """Return the screen as text; with what tmux moved off it to say that the program has ended."""
        text = self.tmux("capture-pane", "-p", "-t", "main")
        return self.tmux("capture-pane", "-p", "-S", "-5", "-t", "main") if "Pane is dead" in text else text

    def type(self, *keys: str) -> None:
        """Press keys: `j`, `Enter`, `Escape`, `PPage`, …"""
        for key in keys:
            self.tmux("send-keys", "-t", "main", key)

    def hover(self, x: int, y: int) -> None:
        """Send what a terminal sends when the mouse moves to a cell, counted from 0."""
        self.tmux("send-keys", "-t", "main", "-l", f"\x1b[<35;{x + 1};{y + 1}M")

    def click(self, x: int, y: int) -> None:
        """Send what a terminal sends for a click on a cell, counted from 0."""
        self.tmux("send-keys", "-t", "main", "-l", f"\x1b[<0;{x + 1};{y + 1}M\x1b[<0;{x + 1};{y + 1}m")

    def until(self, what: str | Callable[[str], object], deadline_s: float = 60.0) -> str:
        """Return the first screen that contains a text, or fulfils a condition.

        Raises:
            AssertionError: it never did; the message has the last screen.
        """
        end = time.monotonic() + deadline_s
        while True:
            text = self.screen()
            if what in text if isinstance(what, str) else what(text):
                return text
            if time.monotonic() > end:
                raise AssertionError(f"{what} never came; the screen:\n{text}")
            time.sleep(0.05)

    def ended(self, deadline_s: float = 60.0) -> int:
        """Return the exit status of the command once it has ended; negative: the signal that ended it.

        Raises:
            AssertionError: it did not end in time.
        """
        end = time.monotonic() + deadline_s
        while True:
            dead, status, signal = (
                self.tmux("display-message", "-p", "-t", "main", "#{pane_dead},#{pane_dead_status},#{pane_dead_signal}")
                .strip()
                .split(",")
            )
            if dead == "1" and (status or signal):
                return int(status) if status else -int(signal)
            if dead == "1":
                # tmux 3.3 may miss the end of a child; the end of another makes it check both
                self.tmux("run-shell", "true")
            if time.monotonic() > end:
                raise AssertionError(f"still running; the screen:\n{self.screen()}")
            time.sleep(0.05)

    def pid(self) -> int:
        """Return the process id of the command in the terminal."""
        return int(self.tmux("display-message", "-p", "-t", "main", "#{pane_pid}").strip())


@contextlib.contextmanager
def terminal(
    command: Sequence[str], size: tuple[int, int] = (80, 24), env: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """Run a command in a terminal of this size; skips the test without tmux."""
    if shutil.which("tmux") is None:
        pytest.skip("no tmux on this machine")
    socket = f"distdiag-{uuid.uuid4().hex[:12]}"
    variables = {**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **(env or {})}
    variables.pop("TMUX", None)
    t = Terminal(socket, variables)
    width, height = size
    # `exec`: the pane's process is the command itself; remain-on-exit keeps its last output
    t.tmux(
        "-f",
        "/dev/null",
        "new-session",
        "-d",
        "-s",
        "main",
        "-x",
        str(width),
        "-y",
        str(height),
        f"exec {shlex.join(command)}",
        ";",
        "set",
        "remain-on-exit",
        "on",
    )
    try:
        yield t
    finally:
        t.tmux("kill-server")
        end = time.monotonic() + 10
        while t.tmux("list-sessions") and time.monotonic() < end:
            time.sleep(0.05)
