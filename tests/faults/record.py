"""Record tapes of the collection's jobs, make them small, and judge them again without starting a process."""

from __future__ import annotations

import hashlib
import math
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

import msgspec

from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.tapes.tape import Tape, answers, judge, read_tape, to_bytes
from distdiag.tapes.writer import NAME
from tests.faults.collection import Job

FOLDER = Path(__file__).resolve().parent
TAPES = FOLDER / "tapes"
SUFFIX = ".tape"
ANYWHERE = Path("/collection")  # the folder of the manifest, as tapes have it
LARGEST = 28 << 10  # bytes of a tape in the repository; only if its verdict needs more, it is larger
# seconds between kept snapshots while no finding changes, tried in this order until the tape is small enough
INTERVALS_S = (0.0, 0.5, 1.0, 2.0, 4.0)
BITS = ((16, 24), (24, 30))  # that are kept of a number and of a time in seconds: 0.001 %, and some microseconds
AROUND_S = 1.0  # around a moment every snapshot is kept


def job_hash(job: Job, folder: Path) -> str:
    """Return a hash of the job's file."""
    return hashlib.sha256((folder / job.path).read_bytes()).hexdigest()[:16]


def tape_path(folder: Path, job: Job, backend: str) -> Path:
    return folder / backend / (job.name + SUFFIX)


def finish(job: Job, folder: Path, backend: str, run_dir: Path, work: Path) -> tuple[Tape, bool]:
    """Return the tape of a run of the collection, without this machine's names.

    The second value is True if a replay of the whole tape has the findings of the live run.
    """
    from distdiag.store.reader import open_run

    whole = read_tape(run_dir / NAME)
    with open_run(run_dir) as run:
        live = answers(f for f in run.findings() if f.kind != "recorder")
    same = judge(whole).answers == live
    names = [(str(folder), str(ANYWHERE)), (str(FOLDER.parents[1]), "/checkout"), (str(work), "/work")]
    scrubbed = scrub(whole, [*names, *_installations()])
    expected = judge(scrubbed).answers
    head = msgspec.structs.replace(
        scrubbed.head, job=job.name, backend=backend, job_hash=job_hash(job, folder), expected=expected
    )
    return msgspec.structs.replace(scrubbed, head=head), same


def _installations() -> list[tuple[str, str]]:
    places = {sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), os.path.dirname(os.__file__)}
    torch = sys.modules.get("torch")
    if torch is None:
        import importlib.util

        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin:
            places.add(str(Path(spec.origin).parents[1]))
    return [(place, "/python") for place in sorted(places, key=len, reverse=True)]


def scrub(tape: Tape, names: list[tuple[str, str]]) -> Tape:
    """Return the tape with paths replaced, and without host names."""

    def text(value: str) -> str:
        for old, new in names:
            value = value.replace(old, new)
        return value

    cache: dict[str, str] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            if value not in cache:
                cache[value] = text(value)
            return cache[value]
        if isinstance(value, dict):
            return {walk(k): walk(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [walk(v) for v in value]
        return value

    def whole(snapshot: Snapshot) -> Snapshot:
        values = walk(msgspec.to_builtins(snapshot))
        for state in values["ranks"].values():
            state["host"] = "host"
        return msgspec.convert(values, Snapshot)

    sources = {text(path): source for path, source in tape.sources.items()}
    return msgspec.structs.replace(tape, snapshots=tuple(map(whole, tape.snapshots)), sources=sources)


def small(tape: Tape) -> Tape:
    """Return a tape of at most `LARGEST` bytes, if its verdict allows it: with rounded numbers and fewer snapshots."""
    tape = _rounded(tape)
    for interval_s in INTERVALS_S:
        keep = _kept(tape, interval_s)
        shorter = msgspec.structs.replace(
            tape,
            snapshots=tuple(tape.snapshots[i] for i in keep),
            moments=tuple(n for n, i in enumerate(keep) if i in tape.moments),
        )
        if judge(shorter).answers != tape.head.expected:
            break
        best = shorter
        if len(to_bytes(best)) <= LARGEST:
            break
    return best


def _rounded(tape: Tape) -> Tape:
    """Return the tape with as many bits of each number as its verdict allows: the last ones are noise, and half of its size."""
    for bits, bits_of_times in BITS:

        def walk(value: Any, name: str = "", bits: int = bits, bits_of_times: int = bits_of_times) -> Any:
            if isinstance(value, float):
                return _round(value, bits_of_times if name.endswith("_s") or not name else bits)
            if isinstance(value, dict):
                return {k: walk(v, k if isinstance(k, str) else "") for k, v in value.items()}
            return [walk(v) for v in value] if isinstance(value, (list, tuple)) else value

        snapshots = tuple(msgspec.convert(walk(msgspec.to_builtins(s)), Snapshot) for s in tape.snapshots)
        rounded = msgspec.structs.replace(tape, snapshots=snapshots)
        if judge(rounded).answers == tape.head.expected:
            return rounded
    return tape


def _round(value: float, bits: int) -> float:
    if not math.isfinite(value):
        return value
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * (1 << bits)), exponent - bits)


def _kept(tape: Tape, interval_s: float) -> list[int]:
    times = [s.t_s for s in tape.snapshots]
    near = [times[i] for i in tape.moments]
    kept: list[int] = []
    for i, t_s in enumerate(times):
        last = i == len(times) - 1
        if not kept or last or t_s - times[kept[-1]] >= interval_s or any(abs(t_s - m) <= AROUND_S for m in near):
            kept.append(i)
    return kept


def write(path: Path, tape: Tape) -> int:
    """Write a tape and return its size in bytes."""
    data = to_bytes(tape)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(path)
    return len(data)


def main(given: list[str]) -> None:
    """Write the tapes of the repository again from the whole ones in a folder that `--record` has filled."""
    from tests.faults.replay import tapes

    total = 0
    for path in tapes(Path(given[0])):
        to = TAPES / path.parent.name / path.name
        if not to.exists() or "--all" in given:
            total += write(to, small(read_tape(path)))
    print(f"{total / 1024:.0f} KiB in {TAPES}")


if __name__ == "__main__":
    main(sys.argv[1:])
