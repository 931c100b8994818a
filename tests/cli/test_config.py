"""`[tool.distdiag]`: option > variable > file > default, and a file with faults costs one line."""

from __future__ import annotations

import grp
import os
import pwd
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distdiag import settings
from distdiag.cli import main
from distdiag.cli.config import command
from distdiag.monitor.__main__ import kept_bytes, nodes_port
from distdiag.store.writer import KEEP_BYTES
from tests.jobs import ONE_RANK, clean_env, start
from tests.report.runs import STRAGGLER, make_run


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty home, without our variables, and leave the environment as it was."""
    for s in settings.SETTINGS.values():
        if s.variable:
            monkeypatch.setenv(s.variable, "")  # so that a later change is undone
            monkeypatch.delenv(s.variable)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def project(folder: Path, table: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pyproject.toml"
    path.write_text(f'[project]\nname = "x"\n\n[tool.distdiag]\n{table}\n\n[tool.other]\nkeep = "1"\n')
    return path


def config(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return (setting -> (value, origin), the lines on stderr)."""
    assert main(["config", *options]) == 0
    out, err = capsys.readouterr()
    rows = [line.split(maxsplit=1) for line in out.splitlines()[1:]]
    return {name: tuple(rest.rsplit(maxsplit=1)) for name, rest in rows}, err.splitlines()  # type: ignore[misc]


def test_each_origin_is_shown_in_the_declared_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = project(tmp_path / "repo", 'keep = "500M"\nquiet = true\nrun-dir = "out/run"\nend-hangs-s = 90\nname = "a"')
    (tmp_path / "repo" / "src").mkdir()
    monkeypatch.chdir(tmp_path / "repo" / "src")
    monkeypatch.setenv("DISTDIAG_QUIET", "0")
    shown, errors = config(capsys, "--name", "mine")
    assert errors == []
    assert shown == {
        "run-dir": (f"{tmp_path}/repo/out/run", f"{path}:7"),
        "name": ("mine", "option"),
        "keep": ("500M", f"{path}:5"),
        "quiet": ("0", "DISTDIAG_QUIET"),
        "share": ("false", "default"),
        "tape": ("false", "default"),
        "metrics": ("off", "default"),
        "nodes-port": ("any", "default"),
        "end-hangs-s": ("90", f"{path}:8"),
        "keep-secrets": ("false", "default"),
        "fail-on": ("error", "default"),
    }


@pytest.mark.parametrize(
    ("table", "warning"),
    [
        ("kep = 1", ":5: unknown setting 'kep': did you mean 'keep'?"),
        ("run_dir = 'x'", ":5: unknown setting 'run_dir': did you mean 'run-dir'?"),
        ("zzz = 1", ":5: unknown setting 'zzz'; known: run-dir, name, keep"),
        ("keep = 'little'", ':5: keep must be a size of at least 1M, e.g. "500M"'),
        ("quiet = 'yes'", ":5: quiet must be true or false"),
        ("end-hangs-s = nan", ":5: end-hangs-s must be a number of seconds"),
        ("metrics = 'nowhere:x:y'", ':5: metrics must be a port, "HOST:PORT" or "otlp", with the extra fleet'),
        ("fail-on = 'info'", ':5: fail-on must be "error", "warning" or "never"'),
        ("run-dir = [[[]]]", ":5: run-dir must be a path"),
        ("keep = ", " is not read: Invalid value (at line 5"),
        ('"\\u001b[31m" = 1', "unknown setting '\\x1b[31m'"),
    ],
)
def test_a_fault_in_the_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str, warning: str
) -> None:
    project(tmp_path, table)
    shown, errors = config(capsys)
    assert len(errors) == 1 and errors[0].startswith("distdiag: warning: ") and warning in errors[0]
    assert {origin for _, origin in shown.values()} == {"default"}


def test_every_option_of_a_recorded_launch_is_a_setting() -> None:
    options = {option.opts[0].removeprefix("--") for option in command.params}
    assert len(options) > 6 and options <= set(settings.SETTINGS)


def test_several_faults_are_one_line_at_a_launch(tmp_path: Path) -> None:
    project(tmp_path, "kep = 1\nquit = 2\nname = 'good'")
    file = settings.read(tmp_path)
    assert file.values == {"name": "good"}
    assert file.warning().endswith("did you mean 'keep'? (and 1 more: `distdiag config`)")


def test_the_nearest_table_counts_up_to_the_repository_or_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "home"
    monkeypatch.setenv("HOME", str(folder))
    home = project(folder, "name = 'home'")
    project(tmp_path, "name = 'above home'")
    inner = folder / "repo" / "a" / "b"
    inner.mkdir(parents=True)
    assert settings.read(inner).path == home
    (folder / "repo" / "pyproject.toml").write_text("[tool.black]\n# no distdiag here\n")
    assert settings.read(inner).path == home
    (folder / "repo" / ".git").mkdir()
    assert settings.read(inner).path is None
    assert settings.read(project(inner, "name = 'b'").parent).values == {"name": "b"}


@pytest.mark.parametrize("content", [b"\xff\xfe[tool.distdiag]", b"[tool.distdiag]\nx = " + b"[" * 5000, b"tool = 1 # distdiag",
                                     b"tool.distdiag = 3", b"[[tool.distdiag]]\nkeep = 1", b"\0distdiag"])  # fmt: skip
def test_a_broken_file_gives_defaults(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pyproject.toml").write_bytes(content)
    assert settings.read(tmp_path).values == {}


def test_what_is_no_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pyproject.toml")
    assert settings.read(tmp_path) == settings.File()
    os.unlink(tmp_path / "pyproject.toml")
    (tmp_path / "pyproject.toml").mkdir()
    assert settings.read(tmp_path) == settings.File()
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert settings.read() == settings.File()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("user", [0, 54_321])
def test_a_file_that_another_user_can_write_is_not_used(
    user: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by root either, whose commands it would steer: where they write, what they serve, whom they end."""
    path = project(tmp_path, "share = true")

    def warning(owner: int, group: int, mode: int) -> str:
        os.chown(path, owner, group)
        path.chmod(mode)
        file = settings.read(tmp_path)
        assert bool(file.values) != bool(file.warning())
        return file.warning()

    monkeypatch.setattr(os, "geteuid", lambda: user)
    for owner in {0, user}:
        assert warning(owner, owner, 0o644) == "" and warning(owner, 0, 0o664) == ""
        assert "can be written by a group" in warning(owner, 54_322, 0o664)
        assert "can be written by every user" in warning(owner, owner, 0o666)
    assert "belongs to uid 54322" in warning(54_322, 54_322, 0o644)
    link = tmp_path / "below" / "pyproject.toml"
    link.parent.mkdir()
    assert warning(user, user, 0o644) == ""
    link.symlink_to(path)
    assert settings.read(link.parent).values
    os.chown(link, 54_322, 54_322, follow_symlinks=False)
    assert "belongs to uid 54322" in settings.read(link.parent).warning()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_users_own_group_may_write_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of Debian and Fedora: each user has a group, and the umask is 002."""
    path = project(tmp_path, "share = true")
    os.chown(path, 54_321, 54_323)
    path.chmod(0o664)
    monkeypatch.setattr(os, "geteuid", lambda: 54_321)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: pwd.struct_passwd(("ann", "", uid, 54_323, "", "/", "")))
    for members, used in (([], True), (["ann"], True), (["ann", "bob"], False)):
        monkeypatch.setattr(grp, "getgrgid", lambda gid, m=members: grp.struct_group(("ann", "", gid, m)))
        assert bool(settings.read(tmp_path).values) == used


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_not_parsed(tmp_path: Path) -> None:
    path = project(tmp_path, "a" + ".a" * 100_000 + " = 1")  # tomllib takes minutes for it
    os.chown(path, 54_322, 54_322)
    began_s = time.process_time()
    assert "belongs to uid 54322" in settings.read(tmp_path).warning() and time.process_time() - began_s < 5


def test_options_and_variables_come_before_the_file(tmp_path: Path) -> None:
    project(
        tmp_path,
        "quiet = true\ntape = true\nkeep = '3M'\nname = 'file'\nkeep-secrets = true\nend-hangs-s = 5\nfail-on = 'never'",
    )
    file = settings.read(tmp_path)
    options = {"quiet": False, "tape": False, "keep": "7M", "name": None, "share": False, "run_dir": None}
    environ = {"DISTDIAG_QUIET": "0", "DISTDIAG_END_HANGS_S": "9"}
    settings.fill(options, file, environ)
    assert options == {"quiet": False, "tape": True, "keep": "7M", "name": "file", "share": False, "run_dir": None}
    assert environ == {"DISTDIAG_QUIET": "0", "DISTDIAG_END_HANGS_S": "9", "DISTDIAG_KEEP_SECRETS": "1"}


def test_readers_use_the_run_and_the_threshold_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warned = type(STRAGGLER)(kind="straggler", cause="data", severity="warning", culprits=(1,), message="slow")
    make_run(tmp_path / "out" / "run", findings=(warned,))
    path = project(tmp_path, 'run-dir = "out/run"\nfail-on = "warning"')
    assert main(["diagnose"]) == 1
    assert main(["diagnose", "--fail-on", "error"]) == 0, "the option comes first"
    path.write_text("[tool.distdiag]\nfail-on = 3\n")
    capsys.readouterr()
    assert main(["diagnose", str(tmp_path / "out" / "run")]) == 0
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "kept"),
    [("500M", 500 * 2**20), ("104857600", 104857600), ("little", KEEP_BYTES), ("9", KEEP_BYTES), ("", KEEP_BYTES)],
)
def test_a_wrong_size_in_the_variable_does_not_end_the_monitor(
    monkeypatch: pytest.MonkeyPatch, given: str, kept: int
) -> None:
    monkeypatch.setenv("DISTDIAG_KEEP_BYTES", given)
    assert kept_bytes() == kept


@pytest.mark.job
@pytest.mark.parametrize("broken", [False, True])
def test_a_launch_uses_the_file_and_survives_a_broken_one(tmp_path: Path, broken: bool) -> None:
    project(tmp_path, "keep = " if broken else 'run-dir = "kept"\nname = "mine"')
    (tmp_path / "train.py").write_text("print('trained')")
    with start([sys.executable, "-m", "distdiag.run", "train.py"], cwd=tmp_path, env=ONE_RANK) as job:
        assert job.wait() == 0, job.tail()
        assert job.stdout() == "trained\n"
        assert job.stderr().count("distdiag: warning: ") == int(broken)
    assert (tmp_path / "kept").is_dir() is not broken
    assert (tmp_path / "reports").is_dir() is broken


def test_without_the_word_in_the_file_no_toml_is_parsed(tmp_path: Path) -> None:
    """A rank reads the file before its script: it must not pay for files of other tools."""
    (tmp_path / "pyproject.toml").write_text("[tool.black]\n")
    program = "import sys; from distdiag import settings; settings.read(); print('tomllib' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=clean_env(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.stdout == "False\n", ended.stderr


@pytest.mark.parametrize(
    ("given", "port"), [("29777", 29777), ("0", 0), ("", 0), ("70000", 0), ("0000029777", 0), ("any", 0), ("-1", 0)]
)
def test_a_port_that_is_none_ends_no_monitor(given: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTDIAG_NODES_PORT", given)
    assert nodes_port() == port


def test_the_port_of_the_file_reaches_the_options_of_a_launch(tmp_path: Path) -> None:
    project(tmp_path, "nodes-port = 29777")
    options: dict[str, object] = {"nodes_port": None}
    settings.fill(options, settings.read(tmp_path), {})
    assert options == {"nodes_port": 29777}
    project(tmp_path, "nodes-port = 70000")
    assert settings.read(tmp_path).values == {} and settings.read(tmp_path).warnings
