"""Print an error: two lines on stderr, and with --json an object on stdout."""

from __future__ import annotations

from distdiag.errors import DistdiagError
from distdiag.streams import say_error, say_json

# of the others: distdiag.NAME/1
_SCHEMAS = {"diagnose": "distdiag.findings/1", "tui": "distdiag.snapshot/1", "dump": "distdiag.stacks/1"}


def report_error(error: DistdiagError, json_of: str | None = None) -> int:
    """Print an error and its hint, also as an object if `json_of` is the command; return its exit code."""
    if json_of is not None:
        say_json(error.as_json(_SCHEMAS.get(json_of, f"distdiag.{json_of}/1")))
    say_error(error.message, error.hint)
    return int(error.code)
