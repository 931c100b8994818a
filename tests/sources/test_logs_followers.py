"""Logs in which what is printed last, or most often, only follows: wrappers, addresses inside a host, victims of a full GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sources.test_logs import diagnose, only, raised

WORKER = "(Worker pid={pid}, ip=10.4.0.{n}) {host}:{pid}:{pid} [0] "
REFUSED = "misc/socket.cc:52 NCCL WARN Call to connect to {peer}<4071> failed : Connection refused\n"


def on_two_hosts(interface: str, peer: str) -> str:
    lines = (WORKER.format(pid=n + 50, n=n, host=f"g{n}") for n in (1, 2))
    text = "".join(f"{line}NCCL INFO Bootstrap : Using {interface}:{peer}<0>\n" for line in lines)
    return text + WORKER.format(pid=52, n=2, host="g2") + REFUSED.format(peer=peer)


@pytest.mark.parametrize(
    "wrapper",
    [
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        "RuntimeError: the server did not start, see the error above",
        "RuntimeError: One of the subprocesses has failed: exit code 1",
        "RuntimeError: Initialization failed: please check the worker logs for details",
    ],
)
def test_an_exception_that_only_reports_another_does_not_hide_a_lost_connection(tmp_path: Path, wrapper: str) -> None:
    last = f'Traceback (most recent call last):\n  File "/bin/serve", line 9, in <module>\n    main()\n{wrapper}\n'
    f = only(
        diagnose(tmp_path, on_two_hosts("docker0", "172.17.0.1") + last.replace("Runtime", "(Server pid=9) Runtime"))
    )
    assert f == only(diagnose(tmp_path, on_two_hosts("docker0", "172.17.0.1") + last))
    assert "could not make a connection to 172.17.0.1 (docker0 on g1, g2)" in f.message
    assert f.advice.startswith("set NCCL_SOCKET_IFNAME to the interface that all hosts share (and GLOO_SOCKET_IFNAME)")
    assert wrapper.partition(": ")[2][:20] in only(diagnose(tmp_path, last)).message  # alone, it is all there is


@pytest.mark.parametrize(
    ("interface", "peer", "own"),
    [
        ("docker0", "172.17.0.1", True),
        ("lo", "127.0.0.1", True),
        ("usb0", "169.254.3.1", True),
        ("virbr0", "192.168.122.1", True),
        ("eth0", "10.9.0.2", False),
    ],
)
def test_an_address_inside_each_host_that_two_hosts_give_is_the_wrong_one(
    tmp_path: Path, interface: str, peer: str, own: bool
) -> None:
    f = only(diagnose(tmp_path, on_two_hosts(interface, peer)))
    assert ("an address inside each of these hosts" in f.message) is own
    assert f.advice.startswith("set NCCL_SOCKET_IFNAME") is own
