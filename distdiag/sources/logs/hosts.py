"""What the kernel, the driver or a daemon of a host reports, and the failures of its ranks that follow from it: one table.

Such a report is no failure of the job by itself. It explains one that fits it, on the same host, as far as the log names hosts, and
not before the report; different errors that follow from one report are one finding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from msgspec.structs import replace

from distdiag.diagnosis.known_errors import FULL_DISK, OTHER_DRIVER, remedy
from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.text.phrases import shortened
from distdiag.sources.logs.build import some
from distdiag.sources.logs.facts import Collected, Fact
from distdiag.sources.logs.failures import Reason
from distdiag.sources.logs.join import WAITED, before
from distdiag.sources.logs.past import REPORTED_S, ZONES_S
from distdiag.sources.logs.writers import apart
from distdiag.terms.untrusted import bounded


@dataclass(frozen=True, slots=True)
class Report:
    """One kind of report.

    Attributes:
        by: Who reports it.
        text: What it reports, after `reports that`, with the fields of its line in braces.
        advice: What to do if a failure follows from it.
        explains: Found in the errors that follow from it; None if only waiting follows.
        waits: A rank of that host, or a transfer between its GPUs, may wait because of it.
        lasts: It is so until somebody changes it, and may be seen only after the failure.
    """

    by: str
    text: str
    advice: str
    explains: re.Pattern[str] | None = None
    waits: bool = False
    lasts: bool = False


MAX_REPORTS, SHOWN = 256, 4  # that are read; errors in one message
_SEE_STORAGE = (
    "see that storage first, from that host (`df`, `ls`, `dmesg -T`): a process that waits for it makes no call"
)
_OF_FILES = bounded(
    r"\[Errno (?:5|30|103|107|108|116)\]|(?i:input/output error|transport endpoint|stale file handle|read-only file system)|inline_container|PytorchStreamWriter|unexpected pos"
)
_OF_DRIVER = r"No CUDA GPUs are available|no CUDA-capable device|CUDA unknown error|initialization error|NVML"
# by a field of the line; the first ones say most
REPORTS: Mapping[str, Report] = MappingProxyType({
    "driver": Report("the NVIDIA driver", "its libraries and its loaded kernel module have different versions", OTHER_DRIVER,
        bounded(_OF_DRIVER + r"|\bError 803\b|unsupported display driver|driver version is insufficient"), lasts=True),
    "nvml": Report("NVML", "it cannot use the GPUs ({nvml}), as in a container that lost its access to them",
        "delete the pod or container and create it again: a restart inside it does not help, and the GPUs are most often healthy (`nvidia-smi` on the node); systemd takes them away when it reloads: use CDI, a newer nvidia-container-toolkit, or links to the devices in /dev/char",
        bounded(_OF_DRIVER), lasts=True),
    "fabric": Report("CUDA", "the GPUs cannot be used, as the NVSwitch fabric is not set up ({fabric})", remedy("system not yet initialized", ""),
        bounded(r"(?i:\bcuda|\bgpus?\b|nccl|nvidia|accelerator|\bdevice|without an exception in the log)"), waits=True, lasts=True),
    "evicted": Report("the kernel", "the file system's server {evicted} has evicted this client: what was in progress failed",
        "ask who runs that file system, and drain the node if it comes back (its network, the server's load); a file that was being written is not whole: resume from the checkpoint before it",
        _OF_FILES, waits=True),
    "disk": Report("the kernel", "the disk {disk} has errors, or its file system was shut down", "take the node out, and replace that disk (`smartctl -a`, `dmesg -T`); a file that was being written is not whole",
        _OF_FILES, waits=True),
    "full": Report("the raylet", "the disk of {full} is over {percent}% full", FULL_DISK, bounded(r"OutOfDisk|disk is full|No space left|\[Errno 28\]|inline_container|PytorchStreamWriter")),
    "quota": Report("the quota command", "the quota of {quota} is exceeded", "delete old checkpoints there or have the quota raised (`df` shows the whole file system, not the quota), and resume from the checkpoint before the one that was being written, which is not whole",
        bounded(_OF_FILES.pattern + r"|[Qq]uota exceeded|\[Errno 122\]"), lasts=True),
    "nfs": Report("the kernel", "NFS server {nfs} does not respond", _SEE_STORAGE, _OF_FILES, waits=True),
    "lustre": Report("the kernel", "Lustre lost its connection to {lustre}", _SEE_STORAGE, _OF_FILES, waits=True),
    "task": Report("the kernel", "process {pid} ({task}) was blocked for more than {s} seconds, most often in I/O", _SEE_STORAGE, waits=True),
    "iommu": Report("the kernel", "the IOMMU refused accesses to memory by {devices}: direct transfers between GPUs (P2P) may not arrive",
        "run once with NCCL_P2P_DISABLE=1: if that runs, P2P is the cause: switch the IOMMU off in the BIOS or boot with iommu=pt (amd_iommu=off, intel_iommu=off), and ACS off", waits=True),
})  # fmt: skip


def _reports(found: Collected, *keys: str) -> list[tuple[str, Fact]]:
    """Return (field in the table, fact) of the reports with these fields, or of all: those that say most first, of these those with a host."""
    gpus = {device for _, device in found.devices}
    facts = [f for f in found.named("host_report") if "device" not in f.fields or _device(f) in gpus]
    out = [(key, f) for key in keys or REPORTS for f in facts if key in f.fields]
    return sorted(out[:MAX_REPORTS], key=lambda item: ([*REPORTS].index(item[0]), not _host(item[1])))


def _device(f: Fact) -> str:
    """Return the PCI device that a line names: domain, bus and device."""
    name = f.fields["device"].rpartition(".")[0]
    return name if name.count(":") > 1 else f"0000:{name}"


def _host(f: Fact) -> str:
    return f.who.host or f.fields.get("host", "")


def _says(key: str, f: Fact, found: Collected) -> str:
    """Return who reports what, on which host."""
    devices = [x.fields[key] for _, x in _reports(found, key) if _host(x) == _host(f)]
    fields = {k: shortened(v, 100) for k, v in f.fields.items()} | {"devices": some(devices)}
    on = f" on {host}" if (host := _host(f)) else ""
    return f"{REPORTS[key].by}{on} reports that {REPORTS[key].text.format_map(fields)}"


def explained(reasons: list[Reason], found: Collected) -> list[Reason]:
    """Return the reasons; those that follow from one report of their host are one, with what to do about that."""
    for key, report in REPORTS.items():
        facts, regex = [f for _, f in _reports(found, key)], report.explains
        fit = [r for r in reasons if r.facts and not r.reported] if facts and regex is not None else []
        fit = [r for r in fit if regex and all(regex.search(f.text) or regex.search(r.text) for f in r.facts)]
        for f in facts if fit else ():
            same = [r for r in fit if not r.reported and _follows(r, report, f, found)]
            if same:
                first, *others = sorted(same, key=lambda r: r.order)
                if others:
                    errors = "; ".join(f"{r.who} {r.text}" for r in (first, *others)[:SHOWN])
                    first.text = f"failed with {len(same):,} different errors ({errors})"
                for r in others:
                    first.take(r)
                    first.after, first.inferred = first.after + r.after, first.inferred or r.inferred
                hosts = _hosts(first, found)
                sure = f.path == first.facts[0].path or (bool(hosts) and hosts <= {_short(_host(x)) for x in facts})
                likely = "is the likely" if sure else "may be the"
                first.after += f"; {_says(key, f, found)}, which {likely} cause ({f.of_line})"
                first.advice, first.reported = report.advice, [f]
                reasons = [r for r in reasons if r is first or r not in same]
                fit = [r for r in fit if r not in same]
    return reasons


def _hosts(r: Reason, found: Collected) -> set[str]:
    """Return the hosts of a reason's ranks, without their domain; the names in front of their lines, if no line names a host."""
    known = {f.who.host for f in r.facts} | r.hosts
    known |= {host for host, ranks in found.on_host.items() if ranks & r.ranks}
    known = known - {""} or {f.who.label for f in r.facts} - {""}
    return set(map(_short, known))


def _short(host: str) -> str:
    """Return a host's name without its domain; an address as it is."""
    return host if host[:1].isdigit() else host.partition(".")[0]


def _follows(r: Reason, report: Report, f: Fact, found: Collected) -> bool:
    """True if a report is of a host of a reason, as far as the log names both, and the failure may have come after it."""
    hosts, host = _hosts(r, found), _short(_host(f))
    here = host in hosts if host and hosts else not r.ranks or f.rank in (None, *r.ranks)
    return here and (report.lasts or _in_time(f, r.facts[0]))


def _in_time(f: Fact, failed: Fact) -> bool:
    """True if a failure did not come before a report, nor long after it, as far as their times are known."""
    a, b = f.at, failed.who.at or failed.at
    zones_s = 0.0 if a is not None and b is not None and a[0] == b[0] else ZONES_S
    return not before(failed, f) and (a is None or b is None or abs(apart(a, b)) <= REPORTED_S + zones_s)


def with_reports(finding: Finding, found: Collected) -> Finding:
    """Return a finding on ranks that wait, with what their hosts report that the late one, or the transfer, may wait for."""
    blamed = set(finding.culprits)
    hosts = found.host_of(blamed)
    waits = [w for w in found.facts if w.role in WAITED]
    for key, f in _reports(found) if finding.kind in ("stall", "timeout") else ():
        elsewhere = bool(_host(f) and hosts) and _host(f) not in hosts
        here = f.rank in blamed or not (blamed and (f.rank is not None or elsewhere))
        if here and REPORTS[key].waits and (not waits or any(_in_time(f, w) for w in waits)):
            message = f"{finding.message}; {_says(key, f, found)}, which may be why ({f.of_line})"
            advice, line = f"{REPORTS[key].advice}; else {finding.advice}", f"{f.path}:{f.line}"
            return replace(finding, message=message, advice=advice, evidence=(*finding.evidence, line))
    return finding


def notes(found: Collected) -> list[str]:
    """Return what a host reports, and what to do if the job fails or hangs, in a log that shows no failure."""
    for key, f in _reports(found):
        if key != "full":
            return [f"{_says(key, f, found)} ({f.of_line}); if the job hangs or fails there: {REPORTS[key].advice}"]
    return []


# reports that hold for all attempts of a launch
LASTING = frozenset(key for key, report in REPORTS.items() if report.lasts)
