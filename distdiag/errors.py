"""Exit codes and the one error that users see: one line of error, one line of hint, no traceback."""

from __future__ import annotations

import importlib.util
import os
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """Exit codes of every command; part of the contract, shown by `distdiag --help`."""

    OK = 0  # done; nothing at or above --fail-on
    FAILED = 1  # a finding of severity error, or a probe below its floor
    USAGE = 2  # bad option, value or file
    INCONCLUSIVE = 3  # measured, but the host was too noisy or the budget too small to decide
    NO_DATA = 4  # no run, no rank has written, the window is empty
    TIMEOUT = 5  # a probe or a dump exceeded its limit
    INTERRUPTED = 130  # Ctrl-C


class DistdiagError(Exception):
    """An error reported to the user: `message` says what is wrong, `hint` what to do.

    Args:
        message: One line, without a full stop at the end.
        hint: One line with the remedy, if possible a command.
        code: Exit code of the command.
        kind: Short word for `--json` (`{"error": {"kind", "message", "hint"}}`).
    """

    def __init__(self, message: str, hint: str, code: ExitCode = ExitCode.USAGE, kind: str = "usage") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code
        self.kind = kind

    def as_json(self, schema: str) -> dict[str, Any]:
        """Return what `--json` prints in place of a result."""
        return {"schema": schema, "error": {"kind": self.kind, "message": self.message, "hint": self.hint}}

    def __reduce__(self) -> tuple[type[DistdiagError], tuple[str, str, ExitCode, str]]:
        return type(self), (self.message, self.hint, self.code, self.kind)  # it is sent between ranks


def in_own_tests() -> bool:
    """True in our own tests, which set DISTDIAG_RAISE=1: what is counted elsewhere is raised there."""
    return os.environ.get("DISTDIAG_RAISE") == "1"


def described(error: BaseException) -> str:
    """Return type and text of an exception, and where it was raised."""
    import traceback

    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} at {os.path.basename(last.filename)}:{last.lineno}"


# Packages of modules with another name. Hints name packages, not extras: distdiag itself is on no package index.
PACKAGES = {
    "textual_serve": "textual-serve",
    "prometheus_client": "prometheus-client",
    "opentelemetry": "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
}


def need(modules: tuple[str, ...], what: str) -> None:
    """Check that modules of an optional extra are installed.

    Args:
        what: What needs them, as the start of the error: "the live view".

    Raises:
        DistdiagError: some are missing; the hint is the command that installs them.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise missing_package(what, *missing)


def missing_package(what: str, *modules: str) -> DistdiagError:
    """Return the error for missing modules, with the command that installs them as its hint."""
    text = f"{what} needs {' and '.join(modules)}, which {'is' if len(modules) == 1 else 'are'} not installed"
    packages = " ".join(PACKAGES.get(name, name) for name in modules)
    return DistdiagError(text, f"pip install {packages}", kind="missing_extra")


def need_torch(what: str) -> None:
    """Check that torch is installed: it is no dependency, because readers of runs, dumps and logs need none.

    Raises:
        DistdiagError: it is missing.
    """
    if importlib.util.find_spec("torch") is None:
        hint = "run it in the environment of your training job, or `pip install torch` (2.10 or newer)"
        raise DistdiagError(f"{what} needs torch, which is not installed", hint, kind="missing_torch")
