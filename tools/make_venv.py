"""Make or refresh .venv; standard library only, as it runs before anything is installed.

A torch that the machine already has (2.10 or newer) is reused: the environment sees it through `--system-site-packages` or, if it is in
another virtual environment, through a .pth file. Otherwise one named version is installed: a bare `torch` may bring gigabytes of
CUDA packages to a machine without a GPU.

If .venv is up to date, no network is used.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".installed"
TORCH = os.environ.get("TORCH") or "torch==2.13.0"
OLDEST_TORCH = (2, 10)

_COMMANDS = {"ruff": "ruff", "pyright": "pyright", "import-linter": "lint-imports"}  # package: command
_ASK_TORCH = "import os, torch; print(torch.__version__, os.path.dirname(os.path.dirname(torch.__file__)))"


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - started with whatever `python3` is
        return fail(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}", "make venv PYTHON=python3.11")
    wanted = fingerprint()
    if PYTHON.exists() and STAMP.exists() and STAMP.read_text() == wanted:
        return 0
    print(f"making {VENV.name} with Python {sys.version.split()[0]} …", flush=True)
    STAMP.unlink(missing_ok=True)
    try:
        create()
        constraints = ROOT / "constraints.txt"
        extra: list[str] = []
        seen = find_torch(str(PYTHON))
        if seen is None:
            pip(*TORCH.split())
        elif not Path(seen[1]).is_relative_to(VENV):
            print(f"using the torch that is there: {seen[0]} in {seen[1]}", flush=True)
            fixed = VENV / "torch-constraint.txt"
            fixed.write_text(f"torch=={seen[0]}\n")
            extra = ["-c", str(fixed)]
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
    made_of = repr(what) + texts + "".join(f.read_text() for f in compiled)
    return f"{hashlib.sha256(made_of.encode()).hexdigest()} {TORCH} {ROOT}\n"


def find_torch(python: str) -> tuple[str, str] | None:
    """Return version and site-packages of the torch that `python` imports, if it is new enough."""
    try:
        answer = subprocess.run([python, "-c", _ASK_TORCH], capture_output=True, text=True, cwd="/", check=False)
    except OSError:
        return None
    if answer.returncode != 0 or not answer.stdout.strip():
        return None
    version, where = answer.stdout.split(maxsplit=1)
    if tuple(int("".join(filter(str.isdigit, p)) or 0) for p in version.split(".")[:2]) < OLDEST_TORCH:
        return None
    return version, where.strip()


def create() -> None:
    """Create an empty .venv that sees the machine's own torch, if any; an existing one is kept."""
    if PYTHON.exists():
        return
    torch = find_torch(sys.executable)
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    if torch is None:
        subprocess.run(command, check=True)
        return
    subprocess.run([*command, "--system-site-packages"], check=True)
    if find_torch(str(PYTHON)) is None:
        # `python` is itself a virtual environment: --system-site-packages looks only at its base
        site = subprocess.run(
            [PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
        (Path(site) / "torch_of_outer_environment.pth").write_text(torch[1] + "\n")


def pip(*arguments: str) -> None:
    subprocess.run(
        [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", *arguments],
        check=True,
        cwd=ROOT,
    )


def fail(message: str, hint: str) -> int:
    print(f"make_venv: error: {message}\nhint: {hint}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
