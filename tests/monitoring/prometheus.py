"""A real Prometheus for tests: Debian's package, which `.ci/run` installs; where it is absent its tests skip."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.emulators import free_ports
from tests.processes import running, wait_until

MISSING = "no prometheus; get it with `apt-get install prometheus`"
_INSTALLED = shutil.which("prometheus") and shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(not _INSTALLED, reason=MISSING)
_CONFIG = """
global: {scrape_interval: 1s, evaluation_interval: 1s}
scrape_configs: [{job_name: detection, static_configs: [{targets: ["127.0.0.1:%d"]}]}]
"""

_SERVED = re.compile(r"metrics on http://127\.0\.0\.1:(\d+)/metrics$", re.MULTILINE)


def port_of(printed: str) -> int:
    """The port on which a job said to serve its metrics; 0: it has not yet."""
    return int(next(iter(_SERVED.findall(printed)), 0))


def samples_of(port: int) -> dict[tuple[str, ...], float]:
    """What a port of this machine serves: each sample by its name and the values of its labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return samples_in(answer.read().decode())


def samples_in(text: str) -> dict[tuple[str, ...], float]:
    """The samples of Prometheus' text format, by name and the values of labels."""
    families = text_string_to_metric_families(text)
    return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}


class Prometheus:
    """A running Prometheus, by the port of its HTTP API."""

    def __init__(self, port: int):
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result of an instant query; empty while Prometheus starts."""
        with contextlib.suppress(OSError):
            query = urllib.parse.urlencode({"query": expression})
            with urllib.request.urlopen(f"{self._url}/query?{query}", timeout=30) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                return found
        return []


@contextlib.contextmanager
def running_prometheus(folder: Path, target_port: int) -> Iterator[Prometheus]:
    """Starts a Prometheus that scrapes a port of this machine every second, and ends it."""
    (port,) = free_ports(1)
    config = folder / "prometheus.yml"
    config.write_text(_CONFIG % target_port)
    flags = {"config.file": config, "storage.tsdb.path": folder / "tsdb", "web.listen-address": f"127.0.0.1:{port}"}
    command = ["prometheus", *(f"--{name}={value}" for name, value in flags.items())]
    log = folder / "prometheus.log"
    with log.open("wb") as file, running(command, stdout=file, stderr=file) as process:
        prometheus = Prometheus(port)
        wait_until(lambda: prometheus.query("up == 1"), log.read_text, process)
        yield prometheus
