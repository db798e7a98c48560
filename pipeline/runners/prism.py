"""Prism, Beam's portable local runner: finds or fetches it, starts it in its own process group, and ends it with the job.

Ctrl-C reaches every process of the terminal's group. A Prism that ended at once could not finish the job's work in flight.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import grpc
from apache_beam.version import __version__

from pipeline.beam_internals import fetch_prism
from pipeline.errors import AwayError, ConfigError, RunnerError
from pipeline.failures import one_line
from pipeline.process import PROCESS

_START_SECONDS = 30.0
# runs a command that ends whenever this process does: the shell's standard input, a pipe, closes then
WITH_PARENT = 'exec 3<&0; "$@" 3<&- & child=$!; { read -r _ <&3; kill $child; } & wait $child'
_HOW = (
    "Prism is not here and could not be fetched; get it with "
    f"`go install github.com/apache/beam/sdks/v2/go/cmd/prism@v{__version__}` and give its path as --prism_location"
)


@contextlib.contextmanager
def running_prism(options: Any) -> Iterator[None]:
    """Runs Prism during a block, on a port of its own choice; Beam's options are set to use it, with workers in this process.

    Args:
      options: Beam's options; `--prism_location` names the binary. Without it the binary on the PATH or of `go install` is used,
        else that of Beam's own release, from Beam's cache or the web.

    Raises:
      RunnerError: There is no Prism, or it does not start.
      AwayError: The block failed, and Prism had ended.
    """
    from apache_beam.options.pipeline_options import PortableOptions

    command = [prism_binary(options), "--job_port=0", "--serve_http=false", "--log_kind=text"]
    process = subprocess.Popen(  # noqa: S603  the binary that the user chose
        ["/bin/sh", "-c", WITH_PARENT, "sh", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    endpoints: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_log, args=(process.stdout, endpoints), name="prism log", daemon=True).start()
    try:
        endpoint = ""
        with contextlib.suppress(queue.Empty):
            endpoint = endpoints.get(timeout=_START_SECONDS)
        if not endpoint:
            raise RunnerError(f"Prism does not start (exit code {process.poll()}); try it by hand: {' '.join(command)}")
        portable = options.view_as(PortableOptions)
        portable.job_endpoint, portable.environment_type = endpoint, "LOOPBACK"
        _ignore_closed_channels()
        try:
            yield
        except Exception as err:
            if isinstance(err, grpc.RpcError):  # the channel closes before the process is gone
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=2)
            if process.poll() is None or PROCESS.stopped:
                raise
            raise AwayError(f"Prism has ended (exit code {process.returncode}); run the same command again") from err
    finally:
        end_process(process)


def _ignore_closed_channels() -> None:
    """Keeps tracebacks of Beam's threads, whose channels close as Prism ends, out of the log.

    Threads may end after this block; `log_lines` takes the hook away at its own end.
    """
    hook = threading.excepthook

    def log_others(raised: threading.ExceptHookArgs) -> None:
        if not isinstance(raised.exc_value, (grpc.RpcError, KeyboardInterrupt)):
            hook(raised)

    threading.excepthook = log_others


def _read_log(log: Any, endpoints: queue.SimpleQueue[str]) -> None:
    """Hands over the endpoint that Prism logs at its start, and "" at its end."""
    with log:
        for line in log:
            if found := re.search(rb"Serving JobManagement.*endpoint=(\S+:\d+)", line):
                endpoints.put(found[1].decode())
    endpoints.put("")


def check(options: Any) -> None:
    """Makes sure that Prism can be started, and that no option names another server, which would not be used.

    Raises:
      ConfigError: One does.
      RunnerError: There is no Prism.
    """
    from apache_beam.options.pipeline_options import PortableOptions

    portable = options.view_as(PortableOptions)
    for name in ("job_endpoint", "environment_type"):
        if value := getattr(portable, name):
            raise ConfigError(
                f"{name} {value}: expected none, since PrismRunner starts its own server; or --runner PortableRunner"
            )
    prism_binary(options)


def prism_binary(options: Any) -> str:
    """The path of Prism's binary.

    Raises:
      RunnerError: There is no Prism, and Beam cannot fetch it.
    """
    from apache_beam.options.pipeline_options import PrismRunnerOptions

    location: str | None = options.view_as(PrismRunnerOptions).prism_location
    if location and not os.path.exists(location) and "://" not in location:
        raise RunnerError(f"--prism_location {location}: there is no such file; {_HOW}")
    for path in (location, shutil.which("prism"), os.path.expanduser("~/go/bin/prism")):
        if path and os.path.isfile(path) and os.access(path, os.X_OK) and not path.endswith(".zip"):
            return path
    try:
        return fetch_prism(options)
    except Exception as err:
        raise RunnerError(f"{_HOW} ({one_line(err)})") from err


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Ends a process by closing its shell's input, as the death of this process would; kills its group if that fails."""
    assert process.stdin is not None  # noqa: S101  it is a pipe
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
