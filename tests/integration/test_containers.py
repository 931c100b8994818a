"""Recorded jobs in what containers offer: a small, full or read-only /dev/shm, a read-only root, no HOME, an unknown user, no ptrace.

Each job is two recorded processes without torch in a new mount namespace; each is recorded, or says in one line why not.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import ONE_RANK, REPOSITORY, clean_env

pytestmark = [
    pytest.mark.job,
    pytest.mark.timeout(180),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can change mounts and users"),
]

USER = 12_345
JOB = """
import ctypes, os, sys, time
attached = os.path.join(os.path.dirname(__file__), "attached")
if "undumpable" in sys.argv:  # nobody but root may trace it, or read its maps and memory
    ctypes.CDLL(None).prctl(4, 0)
if os.environ["RANK"] == "1" and "fill" in sys.argv:
    while not os.path.exists(attached):
        time.sleep(0.02)
    with open("/dev/shm/filling", "wb", buffering=0) as f:
        try:
            while f.write(b"0" * 4096):
                pass
        except OSError:
            pass
import distdiag
run = distdiag.attach()
open(attached, "w").close()
for step in range(50):
    run.step()
    time.sleep(0.05)
print("done")
"""
# $1: what to prepare; $2: how the ranks and the reader are started; then the command of a rank
INSIDE = """
set -e
mount -t tmpfs -o mode=1777 none /dev/shm
eval "$1"
cd "$PWD"  # what was mounted over it
run="$2"; shift 2
set +e
RANK=0 LOCAL_RANK=0 $run "$@" >out.0 2>err.0 &
first=$!
RANK=1 LOCAL_RANK=1 $run "$@" >out.1 2>err.1 &
second=$!
wait $first; echo $? >code.0
wait $second; echo $? >code.1
for i in $(seq $TENTHS_FOR_THE_END); do
    ended="$TMPDIR/distdiag-*/reports/*/.node_0.ended"
    [ -n "$DISTDIAG_RUN_DIR" ] && ended="$DISTDIAG_RUN_DIR/.node_0.ended"
    found=$(ls -d $ended 2>/dev/null)
    [ -n "$found" ] && break
    sleep 0.1
done
ls -a /dev/shm /dev/shm/distdiag-*/* >shm 2>&1
$run "$(dirname "$1")/distdiag" diagnose --json >verdict 2>verdict.err
echo $? >verdict.code
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A working directory that every user can enter and USER can write; on a disk, not in memory."""
    with tempfile.TemporaryDirectory(prefix="distdiag-container-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        os.chown(folder, USER, USER)
        yield Path(folder)


def readable_python() -> str:
    """Return commands by which a Python below a closed home is reachable for every user, in this mount namespace only."""
    base = Path(sys.base_prefix).resolve()
    shut = next((p for p in reversed(base.parents) if not p.stat().st_mode & 0o001), None)
    if shut is None:
        return "true"
    at, q = "/tmp/python.$$", shlex.quote
    return (
        f"mkdir {at}; mount --bind {q(str(base))} {at}; mount -t tmpfs -o mode=755 none {q(str(shut))};"
        f" mkdir -p {q(str(base))}; mount --bind {at} {q(str(base))}; umount {at}; rmdir {at}"
    )


def job(
    place: Path, prepare: str = "true", start: str = "", *arguments: str, drop: tuple[str, ...] = (), **env: str
) -> tuple[int, dict]:
    """Run the two ranks; return the exit code and the object of `distdiag diagnose`. The ranks must end normally, in silence."""
    (place / "job.py").write_text(JOB)
    for name in ("home", "tmp"):
        (place / name).mkdir(exist_ok=True)
        os.chown(place / name, USER, USER)
    given = {"DISTDIAG_RUN_DIR": str(place / "R"), "TMPDIR": str(place / "tmp"), "TENTHS_FOR_THE_END": "600", **env}
    full = clean_env(place / "home", {**ONE_RANK, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29513",
                                      "PYTHONPATH": str(REPOSITORY), **given})  # fmt: skip
    for name in ("RANK", "LOCAL_RANK", *drop):  # each rank has its own
        full.pop(name)
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", INSIDE, "bash", prepare, start, sys.executable, str(place / "job.py"), *arguments],
        cwd=place, env=full, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    read = {p.name: p.read_text() for p in place.iterdir() if p.is_file()}
    errors = read["err.0"] + read["err.1"]
    assert read["out.0"] == read["out.1"] == "done\n", errors
    assert (read["code.0"], read["code.1"]) == ("0\n", "0\n") and "Traceback" not in errors, errors
    (place / "errors").write_text(errors)
    assert read["verdict"], read["verdict.err"]
    return int(read["verdict.code"]), json.loads(read["verdict"])


def recorded(found: tuple[int, dict]) -> None:
    code, verdict = found
    assert code == 0 and verdict["state"] == "ended" and verdict["ranks_seen"] == 2, verdict
    assert [f for f in verdict["findings"] if f["severity"] != "info"] == []


def shm(size: str, free: str = "") -> str:
    """Return commands that mount a /dev/shm; `free` is what is left of it."""
    fill = f"; head -c {free} /dev/zero >/dev/shm/other" if free else ""
    return f"mount -t tmpfs -o size={size},mode=1777 none /dev/shm{fill}"


def test_the_dev_shm_of_a_container_has_room(place: Path) -> None:
    recorded(job(place, shm("64m")))


@pytest.mark.parametrize("other", ["0", "300k", "600k", "1000k"])
def test_a_dev_shm_that_fills_up_during_the_start_gives_one_run(place: Path, other: str) -> None:
    """Rank 0 has its page when rank 1 finds /dev/shm full: one monitor sees both."""
    recorded(job(place, shm("1m", other), "", "fill"))
    assert not (place / "R" / "attempt_1").exists() and not (place / "R" / "node_1").exists()
    assert len(list((place / "R").glob(".node_?"))) == 1
    in_memory = "/dev/shm/" in (place / "R" / ".node_0").read_text()
    assert in_memory == (other == "0")  # with room for both pages; then rank 1 finds none, and its page is in the run


def test_a_dev_shm_that_is_full_from_the_start_is_not_needed(place: Path) -> None:
    recorded(job(place, shm("64k", "64k")))


def test_a_read_only_dev_shm_is_not_needed(place: Path) -> None:
    recorded(job(place, f"{shm('64m')}; mount -o remount,ro /dev/shm"))


def test_a_read_only_root_needs_only_the_run_directory(place: Path) -> None:
    root = f"mount --bind {place} {place}; mount -t tmpfs none /var/tmp; mount -o remount,ro,bind /"
    recorded(job(place, root, TMPDIR="/tmp"))  # which is read-only, too


def test_a_working_directory_that_is_read_only_has_its_run_in_the_temporary_directory(place: Path) -> None:
    (place / "cwd").mkdir()
    ready = f"mount --bind {place}/cwd {place}/cwd; mount -o remount,ro,bind {place}/cwd"
    recorded(job(place, ready, f"env -C {place}/cwd", drop=("DISTDIAG_RUN_DIR",)))


@pytest.mark.parametrize("home", [None, "/", "/nowhere"])
def test_a_user_without_home_and_name_is_recorded(place: Path, home: str | None) -> None:
    """As with runAsNonRoot in a pod: no entry in /etc/passwd, no HOME or that of another."""
    start = f"setpriv --reuid {USER} --regid {USER} --clear-groups --no-new-privs"
    recorded(job(place, readable_python(), start, drop=() if home else ("HOME",), **({"HOME": home} if home else {})))


def test_ranks_that_nobody_may_trace_are_recorded(place: Path) -> None:
    start = f"setpriv --reuid {USER} --regid {USER} --clear-groups --no-new-privs"
    recorded(job(place, readable_python(), start, "undumpable"))


def test_two_users_record_in_one_working_directory_at_once(place: Path) -> None:
    """As on a shared node: both start in the same directory, and neither reads or blocks the other's run."""
    work, tmp = place / "work", place / "tmp"
    for folder in (work, tmp):
        folder.mkdir()
        folder.chmod(0o1777)
    script = (
        f"mount -t tmpfs -o mode=1777 none /dev/shm; {readable_python()}\n"
        "for user in 12345 12346; do for q in 0 1; do\n"
        f"RANK=$q LOCAL_RANK=$q MASTER_PORT=$user setpriv --reuid $user --regid $user --clear-groups "
        f"{sys.executable} {place}/job.py >{place}/out.$user.$q 2>&1 &\ndone; done; wait\n"
        # the monitors write the end after the ranks have ended
        f"for i in $(seq 600); do [ $(ls -d {work}/reports/[0-9]*/.node_0.ended {tmp}/distdiag-*/reports/[0-9]*/.node_0.ended 2>/dev/null | wc -l)"
        " = 2 ] && break; sleep 0.1; done\n"
        "for user in 12345 12346; do\n"
        f"setpriv --reuid $user --regid $user --clear-groups {sys.executable} -m distdiag diagnose --json >{place}/verdict.$user\ndone\n"
    )
    (place / "job.py").write_text(JOB.replace('open(attached, "w").close()', ""))
    env = clean_env(
        place / "home",
        {**ONE_RANK, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp)},
    )
    for name in ("RANK", "LOCAL_RANK"):
        env.pop(name)
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", script], cwd=work, env=env, capture_output=True, text=True, timeout=150
    )
    for user in (12345, 12346):
        outputs = [(place / f"out.{user}.{q}").read_text() for q in (0, 1)]
        assert all(text.startswith("done\n") for text in outputs), (outputs, done.stderr)
        verdict = json.loads((place / f"verdict.{user}").read_text() or "{}")
        assert verdict.get("state") == "ended" and verdict["ranks_seen"] == 2, (verdict, done.stderr)


def test_where_nothing_can_be_written_the_job_runs_and_one_line_says_so(place: Path) -> None:
    (place / "cwd").mkdir()
    prepare = f"{shm('64k', '64k')}; mount --bind {place}/cwd {place}/cwd; mount -o remount,ro,bind {place}/cwd"
    wrap, nothing = f"env -C {place}/cwd", {"TMPDIR": "/proc", "TENTHS_FOR_THE_END": "0"}
    code, answer = job(place, prepare, wrap, drop=("DISTDIAG_RUN_DIR",), **nothing)
    assert code == 4 and answer["error"]["kind"] == "no_run"
    lines = (place / "errors").read_text().splitlines()
    assert len(lines) == 2 and lines[0].startswith("distdiag: this job is not recorded: /proc/"), lines
    assert lines[1].startswith("hint: "), lines
