"""Who wrote a line, and when: the rank, task, host, process and time that launchers and libraries put in front of it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import date
from typing import Any

import msgspec

from distdiag.terms.untrusted import bounded, encodable, is_rank

_ANSI = bounded(
    r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)?|[@-Z\\-_])|[\x00-\x08\x0b\x0c\x0e-\x1a]"
)
_RANK = bounded(
    r"\[rank ?(\d{1,6})\]|\[RANK (\d{1,6})\]|\[Rank (\d{1,6})\]|(?:^|[\s\[])(?:world_|global_)?rank[=:](\d{1,6})[\]:,\s)]|\bRankID:(\d{1,6})\b"
)
# at the begin of a message, after its time and level
_RANK_FIRST = bounded(
    r"^(?:[\d:.,/T -]{8,32}Z? )?(?:\[?[A-Z]{4,8}\]?:? |\[NeMo [A-Z] [^\]]{8,99}\] )?[\[(<]?[Rr]ank[ _-]?(\d{1,6})(?:[\])>]| ?\||:)(?= )"
)
_GROUP = bounded(
    r"\[PG (?:ID )?(?P<pg>\d+)(?: PG GUID (?P<guid>[^\s(\]]*))?\s*(?:\((?P<desc>[^)]*)\))? Rank (?P<rank>\d{1,6})\]"
)
_LOCAL = bounded(r"(?:^|\s)\[(default|worker|trainer|agent|none)(\d{1,4})\]:", re.IGNORECASE)
# SageMaker adds names
_MPI = bounded(r"\[\d+,(?:mpirank:)?(?P<rank>\d{1,6})(?:,(?P<host>[\w.-]{1,253}))?\]<std(?:out|err)>")
_SRUN = bounded(r"^\s*(\d{1,6}): ")
# time, host, number
_HOST_FIRST = bounded(r"^\S{8,12}[ T]\S{6,20} \[(?P<host>[A-Za-z][\w.-]{0,99})\]\[(?P<nth>\d{1,5})\] (?=[A-Z]{4,8}\b)")
_BRACKET = bounded(r"^\[(\d{1,6})\] (?=\S+:\d+:\d+ \[\d+\])")  # Intel MPI, in front of NCCL's own prefix
_NCCL_IDS = bounded(r":\d+:\d+ \[\d+\] ")
_NCCL = bounded(r"(?P<host>[\w.-]+):(?P<pid>\d+):\d+ \[(?P<device>\d+)\] ")
# of oneCCL, and HCCL; of torch_npu, and of the codes of CANN
_OTHER_PIDS = bounded(
    r"^(?:[\d:-]{10,32}:)?\((?P<ccl>\d{1,9})\) \|CCL_|\bHCCL\((?P<hccl>\d{1,9}),|\(PID:(?P<npu>\d{1,9}), Device:-?\d|\bE[A-Z]\d{4}: \[PID: (?P<cann>\d{1,9})\]"
)
_LABEL = bounded(
    r"\((?P<label>[A-Za-z_][\w ]*?(?:\([\w.-]{1,80}\))? pid=(?P<pid>\d{1,9}))[^)]*?(?:, ip=(?P<ip>[\w.:]+))?\)|\[[\d: -]{19}(?: (?P<tp>(?:DP|PP|TP|EP)\d+[\w ]*))\]|^\[pod/(?P<pod>[\w.-]+)/[\w.-]+\] "
    r"|^\S{1,40} \{[^{}]{0,400}?\bpod=\"(?P<loki>[\w.-]{1,253})\"[^{}]{0,400}\} |^Exception in device=(?P<xla>\w{1,20}:\d{1,6}): "
)
_STERN = bounded(r"^(?P<pod>[a-z][\w.-]{0,250}-\w{1,20}) [\w.-]{1,63} (?=\d{4}-\d\d-\d\dT)")  # pod, container, time
# what pdsh, kubectl or a script puts in front of every line: the name of a node or worker, which ends in a number or a letter
_SKY = bounded(r"^\((?P<node>[A-Za-z][\w.-]{0,60}), rank=\d{1,6}, pid=\d{1,9}[^)]{0,60}\) ")
_LABEL_FIRST = bounded(
    r"^\s?(?:\((?P<round>{0})\)|\[(?P<square>{0})(?::\d{{1,6}}\]:|\])|(?P<colon>{0}):|(?P<pipe>p\d{{1,6}}/\d{{1,6}}|{0}) {{1,40}}\|)(?: |$)".format(
        r"(?!(?i:rank|step|epoch|iter\w*|loss|layer|gpu\W|cuda|mlx\w*|line|try|attempt|test|phase|level|block|default|none)\W?\d)"
        r"(?!\d{1,9}(?:\.\d{1,9})?\b(?!\.)|[A-Z]{1,3}\d{3,9}\b)[A-Za-z\d][\w.]{0,60}(?:-[\w.]{1,60}){0,9}(?<=\d)|[A-Za-z]\w{0,40}-[a-z]"
    )
)
_JOURNAL = bounded(
    r"^(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\S{8,30}) (?P<host>[\w.-]{1,253}) (?P<unit>[\w.-]{1,60}(?:\[(?P<id>\d{1,9})\])?): "
    r"|^\[k(?:msg|ern(?:el)?) (?P<of>[\w.-]{1,253})\] |^(?P<kernel>[\w.-]{1,253}) kernel: \[ *\d|^slurmstepd-(?P<slurm>[\w.-]{1,253}): "
)
_MILD = bounded(r"\[[IW](?:\d{3,4} \d\d:| \w+\.(?:cpp|cc|hpp):)")  # information and warnings of torch's C++ code
# month, day and time of day, as torch's C++ code writes them, and ISO 8601
_C10 = bounded(r"\[[EWIF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)")
_ISO = bounded(
    r"\b(\d{4}-\d\d-\d\d)[T_ ](\d\d):(\d\d):(\d\d)(?:[.,]\d{1,9})?(?: ?(?P<zone>Z\b|[+-]\d\d:?\d\d\b(?!-)))?"
)
# of the kernel: `dmesg -T`, and the journal, which leaves out the year
_CTIME = bounded(r"^\[?[A-Z][a-z]{2} ([A-Z][a-z]{2}) {1,2}(\d{1,2}) (\d\d):(\d\d):(\d\d) (\d{4})\]? ")
_SYSLOG = bounded(r"^([A-Z][a-z]{2}) {1,2}(\d{1,2}) (\d\d):(\d\d):(\d\d) \S")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
ANY_YEAR = 2000  # of a time that has none; a leap year
# what a container's log, or `ts`, puts in front of each line
_STAMP = bounded(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d) ")
# of `gcloud ai custom-jobs stream-logs`: level, time, replica; standard error is a level there
_REPLICA = bounded(
    r"^[A-Z]{4,9}\s(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,9})? [+-]\d{4})\s(?:service|(?P<label>[\w.-]{1,60}-\d{1,6}))\s"
)
_MESSAGE_KEYS = (
    "message", "msg", "log", "text", "event", "textPayload", "exc", "exc_info", "exception", "error", "traceback", "stack",
    "stack_trace", "line",
)  # fmt: skip
_TIME_KEYS = ("timestamp", "@timestamp", "time", "ts", "t", "asctime")
DAY_S = 86_400
Time = tuple[str, float]  # clock, seconds
_MEASURED = ("loss", "grad_norm")
_SIGNS = {*_TIME_KEYS, "level", "lvl", "levelname", "severity", "stream", "rank", "global_rank", "RANK"}


@dataclass(slots=True)
class Writer:
    """Who wrote a line and when, as far as the line shows it.

    Attributes:
        rank: Rank in the job; from torch's own prefix, a launcher's, or the name of the default group.
        group: (number, description) of the process group whose watchdog wrote it.
        local: The rank on its node.
        task: Task of srun; a rank only if srun started the ranks, not torchrun.
        process: Host and pid, or a label with pid: the same for all lines of one process.
        label: What a launcher or the journal puts in front of its lines: a node's or a worker's name, of one process or more.
        at: (clock, seconds); times of one clock can be compared.
    """

    rank: int | None = None
    group: tuple[str, str] | None = None
    group_rank: int | None = None  # in that group
    local: int | None = None
    task: int | None = None
    padded: bool = False  # to the width of other tasks' numbers, as srun does
    host: str = ""
    device: int | None = None
    process: str = ""
    label: str = ""
    pid: int | None = None
    at: Time | None = None
    loose: bool = False  # torch has not written its rank: it may be a node's, in front of each line of a launcher
    repeated: int = 0  # lines equal to this one, of other processes, that Ray left out
    mild: bool = False  # torch itself logs it as info or warning
    by_torchrun: bool = False  # the prefix is torchrun's

    @property
    def name(self) -> str:
        """Return how the line names a writer whose rank is unknown; empty if it does not."""
        if self.device is not None and self.host:
            return f"GPU {self.device} of {self.host}"
        if self.local is not None:
            return f"local rank {self.local}"
        where = f"{self.label} on {self.host}" if self.label and self.host not in ("", self.label) else self.label
        if self.process and self.host and self.host not in self.process:
            return f"{self.process} on {self.host}"
        return self.process or (f"task {self.task}" if self.task is not None else where)


def plain(text: str) -> str:
    """Return a line without colours and control characters."""
    return _ANSI.sub("", text) if not text.isprintable() else text


def without_prefix(text: str) -> tuple[int | None, int | None, str]:
    """Return (rank, local rank, the rest of the line) by what torch or a launcher puts in front of each line."""
    text = text[m.end() :] if (m := _STAMP.match(text)) is not None else text
    for pattern in (_LOCAL, _RANK, _MPI, _SRUN):
        if (m := pattern.match(text)) is not None:
            number, rest = next(int(x) for x in m.groups() if x and x.isdecimal()), text[m.end() :].removeprefix(":")
            return (None, number, rest) if pattern is _LOCAL else (number if is_rank(number) else None, None, rest)
    return None, None, text


def messages(text: str) -> list[tuple[str, Writer]]:
    """Return (message, who wrote it) of a line: of a JSON record its message, which may have several lines, and its losses.

    The rank, pod and time of a record come before those of its message. Any other JSON object is data of the program: it has no
    message.
    """
    record = record_of(text)
    if not record:
        who = writer(text)
        if text[10:11] == "T" and (m := _STAMP.match(text)) is not None and not who.host:
            text = text[m.end() :]
            who = writer(text)
            who.at = time_of(m[0])  # by the clock that all lines of the file have
        elif (m := _REPLICA.match(text)) is not None:
            text = text[m.end() :]
            who = writer(text)
            who.label, who.at = who.label or m["label"] or "", who.at or time_of(m[1])
        return [(text, who)]
    texts = [encodable(record[key]) for key in _keys_of(record) if isinstance(record.get(key), str)]
    texts = [_event(record) + t for t in texts]
    if any(key.endswith(_MEASURED) for key in record):  # as a trainer's line of text has them
        texts.append(" ".join(f"{k}: {v}" for k, v in record.items() if isinstance(v, (int, float)) or v == "NaN"))
    rank = next((record[k] for k in ("rank", "global_rank", "RANK") if k in record), None)
    if isinstance(rank, str) and rank.isdecimal() and len(rank) < 7:
        rank = int(rank)
    known = rank if isinstance(rank, int) and is_rank(rank) else None
    at = next((at for k in _TIME_KEYS if isinstance(t := record.get(k), str) and (at := time_of(t))), None)
    pod = next((p for r in _within(record) for k in ("pod_name", "pod") if isinstance(p := r.get(k), str)), "")
    out = []
    for line in (line for t in texts for line in t.splitlines() if line):
        who = writer(line)
        who.rank = known if known is not None else who.rank
        who.at, who.process = at or who.at, who.process or pod
        out.append((line, who))
    return out


def _within(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects of a record that may name its pod: itself, and the labels of a collector."""
    resource = record.get("resource")
    labels = resource.get("labels") if isinstance(resource, dict) else None
    return [record, *(x for x in (record.get("kubernetes"), record.get("labels"), labels) if isinstance(x, dict))]


def _event(record: dict[str, Any]) -> str:
    """Return `Evicted pod/worker-3: ` of an event of Kubernetes; empty of any other record."""
    reason = record.get("reason")
    of = next((record[k] for k in ("involvedObject", "regarding", "object") if k in record), None)
    if isinstance(of, dict):
        of = f"{str(of.get('kind', '')).lower()}/{of.get('name', '')}"
    return f"{reason} {of}: " if isinstance(reason, str) and isinstance(of, str) else ""


def _keys_of(record: dict[str, Any]) -> tuple[str, ...]:
    """Return the keys of a record's message; a text or an event without a time or a level is data of the program."""
    return _MESSAGE_KEYS if record.keys() & _SIGNS else tuple(k for k in _MESSAGE_KEYS if k not in ("text", "event"))


def is_record(text: str) -> bool:
    """True for a JSON object with a message: one line of a log."""
    record = record_of(text)
    return any(isinstance(record.get(key), str) for key in _keys_of(record))


def record_of(text: str) -> dict[str, Any]:
    """Return the JSON object in a line; empty if the line is not one."""
    stripped = text.strip()
    if not (stripped.startswith("{") and stripped.endswith("}") and '"' in stripped):
        return {}
    try:
        record: Any = (
            json.loads(stripped) if "NaN" in stripped or "Infinity" in stripped else msgspec.json.decode(stripped)
        )
    except (ValueError, RecursionError):  # those of msgspec, too
        return {}
    return record if isinstance(record, dict) else {}


def writer(text: str) -> Writer:
    """Return who wrote a line. Each pattern is tried only if a literal part of it is there."""
    out = Writer(at=time_of(text))
    head = text[:300]
    own = list(_RANK.finditer(text[:400])) if "ank" in text or "RANK" in text else []
    exact = next((m for m in own if m[1] is not None), None)
    if "[PG " in text and (group := _GROUP.search(text[:600])):
        out.group, out.group_rank = (group["guid"] or group["pg"], group["desc"] or ""), int(group["rank"])
        if group["desc"] == "default_pg":
            out.rank = int(group["rank"])
    if exact is not None or own:
        m = exact or own[0]
        number = next(int(x) for x in m.groups() if x is not None)
        if (exact is not None or out.group is None) and is_rank(number):
            out.rank, out.loose = number, exact is None and own[0][3] is None and own[0][5] is None
    nameless = out.rank is None and out.group is None and "ank" in head
    if nameless and (m := _RANK_FIRST.match(head)) and is_rank(int(m[1])):
        out.rank, out.loose = int(m[1]), True
    if out.rank is None and "]<std" in text and (m := _MPI.search(text)):
        out.rank, out.loose, out.host = int(m["rank"]), True, m["host"] or ""
    if out.rank is None and (m := _BRACKET.match(text)):
        out.rank = int(m[1])
    out.mild = ("[I" in head or "[W" in head) and _MILD.search(text[:200]) is not None
    if "]:" in head and (m := _LOCAL.search(text[:200])):
        out.local, out.by_torchrun = int(m[2]), m[1] == "default"
    if m := _SRUN.match(text):
        out.task, out.padded = int(m[1]), m.start(1) > 0
    _process(head, out)
    _label(head, out)
    return out


def _label(head: str, out: Writer) -> None:
    """Set the label before each line of a node or worker; for the journal also the host."""
    if (m := _JOURNAL.match(head)) is not None:
        out.host = out.host or m["host"] or m["of"] or m["kernel"] or m["slurm"]
        out.label = m["unit"] if m["id"] else ""
    elif (m := _SKY.match(head)) is not None:
        out.label = m["node"]
    elif (m := _LABEL_FIRST.match(head)) is not None:
        out.label = m["round"] or m["square"] or m["colon"] or m["pipe"]


def _process(head: str, out: Writer) -> None:
    """Set host, device and process of a writer, by the prefix of NCCL, Ray or vLLM."""
    if _NCCL_IDS.search(head) and (m := _NCCL.search(head)):
        out.host, out.device, out.process = m["host"], int(m["device"]), f"{m['host']}:{m['pid']}"
        out.pid = int(m["pid"])
    elif any(part in head for part in ("pid=", "P", "[pod/", "device=", 'pod="')) and (m := _LABEL.search(head)):
        while (inner := _LABEL.match(head, m.end() + (head[m.end() : m.end() + 1] == " "))) is not None:
            m = inner  # a process passes on the lines of its children, which are named next
        out.process, out.host = m["label"] or m["tp"] or m["pod"] or m["loki"] or m["xla"], m["ip"] or out.host
        out.pid = int(m["pid"]) if m["pid"] else None
    elif "][" in head and (m := _HOST_FIRST.match(head)) is not None:
        out.host, out.process = m["host"], f"{m['host']}[{m['nth']}]"
    elif (m := _STERN.match(head)) is not None:
        out.process = m["pod"]
    elif ("CCL" in head or "PID:" in head) and (m := _OTHER_PIDS.search(head)) is not None:
        out.pid = int(next(filter(None, m.groups())))


def time_of(text: str) -> Time | None:
    """Return the clock and the seconds that the begin of a line shows; None if it shows none.

    Times of one clock can be compared: those of torch's C++ code, those with a zone (`utc`), and those without. Of the others,
    `apart` gives the distance, as far as it can be known.
    """
    head = text[:120]
    year: str | int = ANY_YEAR
    if (m := _C10.search(head)) is not None:
        clock, (month, day, *time) = "c10", map(int, m.groups())
    elif (m := _ISO.search(head)) is not None:
        clock, (year, month, day), time = "utc" if m["zone"] else "iso", m[1].split("-"), m.groups()[1:4]
    elif (m := _CTIME.match(head) or _SYSLOG.match(head)) is not None and m[1] in _MONTHS:
        clock, month, day, time = "ctime", _MONTHS.index(m[1]) + 1, m[2], m.groups()[2:5]
        year, clock = (m[6], clock) if m.re is _CTIME else (ANY_YEAR, "syslog")
    else:
        return None
    try:
        days = date(int(year), int(month), int(day)).toordinal()
    except ValueError:
        return None
    hour, minute, second = map(int, time)
    seconds = (days * 24 + hour) * 3600.0 + minute * 60 + second
    if clock != "utc":
        return clock, seconds
    zone = m["zone"]
    ahead = 0 if zone == "Z" else (int(zone[1:3]) * 60 + int(zone[-2:])) * 60
    return clock, seconds + (ahead if zone[0] == "-" else -ahead)


def apart(a: Time, b: Time) -> float:
    """Return the seconds from one time to another; what their zones, if they show none, may add is not known."""
    if {a[0], b[0]} & {"c10", "syslog"}:
        half = 183 * DAY_S
        return (_in_any_year(b) - _in_any_year(a) + half) % (2 * half) - half
    return b[1] - a[1]


def _in_any_year(at: Time) -> float:
    days, rest = divmod(at[1], DAY_S)
    day = date.fromordinal(min(max(1, int(days)), date.max.toordinal()))
    return day.replace(year=ANY_YEAR).toordinal() * DAY_S + rest
