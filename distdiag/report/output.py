"""Writing a report: nothing is overwritten unasked, and a failure leaves no half file under the final name."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from distdiag.errors import DistdiagError
from distdiag.files import replacing


@contextmanager
def new_file(path: Path, force: bool = False, own: bool = False) -> Iterator[IO[bytes]]:
    """Open a file for writing, which appears as `path` when the block ends without an error.

    A directory of another user is refused if it is our `own` choice. An existing file is an error without `force`.
    """
    if path.is_dir():
        raise DistdiagError(f"{path} is a directory", f"name a file: -o {path / 'report.html'}")
    if not path.parent.is_dir():
        raise DistdiagError(
            f"there is no directory {path.parent}", f"create it: mkdir -p {shlex.quote(str(path.parent))}"
        )
    there = DistdiagError(f"{path} is there already", "--force overwrites it, -o FILE writes another one")
    if os.path.lexists(path) and not force:
        raise there
    try:
        with replacing(path.parent, path.name, own, over=force) as part, part.open("wb") as f:
            yield f
    except FileExistsError:  # made meanwhile
        raise there from None
    except OSError as e:
        hint = "free some space, or choose another file with -o"
        raise DistdiagError(f"cannot write {path}: {e.strerror or e}", hint) from e
