"""distdiag works beside tracers, profilers, and agents that change how processes start; also if a signal handler ends the script."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

from tests.jobs import REPOSITORY, closed, distdiag, start, unwrapped

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
