"""Beam's job server for Spark on this machine, with a Spark of its own in it, for tests.

It is a process group of its own on free ports, all that it writes is under one folder, and it ends with this process, however
that ends. The jars come from `make spark`; the worker that it starts is the one for Flink, which knows no runner.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.launch.prism import WITH_PARENT
from tests.conftest import REPO

START_SECONDS = 90.0
CORES = 2
_JARS = Path(os.environ.get("SPARK_JARS", REPO / ".tools" / "spark" / "lib"))
# what Spark opens of Java 17: https://github.com/apache/spark/blob/v3.3.0/launcher/src/main/java/org/apache/spark/launcher/JavaModuleOptions.java
_PACKAGES = ["lang", "lang.invoke", "lang.reflect", "io", "net", "nio", "util", "util.concurrent", "util.concurrent.atomic"]
_OPENS = [
    *(f"--add-opens=java.base/java.{package}=ALL-UNNAMED" for package in _PACKAGES),
    *(f"--add-opens=java.base/sun.{package}=ALL-UNNAMED" for package in ("nio.ch", "nio.cs", "security.action", "util.calendar")),
]
_JVM = ["-Xmx1g", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dlog4j.rootCategory=WARN"]


class SparkMissing(Exception):
    """Spark cannot run here; the message says what is missing."""


@contextlib.contextmanager
def running_spark(folder: Path) -> Iterator[list[str]]:
    """Starts the job server, and ends it; yields the flags of a job on it.

    Raises:
      SparkMissing: Java or the jars are not here.
    """
    if shutil.which("java") is None:
        raise SparkMissing("no Java, which Spark runs on; get it with `apt-get install default-jdk-headless`")
    if not list(_JARS.glob("beam-runners-spark-3-*.jar")):
        raise SparkMissing("no Spark; `make spark` fetches it, where Java and Maven are")
    folder.mkdir(parents=True, exist_ok=True)
    ports = _free_ports(3)
    names = ("--job-port", "--artifact-port", "--expansion-port")
    command = ["java", *_JVM, *_OPENS, "-cp", f"{_JARS}/*", "org.apache.beam.runners.spark.SparkJobServerDriver"]
    command += [f"--spark-master-url=local[{CORES}]", "--job-host=127.0.0.1", f"--artifacts-dir={folder}/artifacts"]
    command += [f"{name}={port}" for name, port in zip(names, ports, strict=True)]
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen(
            ["/bin/sh", "-c", WITH_PARENT, "sh", *command],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        _wait_for(server, ports[0], folder / "log")
        yield _job_flags(ports[0])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _job_flags(port: int) -> list[str]:
    given = {"PIPELINE_PYTHON": sys.executable, "NO_GCE_CHECK": "true", "TF_CPP_MIN_LOG_LEVEL": "2"}
    worker = json.dumps({"command": str(REPO / "deploy" / "flink" / "worker"), "env": given})
    return [f"--job_endpoint=127.0.0.1:{port}", "--environment_type=PROCESS", f"--environment_config={worker}"]


def _wait_for(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError(f"the job server ended: {log.read_text(errors='replace')[-2000:]}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise TimeoutError(f"the job server did not listen within {START_SECONDS:g} s")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in listeners]
