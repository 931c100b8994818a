"""Starting the monitor: one per node, by the first rank that comes, in a session of its own, not as the rank's child."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import distdiag


def start_monitor(run_dir: Path, pages: Path) -> bool:
    """Start this node's monitor unless another rank did; True where this call started it.

    The process forks once more and its first half exits at once, so that the rank has no child left that its own
    `os.wait()` could meet.

    Raises:
        OSError: no process could be started.
    """
    node = os.environ.get("GROUP_RANK", "0")
    lock = pages / "monitor.lock"
    try:
        os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    package_root = str(Path(distdiag.__file__).resolve().parents[1])
    env = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "PYTHONSTARTUP", "PYTHONINSPECT")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, env.get("PYTHONPATH", "")]))
    if node != "0":  # one writer per database: every other node keeps a run of its own inside
        run_dir = run_dir / f"node_{node}"
    command = [sys.executable, "-P", "-m", "distdiag.monitor", str(run_dir), "--pages", str(pages), "--node", node]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=None,  # the job's: findings of severity error are said there, when they happen
        env=env,
        start_new_session=True,
        close_fds=True,
    )
    process.wait(timeout=20)
    return True
