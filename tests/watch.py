"""What a command changes on a file system, and whom it signals."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Records every signal that it gets, and ends when its input does.
BYSTANDER = """
import signal, sys
for number in set(signal.Signals) | set(range(signal.SIGRTMIN, signal.SIGRTMAX + 1)):
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, lambda n, _: print(n, flush=True))
print("ready", flush=True)
sys.stdin.read()
"""
Tree = dict[str, tuple[object, ...]]


def tree(root: Path) -> Tree:
    """Return everything below a directory: kind, size, time and content."""
    out: Tree = {}
    for folder, below, names in os.walk(root):
        for path in (Path(folder), *(Path(folder) / n for n in below + names)):
            found = path.lstat()
            content: object = None
            if stat.S_ISLNK(found.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(found.st_mode):
                content = path.read_bytes()
            out[str(path)] = found.st_mode, found.st_size, found.st_mtime_ns, found.st_ino, content
    return out


def differing(before: Tree, after: Tree) -> set[str]:
    return {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}


@contextmanager
def bystander() -> Iterator[subprocess.Popen[str]]:
    """Start a process of ours that takes no part in any job; its stdout has a line per signal that it gets."""
    process = subprocess.Popen(
        [sys.executable, "-c", BYSTANDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()
