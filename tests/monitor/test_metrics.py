"""Metrics: names and units, few series, and a scraper that cannot hold up the monitor."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from distdiag.diagnosis.engine import Diagnosis
from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import Call, RankState, Site, Snapshot, Step
from distdiag.errors import DistdiagError
from distdiag.monitor.metrics import prometheus
from distdiag.monitor.metrics.export import Exporters
from distdiag.monitor.metrics.prometheus import CONNECTIONS, MetricsServer, text_of
from distdiag.monitor.metrics.table import METRICS, MOST_RANKS, Poll, Ranks
from distdiag.terms.metrics_targets import Targets, parse_metrics
from tests.jobs import REPOSITORY, wait_for
from tests.promtool import promtool

SITE = Site("/home/ada/secret/train.py", 88, "evaluate")


def step(number: int, ms: float, wait_ms: float) -> Step:
    return Step(number, number * 0.1, ms, 1.0, 20.0, 30.0, 5.0, wait_ms, 1.0, None, 8, 8, 0.5)


def rank(q: int, slow: bool = False) -> RankState:
    own = 90.0 if slow else 50.0
    steps = tuple(step(k, 100.0, 100.0 - own) for k in range(1, 21))
    blocked = Call(op="all_reduce", group="default_pg", seq=7, site=SITE, entered_s=9.0) if q == 1 else None
    return RankState(
        rank=q, host=f"node{q // 8}", step=20, steps=steps, blocked=blocked, heartbeat_age_s=0.25, rss_bytes=1000,
        current_site=SITE, wait_measured=True,
    )  # fmt: skip


def poll(ranks: int = 4, **more: Any) -> Poll:
    found = Finding(kind="straggler", cause="data", severity="warning", culprits=(2,), message="rank 2 at train.py:88")
    values: dict[str, Any] = {
        "snapshot": Snapshot(
            t_s=10.0, world_size=ranks, expected=ranks, groups={}, ranks={q: rank(q, slow=q == 2) for q in range(ranks)}
        ),
        "own": frozenset(range(ranks)), "node": 0, "started_unix_s": 1e9, "state": "degraded", "findings": (found,),
        "reported": {("straggler", "warning"): 3}, "polls": 40, "poll_s": 0.002, "cpu_s": 1.5, "memory_bytes": 40 << 20,
        "database_bytes": 4096, "probes": {"allreduce": (2.5e9, True), "gpu": (None, False)},
    }  # fmt: skip
    return Poll(**(values | more))


def test_the_text_has_what_the_poll_knows_in_base_units() -> None:
    lines = text_of(poll()).decode().splitlines()
    expected = [
        'distdiag_job_state{state="degraded"} 1.0', 'distdiag_job_state{state="running"} 0.0',
        "distdiag_job_last_step_timestamp_seconds 1.000000002e+09",
        'distdiag_findings{kind="straggler",severity="warning"} 1.0',
        'distdiag_findings_reported_total{kind="straggler",severity="warning"} 3.0',
        'distdiag_findings_reported_total{kind="deadlock",severity="error"} 0.0',
        'distdiag_rank_findings{host="node0",rank="2",severity="warning"} 1.0',
        'distdiag_rank_step_duration_seconds{host="node0",rank="0"} 0.1',
        'distdiag_rank_wait_ratio{host="node0",rank="0"} 0.5',
        'distdiag_rank_slowest_ratio{host="node0",rank="2"} 1.0', 'distdiag_rank_slowest_ratio{host="node0",rank="0"} 0.0',
        'distdiag_rank_blocked_duration_seconds{host="node0",rank="1"} 1.0',
        'distdiag_rank_blocked_duration_seconds{host="node0",rank="0"} 0.0',
        'distdiag_probe_bus_bandwidth_bytes_per_second{probe="allreduce"} 2.5e+09', 'distdiag_probe_passed{probe="gpu"} 0.0',
        "distdiag_monitor_cpu_time_seconds_total 1.5", "distdiag_monitor_shared_series_ranks 0.0",
    ]  # fmt: skip
    assert [line for line in expected if line not in lines] == []


def test_the_text_has_no_path_no_line_and_no_message_of_the_job() -> None:
    text = text_of(poll()).decode()
    assert all(word not in text for word in ("secret", "train.py", "evaluate", "88", "all_reduce"))


def test_what_was_not_measured_has_no_series() -> None:
    bare = Snapshot(t_s=1.0, world_size=1, expected=1, groups={}, ranks={0: RankState(rank=0, wait_measured=False)})
    lines = text_of(poll(snapshot=bare, own=frozenset({0}), probes={}, memory_bytes=None)).decode().splitlines()
    shown = {line.partition("{")[0].partition(" ")[0].removeprefix("distdiag_") for line in lines if line[0] != "#"}
    absent = {"rank_wait_ratio", "rank_step_duration_seconds", "job_last_step_timestamp_seconds", "probe_passed"}
    assert not shown & (absent | {"monitor_memory_usage_bytes"}) and "rank_steps_total" in shown


def test_names_follow_the_conventions(tmp_path: Path) -> None:
    shown = subprocess.run(
        [promtool(), "check", "metrics"], input=text_of(poll()), capture_output=True, timeout=30, check=False
    )
    assert shown.returncode == 0, (shown.stdout + shown.stderr).decode()
    assert shown.stdout + shown.stderr == b""


def test_names_are_unique_and_counters_end_in_total() -> None:
    assert max(Counter(m.prometheus for m in METRICS).values()) == 1
    assert all(m.counter == m.prometheus.endswith("_total") and m.help for m in METRICS)


def test_ranks_above_the_bound_share_one_series() -> None:
    text = text_of(poll(MOST_RANKS + 44)).decode()
    assert "distdiag_monitor_shared_series_ranks 44.0" in text
    assert 'distdiag_rank_memory_usage_bytes{host="",rank="other"} 44000.0' in text
    assert f'rank="{MOST_RANKS}"' not in text
    grown = text_of(poll(4 * MOST_RANKS)).decode()
    assert grown.count("\n") == text.count("\n"), "the number of series must not grow above the bound"


def test_ranks_of_other_nodes_are_left_to_their_monitors() -> None:
    text = text_of(poll(4, own=frozenset({0, 1}))).decode()
    assert 'distdiag_rank_step_duration_seconds{host="node0",rank="1"}' in text
    assert 'distdiag_rank_step_duration_seconds{host="node0",rank="2"}' not in text
    assert 'distdiag_rank_findings{host="node0",rank="2",severity="warning"} 1.0' in text, (
        "the verdict is the whole job's"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Targets()),
        ("0", Targets()),
        ("9464", Targets(("127.0.0.1", 9464))),
        ("0.0.0.0:9464", Targets(("0.0.0.0", 9464))),
        ("[::1]:9464", Targets(("::1", 9464))),
        (":9464", Targets(("127.0.0.1", 9464))),
        ("otlp", Targets(None, True)),
        ("9464, otlp", Targets(("127.0.0.1", 9464), True)),
    ],
)
def test_the_value_names_an_address_or_otlp(text: str, expected: Targets) -> None:
    assert parse_metrics(text) == expected


@pytest.mark.parametrize("text", ["port", "host:", "1,2", "-1", "70000", "localhost", "９４６４"])
def test_another_value_is_refused(text: str) -> None:
    with pytest.raises(DistdiagError, match="no address"):
        parse_metrics(text)


# -- the server ---------------------------------------------------------------------------------------------------


@pytest.fixture
def served() -> Iterator[MetricsServer]:
    newest = poll()
    server = MetricsServer(("127.0.0.1", 0), lambda: newest)
    yield server
    server.shutdown()
    server.server_close()


def get(server: MetricsServer, path: str = "/metrics") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{server.where}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        e.close()
        return e.code, ""


def test_metrics_are_served_and_nothing_else(served: MetricsServer) -> None:
    status, text = get(served)
    assert status == 200 and "distdiag_job_state" in text
    assert get(served, "/../../etc/passwd")[0] == 404 and get(served, "/")[0] == 404


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9464", 200), ("LOCALHOST", 200), ("127.0.0.1", 200), ("127.1.2.3:1", 200), ("[::1]:9464", 200), ("", 200),
        ("evil.example:9464", 403), ("localhost.evil.example", 403), ("127.0.0.1.evil.example", 403), ("192.168.1.2", 403),
        ("[::1", 403), ("//", 403),
    ],
)  # fmt: skip
def test_a_web_page_cannot_reach_the_loopback_by_another_name(served: MetricsServer, host: str, status: int) -> None:
    """DNS rebinding: a browser on this host sends the page's name, which resolves to 127.0.0.1 by then."""
    with socket.create_connection(served.server_address[:2]) as s:  # type: ignore[arg-type]
        s.sendall(f"GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        answer = b"".join(iter(lambda: s.recv(65536), b""))
    assert int(answer.split()[1]) == status and (b"distdiag_job_state" in answer) == (status == 200)


@pytest.mark.parametrize("host", ["0.0.0.0", "Node7.cluster"])
def test_a_host_that_was_named_is_reached_by_its_name(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many systems give their own name to 127.0.1.1."""
    bind = prometheus.TCPServer.server_bind

    def resolved(server: MetricsServer) -> None:
        server.server_address = ("127.0.0.1" if host == "Node7.cluster" else host, 0)
        bind(server)

    monkeypatch.setattr(prometheus.TCPServer, "server_bind", resolved)
    newest = poll()
    server = MetricsServer((host, 0), lambda: newest)
    with socket.create_connection(("127.0.0.1", server.server_address[1])) as s:  # type: ignore[index]
        s.sendall(b"GET /metrics HTTP/1.1\r\nHost: node7.cluster:9464\r\n\r\n")
        assert s.makefile("rb").readline().split()[1] == b"200"
    server.shutdown()
    server.server_close()


def test_a_failure_of_ours_is_reported_and_printed_nowhere(
    served: MetricsServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prometheus, "text_of", lambda _: {}["rank"])
    with pytest.raises(OSError, match="closed connection"):
        get(served)
    assert served.failure and "KeyError" in served.failure and capfd.readouterr() == ("", "")


def test_connections_that_never_ask_do_not_keep_a_scraper_out(
    served: MetricsServer, capfd: pytest.CaptureFixture[str]
) -> None:
    silent = [socket.create_connection(served.server_address[:2]) for _ in range(5 * CONNECTIONS)]  # type: ignore[arg-type]
    for s in silent[::2]:
        s.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
    assert get(served)[0] == 200
    assert len(served._open) <= CONNECTIONS

    def few_threads() -> bool:
        return sum("process_request_thread" in t.name for t in threading.enumerate()) <= CONNECTIONS

    wait_for(few_threads, 4, "the threads of closed connections to end, before their patience does")
    for s in silent:
        s.close()
    assert capfd.readouterr() == ("", ""), "stderr is the job's"


def test_the_text_is_made_once_per_poll(served: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Poll] = []
    monkeypatch.setattr(prometheus, "text_of", lambda p: made.append(p) or b"text")
    assert [served.text() for _ in range(50)] == [b"text"] * 50
    assert len(made) == 1


def test_publishing_waits_for_no_scraper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exporters = Exporters("127.0.0.1:0", tmp_path, 0)
    assert exporters.failures == []
    rendering, go_on = threading.Event(), threading.Event()

    def slow(_: Poll) -> bytes:
        rendering.set()
        assert go_on.wait(20)
        return b"late"

    monkeypatch.setattr(prometheus, "text_of", slow)

    def publish() -> None:
        s = poll().snapshot
        exporters.publish(s, s.ranks, 1e9, Diagnosis(source=lambda _: None), [], [], tmp_path / "run.db", 0.0)

    publish()
    scraper = threading.Thread(target=lambda: get(exporters._server))
    scraper.start()
    assert rendering.wait(10)
    for _ in range(100):
        publish()  # the scrape is still being answered: a lock between the two would hang here
    assert exporters._latest is not None and exporters._latest.polls == 101
    go_on.set()
    scraper.join()
    exporters._server.shutdown()
    exporters._server.server_close()


def test_a_port_in_use_is_one_line_and_no_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        exporters = Exporters(str(taken.getsockname()[1]), tmp_path, 0)
    assert not exporters.on and len(exporters.failures) == 1 and "Address already in use" in exporters.failures[0]


def test_a_bad_value_or_a_missing_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no address" in Exporters("everywhere", tmp_path, 0).failures[0]
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "prometheus_client" else find(name, *a)
    )
    without = Exporters("0.0.0.0:0", tmp_path, 0)
    assert without.failures == [
        "metrics are not exported: /metrics needs prometheus_client, which is not installed; pip install prometheus-client"
    ]


def test_nothing_is_imported_or_served_unless_asked(tmp_path: Path) -> None:
    exporters = Exporters("", tmp_path, 0)
    assert not exporters.on and exporters.where is None and exporters.failures == []


# -- OTLP ---------------------------------------------------------------------------------------------------------


class _Collector(HTTPServer):
    received: list[bytes]


class _Receive(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append(body)  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_otlp_sends_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proto = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    collector = _Collector(("127.0.0.1", 0), _Receive)
    collector.received = []
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    exporters = Exporters("otlp", tmp_path, 0)
    exporters._latest = poll()
    exporters.close()
    collector.shutdown()
    collector.server_close()
    assert exporters.failures == [] and collector.received
    request = proto.ExportMetricsServiceRequest.FromString(collector.received[0])
    sent = {m.name: m for r in request.resource_metrics for scope in r.scope_metrics for m in scope.metrics}
    expected = {m.name: m for m in METRICS if list(m.values(Ranks(poll())))}
    assert sent.keys() == expected.keys()
    for name, m in expected.items():
        data = sent[name].sum if m.counter else sent[name].gauge
        got = {tuple(sorted((a.key, a.value.string_value) for a in p.attributes)): p for p in data.data_points}
        want = {tuple(sorted(zip(m.labels, labels, strict=True))): float(v) for labels, v in m.values(Ranks(poll()))}
        assert {k: p.as_double or float(p.as_int) for k, p in got.items()} == want, name
        assert sent[name].unit == m.unit
    resource = {a.key: a.value.string_value for a in request.resource_metrics[0].resource.attributes}
    assert resource["service.name"] == "distdiag"


def test_a_collector_that_is_gone_is_one_line_and_nothing_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    exporters = Exporters("otlp", tmp_path, 0)
    s = poll().snapshot

    def reported() -> bool:
        exporters.publish(s, s.ranks, 1e9, Diagnosis(source=lambda _: None), [], [], tmp_path / "run.db", 0.0)
        return bool(exporters.failures)

    wait_for(reported, 20, "the failure to be reported")
    exporters.close()
    assert len([f for f in exporters.failures if f.startswith("OTLP: ")]) == 1
    assert capfd.readouterr() == ("", "")


# -- what the repository has for Prometheus and Grafana ------------------------------------------------------------


def test_the_alert_rules_are_valid_and_do_what_their_tests_say() -> None:
    for arguments in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        shown = subprocess.run(
            [promtool(), *arguments],
            cwd=REPOSITORY / "monitoring",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert shown.returncode == 0 and "SUCCESS" in shown.stdout, shown.stdout + shown.stderr


def test_the_dashboard_is_one_that_grafana_knows() -> None:
    """Read by Grafana's own types (PyPI: grafana-foundation-sdk), it loses nothing."""
    models = pytest.importorskip(
        "grafana_foundation_sdk.models.dashboard", reason="grafana-foundation-sdk is not installed"
    )
    encoder = importlib.import_module("grafana_foundation_sdk.cog.encoder").JSONEncoder
    importlib.import_module("grafana_foundation_sdk.cog.plugins").register_default_plugins()
    dashboard = json.loads((REPOSITORY / "monitoring/grafana-dashboard.json").read_text())
    again = json.loads(encoder().encode(models.Dashboard.from_json(dashboard)))
    assert list(_lost(dashboard, again)) == []


def _lost(before: Any, after: Any, at: str = "") -> Iterator[str]:
    if isinstance(before, dict):
        for key, value in before.items():
            if key in after:
                yield from _lost(value, after[key], f"{at}/{key}")
            elif value not in (None, {}, []):
                yield f"{at}/{key}"
    elif isinstance(before, list):
        for i, value in enumerate(before):
            yield from _lost(value, after[i], f"{at}/{i}")
    elif before != after:
        yield at


def test_the_dashboard_is_whole() -> None:
    dashboard = json.loads((REPOSITORY / "monitoring/grafana-dashboard.json").read_text())
    panels = dashboard["panels"]
    assert len({p["id"] for p in panels}) == len(panels) and len({p["title"] for p in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for p in panels:
        g = p["gridPos"]
        cells = {(x, y) for x in range(g["x"], g["x"] + g["w"]) for y in range(g["y"], g["y"] + g["h"])}
        assert max(x for x, _ in cells) < 24 and not cells & taken, f"{p['title']} overlaps another panel"
        taken |= cells
        assert p["targets"] and all(t["datasource"] == p["datasource"] for t in p["targets"])
    asked = " ".join(t["expr"] for p in panels for t in p["targets"])
    asked += (REPOSITORY / "monitoring/alerts.yml").read_text()
    unused = [m.prometheus for m in METRICS if m.prometheus not in asked]
    assert unused == ["distdiag_job_start_timestamp_seconds", "distdiag_monitor_info", "distdiag_monitor_polls_total",
                      "distdiag_monitor_poll_duration_seconds", "distdiag_monitor_database_size_bytes",
                      "distdiag_monitor_shared_series_ranks"]  # fmt: skip
