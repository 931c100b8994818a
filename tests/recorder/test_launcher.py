"""What torchrun's process prints at its end: the verdict of a failed launch, after its own traceback."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.jobs import REPOSITORY, clean_env

LAUNCHER = """
import atexit, sys, time
from distdiag import launcher
launcher.watch(sys.argv, float(sys.argv[-1]))
if "slow-end" in sys.argv:
    atexit.register(time.sleep, 2)  # what is registered last runs first
if "fails" in sys.argv:
    raise RuntimeError("the last line of torchrun's traceback")
"""


@pytest.mark.parametrize(
    ("options", "older", "printed"),
    [(["fails"], False, True), ([], False, False), (["--quiet", "fails"], False, False), (["fails"], True, False)],
    ids=["failed", "ended well", "quiet", "a run of another launch"],
)
def test_the_verdict_of_a_failed_launch_is_printed_last(
    options: list[str], older: bool, printed: bool, tmp_path: Path
) -> None:
    run = tmp_path / "R"
    (run / ".jobs").mkdir(parents=True)
    (run / ".jobs" / "0").write_text("token\n")
    (run / "verdict.txt").write_text("distdiag: rank 1 crashed\n")
    began = time.time() + (3600 if older else -3600)
    quiet = [o for o in options if o.startswith("-")]
    rest = [o for o in options if not o.startswith("-")]
    arguments = ["-m", "distdiag.run", "--run-dir", str(run), *quiet, "train.py", *rest, str(began)]
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, *arguments],
        cwd=tmp_path, env=clean_env(tmp_path / "home", {"PYTHONPATH": str(REPOSITORY)}), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ("torchrun's traceback\n\ndistdiag: rank 1 crashed\n" in done.stderr) == printed, done.stderr
    assert done.stderr.endswith("distdiag: rank 1 crashed\n") == printed
    assert done.returncode == ("fails" in options)


MONITOR = """
import os, sys, time
from pathlib import Path
from distdiag import launcher
run = Path(sys.argv[1])
while sys.argv[2] == "after" and not (run / ".traceback").exists():
    time.sleep(0.05)
print("distdiag: rank 1 crashed", file=sys.stderr, flush=True)
stream = os.stat(sys.argv[3]) if len(sys.argv) > 3 else None
(run / launcher.PRINTED_ON).write_text("another file" if stream else launcher.stderr_id())
(run / ".part").write_text("distdiag: rank 1 crashed\\n")
os.replace(run / ".part", run / "verdict.txt")
"""
SLOW_LAUNCHER = LAUNCHER.replace(
    "raise ",
    """
    import subprocess
    command = [sys.executable, "-c", os.environ["MONITOR"], *sys.argv[-2].split("|")]
    monitor = subprocess.Popen(command)
    if "before" in command:
        monitor.wait()
    show = sys.excepthook
    def shown(*raised):
        show(*raised)
        open(os.path.join(command[3], ".traceback"), "w").close()
    sys.excepthook = shown
    raise """,
).replace("import atexit", "import atexit, os")


@pytest.mark.parametrize(
    ("when", "elsewhere", "slow_end", "times"),
    [("before", False, False, 2), ("after", False, False, 1), ("after", False, True, 1), ("after", True, False, 2)],
    ids=["before the traceback", "after the traceback", "after it, and the launcher ends late", "into a log file"],
)  # fmt: skip
def test_a_verdict_that_the_monitor_printed_after_the_traceback_is_not_repeated(
    when: str, elsewhere: bool, slow_end: bool, times: int, tmp_path: Path
) -> None:
    run = tmp_path / "R"
    (run / ".jobs").mkdir(parents=True)
    (run / ".jobs" / "0").write_text("token\n")
    monitor = "|".join([str(run), when, *([str(tmp_path)] if elsewhere else [])])
    arguments = [
        "-m",
        "distdiag.run",
        "--run-dir",
        str(run),
        "train.py",
        "fails",
        *["slow-end"] * slow_end,
        monitor,
        str(time.time() - 3600),
    ]
    done = subprocess.run(
        [sys.executable, "-c", SLOW_LAUNCHER, *arguments],
        cwd=tmp_path, env=clean_env(tmp_path / "home", {"PYTHONPATH": str(REPOSITORY), "MONITOR": MONITOR}),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stderr.count("distdiag: rank 1 crashed\n") == times, done.stderr
    assert done.stderr.endswith("distdiag: rank 1 crashed\n")
    assert "the last line of torchrun's traceback\n" in done.stderr


def test_the_signal_that_ends_torchrun_is_noted_in_the_run(tmp_path: Path) -> None:
    run = tmp_path / "R"
    (run / ".jobs").mkdir(parents=True)
    (run / ".jobs" / "0").write_text("token\n")
    agent = "torch.distributed.elastic.agent.server.api"
    logs = f"""
import logging, sys
from distdiag import launcher
launcher.watch(sys.argv, 0.0)
logging.getLogger("{agent}").warning("Received %s death signal, shutting down workers", sys.argv[-1])
print(launcher.stopped_by(launcher.Path(sys.argv[4])), file=sys.stderr)
"""
    for number, found in (("15", "(15, "), ("99", "None")):
        done = subprocess.run(
            [sys.executable, "-c", logs, "-m", "distdiag.run", "--run-dir", str(run), "train.py", number],
            cwd=tmp_path, env=clean_env(tmp_path / "home", {"PYTHONPATH": str(REPOSITORY)}), capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert f"Received {number} death signal" in done.stderr and f"\n{found}" in done.stderr, done.stderr


UNRECORDED = """
import os, sys, time
from distdiag import everywhere, launcher
sys.argv[0] = "/bin/torchrun"
everywhere.install()
if "claims" in sys.argv:
    os.makedirs("reports/.jobs")
    open("reports/.jobs/token", "w").write("20990101-120000-x\\n")
if "fails" in sys.argv:
    raise RuntimeError("no such script")
"""


@pytest.mark.parametrize(
    ("older", "how", "reason"),
    [
        (True, [], [None]),
        (True, ["fails"], ["RuntimeError: no such script"]),
        (False, [], []),
        (True, ["claims"], []),
        (True, ["--help"], []),
    ],
)
def test_a_launch_without_a_process_group_is_noted_where_an_older_run_would_be_shown(
    tmp_path: Path, older: bool, how: list[str], reason: list[str | None]
) -> None:
    runs = tmp_path / "reports"
    if older:
        (runs / "20250101-120000-train").mkdir(parents=True)
        (runs / "latest").symlink_to("20250101-120000-train")
    env = clean_env(tmp_path / "home", {"PYTHONPATH": str(REPOSITORY), "DISTDIAG": "1"})
    done = subprocess.run(
        [sys.executable, "-c", UNRECORDED, *how], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert (
        done.returncode == ("fails" in how) and done.stdout == "" and ("Traceback" in done.stderr) == ("fails" in how)
    )
    noted = [json.loads(path.read_text())["launch_failed"] for path in runs.glob("*-torchrun/run.json")]
    assert noted == reason and (runs.exists() or not older)


def test_the_command_of_a_spawned_rank_is_its_parents(tmp_path: Path) -> None:
    script = tmp_path / "spawns.py"
    script.write_text(
        "import multiprocessing as mp\nfrom distdiag.recorder import session\n"
        "def rank():\n    print(session._command())\n"
        "if __name__ == '__main__':\n    p = mp.get_context('spawn').Process(target=rank); p.start(); p.join()\n"
    )
    done = subprocess.run(
        [sys.executable, script, "--lr", "1"],
        capture_output=True,
        text=True,
        env=clean_env(tmp_path) | {"PYTHONPATH": str(REPOSITORY)},
        timeout=60,
    )
    assert done.stdout.split()[1:] == [str(script), "--lr", "1"], done.stderr
