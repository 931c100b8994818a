"""The network's checks: what other nodes would resolve, and which interface would be used."""

from __future__ import annotations

import socket
import threading

import pytest

from distdiag.doctor import network


@pytest.mark.parametrize(
    ("answer", "verdict", "says"),
    [
        ((["10.0.0.5"], 0.01), "pass", "10.0.0.5"),
        ((["127.0.1.1"], 0.01), "warn", "loopback"),
        ((["127.0.1.1", "10.0.0.5"], 0.01), "pass", "10.0.0.5"),
        ((["10.0.0.5"], 4.2), "warn", "4.2 s"),
        (([], 0.01), "warn", "does not resolve"),
        ((None, 5.0), "warn", "within 5 s"),
    ],
)
def test_the_host_name_must_resolve_to_an_address(
    monkeypatch: pytest.MonkeyPatch, answer: tuple[list[str] | None, float], verdict: str, says: str
) -> None:
    monkeypatch.setattr(network, "resolve", lambda _: answer)
    check = network.host_name()
    assert check.verdict == verdict and says in check.found


def test_a_resolver_that_never_answers_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    released, left = threading.Event(), threading.Event()

    def silent(*_: object, **__: object) -> list[object]:
        released.wait(30)
        left.set()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    found, _ = network.resolve("anything", timeout_s=0.05)
    assert found is None and not left.is_set()
    released.set()
    assert left.wait(30)


def test_names_resolve_to_addresses_once() -> None:
    assert network.resolve("localhost")[0]
    assert network.resolve("does-not-exist.invalid")[0] == []


@pytest.mark.parametrize(
    ("env", "up", "verdict", "says"),
    [
        ({}, {"eth0": "10.0.0.5"}, "pass", "eth0 10.0.0.5"),
        ({}, {}, "pass", "loopback only"),
        ({}, {"eth0": "10.0.0.5", "docker0": "172.17.0.1"}, "warn", "GLOO_SOCKET_IFNAME=eth0"),
        ({}, {"docker0": "172.17.0.1"}, "pass", "docker0"),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, {"eth0": "10.0.0.5", "docker0": "172.17.0.1"}, "pass", "=eth0"),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, {"eth0": "10.0.0.5"}, "fail", "no interface eth1"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, {}, "pass", "=lo"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, {"eth0": "10.0.0.5"}, "pass", "=eth"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, {"eth0": "10.0.0.5"}, "fail", "no interface eth"),
        ({"NCCL_SOCKET_IFNAME": "^docker0,lo"}, {"eth0": "10.0.0.5"}, "pass", "^docker0"),
        ({"NCCL_SOCKET_IFNAME": "ib"}, {"eth0": "10.0.0.5"}, "fail", "NCCL_SOCKET_IFNAME=eth0"),
    ],
)
def test_network_interfaces_are_checked(env: dict[str, str], up: dict[str, str], verdict: str, says: str) -> None:
    check = network.interfaces(env, up)
    assert check.verdict == verdict
    assert says in f"{check.found} {check.remedy}"


def test_reach_an_open_port_and_a_closed_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        open_port = network.reach("127.0.0.1", port)
    assert open_port.verdict == "warn", "a loopback address is this host, whatever listens there"
    assert network.reach("127.0.0.1", port).verdict == "fail"
    assert "does not resolve" in network.reach("does-not-exist.invalid", 29500).found
