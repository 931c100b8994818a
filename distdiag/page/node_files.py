"""How the first rank of a node and the node's monitor exchange what they know of the other nodes: two small files next to the pages.

The rank reaches the job's store, and the monitor does not; the monitor has the keys. Only this user can enter the directory.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distdiag import files
from distdiag.page.small_files import count, read_object

OWN, PEERS, FIRST = "nodes.own", "nodes.peers", "nodes.first"
LOCAL = "nodes.sock"  # the unix socket on which the monitor of node 0 takes requests of readers
MOST_NODES, MOST_ADDRESSES = 65_536, 16
ERRORS = {
    "no_pyzmq": "pyzmq is not installed there (pip install pyzmq)",
    "no_curve": "its libzmq has no CURVE, and nothing is sent in plain (pip install pyzmq has it)",
    "no_port": "no port could be bound there",
}
_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # Z85 of 32 bytes
_ADDRESS = re.compile(r"[0-9A-Za-z.:_-]{1,255}")  # a name or an IP address


@dataclass(frozen=True)
class Server:
    """Where the monitor of node 0 listens, and its public key."""

    key: str
    port: int
    addresses: tuple[str, ...]


@dataclass
class Own:
    """What a monitor writes: its keys, and on node 0 its port. The next monitor of this node goes on with them."""

    public: str = ""
    secret: str = field(default="", repr=False)
    port: int = 0
    addresses: tuple[str, ...] = ()
    incarnation: int = 0  # number of this monitor, from 1: each that is started is one more
    error: str = ""  # a word of `ERRORS` if it cannot talk to other nodes


@dataclass
class Peers:
    """What the rank writes."""

    server: Server | None = None  # on other nodes than 0: the monitor of node 0, once it is known
    # on node 0: public keys by node, of those that do not see its run directory; words of `ERRORS` by node
    keys: dict[int, str] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


def write(pages: Path, value: Own | Peers) -> None:
    """Write one of the files as a whole; it can be read by this user alone.

    Raises:
        OSError: it cannot be written.
    """
    files.write(pages, OWN if isinstance(value, Own) else PEERS, json.dumps(asdict(value)).encode())


def read_own(pages: Path) -> Own | None:
    """Return what the monitor wrote; None if there is nothing, or it is damaged."""
    try:
        found = read_object(pages / OWN)
        return Own(
            public=found["public"] and key(found["public"]), secret=found["secret"] and key(found["secret"]),
            port=count(found["port"], 0, 65_535), addresses=addresses(found["addresses"]),
            incarnation=count(found["incarnation"]), error=found["error"] and error(found["error"]),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_peers(pages: Path) -> Peers | None:
    """Return what the rank wrote; None if there is nothing, or it is damaged."""
    try:
        found = read_object(pages / PEERS)
        at = found["server"]
        return Peers(
            server=None if at is None else server([at["key"], at["port"], at["addresses"]]),
            keys={node_number(int(k)): key(text) for k, text in found["keys"].items()},
            errors={node_number(int(k)): error(word) for k, word in found["errors"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def server(value: Any) -> Server:
    """Return (key, port, addresses) as checked.

    Raises:
        ValueError, TypeError: it is something else.
    """
    public, port, where = value
    return Server(key(public), count(port, 1, 65_535), addresses(where))


def key(text: Any) -> str:
    return _matching(_KEY, text)


def error(text: Any) -> str:
    if text not in ERRORS:
        raise ValueError("not a known word")
    return text


def addresses(value: Any) -> tuple[str, ...]:
    return tuple(_matching(_ADDRESS, each) for each in list(value)[:MOST_ADDRESSES])


def node_number(value: Any) -> int:
    return count(value, 0, MOST_NODES - 1)


def _matching(pattern: re.Pattern[str], text: Any) -> str:
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise ValueError("not what was expected")
    return text
