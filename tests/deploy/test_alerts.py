"""`deploy/prometheus/` and `deploy/grafana/`: promtool accepts rules and tests them; each alert has its part of the runbook."""

import json
import re
import subprocess

import pytest
import yaml

from pipeline.monitoring.notify import _LAST_RUN
from pipeline.monitoring.prometheus import METRICS
from tests.conftest import REPO
from tests.monitoring.prometheus import needs_prometheus

PROMETHEUS = REPO / "deploy/prometheus"
RULES = [rule for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
PANELS = json.loads((REPO / "deploy/grafana/dashboard.json").read_text())["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]


@needs_prometheus
@pytest.mark.parametrize("command", ["check rules alerts.yml", "check config prometheus.yml", "test rules alerts_test.yml"])
def test_promtool_accepts_the_files_and_each_alert_fires_only_in_the_series_that_fails(command):
    done = subprocess.run(["promtool", *command.split()], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_and_dashboard_name_metrics_that_a_job_has():
    known = {metric.name for metric in METRICS} | {*_LAST_RUN}
    for query in [*QUERIES, *(rule["expr"] for rule in RULES)]:
        named = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bdetection_\w+", query)}
        assert named <= known, query


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_fires_however_the_job_is_scraped(rule):
    """Annotations of pods, an operator and a static configuration give it other labels; its metrics are the same."""
    assert not re.search(r'\b(job|instance)\s*=~?"', rule["expr"])
