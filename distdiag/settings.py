"""`[tool.distdiag]` in pyproject.toml: what a project sets once. An option comes first, then a variable, then the file.

The file is read when a recorded launch starts (`distdiag.run`, in each rank before the script) and by the
readers' command line; never by a process that DISTDIAG=1 records. What is wrong with the file costs one line
and the setting.
"""

from __future__ import annotations

import difflib
import grp
import os
import pwd
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from distdiag.errors import DistdiagError
from distdiag.files import user_name
from distdiag.terms.metrics_targets import parse_metrics
from distdiag.terms.units import parse_keep

NAME, TABLE = "pyproject.toml", "tool.distdiag"
MOST_BYTES = 1 << 20
_HEADER = re.compile(r"\s*\[([^\[\]]+)\]")
_KEY = re.compile(r"\s*[\"']?([\w-]+)[\"']?\s*=")


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value and value.isprintable() else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _accepted(check: Callable[[str], object]) -> Callable[[Any], str | None]:
    def parse(value: Any) -> str | None:
        try:
            check(str(value))
        except DistdiagError:
            return None
        return str(value)

    return parse


def _seconds(value: Any) -> str | None:
    return f"{value:g}" if type(value) in (int, float) and 0 <= value < 1e9 else None


def _port(value: Any) -> int | None:
    return value if type(value) is int and 0 < value < 65536 else None


def _threshold(value: Any) -> str | None:
    return value if value in ("error", "warning", "never") else None


class Setting(NamedTuple):
    """One setting: its key in the file, which is also the name of its option."""

    name: str
    default: str  # as `distdiag config` shows it
    wants: str  # a valid value, in words
    parse: Callable[[Any], Any]  # returns None if the value is not valid
    variable: str = ""


SETTINGS = {
    s.name: s
    for s in (
        Setting("run-dir", "./reports/<time>-<name>", "a path", _text, "DISTDIAG_RUN_DIR"),
        Setting("name", "the script's", "a text", _text),
        Setting("keep", "2G", 'a size of at least 1M, e.g. "500M"', _accepted(parse_keep), "DISTDIAG_KEEP_BYTES"),
        Setting("quiet", "false", "true or false", _flag, "DISTDIAG_QUIET"),
        Setting("share", "false", "true or false", _flag, "DISTDIAG_SHARE"),
        Setting("tape", "false", "true or false", _flag, "DISTDIAG_TAPE"),
        Setting(
            "metrics",
            "off",
            'a port, "HOST:PORT" or "otlp", with the extra fleet installed',
            _accepted(parse_metrics),
            "DISTDIAG_METRICS",
        ),
        Setting("nodes-port", "any", "a port from 1 to 65535", _port, "DISTDIAG_NODES_PORT"),
        Setting("end-hangs-s", "never", "a number of seconds", _seconds, "DISTDIAG_END_HANGS_S"),
        Setting("keep-secrets", "false", "true or false", _flag, "DISTDIAG_KEEP_SECRETS"),
        Setting("fail-on", "error", '"error", "warning" or "never"', _threshold),
    )
}


class File(NamedTuple):
    """The settings of one file: only valid ones, as options and variables have them."""

    path: Path | None = None
    values: dict[str, Any] = {}  # noqa: RUF012  never changed
    lines: dict[str, int] = {}  # noqa: RUF012
    warnings: tuple[str, ...] = ()

    def warning(self) -> str:
        """Return what is wrong with the file as one line; empty: nothing."""
        more = f" (and {len(self.warnings) - 1} more: `distdiag config`)" if len(self.warnings) > 1 else ""
        return f"distdiag: warning: {self.warnings[0]}{more}" if self.warnings else ""


class Shown(NamedTuple):
    """One line of `distdiag config`."""

    name: str
    value: str
    origin: str


def read(start: Path | None = None) -> File:
    """Return the nearest file with our table, from `start` (default: here) up to the repository's root or home."""
    try:
        for folder in _folders(start or Path.cwd()):
            if (found := _read(folder / NAME)) is not None:
                return found
    except (OSError, RecursionError):  # the working directory is gone; a file of nested brackets
        pass
    return File()


def _folders(start: Path) -> Iterator[Path]:
    home = Path(os.path.expanduser("~"))
    for folder in (start, *start.parents):
        yield folder
        if folder == home or (folder / ".git").exists():
            return


def _read(path: Path) -> File | None:
    """Return the settings of this file; None if it has no table of ours."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            return None
        data = file.read(MOST_BYTES)
    if b"distdiag" not in data:
        return None
    if who := _other_writer(path, about):  # nor parsed: a hostile megabyte takes minutes
        return File(path, warnings=(f"{path} {who}: its [{TABLE}] is not used",))
    import tomllib

    try:
        text = data.decode()
        table = tomllib.loads(text).get("tool", {}).get("distdiag")
    except (ValueError, AttributeError) as e:  # not TOML, not UTF-8; `tool` is no table
        reason = " ".join(str(e).split())[:200]
        return File(path, warnings=(f"{path} is not read: {reason}",)) if b"tool.distdiag" in data else None
    if table is None:
        return None
    if not isinstance(table, dict):
        return File(path, warnings=(f"{path}: {TABLE} is no table",))
    return _checked(path, table, _lines(text))


def _other_writer(path: Path, found: os.stat_result) -> str:
    """Return who else than this user and root decides what is in the file; empty: nobody.

    As OpenSSH judges ~/.ssh/config: a group that only this user is in, the default of many systems, may write it.
    """
    for uid in (found.st_uid, path.lstat().st_uid):  # of the file, and of a link to it
        if uid not in (0, os.geteuid()):
            return f"belongs to {user_name(uid)}"
    if found.st_mode & stat.S_IWOTH:
        return "can be written by every user"
    if found.st_mode & stat.S_IWGRP and not _private(found.st_gid):
        return "can be written by a group"
    return ""


def _private(gid: int) -> bool:
    """True for root's group, and for the group of this user's name and no other member."""
    if gid == 0:
        return True
    try:
        name, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


def _checked(path: Path, table: Mapping[str, Any], lines: dict[str, int]) -> File:
    values, warnings = {}, []
    for key, given in table.items():
        where = f"{path}:{lines[key]}" if key in lines else str(path)
        setting = SETTINGS.get(key)
        if setting is None:
            near = difflib.get_close_matches(key, SETTINGS, n=1)
            hint = f": did you mean '{near[0]}'?" if near else f"; known: {', '.join(SETTINGS)}"
            warnings.append(f"{where}: unknown setting '{key[:100]}'{hint}")
        elif (value := setting.parse(given)) is None:
            warnings.append(f"{where}: {key} must be {setting.wants}")
        else:
            values[key] = str(path.parent / value) if key == "run-dir" else value
    return File(path, values, lines, tuple(warnings))


def _lines(text: str) -> dict[str, int]:
    """Return the line of each key of our table; tomllib does not return them."""
    found, inside = {}, False
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            inside = header[1].replace(" ", "") == TABLE
        elif inside and (key := _KEY.match(line)):
            found.setdefault(key[1], number)
    return found


def fill(options: dict[str, Any], file: File, environ: Any = None) -> None:
    """Put into the options of a launch, and the environment of its monitor, what neither has and the file sets.

    Args:
        options: By the names of click's parameters; those that were not given are None or False.
    """
    environ = os.environ if environ is None else environ
    for name, value in file.values.items():
        option, variable = name.replace("-", "_"), SETTINGS[name].variable
        if environ.get(variable):
            continue
        if option in options:
            options[option] = options[option] or value
        elif variable:  # there is no such option: the monitor reads the variable
            environ[variable] = str(int(value)) if isinstance(value, bool) else value


def shown(options: Mapping[str, Any], file: File, environ: Mapping[str, str]) -> list[Shown]:
    """Return every setting with its value and where that is from."""
    out = []
    for name, s in SETTINGS.items():
        if options.get(name.replace("-", "_")):
            value, origin = options[name.replace("-", "_")], "option"
        elif s.variable and environ.get(s.variable):
            value, origin = environ[s.variable], s.variable
        elif name in file.values:
            line = file.lines.get(name)
            value, origin = file.values[name], f"{file.path}" + (f":{line}" if line else "")
        else:
            value, origin = s.default, "default"
        out.append(Shown(name, str(value).lower() if isinstance(value, bool) else str(value), origin))
    return out
