"""Finds the log files of a job: plain or compressed text of any encoding; and the ranks that their names show."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from distdiag import guard
from distdiag.sources.dumps.content import DumpFile
from distdiag.sources.dumps.files import find
from distdiag.sources.dumps.naming import name_ranks
from distdiag.sources.logs.lines import BLOCK_BYTES, encoding_of
from distdiag.sources.logs.message import Role
from distdiag.sources.logs.patterns import TABLE
from distdiag.sources.logs.writers import is_record, record_of
from distdiag.terms.ranks import sets_of
from distdiag.terms.untrusted import bounded, is_rank

MAX_FILES = 1 << 16
MAX_NULS = 64 << 20  # bytes at the begin of a file that a rotation has left empty
_SUFFIXES = {".log", ".txt", ".out", ".err", ".stderr", ".stdout", ".jsonl", ".ndjson"}
_LOG_NAMES = {"stdout", "stderr", "output", "error", "dmesg", "messages", "syslog"}
_JOB_OUTPUT = re.compile(r"\.[eo]\d{2,}")  # PBS, SGE: stderr and stdout of a job
# of a .txt that is a log, not a README
_TEXT_NAME = re.compile(r"log|out|err|rank|slurm|nccl|train|job|node|worker|pod")
_OF_A_NODE = bounded(r"(?:node|host|pod|worker|machine|server)[-_.]?\d", re.IGNORECASE)  # a number, not of a rank
_WORKER = bounded(r"attempt_(\d+)/(\d+)/[^/]+$")  # the log directory of torchrun: the number is the local rank
_JSON = re.compile(rb"\s{0,99}[{\[]\s{0,99}[\"{\[}\]]")
_TEXT = bytes(range(32, 127)) + b"\n\r\t\x1b\b\f"


def find_logs(given: Sequence[str]) -> list[Path]:
    """Return the log files among `given` and below its directories; a file that was named itself counts if it holds text."""
    files = list(find(map(Path, given)))
    named = {path for path, by_name in files if by_name}
    candidates = [path for path, by_name in files if by_name or _may_be_a_log(path)]
    logs = guard.matching(itertools.islice(candidates, MAX_FILES), lambda path: no_log(path, path in named) is None)
    # an empty one among others says that its process wrote nothing
    return [*logs, *filter(is_empty, candidates)] if logs else []


def left_out(given: Sequence[str], logs: Iterable[Path], shown: int = 5) -> list[str]:
    """Return one line on the files among `given` that are not read as logs, each with the reason; empty if all are."""
    known = set(logs)
    others = [(path, named) for path, named in find(map(Path, given)) if path not in known]
    if not others:
        return []

    def judged(announce: guard.Announce) -> bytes:  # in a child: a head alone can ask for gigabytes
        announce("what is no log", 0)
        return json.dumps([no_log(path, named) or "too many files" for path, named in others[:shown]]).encode()

    try:
        reasons = json.loads(guard.run(judged, guard.Limits()))
    except guard.Died:
        reasons = ["cannot be read"] * len(others[:shown])
    texts = [f"{path} ({reason})" for (path, _), reason in zip(others, reasons, strict=False)]
    more = f", and {len(others) - shown:,} more" if len(others) > shown else ""
    return [f"not read as a log: {', '.join(texts)}{more}"]


def _may_be_a_log(path: Path) -> bool:
    return _log_name(path.name.lower()) or path.suffix == ".txt"


def no_log(path: Path, named: bool) -> str | None:
    """Return why a file is not read as a log; None if it is. A file that was named itself may have any name."""
    if not named and not _may_be_a_log(path):
        return "it is not named like a log"
    like = named or _log_name(path.name.lower())
    reason = _not_text(path)
    return "it has no message that distdiag knows" if reason is None and not like and not _has_message(path) else reason


def is_empty(path: Path) -> bool:
    try:
        return path.stat().st_size == 0
    except OSError:
        return False


@lru_cache(MAX_FILES)
def _log_name(name: str) -> bool:
    """True if a file, by its name in lower case, is a log."""
    suffix = Path(name).suffix
    if suffix in (".gz", ".bz2", ".xz"):
        name = name[: -len(suffix)]
    if name in _LOG_NAMES:
        return True
    suffixes = Path(name).suffixes
    numbered = bool(suffixes) and suffixes[-1][1:].isdigit()  # train.log.3
    last = suffixes[-2 if numbered and len(suffixes) > 1 else -1] if suffixes else ""
    if (numbered and len(suffixes) == 1) or _JOB_OUTPUT.fullmatch(last):  # workerlog.3, job.e12345
        return True
    return last in _SUFFIXES and (last != ".txt" or _TEXT_NAME.search(name) is not None)


def _has_message(path: Path) -> bool:
    """True if the begin of a file has a line that shows a failure: a text file of any name may be a log."""
    text = _head(path).decode("utf-8", "replace")
    rows = (row for row in TABLE if row.needle in text)
    failures = (row for row in rows if row.name == "host_report" or row.role not in (Role.FACT, Role.HINT))
    return any(row.regex.search(line) for row in failures for line in text.splitlines() if row.needle in line)


def _head(path: Path) -> bytes:
    """Return the first bytes of a file; without NUL bytes around them: a file that was cut while it was written begins with
    such, one whose node crashed ends with them."""
    try:
        with guard.opened(path) as f:
            head = f.read(BLOCK_BYTES)
            while head and not head.strip(b"\0") and f.tell() < MAX_NULS:
                head = f.read(BLOCK_BYTES)
    except (OSError, *guard.DAMAGED):
        return b""
    cut = encoding_of(head) == "utf-8" and _may_be_a_log(path)  # any other file that begins with NUL bytes is no text
    return head.strip(b"\0") if cut else head


def _not_text(path: Path) -> str | None:
    """Return why a file cannot be a log; None for text in any encoding that is not one JSON document."""
    head = _head(path)
    if not head:
        return "empty, or cannot be read"
    if encoding_of(head) != "utf-8":
        return None
    if head[:1] == b"\x80" or head[257:262] == b"ustar":
        return "no text"
    if _is_document(head):
        return "a JSON document"
    # a few are in logs: the message of a loader's worker that a signal ends has a NUL byte
    controls = len(head.translate(None, _TEXT + bytes(range(128, 256))))
    return None if controls <= len(head) // 20 else "no text"


def _is_document(head: bytes) -> bool:
    """True for one JSON document; False for text, also after a document, and for JSON records of which each has its line."""
    if not _JSON.match(head):
        return False
    line, _, rest = head.lstrip().partition(b"\n")
    text = line.decode("utf-8", "replace")
    if is_record(text) or (rest.strip() and record_of(text)):
        return False
    whole = head.decode("utf-8", "replace").lstrip()
    try:
        _, end = json.JSONDecoder().raw_decode(whole)
    except (ValueError, RecursionError):
        return True
    return not whole[end:].strip()


def ranks_of(paths: Iterable[Path]) -> dict[Path, int]:
    """Return the rank of each file with one rank's lines: by `rank3` in its name or path, or by its number among others."""
    files = [DumpFile(path) for path in dict.fromkeys(paths)]
    out: dict[Path, int] = {}
    workers = {f.path: int(m[2]) for f in files if (m := _WORKER.search(f.path.as_posix()))}
    if len(set(workers.values())) == len({p.parent for p in workers}):  # else of several nodes: local ranks only
        out = workers
    name_ranks(files)
    named = {f.path: f.rank for f in files if f.rank is not None and is_rank(f.rank)}
    # of files whose names differ in a number only
    numbers = sets_of((_shape(path), rank) for path, rank in named.items())
    consecutive_ones = {s for s, ranks in numbers.items() if len(ranks) > 1 and max(ranks) <= len(ranks)}
    for path, rank in named.items():
        consecutive = _shape(path) in consecutive_ones
        by_number = path not in out and consecutive and not _OF_A_NODE.search(path.name)
        if by_number or re.search(r"rank[-_.=]?\d", str(path), re.IGNORECASE):
            out[path] = rank
    return out


def _shape(path: Path) -> str:
    """Return a file's name and folder without their numbers: the logs of ranks differ in nothing else."""
    return re.sub(r"\d+", "#", f"{path.parent.name}/{path.name}")
