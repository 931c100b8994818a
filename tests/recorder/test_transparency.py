"""A script under `distdiag.run` behaves, prints and exits as it does without."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from tests.jobs import ONE_RANK, REPOSITORY, clean_env, rows, wait_for

SCRIPTS = {
    "safe_path": "import sys\nprint(sys.flags.safe_path, sys.path)\n",
    "plain": "import sys\nprint(__name__, __file__, sys.argv, sys.path[0])\nprint('err', file=sys.stderr)\n",
    "exit_code": "import sys\nsys.exit(7)\n",
    "exit_text": "raise SystemExit('no data')\n",
    "raises": "def f(x):\n    return 1 / x\n\nprint('before')\nf(0)\n",
    "chained": "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('bad key') from e\n",
    "os_exit": "import os, sys\nprint('x'); sys.stdout.flush()\nos._exit(5)\n",
    "main_guard": "def work():\n    import __main__\n    print(__main__.work is work)\nif __name__ == '__main__':\n    work()\n",
    "syntax_error": "def f(:\n    pass\n",
    "sigterm": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nimport time\ntime.sleep(30)\n",
    "interrupted": "import os, signal\nsignal.raise_signal(signal.SIGINT)\n",
    "pickles": "import pickle\nclass A:\n    pass\nprint(type(pickle.loads(pickle.dumps(A()))).__module__)\n",
    "threads": "import sys, threading\nfor t in threading.enumerate():\n    print(t.name)\n    if t is not threading.main_thread():\n        t.join(20)\n"
    "sys.excepthook = lambda kind, error, tb: print('hook', kind, error)\n1 / 0\n",
    "hook_that_fails": "import sys\ndef report(*error):\n    raise OSError('no network')\nsys.excepthook = report\n1 / 0\n",
    "environment": "import os, threading\nprint(os.getcwd(), sorted(os.environ.items()))\n",
    "fork": "import os\np = os.fork()\nif p == 0:\n    os._exit(3)\nprint(os.waitpid(-1, 0)[1] >> 8)\n",
    "no_child_of_ours": "import os\ntry:\n    os.waitpid(-1, os.WNOHANG)\n    print('a child')\nexcept ChildProcessError:\n    print('none')\n",
    "lowest_descriptors": "import os\nprint(os.open(os.devnull, os.O_RDONLY))\nimport resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))\n"
    "print(len([os.open(os.devnull, os.O_RDONLY) for _ in range(4)]))\n",
    "blocked_signal": "import os, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\nos.kill(os.getpid(), signal.SIGUSR1)\n"
    "print(signal.sigtimedwait({signal.SIGUSR1}, 5).si_signo)\n",
    "atexit": "import atexit\natexit.register(print, 'bye')\nprint('hello')\n",
    "faulthandler": "import faulthandler\nprint(faulthandler.is_enabled())\nfaulthandler.enable()\nprint(faulthandler.is_enabled())\n",
    "last_error": "import atexit, sys\natexit.register(lambda: print(repr(sys.last_value), sys.last_traceback.tb_lineno))\n1 / 0\n",
    "open_at_the_end": "import os\nf = open(os.dup(1), 'w')\nf.write('step 1')\nraise KeyboardInterrupt\n",
    "interrupted_at_exit": "import atexit, signal, threading, time\natexit.register(print, 'saved')\n"
    "threading.Thread(target=lambda: (time.sleep(0.2), print('thread done'))).start()\nsignal.raise_signal(signal.SIGINT)\n",
}


def run(command: list[str], cwd: Path, env: dict[str, str]) -> tuple[int, str, str]:
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    err = done.stderr
    if sys.version_info >= (3, 12):  # it warns of a fork with other threads, and the recorder has one
        err = re.sub(r".*multi-threaded, use of fork.*\n  \w+ = os\.fork\(\)\n", "", err)
    return done.returncode, done.stdout, err


@pytest.mark.parametrize("as_rank", [False, True], ids=["no_rank", "rank"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_recorded_script_exits_and_prints_as_without_recording(name: str, as_rank: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[name])
    env = clean_env(tmp_path / "home", {"PYTHONPATH": str(REPOSITORY)})
    if as_rank:
        env |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    if name == "safe_path":
        env["PYTHONSAFEPATH"] = "1"
    alone = run([sys.executable, "script.py", "a", "--b=1"], tmp_path, env)
    options = [
        "--run-dir",
        "R",
        "--quiet",
        "--keep",
        "500M",
    ]  # our own options: none may reach the script or its children
    watched = run([sys.executable, "-m", "distdiag.run", *options, "script.py", "a", "--b=1"], tmp_path, env)
    assert watched == alone


@pytest.mark.parametrize(
    ("folder", "command"),
    [
        (".", ["distdiag.run", "--quiet", "--run-dir", "R"]),
        ("..", ["distdiag.run", "--quiet", "--run-dir", "R"]),
        (".", ["distdiag", "run", "--quiet", "--run-dir", "R", "--nproc-per-node", "1"]),
    ],
    ids=["here", "elsewhere", "launched"],
)
def test_a_script_has_its_own_modules_of_names_that_the_recorder_imports(
    folder: str, command: list[str], tmp_path: Path
) -> None:
    job, names = tmp_path / "job", ("click", "resource", "shlex")
    job.mkdir()
    for name in names:
        (job / f"{name}.py").write_text("OWN = True\n")
    ends = (
        "torch.ones(1, requires_grad=True).sum().backward()\nprint('distdiag.recorder.hooks.install' in sys.modules)\n"
    )
    (job / "script.py").write_text(
        f"import sys, {', '.join(names)}, torch\nprint({', '.join(f'{x}.OWN' for x in names)}, sys.path[0])\n{ends}"
    )
    env = clean_env(tmp_path / "home", {"PYTHONPATH": str(REPOSITORY), **({} if "run" in command else ONE_RANK)})
    code, out, err = run([sys.executable, "-m", *command, str(job / "script.py")], job / folder, env)
    assert (code, out) == (0, f"True True True {job}\nTrue\n"), err


def test_the_exception_is_recorded_although_the_script_has_its_own_hook(tmp_path: Path) -> None:
    script = "import sys\nsys.excepthook = lambda *error: print('mine')\nraise ValueError('no such column')\n"
    (tmp_path / "script.py").write_text(script)
    env = clean_env(tmp_path / "home", {**ONE_RANK, "PYTHONPATH": str(REPOSITORY)})
    command = [sys.executable, "-m", "distdiag.run", "--run-dir", "R", "--quiet", "script.py"]
    assert run(command, tmp_path, env) == (1, "mine\n", "")
    query = "SELECT exception FROM rank WHERE exception IS NOT NULL"
    assert "no such column" in wait_for(lambda: rows(tmp_path / "R", query), 60, "the exception")[0][0]


@pytest.mark.parametrize(
    "hook", ["print('mine')", "signal.raise_signal(signal.SIGINT)"], ids=["its own", "interrupted"]
)
def test_the_exception_is_recorded_although_our_hook_is_not_called(hook: str, tmp_path: Path) -> None:
    """A launcher that got Ctrl-C interrupts its ranks once more while they print their tracebacks."""
    script = f"import signal, sys, distdiag\ndistdiag.attach()\nsys.excepthook = lambda *error: {hook}\nraise ValueError('no such column')\n"
    (tmp_path / "script.py").write_text(script)
    env = clean_env(tmp_path / "home", {**ONE_RANK, "PYTHONPATH": str(REPOSITORY), "DISTDIAG_RUN_DIR": "R"})
    assert run([sys.executable, "script.py"], tmp_path, env)[0] == 1
    query = "SELECT exception, file, line FROM rank WHERE exception IS NOT NULL"
    (found,) = wait_for(lambda: rows(tmp_path / "R", query), 60, "the exception")
    assert found == ("ValueError: no such column", str(tmp_path / "script.py"), 4)


CLOSES_ALL = """
import ctypes, fcntl, os, time
os.closerange(3, 2048)
own = [os.open(f"own.{k}", os.O_RDWR | os.O_CREAT) for k in range(1024)]  # one of them gets each number that was ours
locked = [fd for fd in own if fd > 900]
for fd in locked:
    fcntl.flock(fd, fcntl.LOCK_EX)
other = [os.open(f"own.{own.index(fd)}", os.O_RDONLY) for fd in locked]
time.sleep(2.5)  # the monitor is looked after every two seconds
for fd in other:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print("the lock is lost")
    except BlockingIOError:
        pass
child = os.fork()
if child == 0:
    for fd in own:
        os.fstat(fd)
    os._exit(3)
print(os.waitpid(child, 0)[1] >> 8)
"""


def test_descriptors_closed_by_the_script_are_not_used(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CLOSES_ALL)
    env = clean_env(tmp_path / "home", {**ONE_RANK, "PYTHONPATH": str(REPOSITORY)})
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= most < 4096:
        pytest.skip(f"{most} open files at most, fewer than the script opens")
    files = "ulimit -n 4096; exec"
    command = ["sh", "-c", f"{files} {sys.executable} -m distdiag.run --run-dir R --quiet script.py"]
    code, out, err = run(command, tmp_path, env)
    assert (code, out, err) == (0, "3\n", "")
    assert not any(f.stat().st_size for f in tmp_path.glob("own.*"))


def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent(tmp_path: Path) -> None:
    script = "import os, distdiag\nrun = distdiag.attach()\npulse = run._session.pulse\nchild = os.fork()\n"
    script += "if child == 0:\n    waits = pulse._running.locked()\n    run.detach()\n    os._exit(waits)\n"
    (tmp_path / "script.py").write_text(script + "print(pulse._running.locked(), os.waitpid(child, 0)[1])\n")
    env = clean_env(tmp_path / "home", {**ONE_RANK, "PYTHONPATH": str(REPOSITORY), "DISTDIAG_QUIET": "1"})
    assert run([sys.executable, "script.py"], tmp_path, env) == (0, "True 0\n", "")


TAKES_A_SIGNAL = """
import signal, time
from distdiag.recorder import session
page = session.current.recorder.header
number = signal.SIGRTMIN + OFFSET
end = time.monotonic() + 30
assert page.trace_signal
signal.signal(number, lambda *_: print("called"))
while page.trace_signal and time.monotonic() < end:
    time.sleep(0.05)
print(page.trace_signal)
"""


@pytest.mark.parametrize("offset", [12, 13])
def test_a_signal_that_the_script_handles_is_no_longer_used(offset: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TAKES_A_SIGNAL.replace("OFFSET", str(offset)))
    env = clean_env(tmp_path / "home", {**ONE_RANK, "PYTHONPATH": str(REPOSITORY)})
    command = [sys.executable, "-m", "distdiag.run", "--run-dir", "R", "--quiet", "script.py"]
    assert run(command, tmp_path, env) == (0, "0\n", "")


CRASHES = """
import ctypes, os, sys
child = os.fork()
if child == 0:
    ctypes.string_at(0)
print(os.waitpid(child, 0)[1])
os.closerange(3, 256)
own = [open(f"own.{k}", "w") for k in range(20)]
sys.stdout.flush()
ctypes.string_at(0)
"""


def test_a_crash_writes_no_stack_into_the_scripts_files(tmp_path: Path) -> None:
    """The stack of a forked child would be read as that of the rank."""
    (tmp_path / "script.py").write_text(CRASHES)
    env = clean_env(tmp_path / "home", {**ONE_RANK, "PYTHONPATH": str(REPOSITORY)})
    code, out, _ = run([sys.executable, "-m", "distdiag.run", "--run-dir", "R", "--quiet", "script.py"], tmp_path, env)
    assert (code, out) == (-signal.SIGSEGV, f"{int(signal.SIGSEGV)}\n")
    assert not any(f.stat().st_size for f in tmp_path.glob("own.*"))
    kept = wait_for(lambda: rows(tmp_path / "R", "SELECT json FROM finding WHERE kind = 'rank_lost'"), 60, "the end")
    where = [(w["file"], w["line"]) for w in json.loads(kept[0][0])["where"]]
    assert where == [(str(tmp_path / "script.py"), 10)]


INSIDE_TORCH = """
import datetime, sys, threading, _thread
import torch.distributed as dist

store, inside = dist.HashStore(), threading.Event()

def wait_in_torch(times=1):
    inside.set()
    for _ in range(times):
        try:
            store.wait(["nobody sets it"], datetime.timedelta(seconds=0.3))
        except dist.DistStoreError:
            pass
"""
PULSE = """
from types import SimpleNamespace
from distdiag.recorder import session
session.current.pulse.collectives = SimpleNamespace(refresh_groups=wait_in_torch)
"""
OWN_THREAD = "_thread.start_new_thread(wait_in_torch, (100,))\n"
END = "assert inside.wait(30)\n"


def test_the_script_may_end_while_the_pulse_is_inside_torch(tmp_path: Path) -> None:
    """A thread that returns from C++ while Python shuts down aborts the process, so the end waits for it."""
    (tmp_path / "script.py").write_text(INSIDE_TORCH + PULSE + END)
    env = clean_env(tmp_path / "home", {**ONE_RANK, "PYTHONPATH": str(REPOSITORY)})
    assert run([sys.executable, "-m", "distdiag.run", "--quiet", "script.py"], tmp_path, env) == (0, "", "")


def test_a_crash_while_python_shuts_down_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(INSIDE_TORCH + OWN_THREAD + END)
    env = clean_env(tmp_path / "home", {**ONE_RANK, "PYTHONPATH": str(REPOSITORY)})
    code, _, _ = run([sys.executable, "-m", "distdiag.run", "--run-dir", "R", "script.py"], tmp_path, env)
    assert code in (-signal.SIGABRT, -signal.SIGSEGV), "this Python does not crash here: the test has lost its subject"
    query = "SELECT json FROM finding WHERE kind <> 'recorder'"  # which is about this machine, e.g. its clock
    found = json.loads(wait_for(lambda: rows(tmp_path / "R", query), 60, "the finding")[0][0])
    assert (found["kind"], found["severity"], found["culprits"]) == ("rank_lost", "warning", [0])
    assert (
        f"finished the script, then {signal.Signals(-code).name} ended the process while Python shut down"
        in found["message"]
    )


def test_a_module_runs_as_with_python_dash_m(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "job.py").write_text("import sys\nprint(__name__, __package__, sys.argv)\nraise ValueError('x')\n")
    env = clean_env(tmp_path / "home", {"PYTHONPATH": str(REPOSITORY), "DISTDIAG_QUIET": "1"})
    alone = run([sys.executable, "-m", "pack.job", "v"], tmp_path, env)
    watched = run([sys.executable, "-m", "distdiag.run", "--run-dir", "R", "-m", "pack.job", "v"], tmp_path, env)
    frames = re.compile(r'  File "<frozen runpy>", line \d+, in \w+\n')
    assert watched[:2] == alone[:2]
    assert frames.sub("", watched[2]) == frames.sub("", alone[2])


@pytest.mark.parametrize("name", ["./application", "application.zip"])
@pytest.mark.parametrize("flags", [[], ["-P"]])
def test_a_directory_and_a_zip_archive_run_as_with_python(name: str, flags: list[str], tmp_path: Path) -> None:
    source = "import helper, os, sys\nprint(__name__, __file__, __package__, sys.argv, sys.path[:2])\nsys.exit(helper.code)\n"
    path = tmp_path / name
    if name.endswith(".zip"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("__main__.py", source)
            archive.writestr("helper.py", "code = 3\n")
    else:
        path.mkdir()
        (path / "__main__.py").write_text(source)
        (path / "helper.py").write_text("code = 3\n")
    env = clean_env(tmp_path / "home", {"DISTDIAG_QUIET": "1", **ONE_RANK})
    alone = run([sys.executable, *flags, name, "v"], tmp_path, env)
    watched = run([sys.executable, *flags, "-m", "distdiag.run", "--run-dir", "R", name, "v"], tmp_path, env)
    assert watched == alone and alone[0] == 3, alone


def test_a_script_may_come_from_a_pipe(tmp_path: Path) -> None:
    env = clean_env(tmp_path / "home", {"DISTDIAG_QUIET": "1", **ONE_RANK})
    code = f"{sys.executable} -m distdiag.run --run-dir R <(echo 'print(7)') v"
    assert run(["bash", "-c", code], tmp_path, env) == (0, "7\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no script given"),
        (["missing.py"], "no script missing.py"),
        (["--frobnicate", "x.py"], "unknown option --frobnicate"),
        (["--run-dir"], "'--run-dir' requires an argument"),
        (["."], ". is a directory without __main__.py"),
        (["-m"], "-m needs the name of a module"),
    ],
)
def test_bad_arguments_are_one_error_and_one_hint(arguments: list[str], message: str, tmp_path: Path) -> None:
    env = clean_env(tmp_path / "home", {"PYTHONPATH": str(REPOSITORY)})
    code, out, err = run([sys.executable, "-m", "distdiag.run", *arguments], tmp_path, env)
    assert code == 2
    assert out == ""
    lines = err.splitlines()
    assert lines[0] == f"distdiag: error: {lines[0].removeprefix('distdiag: error: ')}" and message in lines[0]
    assert lines[1].startswith("hint: ") and len(lines) == 2


@pytest.mark.parametrize("rank", [{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, {}], ids=["rank", "no_rank"])
def test_a_directory_that_cannot_be_written_costs_only_the_record(rank: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('trained')\n")
    blocked = tmp_path / "file"
    blocked.write_text("")
    env = clean_env(tmp_path / "home", {"PYTHONPATH": str(REPOSITORY), **rank})
    code, out, err = run(
        [sys.executable, "-m", "distdiag.run", "--run-dir", str(blocked / "R"), "script.py"], tmp_path, env
    )
    assert (code, out) == (0, "trained\n")
    assert "not recorded" in err and "hint: " in err and "Traceback" not in err


def test_an_interrupt_reaches_the_launcher_as_a_signal(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    env = clean_env(tmp_path / "home", {"PYTHONPATH": str(REPOSITORY), "DISTDIAG_QUIET": "1"})
    p = subprocess.Popen(
        [sys.executable, "-m", "distdiag.run", "--run-dir", "R", "script.py"],
        cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert p.stdout is not None and p.stdout.readline() == "up\n"
        os.kill(p.pid, signal.SIGINT)
        _, err = p.communicate(timeout=30)
    finally:
        p.kill()
    assert p.returncode == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt") and "distdiag" not in err


def test_spawned_children_are_recorded_in_the_run_of_their_launcher(tmp_path: Path) -> None:
    """Nothing is in the environment, which other jobs of the script would inherit."""
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, os\n"
        "def work(rank):\n"
        "    import torch\n"
        "    torch.ones(1, requires_grad=True).sum().backward()\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=work, args=(0,))\n"
        "    child.start()\n"
        "    child.join()\n"
        "    raise SystemExit(child.exitcode)\n"
    )
    env = clean_env(tmp_path / "home", {"PYTHONPATH": str(REPOSITORY), "DISTDIAG_QUIET": "1"})
    code, _, err = run([sys.executable, "-m", "distdiag.run", "--run-dir", "R", "script.py"], tmp_path, env)
    assert (code, err) == (0, "")
    assert (tmp_path / "R" / "run.json").exists() and not (tmp_path / "reports").exists()


def test_a_users_test_suite_does_not_see_failures_of_the_recorder(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import distdiag\ndistdiag.attach().log(loss='high')\nprint('passed')\n")
    env = clean_env(
        tmp_path / "home",
        {"PYTHONPATH": str(REPOSITORY), "DISTDIAG_QUIET": "1", "PYTEST_CURRENT_TEST": "test_x.py::test_y (call)"},
    )
    assert run([sys.executable, "script.py"], tmp_path, env) == (0, "passed\n", "")


def test_stderr_is_not_redirected_while_the_witness_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._C import _distributed_c10d as c10d

    from distdiag.recorder import witness

    starting, written = threading.Event(), threading.Event()

    def write() -> None:
        assert starting.wait(20)
        os.write(2, b"another thread's words\n")
        written.set()

    class Server:
        def __init__(self, path: str) -> None:
            os.write(2, b"words of the server\n")
            starting.set()
            assert written.wait(20)

    threading.Thread(target=write).start()
    monkeypatch.setattr(c10d, "_WorkerServer", Server)
    assert witness.start(tmp_path / "r1.sock") is not None
    assert capfd.readouterr().err == "another thread's words\n"


def test_a_witness_that_is_not_serving_yet_is_not_shut_down(tmp_path: Path) -> None:
    """torch's shutdown would wait for ever for a thread that has not started to serve."""
    from distdiag.recorder import witness

    class Server:
        def shutdown(self) -> None:
            raise AssertionError("it hangs here")

    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "r0.sock"))  # bound, not served
        witness.stop(Server(), tmp_path / "r0.sock")


@pytest.mark.parametrize("argv", ["del sys.argv", "sys.argv = None", "sys.argv = ['x', 3]"])
def test_nothing_in_the_command_line_breaks_the_import_of_torch(argv: str) -> None:
    program = f"import sys; from distdiag.torchrun_compat import autoload; {argv}; autoload()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
