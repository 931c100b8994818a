"""distdiag: who is slow, who is stuck, at which line: diagnostics for distributed PyTorch jobs while they run.

The public surface is small: `attach()` records the calling process and returns a `Handle`. Everything else is
reached through the command line (`distdiag --help`) and through `run.db`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distdiag.recorder import Handle

__all__ = ["__version__", "attach"]
__version__ = "0.1.0"


def attach(run_dir: str | None = None, *, name: str | None = None) -> Handle:
    """Record this rank from here on; call it once per process, before or after `init_process_group`.

    Never raises into the job: what cannot be recorded is counted and shown by the readers.

    Args:
        run_dir: Run directory; default `DISTDIAG_RUN_DIR`, else `./reports/<time>-<name>`. All ranks must agree.
        name: Name of the run; default the script's name.
    """
    from distdiag.recorder import attach as _attach

    return _attach(run_dir, name=name)
