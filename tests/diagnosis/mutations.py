"""Mutations of healthy histories: labelled cases for the choice of the culprit, as many as wanted.

A training program is run by the model in `programs` after one event (a call, a send) of one rank was dropped, doubled, swapped with the next one, moved
to another line, given another argument, or made the last one. Who is to blame is known; the diagnosis sees the snapshot only.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from distdiag.diagnosis.model.snapshot import Call, Life, Model, Snapshot, Step
from tests.diagnosis.programs import Job, Op, Tape, run, snapshot

GROUPS = ("world", "metrics")  # of the same ranks
KINDS = ("drop", "double", "swap", "line", "root", "shape", "dtype", "end", "peer", "unsent")
MESH = {"world": (0, 1, 2, 3), "tensor 0": (0, 1), "tensor 1": (2, 3), "data 0": (0, 2), "data 1": (1, 3)}


@dataclass(frozen=True)
class Case:
    """One mutated program."""

    name: str
    mutation: str
    rank: int
    job: Job


def training(rng: random.Random, ranks: int) -> list[list[Op]]:
    """Return the healthy programs of a job: every rank makes the same calls, but for the peers of its messages."""
    layers, validation, epochs = rng.randint(1, 4), rng.randint(1, 5), rng.randint(3, 5)
    steps, metrics, ddp = rng.randint(6, 14), rng.choice((0, 1, 3)), rng.random() < 0.5
    ring, rooted = rng.random() < 0.3, rng.random() < 0.5
    team = rng.choice(GROUPS)  # of the metrics
    sizes = [rng.choice((16, 64, 300)) for _ in range(layers)]
    out: list[list[Op]] = [[] for _ in range(ranks)]

    def every(op: Op) -> None:
        for program in out:
            program.append(op)

    every(Op("broadcast", "world", root=0, shape=900, line=10))
    for _ in range(epochs):
        for step in range(steps):
            if ddp:
                every(Op("broadcast", "world", root=0, shape=8, line=20, hidden=True))
            for layer, size in enumerate(sizes):
                every(Op("all_reduce", "world", shape=size, line=21 if ddp else 22 + layer, hidden=ddp))
            if ring:
                for rank, program in enumerate(out):
                    right, left = (rank + 1) % ranks, (rank - 1) % ranks
                    program.append(Op("send", "world", peer=right, asynchronous=True, name=step, shape=32, line=30))
                    program += [Op("recv", "world", peer=left, shape=32, line=31), Op("wait", name=step)]
            if metrics and step % metrics == 0:
                every(Op("all_reduce", team, shape=2, line=33))
            every(Op("work", step=True))
        for _ in range(validation):
            every(Op("all_reduce", "world", shape=3, line=40))
        if rooted:
            every(Op("broadcast", "world", root=0, shape=1, line=41))
        every(Op("barrier", "world", line=42))
    return out


def mesh(rng: random.Random) -> list[list[Op]]:
    """Return the healthy programs of a mesh of two by two ranks: tensor-parallel layers, gradients over the data-parallel ranks, or over all."""
    steps, layers, epochs, over_all = rng.randint(3, 12), rng.randint(1, 3), rng.randint(2, 4), rng.random() < 0.5
    out: list[list[Op]] = [[] for _ in range(4)]
    for rank, program in enumerate(out):
        tensor, data = f"tensor {rank // 2}", "world" if over_all else f"data {rank % 2}"
        for _ in range(epochs):
            for step in range(steps):
                program += [Op("all_reduce", tensor, shape=64, line=20 + layer) for layer in range(layers)]
                program.append(Op("all_reduce", data, shape=300, line=30))
                program += [Op("all_reduce", "world", shape=1, line=33)] * (step % 3 == 0)
                program.append(Op("work", step=True))
            program.append(Op("barrier", "world", line=42))
    return out


def mutated(rng: random.Random, programs: list[list[Op]], mutation: str) -> tuple[list[list[Op]], int, int, str] | None:
    """Return (programs, rank, index of the event, how its history ends); None if no event fits."""
    rank = rng.randrange(len(programs))
    mine = list(programs[rank])
    fits = [i for i, op in enumerate(mine) if len(mine) // 3 < i < len(mine) - 8 and _fits(mine, i, mutation)]
    if not fits:
        return None
    at = rng.choice(fits)
    op, end = mine[at], str(Life.FINISHED)
    match mutation:
        case "drop":
            del mine[slice(*_unit(mine, at, mutation))]
        case "unsent":
            mine = [
                op
                for i, op in enumerate(mine)
                if i != at and not (op.kind == "wait" and op.name == mine[at].name and i == at + 2)
            ]
        case "double":
            first, last = _unit(mine, at, mutation)
            mine[first:first] = mine[first:last]
        case "swap":
            mine[at], mine[at + 1] = mine[at + 1], mine[at]
        case "line":
            mine[at] = replace(op, kind="barrier" if op.kind != "barrier" else "all_gather", line=70)
        case "root":
            mine[at] = replace(op, root=1)
        case "shape":
            mine[at] = replace(op, shape=op.shape + 5)
        case "dtype":
            mine[at] = replace(op, dtype="float64")
        case "peer":
            mine[at] = replace(op, peer=next(q for q in range(len(programs)) if q not in (op.peer, rank)))
        case "end":
            del mine[at:]
    return [mine if q == rank else p for q, p in enumerate(programs)], rank, at, end


def _unit(program: list[Op], i: int, mutation: str) -> tuple[int, int]:
    """Return the bounds of the calls that go together: of DDP's, a backward or a forward; a backward needs its forward."""
    first, last = i, i + 1
    while program[i].hidden and program[first - 1].hidden:
        first -= 1
    while program[i].hidden and program[last].hidden:
        last += 1
    if program[i].hidden and (program[i].kind == "broadcast") == (mutation == "double"):
        return (first, first + 1) if mutation == "double" else (first + 1, last)
    return first, last


def _fits(program: list[Op], i: int, mutation: str) -> bool:
    op, after = program[i], program[i + 1]
    collective = op.kind not in ("work", "wait", "send", "recv")
    match mutation:
        case "drop" | "double":
            return collective
        case "line":
            return collective and not op.hidden
        case "swap":
            plain = (
                collective and after.kind not in ("work", "wait", "send", "recv") and not (op.hidden or after.hidden)
            )
            return plain and (op.kind, op.shape, op.line) != (after.kind, after.shape, after.line)
        case "root":
            return op.kind == "broadcast" and not op.hidden
        case "shape" | "dtype":
            return op.kind == "all_reduce" and not op.hidden
        case "peer":
            return op.kind == "recv"
        case "unsent":
            return op.kind == "send"
    return op.kind == "work"


def cases(seed: int, count: int, of_mesh: bool = False) -> Iterator[Case]:
    """Yield `count` mutated jobs that get stuck, or whose ranks end while others wait."""
    rng = random.Random(seed)
    made, kinds = 0, KINDS[:4] if of_mesh else KINDS
    while made < count:
        ranks, mutation = 4 if of_mesh else rng.choice((2, 2, 3, 4)), kinds[made % len(kinds)]
        if mutation == "peer" and ranks == 2:
            continue
        found = mutated(rng, mesh(rng) if of_mesh else training(rng, ranks), mutation)
        if found is None:
            continue
        programs, rank, at, end = found
        job = Job(
            programs,
            MESH if of_mesh else dict.fromkeys(GROUPS, tuple(range(ranks))),
            [end if q == rank else Life.FINISHED for q in range(ranks)],
        )
        run(job, Tape([rng.randrange(1 << 16) for _ in range(20_000)]))
        if all(waiting is None for waiting in job.waiting):
            continue  # it mixes silently until the end
        made += 1
        yield Case(f"{mutation}-{seed}-{made}-r{rank}at{at}", mutation, rank, job)


def seen(job: Job) -> Snapshot:
    """Return what the recorder shows of a job: DDP's own calls are counted, not listed."""
    bare = snapshot(job)
    states = {}
    for rank, state in bare.ranks.items():
        done = job.programs[rank][: job.pc[rank]]
        hidden = [i for i in job.issued[rank] if i.op.hidden]
        times = {id(i): i.at for i in job.issued[rank]}
        calls = tuple(
            _timed(call, times[id(i)]) for call, i in zip(state.calls, job.issued[rank], strict=True) if not i.op.hidden
        )
        step_ends = [job.times[rank][n] for n, op in enumerate(done) if op.step]
        forwards = sum(i.op.kind == "broadcast" for i in hidden)
        backwards = sum(kind == "all_reduce" for kind, _ in itertools.groupby(i.op.kind for i in hidden))
        waiting = job.waiting[rank]
        blocked = _timed(state.blocked, waiting.at) if state.blocked is not None and waiting is not None else None
        site = blocked.site if blocked is not None else (state.calls[-1].site if state.calls else None)
        states[rank] = msgspec.structs.replace(
            state,
            calls=calls[-64:],
            blocked=blocked,
            visits={group: _visits(job, rank, group) for group in GROUPS},
            step=len(step_ends),
            steps=tuple(_step(n + 1, t) for n, t in enumerate(step_ends))[-64:],
            models=(
                Model(group="world", parameters=4, find_unused=False, forwards=forwards, synced_backwards=backwards),
            )
            if hidden
            else (),
            phase={"broadcast": "forward", "all_reduce": "backward"}[waiting.op.kind]
            if waiting and waiting.op.hidden
            else state.phase,
            current_site=site,
            user_stack=(site,) if site is not None else (),
            ended_s=90.0 if state.life in (Life.FINISHED, Life.CRASHED, Life.KILLED) else None,
        )
    return msgspec.structs.replace(bare, ranks=states)


def _visits(job: Job, rank: int, group: str) -> dict[str, tuple[int, ...]]:
    """Return the numbers of the last four visits of each line, the first of consecutive calls only."""
    out: dict[str, list[int]] = {}
    before = None
    for issued in job.issued[rank]:
        if issued.op.kind in ("send", "recv") or issued.op.hidden:
            before = None
            continue
        if issued.op.group != group:
            continue
        if issued.op.line != before:
            out.setdefault(f"job.py:{issued.op.line}", []).append(issued.number)
        before = issued.op.line
    return {site: tuple(numbers[-4:]) for site, numbers in out.items()}


def _timed(call: Call, at: int) -> Call:
    return msgspec.structs.replace(
        call, entered_s=float(at) / 1000, completed_s=None if call.completed_s is None else at / 1000 + 1e-4
    )


def _step(number: int, at: int) -> Step:
    return Step(
        step=number, end_s=at / 1000, step_ms=10, data_ms=1, forward_ms=3, backward_ms=3, optimizer_ms=1, wait_ms=1,
        other_ms=1, ready_s=None, batch=8, samples=8, loss=None,
    )  # fmt: skip
