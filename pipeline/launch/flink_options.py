"""The options of a job on Flink, which Beam's job server submits there.

The job server has options of its own, which Beam's Python knows only when a job is submitted. Those that jobs need are declared
here.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from apache_beam.options.pipeline_options import FlinkRunnerOptions, PipelineOptions, PortableOptions
from apache_beam.runners.portability.flink_runner import FlinkJarJobServer
from apache_beam.utils.subprocess_server import JavaJarServer

from pipeline.errors import ConfigError

# so that each worker has heard of a checkpoint's end before the next one begins (`pipeline.stream.delayed_acks`)
_PAUSE_MS = 1000
_BUNDLE_MS = 100  # an answer waits for the end of its bundle at each of the steps between which a runner keeps records
_STREAM_DEFAULTS = {
    "number_of_execution_retries": 2**31
    - 1,  # a stream restarts for as long as it lives, whatever the cluster's configuration says
    "execution_retry_delay": 10_000,
    "min_pause_between_checkpoints": _PAUSE_MS,
    "max_bundle_time_mills": _BUNDLE_MS,
    "externalized_checkpoints_enabled": True,
    "retain_externalized_checkpoints_on_cancellation": True,
}


class FlinkStreamOptions(PipelineOptions):
    """Options of Beam's Flink runner, which is Java: https://beam.apache.org/documentation/runners/flink/."""

    @classmethod
    def _add_argparse_args(cls, parser: Any) -> None:
        parser.add_argument("--object_reuse", action="store_true", default=None)
        parser.add_argument("--max_bundle_size", type=int, help="elements after which a bundle ends")
        parser.add_argument("--state_backend")
        parser.add_argument("--state_backend_storage_path")
        parser.add_argument("--checkpointing_mode")
        parser.add_argument("--checkpointing_interval", type=int, help="milliseconds from checkpoint to checkpoint")
        parser.add_argument("--finish_bundle_before_checkpointing", action="store_true", default=None)
        parser.add_argument("--num_concurrent_checkpoints", type=int)
        parser.add_argument("--min_pause_between_checkpoints", type=int, help="milliseconds")
        parser.add_argument("--max_bundle_time_mills", type=int, help="milliseconds after which a bundle ends")
        parser.add_argument("--number_of_execution_retries", type=int, help="restarts in a job's life; -1: as the cluster's")
        parser.add_argument("--execution_retry_delay", type=int, help="milliseconds before a restart; -1: as the cluster's")
        parser.add_argument("--externalized_checkpoints_enabled", action="store_true", default=None)
        parser.add_argument("--retain_externalized_checkpoints_on_cancellation", action="store_true", default=None)
        parser.add_argument(
            "--savepoint_path", "--resume", metavar="PATH", help="savepoint or checkpoint from which a stream goes on"
        )


def say_what_is_fetched(options: Any) -> None:
    """Says of a job without a job server that Beam fetches one, which takes its time, and half a minute to fail offline.

    Args:
      options: Beam's options.
    """
    jar = None if options.view_as(PortableOptions).job_endpoint else FlinkJarJobServer(options).path_to_jar()
    if jar and not os.path.exists(jar) and not os.path.exists(os.path.join(JavaJarServer.JAR_CACHE, os.path.basename(jar))):
        print(
            f"FlinkRunner without --job_endpoint: Beam fetches {os.path.basename(jar)} first, some hundred megabytes; for a job "
            "server that is there give --job_endpoint <host>:<port> or --flink_job_server_jar PATH",
            file=sys.stderr,
            flush=True,
        )


def check_stream(options: Any) -> None:
    """Makes sure that a stream has checkpoints, one at a time: by them messages are acknowledged.

    Args:
      options: Beam's options; what every stream wants is set in them.

    Raises:
      ConfigError: It has none.
    """
    given = options.view_as(FlinkStreamOptions)
    if options.view_as(FlinkRunnerOptions).flink_master.startswith("["):
        raise ConfigError(
            "expected --flink_master <host>:<port> of Flink's REST API, by which a stream is stopped with a savepoint"
        )
    if not given.checkpointing_interval or given.checkpointing_interval < 0:
        raise ConfigError(
            "expected --checkpointing_interval with milliseconds, e.g. 10000: a stream on Flink acknowledges messages by its "
            "checkpoints"
        )
    if (given.num_concurrent_checkpoints or 1) != 1:
        raise ConfigError(
            "num_concurrent_checkpoints: expected 1, since a checkpoint must hold all that the one before it has finalized"
        )
    given.finish_bundle_before_checkpointing = True  # else checkpoints wait for bundles that wait for messages
    for name, value in _STREAM_DEFAULTS.items():
        if getattr(given, name) is None:
            setattr(given, name, value)
