"""Messages by which a process fails after another one has failed, or was late: one table, for runs and for logs.

A run gives each exception with its process, so fewer words are enough there than in the lines of a log.
"""

from __future__ import annotations

import re

from distdiag.terms.untrusted import bounded

# of a run: the other end, or the library, is gone; a timeout, which is one of torch if the exception also has its words
_ECHO = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|reset by peer|broken pipe|closed by peer|socket (is )?closed"
    r"|remote process exited|remote rank|communicator was aborted|nccl ?(communicator|comm).*abort|ncclRemoteError"
    r"|recvValue failed|sendBytes failed|failed to recv|peer may have|unhandled system error"
    r"|DistNetworkError(?!: The server socket)|heartbeat|store->get|SocketTimeout|CheckpointException: rank \d+ failed",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(r"timed? ?out|timeout|wait timeout|deadline|failed to pass monitoredBarrier", re.IGNORECASE)
_IN_TORCH = re.compile(
    r"gloo|nccl|c10d|process ?group|collective|recv operation|send operation|monitoredBarrier|"
    r"waiting \d+ ?ms|wait timeout|DistBackendError|DistStoreError|transport",
    re.IGNORECASE,
)
# of logs: a library reports that another process ended
OTHER_ENDED = bounded(r"remote process exited|ncclRemoteError|NCCL communicator was aborted")
OF_OTHERS = bounded(
    r"\b(?:remote|another|other) (?:process|rank|task|worker)(?:e?s)? (?:has |have )?(?:exited|failed|died|crashed)|NCCL communicator was aborted|Error: cancelled$|\bHCCL error in: "
)
# an exception on a connection that was lost, or refused
CONNECTION_LOST = bounded(
    r"reset by peer|Broken pipe|onnection refused|onnection (?:was likely )?closed|Socket Timeout|timed out",
    re.IGNORECASE,
)
# files in which a parent waits for the answer of its workers, until a timeout
AWAITS_WORKERS = ("/shm_broadcast.py",)
# an exception that only reports another one
REPORTS_ANOTHER = bounded(
    r"torch_extensions/.{0,200}cannot open shared object|at least one rank that exhausted|[Rr]oot cause|Worker failed with error|[Ss]ee (?:the )?(?:stack trace|logs? |error)|[Ss]ee (?:[\w']{1,20} ){0,5}above|(?i:one of the (?:sub|child ?|worker ?)process(?:es)? )|(?:sub)?process(?:es)? failed\b|scheduler (?:is dead|died)\b|check (?:[\w']{1,20} ){0,3}logs?\b|in a background process|previous error|due to worker errors|sub-exception|Caught \w+ in DataLoader worker|\b5\d\d Server Error"
)


def is_echo(exception: str) -> bool:
    """True if this exception of a run follows from another rank's end or lateness."""
    return bool(_ECHO.search(exception) or is_timeout(exception))


def is_timeout(exception: str) -> bool:
    """True if this exception of a run is a timeout of torch."""
    return bool(_TIMEOUT.search(exception) and _IN_TORCH.search(exception))
