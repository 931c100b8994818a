"""Classify what a rank is doing, from its innermost frame and the text of its line."""

from __future__ import annotations

import re

from distdiag.page.layout import Phase

# the innermost Python frame, including torch's and the standard library's
_BY_FRAME = (
    (re.compile(r"^dataloader\.(_try_get_data|_get_data|_next_data|__next__)"), "data"),
    (re.compile(r"^(fetch|collate|worker|pin_memory)\."), "data"),
    (re.compile(r"^queue\.(get|put|join)"), "queue"),
    (re.compile(r"^queues\.(get|put)"), "queue"),
    (re.compile(r"^threading\.(wait|acquire|__enter__|_wait_for_tstate_lock|join)"), "lock"),
    (re.compile(r"^synchronize\."), "lock"),
    (re.compile(r"^(socket|ssl|selectors|client|connectionpool)\."), "socket"),
    (re.compile(r"^(connection|subprocess|popen_fork|popen_spawn_posix)\."), "socket"),
    (re.compile(r"^serialization\.(save|_save|_legacy_save)"), "checkpoint"),
)
# C functions have no frame, so the calling line is searched for them
_BY_LINE = (
    (re.compile(r"\binput\s*\(|sys\.stdin|\bstdin\."), "stdin"),
    (re.compile(r"\.flock\s*\(|\.lockf\s*\(|\.acquire\s*\(|^with\s.*lock", re.IGNORECASE), "lock"),
    (re.compile(r"\.readlines?\s*\(|(stdout|stderr|pipe\w*|stream|resp\w*)\.read\w*\s*\("), "socket"),
    (
        re.compile(r"\.recv\w*\s*\(|\.accept\s*\(|\.connect\s*\(|urlopen\s*\(|store\w*\.(get|wait|multi_get)\s*\("),
        "socket",
    ),
    (re.compile(r"torch\.save\s*\(|\.fsync\s*\(|zlib|\.dump\s*\("), "checkpoint"),
    (re.compile(r"\.get\s*\(|\.put\s*\("), "queue"),
)


def activity_of(raw_innermost: str, line: str, phase: Phase, idle: bool) -> str:
    """Return one of the words of `findings.Where.state`, for a living rank that does not wait in a collective.

    Args:
        raw_innermost: `module.function` of the innermost Python frame.
        line: Text of the user's line.
        phase: The phase word of the page.
        idle: True if the main thread sleeps and uses no CPU.
    """
    if phase == Phase.DATA:
        return "data"
    for pattern, word in _BY_FRAME:
        if pattern.search(raw_innermost):
            return word
    if phase == Phase.CHECKPOINT:
        return "checkpoint"
    for pattern, word in _BY_LINE:
        if pattern.search(line) and (idle or word == "checkpoint"):
            return word
    return "user_code"
