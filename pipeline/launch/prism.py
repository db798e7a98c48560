"""Prism, Beam's portable local runner: found or fetched, started in a process group of its own, and ended with the job.

A process group of its own, because Ctrl-C reaches every process of the terminal's group, and a Prism that ends at once leaves
nobody to finish what the job has in hand.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

from pipeline.errors import RunnerError

_START_SECONDS = 30.0
# runs a command that ends with this process, however that ends: the pipe to the shell's standard input closes then
WITH_PARENT = 'exec 3<&0; "$@" 3<&- & child=$!; { read -r _ <&3; kill $child; } & wait $child'
_HOW = (
    "Prism is not here and could not be fetched; get it with `go install github.com/apache/beam/sdks/v2/go/cmd/prism@v2.77.0` "
    "and give its path as --prism_location"
)


@contextlib.contextmanager
def prism_serving(options: Any) -> Iterator[None]:
    """Starts Prism for the length of a block, and leads Beam's options to it, with workers in this process."""
    from apache_beam.options.pipeline_options import PortableOptions

    with running_prism(options) as endpoint:
        portable = options.view_as(PortableOptions)
        portable.job_endpoint, portable.environment_type = endpoint, "LOOPBACK"
        yield


@contextlib.contextmanager
def running_prism(options: Any) -> Iterator[str]:
    """Starts Prism for the length of a block; yields its job endpoint, `host:port`.

    Args:
      options: Beam's options; `--prism_location` names the binary, else it is looked for where `go install` and Beam put it,
        else fetched by Beam from its release.

    Raises:
      RunnerError: There is none, or it does not start.
    """
    port = _free_port()
    command = [prism_binary(options), f"--job_port={port}", "--serve_http=false", "--log_level=error"]
    with open(os.environ.get("PRISM_LOG", os.devnull), "ab") as log:
        process = subprocess.Popen(  # noqa: S603  the binary that the user chose
            ["/bin/sh", "-c", WITH_PARENT, "sh", *command], stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait_for(process, port)
        yield f"localhost:{port}"
    finally:
        _end(process)


def prism_binary(options: Any) -> str:
    """The path of Prism's binary.

    Raises:
      RunnerError: There is none, and Beam cannot fetch it.
    """
    from apache_beam.options.pipeline_options import PrismRunnerOptions
    from apache_beam.runners.portability.prism_runner import PrismJobServer

    location: str | None = options.view_as(PrismRunnerOptions).prism_location
    if location and not os.path.exists(location) and "://" not in location:
        raise RunnerError(f"--prism_location {location}: there is no such file; {_HOW}")
    found = [location, shutil.which("prism"), ".tools/prism", os.path.expanduser("~/go/bin/prism")]
    found += sorted(glob.glob(os.path.join(PrismJobServer.BIN_CACHE, "apache_beam-v*-prism-*[!p]")))
    for path in found:
        if path and os.path.isfile(path) and os.access(path, os.X_OK) and not path.endswith(".zip"):
            return path
    try:
        fetched: str = PrismJobServer(options).subprocess_cmd_and_endpoint()[0][0]
        return fetched
    except Exception as err:
        raise RunnerError(f"{_HOW} ({' '.join(str(err).split())[:200]})") from err


def _wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    raise RunnerError(f"Prism does not start (exit code {process.poll()}); try it by hand: {' '.join(map(str, process.args))}")  # type: ignore[arg-type]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends Prism by closing the shell's input, as a death of this process would; by force where that is not heard."""
    assert process.stdin is not None  # noqa: S101  it is a pipe
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
