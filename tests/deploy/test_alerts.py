"""`deploy/prometheus/` and `deploy/grafana/`: promtool accepts rules and tests them; each alert has its part of the runbook."""

import json
import re
import subprocess

import pytest
import yaml

from pipeline.monitoring.metrics import METRICS
from tests.conftest import REPO
from tests.monitoring.prometheus import needs_prometheus

PROMETHEUS = REPO / "deploy/prometheus"
RUNBOOK = (REPO / "docs/operations.md").read_text()
RULES = [rule for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
PANELS = json.loads((REPO / "deploy/grafana/dashboard.json").read_text())["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]


@needs_prometheus
@pytest.mark.parametrize("command", ["check rules alerts.yml", "check config prometheus.yml", "test rules alerts_test.yml"])
def test_promtool_accepts_the_files_and_each_alert_fires_only_in_the_series_that_fails(command):
    done = subprocess.run(["promtool", *command.split()], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_silent_in_one_test_series_and_fires_in_the_other():
    healthy, failing = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    names = {rule["alert"] for rule in RULES}
    assert {test["alertname"] for test in healthy["alert_rule_test"]} == names
    fires = {sample["value"] for test in failing["promql_expr_test"] for sample in test["exp_samples"]}
    assert fires == {len(names) - 1}  # at that time; the backlog is old earlier
    assert "DetectionBacklogOld" in {test["alertname"] for test in failing["alert_rule_test"]}


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_each_alert_has_a_part_of_the_runbook(rule):
    file, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert (file, anchor) == ("docs/operations.md", rule["alert"].lower())
    part = RUNBOOK.split(f"### {rule['alert']}\n")[1].split("\n###")[0].split("\n## ")[0]
    assert all(f"**{what}**" in part for what in ("Means", "Look", "Do"))
    assert rule["labels"]["severity"] in ("page", "ticket")


def test_alerts_and_dashboard_name_metrics_that_a_job_has():
    known = {metric.name for metric in METRICS}
    for query in [*QUERIES, *(rule["expr"] for rule in RULES)]:
        named = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bdetection_\w+", query)}
        assert named <= known, query


def test_the_dashboard_is_one_that_grafana_can_import():
    """Grafana is in no registry that these tests reach; each query runs against a real Prometheus in `test_served_metrics`."""
    dashboard = json.loads((REPO / "deploy/grafana/dashboard.json").read_text())
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"datasource", "job"}
    assert len({panel["id"] for panel in PANELS}) == len(PANELS) >= 10
    assert all(panel["type"] == "timeseries" and panel["title"] and panel["targets"] for panel in PANELS)
    cells = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in PANELS]
    assert len(set(cells)) == len(cells)
