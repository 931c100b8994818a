"""`torchrun … -m distdiag.run [--run-dir DIR] SCRIPT|-m MODULE [ARGS…]`: record any script, no line changed.

The script gets the argv, `__main__`, `__file__`, sys.path, working directory, signals and exit code that it
would have alone. A traceback shows its own frames only.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import types
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from distdiag.torch_modules import leave_names, own_imports

with own_imports():  # the working directory may be the script's
    import click

    from distdiag import settings
    from distdiag.command_line import SETTINGS, check_script, read, recording_options
    from distdiag.errors import DistdiagError
    from distdiag.streams import say
    from distdiag.terms.metrics_targets import parse_metrics
    from distdiag.terms.units import parse_keep

RANK_ZERO_FIRST_S = 5.0  # for rank 0 to print what is wrong with the command line
PROG = "torchrun [TORCHRUN OPTIONS] -m distdiag.run"


@click.command(context_settings=SETTINGS | {"ignore_unknown_options": True, "allow_interspersed_args": False})
@recording_options
@click.argument("script", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT|-m MODULE [ARGS]…")
def command(**_options: Any) -> None:
    """Record a training script on every rank and watch it while it runs; no line of it is changed.

    Options end at the script or at -m, which runs a module instead. The run directory may also be given as
    DISTDIAG_RUN_DIR. While it runs: distdiag tui. The verdict: distdiag diagnose.
    """


def _parse(argv: list[str]) -> tuple[dict[str, Any], str | None, list[str]]:
    """Return our options, the module to run (if any), and the argv of the script or module."""
    options = read(command, argv, PROG)
    file = settings.read()
    settings.fill(options, file)
    if file.warnings and os.environ.get("RANK", "0") == "0":
        say(file.warning(), err=True)
    script = list(options.pop("script"))
    if options["keep"]:
        options["keep"] = parse_keep(options["keep"])
    parse_metrics(options["metrics"])
    check_script(script, f"{PROG} [OPTIONS] SCRIPT|-m MODULE [ARGS]…")
    return (options, script[1], script[1:]) if script[0] == "-m" else (options, None, script)


def main(argv: list[str] | None = None) -> NoReturn:
    """Entry point: attach, then run the user's script as `__main__`."""
    try:
        options, module, rest = _parse(sys.argv[1:] if argv is None else argv)
    except DistdiagError as e:
        # Every rank has this error; rank 0 prints it. The others wait, as the launcher ends all ranks with the first.
        _tell_launcher(e.message)
        if os.environ.get("RANK", "0") == "0":
            from distdiag.cli.errors import report_error

            sys.exit(report_error(e))
        time.sleep(RANK_ZERO_FIRST_S)
        sys.exit(int(e.code))
    with own_imports():
        from distdiag.recorder import run_claim, start_monitor
        from distdiag.recorder.deferred import record_process

    start_monitor.options = start_monitor.Options(
        options["quiet"], options["keep"], options["tape"], options["metrics"], options["nodes_port"]
    )
    if options["share"]:
        run_claim.share = True
    record_process(options["run_dir"], options["name"] or module or Path(rest[0]).stem)
    if module is None and _is_application(rest[0]):
        _run_application(rest)
    elif module is None:
        _run_script(rest)
    else:
        _run_module(module, rest)


def _tell_launcher(message: str) -> None:
    """Write why this rank ends to the file that torchrun reads such messages from, if it is our launcher."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        import json

        with contextlib.suppress(OSError):
            about = {"timestamp": str(int(time.time())), "py_callstack": message}  # torchrun prints the latter
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": about}}))


def _run_script(argv: list[str]) -> NoReturn:
    path = os.path.abspath(argv[0])  # as Python does; argv keeps what was typed
    sys.argv[:] = argv
    _path_starts_with(os.path.dirname(os.path.realpath(path)))
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None, __spec__=None)
    from importlib.machinery import SourceFileLoader

    main_module.__loader__ = SourceFileLoader("__main__", path)
    sys.modules["__main__"] = main_module
    _finish(lambda: exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main_module.__dict__))


def _is_application(path: str) -> bool:
    """True for a directory or a zip archive, whose `__main__.py` Python runs."""
    import zipfile

    return os.path.isdir(path) or (os.path.isfile(path) and zipfile.is_zipfile(path))  # not a pipe: it is read once


def _run_application(argv: list[str]) -> NoReturn:
    import runpy

    sys.argv[:] = argv
    path = os.path.join(os.getcwd(), argv[0])  # not normalised, as Python does; in place of our directory
    sys.path[:] = [path, *sys.path[not sys.flags.safe_path :]]
    leave_names(path)
    sys.modules["__main__"] = types.ModuleType("__main__")
    _finish(lambda: runpy._run_module_as_main("__main__", alter_argv=False))  # type: ignore[attr-defined]


def _run_module(module: str, argv: list[str]) -> NoReturn:
    import runpy

    sys.argv[:] = argv
    _path_starts_with(os.getcwd())
    sys.modules["__main__"] = types.ModuleType("__main__")  # a fresh namespace for the user's names
    _finish(lambda: runpy._run_module_as_main(module, alter_argv=True))  # type: ignore[attr-defined]


def _path_starts_with(directory: str) -> None:
    """Put the directory of the script first, in place of ours; with `python -P` Python adds neither."""
    if not sys.flags.safe_path:
        sys.path[0] = directory
        leave_names(directory)


def _finish(body: object) -> NoReturn:
    """Run the script and exit as it would alone."""
    from distdiag.recorder import session

    try:
        body()  # type: ignore[operator]
    except SystemExit as e:
        _exiting(session.current, e.code if isinstance(e.code, int) else (0 if e.code is None else 1), e.__traceback__)
        raise
    except BaseException as e:
        _show(e, session.current)
        if type(e) is KeyboardInterrupt:
            _end_by_signal()
        sys.exit(1)
    _exiting(session.current, 0)
    sys.exit(0)


def _end_by_signal() -> None:
    """Let Python end by SIGINT once it has finalized, so that the launcher sees an interruption.

    It does so after a script that it has run itself, and whose last error was this one.
    """
    import ctypes

    run, file_input = ctypes.pythonapi.PyRun_String, 257
    run.restype, run.argtypes = ctypes.py_object, [ctypes.c_char_p, ctypes.c_int, ctypes.py_object, ctypes.py_object]
    with contextlib.suppress(KeyboardInterrupt):
        run(b"raise KeyboardInterrupt", file_input, {}, {})


def _exiting(current: object, code: int, tb: TracebackType | None = None) -> None:
    if current is not None:
        current.exiting(code, tb)  # type: ignore[attr-defined]


def _show(error: BaseException, current: object) -> None:
    """Record what ended the script, and print its traceback without frames of ours and of the module runner."""
    tb = error.__traceback__
    while tb is not None and _is_ours(tb):
        tb = tb.tb_next
    error.__traceback__ = tb
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, tb  # functions of atexit may read them
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    # here, and not only by our `sys.excepthook`: the script may have put its own in place of it
    if current is not None:
        current.record_exception(error, tb)  # type: ignore[attr-defined]
    try:
        sys.excepthook(type(error), error, tb)
    except Exception as failure:  # of the script's own hook: as Python prints it
        failure.__traceback__, failure.__context__ = failure.__traceback__.tb_next, None  # type: ignore[union-attr]
        for text, e in (("Error in sys.excepthook:", failure), ("\nOriginal exception was:", error)):
            sys.stderr.write(f"{text}\n")
            sys.__excepthook__(type(e), e, e.__traceback__)


def _is_ours(tb: TracebackType) -> bool:
    file = tb.tb_frame.f_code.co_filename
    return file == __file__ or file == "<frozen runpy>" or os.path.basename(file) == "runpy.py"


if __name__ == "__main__":
    main()
