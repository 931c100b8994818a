"""How every command says that something is wrong: two lines on stderr."""

from __future__ import annotations

import sys

from distdiag.errors import DistdiagError


def report_error(error: DistdiagError) -> int:
    """Print an error (one line of error, one of hint) and return its exit code."""
    print(f"distdiag: error: {error.message}", file=sys.stderr)
    print(f"hint: {error.hint}", file=sys.stderr)
    return int(error.code)
