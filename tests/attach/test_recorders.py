"""Attach to jobs that serve their flight recorder: by torch's worker server (real), NCCL's dump pipe and its RAS (stand-ins)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from distdiag import procfs, worker_server
from distdiag.attach import ras, recorders
from distdiag.attach.ranks import Candidate
from distdiag.sources.dumps.verdict import diagnose_dumps
from tests.attach.test_attach import attach, needs_py_spy
from tests.jobs import free_port, start, wait_for

# Rank 1 makes one all_reduce less at the first line, or a barrier at the second; both ranks end in the same all_reduce, or each in its own.
SCRIPT = """
import sys, time
import torch, torch.distributed as dist, torch.distributed.debug
from torch.distributed.elastic.control_plane import worker_main

@worker_main()
def main():
    dist.init_process_group("gloo")
    x = torch.ones(10)
    for step in range(20):
        if sys.argv[1] == "skips" and step == 7 and dist.get_rank() == 1:
            continue
        if sys.argv[1] == "barrier" and step == 7 and dist.get_rank() == 1:
            dist.barrier()  # BARRIER
        dist.all_reduce(x)  # REDUCE
    if dist.get_rank() == 0 and sys.argv[1] == "skips":
        dist.all_reduce(x)  # OWN
    dist.all_reduce(x)
    open("at_the_end", "w")
    time.sleep(1000)
main()
"""


@contextmanager
def served(tmp_path: Path, how: str) -> Iterator[Any]:
    """Start two ranks by hand, each with its worker server."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    given = f"WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()} exec {sys.executable} {script} {how}"
    ranks = [f"(RANK={r} LOCAL_RANK={r} {recorders.SOCKET}={tmp_path}/w{r}.sock {given}) &" for r in range(2)]
    with start(["bash", "-c", " ".join([*ranks, "wait"])], cwd=tmp_path, timeout=170) as job:
        wait_for(lambda: all((tmp_path / f"w{r}.sock").exists() for r in range(2)), 90, "the servers", job)

        def stuck() -> bool:
            try:
                answers = [json.loads(worker_server.ask(f"{tmp_path}/w{r}.sock", "fr_trace_json")) for r in range(2)]
            except OSError:
                return False
            return all(len(a.get("entries", ())) > 7 and not a["entries"][-1]["retired"] for a in answers)

        wait_for(stuck, 90, "the hang", job)
        yield job


@needs_py_spy
@pytest.mark.job
@pytest.mark.timeout(200)
def test_the_worker_servers_of_a_job_prove_what_stacks_suspect(tmp_path: Path) -> None:
    with served(tmp_path, "barrier") as job:
        found = attach(job)
    (finding,) = found["findings"]
    assert (finding["certainty"], finding["severity"], finding["culprits"]) == ("proved", "error", [1]), found
    line = {name: SCRIPT[: SCRIPT.index(name)].count("\n") + 1 for name in ("BARRIER", "REDUCE")}
    places = {(w["rank"], w["line"]) for w in (*finding["where"], *finding["waiting"])}
    assert places == {(1, line["BARRIER"]), (0, line["REDUCE"])}
    assert "step == 7 and dist.get_rank() == 1" in finding["message"] + finding["advice"]
    assert finding["collective"]["seq"] == 8
    assert found["state"] == "deadlocked" and not finding["evidence"]


def me(env: dict[str, str]) -> Candidate:
    pid = os.getpid()
    return Candidate(pid, os.getppid(), procfs.start_ticks(pid) or 0, env, ("python",))


# -- the worker server, hostile ----------------------------------------------------------------------------------------


@contextmanager
def unix_server(path: Path, answer: bytes, every_s: float = 0.0) -> Iterator[None]:
    """Serve each connection with these bytes, one at a time where there is a pause."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(4096)
                    for part in [answer] if not every_s else [answer[i : i + 1] for i in range(len(answer))]:
                        connection.sendall(part)
                        time.sleep(every_s)
            except OSError:
                if listening.fileno() < 0:
                    return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


def http_answer(body: bytes, length: int | None = None) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(body) if length is None else length) + body


def test_a_server_that_sends_a_byte_a_moment_has_a_deadline(tmp_path: Path) -> None:
    with unix_server(tmp_path / "s", http_answer(b"x" * 10_000), every_s=0.05):
        began = time.monotonic()
        with pytest.raises((OSError, ValueError)):
            worker_server.ask(str(tmp_path / "s"), "fr_trace_json", timeout_s=0.5)
        assert time.monotonic() - began < 60.0  # of 500


def test_a_socket_that_another_process_serves_is_not_asked(tmp_path: Path) -> None:
    with unix_server(tmp_path / "s", http_answer(b"{}")):
        assert worker_server.ask(str(tmp_path / "s"), "x", pid=os.getpid()) == b"{}"
        with pytest.raises(PermissionError, match="served by process"):
            worker_server.ask(str(tmp_path / "s"), "x", pid=os.getppid())
        other = Candidate(os.getppid(), 1, 0, {recorders.SOCKET: str(tmp_path / "s")}, ())
        taken, notes = recorders.take({0: other}, tmp_path)
    assert taken == set() and "served by process" in notes[0]


@pytest.mark.parametrize("path", ["missing", "x" * 200, "plain"])
def test_a_bad_socket_is_one_note(tmp_path: Path, path: str) -> None:
    (tmp_path / "plain").write_text("")
    taken, notes = recorders.take({0: me({recorders.SOCKET: str(tmp_path / path)})}, tmp_path)
    assert taken == set() and len(notes) == 1 and notes[0].startswith("rank 0: no answer from its worker server")


# -- the dump pipe, by a stand-in for NCCL's monitor thread -------------------------------------------------------------


@contextmanager
def nccl_monitor(tmp_path: Path, content: bytes | None) -> Iterator[dict[str, str]]:
    """Read a pipe as torch's DumpPipe does, and write a dump at each write; yield the environment that torch would read."""
    pipe = tmp_path / "pipe_0.pipe"
    os.mkfifo(pipe)
    fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    over = threading.Event()

    def serve() -> None:
        while not over.wait(0.05):
            try:
                if os.read(fd, 128) and content is not None:
                    (tmp_path / "dump_0").write_bytes(content)
            except BlockingIOError:
                continue

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield {recorders.PIPE: f"{tmp_path}/pipe_", recorders.PREFIXES[0]: f"{tmp_path}/dump_"}
    finally:
        over.set()
        thread.join()
        os.close(fd)


def test_a_dump_by_the_pipe(tmp_path: Path) -> None:
    folder = tmp_path / "taken"
    folder.mkdir()
    with nccl_monitor(tmp_path, b'{"entries": []}') as env:
        assert recorders.take({0: me(env)}, folder) == ({0}, [])
    assert (folder / "pipe_rank0").read_bytes() == b'{"entries": []}'


def test_a_dump_that_this_process_has_written_is_not_overwritten(tmp_path: Path) -> None:
    with nccl_monitor(tmp_path, b"new") as env:
        (tmp_path / "dump_0").write_text("of the watchdog")
        taken, notes = recorders.take({0: me(env)}, tmp_path)
    assert taken == set() and "is there already" in notes[0]
    assert (tmp_path / "dump_0").read_text() == "of the watchdog"


def test_pipes_that_nobody_reads_or_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "WRITTEN_S", 0.5)
    env = {recorders.PIPE: f"{tmp_path}/none_", recorders.PREFIXES[0]: f"{tmp_path}/dump_"}
    assert recorders.take({0: me(env)}, tmp_path)[1][0].startswith("rank 0: no dump by its pipe")
    (tmp_path / "none_0.pipe").write_text("a plain file")
    assert recorders.take({0: me(env)}, tmp_path)[1] == ["rank 0: no dump by its pipe (it is no pipe of this user)"]
    assert (tmp_path / "none_0.pipe").read_text() == "a plain file"
    with nccl_monitor(tmp_path, None) as env:
        assert recorders.take({0: me(env)}, tmp_path) == (set(), ["rank 0 wrote no dump within 0 s"])


# -- NCCL's RAS, by a stand-in with its protocol ------------------------------------------------------------------------


def ras_status(pids: list[int], launched: list[int]) -> dict[str, Any]:
    """Return what NCCL's client_support.cc writes, as far as it is read."""
    ranks = [
        {"rank": n, "host": "h", "pid": pid, "status": {}, "collective_counts": {"Broadcast": 2, "AllReduce": count}}
        for n, (pid, count) in enumerate(zip(pids, launched, strict=True))
    ]
    comm = {"hash": "0x1", "size": len(pids), "ranks_count": len(pids), "missing_ranks_count": 0, "ranks": ranks}
    return {"nccl_version": "2.29.7", "communicators_count": 1, "communicators": [{**comm, "missing_ranks": []}]}


@contextmanager
def ras_server(status: bytes, protocol: bytes = b"SERVER PROTOCOL 2\n") -> Iterator[int]:
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), connection, connection.makefile("rb") as lines:
                for line in lines:
                    answer = {b"CLIENT PROTOCOL 2\n": protocol, b"SET FORMAT json\n": b"OK\n"}.get(line)
                    connection.sendall(answer if answer is not None else status)
                    if answer is None:
                        break

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


def test_ras_counts_name_the_rank_that_is_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ras, "version", lambda p: (2, 29, 7))
    with ras_server(json.dumps(ras_status([os.getpid(), 11, 12], [6, 5, 6])).encode()) as port:
        mine = me({ras.ADDRESS: f"localhost:{port}"})
        others = {n: Candidate(10 + n, 1, 0, {}, ()) for n in (1, 2)}
        assert ras.take({0: mine, **others}, tmp_path) == ({0, 1, 2}, [])
    (finding,) = diagnose_dumps(tmp_path).findings
    assert finding.culprits == (1,) and finding.collective is not None and finding.collective.seq == 8


@pytest.mark.parametrize(
    ("known", "status", "protocol", "note"),
    [
        ((2, 28, 8), b"{}", b"SERVER PROTOCOL 2\n", "not asked: NCCL 2.28.8"),
        (None, b"{}", b"SERVER PROTOCOL 2\n", "not asked: NCCL of unknown version"),
        ((2, 29, 7), b"{}", b"HTTP/1.1 400\n", "answered"),
        ((2, 29, 7), b"not json", b"SERVER PROTOCOL 2\n", "Expecting value"),
        ((2, 29, 7), b'{"communicators": [1]}', b"SERVER PROTOCOL 2\n", "'int' object"),
        ((2, 29, 7), b"[" * 100_000, b"SERVER PROTOCOL 2\n", "recursion"),
        ((2, 29, 7), b"{}", b"x" * 1000, "too long"),
    ],
)
def test_bad_ras_is_one_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: Any, status: bytes, protocol: bytes, note: str
) -> None:
    monkeypatch.setattr(ras, "version", lambda p: known)
    with ras_server(status, protocol) as port:
        taken, notes = ras.take({0: me({ras.ADDRESS: f"127.0.0.1:{port}"})}, tmp_path)
    assert taken == set() and len(notes) == 1 and note in notes[0]


def test_ras_elsewhere_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ras, "version", lambda p: (2, 29, 7))
    for address in ("10.0.0.1:28028", f"127.0.0.1:{free_port()}", "", "x:y:z"):
        assert "listens" in ras.take({0: me({ras.ADDRESS: address})}, tmp_path)[1][0]


def test_the_version_of_nccl_is_read_from_its_library(tmp_path: Path) -> None:
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"\0" * 5000 + b"NCCL version 2.28.9+cuda13.0\0")
    p = me({})
    p.__dict__["maps"] = f"7f00-7f01 r--p 00000000 08:01 12 {library}\n".encode()
    assert ras.version(p) == (2, 28, 9)
    p.__dict__["maps"] = b""
    assert ras.version(p) is None
