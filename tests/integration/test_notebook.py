"""The notebook of examples runs from top to bottom; `%%distdiag` ends its ranks with the cell, also when it is interrupted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.jobs import REPOSITORY, TEST_MARK, clean_env, marked, wait_for

pytestmark = [pytest.mark.job, pytest.mark.timeout(300)]
EXAMPLES = REPOSITORY / "examples"
ENDLESS = """
import time, torch.distributed as dist
dist.init_process_group("gloo")
open(f"started{dist.get_rank()}", "w").close()
time.sleep(600)
"""
SESSION = f"""
from IPython.testing.globalipapp import start_ipython
ip = start_ipython()
ip.run_line_magic("load_ext", "distdiag")
try:
    ip.run_cell_magic("distdiag", "-n 2", {ENDLESS!r})
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def outputs(cell: nbformat.NotebookNode) -> str:
    """Return all that a cell shows, as text and HTML."""
    shown = [o.get("text", "") for o in cell.outputs]
    return "\n".join([*shown, *(str(v) for o in cell.outputs for v in o.get("data", {}).values())])


def test_the_example_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(EXAMPLES / "cases" / "ddp_bypassed", tmp_path / "cases" / "ddp_bypassed")
    book = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells)  # the stored one has none
    for name in set(os.environ) - set(clean_env(tmp_path)):
        monkeypatch.delenv(name)
    NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    code = {cell.source.splitlines()[0]: cell for cell in book.cells if cell.cell_type == "code"}
    assert "replica_drift" in outputs(code["import distdiag"]) and "<div" in outputs(code["import distdiag"])
    assert "'step_ms': 'ms'" in outputs(code["steps = run.steps_frame()"])
    for name in ("steps", "heat", "ranks"):
        assert "image/png" in code[f"run.plot.{name}()"].outputs[0].data
    healthy, hang = [outputs(cell) for cell in book.cells if cell.source.startswith("%%distdiag")]
    assert "rank 0 is done" in healthy and "rank 1 is done" in healthy and "nothing found" in healthy
    assert "only rank 0 made barrier (cell.py:8): `if step == 10 and dist.get_rank() == 0` (line 7)" in hang
    assert "Traceback" not in hang
    assert "('deadlock', (0,))" in outputs(code["hang = _"])


def test_an_interrupted_cell_leaves_no_process(tmp_path: Path) -> None:
    env = clean_env(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", SESSION], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as session:  # fmt: skip
        try:
            wait_for(lambda: all((tmp_path / f"started{r}").exists() for r in (0, 1)), 90, "the ranks")
            session.send_signal(signal.SIGINT)
            time.sleep(0.2)
            session.send_signal(signal.SIGINT)  # an impatient second one
            out, _ = session.communicate(timeout=60)
        finally:
            if session.poll() is None:
                session.kill()
    assert "interrupted" in out
    wait_for(lambda: not [x for x in marked(env[TEST_MARK]).values() if "cell.py" in x], 20, "the end of the ranks")
