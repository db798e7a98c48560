"""A Flink cluster on this machine: one JobManager, two TaskManagers and Beam's job server, for tests and the demo.

Each is a process group of its own on free ports, all that they write is under one folder, and they end with this process, however
that ends. The jars come from `make flink`; what a TaskManager starts as a worker is `deploy/flink/worker`.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import REPO
from tests.emulators import free_ports, listens, start_server
from tests.processes import end_group, wait_until

TASKMANAGER_NAMES = ("taskmanager0", "taskmanager1")
_JARS = Path(os.environ.get("FLINK_JARS", REPO / ".tools" / "flink" / "lib"))
_DEPLOY = REPO / "deploy" / "flink"
# what Flink's own scripts open of Java 17
_PACKAGES = ("lang", "lang.reflect", "net", "io", "nio", "text", "time", "util")
_OF_UTIL = ("concurrent", "concurrent.atomic", "concurrent.locks")
_OPENS = [
    *(f"--add-exports={place}=ALL-UNNAMED" for place in ("java.base/sun.net.util", "java.rmi/sun.rmi.registry")),
    "--add-exports=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
    *(f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in (*_PACKAGES, *(f"util.{name}" for name in _OF_UTIL))),
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
]
_LOG = "-Dorg.slf4j.simpleLogger"
_JVM = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"{_LOG}.showDateTime=true", f"{_LOG}.dateTimeFormat=HH:mm:ss.SSS"]
_MAIN = {
    "jobmanager": "org.apache.flink.runtime.entrypoint.StandaloneSessionClusterEntrypoint",
    "taskmanager": "org.apache.flink.runtime.taskexecutor.TaskManagerRunner",
    "jobserver": str(_DEPLOY / "JobServer.java"),
}


class RunnerMissing(Exception):
    """A runner in Java cannot run here; the message says what is missing."""


def check_jars(name: str, jars: Path) -> None:
    """Raises `RunnerMissing` if Java or the runner's jars are not here."""
    if shutil.which("java") is None:
        raise RunnerMissing(f"no Java, which {name} runs on; get it with `apt-get install default-jdk-headless`")
    if not list(jars.glob(f"beam-runners-{name.lower()}-*.jar")):
        raise RunnerMissing(f"no {name}; `make {name.lower()}` fetches it, where Java and Maven are")


class Kill(NamedTuple):
    """How long after a checkpoint's end it was, and how long that checkpoint had taken."""

    after_ms: float
    checkpoint_ms: float


class FlinkCluster:
    """A running cluster.

    Args:
      folder: For logs, checkpoints and savepoints.

    Attributes:
      rest: URL of Flink's REST API and dashboard.
      job_endpoint: Where Beam's job server listens.
      folder: As given, absolute.
    """

    def __init__(self, folder: Path):
        self.folder = folder.absolute()
        rpc_port, rest_port, self._job_port, self._artifact_port, self._expansion_port = free_ports(5)
        self.rest = f"http://127.0.0.1:{rest_port}"
        self.job_endpoint = f"127.0.0.1:{self._job_port}"
        self._settings = {
            "jobmanager.rpc.port": rpc_port,
            "rest.port": rest_port,
            "state.checkpoints.dir": f"file://{self.folder}/checkpoints",
            "state.savepoints.dir": f"file://{self.folder}/savepoints",
            "io.tmp.dirs": f"{self.folder}/tmp",
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Starts everything, and waits until it can take a job."""
        for name in ("logs", "tmp", "checkpoints", "savepoints"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.start_jobmanager()
        self.start_taskmanagers()
        self.start_job_server()
        self.wait_for_taskmanagers()

    def start_jobmanager(self) -> None:
        self._start_of_flink("jobmanager", "jobmanager", ["-Xmx512m"], self._settings)

    def start_taskmanagers(self, *names: str) -> None:
        """Starts the TaskManagers of these names, by default all, where none of the name runs."""
        for name in names or TASKMANAGER_NAMES:
            settings = {**self._settings, "taskmanager.resource-id": f"{name}-{time.time_ns()}"}
            self._start_of_flink(name, "taskmanager", ["-Xmx640m", "-XX:MaxDirectMemorySize=512m"], settings)

    def start_job_server(self) -> None:
        """Starts Beam's job server, and waits until it listens."""
        ports = {"job": self._job_port, "artifact": self._artifact_port, "expansion": self._expansion_port}
        flags = [
            f"--flink-master={self.rest.removeprefix('http://')}",
            *(f"--{name}-port={port}" for name, port in ports.items()),
        ]
        flags += ["--job-host=127.0.0.1", f"--artifacts-dir={self.folder}/artifacts"]
        self._start("jobserver", "jobserver", ["-Xmx768m"], flags)
        self._wait_until(lambda: listens(self._job_port), "jobserver")

    def kill(self, *names: str) -> None:
        """Kills processes as the loss of their machine would: with all that they started."""
        for name in names:
            os.killpg(self._processes[name].pid, signal.SIGKILL)
        for name in names:
            self._processes.pop(name).wait()

    def kill_at_checkpoint(self, *names: str, after_ms: float) -> Kill:
        """Kills processes so long after the next checkpoint is completed."""
        with (self.folder / "logs" / "jobmanager.log").open() as log:
            log.seek(0, os.SEEK_END)
            lines = iter(log.readline, None)
            line = wait_until(lambda: next((line for line in lines if not line or "Completed checkpoint" in line), ""))
        completed = datetime.datetime.combine(datetime.date.today(), datetime.time.fromisoformat(line.split()[0]))
        time.sleep(max(0.0, after_ms / 1e3 - (datetime.datetime.now() - completed).total_seconds()))
        killed_ms = (datetime.datetime.now() - completed).total_seconds() * 1e3
        self.kill(*names)
        took = re.search(r"checkpointDuration=(\d+) ms", line)
        assert took, line
        return Kill(killed_ms, float(took[1]))

    def log(self, name: str) -> str:
        return (self.folder / "logs" / f"{name}.log").read_text(errors="replace")

    def cancel(self, job: str) -> None:
        """Cancels a job, and waits for its end."""
        urllib.request.urlopen(urllib.request.Request(f"{self.rest}/jobs/{job}?mode=cancel", method="PATCH"), timeout=10).close()
        self._wait_until(lambda: job in self.jobs("CANCELED"), "jobmanager")

    def ask(self, path: str, method: str = "GET", body: Any = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.rest + path, content, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return json.load(answer)

    def jobs(self, state: str = "RUNNING") -> list[str]:
        """The ids of the jobs in a state, the latest last."""
        found = sorted(self.ask("/jobs/overview")["jobs"], key=lambda job: job["start-time"])
        return [job["jid"] for job in found if job["state"] == state]

    def wait_for_taskmanagers(self) -> None:
        def registered() -> bool:
            with contextlib.suppress(OSError):
                return len(self.ask("/taskmanagers")["taskmanagers"]) >= len(TASKMANAGER_NAMES)
            return False

        self._wait_until(registered, "jobmanager")

    def close(self) -> None:
        for process in self._processes.values():
            end_group(process)
        self._processes.clear()

    def _start_of_flink(self, name: str, kind: str, jvm: list[str], settings: Mapping[str, object]) -> None:
        given = [part for key, value in settings.items() for part in ("-D", f"{key}={value}")]
        self._start(name, kind, jvm, ["--configDir", str(_DEPLOY), *given])

    def _start(self, name: str, kind: str, jvm: list[str], arguments: list[str]) -> None:
        command = ["java", *_JVM, *jvm, *_OPENS, "-cp", f"{_JARS}/*", _MAIN[kind], *arguments]
        self._processes[name] = start_server(command, log=self.folder / "logs" / f"{name}.log", cwd=self.folder)

    def _wait_until(self, holds: Callable[[], bool], name: str) -> None:
        wait_until(holds, lambda: self.log(name), self._processes[name])


@contextlib.contextmanager
def running_flink(folder: Path) -> Iterator[FlinkCluster]:
    """Starts a cluster, and ends it."""
    check_jars("Flink", _JARS)
    cluster = FlinkCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def job_flags(flink: FlinkCluster, **environment: str) -> list[str]:
    """The flags of a job on a cluster; each TaskManager starts its workers, with these variables in their environment."""
    place = [f"--job_endpoint={flink.job_endpoint}", f"--flink_master={flink.rest.removeprefix('http://')}"]
    return [*place, *worker_flags(**environment)]


def worker_flags(**environment: str) -> list[str]:
    """The flags of a job whose workers are processes of this Python, which `deploy/flink/worker` starts."""
    given = {"PIPELINE_PYTHON": sys.executable, "NO_GCE_CHECK": "true", "TF_CPP_MIN_LOG_LEVEL": "2", **environment}
    worker = json.dumps({"command": str(_DEPLOY / "worker"), "env": given})
    return ["--environment_type=PROCESS", f"--environment_config={worker}"]
