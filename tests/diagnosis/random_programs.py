"""Generates random distributed programs from a tape, for the model in `programs`."""

from __future__ import annotations

from dataclasses import replace

from distdiag.diagnosis.model.snapshot import Life
from tests.diagnosis.programs import COLLECTIVES, Job, Op, Tape


def program(tape: Tape) -> Job:
    """Return a job of 2 to 6 ranks: a correct program with up to four faults."""
    n = 2 + tape.pick(5)
    groups = {"world": tuple(range(n))}
    for g in range(tape.pick(3)):
        members = [r for r in range(n) if tape.pick(2)]
        if len(members) >= 2:
            groups[f"g{g}"] = tuple(members)
    names = list(groups)
    programs: list[list[Op]] = [[] for _ in range(n)]
    open_async: list[Op] = []
    for line in range(1, 3 + tape.pick(6)):
        _statement(tape, n, groups, names, programs, open_async, line)
    for op in open_async:
        for r in groups[op.group]:
            if tape.pick(4):
                programs[r].append(Op("wait", name=op.name))
    ends: list[str] = [Life.FINISHED] * n
    for _ in range(tape.pick(5)):
        _fault(tape, n, groups, names, programs, ends)
    return Job(programs, groups, ends)


def _statement(
    tape: Tape,
    n: int,
    groups: dict[str, tuple[int, ...]],
    names: list[str],
    programs: list[list[Op]],
    open_async: list[Op],
    line: int,
) -> None:
    match tape.pick(8):
        case 0 | 1 | 2:
            op = _collective(tape, groups, names, line)
            for r in groups[op.group]:
                programs[r].append(op)
        case 3:
            op = replace(_collective(tape, groups, names, line), asynchronous=True, name=line)
            for r in groups[op.group]:
                programs[r].append(op)
            open_async.append(op)
        case 4:
            a, b = tape.pick(n), tape.pick(n)
            if a != b:
                tag = tape.pick(2)
                programs[a].append(Op("send", "world", peer=b, tag=tag, line=line))
                programs[b].append(Op("recv", "world", peer=None if tape.pick(3) == 0 else a, tag=tag, line=line + 100))
        case 5:  # a ring with isend
            for r in range(n):
                programs[r].append(
                    Op("send", "world", peer=(r + 1) % n, asynchronous=True, name=line, tag=2, line=line)
                )
                programs[r].append(Op("recv", "world", peer=(r - 1) % n, tag=2, line=line + 100))
                programs[r].append(Op("wait", name=line))
        case 6:  # everybody sends to one, who takes them as they come
            to = tape.pick(n)
            for r in range(n):
                if r != to:
                    programs[r].append(Op("send", "world", peer=to, tag=3, line=line))
                    programs[to].append(Op("recv", "world", peer=None, tag=3, line=line + 100))
        case _:
            for r in range(n):
                programs[r].append(Op("work"))


def _collective(tape: Tape, groups: dict[str, tuple[int, ...]], names: list[str], line: int) -> Op:
    kind = COLLECTIVES[tape.pick(4)]
    group = names[tape.pick(len(names))]
    root = groups[group][tape.pick(len(groups[group]))] if kind == "broadcast" else None
    return Op(kind, group, root=root, shape=4 << tape.pick(2), line=line)


def _fault(
    tape: Tape,
    n: int,
    groups: dict[str, tuple[int, ...]],
    names: list[str],
    programs: list[list[Op]],
    ends: list[str],
) -> None:
    r = tape.pick(n)
    mine = programs[r]
    at = tape.pick(max(len(mine), 1))
    match tape.pick(7):
        case 0 if mine:
            del mine[at]
        case 1 if at + 1 < len(mine):
            mine[at], mine[at + 1] = mine[at + 1], mine[at]
        case 2:
            op = _collective(tape, groups, names, 50 + at)
            if r in groups[op.group]:
                mine.insert(at, op)
        case 3 if mine and mine[at].kind in COLLECTIVES:
            op = mine[at]
            changed = (
                {"shape": op.shape + 1},
                {"dtype": "float64"},
                {"kind": COLLECTIVES[tape.pick(4)]},
                {"root": groups[op.group][0]} if op.kind == "broadcast" else {},
            )[tape.pick(4)]
            mine[at] = replace(op, **changed)
            if mine[at].kind == "broadcast" and mine[at].root is None:
                mine[at] = replace(mine[at], root=groups[op.group][0])
        case 4:
            del mine[at:]
            ends[r] = (Life.FINISHED, Life.CRASHED, Life.KILLED, Life.STOPPED)[tape.pick(4)]
        case 5:
            peer = tape.pick(n)
            if peer != r:
                kind = "send" if tape.pick(2) else "recv"
                mine.insert(at, Op(kind, "world", peer=peer, tag=tape.pick(3), asynchronous=not tape.pick(3), line=60))
        case 6 if mine and mine[at].kind == "recv":
            mine[at] = replace(mine[at], peer=None)
