"""What a rank does while it is in no collective: one table of words, of what shows them, and of how they are worded.

The words are those of `findings.Where.state` and of column `activity` in run.db.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    word: str  # as recorded
    shown: str = ""  # on the screen, in brackets behind a rank's site
    does: str = ""  # in a sentence whose subject is the rank; empty for what no stall names
    do: str = ""  # advice; empty if there is none beyond looking at the line
    patience_s: float = 0.0  # seconds that other ranks may wait for one that does this; 0: those of `user_code`
    # matches `module.function` of the innermost Python frame, including torch's and the standard library's
    frame: str = r"$^"
    line: str = r"$^"  # matches the text of the user's line: C functions have no frame
    # the activities of which the user's line `refines` this one, where the frame alone shows a lock, a socket, or nothing (in C++)
    within: tuple[str, ...] = ()
    refines: str = r"$^"  # see `within`


ACTIVITIES = (  # in the order in which lines are searched for them
    Activity(
        word="stdin", patience_s=5.0, shown="waiting for standard input", does="waits for standard input",
        do="remove the prompt or breakpoint, or answer it before the launch; only rank 0 may ask, and the others must not wait "
        "for it",
        frame=r"^cmd\.cmdloop$|^pdb\.(_cmdloop|interaction|user_\w+)$",
        line=r"\binput\s*\(|sys\.stdin|\bstdin\.",
    ),
    Activity(
        word="debugger", patience_s=10.0, shown="waiting for a debugger", does="waits for a debugger",
        do="attach one, or remove that call",
        within=("lock", "socket", "user_code"), refines=r"\bwait_for_client\(|\bset_trace\(",
    ),
    Activity(
        word="lock", patience_s=10.0, shown="waiting for a lock", does="waits for a lock",
        do="find who holds the lock; hold no lock across a collective",
        frame=r"^threading\.(wait|acquire|__enter__|_wait_for_tstate_lock|join)|^synchronize\.",
        line=r"\.(?i:flock|lockf|acquire)\s*\(|^(?i:with\s.*lock)",
    ),
    Activity(
        word="lock_file", patience_s=60.0, shown="waiting for a lock file", does="waits for a lock file to be removed",
        do="see which process made that file (of torch's extensions: `lock` in their folder in TORCH_EXTENSIONS_DIR, by default in "
        "~/.cache/torch_extensions); if none holds it (its owner was killed), delete it",
        frame=r"^file_baton\.wait$|^_api\.acquire$",  # while another process builds: torch's extensions, filelock
    ),
    Activity(
        word="process", within=("socket",), does="waits for a process that it started", shown="waiting for a process",
        do="see what that process does (`ps --ppid PID`), and give the call a timeout; or let all ranks continue without it; a process that asks "
        "for input hangs if it shares the rank's stdin (`stdin=DEVNULL`, ffmpeg's `-nostdin`), and one whose output goes to a pipe that nobody reads "
        "(`stdout=PIPE`, then `wait()` instead of `communicate()`) once that is full",
        refines=r"\bsubprocess\.|\bPopen\b|\.communicate\(|\bos\.system\(|\b(p|popen|proc\w*|child\w*)\.wait\(",
    ),
    Activity(
        word="store_key", patience_s=12.0, within=("socket", "user_code", "sleep"), does="waits for a key of a store",
        shown="waiting for a key of a store",
        do="find which rank should set that key, and what led it past that line: a return before it, an exception; give the "
        "wait a timeout",
        refines=r"\b(?:tcp_|file_|dist_|_)?store\w*\.(?:get|wait|multi_get)\(",
    ),
    Activity(
        word="event_loop", within=("socket",), does="waits in an event loop in which no task can run",
        shown="waiting in an event loop",
        do="find the task that it awaits and what that task awaits (asyncio.all_tasks(), PYTHONASYNCIODEBUG=1): a task that "
        "failed without being awaited, a queue that no task fills, a peer that does not answer",
        refines=r"\.run_until_complete\(|\.run_forever\(|\b(asyncio|trio|anyio)\.run\(",
    ),
    Activity(
        word="socket", patience_s=12.0, shown="waiting for a socket",
        does="waits on a socket, a pipe or a key of a store",
        do="check the other end of that connection (who should send, or set the key?), and give it a timeout",
        frame=r"^(socket|ssl|selectors|client|connectionpool|connection|subprocess|popen_fork|popen_spawn_posix)\.",
        line=r"\.readlines?\s*\(|(stdout|stderr|pipe\w*|stream|resp\w*)\.read\w*\s*\("
        r"|\.recv\w*\s*\(|\.accept\s*\(|\.connect\s*\(|urlopen\s*\(|store\w*\.(get|wait|multi_get)\s*\(",
    ),
    Activity(
        word="checkpoint", patience_s=60.0, shown="writing a checkpoint", does="writes a checkpoint",
        do="wait, or write checkpoints asynchronously",
        frame=r"^serialization\.(save|_save|_legacy_save)", line=r"torch\.save\s*\(|\.fsync\s*\(|zlib|\.dump\s*\(",
    ),
    Activity(
        word="queue", patience_s=10.0, within=("lock",), shown="waiting for a queue", does="waits on a queue",
        do="find who should fill or drain that queue",
        frame=r"^queue\.(get|put|join)|^queues\.(get|put)", line=r"\.get\s*\(|\.put\s*\(", refines=r"\.(get|put)\(",
    ),
    Activity(  # between processes: on a pipe, as is much else that has a `get`
        word="queue", within=("socket",), shown="waiting for a queue",
        refines=r"(?i)\b(?:\w*queue\w*|\w*_q|q)\.(?:get|put)\(",
    ),
    Activity(
        word="worker", within=("lock",), does="waits for a thread or process that it started",
        shown="waiting for a thread or process",
        do="check that thread or process: it may have ended by an error that no log shows, been killed, or wait for this rank; "
        "`distdiag dump` shows the threads, `ps --ppid PID` the processes",
        frame=r"^_base\.result$",  # of a future
        refines=r"\.(map|starmap|i?map_\w+|apply|result|join|wait)\(|\bas_completed\(",
    ),
    Activity(
        word="data", patience_s=12.0, shown="waiting for data", does="waits for its data loader",
        do="check the loader's workers of that rank (dead, stuck on storage?); `distdiag dump` shows them",
        frame=r"^dataloader\.(_try_get_data|_get_data|_next_data|__next__)|^(fetch|collate|worker|pin_memory)\.",
    ),
    Activity(
        word="gil_held", patience_s=8.0, shown="holding the GIL", does="is stuck in C code that holds the GIL",
        do="the native call at that line keeps all other threads of the rank from running: check its input (a regular expression that "
        "backtracks, a long text), split it, or run it in another process",
    ),
    Activity(
        word="device", patience_s=20.0, shown="waiting for its own device",
        does="waits for its own device, which is busy with other work",
        do="check what was launched before that line: a long kernel, a copy, a device shared with another process",
    ),
    Activity(word="sleep", patience_s=10.0, shown="sleeping", does="sleeps"),
    Activity(word="user_code", patience_s=20.0, shown="in its own code", does="is busy in its own code"),
    # Not what a rank that is waited for does, but a state that a finding may give with a site.
    Activity(word="data_worker", shown="its data loader's worker"),
    Activity(word="waits_for_device", shown="its host, waiting for its device"),
    Activity(word="waiting", shown="waiting in a collective"),
    Activity(word="last_call", shown="its last call in the dump"),
    *(Activity(word=word, shown=word) for word in ("stopped", "exited", "killed", "crashed", "finished")),
)  # fmt: skip

SHOWN = {a.word: a.shown for a in ACTIVITIES}
_BY_FRAME, _BY_LINE, _REFINED = (
    [(re.compile(pattern), a) for a in ACTIVITIES if (pattern := getattr(a, name)) != r"$^"]
    for name in ("frame", "line", "refines")
)


def by_frame(raw_innermost: str) -> str | None:
    """Return the word that the innermost Python frame (`module.function`) shows."""
    return next((a.word for pattern, a in _BY_FRAME if pattern.search(raw_innermost)), None)


def by_line(line: str, idle: bool) -> str | None:
    """Return the word that the user's line shows; of a host that is not idle only what computes while it waits."""
    found = (a.word for pattern, a in _BY_LINE if pattern.search(line))
    return next((word for word in found if idle or word == "checkpoint"), None)


def refined(word: str, line: str) -> str:
    """Return what a rank waits for by its line, where `word` alone shows a lock or a socket."""
    return next((a.word for pattern, a in _REFINED if word in a.within and pattern.search(line)), word)
