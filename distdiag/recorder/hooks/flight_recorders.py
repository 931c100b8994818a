"""torch's flight recorders in this process: which of them record a group, and their newest counters.

gloo and the old NCCL group record into one of their own, and number groups themselves. From torch 2.15 on every other backend,
nccl2 among them, has one under its name, which a `FlightRecorderHook` of the group writes. That numbers groups in the order in
which they got their hooks, and operations from 0, messages among them; it skips what a CUDA graph captures. It knows that an
operation is complete only if the backend reports it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from distdiag.recorder.hooks.wrapping import around
from distdiag.recorder.state import guarded
from distdiag.recorder.torch_names import private

c10d: Any = _distributed_c10d  # their names differ between versions of torch
dist: Any = distributed_c10d
SECOND_RECORDER = 1 << 32
DEFAULT = "fr"  # gloo's, which torch's functions read if no backend is named
HAS_HOOKS = hasattr(dist, "_maybe_attach_flight_recorder")  # then torch's functions take the name of a backend
# other recorders, each with a function: NCCL's
OWN = [m[1] for name in dir(c10d) if (m := re.fullmatch(r"_dump_(\w+)_trace_json", name)) and m[1] != DEFAULT]

# backends that write a recorder of their own; the default is torch 2.15's
_RECORD_THEMSELVES = private(dist, "_FR_SELF_RECORDING_BACKENDS", ("nccl", "gloo")) if HAS_HOOKS else ()
_numbers: dict[int, int] = {}  # by id of a ProcessGroup: number of its hook
_attached = 0


class Hook(NamedTuple):
    """What torch's hook records of one group."""

    backend: str
    number: int
    reports_completion: bool

    def counters(self) -> tuple[int, int] | None:
        """Return how many operations of the group are recorded, and how many of them are complete (-1: not known)."""
        counters = _pg_status(lambda: c10d._dump_fr_trace_json(False, False, backend=self.backend)).get(
            str(self.number)
        )
        if counters is None:
            return None
        completed = int(counters["last_completed_collective"]) + 1
        return int(counters["last_enqueued_collective"]) + 1, completed if self.reports_completion else -1


def install() -> None:
    """Follow the hooks that torch attaches to new groups; called once per process."""
    if not HAS_HOOKS:
        return

    @guarded
    def attached(pg: Any, _out: Any = None, error: BaseException | None = None) -> None:
        global _attached
        if error is not None:
            return
        _numbers.pop(id(pg), None)  # of an earlier group at this address
        if pg in of_world("pg_flight_recorder_hooks", {}):
            _numbers[id(pg)] = _attached
            _attached += 1

    for pg in of_world("pg_flight_recorder_hooks", {}):
        attached(pg)
    dist._maybe_attach_flight_recorder = around(
        dist._maybe_attach_flight_recorder, lambda pg, *_args, **_kwargs: pg, attached
    )


def implementations(pg: Any) -> tuple[str, ...]:
    """Return the names of the backends that serve a group, by which torch names their recorders: `nccl` may be `nccl2`."""
    found = []
    for device in devices(pg):
        try:
            found.append(str(of_torch(pg, "_get_backend")(device).name()))
        except (RuntimeError, AttributeError, TypeError, NotImplementedError):
            continue
    return tuple(dict.fromkeys(found))


def hook_of(pg: Any, backends: Collection[str]) -> Hook | None:
    """Return the hook that records a group; None if its backends (`implementations`) do that themselves, or torch has no hooks."""
    number = _numbers.get(id(pg))
    recorded = [name for name in backends if name not in _RECORD_THEMSELVES] if HAS_HOOKS else []
    if number is None or len(recorded) != 1:
        return None
    return Hook(recorded[0], number, bool(of_torch(pg, "supports_completion_hooks")))


def of_torch(pg: Any, name: str, otherwise: Any = None) -> Any:
    """Return an attribute of a group as torch's class has it: for that of a subclass, code of the job may run, in any thread."""
    found = vars(c10d.ProcessGroup).get(name)
    return otherwise if found is None else found.__get__(pg)


def of_world(name: str, otherwise: Any) -> Any:
    """Return one of torch's tables of all groups, as it is now; `otherwise` if this torch does not have it."""
    return getattr(getattr(dist, "_world", None), name, otherwise)


def devices(pg: Any) -> list[Any]:
    try:
        return list(of_torch(pg, "_device_types", ()))
    except RuntimeError:
        return []


def own_status() -> dict[str, Any]:
    """Return newest enqueued / completed collective of the groups that their backends record, by the recorder's own number of a group.

    A job may have NCCL and gloo at once, each with its own recorder and numbers: those of the second recorder
    are moved by `SECOND_RECORDER`.
    """
    out: dict[str, Any] = {}
    for name in (*OWN, DEFAULT):
        status = _pg_status(lambda name=name: getattr(c10d, f"_dump_{name}_trace_json")(False, False))
        above = SECOND_RECORDER if out else 0
        out |= {str(int(number) + above): counters for number, counters in status.items()}
    return out


def _pg_status(dump: Callable[[], bytes]) -> dict[str, Any]:
    try:
        return json.loads(dump()).get("pg_status", {})
    except (RuntimeError, ValueError, AttributeError):
        return {}
