"""Exchange between the nodes of a job who sees node 0's run directory, and the public keys of those that do not.

One rank of each node does it, through the store of the job's process group, in a separate thread: nobody waits for a store that is slow
or gone. Whoever can write there can run code in the job anyway. A value is read only once it exists, because a `get` that waits
would hold the client's lock, which the script's own calls need.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distdiag import files
from distdiag.page import node_files
from distdiag.page.node_files import Own, Peers
from distdiag.recorder.state import guarded
from distdiag.unpatched import Lock, now_s, start_new_thread

OFFER, KEYS, SERVER = "distdiag/nodes/0", "distdiag/nodes", "distdiag/nodes/server"  # in the store
NONCE = "nodes/nonce"  # in the run directory of node 0
SEES = "sees"  # what a node that sees the nonce gives instead of its key
VERSION = 1
POLL_S, LATEST_POLL_S = 0.1, 0.5  # each wait is 1.2 times as long as the one before
SEEN_S = 1.0  # a network file system may show a new file late
GIVE_UP_S = 120.0  # nodes whose ranks come later than that are not connected
MOST_BYTES = 1 << 20
END_S = 2.0  # how long the end of the script waits for a running access to the store


class OtherNodes:
    """The exchange of one node, with so many ranks of the job's world, by its first rank."""

    def __init__(self, run_dir: Path, pages: Path, node: int, ranks: int, world: int) -> None:
        self.run_dir, self.pages, self.node, self.ranks, self.world = run_dir, pages, node, ranks, world
        self.store: Any = None
        self._going_on, self._running = Lock(), Lock()
        self._going_on.acquire()
        self._end = 0.0

    def begin(self) -> bool:
        """Start the thread once the process group exists; True if there is nothing left to start."""
        dist = sys.modules.get("torch.distributed.distributed_c10d")
        if dist is None or not dist.is_initialized():
            return False
        files.create(self.pages, node_files.FIRST, str(os.getpid()).encode())
        if files.text(self.pages, node_files.FIRST) == str(os.getpid()):
            # torchrun may keep its store, with all that this attempt writes, for the next one
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            self.store = dist.PrefixStore(f"distdiag/{attempt}", dist._get_default_store())
            self._running.acquire()
            start_new_thread(self._run, ())
        return True

    def stop(self) -> None:
        """End the thread; wait a moment for its last access to the store (see `Pulse.stop`)."""
        if self._going_on.locked():
            self._going_on.release()
        if self._running.acquire(timeout=END_S):
            self._running.release()

    @guarded
    def _run(self) -> None:
        try:
            self.exchange(self.store)
        except Exception:
            if self._going_on.locked():  # else the script ends, and its store with it
                raise
        finally:
            self.store = None
            self._running.release()

    def exchange(self, store: Any) -> None:
        """Do it all; return when every node is known, at the end of the script, or after `GIVE_UP_S`."""
        self._end = now_s() + GIVE_UP_S
        if self.node == 0:
            self._as_first(store)
        else:
            self._as_other(store)

    def _as_first(self, store: Any) -> None:
        nonce = secrets.token_hex(16)
        files.write(self.run_dir, NONCE, nonce.encode())
        store.set(OFFER, json.dumps([VERSION, nonce]))
        peers, known, offered = Peers(), -1, False
        for _ in self._polls():
            if store.check([KEYS]):
                known, peers, changed = self._read_keys(store.get(KEYS), peers, known)
                if changed and (peers.keys or peers.errors):
                    node_files.write(self.pages, peers)
            own = node_files.read_own(self.pages) if peers.keys and not offered else None
            if own is not None and own.port:
                store.set(SERVER, json.dumps([own.public, own.port, own.addresses]))
                offered = True
            refused = own is not None and bool(own.error)
            if refused or (known + self.ranks >= self.world and (offered or not peers.keys)):
                return

    def _read_keys(self, written: bytes, before: Peers, known: int) -> tuple[int, Peers, bool]:
        """Return (ranks of the nodes so far, their keys and errors, True if any is new). A line that is not ours is skipped."""
        peers, ranks = Peers(), {}
        for line in written[:MOST_BYTES].splitlines():
            try:
                node, of_node, word = json.loads(line)
                node, of_node = node_files.node_number(node), int(of_node)
                if word in node_files.ERRORS:
                    peers.errors[node] = word
                elif word != SEES:
                    peers.keys[node] = node_files.key(word)
                ranks[node] = of_node
            except (ValueError, TypeError, RecursionError):
                continue
        return sum(ranks.values()), peers, peers != before

    def _as_other(self, store: Any) -> None:
        nonce = self._get(store, OFFER)
        if not isinstance(nonce, list) or nonce[:1] != [VERSION]:
            return
        if self._sees(str(nonce[1])):
            self._say(store, SEES)
            return
        node_files.write(self.pages, Peers())  # the monitor makes its keys
        own = self._own()
        if own is None:
            return
        self._say(store, own.error or own.public)
        found = None if own.error else self._get(store, SERVER)
        if found is not None:
            at = node_files.server(found)
            # how this node reaches the host of rank 0 already
            name = os.environ.get("MASTER_ADDR", "")
            where = node_files.addresses(dict.fromkeys([*([name] if name else []), *at.addresses]))
            node_files.write(self.pages, Peers(node_files.Server(at.key, at.port, where)))

    def _say(self, store: Any, word: str) -> None:
        store.append(KEYS, json.dumps([self.node, self.ranks, word]) + "\n")

    def _sees(self, nonce: str) -> bool:
        end = now_s() + SEEN_S
        for _ in self._polls():
            try:
                if files.read(self.run_dir, NONCE, 100) == nonce.encode():
                    return True
            except OSError:
                pass
            if now_s() > end:
                break
        return False

    def _own(self) -> Own | None:
        return next((own for _ in self._polls() if (own := node_files.read_own(self.pages)) is not None), None)

    def _get(self, store: Any, name: str) -> Any:
        """Return what another node wrote, None if it writes nothing in time, or something else than JSON."""
        for _ in self._polls():
            if store.check([name]):
                try:
                    return json.loads(store.get(name)[:MOST_BYTES])
                except (ValueError, RecursionError):
                    return None
        return None

    def _polls(self) -> Iterator[None]:
        """Yield at once, then again and again, until the end of the script or of the time."""
        wait_s = POLL_S
        while now_s() < self._end:
            yield
            if self._going_on.acquire(timeout=wait_s):
                self._going_on.release()
                return
            wait_s = min(LATEST_POLL_S, wait_s * 1.2)
