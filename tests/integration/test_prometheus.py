"""A real Prometheus scrapes a job that hangs: every query of the dashboard and of the alert rules is run, and the alert fires."""

from __future__ import annotations

import json
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.jobs import REPOSITORY, free_port, launch, rows, start, wait_for
from tests.promtool import program

pytestmark = pytest.mark.job

MONITORING = REPOSITORY / "monitoring"
# rank 0 waits in a barrier for rank 1, which waits for a message of rank 0
JOB = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(250):
    model(torch.randn(8, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.03)
if rank == 0:
    dist.barrier()
else:
    dist.recv(torch.zeros(4), src=0)
"""


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a Prometheus that has scraped the deadlock and fired its alert."""
    prometheus = program("prometheus")
    pytest.importorskip("prometheus_client")
    directory = tmp_path_factory.mktemp("prometheus")
    script, run = directory / "train.py", directory / "run"
    script.write_text(JOB)
    env = {"DISTDIAG_METRICS": "127.0.0.1:0", "DISTDIAG_RUN_DIR": str(run)}
    with launch(["-m", "distdiag.run", script], cwd=directory, env=env, fork_ranks=True, timeout=150) as job:
        found = wait_for(lambda: rows(run, "SELECT value FROM meta WHERE key = 'metrics'"), 60, "the address", job)
        target = urllib.parse.urlsplit(found[0][0]).netloc
        shutil.copy(MONITORING / "alerts.yml", directory)
        (directory / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
            "rule_files: [alerts.yml]\n"
            f"scrape_configs: [{{job_name: distdiag, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        where = f"127.0.0.1:{free_port()}"
        options = (f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data")
        with start([prometheus, *options, f"--web.listen-address={where}"], cwd=directory, timeout=150) as server:
            address = f"http://{where}/api/v1/"
            wait_for(lambda: fired(address, "DistdiagDeadlock"), 90, "the alert to fire", server)
            yield address


def ask(api: str, path: str, **arguments: str) -> Any:
    with urllib.request.urlopen(f"{api}{path}?{urllib.parse.urlencode(arguments)}", timeout=20) as answer:
        found = json.load(answer)
    assert found["status"] == "success", found
    return found["data"]


def fired(api: str, name: str) -> bool:
    try:
        alerts = ask(api, "alerts")["alerts"]
    except (urllib.error.URLError, ConnectionError):
        return False  # it has not started yet
    return any(a["labels"]["alertname"] == name and a["state"] == "firing" for a in alerts)


def queries() -> list[tuple[str, str]]:
    """Return (panel, PromQL) of every query of the dashboard, with Grafana's variables replaced as it would."""
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    found = [(p["title"], t["expr"]) for p in dashboard["panels"] for t in p["targets"]]
    return [(title, expr.replace("$instance", ".*").replace("$__rate_interval", "30s")) for title, expr in found]


def test_every_query_of_the_dashboard_has_an_answer(api: str) -> None:
    empty = [title for title, expr in queries() if not ask(api, "query", query=expr)["result"]]
    assert empty == ["Probes: bus bandwidth"]  # nobody has probed in this job
    assert not any("$" in expr for _, expr in queries())


def test_the_answers_are_those_of_the_hang(api: str) -> None:
    state = ask(api, "query", query="max by (state) (distdiag_job_state) == 1")["result"]
    assert [s["metric"] for s in state] == [{"state": "deadlocked"}]
    open_errors = ask(api, "query", query='distdiag_findings{severity="error"} > 0')["result"]
    assert {s["metric"]["kind"] for s in open_errors} == {"deadlock"}
    blocked = ask(api, "query", query="distdiag_rank_blocked_duration_seconds > 5")["result"]
    assert {s["metric"]["rank"] for s in blocked} == {"0", "1"}


def test_every_rule_is_evaluated_without_an_error(api: str) -> None:
    rules = [r for g in ask(api, "rules")["groups"] for r in g["rules"]]
    names = re.findall(r"- alert: (\w+)", (MONITORING / "alerts.yml").read_text())
    assert [r["name"] for r in rules] == names and len(names) > 5
    assert {r["health"] for r in rules} == {"ok"} and not any(r.get("lastError") for r in rules)
    firing = {r["name"] for r in rules if r["state"] == "firing"}
    assert "DistdiagDeadlock" in firing and not firing & {
        "DistdiagMonitorStuck",
        "DistdiagRankSilent",
        "DistdiagNoProgress",
    }


def test_the_scrapes_of_a_job_hold_few_series(api: str) -> None:
    found = ask(api, "query", query='count({__name__=~"distdiag_.*"})')["result"]
    assert 100 < int(found[0]["value"][1]) < 250
