"""distdiag works beside tracers, profilers, and agents that change how processes start; also if a signal handler ends the script."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

from tests.jobs import REPOSITORY, closed, distdiag, rows, start, unwrapped

pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]

# As tools do it: a wrapper in the place of sys.executable (scalene), processes that `subprocess` starts run under the tool, which waits
# for them at the end of the script (viztracer), functions with attributes (ddtrace), and a sitecustomize in every interpreter.
FOLLOWED = """
    import atexit, os, pathlib, subprocess, sys
    import torch
    import torch.distributed as dist

    sys.executable = "/bin/false"
    started = []
    popen = subprocess.Popen.__init__
    def traced(self, *args, **kwargs):
        popen(self, *args, **kwargs)
        started.append(self)
    subprocess.Popen.__init__ = traced
    os.posix_spawn = lambda *args, **kwargs: started.append(args)  # debugpy's starts the process under a debugger
    atexit.register(lambda: [p.wait() for p in started])
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=0, world_size=1)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("torch.distributed"):
            for f in vars(module).values():
                if type(f).__name__ == "function":
                    f.followed = True
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
    print("children:", len(started))
"""
EVERYWHERE = """
import os, sys
with open(os.environ["FOLLOWED_BY"], "a") as f:
    f.write(f"{os.getpid()} {sys.orig_argv}\\n")
"""
ENDS_BY_ITSELF = """
    import os, signal, sys, time
    import torch.distributed as dist

    code = int(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=0, world_size=1)
    while not os.path.exists("run/run.db"):
        time.sleep(0.1)
    time.sleep(2)  # the monitor follows the process
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""

# As gevent and eventlet do it: a thread runs in the calling thread until it would wait, and each has an ident of its own.
GREENLETS = """
    import _thread, os, threading, time

    class WouldWait(BaseException):
        pass

    class Lock:
        def __init__(self):
            self.held = False
        def acquire(self, blocking=True, timeout=-1):
            if self.held and blocking:
                raise WouldWait
            took, self.held = not self.held, True
            return took
        def release(self):
            self.held = False
        _at_fork_reinit = release
        def locked(self):
            return self.held
        def __enter__(self):
            return self.acquire()
        def __exit__(self, *_):
            self.release()

    def start_new_thread(function, args=(), kwargs={}):
        try:
            function(*args, **kwargs)
        except WouldWait:
            pass
        return 1

    for module in (_thread, threading):
        module.get_ident = lambda: 12345
    _thread.start_new_thread, _thread.allocate_lock, threading.Lock = start_new_thread, Lock, Lock
    slept, sleep = [], time.sleep
    time.sleep = slept.append
    threading.main_thread()._ident = 12345
    threading._active = {12345: threading.main_thread()}

    import torch
    import torch.distributed as dist

    written = open("written", "w")
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=0, world_size=1)
    written.write("before and ")
    written.flush()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(40):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        sleep(0.1)
    written.write("after")
    written.close()
    print("slept:", slept)
"""
# As freezegun does it: all that is a clock, in any module, by its identity. The script's steps then take no time, or less.
FREEZES = """
    import os, sys, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    clocks = {id(getattr(time, name)) for name in vars(time) if name.endswith(("time", "_ns", "monotonic", "counter"))}

    def freeze():
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if id(value) in clocks:
                    setattr(module, name, lambda *_: 1)

    for step in range(10):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).sum()
        loss.register_hook(lambda _: freeze())
        loss.backward()
        optimizer.step()
    assert time.monotonic() == 1
    dist.destroy_process_group()
"""
WITHOUT_PACKAGES = """
    import glob, os, sys, time
    import torch
    import torch.distributed as dist

    sys.path[:] = [p for p in sys.path if "site-packages" not in p]
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=0, world_size=1)
    lock = os.path.join(os.path.realpath("run/pages"), "monitor.lock")
    while os.path.getsize(lock) < 6:  # as many as there are starts
        time.sleep(0.05)
"""
WARNS = """
    import os, sys, warnings
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
    model.module.register_full_backward_hook(lambda *_: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.randn(4, 8)).sum().backward()
    found = [w for w in caught if "Full backward hook" in str(w.message)]
    print([os.path.basename(w.filename) for w in found])
    dist.destroy_process_group()
"""
ABORTS = """
    import os, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    while not os.path.exists("run/run.db"):
        time.sleep(0.1)
    time.sleep(2)
    os.abort()  # – as gloo does
"""
WAITS = """
import subprocess, sys, time
job = subprocess.Popen(sys.argv[1:])
while job.poll() is None:
    time.sleep(1)
sys.exit(job.returncode)
"""


def test_tools_that_follow_processes_do_not_follow_the_monitor(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(FOLLOWED))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(EVERYWHERE)
    env = {
        "DISTDIAG": "1", "DISTDIAG_RUN_DIR": str(tmp_path / "run"), "FOLLOWED_BY": str(tmp_path / "followed"),
        "PYTHONPATH": f"{tmp_path / 'site'}:{REPOSITORY}",
    }  # fmt: skip
    with start([sys.executable, "job.py"], cwd=tmp_path, env=env) as job:
        assert job.wait() == 0, job.tail()
        assert job.stdout() == "children: 0\n"
        assert closed(tmp_path / "run")["state"] == "ended"
    assert (tmp_path / "followed").read_text().count("\n") == 1, "the script alone, not the monitor"


def _env(folder: Path, **more: str) -> dict[str, str]:
    return {"DISTDIAG": "1", "DISTDIAG_RUN_DIR": str(folder / "run"), "PYTHONPATH": str(REPOSITORY), **more}


def test_a_job_whose_threads_are_greenlets_keeps_its_files_and_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(GREENLETS))
    with start([sys.executable, "job.py"], cwd=tmp_path, env=_env(tmp_path, DISTDIAG_RAISE="1")) as job:
        assert job.wait() == 0, job.tail()
        assert job.stdout() == "slept: []\n"
        closed(tmp_path / "run")
    assert (tmp_path / "written").read_text() == "before and after"
    ((heartbeats, steps),) = rows(tmp_path / "run", "SELECT count(*), max(step) FROM step")
    assert (heartbeats, steps) == (40, 40)


@pytest.mark.parametrize("pure", ["0", "1"])
def test_a_script_may_freeze_all_clocks(tmp_path: Path, pure: str) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(FREEZES))
    env = _env(tmp_path, DISTDIAG_RAISE="1", DISTDIAG_PURE=pure)
    with start([sys.executable, "job.py"], cwd=tmp_path, env=env) as job:
        assert job.wait() == 0, job.tail()
        closed(tmp_path / "run")


def test_the_monitor_takes_no_variable_of_the_jobs_python(tmp_path: Path) -> None:
    """They would print the monitor's imports on the job's stderr, or let it start under a debugger."""
    (tmp_path / "job.py").write_text(textwrap.dedent(FOLLOWED))
    with start([sys.executable, "job.py"], cwd=tmp_path, env=_env(tmp_path, PYTHONPROFILEIMPORTTIME="1")) as job:
        assert job.wait() == 0, job.tail()
        closed(tmp_path / "run")
        assert "distdiag.recorder" in job.stderr() and "distdiag.monitor" not in job.stderr()


def test_a_monitor_that_cannot_be_imported_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(WITHOUT_PACKAGES))
    with start([sys.executable, "job.py"], cwd=tmp_path, env=_env(tmp_path)) as job:
        assert job.wait() == 0, job.tail()
        first, second = (line for line in job.stderr().splitlines() if not line.startswith("[W"))
    assert first.startswith("distdiag: this job is not recorded: No module named "), first
    assert second.startswith("hint: pip install ") and second.endswith("; the job itself continues"), second


def test_torchs_warnings_name_the_line_that_called_backward(tmp_path: Path) -> None:
    """`warnings` counts frames to find it."""
    (tmp_path / "job.py").write_text(textwrap.dedent(WARNS))
    for recorded in ("0", "1"):
        with start([sys.executable, "job.py"], cwd=tmp_path, env=_env(tmp_path, DISTDIAG=recorded)) as job:
            assert job.wait() == 0, job.tail()
            assert job.stdout() == "['job.py']\n"


@pytest.mark.parametrize(
    ("code", "shown", "absent"),
    [(143, "stopped by SIGTERM", "ERROR"), (3, "rank 0 ended with exit code 3\n", "job.py:")],
)
def test_the_exit_code_says_how_a_rank_ended(tmp_path: Path, code: int, shown: str, absent: str) -> None:
    """128 + a signal is a handler's way to end by it; where the script called sys.exit is not known with DISTDIAG=1."""
    (tmp_path / "job.py").write_text(textwrap.dedent(ENDS_BY_ITSELF))
    env = {"DISTDIAG": "1", "DISTDIAG_RUN_DIR": str(tmp_path / "run")}
    # a launcher that looks for ended ranks now and then, as torchrun does: the kernel keeps the code until then
    with start([sys.executable, "-c", WAITS, sys.executable, "job.py", str(code)], cwd=tmp_path, env=env) as job:
        assert job.wait() == code, job.tail()
        closed(tmp_path / "run")
    told = unwrapped(distdiag("diagnose", tmp_path / "run").stdout)
    assert shown in told and absent not in told


def test_a_script_that_a_tool_executes_has_its_absolute_path_in_any_locale(tmp_path: Path) -> None:
    """Profilers compile a script under the name in their arguments, and faulthandler writes that name when a signal kills the rank."""
    (tmp_path / "job.py").write_text(textwrap.dedent(ABORTS), "utf-8")
    env = {
        "DISTDIAG": "1", "DISTDIAG_RUN_DIR": str(tmp_path / "run"),
        "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0",
    }  # fmt: skip
    executes = "exec(compile(open('job.py', encoding='utf-8').read(), 'job.py', 'exec'))"
    with start([sys.executable, "-c", executes], cwd=tmp_path, env=env) as job:
        assert job.wait() == -6, job.tail()
        closed(tmp_path / "run")
    told = distdiag("diagnose", "--json", tmp_path / "run", env=env)
    (found,) = json.loads(told.stdout)["findings"]
    assert found["where"][0]["file"] == str(tmp_path / "job.py"), told.stdout + told.stderr
