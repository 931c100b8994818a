"""The command lines that README and the site show, and what a test does with each of them.

A line is taken from the blocks of commands, from the help texts in the reference, and from inline code that starts with a program and
has an argument. `HERE` replaces what belongs to the reader (RUN, FILE, eight ranks). `RUN` and `NOT_HERE` name every line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    PROJECT / "README.md",
    *sorted((PROJECT / "docs").rglob("*.md"), key=lambda path: ("reference" in path.parts, path)),
]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(
    r"([A-Z_]+=\S+ )*(CMD$|(distdiag|torchrun|mpirun|python3?|pip|make|pytest|uvx|srun|kubectl|docker|curl|sqlite3|py-spy) .)"
)

# -- what is another thing here --------------------------------------------------------------------------------------

_OWN_LINK = "--params 7e9 --ranks 1,8,64"
HERE = [
    # a job of one rank costs half as much, and its command line is the same
    (r"(DISTDIAG_METRICS.*) 8\b", r"\1 2"),
    (r"^torchrun … (?=-m distdiag.run train.py)", "DISTDIAG_METRICS=9464 torchrun --nproc-per-node 2 "),
    (r"torchrun …", "torchrun --nproc-per-node 1"),
    (r"torchrun --logs-specs distdiag …", "torchrun --logs-specs distdiag --nproc-per-node 1"),
    (r"(?<!DISTDIAG_METRICS=9464 torchrun )--nproc-per-node [248](?= train| -m)", "--nproc-per-node 1"),
    (r"(?<=train.py)( args| --epochs 3)?$", " --epochs 3"),
    (r"\bCMD$", "python train.py --epochs 3"),
    (r"\[--run-dir DIR\]", "--run-dir runs/b"),
    (r"distdiag run( --keep (500M|SIZE)| --metrics ADDRESS| --tape train.py --epochs 3)?$",
     "distdiag run --run-dir runs/a -m mypackage.train"),
    (r"distdiag run --run-dir runs/a", "distdiag run --nproc-per-node 1 --run-dir runs/a --keep 500M --tape --metrics 127.0.0.1:0"),
    # the reader's run, files, process
    (r"/path/to/RUN\b|\bRUN\b", "reports/latest"),
    (r"file:run.db", "file:reports/latest/run.db"),
    (r"\bDUMPS/", "dumps/"),
    (r"\bKIND\b", "deadlock"),
    (r"\bCOMMAND\b", "history"),
    (r"\bHOST:", "127.0.0.1:"),
    (r"--tape FILE", "--tape sent.tape"),
    (r"history FILE", "history rows.parquet"),
    (r"distdiag attach( --here)?$", "distdiag attach --job LAUNCHER"),  # jobs of other tests run here as well
    (r"py-spy dump --pid N", "py-spy dump --pid RANK0"),
    (r"--rank 5", "--rank 1"),
    # what names an option of a command, without the command's arguments
    (r"distdiag compare --json", "distdiag compare reports/OLD reports/NEW --json"),
    (r"distdiag history( --output-format json)?$", "distdiag history reports/ --output-format json"),
    # a screen in a terminal: tests/tui drive it
    (r"(distdiag tui)(?!.*--once|.*--web)", r"\1 --once"),
    # the same in less time
    (r"distdiag probe (NAME --json|allreduce( --nproc \d)?)$", "distdiag probe allreduce --nproc 2 --budget 3"),
    (r"(distdiag doctor --json|distdiag doctor --reach .*)", r"\1 --no-torch"),
]  # fmt: skip

# -- what runs, and how it ends --------------------------------------------------------------------------------------

RUNNING, HUNG, OVER, JOB = "while a job trains", "while it hangs", "when it is over", "starts a job"


class Row(NamedTuple):
    pattern: str  # of the whole line
    when: str
    codes: tuple[int, ...] = (0,)


RUN = [
    Row(r"DISTDIAG_METRICS=9464 torchrun .*", RUNNING),
    Row(r"curl .*", RUNNING),
    Row(r"distdiag profile( --json| --culprit)?", RUNNING),
    Row(r"distdiag diagnose", HUNG, (1,)),
    Row(r"distdiag tui --once", HUNG),
    Row(r"distdiag dump( --json)?", HUNG),
    Row(r"distdiag attach --job LAUNCHER", HUNG, (1,)),
    Row(r"py-spy dump .*", HUNG),
    Row(r"distdiag diagnose( reports/latest)? --why \w+", OVER),
    Row(r"distdiag diagnose (reports/latest|--json|--fail-on warning)", OVER, (1,)),
    Row(r"distdiag diagnose --output-format \w+( > .*)?", OVER, (1,)),
    Row(r"distdiag diagnose (job\.log|dumps/|job\.log dumps/|job\.log node\*\.log dumps/)", OVER, (1,)),
    Row(r"distdiag diagnose rank0\.txt rank1\.txt", OVER, (1,)),
    Row(r"distdiag diagnose rank0\.pt\.trace\.json rank1\.pt\.trace\.json", OVER),
    Row(r"distdiag diagnose examples/cases/(\w+/fixed|dataloader_decode|nanogpt_windows)", OVER),
    Row(r"distdiag diagnose examples/cases/\w+", OVER, (1,)),
    Row(r"distdiag tui --once .+", OVER),
    Row(r"distdiag report( .*)?", OVER),
    Row(r"distdiag compare .*", OVER, (0, 3)),
    Row(r"distdiag history (reports/|rows\.parquet)( .*)?", OVER),
    Row(r"distdiag history --help", OVER),
    Row(r"sqlite3 .*", OVER),
    Row(r"while distdiag diagnose .*; mail .*", OVER),
    Row(r"distdiag (config|completion|skill|mcp)( .*)?", OVER),
    Row(r"mkdir .*", OVER),
    Row(r"distdiag doctor( .*)?", OVER, (0, 1)),
    Row(r"distdiag probe list", OVER),
    Row(rf"distdiag probe step {_OWN_LINK} .*", OVER),
    Row(r"distdiag probe allreduce --nproc 2 --budget 3", JOB, (0, 3)),
    Row(r"DISTDIAG=[01] python train\.py .*", JOB),
    Row(r"DISTDIAG=1 torchrun .* train\.py .*", JOB),
    Row(r"torchrun --logs-specs .*", JOB),
    Row(r"torchrun .*-m distdiag\.run .*", JOB),
    Row(r"distdiag run .*", JOB),
    Row(r"pytest( -p no:distdiag)?", JOB),
]  # fmt: skip

# -- what does not run here, and why ---------------------------------------------------------------------------------

NOT_HERE = {
    r"(python3? -m )?pip install( .*)?": "installs; tools/check_wheel.py does it",
    r"cd \.\.": "a step of the installation",
    r"uvx .*": "installs; tools/check_wheel.py runs the commands of an installed wheel",
    r"make .*|FUZZ_SECONDS=600 make fuzz": "a target of the Makefile: minutes; tests/test_documents.py checks its name",
    r"kubectl .*": "needs a cluster",
    r"docker run .*": "needs docker",
    r"(DISTDIAG=1 )?srun .*": "needs Slurm; tests/integration/test_mpirun_and_srun.py and test_slurm_checks.py",
    r"distdiag history s3://.*": "needs object storage; tests/history/test_object_storage.py",
    r"distdiag demo": "a minute; tests/cli/test_demo.py",
    r"distdiag tui --web": "serves until it is ended; tests/tui/test_web.py",
    r"distdiag bench faults( .*)?": "the whole collection: an hour; tests/faults",
    r"distdiag probe all .*": "a minute of both cores; tests/probes/test_commands.py and tests/probekit/test_node_check.py",
    r"distdiag probe (pairs|step|dataloader)( --nproc \d)?": "ten seconds of all cores; tests/probes/test_commands.py",
    r"distdiag probe step --strategies all .*": "two minutes of all cores; tests/probekit/test_step.py",
    r"python (-m )?benchmarks[./].*": "a benchmark: minutes on an idle machine",
    r"torchrun .* benchmarks/.*": "a benchmark: minutes on an idle machine",
    r"torchrun .* -m distdiag\.train .*": "trains on CIFAR-10 for minutes; tests/integration/test_main_job.py",
    r"torchrun --n.* probes/.*": "ten seconds on all cores; tests/probes/test_on_ranks.py",
    r"DISTDIAG=1 torchrun .* examples/cases/.*": "tests/test_case_studies.py records two of the cases",
    r"(AUTOPSY_SEEDS=20 )?pytest tests/.*": "part of this suite",
}  # fmt: skip


def shown() -> tuple[dict[str, str], set[str]]:
    """Return every command line as it is run here with the document that has it first, and the patterns of `HERE` that were used."""
    out: dict[str, str] = {}
    used: set[str] = set()
    for document in DOCUMENTS:
        for line in _lines(document.read_text()):
            for pattern, own in HERE:
                line, times = re.subn(pattern, own, line)
                used |= {pattern} if times else set()
            out.setdefault(line, str(document.relative_to(PROJECT)))
    return out, used


def _lines(text: str) -> Iterator[str]:
    """Yield the command lines of a document; a block with lines after `$ ` shows the output, too."""
    for language, block in _FENCE.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        if any(line.startswith("$ ") for line in lines):
            yield from (line[2:] for line in lines if line.startswith("$ "))
        elif language == "text":  # a help text: an example, and often what it does
            yield from (re.split(r"   +|\s#", line.strip())[0] for line in lines if _example(line))
        elif language in ("", "sh", "bash", "console"):
            for line in lines:
                command, _, comment = line.partition("#")
                yield from (" ".join(part.split()) for part in (command, *_in_comment(comment)) if part.strip())
    yield from (code for code in re.findall(r"`([^`\n]+)`", _FENCE.sub("", text)) if _COMMAND.match(code))


def _example(line: str) -> bool:
    return bool(re.match(r"  (distdiag|mkdir) ", line)) and not line.startswith("  distdiag starts")


def _in_comment(comment: str) -> list[str]:
    return [part.removeprefix("or: ") for part in comment.strip().split("; ") if part.startswith("or: distdiag")]


def row(line: str) -> Row | None:
    """Return the first row of `RUN` for a line."""
    return next((row for row in RUN if re.fullmatch(row.pattern, line)), None)


def reason(line: str) -> str | None:
    """Return why a line does not run here."""
    return next((why for pattern, why in NOT_HERE.items() if re.fullmatch(pattern, line)), None)
