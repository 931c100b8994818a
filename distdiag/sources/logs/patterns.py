"""All messages that are known, and the literal parts by which the lines that can matter are found.

Of the wordings that fit a line, the first one counts, in the order of these files. Wording differs between versions of torch
(1.9 to 2.10); where it does, one row matches all.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from distdiag.sources.logs.message import Meaning, Message, Pattern
from distdiag.sources.logs.messages import collectives, connections, devices, ends, hosts, processes, starts

_FILES = (collectives, starts, devices, hosts, ends, connections, processes)
MESSAGES: Mapping[str, Message] = MappingProxyType({m.name: m for file in _FILES for m in file.MESSAGES})
MEANINGS: Mapping[str, Meaning] = MappingProxyType({m.name: m.meaning for m in MESSAGES.values() if m.meaning})
TABLE: tuple[Pattern, ...] = tuple(p for m in MESSAGES.values() for p in m.patterns)

# Lines that the collector reads itself: tables and tracebacks of several lines.
_BEGINS = ("Traceback (most recent call last)", "ray::", "│ /", 'File "', 'File \\"', "Stack trace of the failed")
_MORE = (
    "Root Cause", "error stack:", "exitcode", "local_rank:", "Missing ranks:", "Name:  ", "describe pod", "State:  ", "Process name: [[", "Exit code:", " RUNNING AT ", "EXIT CODE:", "KILLED BY SIGNAL:",
    "terminated with the following error", " global rank ", "==> ", "RankID:", "/task:",
    "actor_id: ", "namespace: ", "rank      :", "host      :", "time      :", "traceback :", "Last error:", "Exception ignored in", "[distdiag] ", "(most recent call first)", "<|im_", "<|start_header_id|>", "<|eot_id|>",
)  # fmt: skip
# They matter near a traceback only; far from one, such a line is shown if nothing else is found.
_WEAK = ("Error", "Exception", " from /", "above exception", "Interrupt", "Expired", "Exit", "frame #")
_WORDS = tuple(dict.fromkeys((*(p.needle for p in TABLE), *_BEGINS, *_MORE, *_WEAK)))
NEEDLES: tuple[bytes, ...] = tuple(word.encode() for word in _WORDS)
WEAK = frozenset(word.encode() for word in _WEAK)
BEGINS = frozenset(word.encode() for word in _BEGINS)
# the next lines belong to it, whatever they contain
HEADS = (
    b'File "', b'File \\"', b"Last error:", b"noticed that process rank", b"traceback :", b"actor_id: ",
    b"stopped sending heartbeats", b"namespace: ",
)  # fmt: skip
