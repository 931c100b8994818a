"""A disk that is full during the training: a real file system of 16 MB, filled to the last byte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import clean_env

pytestmark = [pytest.mark.job, pytest.mark.timeout(240)]

# run in its own mount namespace, which removes the file system when it ends
INSIDE = """
import json, os, pathlib, signal, sqlite3, subprocess, sys, time
place = pathlib.Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", place], check=True)
run = place / "R"
job = subprocess.Popen(
    [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "distdiag.train",
     "--monitor", "--run-dir", run, "--data", sys.argv[2], "--batch-size", "8", "--max-steps", "100"],
    cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
try:
    end, steps = time.monotonic() + 120, 0
    while steps < 5 and job.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
        try:
            con = sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True, timeout=5)
            steps = con.execute("SELECT coalesce(max(step), 0) FROM step").fetchone()[0]
            con.close()
        except sqlite3.Error:
            pass
    for size in (1 << 20, 1):
        try:
            with open(place / f"filling{size}", "wb", buffering=0) as f:
                while f.write(b"0" * size):
                    pass
        except OSError:
            pass
    free = os.statvfs(place).f_bavail
    out, err = job.communicate(timeout=150)
    diagnosed = subprocess.run([sys.executable, "-m", "distdiag", "diagnose", run, "--json"], capture_output=True, text=True)
    print(json.dumps({"before": steps, "free": free, "code": job.returncode, "out": out, "err": err,
                      "diagnosed": diagnosed.stdout,
                      "hidden": [p.name for p in run.iterdir() if "reserve" in p.name], "diagnosed_code": diagnosed.returncode}))
finally:
    if job.poll() is None:
        os.killpg(job.pid, signal.SIGKILL)
"""


def test_a_full_disk_stops_nothing_and_is_reported(tmp_path: Path, images: Path) -> None:
    for namespaces in ("-m", "-rm"):  # as root, or as a user who may create namespaces
        if not subprocess.run(
            ["unshare", namespaces, "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True, check=False
        ).returncode:
            break
    else:
        pytest.skip("no file system can be mounted here: neither root nor user namespaces")
    done = subprocess.run(
        ["unshare", namespaces, sys.executable, "-c", INSIDE, str(tmp_path), str(images)],
        env=clean_env(tmp_path / "home"), capture_output=True, text=True, timeout=220, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout)
    assert job["before"] >= 5 and job["free"] == 0
    assert job["code"] == 0 and "done: 100 steps" in job["out"], job["err"]  # the training did not notice
    assert "no checkpoint in" in job["out"] + job["err"] and "No space left on device" in job["out"] + job["err"]
    assert "Traceback" not in job["err"]
    assert "the run could not be written" in job["err"] and "disk is full" in job["err"]
    verdict = json.loads(job["diagnosed"])  # the end of the run was written into the reserved space
    assert job["diagnosed_code"] == 0 and verdict["ranks_seen"] == 2 and verdict["state"] == "ended"
    assert "recorder/disk_full" in {f"{f['kind']}/{f['cause']}" for f in verdict["findings"]}
    assert job["hidden"] == []  # and no reserve file is left
