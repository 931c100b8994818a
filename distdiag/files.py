"""Small files that other processes read while they are written: whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a hidden path next to `path`, which replaces it when the block ends; if the block raises, it is removed.

    Raises:
        OSError: it could not be renamed.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
