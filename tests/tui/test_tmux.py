"""The app in a real terminal, with real keys, next to a live job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distdiag.store import rundir
from tests.jobs import clean_env, free_port
from tests.tui.conftest import MakeRun
from tests.tui.synthetic import Scenario
from tests.tui.tmux import terminal

JOB = Path(__file__).with_name("job_with_a_barrier.py")
LINE = next(
    i for i, text in enumerate(JOB.read_text().splitlines(), 1) if "the line that the finding must name" in text
)
DEADLINE_S = 120.0


def _tui(run: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "distdiag", "tui", str(run), *options]


def test_keys_work_in_a_real_terminal(runs: MakeRun) -> None:
    run = runs(Scenario(state="deadlocked", ranks=8), "always")
    with terminal(_tui(run)) as t:
        t.until(lambda s: "DEADLOCK" in s and "train.py:118" in s)
        t.type("Enter")
        t.until("> rank 5")
        t.type("Escape")
        t.until("1 Ranks")  # a key right after Escape would be read as Alt plus that key
        t.type("7")
        t.until("rank 5 (1 of 8 ranks)")
        t.type("1", "/")
        t.until("Enter keeps")
        t.type("r", "a", "n", "k", "Space", "3", "Enter")
        t.until("1 of 8 ranks pass the filter")
        t.type("?")
        t.until("what do the keys and the columns mean?")
        t.type("q")
        last = t.until("the job is not affected")
        assert "Traceback" not in last and "distdiag tui" in last and t.ended() == 0


def test_the_mouse_works_in_a_real_terminal(runs: MakeRun) -> None:
    """A single movement brings the tooltip, leaving hides it, and a click opens a screen."""

    def at(screen: str, word: str) -> tuple[int, int]:
        return next((row.index(word), y) for y, row in enumerate(screen.splitlines()) if word in row)

    words = "step - wait: the rank's own time"
    with terminal(_tui(runs(Scenario(ranks=8), "always")), size=(120, 30)) as t:
        screen = t.until(lambda s: "self ms  Δ self" in s and "q Quit" in s)
        assert words not in screen
        x, y = at(screen, "self ms  Δ self")
        for i in range(2):  # the second time from a header to the one next to it
            t.hover(x + i, y)
            t.until(words)
        t.hover(1, 4)
        t.until(lambda s: words not in s)
        t.click(*at(t.screen(), "Heat"))
        t.until("one rank, one step, or everywhere?")


def test_a_small_terminal_works_and_ctrl_c_restores_it(runs: MakeRun) -> None:
    stale = {"COLUMNS": "80", "LINES": "24"}  # as some shells export them: the terminal's real size counts
    with terminal(_tui(runs(Scenario(ranks=8), "always")), size=(40, 12), env=stale) as t:
        t.until("distdiag needs 60x16")
        t.type("C-c")
        assert t.ended() == 130 and "Traceback" not in t.screen()


@pytest.mark.job
@pytest.mark.timeout(400)
def test_a_live_job_from_waiting_to_replay(tmp_path: Path) -> None:
    """WAITING, RUNNING, DEADLOCK with a finding that names the line, FAILED, then replay: all read from the screen."""
    run, go = tmp_path / "run", tmp_path / "go"
    port = str(free_port())
    ranks: list[subprocess.Popen[bytes]] = []

    def start(rank: int) -> None:
        env = clean_env(tmp_path / "home", {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "GO": str(go),
        })  # fmt: skip
        command = [sys.executable, "-m", "distdiag.run", "--run-dir", str(run), str(JOB)]
        log = (tmp_path / f"rank{rank}.log").open("wb")
        ranks.append(
            subprocess.Popen(
                command, env=env, cwd=tmp_path, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        )
        log.close()

    def logs() -> str:
        return "\n".join(p.read_text(errors="replace")[-1500:] for p in tmp_path.glob("rank*.log"))

    try:
        start(0)
        end = time.monotonic() + DEADLINE_S
        while not rundir.has_run(run):
            assert time.monotonic() < end and ranks[0].poll() is None, logs()
            time.sleep(0.05)
        with terminal(_tui(run), size=(100, 30)) as t:
            waiting = t.until(lambda s: "WAITING" in s and "1 of 2 ranks have reported" in s, DEADLINE_S)
            assert re.search(r"missing 1|○ +1 ", waiting)
            start(1)
            t.until(lambda s: "RUNNING" in s and (m := re.search(r"step (\d+)", s)) and int(m[1]) >= 10, DEADLINE_S)
            go.touch()
            stuck = t.until(lambda s: "DEADLOCK" in s and f"{JOB.name}:{LINE}" in s, DEADLINE_S)
            assert re.search(r"█ ERROR (deadlock|mismatch)", stuck), stuck
            t.type("Enter")
            assert f"{JOB.name}:{LINE}" in t.until("> rank 1", DEADLINE_S)
            t.type("Escape")
            ranks[1].send_signal(signal.SIGKILL)
            t.until(lambda s: "FAILED" in s.splitlines()[0], DEADLINE_S)
            end = time.monotonic() + DEADLINE_S
            # rewind to before the fault: PAUSED while the monitor still writes its last rows, REPLAY afterwards
            while not re.search(r"(REPLAY|PAUSED) +running at step [1-9]", t.screen().splitlines()[0]):
                assert time.monotonic() < end, t.screen()
                t.type("[")
                time.sleep(0.05)
            t.type("Space")
            t.until(lambda s: "FAILED" in s.splitlines()[0], DEADLINE_S)
            t.type("q")
            t.until("the job is not affected")
    except AssertionError as e:
        raise AssertionError(f"{e}\n{logs()}") from None
    finally:
        for p in ranks:
            try:
                os.killpg(p.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            p.wait()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGALRM"])
def test_the_benchmark_names_the_signal_that_ends_it(name: str) -> None:
    body = f"import os, signal; from benchmarks import tui; tui.name_signals(); os.kill(os.getpid(), signal.{name})"
    made = subprocess.run(
        [sys.executable, "-c", body],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (made.returncode, made.stderr) == (1, f"tui: error: ended by {name}\n")
