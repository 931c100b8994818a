"""Where a run is written: all ranks of a job agree, attempts and jobs are separate, nothing is overwritten."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from distdiag.page import directories
from distdiag.recorder import run_claim, session
from distdiag.store import rundir
from distdiag.terms.launchers import LAUNCHERS, RANKS
from tests.jobs import REPOSITORY, clean_env

CLAIM = """
import sys
from distdiag.recorder import run_claim, session
sys.stdout.write(f"{run_claim.claim(sys.argv[1] or None, 'job')}\\n")
"""


def claims(tmp_path: Path, run_dir: str, ranks: int, variable: str = "RANK", **env: str) -> set[str]:
    """Return the answers of `ranks` processes that ask at the same time; `variable` has the rank."""
    full = clean_env(tmp_path / "home", {"PYTHONPATH": str(REPOSITORY), "MASTER_PORT": "29500", **env})

    def ask(rank: int) -> str:
        done = subprocess.run(
            [sys.executable, "-c", CLAIM, run_dir], cwd=tmp_path, env={**full, variable: str(rank)},
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    with ThreadPoolExecutor(ranks) as pool:
        return set(pool.map(ask, range(ranks)))


def test_concurrent_ranks_get_the_same_directory(tmp_path: Path) -> None:
    assert claims(tmp_path, "R", 4, TORCHELASTIC_RUN_ID="a") == {str(tmp_path / "R")}


@pytest.mark.parametrize("variable", RANKS)
def test_the_ranks_of_every_launcher_get_the_same_directory(tmp_path: Path, variable: str) -> None:
    (answer,) = claims(tmp_path, "", 3, variable)
    assert Path(answer).parent == tmp_path / "reports"


def test_without_a_directory_all_ranks_agree_on_a_new_one(tmp_path: Path) -> None:
    (answer,) = claims(tmp_path, "", 3, TORCHELASTIC_RUN_ID="a")
    assert Path(answer).parent == tmp_path / "reports" and answer.endswith("-job")


def test_without_a_writable_working_directory_all_ranks_agree_on_one_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "reports").write_text("a file, where the directory would be made")
    (answer,) = claims(tmp_path, "", 3, TORCHELASTIC_RUN_ID="a", TMPDIR=str(tmp_path))
    root = tmp_path / f"distdiag-{os.getuid()}"
    assert Path(answer).parent == root / "reports" and root.stat().st_mode & 0o777 == 0o700


def test_a_restart_and_another_job_get_their_own_directories_and_readers_use_the_newest(tmp_path: Path) -> None:
    (first,) = claims(tmp_path, "R", 2, TORCHELASTIC_RUN_ID="a")
    (Path(first) / "run.db").touch()
    (second,) = claims(tmp_path, "R", 2, TORCHELASTIC_RUN_ID="a", TORCHELASTIC_RESTART_COUNT="1")
    assert second == str(tmp_path / "R" / "attempt_1")
    (Path(second) / "run.db").touch()
    (third,) = claims(tmp_path, "R", 2, TORCHELASTIC_RUN_ID="b")
    assert third == str(tmp_path / "R" / "attempt_2")
    assert claims(tmp_path, "R", 1, TORCHELASTIC_RUN_ID="a") == {first}
    (Path(third) / "run.db").touch()
    assert rundir.resolve(str(tmp_path / "R")) == Path(third)


JOIN = """
import os, sys, time
from pathlib import Path
from distdiag.page import directories
from distdiag.page.layout import page_path
from distdiag.page.writer import PageWriter
from distdiag.recorder import run_claim, session
rank = int(os.environ["RANK"])
c = run_claim.claim_rank(sys.argv[1] or None, "job", rank, 2)
directories.make(c.pages)
held = directories.hold(c.pages)
w = PageWriter(page_path(c.pages, rank))
w.header.pid, w.header.rank, w.header.world_size = os.getpid(), rank, 2
w.publish()
sys.stdout.write(f"{c.run_dir} {c.pages}\\n")
"""


def together(tmp_path: Path, script: str, run_dir: str, wrap: bool = False, **env: str) -> list[str]:
    """Return the lines that `script` prints as ranks 0 and 1, started at once by one process."""
    path = tmp_path / "script.py"
    path.write_text(script)
    full = clean_env(
        tmp_path / "home", {"PYTHONPATH": str(REPOSITORY), "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", **env}
    )
    one = f"{sys.executable} {path} {run_dir or chr(39) * 2}"
    inner = f'bash -c "{one}; true"' if wrap else one
    ranks = [f"RANK={q} {inner}" for q in (0, 1)]
    done = subprocess.run(
        ["bash", "-c", f"{' & '.join(ranks)} & wait"], cwd=tmp_path, env=full, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()


def joined(tmp_path: Path, run_dir: str, **env: str) -> list[tuple[str, str]]:
    """Return (run directory, page directory) of two ranks that publish their pages and are then killed with their monitor."""
    out = [(d, pages) for d, _, pages in (line.partition(" ") for line in together(tmp_path, JOIN, run_dir, **env))]
    for _, pages in out:
        directories.remove(Path(pages))
    return out


def test_ranks_of_one_launch_share_directory_and_pages(tmp_path: Path) -> None:
    first, second = joined(tmp_path, "R", MASTER_PORT="29500")
    assert first == second and first[0] == str(tmp_path / "R")
    (tmp_path / "R" / "run.db").touch()


ONE_SEES_NO_ROOM = """
import os, sys
from distdiag.page import directories
from distdiag.recorder import run_claim, session
directories.has_room = lambda directory, ranks: os.environ["RANK"] == "0"
sys.stdout.write(f"{run_claim.claim_rank(sys.argv[1], 'job', int(os.environ['RANK']), 2).pages}\\n")
"""


def test_the_page_directory_is_chosen_once_for_all_ranks_of_a_node(tmp_path: Path) -> None:
    """Rank 1 finds no space left in memory: pages in two directories would mean two monitors and two databases."""
    pages = together(tmp_path, ONE_SEES_NO_ROOM, "R")
    directories.remove(Path(pages[0]))
    assert len(pages) == 2 and len(set(pages)) == 1


def test_pages_are_in_the_run_directory_if_another_user_has_our_name_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(directories, "SHM", tmp_path)
    (tmp_path / "theirs").mkdir()
    directories.memory_root().symlink_to(tmp_path / "theirs")
    assert run_claim.claim_rank(str(tmp_path / "R"), "job", 0, 1).pages == tmp_path / "R" / "pages.0"
    assert not any((tmp_path / "theirs").iterdir())


@pytest.mark.parametrize("run_dir", ["R", ""])
def test_a_relaunch_with_the_same_ids_over_two_nodes_gets_its_own_directory(tmp_path: Path, run_dir: str) -> None:
    """With several nodes only the environment identifies a job, and a manual relaunch repeats it."""
    env = {"TORCHELASTIC_RUN_ID": "same", "MASTER_ADDR": "a", "MASTER_PORT": "29500", "GROUP_WORLD_SIZE": "2"}
    first = joined(tmp_path, run_dir, **env)
    again = joined(tmp_path, run_dir, **env)
    assert len({d for d, _ in first}) == len({d for d, _ in again}) == 1
    assert first[0] != again[0]
    if run_dir:
        assert again[0][0] == str(tmp_path / "R" / "attempt_1")


@pytest.mark.parametrize("name", ["SLURM_STEP_ID", "SLURM_RESTART_COUNT"])
def test_slurm_steps_and_requeues_are_different_jobs(tmp_path: Path, name: str) -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NODEID": "0", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    (first,) = claims(tmp_path, "R", 2, **env, **{name: "0"})
    (second,) = claims(tmp_path, "R", 2, **env, **{name: "1"})
    assert first != second


TWO_NODES = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "train-0", "MASTER_PORT": "29500", "GROUP_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    "other",
    [
        {"JOBSET_RESTART_ATTEMPT": "1"},
        {"DISTDIAG_JOB": "train-of-tuesday"},  # from the pod's uid or annotation, by the downward API
        {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"},
        {"WORLD_SIZE": "4"},
    ],
    ids=lambda env: next(iter(env)) if len(env) == 1 else list(env)[1],
)
@pytest.mark.parametrize("run_dir", ["R", ""])
def test_a_job_with_another_identity_has_another_directory(tmp_path: Path, run_dir: str, other: dict[str, str]) -> None:
    (first,) = claims(tmp_path, run_dir, 2, **TWO_NODES)
    (again,) = claims(tmp_path, run_dir, 2, **TWO_NODES)
    (second,) = claims(tmp_path, run_dir, 2, **TWO_NODES, **other)
    assert first == again != second


@pytest.mark.parametrize("run_dir", ["R", ""])
@pytest.mark.parametrize("node_first", [True, False])
def test_a_node_that_never_joined_an_ended_job_does_not_join_it_now(
    tmp_path: Path, run_dir: str, node_first: bool
) -> None:
    """A pod that could not be scheduled: the job is deleted and created again with the same names, and this time it starts."""
    (old, _), _ = joined(tmp_path, run_dir, **TWO_NODES, GROUP_RANK="0")
    directories.note_ended(Path(old), 0, [0, 1])
    nodes = ["1", "0"] if node_first else ["0", "1"]
    found = {run for node in nodes for run, _ in joined(tmp_path, run_dir, **TWO_NODES, GROUP_RANK=node)}
    assert len(found) == 1 and found != {old}


def test_a_node_does_not_join_a_job_of_yesterday_that_was_killed(tmp_path: Path) -> None:
    """Its monitor could not note the end."""
    (old, _), _ = joined(tmp_path, "R", **TWO_NODES, GROUP_RANK="0")
    os.utime(directories.node_record(Path(old), 0), (time.time() - 86_400,) * 2)
    found = {run for node in "10" for run, _ in joined(tmp_path, "R", **TWO_NODES, GROUP_RANK=node)}
    assert found == {str(tmp_path / "R" / "attempt_1")}


def test_the_nodes_of_a_job_that_start_minutes_apart_share_a_directory(tmp_path: Path) -> None:
    (first, _), _ = joined(tmp_path, "R", **TWO_NODES, GROUP_RANK="0")
    os.utime(directories.node_record(Path(first), 0), (time.time() - 600,) * 2)
    assert {run for run, _ in joined(tmp_path, "R", **TWO_NODES, GROUP_RANK="1")} == {first}


def test_variables_of_kubeflow_do_not_split_a_job(tmp_path: Path) -> None:
    """They are torchrun's options: each node has its own number, and the ranks inherit them."""
    found = set()
    for node in "01":
        pet = {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "2",
            "PET_NODE_RANK": node,
            "PET_MASTER_ADDR": "train-0",
            "PET_MASTER_PORT": "29500",
        }
        found |= {run for run, _ in joined(tmp_path, "R", **TWO_NODES, **pet, GROUP_RANK=node)}
    assert found == {str(tmp_path / "R")}


def test_a_wrapper_script_around_each_rank_does_not_split_the_job(tmp_path: Path) -> None:
    """The launcher is the nearest ancestor without the rank's variables, not the parent."""
    answers = together(tmp_path, CLAIM, "R", wrap=True, MASTER_PORT="29500")
    assert answers == [str(tmp_path / "R")] * 2


def test_many_jobs_before_this_one_do_not_make_its_ranks_disagree(tmp_path: Path) -> None:
    records = tmp_path / "reports" / ".jobs"
    records.mkdir(parents=True)
    # 1.2 MB: the old format, one file of which the first MiB was read
    (records / ".jobs.lock").write_text("".join(f"{k:016x} {'y' * 1000}\n" for k in range(1200)))
    assert len(claims(tmp_path, "", 4, TORCHELASTIC_RUN_ID="a")) == 1


def test_a_decision_is_made_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        script = "import sys; from pathlib import Path; from distdiag.recorder import run_claim\n"
        script += "print(run_claim.decide(Path(sys.argv[1]), sys.argv[2]))"
        env = clean_env(tmp_path / "home", {"PYTHONPATH": str(REPOSITORY)})

        def one(k: int) -> str:
            command = [sys.executable, "-c", script, str(tmp_path / "decision"), f"process {k}"]
            return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout

        assert len(set(pool.map(one, range(8)))) == 1
    assert [p.name for p in tmp_path.iterdir() if p.name != "home"] == ["decision"]


def test_the_socket_of_a_rank_fits_into_a_socket_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x" * 300)
    run_dir = tmp_path / ("deep/" * 40)
    run_dir.mkdir(parents=True)
    found = run_claim.claim_rank(str(run_dir), "job", 0, 1)
    try:
        assert len(str(found.pages / "r4095.sock")) <= 107
    finally:
        directories.remove(found.pages)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, 0),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8"}, 0),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1"}, 0),  # one task, which spawns 8 ranks
        ({"RANK": "5", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}, 0),  # no node number
    ],
)
def test_the_ranks_of_this_node_are_counted_by_the_launcher_that_numbers_nodes(
    env: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for v in LAUNCHERS for n in v]:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert run_claim.local_world_size(5 if "5" in env.values() else 0, 8) == expected


def test_a_launchers_variable_that_is_no_number_does_not_stop_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for v in LAUNCHERS for n in v]:
        monkeypatch.delenv(name, raising=False)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "²")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert session.from_environment() == (3, 4, 3)
    assert run_claim.local_ranks(4) == 4
