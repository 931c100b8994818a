"""The interface that the ranks would use, and the remedy for each way in which it cannot work."""

from __future__ import annotations

import pytest

from distdiag.errors import DistdiagError
from distdiag.probekit.ranks import job
from distdiag.probekit.ranks.interface import Interface, addresses, advice, line_rate_gbps, tried_by

LO = Interface("lo", "127.0.0.1", "the host name resolves to it")
ETH = Interface("eth0", "10.0.0.5", "the host name resolves to it")
DOCKER = Interface("docker0", "172.17.0.1", "NCCL's first choice")


def test_the_loopback_interface_has_its_address():
    assert addresses().get("lo") == "127.0.0.1"
    assert line_rate_gbps("lo") is None


@pytest.mark.parametrize(("backend", "variable"), [("gloo", "GLOO_SOCKET_IFNAME"), ("nccl", "NCCL_SOCKET_IFNAME")])
def test_the_environment_variable_selects_the_interface(backend: str, variable: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(variable, "lo")
    found = tried_by(backend)
    assert (found.name, found.address, found.reason) == ("lo", "127.0.0.1", f"{variable}=lo")
    monkeypatch.setenv(variable, "nosuch0")
    assert tried_by(backend).address == "no address"


def test_by_default_gloo_uses_the_address_of_the_host_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-host.invalid")
    assert tried_by("gloo").text == "lo 127.0.0.1 (the host name no-such-host.invalid does not resolve to this host)"
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    assert tried_by("gloo").address == "127.0.0.1"


@pytest.mark.parametrize(
    ("interfaces", "hosts", "says"),
    [
        (
            {0: ETH, 1: LO},
            {0: "a", 1: "b"},
            "rank 1 offers 127.0.0.1, which no other node can reach: export GLOO_SOCKET_IFNAME",
        ),
        ({0: DOCKER}, {0: "a"}, "rank 0 would use docker0, a bridge inside its host"),
        ({0: LO}, {0: "a"}, "they cannot reach 127.0.0.1"),
        ({0: ETH}, {0: "a"}, "start the missing ranks"),
    ],
)
def test_the_remedy_names_rank_interface_and_variable(
    interfaces: dict[int, Interface], hosts: dict[int, str], says: str
):
    assert says in advice(interfaces, hosts)


def arrival(interface: Interface, network: str) -> job.Arrival:
    return job.Arrival("host", network, interface, "clock", network)


@pytest.mark.parametrize(
    ("arrivals", "says"),
    [
        ([arrival(LO, "a"), arrival(LO, "b")], "rank 0 offers 127.0.0.1, which no other node can reach"),
        ([arrival(ETH, "a"), arrival(LO, "b")], "rank 1 offers 127.0.0.1"),
        ([arrival(Interface("ib9", "no address", "GLOO_SOCKET_IFNAME=ib9"), "a")] * 2, "no interface ib9"),
    ],
)
def test_an_interface_that_cannot_connect_is_reported_first(arrivals: list[job.Arrival], says: str):
    with pytest.raises(DistdiagError) as e:
        job._refuse_unreachable(arrivals)
    assert "cannot connect to each other" in e.value.message and says in e.value.hint and e.value.code == 5


def test_an_interface_that_may_connect_is_not_reported():
    job._refuse_unreachable([arrival(LO, "a"), arrival(LO, "a")])  # one host
    job._refuse_unreachable([arrival(ETH, "a"), arrival(DOCKER, "b")])  # may be reachable
