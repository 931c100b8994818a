"""The messages between the monitors of a job's nodes, and what is checked before any of it is used.

A message that the keys admit comes from a monitor of this job; it may still be damaged, late, or of a version that is wrong. What breaks a
rule is dropped and counted.
"""

from __future__ import annotations

import zlib
from typing import Annotated

import msgspec
from msgspec import Meta

from distdiag.monitor.cluster.clock import MOST_NS

VERSION = 2
MOST_BYTES = 8 << 20  # of a message, and of a state once it is unpacked
MARGIN_BYTES = 1024  # of a message around its data
MOST_PACKED = 4096  # a longer state is compressed
MOST_S = 3600.0  # until a question is answered
MOST_PER_S, BURST = 20.0, 40.0  # messages of one node
_PACKED = b"z"

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Clock = Annotated[int, Meta(ge=0, le=MOST_NS)]
Offset = Annotated[int, Meta(ge=-MOST_NS, le=MOST_NS)]
Text = Annotated[str, Meta(max_length=200)]


class BadMessage(ValueError):
    """It is not a message that another monitor of this job may send."""


class Report(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """A node to node 0: its state, or that it is there."""

    version: Count = VERSION
    incarnation: Count  # number of the sender among the monitors of its node
    number: Count
    sent_ns: Clock  # monotonic clock of the sender
    offset_ns: Offset = 0  # monotonic clock of node 0 minus that of the sender
    uncertainty_ns: Clock = 0
    wall_ns: Offset = 0  # the sender's wall clock minus its monotonic clock
    started_ns: Clock = 0  # when its run began, by its monotonic clock
    # how long its slowest rank has worked in each of its newest steps at least, and the next one; 0: not known
    works_ms: tuple[float, float] = (0.0, 0.0)
    state: bytes = b""  # a `NodeState`, as `pack` returns it; empty if the node has nothing new


class Receipt(msgspec.Struct, frozen=True, kw_only=True, tag="receipt"):
    """Node 0 to a node: the report has arrived."""

    version: Count = VERSION
    number: Count
    report_sent_ns: Clock  # its `sent_ns`
    received_ns: Clock  # monotonic clock of node 0
    sent_ns: Clock
    urgent: bool = False  # a rank of the job waits: send states more often, and take evidence
    known: Count = 0  # the newest state that node 0 has read, so that the next one holds what is new since; 0: none


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader wants profiled."""

    first_step: Annotated[int, Meta(ge=1, le=1 << 53)]
    steps: Annotated[int, Meta(ge=1, le=50)]
    ranks: Annotated[str, Meta(max_length=4000)] = ""  # folded, as "0-3,8"; empty for all
    timeout_s: Annotated[float, Meta(gt=0, le=3000)]  # until the last step must be recorded


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """Node 0 to a node, for a reader: take a dump of its ranks, or a profile; answer in so many seconds."""

    version: Count = VERSION
    number: Count = 0
    timeout_s: Annotated[float, Meta(gt=0, le=MOST_S)]
    profile: Profile | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """A node to node 0: what a reader asked for; `error` if there is nothing."""

    version: Count = VERSION
    number: Count  # of the question
    data: bytes = b""
    error: Text = ""


Message = Report | Receipt | Ask | Answer
encode = msgspec.msgpack.Encoder().encode
_TO_FIRST, _TO_OTHER = msgspec.msgpack.Decoder(Report | Answer), msgspec.msgpack.Decoder(Receipt | Ask)


def decode(data: bytes, to_first: bool) -> Message:
    """Return a message that this side may get.

    Raises:
        BadMessage: it is something else, too long, or of another version.
    """
    if len(data) > MOST_BYTES:
        raise BadMessage("too long")
    try:
        found = (_TO_FIRST if to_first else _TO_OTHER).decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise BadMessage(f"not a message: {e}") from None
    if found.version != VERSION:
        raise BadMessage("another version of distdiag")
    return found


def pack(data: bytes) -> bytes:
    """Return bytes, compressed if they are many."""
    return _PACKED + zlib.compress(data, 1) if len(data) > MOST_PACKED else b"-" + data


def unpack(data: bytes, most: int = MOST_BYTES) -> bytes:
    """Return what was packed.

    Raises:
        BadMessage: it was not, or is longer than `most`.
    """
    if data[:1] != _PACKED:
        return data[1:]
    unpacker = zlib.decompressobj()
    try:
        out = unpacker.decompress(data[1:], most)
    except zlib.error as e:
        raise BadMessage(f"not compressed: {e}") from None
    if not unpacker.eof:
        raise BadMessage("too long")
    return out


class Order:
    """Admits the messages of one node that are new, at no more than a fixed rate."""

    def __init__(self) -> None:
        self.incarnation = self.number = 0
        self._left, self._at_s = BURST, 0.0

    def admit(self, report: Report, now_s: float) -> None:
        """Take note of a report.

        Raises:
            BadMessage: it repeats an older one, an earlier monitor sent it, or there are too many.
        """
        self._left = min(BURST, self._left + (now_s - self._at_s) * MOST_PER_S)
        self._at_s = now_s
        if self._left < 1:
            raise BadMessage("too many messages")
        self._left -= 1
        if (report.incarnation, report.number) <= (self.incarnation, self.number):
            raise BadMessage("an old message")
        self.incarnation, self.number = report.incarnation, report.number
