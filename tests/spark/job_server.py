"""Beam's job server for Spark on this machine, with a Spark of its own in it. Its jars come from `make spark`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import REPO
from tests.emulators import free_ports, running_server
from tests.flink.cluster import check_jars, worker_flags

CORES = 2
JARS = Path(os.environ.get("SPARKJARS", REPO / ".tools" / "spark" / "lib"))
# what Spark opens of Java 17: https://github.com/apache/spark/blob/v3.3.0/launcher/src/main/java/org/apache/spark/launcher/JavaModuleOptions.java
_PACKAGES = ["lang", "lang.invoke", "lang.reflect", "io", "net", "nio", "util", "util.concurrent", "util.concurrent.atomic"]
OPENS = [
    *(f"--add-opens=java.base/java.{package}=ALL-UNNAMED" for package in _PACKAGES),
    *(f"--add-opens=java.base/sun.{package}=ALL-UNNAMED" for package in ("nio.ch", "nio.cs", "security.action", "util.calendar")),
]
_JVM = ["-Xmx1g", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dlog4j.rootCategory=WARN"]


@contextlib.contextmanager
def running_spark(folder: Path) -> Iterator[list[str]]:
    """Starts the job server, and ends it; yields the flags of a job on it."""
    check_jars("Spark", JARS)
    folder.mkdir(parents=True, exist_ok=True)
    command = ["java", *_JVM, *OPENS, "-cp", f"{JARS}/*", "org.apache.beam.runners.spark.SparkJobServerDriver"]
    command += [f"--spark-master-url=local[{CORES}]", "--job-host=127.0.0.1", f"--artifacts-dir={folder}/artifacts"]
    command += [f"{name}={port}" for name, port in zip(("--artifact-port", "--expansion-port"), free_ports(2), strict=True)]
    with running_server(lambda port: [*command, f"--job-port={port}"], log=folder / "log", cwd=folder) as port:
        yield [f"--job_endpoint=127.0.0.1:{port}", *worker_flags()]
