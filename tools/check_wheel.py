"""`make wheel-check`: build the sdist and the wheel, install the wheel outside the checkout, run every command there.

Usage: python tools/check_wheel.py [--from-index] [--keep DIRECTORY]

The wheel gets its own environment. Its dependencies are linked from the environment that runs this script, and
only those that the wheel declares: first without extras, so without torch (logs and dumps are read, and whatever needs torch says so in
one line), then with torch (a recorded job), again without (its run is read), and with all extras. `--from-index` downloads them instead.
"""

from __future__ import annotations

import argparse
import importlib.metadata as metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

import jsonschema
from jsonschema.exceptions import best_match
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 1_550_000  # of the wheel: `uvx distdiag diagnose job.log` is a matter of seconds
DEADLINE_S = 180  # for each command; the slowest takes about ten seconds on an idle machine
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "reports", "*.egg-info", "*.so", "__pycache__", ".*_cache", ".hypothesis"
)

# Enough steps for the live readers; the job is ended after them.
JOB = """\
import os, pathlib, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
deadline = time.monotonic() + 120
for step in range(100_000):
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
    stop = torch.tensor([float(pathlib.Path("stop").exists() or time.monotonic() > deadline)])
    dist.all_reduce(stop)
    if stop.item():
        break
dist.destroy_process_group()
"""


class Failed(Exception):
    """A check failed; the text is printed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--from-index", action="store_true", help="download the dependencies instead of linking them")
    parser.add_argument("--keep", metavar="DIRECTORY", type=Path, help="copy the sdist and the wheel here")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="wheel-check-") as made:
        try:
            check(Path(made), options.from_index, options.keep)
        except Failed as e:
            print(f"wheel-check: error: {e}", file=sys.stderr)
            return 1
    print(f"wheel: ok ({time.monotonic() - began:.0f} s)")
    return 0


def check(work: Path, from_index: bool, keep: Path | None) -> None:
    sdist, wheel = build(work)
    check_contents(sdist, wheel)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for built in (sdist, wheel):
            shutil.copy(built, keep)
    if (size := wheel.stat().st_size) > MOST_BYTES:
        raise Failed(f"the wheel has {size:,} bytes, more than {MOST_BYTES:,}")
    env = Environment(work / "env", wheel, from_index)
    env.install()
    check_without_torch(env)
    env.install("probe")  # torch
    check_recording(env)
    if not from_index:  # pip takes nothing back
        env.install()
    check_readers(env)
    env.install("all")
    check_commands(env)


# -- build ------------------------------------------------------------------------------------------------------


def build(work: Path) -> tuple[Path, Path]:
    """Build the sdist from a copy of the checkout, and the wheel from the sdist; return both paths."""
    source = work / "source"
    shutil.copytree(ROOT, source, ignore=NOT_SOURCE, symlinks=True)
    dist = work / "dist"
    dist.mkdir()
    backend = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
    call([sys.executable, "-c", backend, "build_sdist", str(dist)], cwd=source)
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as tar:
        tar.extractall(work / "unpacked", filter="data")
    (unpacked,) = (work / "unpacked").iterdir()
    call([sys.executable, "-c", backend, "build_wheel", str(dist)], cwd=unpacked)
    (wheel,) = dist.glob("*.whl")
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """Check that every source file is in both archives, nothing else is in the wheel, and the hooks are compiled if possible."""
    package = {str(p.relative_to(ROOT)) for p in (ROOT / "distdiag").rglob("*") if p.suffix in DATA}
    package.add("_distdiag_autoload.py")  # torch imports it: outside the package
    probes = {f"distdiag/{p.relative_to(ROOT)}" for p in (ROOT / "probes").rglob("*.py")}
    with zipfile.ZipFile(wheel) as z:
        found = {n for n in z.namelist() if ".dist-info/" not in n}
    compiled = {n for n in found if n.endswith(".so")}
    man = {n for n in found if n.endswith(".data/data/share/man/man1/distdiag.1")}
    if not man:
        raise Failed("the man page is not in the wheel")
    if missing := sorted((package | probes) - found):
        raise Failed(f"not in the wheel: {', '.join(missing)}")
    if extra := sorted(found - package - probes - compiled - man):
        raise Failed(f"in the wheel by mistake: {', '.join(extra)}")
    if has_compiler() and not any("/_hot." in n for n in compiled):
        raise Failed("a C compiler and Python.h are here, and the wheel has no compiled hooks")
    with tarfile.open(sdist) as tar:
        shipped = {n.partition("/")[2] for n in tar.getnames()}
    c_code = {str(p.relative_to(ROOT)) for p in (ROOT / "distdiag").rglob("*.[ch]")}
    wanted = (
        package
        | c_code
        | {f"probes/{Path(p).name}" for p in probes}
        | {"LICENSE", "README.md", "setup.py", "man/distdiag.1"}
    )
    wanted |= {str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.*")} | {"mkdocs.yml", "CITATION.cff"}
    if missing := sorted(wanted - shipped):
        raise Failed(f"not in the sdist: {', '.join(missing)}")


DATA = {".py", ".sql", ".j2", ".tcss", ".typed"}


def has_compiler() -> bool:
    """True if setup.py compiles the hooks here."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return False
    header = Path(sysconfig.get_path("include")) / "Python.h"
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    return header.exists() and shutil.which(compiler) is not None


# -- install ----------------------------------------------------------------------------------------------------


class Environment:
    """A virtual environment with only the wheel and its requirements."""

    def __init__(self, path: Path, wheel: Path, from_index: bool) -> None:
        self.path = path
        self.wheel = wheel
        self.from_index = from_index
        self.run_dir = path.parent / "cwd" / "reports" / "wheel"
        self.cwd = path.parent / "cwd"
        self.cwd.mkdir()
        without = [] if from_index else ["--without-pip"]
        call([sys.executable, "-m", "venv", *without, str(path)], cwd=self.cwd)
        hidden = ("DISTDIAG_", "PYTHON", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "VIRTUAL_ENV")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(hidden)} | {"OMP_NUM_THREADS": "1"}

    def install(self, extra: str = "") -> None:
        """Install the wheel with what it requires, and with one extra."""
        if self.from_index:
            name = f"{self.wheel}[{extra}]" if extra else str(self.wheel)
            call([str(self.path / "bin/python"), "-m", "pip", "install", "-q", name], cwd=self.cwd)
            return
        if not (self.path / "bin/distdiag").exists():
            pip = [sys.executable, "-m", "pip", "--python", str(self.path / "bin/python"), "install", "-q"]
            call([*pip, "--no-deps", "--no-index", "--disable-pip-version-check", str(self.wheel)], cwd=self.cwd)
        linked = self.path / "dependencies"
        shutil.rmtree(linked, ignore_errors=True)
        linked.mkdir()
        for distribution in declared(self.wheel, extra):
            link(distribution, linked)
        site = next((self.path / "lib").glob("python3*/site-packages"))
        (site / "dependencies.pth").write_text(f"{linked}\n")

    def run(self, *arguments: str, code: int | tuple[int, ...] = 0, shows: str = "") -> str:
        """Run a command of the environment; fail unless its exit code is `code` and its output has `shows`."""
        command = [str(self.path / "bin" / arguments[0]), *arguments[1:]]
        shown = " ".join(arguments)
        done = subprocess.run(
            command, cwd=self.cwd, env=self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        allowed = (code,) if isinstance(code, int) else code
        out = done.stdout + done.stderr
        if done.returncode not in allowed or "Traceback" in out or shows not in out:
            raise Failed(f"`{shown}` ended with {done.returncode}, expected {allowed} and {shows!r}:\n{out}")
        print(f"  ok  {shown}", flush=True)
        return done.stdout


def declared(wheel: Path, extra: str) -> list[metadata.Distribution]:
    """Return the distributions that the wheel requires with this extra, directly and indirectly."""
    with zipfile.ZipFile(wheel) as z:
        text = z.read(next(n for n in z.namelist() if n.endswith(".dist-info/METADATA"))).decode()
    requires = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("Requires-Dist:")]
    found: dict[str, metadata.Distribution] = {}
    queue = [(Requirement(r), ("", extra)) for r in requires]
    seen = set()
    while queue:
        requirement, wanted = queue.pop()
        if requirement.marker and not any(requirement.marker.evaluate({"extra": e}) for e in wanted):
            continue
        if (key := (requirement.name.lower(), frozenset(requirement.extras))) in seen:
            continue
        seen.add(key)
        if requirement.name == "distdiag":  # all = distdiag[tui,report,…]
            queue += [(Requirement(r), tuple(requirement.extras)) for r in requires]
            continue
        try:
            distribution = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:
            raise Failed(f"{requirement.name} is not in {sys.prefix}: `make venv`, or --from-index") from None
        found[requirement.name.lower()] = distribution
        queue += [(Requirement(r), ("", *requirement.extras)) for r in distribution.requires or ()]
    return list(found.values())


def link(distribution: metadata.Distribution, directory: Path) -> None:
    """Link every top-level file and folder of an installed distribution into `directory`."""
    for name in {Path(f).parts[0] for f in distribution.files or ()} - {"..", "__pycache__"}:
        source = Path(str(distribution.locate_file(name)))
        if source.exists() and not (directory / name).exists():
            (directory / name).symlink_to(source)


# -- run --------------------------------------------------------------------------------------------------------


LOG = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/app/train.py", line 31, in <module>
[rank1]:     loss = model(batch)
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
"""


def check_without_torch(env: Environment) -> None:
    """Check what the base install reads, and that whatever needs torch says so."""
    (env.cwd / "job.py").write_text(JOB)
    (env.cwd / "job.log").write_text(LOG)
    env.run("distdiag", "--version")
    env.run("distdiag", "config", shows="keep")
    env.run("distdiag", "skill", shows="# Reading distdiag")
    env.run("distdiag", "completion", "bash", shows="_DISTDIAG_COMPLETE=bash_complete")
    if not (env.path / "share/man/man1/distdiag.1").exists():
        raise Failed("`man distdiag` finds no page in the environment")
    where = env.run("python", "-c", "import distdiag; print(distdiag.__file__)").strip()
    if not Path(where).is_relative_to(env.path):
        raise Failed(f"the environment imports distdiag from {where}")
    env.run("distdiag", "diagnose", "job.log", code=1, shows="rank 1")
    dumps = env.cwd / "dumps"
    dumps.mkdir()
    recorded = json.loads((ROOT / "tests/sources/golden/torch-2.15.0-nccl2.json").read_text())
    for rank, dump in recorded["order"].items():
        (dumps / f"rank{rank}.json").write_text(json.dumps(dump))
    from_json(env.run("distdiag", "diagnose", "dumps", "--json", code=1), "distdiag.findings/1")
    if not env.from_index:
        env.run("distdiag", "run", "job.py", code=2, shows="needs torch")
        env.run("distdiag", "probe", "allreduce", code=2, shows="needs torch")
        env.run("python", "-m", "distdiag.train", code=2, shows="needs torch")
        env.run("distdiag", "doctor", code=1, shows="torch")


def check_recording(env: Environment) -> None:
    """Check a recorded job, and the readers while it runs."""
    if has_compiler():
        env.run("python", "-c", "from distdiag.recorder.fast.accounts import COMPILED; assert COMPILED")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "distdiag.run"]
    log = env.cwd / "job.out"
    with log.open("wb") as out:
        job = subprocess.Popen(
            [str(env.path / "bin/python"), *launcher, "--run-dir", str(env.run_dir), "job.py"],
            cwd=env.cwd, env=env.env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            wait_for_steps(env, job, log)
            env.run("distdiag", "dump", shows="saved:")
            from_json(env.run("distdiag", "dump", "--json", "--no-save"), "distdiag.stacks/1")
            env.run("distdiag", "diagnose", shows="2 of 2 ranks")
            (env.cwd / "stop").touch()
            if job.wait(DEADLINE_S) or "Traceback" in log.read_text():
                raise Failed(f"the recorded job ended with {job.returncode}:\n{log.read_text()}")
            print("  ok  torchrun -m distdiag.run job.py", flush=True)
        finally:
            if job.poll() is None:
                job.kill()


def check_readers(env: Environment) -> None:
    """Check the readers of an ended run without extras; screen, report and server name the missing packages."""
    env.run("distdiag", "diagnose", shows="ended: ")
    env.run("distdiag", "tui", "--once", shows="rank")
    env.run("distdiag", "report", "--format", "text")
    if not env.from_index:  # a package of an extra may be installed anyway
        env.run("distdiag", "tui", code=2, shows="pip install textual")
        env.run("distdiag", "tui", "--web", code=2, shows="pip install textual")
        env.run("distdiag", "report", code=2, shows="matplotlib")
        env.run("distdiag", "mcp", code=2, shows="pip install mcp")


def wait_for_steps(env: Environment, job: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    ask = (
        "import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute('select count(distinct rank) from step')"
        ".fetchone()[0])"
    )
    while True:
        if job.poll() is not None or time.monotonic() > deadline:
            raise Failed(f"the recorded job wrote no step:\n{log.read_text()}")
        if (env.run_dir / "run.db").exists():
            seen = subprocess.run(
                [sys.executable, "-c", ask, str(env.run_dir / "run.db")], capture_output=True, text=True, check=False
            )
            if seen.stdout.strip() == "2":
                return
        time.sleep(0.2)


def check_commands(env: Environment) -> None:
    """Check with all extras: every command on the recorded run."""
    from_json(env.run("distdiag", "diagnose", "--json"), "distdiag.findings/1")
    env.run("distdiag", "tui", "--once", shows="rank")
    from_json(env.run("distdiag", "tui", "--once", "--json"), "distdiag.snapshot/1")
    env.run("distdiag", "report", "-o", "report.html")
    if "<html" not in (env.cwd / "report.html").read_text():
        raise Failed("report.html is no HTML file")
    from_json(env.run("distdiag", "report", "--format", "json"), "distdiag.report/1")
    from_json(env.run("distdiag", "compare", "reports/wheel", "reports/latest", "--json"), "distdiag.compare/1")
    from_json(env.run("distdiag", "doctor", "--json", code=(0, 1)), "distdiag.doctor/1")
    env.run("distdiag", "probe", "list", shows="allreduce")
    quick = ("distdiag", "probe", "allreduce", "--quick", "--nproc", "2", "--json")
    from_json(env.run(*quick, code=(0, 3)), "distdiag.probe/1")
    env.run("distdiag", "mcp", "reports/wheel")  # stdin has ended
    env.run("distdiag", "bench", "faults", "--list", code=2, shows="hint: ")
    env.run("distdiag", "run", "--help", shows="torchrun")
    env.run("python", "-m", "distdiag.train", "--help", shows="--max-steps")


def from_json(text: str, schema: str) -> None:
    """Fail unless `text` is one object that is valid against docs/schemas."""
    path = ROOT / "docs" / "schemas" / (schema.removeprefix("distdiag.").replace("/", "-") + ".json")
    try:
        jsonschema.validate(json.loads(text), json.loads(path.read_text()))
    except jsonschema.ValidationError as e:
        raise Failed(f"not of schema {schema}: {best_match([e]).message}\n{text[:500]}") from None


def call(command: list[str], cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise Failed(f"`{' '.join(command)}` ended with {done.returncode}:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
