"""Node 0's side: one port, which takes the states of the listed nodes and asks them for readers."""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from distdiag.monitor.cluster import keys, messages, port
from distdiag.monitor.cluster.link import TURN_MS, Link
from distdiag.monitor.cluster.messages import Answer, Ask, BadMessage, Order, Receipt, Report
from distdiag.monitor.cluster.questions import SPARE_S, Answers, Questions
from distdiag.page import node_files
from distdiag.page.node_files import Own

ZAP = "inproc://zeromq.zap.01"  # where libzmq asks if a key is listed (RFC 27)
REBIND_S = 1.0
MOST_PER_TURN = 256  # messages that are read before anything else is done
SPARE_CONNECTIONS = 64  # beyond two of each node; with more, nobody else can connect until some are gone


@dataclass
class Heard:
    """What is known of one node."""

    order: Order = field(default_factory=Order)
    address: bytes = b""  # its connection, for the router
    received_ns: int = 0  # our monotonic clock when its newest report arrived
    listened_s: float = 0.0  # how long this side had listened then
    state_ns: int = 0  # our monotonic clock when its newest state arrived
    started_ns: int = 0  # when its run began, by its monotonic clock
    offset_ns: int = 0  # our monotonic clock minus that of the node
    uncertainty_ns: int = 0
    wall_offset_ns: int = 0  # our wall clock minus that of the node
    works_ms: tuple[float, float] = (0.0, 0.0)  # see `Report`
    state: bytes | None = None  # its newest, packed; None once it has been taken
    known: int = 0  # number of the newest state that was read
    ranks: tuple[int, ...] = ()  # by the states that were read


class Arrived(NamedTuple):
    """A state of another node."""

    node: int
    packed: bytes  # as `messages.pack` returns it: thousands of ranks are not unpacked all at once
    started_ns: int  # when its run began, by our monotonic clock
    age_s: float


class Server(Link):
    """Receives reports and answers them at once.

    Args:
        pages: Page directory of this node, where the port is noted for the rank and the next monitor, and readers ask.
        fixed: The port to bind; 0: that of the monitor before us, or any.
    """

    def __init__(self, own: Own, pages: Path, fixed: int = 0) -> None:
        super().__init__(own)
        self.pages, self.fixed = pages, fixed
        self.urgent = False
        self.heard: dict[int, Heard] = {}
        self._questions: Questions | None = None
        self._nodes: dict[bytes, int] = {}  # by public key
        self._bound, self._tried_s = False, -1e9
        self._port = port.Port()
        self._connections: set[int] = set()  # descriptors; whoever reaches the port can make one, and each costs us one
        self._to_ask: list[tuple[bytes, Ask]] = []
        self._open: dict[int, int] = {}  # node by the number of a question
        self._answers: dict[int, Answer] = {}  # by node
        self._answered = threading.Condition(self.lock)
        self._asked = 0
        self._turned_ns, self._listened_s = time.monotonic_ns(), 0.0

    def admit(self, nodes: Mapping[int, str]) -> None:
        """Admit these nodes by their public keys, and nobody else."""
        port.allow_descriptors(2 * len(nodes) + SPARE_CONNECTIONS)
        with self.lock:
            self._nodes = {key.encode(): node for node, key in nodes.items()}

    def take(self) -> list[Arrived]:
        """Return the new states, each once."""
        now_ns, out = time.monotonic_ns(), []
        with self.lock:
            for node, h in self.heard.items():
                if h.state is not None:
                    out.append(Arrived(node, h.state, h.started_ns + h.offset_ns, (now_ns - h.state_ns) / 1e9))
                    h.state = None
        return out

    def silent_s(self) -> dict[int, float]:
        """Return for how long this side has listened without a report, by node.

        Time in which this process did not run is no silence of others.
        """
        with self.lock:
            return {node: self._listened_s - h.listened_s for node, h in self.heard.items()}

    def knows(self, node: int, number: int, ranks: tuple[int, ...]) -> None:
        """Let a node know the newest of its states that was read; 0: its next one must be whole. It answers for these ranks only."""
        with self.lock:
            if node in self.heard:  # others have left a file
                self.heard[node].known, self.heard[node].ranks = number, ranks

    def works_ms(self) -> list[tuple[float, float]]:
        """Return of each node how long its slowest rank works, and the next one."""
        with self.lock:
            return [h.works_ms for h in self.heard.values()]

    def ask(self, question: Ask) -> Answers:
        """Ask all nodes; return what each answers in time."""
        with self._answered:
            self._open.clear()
            self._answers.clear()
            for node, heard in self.heard.items():
                self._asked += 1
                self._open[self._asked] = node
                self._to_ask.append((heard.address, msgspec.structs.replace(question, number=self._asked)))
            self.wake()
            self._answered.wait_for(lambda: not self._open, question.timeout_s + SPARE_S)
            found: Answers = dict.fromkeys(
                self._nodes.values(), (b"", f"did not answer within {question.timeout_s:g} s", ())
            )
            return found | {n: (a.data, a.error, self.heard[n].ranks) for n, a in self._answers.items()}

    def close(self, wait_s: float = 1.0) -> None:
        if self._questions is not None:
            self._questions.close()
        super().close(wait_s)
        self._port.close()

    def opened(self, poller: Any) -> None:
        zmq = self._zmq
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(ZAP)
        self._router = keys.secured(self._context.socket(zmq.ROUTER), self.own, messages.MOST_BYTES)
        self._router.curve_server = True
        self._router.zap_domain = keys.DOMAIN.encode()
        self._events = self._router.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        for s in (self._zap, self._router, self._events):
            poller.register(s, zmq.POLLIN)
        self._bind()
        with contextlib.suppress(OSError):  # the path is too long for a socket: readers ask this node's ranks only
            self._questions = Questions(self.pages, self.ask)

    def _bind(self) -> None:
        """Bind the port that is asked for, else that of the monitor before us, or any; try again later if it is taken."""
        if self._bound or time.monotonic() - self._tried_s < REBIND_S:
            return
        self._tried_s = time.monotonic()
        try:
            address, others_use = keys.own_addresses()
            if address is not None and ":" in address:
                self._router.ipv6 = True
            self._port.open(address or "", self.fixed or self.own.port)
            self._router.setsockopt(self._zmq.USE_FD, self._port.for_libzmq())
            self._router.bind(keys.endpoint(address or "*", "*"))
        except (self._zmq.ZMQError, OSError) as e:
            self.failed = f"no port for the other nodes could be bound: {e}"
            if self.fixed:
                self.failed = f"port {self.fixed} for the other nodes could not be bound: {e}"
            return
        self._bound, self.failed = True, None
        self.own.port = int(self._router.last_endpoint.rpartition(b":")[2])
        self.own.addresses = others_use
        try:
            node_files.write(self.pages, self.own)
        except OSError as e:
            self.failed = f"the port for the other nodes could not be noted: {e.strerror}"

    def turn(self, ready: dict[Any, int]) -> None:
        now_ns = time.monotonic_ns()
        self._listened_s += min((now_ns - self._turned_ns) / 1e9, 2 * TURN_MS / 1e3)
        self._turned_ns = now_ns
        self._bind()
        with self.lock:
            to_ask, self._to_ask = self._to_ask, []
        for address, question in to_ask:
            self._router.send_multipart([address, messages.encode(question)], self._zmq.NOBLOCK)
        if self._zap in ready:
            self._authenticate(self._zap.recv_multipart())
        if self._events in ready:
            self._count_connections()
        for _ in range(MOST_PER_TURN if self._router in ready else 0):
            try:
                frames = self._router.recv_multipart(self._zmq.NOBLOCK, copy=False)
            except self._zmq.Again:
                break
            self._take_message(frames, time.monotonic_ns())

    def _count_connections(self) -> None:
        """Count the connections. While there are too many, nobody else can connect; those that exist go on.

        libzmq sets no limit. It drops a connection without a handshake after `keys.HANDSHAKE_MS`.
        """
        with contextlib.suppress(self._zmq.Again):
            while True:
                event, fd = struct.unpack_from("=Hi", self._events.recv_multipart(self._zmq.NOBLOCK)[0])
                if event == self._zmq.EVENT_ACCEPTED:
                    self.refused += 1
                    self._connections.add(fd)
                elif event == self._zmq.EVENT_DISCONNECTED:
                    self._connections.discard(fd)
                else:  # a connection is admitted by its handshake
                    self.refused -= 1
                self._port.shut(len(self._connections) > 2 * len(self._nodes) + SPARE_CONNECTIONS)

    def _authenticate(self, request: list[bytes]) -> None:
        """Answer libzmq's question if a client may connect: yes for a listed key, whatever else it is.

        300 closes the connection without a word. After 400 a node would never try again, and its key may be
        listed a moment later.
        """
        from zmq.utils import z85

        known = len(request) == 7 and request[0] == b"1.0" and request[2] == keys.DOMAIN.encode()
        user = b""
        if known and request[5] == b"CURVE" and len(request[6]) == 32:
            key = z85.encode(request[6])
            with self.lock:
                user = key if key in self._nodes else b""
        number = request[1] if len(request) > 1 else b""
        self._zap.send_multipart([b"1.0", number, *((b"200", b"OK") if user else (b"300", b"no")), user, b""])

    def _take_message(self, frames: list[Any], received_ns: int) -> None:
        try:
            if len(frames) != 2:
                raise BadMessage("not two frames")
            key = frames[1].get("User-Id")
            with self.lock:
                node = self._nodes.get(key.encode() if isinstance(key, str) else key)
            if node is None:
                raise BadMessage("no listed key")
            message = messages.decode(frames[1].bytes, to_first=True)
            if isinstance(message, Answer):
                self._take_answer(node, message)
            elif isinstance(message, Report):
                self._take_report(node, frames[0].bytes, message, received_ns)
        except (BadMessage, self._zmq.ZMQError):
            self.dropped += 1

    def _take_report(self, node: int, address: bytes, report: Report, received_ns: int) -> None:
        with self.lock:
            heard = self.heard.setdefault(node, Heard())
            heard.order.admit(report, received_ns / 1e9)
            heard.address, heard.received_ns, heard.listened_s = address, received_ns, self._listened_s
            heard.offset_ns, heard.uncertainty_ns = report.offset_ns, report.uncertainty_ns
            wall_ns = time.time_ns() - time.monotonic_ns()
            heard.wall_offset_ns, heard.works_ms = report.offset_ns + wall_ns - report.wall_ns, report.works_ms
            if report.state:
                heard.state, heard.started_ns = report.state, report.started_ns
                heard.state_ns = received_ns
            known = heard.known
        receipt = Receipt(
            number=report.number, report_sent_ns=report.sent_ns, received_ns=received_ns, sent_ns=time.monotonic_ns(),
            urgent=self.urgent, known=known,
        )  # fmt: skip
        self._router.send_multipart([address, messages.encode(receipt)], self._zmq.NOBLOCK)

    def _take_answer(self, node: int, answer: Answer) -> None:
        with self._answered:
            if self._open.get(answer.number) != node:
                raise BadMessage("it was not asked")
            del self._open[answer.number]
            self._answers[node] = answer
            self._answered.notify_all()
