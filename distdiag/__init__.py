"""distdiag: who is slow, who is stuck, at which line: diagnostics for distributed PyTorch jobs while they run.

The public surface: `attach()` records the calling process and returns a `Handle`; `open_run()` opens a recorded run and
returns a `Run`. Everything else is reached through the command line (`distdiag --help`) and through `run.db`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distdiag.version import VERSION

if TYPE_CHECKING:
    from pathlib import Path

    from distdiag.recorder import Handle
    from distdiag.report.run import Run

__all__ = ["Handle", "Run", "__version__", "attach", "open_run"]
__version__ = VERSION


def attach(run_dir: str | None = None, *, name: str | None = None) -> Handle:
    """Record this rank from here on. Call it once per process, before or after `init_process_group`.

    Never raises into the job: what cannot be recorded is counted and shown by the readers.

    Args:
        run_dir: Run directory; default `DISTDIAG_RUN_DIR`, else `./reports/<time>-<name>`. All ranks must agree.
        name: Name of the run; default the script's name.
    """
    from distdiag.recorder import attach as _attach

    return _attach(run_dir, name=name)


def open_run(run: str | Path | None = None) -> Run:
    """Open a recorded run, live or finished, for reading: `with open_run() as run: run.steps_frame()`.

    In a notebook, `open_run()` as the last line of a cell shows the verdict.

    Args:
        run: Run directory; default as for every command: `DISTDIAG_RUN_DIR`, else `reports/latest`.

    Raises:
        DistdiagError: there is no run, or it cannot be read; its `hint` is what to do.
    """
    from distdiag.report.run import Run
    from distdiag.store import rundir
    from distdiag.store.reader import open_run as _open_run

    return _open_run(rundir.resolve(str(run) if run is not None else None), Run)


def load_ipython_extension(ipython: Any) -> None:
    """Add the cell command `%%distdiag`: `%load_ext distdiag` calls this."""
    from distdiag.notebook import load

    load(ipython)


def __getattr__(name: str) -> Any:
    """Import the public types only when they are asked for: `import distdiag` costs nothing."""
    if name == "Handle":
        from distdiag.recorder import Handle

        return Handle
    if name == "Run":
        from distdiag.report.run import Run

        return Run
    raise AttributeError(f"module 'distdiag' has no attribute {name!r}")
