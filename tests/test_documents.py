"""The hand-written documents name only what exists: files, links, anchors, commands and options. README is short."""

from __future__ import annotations

import functools
import re
import shlex
import tomllib
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from distdiag.cli import COMMANDS, app
from distdiag.probekit.command.catalog import PROBES
from distdiag.probekit.command.options import build_command
from distdiag.run import command as run_command

PROJECT = Path(__file__).resolve().parents[1]
DOCS = PROJECT / "docs"
DOCUMENTS = [
    *PROJECT.glob("*.md"), *DOCS.rglob("*.md"), *(PROJECT / ".github/ISSUE_TEMPLATE").glob("*.md"),
    PROJECT / "tests/standins/README.md",
]  # fmt: skip
SOURCES = [
    f"/{path.relative_to(PROJECT)}"
    for folder in ("distdiag", "tests", "probes", "benchmarks", "tools", "examples")
    for path in (PROJECT / folder).rglob("*.*")
]
SKIPPED = ("train.py", "KIND.py")  # a user's script, and a pattern
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(PROJECT)))


# -- files and links --------------------------------------------------------------------------------------------


def links(text: str) -> list[str]:
    prose = FENCE.sub("", text)
    found = re.findall(r"\]\(([^)\s]+)", prose) + re.findall(r"^\[[^\]]+\]: (\S+)$", prose, re.MULTILINE)
    return [link for link in found if not link.startswith("http")]


@functools.cache
def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as Python-Markdown makes them; GitHub's are equal for such headings."""
    out: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", document.read_text()), re.MULTILINE):
        text = unicodedata.normalize("NFKD", heading.replace("`", "")).encode("ascii", "ignore").decode()
        out.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower()))
    return out


@every_document
def test_files_and_links_in_a_document_exist(document: Path) -> None:
    text = document.read_text()
    named = re.findall(r"`([\w./-]+\.(?:py|sql|c))`", text)
    missing = [n for n in named if not n.endswith(SKIPPED) and not any(s.endswith(f"/{n}") for s in SOURCES)]
    named = re.findall(r"`((?:benchmarks|tests|tools|docs|probes|examples)/[\w./-]+)`", text)
    missing += [n for n in named if not re.search("ROOM|KIND", n) and not (PROJECT / n).exists()]
    for link in links(text):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    assert missing == []


@pytest.mark.parametrize("document", sorted(DOCS.rglob("*.md")), ids=lambda path: str(path.relative_to(DOCS)))
def test_pages_of_the_site_link_within_it_and_are_in_its_navigation(document: Path) -> None:
    """The site has docs/ only, and no address of a repository to link to."""
    outside = [
        link for link in links(document.read_text())
        if not (document.parent / link.partition("#")[0]).resolve().is_relative_to(DOCS)
    ]  # fmt: skip
    assert outside == []
    assert re.search(rf"[-:] {document.relative_to(DOCS)}$", (PROJECT / "mkdocs.yml").read_text(), re.MULTILINE)


def test_the_navigation_names_pages_that_exist() -> None:
    named = re.findall(r"([\w/-]+\.md)$", (PROJECT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(named) > 30 and len(set(named)) == len(named)
    assert [name for name in named if not (DOCS / name).exists()] == []


def test_the_readme_has_two_hundred_lines_of_a_hundred_columns_at_most() -> None:
    lines = (PROJECT / "README.md").read_text().splitlines()
    assert len(lines) <= 200
    assert [line for line in lines if len(line) > 100] == []


# -- command lines ----------------------------------------------------------------------------------------------

TARGETS = set(re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE))
PLACEHOLDER = re.compile(r"^(…|\.\.\.|\[.*|.*\]|\||>|2>)$")


def command_lines(text: str) -> Iterator[str]:
    """Yield the command lines of a document: of its blocks without a language, and of its inline code."""
    for language, block in FENCE.findall(text):
        if language in ("", "sh"):
            yield from (line.removeprefix("$ ") for line in block.replace("\\\n", " ").splitlines())
    yield from re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def calls(line: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each call in a command line of what the project defines: (`distdiag`, `distdiag.run` or `make`, its arguments)."""
    for part in re.split(r" && | \|\| |; | > | \| ", re.sub(r"\s#.*$", "", line)):
        if re.search(r"COMMAND|KIND\b(?!=)|^distdiag\.", part) or part.startswith("make clean:"):
            continue
        try:
            words = shlex.split(part)
        except ValueError:  # prose with an apostrophe
            continue
        words = [word for word in words if not PLACEHOLDER.match(word)]
        if "-m" in words and "distdiag.run" in words:
            yield "distdiag.run", words[words.index("distdiag.run") + 1 :]
        for program in ("distdiag", "make"):
            if program in words[:1] or (program == "distdiag" and program in words and words[0] in STARTERS):
                yield program, words[words.index(program) + 1 :]


STARTERS = ("srun", "kubectl", "uvx", "while", "until", ".venv/bin/distdiag")


def wrong(program: str, words: list[str]) -> str:
    """Return what is wrong with a call, or an empty text."""
    if program == "make":
        return next((f"no target {w}" for w in words[:1] if re.fullmatch(r"[a-z-]+", w) and w not in TARGETS), "")
    if program == "distdiag.run":
        return unknown(run_command, words)
    if not words or words[0].startswith("-"):
        return refused("distdiag", app, [w for w in words if w.startswith("-")]) if words else ""
    if words[0] not in COMMANDS:
        return f"no command {words[0]}"
    command = app.get_command(click.Context(app), words[0])
    if words[0] == "probe" and len(words) > 1:
        if words[1] not in {*PROBES, "all", "list", "NAME"}:
            return f"no probe {words[1]}"
        command, words = build_command(named=True), words[1:]
    if isinstance(command, click.Group) and len(words) > 1:
        command, words = command.get_command(click.Context(command), words[1]), words[1:]
    if words[0] == "run":  # torchrun's options may come before the script
        words = [w for w in words if w not in ("--nproc-per-node", "8", "2", "4")]
    return refused(words[0], command, words[1:]) if command is not None else f"no command {words[1]}"


def unknown(command: click.Command, words: list[str]) -> str:
    """Return the first option in front of the script that does not exist; click itself would give it to the script."""
    known = {name: option for option in command.params for name in option.opts}
    rest = iter(words)
    for word in rest:
        if not word.startswith("--"):
            break
        if word not in known:
            return f"No such option: {word}"
        if not getattr(known[word], "is_flag", False):
            next(rest, None)
    return ""


def refused(name: str, command: click.Command, words: list[str]) -> str:
    """Return why click refuses the options: names and values, not the existence of files."""
    context = click.Context(command, info_name=name)
    try:
        values, _, _ = command.make_parser(context).parse_args(args=list(words))
        for option in command.params:
            if isinstance(option.type, click.Choice) and isinstance(value := values.get(option.name or ""), str):
                option.type.convert(value, option, context)
    except click.UsageError as e:
        if "requires an argument" in e.format_message() and words[-1].startswith("-"):
            return ""  # prose that names an option
        return e.format_message()
    return ""


@pytest.mark.parametrize(
    "document",
    [document for document in DOCUMENTS if document.name not in ("CHANGELOG.md", "commands.md")],  # history; generated
    ids=lambda path: str(path.relative_to(PROJECT)),
)
def test_command_lines_in_a_document_exist_with_their_options(document: Path) -> None:
    text = document.read_text()
    bad = {
        line: problem
        for line in command_lines(text)
        for program, words in calls(line)
        if (problem := wrong(program, words))
    }
    assert bad == {}


EXTRAS = set(tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


@every_document
def test_extras_and_tools_that_a_document_names_exist(document: Path) -> None:
    for line in command_lines(document.read_text()):
        for extras in re.findall(r"pip install .*?(?:distdiag|\.)\[([\w,]+)\]", line):
            assert set(extras.split(",")) <= EXTRAS, line
        for tool in re.findall(r"python ((?:tools|benchmarks|tests|probes)/[\w/]+\.py)", line):
            assert (PROJECT / tool).exists(), line


@every_document
def test_python_in_a_document_compiles(document: Path) -> None:
    """A call signature of the reference is no statement; a line of IPython's is left out."""
    for language, block in FENCE.findall(document.read_text()):
        if language == "python" and document.parent.name != "reference":
            compile("\n".join(line for line in block.splitlines() if not line.startswith("%")), str(document), "exec")


def test_variables_that_documents_name_are_read_by_the_code() -> None:
    code = "".join(
        path.read_text() for path in (PROJECT / "distdiag").rglob("*.*") if path.suffix in (".py", ".c", ".h")
    )
    code += "".join((PROJECT / name).read_text() for name in ("_distdiag_autoload.py", "setup.py"))
    named = {name for document in DOCUMENTS for name in re.findall(r"\bDISTDIAG_[A-Z_]+[A-Z]\b", document.read_text())}
    assert len(named) > 8
    assert [name for name in sorted(named) if name not in code] == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("distdiag diagnose --jsn", "No such option"),
        ("distdiag tui --screen rank5", "is not one of"),
        ("distdiag diagnoze", "no command"),
        ("srun distdiag dump --frobnicate RUN", "No such option"),
        ("distdiag probe allreduse", "no probe"),
        ("torchrun -m distdiag.run --rundir x train.py", "No such option"),
        ("make demos", "no target"),
    ],
)
def test_a_wrong_command_line_is_noticed(line: str, problem: str) -> None:
    found = [wrong(program, words) for program, words in calls(line)]
    assert found and problem in found[0]
