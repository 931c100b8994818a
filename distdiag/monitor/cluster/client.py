"""The side of every other node: one connection to node 0, over which its newest state goes out."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from distdiag.monitor.cluster import keys, messages
from distdiag.monitor.cluster.clock import Offset
from distdiag.monitor.cluster.link import Link
from distdiag.monitor.cluster.messages import Answer, Ask, BadMessage, Receipt, Report
from distdiag.page.node_files import Own, Server

HELLOS = 4  # reports at once after the start, which only measure the clocks
ALIVE_S = 1.0  # between two reports
UNANSWERED_S = 2.0  # after which the next report does not wait for the receipt of the last one
NEXT_ADDRESS_S = 5.0  # without a receipt, before another address is tried


class Client(Link):
    """Sends reports, one at a time: of several states that wait, only the newest is sent."""

    def __init__(self, own: Own, server: Server, ask: Callable[[Ask], bytes]) -> None:
        super().__init__(own)
        self._ask, self._answers = ask, list[Answer]()
        self._asked = False  # a question is being answered
        self.server = server
        self.urgent, self.known = False, 0
        self.offset = Offset()
        self.sent = 0  # number of the newest state that node 0 has received
        # number of the state, start of the run, packed; how long ranks work
        self._state: tuple[int, int, bytes] | None = None
        self._works_ms = (0.0, 0.0)
        self._states = 0
        self._number = self._received = 0  # reports
        self._in_flight: tuple[int, int] | None = None  # numbers of a report and of its state
        self._at_s = self._heard_s = -1e9
        self._address = -1

    def publish(self, state: bytes, started_ns: int, works_ms: tuple[float, float] = (0.0, 0.0)) -> None:
        """Send a state in place of any older one that waits."""
        packed = messages.pack(state)
        if len(packed) > messages.MOST_BYTES // 2:
            self.failed = f"the state of this node is too large to be sent ({len(packed):,} bytes)"
            return
        with self.lock:
            self._states += 1
            self._state, self._works_ms = (self._states, started_ns, packed), works_ms
        self.wake()

    def flush(self, wait_s: float) -> None:
        """Wait until the newest state has arrived."""
        end = time.monotonic() + wait_s
        while self.sent < self._states and time.monotonic() < end:
            time.sleep(0.02)

    def opened(self, poller: Any) -> None:
        zmq = self._zmq
        self._dealer = keys.secured(self._context.socket(zmq.DEALER), self.own, messages.MOST_BYTES)
        self._dealer.curve_serverkey = self.server.key.encode()
        self._dealer.immediate = True  # nothing is queued for a connection that does not exist
        self._dealer.ipv6 = any(":" in a for a in self.server.addresses)
        poller.register(self._dealer, zmq.POLLIN)

    def _connect(self, now_s: float) -> None:
        """Connect, and anew to the next address if none has answered: libzmq gives up after some failures of a handshake."""
        where = self.server.addresses
        if not where or now_s - self._heard_s < NEXT_ADDRESS_S:
            return
        if self._address >= 0:
            with contextlib.suppress(self._zmq.ZMQError):  # it has given up
                self._dealer.disconnect(keys.endpoint(where[self._address], self.server.port))
        self._address, self._heard_s = (self._address + 1) % len(where), now_s
        self._dealer.connect(keys.endpoint(where[self._address], self.server.port))

    def turn(self, ready: dict[Any, int]) -> None:
        while self._dealer in ready:
            try:
                data = self._dealer.recv(self._zmq.NOBLOCK)
            except self._zmq.Again:
                break
            try:
                self._take(data, time.monotonic_ns())
            except BadMessage:
                self.dropped += 1
        now_s = time.monotonic()
        self._connect(now_s)
        self._answer()
        with self.lock:
            state = self._state if self.offset.applied is not None else None
        waits = self._in_flight is not None and now_s - self._at_s < UNANSWERED_S
        hello = self._received < HELLOS
        if not waits and (state is not None or hello or now_s - self._at_s >= ALIVE_S):
            self._report(state, now_s)

    def _report(self, state: tuple[int, int, bytes] | None, now_s: float) -> None:
        number, started_ns, packed = state or (0, 0, b"")
        estimate = self.offset.applied
        sent_ns = time.monotonic_ns()
        report = Report(
            incarnation=self.own.incarnation, number=self._number + 1, sent_ns=sent_ns, started_ns=started_ns,
            offset_ns=estimate.offset_ns if estimate else 0, uncertainty_ns=estimate.uncertainty_ns if estimate else 0,
            wall_ns=time.time_ns() - time.monotonic_ns(), works_ms=self._works_ms, state=packed,
        )  # fmt: skip
        try:
            self._dealer.send(messages.encode(report), self._zmq.NOBLOCK)
        except self._zmq.Again:  # not connected
            return
        self._number, self._at_s, self._in_flight = self._number + 1, now_s, (self._number + 1, number)

    def _take(self, data: bytes, now_ns: int) -> None:
        message = messages.decode(data, to_first=False)
        if isinstance(message, Ask):
            if self._asked:
                raise BadMessage("another question is being answered")
            self._asked = True
            threading.Thread(target=self._find, args=(message,), name="ask", daemon=True).start()
            return
        if not isinstance(message, Receipt) or not self._received < message.number <= self._number:
            raise BadMessage("no receipt of ours")
        self._received, self._heard_s = message.number, now_ns / 1e9
        self.urgent, self.known = message.urgent, message.known
        self.offset.add(message.report_sent_ns, message.received_ns, message.sent_ns, now_ns)
        if self._in_flight is not None and self._in_flight[0] == message.number:
            with self.lock:
                self.sent = max(self.sent, self._in_flight[1])
                if self._state is not None and self._state[0] <= self.sent:
                    self._state = None
            self._in_flight = None

    def _find(self, question: Ask) -> None:
        try:
            answer = Answer(number=question.number, data=messages.pack(self._ask(question)))
            if len(answer.data) > messages.MOST_BYTES - messages.MARGIN_BYTES:
                answer = Answer(number=question.number, error=f"its answer is too large ({len(answer.data):,} bytes)")
        except Exception as e:  # no rank is alive, or a page is damaged
            answer = Answer(number=question.number, error=str(e)[:200])
        with self.lock:
            self._answers.append(answer)
            # before the answer is sent: the next question may follow while this thread still ends
            self._asked = False
        self.wake()

    def _answer(self) -> None:
        with self.lock:
            answers, self._answers = self._answers, []
        for i, answer in enumerate(answers):
            try:
                self._dealer.send(messages.encode(answer), self._zmq.NOBLOCK)
            except self._zmq.Again:  # not connected: later
                with self.lock:
                    self._answers += answers[i:]
                return
