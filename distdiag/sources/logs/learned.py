"""Takes what lines say that are no failures: about ranks, processes, nodes, runs.

Each message of the role FACT has a method of its name, which gets the fields of the line, and the line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from distdiag.sources.logs import slow
from distdiag.sources.logs.facts import MAX_WRITERS, Collected, Fact, Line
from distdiag.sources.logs.join import same_port
from distdiag.sources.logs.message import Role
from distdiag.sources.logs.patterns import MESSAGES
from distdiag.sources.logs.writers import Writer, apart
from distdiag.terms.untrusted import MAX_RANKS, bounded, is_rank, numbers

STOPPED_S = 600.0  # no process of a step that Slurm cancelled writes so long after (KillWait is 30 s)
MAX_DIGITS = 7  # of a rank or a size that is read
_NODE = bounded(r"'(?P<host>[\w.-]{1,253})': \[(?P<ranks>[\d, ]{1,900})\]")
_INTERFACE = bounded(r"\[\d{1,2}\]([\w.-]{1,40}):([\w.:]{3,60})<")
_OF_ONE_LAUNCH = bounded(r" --(?:master|rdzv)[-_](?:port|endpoint|id)[= ]\S{1,300}")
Of = Mapping[str, str]  # the fields of a line


def _int(text: str) -> int:
    return int(text[:MAX_DIGITS])


def _put(into: dict[Any, Any], key: object, value: object) -> None:
    """Set a value, unless there are too many."""
    if len(into) < MAX_WRITERS:
        into[key] = value


class Learned:
    """Notes in `found` what lines say.

    Attributes:
        run: The launch, and its attempt, of which the lines are.
        stopped: The last run that a scheduler stopped.
        stopped_at: When Slurm ended all its processes, if that is known.
        pod: The one that `kubectl describe` describes.
        shut: The line of each file in which a server's process exits as it was asked to.
        begun_by: The command by which a shell started the job, without what is another one for each launch.
    """

    def __init__(self, found: Collected, seen: dict[tuple[object, ...], int]) -> None:
        self.found, self._seen = found, seen
        self.run: tuple[int, int] = (0, 0)
        self.stopped: tuple[Path, tuple[int, int]] | None = None
        self.stopped_at: tuple[str, float] | None = None
        self.pod = self.begun_by = ""
        self.shut: dict[Path, int] = {}
        facts = (m for m in MESSAGES.values() if m.role is Role.FACT and not m.series)
        self._methods: dict[str, Callable[[Of, Line], None]] = {m.name: getattr(self, m.name) for m in facts}

    def take(self, name: str, of: Of, line: Line) -> None:
        if name in self._methods:
            self._methods[name](of, line)
        elif len(self.found.series) < MAX_WRITERS:
            who = line.who.rank if line.who.rank is not None or self.found.per_node else line.who.task
            slow.keep(self.found.series.setdefault((name, line.path, who), []), self._fact(name, of, line))

    def next_run(self, launch: bool) -> None:
        """Note that what follows is of another launch, or attempt, if this one has had an error, or its ranks were ended."""
        if self.run in (*(f.run for f in self.found.facts[-1:]), next(reversed(self.found.closed.values()), None)):
            number, attempt = self.run
            self.run = (number + 1, 0) if launch else (number, attempt + 1)

    def _size(self, rank: int, world: int, who: Writer) -> None:
        """Note the number of ranks, and the rank of a process, from the line of a communicator."""
        out = self.found
        if not (is_rank(rank) and rank < world <= MAX_RANKS):
            return
        out.world_size = max(out.world_size or 0, world)
        if who.process and len(out.in_world) < MAX_WRITERS:
            key = who.process, who.host, who.pid
            out.in_world[key] = max((world, rank), out.in_world.get(key, (0, 0)), key=itemgetter(0))

    def _fact(self, name: str, of: Of, line: Line) -> Fact:
        return Fact(name, Role.FACT, dict(of), line.who, line.path, line.number, line.order)

    # -- ranks, and the size of the job

    def nccl_rank(self, of: Of, line: Line) -> None:
        self._size(_int(of["r"]), _int(of.get("world", "0")), line.who)
        if "bus" in of and line.who.process:
            bus = int(of["bus"], 16)
            device = f"{bus >> 20:04x}:{bus >> 12 & 255:02x}:{bus >> 4 & 255:02x}"
            _put(self.found.devices, (line.who.host, device), line.who.process)

    def own_rank(self, of: Of, line: Line) -> None:
        ranks = set(filter(is_rank, [_int(of["r"])]))
        self.found.ranks |= ranks
        self.found.announced |= {rank: self._fact("own_rank", of, line) for rank in ranks}
        self.nccl_rank(of, line)

    def world(self, of: Of, line: Line) -> None:
        self._size(0, int(of["world"]), Writer())

    def npu(self, of: Of, line: Line) -> None:
        """Note whose device it is: one of several nodes has several ranks, and then none."""
        rank = _int(of["r"]) if "r" in of else line.who.rank
        if rank is not None and is_rank(rank):
            self.found.is_rank_of(("npu", of["device"]), rank)

    def joined(self, of: Of, line: Line) -> None:
        self.found.joined |= set(filter(is_rank, [_int(of["r"])]))

    def env(self, of: Of, line: Line) -> None:
        if not is_rank(rank := _int(of["r"])):
            return
        self.found.by_path.setdefault(line.path, set()).add(rank)
        self.found.env.setdefault(line.path, set()).add(rank)
        if line.who.process:
            self.found.is_rank_of((line.who.process, line.who.host), rank)
        self._size(rank, _int(of.get("world", "0")), Writer())

    def first_rank(self, of: Of, line: Line) -> None:
        first, launcher = _int(of["node"]) * _int(of.get("local", "1")), (line.path, line.who.label)
        _put(self.found.first_rank, launcher, first if self.found.first_rank.get(launcher, first) == first else -1)

        if of.get("local") == "1" and line.who.label:
            _put(self.found.local_of, (line.who.label, ""), 0)  # all lines with this label are of one rank

    def server_args(self, of: Of, line: Line) -> None:
        """Note that the number in SGLang's prefix is the rank: of one node, without data and pipeline parallelism."""
        for rank in range(min(_int(of["world"]), MAX_WRITERS)):
            self.found.is_rank_of((f"TP{rank}", ""), rank)
        self._size(0, _int(of["world"]), Writer())

    def node_ranks(self, of: Of, line: Line) -> None:
        for m in _NODE.finditer(of["nodes"]):
            ranks = set(filter(is_rank, numbers(m["ranks"])))
            self.found.ranks |= ranks
            if len(self.found.on_host) < MAX_WRITERS:
                self.found.on_host.setdefault(m["host"], set()).update(ranks)

    def gpus(self, of: Of, line: Line) -> None:
        self.found.gpus = int(of["n"])

    def tasks(self, of: Of, line: Line) -> None:
        self.found.tasks = int(of["n"])

    def spawned(self, of: Of, line: Line) -> None:
        _put(self.found.local_of, (line.who.label, of["pid"]), _int(of["local"]))

    # -- NCCL, and connections

    def nccl_runs(self, of: Of, line: Line) -> None:
        if len(self.found.nccl) < MAX_WRITERS:
            who = line.who.rank, line.who.host or line.who.label, line.path.name
            self.found.nccl.setdefault(who, set()).add(of["version"])

    def nccl_setting(self, of: Of, line: Line) -> None:
        if line.who.host and len(self.found.settings) < MAX_WRITERS:
            self.found.settings.setdefault(line.who.host, {})[of["key"]] = of["value"]

    def library_path(self, of: Of, line: Line) -> None:
        _put(self.found.libraries, line.who.task if line.who.rank is None else line.who.rank, of["path"])

    def interface(self, of: Of, line: Line) -> None:
        if line.who.host:
            _put(self.found.interfaces, line.who.host, (of["dev"], of["addr"]))
        if line.who.host in self.found.interfaces and "more" in of:
            self.found.addresses.setdefault(line.who.host, {}).update(_INTERFACE.findall(of["more"]))

    def master(self, of: Of, line: Line) -> None:
        if len(self.found.masters) < MAX_WRITERS:
            self.found.masters.setdefault(line.who.label or line.path.name, {}).update(of)

    def no_answer(self, of: Of, line: Line, why: str = "") -> None:
        self.found.unreached[line.path, line.who.process or line.who.label] = why or of["why"].lower()

    def no_name(self, of: Of, line: Line) -> None:
        self.no_answer(of, line, f"the name {of['peer']} does not resolve ({of['why']})")

    def port_active(self, of: Of, line: Line) -> None:
        back = self._fact("port_active", of, line)
        back.at = line.who.at
        for f in (f for f in self.found.named("port_error") if same_port(f, back)):
            f.back = f.back or back

    # -- what takes back an earlier line

    def storage_back(self, of: Of, line: Line) -> None:
        of_file = (f for f in self.found.named("host_report") if f.path == line.path)
        over = {id(f) for f in of_file if of.items() <= f.fields.items()}
        self.found.facts = [f for f in self.found.facts if id(f) not in over]

    def pod_begun(self, of: Of, line: Line) -> None:
        pod, waited = of.get("pod") or line.who.process, "pull" if "pulled" in of else "nodes are available"
        over = {id(f) for f in self.found.named("not_started") if waited in f.fields["what"]}
        facts = self.found.facts
        self.found.facts = [f for f in facts if id(f) not in over or (f.fields.get("pod") or f.who.process) != pod]

    def ras(self, of: Of, line: Line) -> None:
        """Drop the last report: this one takes its place."""
        facts = self.found.facts
        self.found.facts = [f for f in facts if not (f.name.startswith("ras_") and f.path == line.path)]
        for key in [key for key in self._seen if str(key[0]).startswith("ras_")]:
            del self._seen[key]

    def reran(self, of: Of, line: Line) -> None:
        _put(self.found.reran, (int(of["r"]), of["step"]), (of["host"], of["device"], line.number))

    # -- processes and nodes

    def torn_down(self, of: Of, line: Line) -> None:
        if len(self.found.pid_of) < MAX_WRITERS:
            self.found.pid_of.setdefault((line.path, of["pci"]), int(of["pid"]))

    def torchrun(self, of: Of, line: Line) -> None:
        self.found.per_node = True

    def closing(self, of: Of, line: Line) -> None:
        _put(self.found.closed, of["pid"], self.run)

    def pod_node(self, of: Of, line: Line) -> None:
        if self.pod:
            _put(self.found.node_of, self.pod, of["node"])

    def nodes_wanted(self, of: Of, line: Line) -> None:
        self.found.nodes_wanted = max(self.found.nodes_wanted, int(of["nodes"]))

    def node_came(self, of: Of, line: Line) -> None:
        if len(self.found.nodes_came) < MAX_WRITERS:
            self.found.nodes_came.add(of["node"])

    def shut_down(self, of: Of, line: Line) -> None:
        if not any(f.path == line.path and f.role is not Role.HINT for f in self.found.facts):
            _put(self.shut, line.path, line.number)

    # -- launches and attempts

    def command(self, of: Of, line: Line) -> None:
        before, self.begun_by = self.begun_by, _OF_ONE_LAUNCH.sub("", of["command"])
        if before == self.begun_by:  # of another node, it would differ
            self.next_run(launch=True)

    def again(self, of: Of, line: Line) -> None:
        self.found.ends[line.path].restart = line.number

    def restart(self, of: Of, line: Line) -> None:
        self.again(of, line)
        self.next_run(launch=False)

    def launch(self, of: Of, line: Line) -> None:
        self.again(of, line)
        self.next_run(launch=True)

    def since_stop(self, line: Line) -> None:
        """Note a new launch at the first line that is too late to be of the run that Slurm stopped."""
        at = line.who.at if "CANCELLED AT" not in line.text else None  # that is its own time
        if self.stopped_at is None or at is None or at[0] == "utc":
            return
        if self.stopped == (line.path, self.run) and apart(self.stopped_at, at) > STOPPED_S:
            self.launch({}, line)

    def requeued(self, of: Of, line: Line) -> None:
        if self.stopped == (line.path, self.run):
            self.launch(of, line)
