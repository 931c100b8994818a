"""A disk that fails: EIO from every write to a run's database and its log, by a preloaded library; this needs no device mapper."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

EIO = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
#include <unistd.h>
static int fails(int fd) {
    char link[64], path[4096];
    const char *flag = getenv("FAILING");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0 || !flag || access(flag, F_OK)) return 0;
    path[n] = 0;
    if (!strstr(path, "run.db")) return 0;
    errno = EIO;
    return 1;
}
#define REAL(type, name, args) ((type (*) args)dlsym(RTLD_NEXT, #name))
ssize_t write(int fd, const void *b, size_t n) { return fails(fd) ? -1 : REAL(ssize_t, write, (int, const void *, size_t))(fd, b, n); }
ssize_t pwrite(int fd, const void *b, size_t n, off_t o) { return fails(fd) ? -1 : REAL(ssize_t, pwrite, (int, const void *, size_t, off_t))(fd, b, n, o); }
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t o) { return fails(fd) ? -1 : REAL(ssize_t, pwrite64, (int, const void *, size_t, off64_t))(fd, b, n, o); }
int fsync(int fd) { return fails(fd) ? -1 : REAL(int, fsync, (int))(fd); }
int fdatasync(int fd) { return fails(fd) ? -1 : REAL(int, fdatasync, (int))(fd); }
"""


def failing_disk(directory: Path, flag: Path) -> dict[str, str]:
    """Return the environment of a process whose disk fails while `flag` exists; skips the test without a compiler."""
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    (directory / "eio.c").write_text(EIO)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "eio.so", "eio.c", "-ldl"], cwd=directory, check=True, timeout=60)
    return {"LD_PRELOAD": str(directory / "eio.so"), "FAILING": str(flag)}
