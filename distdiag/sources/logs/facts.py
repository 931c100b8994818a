"""What the lines of all log files show: facts, each with who wrote it and on which line."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Site
from distdiag.sources.logs.ends import PREFIX, FileEnd, Loss
from distdiag.sources.logs.message import Message, Role
from distdiag.sources.logs.patterns import MESSAGES
from distdiag.sources.logs.recorded import Recorded
from distdiag.sources.logs.writers import Writer
from distdiag.terms.untrusted import MAX_INT, bounded

A_NODE = 4  # ranks, at least
MAX_WRITERS = 1 << 16
# names of processes that can be of a job of torch
_OF_JOB = bounded(r"(?i:python|pt_|torch|ray|train|deepspeed|accelerate|vllm|mpi|worker|rank|main)")


@dataclass(slots=True)
class Fact:
    """What one line, one table or one exception shows.

    Attributes:
        name, role: Those of its row in the table; `exception` if it has no row, `ended` from a launcher's table.
        fields: Contents of the line, by the group names of the table.
        order: Position of the line among all lines read.
        rank: The rank it is about: the writer, unless the line names another.
        at: Clock and seconds, of the writer's newest line with a time: it happened then or later.
    """

    name: str
    role: Role
    fields: dict[str, str]
    who: Writer
    path: Path
    line: int
    order: int
    text: str = ""
    rank: int | None = None
    site: Site | None = None
    at: tuple[str, float] | None = None
    run: tuple[int, int] = (0, 0)  # launch and attempt, of those appended to one file
    uncaught: bool = False  # its traceback begins at the script itself, so nothing in the script caught it
    warned: bool = False  # a line of the program's own log has its traceback: a warning, or that it is skipped
    logged: bool = False  # a line of the program's own log has its traceback: it was caught, whatever came of it
    of_host: bool = False  # only the kernel or the host of a node writes its file
    early: bool = False  # it came before the job began
    doubtful: bool = False  # progress came after it, too little to show that the job survived it
    direct: bool = False  # the next exception was raised from it
    engine: bool = False  # raised inside an inference engine
    serves: bool = False  # raised where rank 0 starts the job's store
    in_collective: bool = False  # raised by a backend, inside a collective call
    in_backward: bool = False  # raised by what the backward pass itself calls, as DDP's reducer
    saves: str = ""  # the function in which it gathers the state of all ranks, or logs what all have
    within: str = ""  # the helper in which it waits for the rank that goes first
    inferred: bool = False  # `rank` is the number of its launcher's label, as in the other labels
    of_node: bool = False  # `rank` is the rank on its node; the log does not show which ranks that node has
    resumes: bool = False  # raised while a checkpoint was loaded
    unpickles: bool = False  # raised while an object of another process, or of a file, was read
    package: str = ""  # the installed package that raised it; empty for torch and the user's code
    file: str = ""  # the name of its file, if there are several
    back: Fact | None = None  # the line by which the port that it reports was active again

    @property
    def message(self) -> Message:
        return MESSAGES[self.name]

    @property
    def of_line(self) -> str:
        """Return `line 1,204`, with its file if there are several."""
        return f"line {self.line:,}{f' of {self.file}' if self.file else ''}"

    @property
    def foreign(self) -> bool:
        """True if the kernel names a process that this job has not, by its pid and its name."""
        return self.rank is None and _OF_JOB.match(self.fields.get("comm", "python")) is None

    def number(self, key: str) -> int | None:
        """Return a field as a number; None if the line lacks it, or it exceeds any count."""
        text = self.fields.get(key, "")
        digits = text.removeprefix("-")
        return int(text) if digits.isdecimal() and len(digits) <= 18 and int(digits) < MAX_INT else None


@dataclass(slots=True)
class Line:
    """One message, with all that is known of it."""

    path: Path
    number: int
    text: str
    who: Writer
    source: tuple[object, ...]  # what lines of one process have in common: tracebacks may be interleaved
    order: int  # among all lines read


@dataclass
class Collected:
    """What all log files of a job contain.

    Attributes:
        ranks: Ranks that wrote a line, or that a line is about.
        world_size: The largest number of ranks that a line gives.
        recorded: What distdiag printed into each log, if it recorded the job.
        rank_of: Rank of a process, by its label and host, or its pid; None if several ranks have it.
        in_world: Rank of a process, by its label, host and pid, in the largest communicator that its lines show, and its size.
    """

    facts: list[Fact] = field(default_factory=list)
    past: list[Fact] = field(default_factory=list)  # failures after which the process or the job went on
    recorded: dict[Path, Recorded] = field(default_factory=dict)
    unknown: deque[tuple[Path, int, str]] = field(default_factory=lambda: deque(maxlen=3))  # last lines like errors
    ranks: set[int] = field(default_factory=set)
    world_size: int | None = None
    left_out: int = 0  # runs and attempts in the files before those that are judged
    before: list[Fact] = field(default_factory=list)  # the first failure of each of these
    per_node: bool = False  # a launcher on each node started its ranks, so a task of srun is a node
    late: bool = False  # not all lines of a file were read in detail: it took too long
    files: list[Path] = field(default_factory=list)
    bad: list[tuple[str, str]] = field(default_factory=list)
    rank_of: dict[object, int | None] = field(default_factory=dict)
    on_host: dict[str, set[int]] = field(default_factory=dict)  # ranks whose lines name a host
    nccl: dict[tuple[int | None, str, str], set[str]] = field(default_factory=dict)  # versions, by rank, host and file
    libraries: dict[int | None, str] = field(default_factory=dict)  # by rank or task: LD_LIBRARY_PATH or LD_PRELOAD
    settings: dict[str, dict[str, str]] = field(default_factory=dict)  # NCCL's, of a host's environment, by host
    in_world: dict[tuple[str, str, int | None], tuple[int, int]] = field(default_factory=dict)  # (size, rank)
    by_path: dict[Path, set[int]] = field(default_factory=dict)  # ranks named in the lines of a file
    env: dict[Path, set[int]] = field(default_factory=dict)  # the ranks that a file's environment gives
    of_label: dict[str, set[int]] = field(default_factory=dict)  # ranks named in the lines with a launcher's label
    pid_of: dict[tuple[Path, str], int] = field(default_factory=dict)  # of a PCI device, by the driver's later lines
    devices: dict[tuple[str, str], str] = field(default_factory=dict)  # process of a (host, PCI device), by NCCL
    unreached: dict[tuple[Path, str], str] = field(default_factory=dict)  # why a launcher's attempts to connect failed
    # what each launcher was given, by its label or file
    masters: dict[str, dict[str, str]] = field(default_factory=dict)
    first_rank: dict[tuple[Path, str], int] = field(default_factory=dict)  # of a launcher's node; -1 of several
    local_of: dict[tuple[str, str], int] = field(default_factory=dict)  # rank on its node of (label, pid)
    closed: dict[str, tuple[int, int]] = field(default_factory=dict)  # run of the pids of ranks that torchrun ended
    followed: list[Fact] = field(default_factory=list)  # of attempts that failed by what these left
    servers: set[str] = field(default_factory=set)  # hosts of the job's store, to which clients lost their connections
    # Megatron's first rerun: node, device, line
    reran: dict[tuple[int, str], tuple[str, str, int]] = field(default_factory=dict)
    nodes_wanted: int = 0  # by torchrun's rendezvous, at least
    nodes_came: set[str] = field(default_factory=set)  # that tried to join it
    interfaces: dict[str, tuple[str, str]] = field(default_factory=dict)  # (name, address) that NCCL uses on a host
    addresses: dict[str, dict[str, str]] = field(default_factory=dict)  # of all interfaces that NCCL uses on a host
    node_of: dict[str, str] = field(default_factory=dict)  # of a pod that kubectl describes
    joined: set[int] = field(default_factory=set)  # ranks that have joined the job's store
    announced: dict[int, Fact] = field(default_factory=dict)  # ranks that wrote their number before they joined it
    gpus: int = 0  # of each node, by verl's settings
    tasks: int = 0  # that Slurm was asked to start
    series: dict[tuple[str, Path, int | None], list[Fact]] = field(default_factory=dict)  # how fast the ranks are
    ends: dict[Path, FileEnd] = field(default_factory=lambda: defaultdict(FileEnd))  # of the files, in their order
    well: dict[Path, int] = field(default_factory=dict)  # the last line of a file that says that the job ended well
    late_stop: Fact | None = None  # from outside, after the job had ended well
    ended: bool = False  # the last lines say that the job ended well
    of_file: dict[Path, int] = field(default_factory=dict)  # rank of each file with one rank's lines
    of_nodes: set[Path] = field(default_factory=set)  # files that name ranks on their node

    def named(self, *names: str) -> list[Fact]:
        return [f for f in self.facts if f.name in names]

    @property
    def steps(self) -> bool:
        """True if a line shows progress."""
        return any(end.stepped for end in self.ends.values())

    @property
    def losses(self) -> dict[tuple[Path, int | None], Loss]:
        """Return the last losses of each file and rank."""
        shown = ((path, end) for path, end in self.ends.items() if not end.tested)
        return {(path, rank): loss for path, end in shown for rank, loss in end.loss.items()}

    @property
    def took(self) -> dict[int, tuple[float, str]]:
        """Return of a rank's last lines how long something took it in seconds, and what."""
        return {rank: took for end in reversed(self.ends.values()) for rank, took in end.took.items()}

    def named_rank(self, path: Path, rank: int | None, task: int | None) -> int | None:
        """Return the rank of a process of a file, by what its lines show."""
        known = rank if rank is not None or self.per_node else task
        return known if known is not None else self.of_file.get(path)

    def last_lines(self, earlier: bool = False) -> dict[int, str]:
        """Return the last line of each rank; with `earlier`, its last one before the first failure in its file."""
        out: dict[int, str] = {}
        for path, end in self.ends.items():
            for key, text in (end.earlier if earlier else end.said).items():
                if (rank := self.named_rank(path, *key)) is not None and (clean := PREFIX.sub("", text).strip()):
                    out.setdefault(rank, clean)
        return out

    def moving(self, facts: Iterable[Fact]) -> str:
        """Return which progress bar moved on while ranks of a file waited; empty if none did."""
        first = {f.path: f.line for f in reversed(self.facts) if f.role is Role.WAIT}
        paths = (path for path in dict.fromkeys(f.path for f in facts) if path in first)
        return next(filter(None, (self.ends[path].moving(first[path]) for path in paths)), "")

    def host_of(self, ranks: set[int]) -> set[str]:
        """Return the one host of these ranks; empty if they have several, or the log does not show it."""
        hosts = {host for host, of_host in self.on_host.items() if of_host & ranks}
        return hosts if len(hosts) == 1 and ranks <= self.on_host[min(hosts)] else set()

    def all_of(self, ranks: set[int], of_node: bool = False) -> str:
        """Return `all 8 ranks` if these are all of the job, as far as the log shows it; empty if they are not.

        With `of_node`, those of one node are enough, if the log is only of that node.
        """
        ended = {f.fields["pid"] for f in self.facts if f.role is Role.EXIT and "pid" in f.fields}
        runs = {f.run for f in self.facts}
        here, n = len(ended.union(pid for pid, run in self.closed.items() if run in runs)), len(ranks)
        most = max(here, self.world_size or 0)
        if not ranks >= self.ranks or n < max(here, 2):
            return ""
        if n < most or n <= max(ranks):
            node = n >= A_NODE and min(ranks) % n == 0 and max(ranks) - min(ranks) < n and len(self.on_host) < 2
            return f"{rank_list(ranks)}, all in the log," if of_node and node else ""
        return f"all {len(ranks):,} ranks" + (" in the log" if not most else "")

    @cached_property
    def pids(self) -> dict[str, int | None]:
        """Return the rank of each pid that launchers or lines of ranks name as one of this job's; None if only that is known."""
        known: dict[str, int | None] = dict.fromkeys(self.closed)
        ended = (f for f in self.named("exit", "ended") if "pid" in f.fields)
        known |= {f.fields["pid"]: None if f.of_node else f.rank for f in ended}
        of_pids = ((pid, rank) for pid, rank in self.rank_of.items() if isinstance(pid, int))
        return known | {str(pid): rank for pid, rank in of_pids if rank is not None}

    def names_a_job(self) -> bool:
        """True if a line names a rank, a launcher, an error, or distdiag."""
        lines = (self.facts, self.past, self.unknown, self.recorded)
        ranks = (self.ranks, self.rank_of, self.by_path, self.took, self.nccl)
        return any(lines) or any(ranks) or bool(self.world_size or self.per_node or self.steps)

    def is_rank_of(self, process: object, rank: int) -> None:
        """Note the rank of a process, which a line names together."""
        if process in self.rank_of:
            self.rank_of[process] = rank if self.rank_of[process] == rank else None
        elif len(self.rank_of) < MAX_WRITERS:
            self.rank_of[process] = rank


def source_of(path: Path, who: Writer) -> tuple[object, ...]:
    """Return what the lines of one process have in common, as far as a line names it."""
    return path, who.rank, who.process, who.task, who.local, who.label
