"""`torchrun … -m distdiag.run [--run-dir DIR] SCRIPT|-m MODULE [ARGS…]`: record any script, no line changed.

The script sees what it would see without us: argv, `__main__`, `__file__`, sys.path, working directory, signals, exit
code; a traceback shows its own frames only.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import types
from pathlib import Path
from types import TracebackType
from typing import NoReturn

OTHERS_LEAVE_S = 5.0  # that rank 0 is given to say what is wrong with the command line
VALUED = ("--run-dir", "--name", "--keep")
USAGE = "torchrun [torchrun options] -m distdiag.run [--run-dir DIR] [--name NAME] [--quiet] SCRIPT|-m MODULE [ARGS…]"
HELP = f"""usage: {USAGE}

Record a training script on every rank and watch it while it runs; no line of it is changed.

  --run-dir DIR   where the run is written (default: DISTDIAG_RUN_DIR, else ./reports/<time>-<name>)
  --name NAME     name of the run (default: the script's)
  --keep SIZE     size bound of the run's database, e.g. 500M (default 2G); older rows are thinned beyond it
  --quiet         record findings but do not print them on stderr
  -m MODULE       run a module instead of a script

While it runs: distdiag tui. The verdict: distdiag diagnose.
"""


def _parse(argv: list[str]) -> tuple[dict[str, str | bool], str | None, list[str]]:
    """Our options end at the script or at -m; everything after belongs to the script."""
    from distdiag.errors import DistdiagError
    from distdiag.recorder.run_claim import keep_bytes

    options: dict[str, str | bool] = {}
    i = 0
    while i < len(argv):
        arg = argv[i]
        if arg in ("-h", "--help"):
            print(HELP, end="")
            raise SystemExit(0)
        if arg == "--quiet":
            options["quiet"] = True
        elif arg in VALUED or arg.startswith(tuple(v + "=" for v in VALUED)):
            key, eq, value = arg.partition("=")
            if not eq:
                i += 1
                if i >= len(argv):
                    raise DistdiagError(f"{key} needs a value", USAGE)
                value = argv[i]
            options[key[2:].replace("-", "_")] = value if key != "--keep" else str(keep_bytes(value))
        elif arg == "-m":
            if i + 1 >= len(argv):
                raise DistdiagError("-m needs the name of a module", USAGE)
            return options, argv[i + 1], argv[i + 1 :]
        elif arg.startswith("-") and arg != "-":
            raise DistdiagError(f"unknown option {arg} before the script", USAGE)
        else:
            return options, None, argv[i:]
        i += 1
    raise DistdiagError("no script given", USAGE)


def main(argv: list[str] | None = None) -> NoReturn:
    """Entry point: attach, then run the user's script as `__main__`."""
    from distdiag.cli.errors import report_error
    from distdiag.errors import DistdiagError

    try:
        options, module, rest = _parse(sys.argv[1:] if argv is None else argv)
        if module is None and not Path(rest[0]).exists():
            raise DistdiagError(f"no script {rest[0]}", "give the path of a Python file, or -m and a module's name")
        if module is None and Path(rest[0]).is_dir():
            raise DistdiagError(
                f"{rest[0]} is a directory", "give the path of a Python file, or -m and a module's name"
            )
    except DistdiagError as e:
        # every rank has the same error to tell; one of them does, and is given the time: a launcher ends all with the first
        if os.environ.get("RANK", "0") == "0":
            sys.exit(report_error(e))
        time.sleep(OTHERS_LEAVE_S)
        sys.exit(int(e.code))
    from distdiag.recorder import start_monitor
    from distdiag.recorder.deferred import record_process

    start_monitor.options = start_monitor.Options(bool(options.get("quiet")), int(options.get("keep", 0)) or None)
    run_dir = options.get("run_dir")
    name = options.get("name") or (module or Path(rest[0]).stem)
    record_process(str(run_dir) if run_dir else None, str(name))
    if module is None:
        _run_script(rest)
    else:
        _run_module(module, rest)


def _run_script(argv: list[str]) -> NoReturn:
    path = os.path.abspath(argv[0])  # as Python itself does; argv keeps what was typed
    sys.argv[:] = argv
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None, __spec__=None)
    from importlib.machinery import SourceFileLoader

    main_module.__loader__ = SourceFileLoader("__main__", path)
    sys.modules["__main__"] = main_module
    _finish(lambda: exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main_module.__dict__))


def _run_module(module: str, argv: list[str]) -> NoReturn:
    import runpy

    sys.argv[:] = argv
    sys.path[0] = os.getcwd()
    sys.modules["__main__"] = types.ModuleType("__main__")  # ours is no namespace for the user's names
    _finish(lambda: runpy._run_module_as_main(module, alter_argv=True))  # type: ignore[attr-defined]


def _finish(body: object) -> NoReturn:
    """Run the script to its end and end as it did."""
    from distdiag.recorder import session

    try:
        body()  # type: ignore[operator]
    except SystemExit as e:
        _exiting(session.current, e.code if isinstance(e.code, int) else (0 if e.code is None else 1), e.__traceback__)
        raise
    except KeyboardInterrupt as e:
        _show(e)
        try:
            _exit_handlers()
        finally:  # as Python does, end by the signal: the launcher sees an interruption
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    except BaseException as e:
        _show(e)
        sys.exit(1)
    _exiting(session.current, 0)
    sys.exit(0)


def _exit_handlers() -> None:
    """Do what Python does for the script at exit: wait for its threads, call its atexit functions, flush its output."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed or replaced by the script
            pass


def _exiting(current: object, code: int, tb: TracebackType | None = None) -> None:
    if current is not None:
        current.exiting(code, tb)  # type: ignore[attr-defined]


def _show(error: BaseException) -> None:
    """The traceback as the script alone would print it: frames of ours and of the module runner are taken off."""
    tb = error.__traceback__
    while tb is not None and _is_ours(tb):
        tb = tb.tb_next
    error.__traceback__ = tb
    sys.excepthook(type(error), error, tb)


def _is_ours(tb: TracebackType) -> bool:
    file = tb.tb_frame.f_code.co_filename
    return file == __file__ or file == "<frozen runpy>" or os.path.basename(file) == "runpy.py"


if __name__ == "__main__":
    main()
