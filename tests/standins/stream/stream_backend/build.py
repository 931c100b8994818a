"""Builds the stand-in's libraries once per version of the sources and of torch, into a cache that all jobs share."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = ("backend.cpp", "device.hpp", "work.hpp", "driver.c", "shim/nlohmann/json.hpp", "build.py")
DRIVER = {"libcuda.so.1": "LIBCUDA", "libcudart.so.12": "LIBCUDART", "libnccl.so.2": "LIBNCCL"}


class NoCompiler(RuntimeError):
    """There is no C++ compiler, or it cannot build the stand-in."""


def _torch() -> tuple[Path, str]:
    """Return folder and version of torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NoCompiler("torch is not installed")
    folder = Path(spec.origin).parent
    return folder, (folder / "version.py").read_text()


def folder() -> Path:
    """Return the folder of these sources' libraries, built or not."""
    digest = hashlib.sha256(sys.version.encode() + _torch()[1].encode())
    for name in SOURCES:
        digest.update((HERE / name).read_bytes())
    # not $HOME: tests start their jobs with an empty one
    return Path(pwd.getpwuid(os.getuid()).pw_dir, ".cache", "distdiag-standins", digest.hexdigest()[:16])


def build() -> Path:
    """Return the folder of the built libraries; builds them if missing.

    Raises:
        NoCompiler: no compiler, or it failed; the message says which.
    """
    done = folder()
    if (done / "complete").exists():
        return done
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise NoCompiler("no C++ compiler (g++)")
    done.parent.mkdir(parents=True, exist_ok=True)
    with (done.parent / f"{done.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (done / "complete").exists():
            done.mkdir(exist_ok=True)
            _compile(compiler, done)
            (done / "complete").touch()
    return done


def _compile(compiler: str, out: Path) -> None:
    for library, define in DRIVER.items():
        # libcudart finds libcuda by the symbol, once both are loaded
        _run(compiler, "-x", "c", "-O1", "-fPIC", "-shared", f"-D{define}", f"-Wl,-soname,{library}",
             str(HERE / "driver.c"), "-o", str(out / library))  # fmt: skip
    torch, _ = _torch()
    include = torch / "include"
    _run(
        compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-DNDEBUG", "-DFMT_HEADER_ONLY=1", "-D_GLIBCXX_USE_CXX11_ABI=1",
        "-I", str(HERE / "shim"), "-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include"),
        "-isystem", sysconfig.get_paths()["include"], str(HERE / "backend.cpp"),
        "-L", str(torch / "lib"), f"-Wl,-rpath,{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10",
        "-o", str(out / "_stream.so"),
    )  # fmt: skip


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise NoCompiler(f"{command[0]} failed: {result.stderr[-3000:]}")


if __name__ == "__main__":
    print(build())
