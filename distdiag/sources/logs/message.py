"""What is known of one message of a log: the record that each has in `distdiag.sources.logs.messages`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from distdiag.terms.untrusted import bounded


class Role(StrEnum):
    CAUSE = "cause"  # this rank, or its device, failed by itself
    WAIT = "wait"  # this rank waited for others until a timeout
    VICTIM = "victim"  # another process ended first, or the network did
    START = "start"  # the ranks did not find each other
    STOP = "stop"  # stopped from outside
    EXIT = "exit"  # how a process ended, by its launcher
    FACT = "fact"  # not an error: which process is which rank
    HINT = "hint"  # what went wrong below an exception


C, W, V, S, X, E, F, H = (
    Role.CAUSE, Role.WAIT, Role.VICTIM, Role.START, Role.STOP, Role.EXIT, Role.FACT, Role.HINT,
)  # fmt: skip
# exceptions of a launcher, or those by which a rank fails after others
FOLLOWERS = ("CheckpointException", "ChildFailedError", "SignalException", "CalledProcessError", "ProcessRaisedException", "RayTaskError", "RayActorError",
              "ActorDiedError", "EngineDeadError", "CancelledError", "DeadlockDetectedException", "SystemExit", "ProcessExitedException")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Meaning:
    """What an event is reported as.

    Attributes:
        kind, cause: Kind and cause of the finding.
        text: The message after `rank 3`, with the event's fields in braces.
        advice: What to do.
    """

    kind: str
    cause: str
    text: str
    advice: str

    @property
    def subject(self) -> str:
        """Return who has it, if no line names a rank or a process."""
        return "the host" if self.kind == "gpu" or self.cause == "silent" else "a process"


@dataclass(frozen=True, slots=True)
class Pattern:
    """One wording of a message.

    Attributes:
        name: That of the message.
        needle: A literal part of every such line, by which most lines are dismissed.
        regex: Searched in the line; its named groups are the event's fields.
    """

    name: str
    role: Role
    needle: str
    regex: re.Pattern[str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Message:
    """One message, in all its wordings.

    Attributes:
        about: The fields with the ranks that it is about, if these are not its writer.
        own: A failure of the device, of the launch or of the host's memory: never a consequence of another failure.
        of_driver, of_process: The driver, or a process, reports that a device failed.
        unstarted: The ranks did not find each other; what ended their processes came after it.
        by_left: In a later attempt, it follows from a process that the one before has left.
    """

    name: str
    role: Role  # what such a line means for the rank that wrote it
    patterns: tuple[Pattern, ...] = ()
    meaning: Meaning | None = None  # what it is reported as, if it needs no comparison of ranks
    stop: str = ""  # what stopped the job, of a stop from outside
    about: tuple[str, ...] = ()
    own: bool = False
    of_node: bool = False  # the kernel or the host reports it, whichever job it hits
    of_driver: bool = False
    of_process: bool = False
    whole_node: bool = False  # all ranks of the node are lost
    of_program: bool = False  # if all ranks have it, the program or its settings are the cause
    of_group: bool = False  # its numbers of ranks are those of a group
    once: str = ""  # "host" or "job": its lines there, whatever they say, are one event
    by_text: bool = False  # what to do depends on the text of its line
    aborts: bool = False  # torch aborts the process that reported it
    unstarted: bool = False
    of_ranks: bool = False  # how torchrun and its like report the end of ranks
    launcher: str = ""  # who reports an end
    series: bool = False  # its numbers are compared from line to line
    by_left: bool = False


def message(name: str, role: Role, *wordings: tuple[str, str] | tuple[str, str, Role], **more: Any) -> Message:
    """Return the record of a message; a wording is (needle, regex), and its role if that is another one."""
    patterns = (Pattern(name, w[2] if len(w) == 3 else role, w[0], bounded(w[1])) for w in wordings)
    return Message(name, role, tuple(patterns), **more)
