"""Two monitors' connection over loopback: who is let in, what survives a restart, and how the ranks bring them together."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from distdiag import files
from distdiag.monitor.cluster import keys, messages, server
from distdiag.monitor.cluster.messages import Ask, Profile
from distdiag.monitor.cluster.transport import Transport
from distdiag.monitor.evidence import profile_of_nodes, request_profile
from distdiag.monitor.evidence.dump import of_other_nodes
from distdiag.page import directories, node_files
from distdiag.page.node_files import Own, Peers, Server
from distdiag.page.profile_files import DONE
from distdiag.recorder.other_nodes import NONCE, OtherNodes
from tests.jobs import wait_for

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "own_addresses", lambda: ("127.0.0.1", ("127.0.0.1",)))


def dump(question: Ask) -> bytes:
    return msgspec.msgpack.encode([[7, ["main a.py:1"], "all_reduce #3 g", None, None, {}, True]])


def pages(tmp_path: Path, node: int) -> Path:
    path = tmp_path / f"pages_{node}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def first(tmp_path: Path, allowed: dict[int, str]) -> tuple[Transport, Own]:
    """Return node 0's side, listening."""
    node_files.write(pages(tmp_path, 0), Peers(keys=allowed))
    t = Transport(pages(tmp_path, 0), 0, dump)
    t.poll()
    return t, wait_for(lambda: ((o := node_files.read_own(pages(tmp_path, 0))) and o.port and o) or None, 5, "the port")


def other(tmp_path: Path, node: int, own: Own) -> Transport:
    node_files.write(pages(tmp_path, node), Peers(Server(own.public, own.port, own.addresses)))
    t = Transport(pages(tmp_path, node), node, dump)
    t.poll()
    return t


def test_a_pyzmq_that_cannot_be_loaded_costs_no_verdict_on_this_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> str:
        raise ImportError("libzmq.so.5: cannot open shared object file")

    monkeypatch.setattr(keys, "refusal", broken)
    node_files.write(pages(tmp_path, 0), Peers(keys={1: "k" * 40}))
    t = Transport(pages(tmp_path, 0), 0, dump)
    assert t.poll() is False and "libzmq.so.5" in (t.failed or "")


def sent(of: Transport, data: bytes, to: Transport) -> int:
    """Send a state; return the node that it came from."""
    assert of.client is not None and to.server is not None
    of.client.publish(data, 5)
    (found,) = wait_for(to.server.take, 10, "the state")
    assert messages.unpack(found.packed) == data
    to.server.knows(found.node, 0, (1, 7))
    return found.node


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Transport, Transport, Own]]:
    public = keys.own_keys(pages(tmp_path, 1)).public
    a, own = first(tmp_path, {1: public})
    b = other(tmp_path, 1, own)
    yield a, b, own
    for t in (b, a):
        t.close()


def test_a_state_arrives_and_the_clocks_are_compared(two: tuple[Transport, Transport, Own]) -> None:
    a, b, own = two
    for data in (b"one", b"two" * 10_000):
        assert sent(b, data, a) == 1
    facts = wait_for(lambda: (f := a.facts())["nodes"]["1"].get("clock_uncertainty_s") and f, 5, "the clocks")
    of_node = facts["nodes"]["1"]
    assert abs(of_node["clock_offset_s"]) <= of_node["clock_uncertainty_s"] + 1e-4
    assert (facts["by"], facts["port"], facts["dropped"]) == ("zeromq", own.port, 0)


def test_a_node_is_silent_only_while_this_side_listens(
    two: tuple[Transport, Transport, Own], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = two
    sent(b, b"state", a)
    b.close()
    server = a.server
    assert server is not None
    before = server.silent_s()[1]
    wait_for(lambda: server.silent_s()[1] > before + 0.5, 10, "a node that has ended to be silent")
    bind, began = server._bind, threading.Event()

    def paused() -> None:  # as by SIGSTOP
        monkeypatch.setattr(a.server, "_bind", bind)
        began.set()
        time.sleep(4.0)

    monkeypatch.setattr(a.server, "_bind", paused)
    assert began.wait(10)
    before = server.silent_s()[1]
    time.sleep(4.0)
    assert server.silent_s()[1] - before < 2.0


def test_only_the_newest_of_several_states_is_sent(tmp_path: Path) -> None:
    public = keys.own_keys(pages(tmp_path, 1)).public
    b = other(tmp_path, 1, Own(public=public, port=free(), addresses=("127.0.0.1",)))
    assert b.client is not None
    for n in range(1000):  # nobody listens yet
        b.client.publish(b"%d" % n, 5)
    assert b.client._state is not None and b.client._state[2] == b"-999"
    b.close()


def free() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_another_monitor_of_node_0_has_the_same_keys_and_port(
    two: tuple[Transport, Transport, Own], tmp_path: Path
) -> None:
    a, b, own = two
    sent(b, b"before", a)
    a.close()
    again, after = first(tmp_path, {1: keys.own_keys(pages(tmp_path, 1)).public})
    try:
        assert (after.public, after.secret, after.port) == (own.public, own.secret, own.port)
        assert after.incarnation == own.incarnation + 1
        assert sent(b, b"after", again) == 1
    finally:
        again.close()


def test_a_node_that_connects_before_its_key_is_listed_is_heard_once_it_is(tmp_path: Path) -> None:
    a, own = first(tmp_path, {2: "k" * 40})
    b = other(tmp_path, 1, own)
    try:
        wait_for(lambda: a.facts()["refused"] >= 2, 10, "it to be refused twice")
        node_files.write(pages(tmp_path, 0), Peers(keys={1: keys.own_keys(pages(tmp_path, 1)).public, 2: "k" * 40}))
        a.poll()
        assert sent(b, b"state", a) == 1
    finally:
        b.close()
        a.close()


def test_another_monitor_of_another_node_goes_on(two: tuple[Transport, Transport, Own], tmp_path: Path) -> None:
    a, b, own = two
    sent(b, b"before", a)
    b.close()
    again = other(tmp_path, 1, own)
    assert sent(again, b"after", a) == 1
    again.close()


def test_a_stranger_is_refused_and_counted(two: tuple[Transport, Transport, Own], tmp_path: Path) -> None:
    a, b, own = two
    sent(b, b"before", a)
    address = f"tcp://127.0.0.1:{own.port}"
    context = zmq.Context()
    try:
        for key in (
            None,
            own.public,
            zmq.curve_keypair()[0].decode(),
        ):  # no CURVE; a key that nobody listed; a wrong server's key
            s = context.socket(zmq.DEALER)
            s.linger = 0
            if key is not None:
                s.curve_publickey, s.curve_secretkey = zmq.curve_keypair()
                s.curve_serverkey = key.encode()
            refused = a.facts()["refused"]
            s.connect(address)
            s.send(b"hello")
            wait_for(lambda refused=refused: a.facts()["refused"] > refused, 10, f"the refusal of {key}")
            assert s.poll(300) == 0
            s.close()
        refused = a.facts()["refused"]
        with socket.create_connection(("127.0.0.1", own.port)) as plain:
            plain.sendall(os.urandom(1000))
            wait_for(lambda: a.facts()["refused"] > refused, 10, "the refusal of random bytes")
    finally:
        context.destroy(linger=0)
    assert a.facts()["dropped"] == 0 and list(a.facts()["nodes"]) == ["1"]
    assert sent(b, b"after", a) == 1


def test_connections_without_a_key_are_few_and_cost_no_node_its_own(
    two: tuple[Transport, Transport, Own], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, own = two
    monkeypatch.setattr(server, "SPARE_CONNECTIONS", 4)
    sent(b, b"before", a)
    strangers = list[socket.socket]()

    def connect(most: int) -> None:
        for _ in range(most):
            strangers.append(socket.create_connection(("127.0.0.1", own.port), timeout=1.0))

    try:
        with contextlib.suppress(TimeoutError):  # the port may be shut before the last of them
            connect(20)
        assert a.server is not None
        wait_for(lambda: len(a.server._connections) > 6, 10, "the limit")
        with pytest.raises(TimeoutError):  # libzmq alone takes all of them
            connect(100)
        assert sent(b, b"meanwhile", a) == 1
    finally:
        for s in strangers:
            s.close()
    wait_for(lambda: len(a.server._connections) < 4, 10, "their end")
    b.close()
    again = other(tmp_path, 1, own)
    assert sent(again, b"after", a) == 1
    again.close()


def test_a_listed_node_speaks_for_itself_only_and_its_damaged_messages_are_dropped(
    two: tuple[Transport, Transport, Own], tmp_path: Path
) -> None:
    a, _, own = two
    mine = node_files.read_own(pages(tmp_path, 1))
    assert mine is not None
    context = zmq.Context()
    s = context.socket(zmq.DEALER)
    s.linger = 0
    s.curve_publickey, s.curve_secretkey = mine.public.encode(), mine.secret.encode()
    s.curve_serverkey = own.public.encode()
    s.connect(f"tcp://127.0.0.1:{own.port}")
    for data in (b"", b"\xff" * 100, b"\x91" * 5000):
        s.send(data)
    s.send_multipart([b"a", b"b"])
    wait_for(lambda: a.facts()["dropped"] >= 4, 10, "them to be dropped")
    assert a.failed is None
    context.destroy(linger=0)


def test_without_curve_nothing_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda what: False)
    node_files.write(pages(tmp_path, 0), Peers(keys={1: "k" * 40}))
    t = Transport(pages(tmp_path, 0), 0, dump)
    t.poll()
    assert t.server is None and "no CURVE, and nothing is sent in plain" in (t.failed or "")
    own = node_files.read_own(pages(tmp_path, 0))
    assert own is not None and own.error == "no_curve" and not own.secret


def test_the_keys_can_be_read_by_this_user_alone(tmp_path: Path) -> None:
    own = keys.own_keys(pages(tmp_path, 1))
    assert (pages(tmp_path, 1) / node_files.OWN).stat().st_mode & 0o777 == 0o600
    assert own.secret not in repr(own)


def test_the_address_of_the_jobs_interface_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    bound, every = keys.own_addresses()
    assert bound is None and "127.0.0.1" not in every
    if every:
        monkeypatch.setenv("MASTER_ADDR", every[0])
        assert keys.own_addresses() == (every[0], (every[0],))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # what this host calls itself is no address for others
    assert keys.own_addresses()[0] is None


# -- questions of readers -----------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory whose pages are those of node 0."""
    directories.make(directories.overflow(tmp_path, 0), tmp_path)
    files.write(
        tmp_path, directories.node_record(tmp_path, 0).name, f"host {directories.overflow(tmp_path, 0)}\n".encode()
    )
    (tmp_path / "pages_0").symlink_to(directories.overflow(tmp_path, 0))
    return tmp_path


def test_a_reader_gets_the_dumps_of_other_nodes(run: Path, two: tuple[Transport, Transport, Own]) -> None:
    a, b, _ = two
    sent(b, b"here", a)
    (found,), silent = of_other_nodes(run, 5.0)
    assert (found.rank, found.frames, found.op, found.answered, silent) == (
        7,
        ("main a.py:1",),
        "all_reduce #3 g",
        True,
        [],
    )


def test_a_node_that_does_not_answer_is_named(run: Path, two: tuple[Transport, Transport, Own]) -> None:
    a, b, _ = two
    sent(b, b"here", a)
    assert b.client is not None
    b.client.close()
    assert of_other_nodes(run, 0.3) == ([], ["node 1: did not answer within 0.3 s"])


@pytest.mark.parametrize(
    "sent_back",
    [b"", b"\xff", msgspec.msgpack.encode([[-1, [], None, None, None, {}, True]]), b"\x91" * 10_000],
)
def test_a_damaged_dump_is_not_used(
    sent_back: bytes, run: Path, two: tuple[Transport, Transport, Own], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = two
    sent(b, b"here", a)
    assert b.client is not None
    monkeypatch.setattr(b.client, "_ask", lambda question: sent_back)
    assert of_other_nodes(run, 5.0) == ([], ["node 1: what it sent cannot be read"])


def test_a_node_answers_for_its_own_ranks_only_and_for_each_once(
    run: Path, two: tuple[Transport, Transport, Own], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = two
    sent(b, b"here", a)
    assert b.client is not None
    dumps = [[q, [f"says node 1 {i}"], None, None, None, {}, True] for i, q in enumerate((0, 1, 2, 7, 7))]
    monkeypatch.setattr(b.client, "_ask", lambda question: msgspec.msgpack.encode(dumps))
    found, wrong = of_other_nodes(run, 5.0)
    assert {d.rank for d in found} == {1, 7} and len(found) == 2
    assert wrong == ["node 1: refused 3 of its 5 answers: for ranks of other nodes, or for one rank twice"]
    profiles = [[q, "b", None, [], [], "", True, b"-{}"] for q in (0, 1, 2)]
    monkeypatch.setattr(b.client, "_ask", lambda question: msgspec.msgpack.encode(profiles))
    monkeypatch.setattr(request_profile, "take", lambda *_: request_profile.Taken(1, 5, 2, []))
    monkeypatch.setattr(request_profile, "first_step", lambda *_: 5)
    taken = profile_of_nodes.take(run, [], None, 2, 5.0, lambda line: None)
    assert ([x.rank for x in taken.ranks], "2 of its 3 answers" in str(taken.absent)) == ([1], True), taken.absent


def test_a_question_may_follow_while_the_thread_of_the_last_one_still_ends(
    run: Path, two: tuple[Transport, Transport, Own], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = two
    sent(b, b"here", a)
    assert b.client is not None
    wake = b.client.wake

    def slowly() -> None:
        wake()
        if threading.current_thread().name == "ask":
            time.sleep(3)

    monkeypatch.setattr(b.client, "wake", slowly)
    for _ in range(2):
        found, wrong = of_other_nodes(run, 1.0)
        assert ([d.rank for d in found], wrong) == ([7], [])


def test_a_record_that_is_none_is_left_out(
    run: Path, two: tuple[Transport, Transport, Own], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = two
    sent(b, b"here", a)
    assert b.client is not None
    bad = msgspec.msgpack.encode([[7, [], None, None, b'{"entries": 5}', {}, True]])
    monkeypatch.setattr(b.client, "_ask", lambda question: bad)
    (found,), _ = of_other_nodes(run, 5.0)
    assert found.record is None


@pytest.mark.parametrize(
    "sent_back",
    [
        b"\xff",
        msgspec.msgpack.encode([[-1, "b", None, [], [], "", True, b""]]),
        msgspec.msgpack.encode([[1, "b", {"state": "done", "boundaries": 5}, [], [], "", True, b"-{}"]]),
        msgspec.msgpack.encode([[1, "b", DONE, [], [], "", True, b"zzz"]]),
    ],
)
def test_a_damaged_profile_is_not_used(
    sent_back: bytes, run: Path, two: tuple[Transport, Transport, Own], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = two
    sent(b, b"here", a)
    assert b.client is not None
    asked: list[Ask] = []
    monkeypatch.setattr(b.client, "_ask", lambda question: asked.append(question) or sent_back)
    of_none = request_profile.Taken(1, 5, 2, [])
    monkeypatch.setattr(request_profile, "take", lambda *_: of_none)
    monkeypatch.setattr(request_profile, "first_step", lambda *_: 5)
    taken = profile_of_nodes.take(run, [], None, 2, 5.0, lambda line: None)
    assert [q.profile for q in asked] == [Profile(first_step=5, steps=2, timeout_s=5.0)]
    assert all(x.problem for x in taken.ranks) and (taken.ranks or "what it sent cannot be read" in str(taken.absent))


def test_without_other_nodes_nothing_is_asked(tmp_path: Path) -> None:
    assert of_other_nodes(tmp_path, 5.0) == ([], [])


# -- the exchange through the job's store ------------------------------------------------------------------------


class Store:
    """A store in memory; `get` of what does not exist waits forever in torch, so it fails here."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def append(self, key: str, value: str) -> None:
        self.values[key] = self.values.get(key, b"") + value.encode()

    def check(self, names: list[str]) -> bool:
        return all(n in self.values for n in names)

    def get(self, key: str) -> bytes:
        return self.values[key]


class Gone(Store):
    def check(self, names: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")


def in_thread(f: Callable[[], None]) -> threading.Thread:
    t = threading.Thread(target=f, daemon=True)
    t.start()
    return t


def node(tmp_path: Path, number: int, run: Path) -> OtherNodes:
    run.mkdir(exist_ok=True)
    return OtherNodes(run, pages(tmp_path, number), number, 1, 3)


def test_an_attempt_reads_nothing_that_the_one_before_left_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed import HashStore, distributed_c10d

    store, exchanged = HashStore(), []
    monkeypatch.setattr(distributed_c10d, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)

    def exchange(_: OtherNodes, seen: Any) -> None:
        exchanged.append(seen.check(["distdiag/nodes/0"]))
        seen.set("distdiag/nodes/0", "x")

    monkeypatch.setattr(OtherNodes, "exchange", exchange)
    for attempt in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        (tmp_path / str(attempt)).mkdir()
        one = node(tmp_path / str(attempt), 0, tmp_path)
        assert one.begin()
        one.stop()
    assert exchanged == [False, False]


def test_nodes_without_the_directory_are_connected_and_the_others_are_not(tmp_path: Path) -> None:
    store = Store()
    shared, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    nodes = [node(tmp_path, 0, shared), node(tmp_path, 1, shared), node(tmp_path, 2, elsewhere)]
    threads = [in_thread(lambda n=n: n.exchange(store)) for n in nodes]
    sides = [Transport(pages(tmp_path, k), k, dump) for k in range(3)]

    def connected() -> bool:
        for t in sides:
            t.poll()
        return sides[2].client is not None and not any(t.is_alive() for t in threads)

    wait_for(connected, 20, "the exchange")
    assert sides[0].nodes == (2,) and sides[1].client is None
    assert sides[2].client is not None
    assert sent(sides[2], b"state", sides[0]) == 2
    secrets = [o.secret for k in (0, 2) if (o := node_files.read_own(pages(tmp_path, k)))]
    assert len(secrets) == 2 and not any(s.encode() in v for s in secrets for v in store.values.values())
    for t in sides:
        t.close()


def test_if_all_see_the_directory_nothing_is_opened(tmp_path: Path) -> None:
    store, run = Store(), tmp_path / "run"
    threads = [in_thread(lambda k=k: node(tmp_path, k, run).exchange(store)) for k in range(3)]
    for t in threads:
        t.join(20)
    assert not any(node_files.read_peers(pages(tmp_path, k)) for k in range(3))
    assert set(store.values) == {"distdiag/nodes/0", "distdiag/nodes"}


def test_a_file_of_another_job_is_not_the_nonce(tmp_path: Path) -> None:
    files.write(tmp_path, NONCE, b"f" * 32)
    assert not node(tmp_path, 1, tmp_path)._sees("0" * 32)


def test_a_node_without_pyzmq_is_named_on_node_0(tmp_path: Path) -> None:
    store = Store()
    store.append("distdiag/nodes", json.dumps([1, 1, "no_pyzmq"]) + "\n" + json.dumps([2, 1, "sees"]) + "\n")
    node(tmp_path, 0, tmp_path / "run").exchange(store)
    t = Transport(pages(tmp_path, 0), 0, dump)
    t.poll()
    assert t.failed == "node 1 does not see this run directory: pyzmq is not installed there (pip install pyzmq)"
    assert t.server is None


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'[1, 1, "short"]',
        b'[-1, 1, "sees"]',
        b"[" * 50_000,
        b'[1, 1, "' + b"k" * 40 + b"\x1b]",
    ],
)
def test_lines_of_others_in_the_store_are_passed_over(line: bytes, tmp_path: Path) -> None:
    good = b'[2, 1, "%s"]' % (b"k" * 40)
    known, peers, changed = node(tmp_path, 0, tmp_path)._read_keys(line + b"\n" + good + b"\n", Peers(), -1)
    assert peers.keys == {2: "k" * 40} and changed and known == 1


def test_a_store_that_does_not_answer_keeps_nobody_waiting(tmp_path: Path) -> None:
    begun = threading.Event()

    class Stuck(Store):
        def check(self, names: list[str]) -> bool:
            begun.set()
            time.sleep(60)
            return False

    n = node(tmp_path, 1, tmp_path)
    n.store = Stuck()
    n._running.acquire()
    in_thread(n._run)
    assert begun.wait(30)
    t = time.monotonic()
    n.stop()
    assert time.monotonic() - t < 30


def test_a_store_that_is_gone_at_the_end_of_the_job_is_no_failure(tmp_path: Path) -> None:
    n = node(tmp_path, 1, tmp_path)
    n.store = Gone()
    n._going_on.release()  # the script ends
    n._running.acquire()
    n._run()
    assert not n._running.locked()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"server": 5, "keys": {}, "errors": {}}', '{"server": null, "keys": {"x": "k"}, "errors": {}}',
     '{"server": {"key": "k", "port": 1, "addresses": []}, "keys": {}, "errors": {}}'],
)  # fmt: skip
def test_a_damaged_file_opens_nothing(text: str, tmp_path: Path) -> None:
    files.write(pages(tmp_path, 0), node_files.PEERS, text.encode())
    t = Transport(pages(tmp_path, 0), 0, dump)
    t.poll()
    assert t.server is None and "is damaged" in (t.failed or "")


def test_nothing_is_imported_for_a_job_on_one_node(tmp_path: Path) -> None:
    t: Any = Transport(pages(tmp_path, 0), 0, dump)
    assert t.poll() is False and t.failed is None and t.server is None and t.facts() == {}


def test_a_fixed_port_is_bound_and_reported_if_it_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        node_files.write(pages(tmp_path, 0), Peers(keys={1: "k" * 40}))
        t = Transport(pages(tmp_path, 0), 0, dump, port)
        t.poll()
        assert t.server is not None
        wait_for(lambda: f"port {port} for the other nodes could not be bound" in (t.failed or ""), 5, "the reason")
    wait_for(lambda: (o := node_files.read_own(pages(tmp_path, 0))) and o.port == port, 10, "the port")
    assert t.failed is None
    t.close()
