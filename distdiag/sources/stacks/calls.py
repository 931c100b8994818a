"""What a rank does, by its stack alone: in which operation of torch.distributed it is, or what else it waits for."""

from __future__ import annotations

import itertools
import re
from functools import partial

import msgspec

from distdiag.diagnosis.model.snapshot import Call, Site
from distdiag.diagnosis.model.syntax import Source, line_at, no_source
from distdiag.sources.logs.meanings import LOGS
from distdiag.sources.stacks.frames import Frame, Process, Stack
from distdiag.terms.activity import by_frame, by_line, refined
from distdiag.terms.operations import family, op_name
from distdiag.terms.untrusted import visible

DEFAULT_GROUP = "default_pg"
UNKNOWN_GROUP = ""  # such a wait accuses nobody
UNNUMBERED = 1  # stacks have no sequence numbers: each rank is in its newest call of the group, whichever that is
_C10D = "distributed/distributed_c10d.py"
_INIT = {"init_process_group", "new_group", "_new_process_group_helper", "_store_based_barrier", "monitored_barrier"}
_DDP_FORWARD = {"_sync_buffers", "_sync_module_buffers", "_distributed_broadcast_coalesced"}
_DDP_INIT = {"_verify_param_shape_across_processes", "_sync_module_states", "_sync_params_and_buffers"}
# inside c10d, by which the native frames of a user's `work.wait()` show that it is in a collective
_NATIVE_WAIT = re.compile(r"c10d::(?:Work|ProcessGroup|Reducer|broadcast_coalesced)|gloo::")
_NATIVE_STORE = re.compile(r"c10d::\w*Store")
_NATIVE_DEVICE = re.compile(r"cuda(?:Stream|Event|Device)Synchronize|cu(?:Stream|Event|Ctx)Synchronize|hipStreamSync")
_NATIVE_SLEEP = re.compile(r"clock_nanosleep|time_sleep|nanosleep")
_DEVICE = ("cuda/__init__.py", "cuda/streams.py")  # whose `synchronize` waits for the device
# what a thread waits in, and for; a queue is made of locks, or of a pipe
_GENERAL, _SPECIAL = ("lock", "queue", "socket"), ("data", "checkpoint", "worker")
_WAITS = ("lock", "queue")
_NUMBER = re.compile(r"-?\d{1,9}")
_GROUP = "ProcessGroup at 0x"
_GROUPS = re.compile(r"ProcessGroup at 0x|DeviceMesh")  # in local variables


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank is.

    Attributes:
        call: The operation of torch.distributed that it is in; None: in none that its stack shows.
        activity: What it does otherwise: the words of `Where.state`.
        phase: Phase of DDP whose operation the user's line does not name: forward, backward; else empty.
        stack: The user's frames, innermost first.
        names: The integers among their local variables.
        creates: The group that it creates, by torch's local variables: `[0, 1] as number 7`; else empty.
        device: It waits for the device, by its frames or native ones; such a wait spins, and looks busy.
        logs: It logs a value of all ranks (Lightning's `sync_dist`), and waits for them in that.
        inside: The innermost frame, of a library that the user's line has called and that it computes in.
        unsure: True if only native frames can show what it waits for, and there are none.
    """

    site: Site | None
    stack: tuple[Site, ...]
    names: tuple[dict[str, int], ...] = ()
    call: Call | None = None
    activity: str = "user_code"
    phase: str = ""
    creates: str = ""
    device: bool = False
    logs: bool = False
    inside: Site | None = None
    unsure: bool = False


def position(stack: Stack, source: Source = no_source, still: bool = True) -> Position:
    """Return where a thread is.

    Args:
        source: Text of a source file by path, or None if none may be read.
        still: False if it moves or computes; a thread that sleeps in autograd then waits for DDP's gradients.
    """
    users = list(stack.users())
    sites = tuple(f.site for f in users)
    site = sites[0] if sites else None
    names = tuple({n: int(text) for n, text in f.values.items() if _NUMBER.fullmatch(text)} for f in users)
    first = next((i for i, f in enumerate(stack.frames) if users and f is users[0]), len(stack.frames))
    inner = stack.frames[:first]  # of libraries, inside the user's line
    call, phase = _call(inner, users, site, stack, still and stack.idle is not False)
    device = any(map(_NATIVE_DEVICE.search, stack.native))
    device |= any(f.name == "synchronize" and f.in_torch in _DEVICE for f in inner)
    if call is not None:
        return Position(
            site=site, stack=sites, names=names, call=call, activity="waiting", phase=phase, creates=_created(inner),
            device=device, logs=any(f.name in LOGS for f in inner),
        )  # fmt: skip
    unsure = bool(stack.frames) and not stack.native and (stack.frames[0].users or stack.idle is False)
    word = _activity(stack, site, source, device)
    inside = inner[0].site if inner and word == "user_code" else None
    return Position(site=site, stack=sites, activity=word, device=device, inside=inside, unsure=unsure)


class Feeder(msgspec.Struct, frozen=True):
    """The one other thread of a rank that may fill the queue in which its main thread waits."""

    name: str  # as the process calls it; empty where not known
    site: Site | None
    activity: str  # what it does, as in `Position`


def feeder(process: Process, where: Position, source: Source = no_source) -> Feeder | None:
    """Return the thread that a rank's queue waits for: the only other one in the user's code that waits for no lock or queue."""
    if where.activity != "queue":
        return None
    others = [t for t in process.threads if t is not process.judged and any(f.users for f in t.frames)]
    places = ((t.name, position(t, source)) for t in others)
    busy = [Feeder(name, p.site, p.activity) for name, p in places if p.call is None and p.activity not in _WAITS]
    return busy[0] if len(busy) == 1 else None


def _call(
    inner: tuple[Frame, ...], users: list[Frame], site: Site | None, stack: Stack, still: bool
) -> tuple[Call | None, str]:
    """Return the operation that the frames inside the user's line are in, and the phase if DDP issued it."""
    made = partial(Call, seq=UNNUMBERED, site=site)
    for i, f in enumerate(inner):
        if f.in_torch == _C10D and (family(f.name) or f.name in _INIT):
            return _of_c10d(f, inner[i + 1 :], users, site), ""
        if f.in_torch == "distributed/_functional_collectives.py" and family(f.name.removesuffix("_tensor")):
            return made(op=op_name(f.name.removesuffix("_tensor")), group=DEFAULT_GROUP), ""
        if f.in_torch == "distributed/_functional_collectives.py" and f.name == "wait_tensor":
            return made(op="", group=UNKNOWN_GROUP), ""
        if f.in_torch == "nn/parallel/distributed.py" and f.name in _DDP_FORWARD:
            return made(op="broadcast", group=_ddp_group(inner, users), root=0), "forward"
        if f.in_torch == "distributed/utils.py" and f.name in _DDP_INIT:
            return made(op="broadcast", group=_ddp_group(inner, users)), ""
        if f.in_torch == "distributed/rendezvous.py":
            return made(op="init_process_group", group=DEFAULT_GROUP), ""
    waits = any(map(_NATIVE_WAIT.search, stack.native))
    if (waits or still) and inner and inner[0].name == "_engine_run_backward":
        return made(op="all_reduce", group=_ddp_group(inner, users)), "backward"
    return (made(op="", group=_ddp_group(inner, users)), "") if waits else (None, "")


def _of_c10d(f: Frame, callers: tuple[Frame, ...], users: list[Frame], site: Site | None) -> Call:
    op = "init_process_group" if f.name in ("_new_process_group_helper", "_store_based_barrier") else op_name(f.name)
    if op == "init_process_group" and any(c.name == "new_group" for c in callers):
        op = "new_group"
    op = "barrier" if op == "monitored_barrier" else op
    group = _group(f, callers, users)
    if op in ("send", "recv", "isend", "irecv"):
        peer = _number(f, "dst", "src", "group_dst", "group_src")
        return Call(op=op, group=group, site=site, peer=peer, tag=_number(f, "tag") or 0, nth=UNNUMBERED)
    known = family(op)
    root = _number(f, "src", "dst", "group_src", "group_dst") if known is not None and known.rooted else None
    return Call(op=op, group=group, seq=UNNUMBERED, site=site, root=root)


def _created(inner: tuple[Frame, ...]) -> str:
    """Return ranks and number of the group that new_group creates; each rank numbers its calls in order."""
    for f in inner:
        if f.name == "_new_group_with_tag" and "ranks" in f.values:
            number = f.values.get("group_name", "").strip("\"'")
            return visible(f.values["ranks"] + (f" as number {number}" if number.isdecimal() else ""))
    return ""


def _number(f: Frame, *names: str) -> int | None:
    found = (f.values[n] for n in names if _NUMBER.fullmatch(f.values.get(n, "")))
    return next((int(text) for text in found), None)


def _group(f: Frame, callers: tuple[Frame, ...], users: list[Frame]) -> str:
    """Return the user's variable that holds the group of a call; else the default group, as `group.WORLD`."""
    passed = any(_GROUP in x.values.get(n, "") for x in callers if x.name == "wrapper" for n in ("args", "kwargs"))
    where = f.objects.get("group")
    if not passed or where is None:
        return DEFAULT_GROUP
    names = (n for x in users for n, at in x.objects.items() if at == where)
    return next(names, DEFAULT_GROUP)


def _ddp_group(inner: tuple[Frame, ...], users: list[Frame]) -> str:
    """Return the group of a call that no Python frame of torch names: DDP keeps its group where no stack shows it.

    It is the default group if DDP's constructor was given none, or if no function of the user that is on the
    stack has another.
    """
    for f in inner:
        if f.name == "__init__" and f.values.get("process_group") == "None":
            return DEFAULT_GROUP
    has_others = any(_GROUPS.search(text) for x in users for text in x.values.values())
    return UNKNOWN_GROUP if has_others else DEFAULT_GROUP


def _activity(stack: Stack, site: Site | None, source: Source, device: bool) -> str:
    """Return what a thread does that is in no operation."""
    native = stack.native
    if any(map(_NATIVE_STORE.search, native)):
        return "socket"
    if device:
        return "device"
    line = line_at(site, source)
    idle = stack.idle is not False
    inner = list(itertools.takewhile(lambda f: not f.users, stack.frames)) or list(stack.frames[:1])
    words = [by_frame(f.raw_name) for f in inner]
    word = next(filter(None, words[:4]), None)
    if word in _GENERAL:  # the library that waits so shows what for
        word = next((w for w in words if w in _SPECIAL), "queue" if "queue" in words else word)
    if word is not None:
        return refined(word, " ".join((line, *(f.raw_name for f in inner))))
    if (idle and "sleep(" in line) or any(map(_NATIVE_SLEEP.search, native)):
        return "sleep"
    saves = any(by_frame(f.raw_name) == "checkpoint" for f in stack.frames)  # into a file object of the user's
    return by_line(line, idle) or ("checkpoint" if saves else "user_code")
