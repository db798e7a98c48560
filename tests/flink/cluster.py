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
import types
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import REPO
from tests.emulators import free_ports, listens, start_server

TASKMANAGERS = 2
TASKMANAGER_NAMES = tuple(f"taskmanager{number}" for number in range(TASKMANAGERS))
START_SECONDS = 90.0
_JARS = Path(os.environ.get("FLINK_JARS", REPO / ".tools" / "flink" / "lib"))
_DEPLOY = REPO / "deploy" / "flink"
# what Flink's own scripts open of Java 17
_OPENS = [
    *(f"--add-exports={place}=ALL-UNNAMED" for place in ("java.base/sun.net.util", "java.rmi/sun.rmi.registry")),
    "--add-exports=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
    *(
        f"--add-opens=java.base/java.{package}=ALL-UNNAMED"
        for package in ("lang", "lang.reflect", "net", "io", "nio", "text", "time", "util")
    ),
    *(
        f"--add-opens=java.base/java.util.{package}=ALL-UNNAMED"
        for package in ("concurrent", "concurrent.atomic", "concurrent.locks")
    ),
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
]
_JVM = [
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
]
_MAIN = {
    "jobmanager": "org.apache.flink.runtime.entrypoint.StandaloneSessionClusterEntrypoint",
    "taskmanager": "org.apache.flink.runtime.taskexecutor.TaskManagerRunner",
    "jobserver": str(_DEPLOY / "JobServer.java"),
}


class FlinkMissing(Exception):
    """Flink cannot run here; the message says what is missing."""


class Kill(NamedTuple):
    """How long after a checkpoint's end it was, and how long that checkpoint had taken."""

    after_ms: float
    checkpoint_ms: float


class FlinkCluster:
    """A running cluster.

    Args:
      folder: For logs, checkpoints and savepoints.
      settings: Of Flink's configuration, beside those of `deploy/flink/flink-conf.yaml`.

    Attributes:
      rest: URL of Flink's REST API and dashboard.
      job_endpoint: Where Beam's job server listens.
      folder: For logs, checkpoints and savepoints.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str] = types.MappingProxyType({})):
        self.folder = folder.absolute()
        self._rpc_port, rest_port, self._job_port, self._artifact_port, self._expansion_port = free_ports(5)
        self.rest = f"http://127.0.0.1:{rest_port}"
        self.job_endpoint = f"127.0.0.1:{self._job_port}"
        self._settings = {
            "jobmanager.rpc.port": self._rpc_port,
            "rest.port": rest_port,
            "state.checkpoints.dir": f"file://{self.folder}/checkpoints",
            "state.savepoints.dir": f"file://{self.folder}/savepoints",
            "io.tmp.dirs": f"{self.folder}/tmp",
            **settings,
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, taskmanagers: int = TASKMANAGERS) -> None:
        """Starts everything, and waits until it can take a job."""
        for name in ("logs", "tmp", "checkpoints", "savepoints"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.start_jobmanager()
        self.start_taskmanagers(taskmanagers)
        self.start_job_server()
        self.wait_for_taskmanagers(taskmanagers)

    def start_jobmanager(self) -> None:
        """Starts the JobManager, where none runs."""
        self._start("jobmanager", "jobmanager", "-Xmx512m")

    def start_taskmanagers(self, count: int = TASKMANAGERS) -> None:
        """Starts the TaskManagers, where none runs."""
        for number in range(count):
            self.start_taskmanager(number)

    def start_job_server(self) -> None:
        """Starts Beam's job server, and waits until it listens."""
        ports = (f"--job-port={self._job_port}", f"--artifact-port={self._artifact_port}")
        self._start(
            "jobserver",
            "jobserver",
            "-Xmx768m",
            f"--flink-master={self.rest.removeprefix('http://')}",
            *ports,
            f"--expansion-port={self._expansion_port}",
            "--job-host=127.0.0.1",
            f"--artifacts-dir={self.folder}/artifacts",
        )
        _wait_until(lambda: listens(self._job_port), "the job server to listen")

    def start_taskmanager(self, number: int) -> None:
        """Starts a TaskManager, of a number that none has that runs."""
        self._start(f"taskmanager{number}", "taskmanager", "-Xmx640m", "-XX:MaxDirectMemorySize=512m")

    def kill(self, *names: str) -> None:
        """Kills processes as the loss of their machine would: with all that they started."""
        for name in names:
            os.killpg(self._processes[name].pid, signal.SIGKILL)
        for name in names:
            self._processes.pop(name).wait()

    def kill_at_checkpoint(self, *names: str, after_ms: float) -> Kill:
        """Kills processes so long after the next checkpoint is completed."""
        with (self.folder / "logs" / "jobmanager.log").open("rb") as log:
            log.seek(0, os.SEEK_END)
            end = time.monotonic() + START_SECONDS
            while b"Completed checkpoint" not in (line := log.readline()):
                if time.monotonic() > end:
                    raise TimeoutError(f"no checkpoint within {START_SECONDS:g} s")
                if not line:
                    time.sleep(0.002)
        said = datetime.datetime.strptime(line.split()[0].decode(), "%H:%M:%S.%f").time()
        completed = datetime.datetime.combine(datetime.date.today(), said)
        time.sleep(max(0.0, after_ms / 1e3 - (datetime.datetime.now() - completed).total_seconds()))
        killed_ms = (datetime.datetime.now() - completed).total_seconds() * 1e3
        self.kill(*names)
        took = re.search(rb"checkpointDuration=(\d+) ms", line)
        assert took, line
        return Kill(killed_ms, float(took[1]))

    def log(self, name: str) -> str:
        """What a process has said so far."""
        return (self.folder / "logs" / f"{name}.log").read_text(errors="replace")

    def ask(self, path: str, method: str = "GET") -> Any:
        """What Flink's REST API answers."""
        with urllib.request.urlopen(urllib.request.Request(self.rest + path, method=method), timeout=10) as answer:
            return json.load(answer)

    def jobs(self, state: str = "RUNNING") -> list[str]:
        """The ids of the jobs in a state, the latest last."""
        found = sorted(self.ask("/jobs/overview")["jobs"], key=lambda job: job["start-time"])
        return [job["jid"] for job in found if job["state"] == state]

    def wait_for_taskmanagers(self, count: int) -> None:
        """Waits until so many are registered."""

        def registered() -> bool:
            with contextlib.suppress(OSError):
                return len(self.ask("/taskmanagers")["taskmanagers"]) >= count
            return False

        _wait_until(registered, f"{count} TaskManagers to register")

    def close(self) -> None:
        """Ends everything."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        self._processes.clear()

    def _start(self, name: str, kind: str, *arguments: str) -> None:
        jvm = [argument for argument in arguments if argument.startswith("-X")]
        own = [argument for argument in arguments if not argument.startswith("-X")]
        if kind != "jobserver":
            own += ["--configDir", str(_DEPLOY)]
            settings = {
                **self._settings,
                **({"taskmanager.resource-id": f"{name}-{time.time_ns()}"} if kind == "taskmanager" else {}),
            }
            for key, value in settings.items():
                own += ["-D", f"{key}={value}"]
        command = ["java", *_JVM, *jvm, *_OPENS, "-cp", f"{_JARS}/*", _MAIN[kind], *own]
        self._processes[name] = start_server(command, log=self.folder / "logs" / f"{name}.log", cwd=self.folder)


@contextlib.contextmanager
def running_flink(folder: Path, taskmanagers: int = TASKMANAGERS, **settings: str) -> Iterator[FlinkCluster]:
    """Starts a cluster, with these settings in Flink's configuration, and ends it.

    Raises:
      FlinkMissing: Java or the jars are not here.
    """
    if shutil.which("java") is None:
        raise FlinkMissing("no Java, which Flink runs on; get it with `apt-get install default-jdk-headless`")
    if not list(_JARS.glob("beam-runners-flink-*.jar")):
        raise FlinkMissing("no Flink; `make flink` fetches it, where Java and Maven are")
    cluster = FlinkCluster(folder, settings)
    try:
        cluster.start(taskmanagers)
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


def _wait_until(is_so: Any, what: str) -> None:
    end = time.monotonic() + START_SECONDS
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {START_SECONDS:g} s for {what}")
        time.sleep(0.1)
