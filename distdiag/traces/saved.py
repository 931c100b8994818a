"""Profiles that were saved in a run: the newest of RUN/profile/NUMBER/profile.json. A file from outside: checked before use."""

from __future__ import annotations

from pathlib import Path

import msgspec

from distdiag import files
from distdiag.traces.model import Profile

FOLDER = "profile"
FILE = "profile.json"
MAX_BYTES = 32 * 1024 * 1024


def write(folder: Path, profile: Profile) -> None:
    files.write(folder, FILE, msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")


def newest_file(run_dir: Path) -> Path | None:
    """Return the file of the run's newest finished profile; None if there is none."""
    numbers = (int(n) for n in files.names(run_dir, FOLDER) if n.isascii() and n.isdecimal() and len(n) < 10)
    saved = (f"{FOLDER}/{n}/{FILE}" for n in sorted(numbers, reverse=True))
    return next((run_dir / name for name in saved if files.is_file(run_dir, name)), None)


def read(file: Path) -> Profile | None:
    """Return a saved profile; None if the file cannot be read, is too large, or holds no profile."""
    try:
        data = files.read(file.parent, file.name, MAX_BYTES + 1)
        return msgspec.json.decode(data, type=Profile) if len(data) <= MAX_BYTES else None
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None


def newest(run_dir: Path) -> Profile | None:
    """Return the run's newest finished profile; None if there is none, or it is damaged."""
    file = newest_file(run_dir)
    return None if file is None else read(file)
