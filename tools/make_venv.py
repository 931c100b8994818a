"""Make or refresh an environment; standard library only, as it runs before anything is installed.

`.venv` takes the torch that the machine has (2.10 or newer): it sees it through `--system-site-packages` or, if that torch is in another
virtual environment, through a .pth file. Otherwise it gets `DEFAULT_TORCH`.

TORCH names another version: `2.15.0`, `2.10.*`, or what pip takes, `torch==2.13.0 --index-url …`. It gets its own environment
(`.venv-torch-2.15.0`, named in the Makefile), so that a switch installs nothing again, and takes the machine's torch only if that is
the version.

If the environment is up to date, no network is used.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / (os.environ.get("VENV") or ".venv")
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".installed"
OLDEST_TORCH = (2, 10)
# The package index has the newest release as a CUDA build only: 3 GB to download, 5.4 GB installed, without a GPU, too. A first
# `make test` must take minutes, so it installs the release of which build machines keep the CPU wheel (0.2 GB); .ci/run and the
# matrix test both.
DEFAULT_TORCH = "2.13.0"
NEWEST_TORCH = "2.15.0"
NAMED_TORCH = os.environ.get("TORCH", "").strip()

LOOPS = ("accelerate",)  # optional; it replaces torch's loaders, also for the Trainer of transformers
_COMMANDS = {"ruff": "ruff", "pyright": "pyright", "import-linter": "lint-imports"}  # package: command
# The version that pip knows: a wheel of the package index is 2.15.0 where torch.__version__ is 2.15.0+cu132.
_ASK_TORCH = "import importlib.metadata, os, torch; print(importlib.metadata.version('torch'), os.path.dirname(os.path.dirname(torch.__file__)))"


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - started with whatever `python3` is
        return fail(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}", "make venv PYTHON=python3.11")
    try:
        version, requirement = wanted_torch()
    except ValueError:
        return fail(
            f"TORCH={NAMED_TORCH!r} names no version",
            f"make venv TORCH={NEWEST_TORCH}, TORCH='2.10.*' or TORCH=torch for the newest",
        )
    wanted = fingerprint()
    if PYTHON.exists() and STAMP.exists() and STAMP.read_text() == wanted:
        return 0
    print(
        f"making {VENV.name} with Python {sys.version.split()[0]}: some minutes, if torch must be installed …",
        flush=True,
    )
    STAMP.unlink(missing_ok=True)
    try:
        create(version)
        seen = find_torch(str(PYTHON), version)
        if seen is None:
            pip(*requirement)
            seen = find_torch(str(PYTHON))
        elif not Path(seen[1]).is_relative_to(VENV):
            print(f"using the torch that is there: {seen[0]} in {seen[1]}", flush=True)
        extra: list[str] = []
        if seen is not None:  # no requirement below may replace it
            fixed = VENV / "torch-constraint.txt"
            fixed.write_text(f"torch=={seen[0]}\n")
            extra = ["-c", str(fixed)]
        constraints = ROOT / "constraints.txt"
        # pyright needs node; its own fallback fetches one at the first run, which would be a network call in `make check`
        node = [] if shutil.which("node") else ["pyright[nodejs]"]
        install = ["-e", f"{ROOT}[test,all]", *node, *extra]
        try:
            pip("-c", str(constraints), *install)
        except subprocess.CalledProcessError:
            print("the versions in constraints.txt are not to be had here; installing the newest allowed", flush=True)
            pip(*install)
        # packages of the outer environment were not installed again, so their commands are missing in .venv/bin
        if missing := [p for p, command in _COMMANDS.items() if not (VENV / "bin" / command).exists()]:
            pip("--ignore-installed", "--no-deps", "-c", str(constraints), *missing)
    except subprocess.CalledProcessError as e:
        return fail(
            f"`{' '.join(map(str, e.cmd))}` ended with {e.returncode}",
            "the first set-up needs a package index (PIP_INDEX_URL) and Python's venv module (apt-get install python3-venv)",
        )
    try:
        pip("-c", str(constraints), *LOOPS, *extra)
    except subprocess.CalledProcessError:
        print(f"without {', '.join(LOOPS)}: what is tested with its loops is skipped", flush=True)
    STAMP.write_text(wanted)
    return 0


def fingerprint() -> str:
    """Return a hash of what the environment was made of and where: another checkout, dependency or C code requires a new one; a
    linter's settings do not."""
    import tomllib  # not in the Pythons that `main` refuses

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    what = [project.get("build-system"), project.get("project"), project.get("tool", {}).get("setuptools")]
    compiled = sorted(ROOT.glob("distdiag/**/*.[ch]"))
    texts = "".join((ROOT / name).read_text() for name in ("constraints.txt", "setup.py") if (ROOT / name).exists())
    made_of = repr((*what, LOOPS)) + texts + "".join(f.read_text() for f in compiled)
    return f"{hashlib.sha256(made_of.encode()).hexdigest()} {NAMED_TORCH or DEFAULT_TORCH} {ROOT}\n"


def wanted_torch() -> tuple[str | None, list[str]]:
    """Return the version (None: any new enough) that the environment must have, and what pip installs if it is missing.

    Raises:
        ValueError: TORCH is neither a version, nor `torch==VERSION` or `torch`, with options for pip.
    """
    if not NAMED_TORCH:
        return None, [f"torch=={DEFAULT_TORCH}"]
    name, *options = NAMED_TORCH.split()
    if name == "torch":
        return "newest", ["--upgrade", name, *options]
    version = name.removeprefix("torch==")
    if not re.fullmatch(r"\d+(\.\w+)*(\.\*)?(\+\w+)?", version):
        raise ValueError(name)
    return version, [f"torch=={version}", *options]


def find_torch(python: str, wanted: str | None = None) -> tuple[str, str] | None:
    """Return version and site-packages of the torch that `python` imports, if it is new enough and the version wanted."""
    try:
        answer = subprocess.run([python, "-c", _ASK_TORCH], capture_output=True, text=True, cwd="/", check=False)
    except OSError:
        return None
    if answer.returncode != 0 or not answer.stdout.strip():
        return None
    version, where = answer.stdout.split(maxsplit=1)
    if wanted is not None and not any(fnmatch.fnmatchcase(v, wanted) for v in (version, version.partition("+")[0])):
        return None  # `newest` matches none: only pip knows which that is
    if tuple(int("".join(filter(str.isdigit, p)) or 0) for p in version.split(".")[:2]) < OLDEST_TORCH:
        return None
    return version, where.strip()


def create(version: str | None) -> None:
    """Create an empty environment that sees the machine's torch if that is the version wanted; an existing one is kept."""
    if PYTHON.exists():
        return
    torch = find_torch(sys.executable, version)
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    if torch is None:
        subprocess.run(command, check=True)
        return
    subprocess.run([*command, "--system-site-packages"], check=True)
    if find_torch(str(PYTHON), version) is None:
        # `python` is itself a virtual environment: --system-site-packages looks only at its base
        site = subprocess.run(
            [PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
        (Path(site) / "torch_of_outer_environment.pth").write_text(torch[1] + "\n")


def pip(*arguments: str) -> None:
    env = os.environ.copy()
    if NAMED_TORCH:
        # A machine may cap torch (PIP_CONSTRAINT, `constraint` in pip.conf). The version that somebody names here wins: an empty file
        # replaces both, while the index and the certificates of pip.conf stay in force.
        env["PIP_CONSTRAINT"] = os.devnull
    subprocess.run(
        [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", *arguments],
        check=True,
        cwd=ROOT,
        env=env,
    )


def fail(message: str, hint: str) -> int:
    print(f"make_venv: error: {message}\nhint: {hint}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
