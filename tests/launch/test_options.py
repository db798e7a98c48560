"""What a runner cannot do or lacks, as a user meets it, and what of a command line reaches Beam."""

import socket

import pytest

from pipeline.config import load_config
from pipeline.errors import ConfigError
from pipeline.launch import options
from tests.launch.jobs import write_images

TOPIC = "projects/p-of-test/topics/t01"
STREAM = ("--config=configs/streaming_pubsub_direct.yaml", "--input=projects/p-of-test/subscriptions/s01", f"--output={TOPIC}")
JOB_SERVER = "--job_endpoint=<where one listens>"
ON_FLINK = ("--runner=FlinkRunner", JOB_SERVER)
STREAM_ON_FLINK = (*STREAM, *ON_FLINK, "--flink_master=localhost:1")
PROCESSES = (*ON_FLINK, "--environment_type=PROCESS")
REFUSED = {
    "Flink without a job server": (["--runner=FlinkRunner"], "FlinkRunner: expected --job_endpoint or --flink_job_server_jar\n"),
    "Spark without a job server": (["--runner=SparkRunner"], "runner SparkRunner: expected --job_endpoint\n"),
    "no address of a job server": (
        ["--runner=SparkRunner", "--job_endpoint=localhost"],
        "job_endpoint localhost: expected <host>",
    ),
    "Dataflow without a project": (["--runner=DataflowRunner", "--region=europe-west1"], "expected --project and --temp"),
    "no runner": (["--runner=Spark"], "expected DirectRunner, PrismRunner, FlinkRunner, PortableRunner, SparkRunner or Dataflow"),
    "no Prism": (["--runner=PrismRunner", "--prism_location=/nowhere/prism"], "/nowhere/prism: there is no such file"),
    # workers that are processes used to find no image, or to write where nobody looked
    "a relative input": ([*PROCESSES, "--input=photos/"], "input: expected gs:// or an absolute path, since workers begin in"),
    "a relative output": ([*PROCESSES, "--output=out/"], "output: expected gs:// or an absolute path, since workers begin in"),
    "workers that are not started": (["--direct_num_workers=4"], "direct_num_workers 4: expected --direct_running_mode multi"),
    "a job server beside Prism": (
        ["--runner=PrismRunner", JOB_SERVER],
        "job_endpoint: expected --runner FlinkRunner or Portable",
    ),
    "Flink's flag elsewhere": (["--flink_master=h:1"], "flink_master: expected --runner FlinkRunner or PortableRunner; DirectR"),
    "processes of another runner": (
        ["--runner=SparkRunner", JOB_SERVER, "--direct_running_mode=multi_processing"],
        "--direct_running_mode: expected --runner DirectRunner; SparkRunner does not use it",
    ),
    "an option that Beam refuses": (["--pickle_library=dill"], "pickle_library=dill"),
    "a stream in two processes": ([*STREAM, "--direct_running_mode=multi_processing"], "DirectRunner runs in one process; leave"),
    "a stream on Spark": ([*STREAM, "--runner=SparkRunner"], "runner SparkRunner: Spark has no bundle finalization"),
    "answers on Flink": ([*STREAM, "--runner=FlinkRunner", f"--answer-topic={TOPIC}"], "need DirectRunner or PrismRunner"),
    "Flink without REST": ([*STREAM, *ON_FLINK], "expected --flink_master <host>:<port> of Flink's REST API, by which a stream"),
    "Flink without checkpoints": ([*STREAM_ON_FLINK], "expected --checkpointing_interval with milliseconds, e.g. 10000: a"),
    "checkpoints switched off": ([*STREAM_ON_FLINK, "--checkpointing_interval=-1"], "expected --checkpointing_interval with"),
    "two checkpoints at a time": (
        [*STREAM_ON_FLINK, "--checkpointing_interval=9", "--num_concurrent_checkpoints=2"],
        "num_concurrent_checkpoints: expected 1, since",
    ),
}


@pytest.mark.parametrize(("flags", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_runner_cannot_do_or_lacks_is_one_line_and_exit_code_2(flags, message, error_of, arguments, tmp_path):
    """Before anything else: the results folder stays as it was."""
    write_images(tmp_path / "in", "a.png")
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"--job_endpoint=127.0.0.1:{server.getsockname()[1]}"
        flags = [endpoint if flag == JOB_SERVER else flag for flag in flags]
        assert message in error_of(*(arguments if STREAM[0] not in flags else ()), *flags)
    assert not [*(tmp_path / "out").glob("*")]


@pytest.mark.parametrize(
    "given",
    [{"use_public_ips": False}, {"use_public_ips": True}, {"hdfs_full_urls": False}, {"pipeline_type_check": False}],
    ids=str,
)
def test_what_a_config_switches_on_or_off_reaches_beam(given):
    found = options.beam_options(load_config([], {"input": ["a"], "beam_options": given}), [])
    assert given.items() <= found.get_all_options().items()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"runner": "FlinkRunner"}, "beam_options.runner: expected runner as a key of its own"),
        ({"enable_streaming_engine": False}, "--enable_streaming_engine: ignored explicit argument 'false'"),
        ({"use_publik_ips": False}, "unknown flag --use_publik_ips; did you mean --use_public_ips"),
    ],
    ids=str,
)
def test_what_beam_would_not_notice_in_a_config_is_an_error(given, expected):
    with pytest.raises(ConfigError, match=expected):
        options.beam_options(load_config([], {"input": ["a"], "beam_options": given}), [])
