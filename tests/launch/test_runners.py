"""One table says what a runner can do: each row as a user meets it, and nothing else that knows a runner by its name."""

import os
import platform
import shutil
import socket
import zipfile

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.prism_runner import PrismJobServer

from pipeline import run
from pipeline.config import load_config
from pipeline.errors import ConfigError
from pipeline.launch import options
from pipeline.launch.prism import prism_binary
from pipeline.launch.runners import RUNNERS, runner_named
from tests.conftest import write_bright_image

STREAM = ("--config", "configs/streaming_pubsub_direct.yaml", "--input", "projects/p-of-test/subscriptions/s01")
DATAFLOW = ("--region=europe-west1", "--project=p-of-test", "--temp_location=gs://bucket/tmp")
NAMES = [runner.name for runner in RUNNERS]


@pytest.fixture
def error_of(capfd):
    """Runs a command that must fail on its words; returns its one line."""

    def run_it(*flags: object) -> str:
        assert run.main([*map(str, flags)]) == 2
        out, err = capfd.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1
        return err

    return run_it


@pytest.mark.parametrize(
    ("runner", "flags", "message"),
    [
        ("FlinkRunner", (), "runner FlinkRunner: expected --job_endpoint or --flink_job_server_jar\n"),
        ("SparkRunner", (), "runner SparkRunner: expected --job_endpoint\n"),
        ("SparkRunner", ("--job_endpoint=localhost:1",), "job_endpoint localhost:1: expected <host>:<port> where a job server"),
        ("DataflowRunner", DATAFLOW[:1], "runner DataflowRunner: expected --project and --temp_location or --staging_location\n"),
        (
            "Spark",
            (),
            "runner Spark: expected DirectRunner, PrismRunner, FlinkRunner, PortableRunner, SparkRunner or DataflowRunner",
        ),
        ("PrismRunner", ("--prism_location=/nowhere/prism",), "--prism_location /nowhere/prism: there is no such file"),
    ],
)
def test_a_runner_that_cannot_start_is_one_line_and_exit_code_2(runner, flags, message, error_of, tmp_path):
    write_bright_image(tmp_path / "a.png", (64, 48), (10, 10, 30, 30))
    assert message in error_of("--input", tmp_path / "a.png", "--output", tmp_path / "out", "--runner", runner, *flags)


@pytest.fixture
def listening():
    """The address of something that listens, as a job server does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ({"use_public_ips": False}, ["--no_use_public_ips"]),
        ({"use_public_ips": True}, ["--use_public_ips"]),
        ({"hdfs_full_urls": False}, []),
        ({"pipeline_type_check": False}, ["--no_pipeline_type_check"]),
    ],
    ids=str,
)
def test_what_a_config_switches_on_or_off_reaches_beam(given, flags):
    found = options.beam_options(load_config([], {"input": ["a"], "beam_options": given}), [])
    assert found._flags[1:] == flags
    assert found.get_all_options()[next(iter(given))] is next(iter(given.values()))


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


def test_prism_is_that_of_beams_release(tmp_path, monkeypatch):
    """Neither the oldest one in Beam's cache nor what lies in the current folder."""
    for name in (f"v{beam.__version__}", "v2.70.0", "v99.0.0"):
        url = PrismJobServer(PipelineOptions([])).construct_download_url(name, platform.system(), platform.machine())
        archive = tmp_path / "cache" / os.path.basename(url)
        binary = archive.with_suffix("")
        binary.parent.mkdir(exist_ok=True)
        binary.write_text("#!/bin/sh\n")
        binary.chmod(0o755)
        with zipfile.ZipFile(archive, "w") as file:
            file.write(binary, binary.name)
    (tmp_path / ".tools").mkdir()
    shutil.copy(binary, tmp_path / ".tools" / "prism")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(PrismJobServer, "BIN_CACHE", str(tmp_path / "cache"))
    found = prism_binary(PipelineOptions([]))
    assert os.path.dirname(found) == str(tmp_path / "cache")
    assert os.path.basename(found).startswith(f"apache_beam-v{beam.__version__}-prism-")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), "expected --flink_master <host>:<port> of Flink's REST API, by which a stream is stopped"),
        (("--parallelism=2",), "expected --checkpointing_interval with milliseconds, e.g. 10000: a stream on Flink acknowl"),
        (("--checkpointing_interval=-1",), "expected --checkpointing_interval with milliseconds"),
        (("--checkpointing_interval=9", "--num_concurrent_checkpoints=2"), "num_concurrent_checkpoints: expected 1, since"),
    ],
    ids=["no REST", "no checkpoints", "none either", "two at a time"],
)
def test_a_stream_on_flink_needs_checkpoints_one_at_a_time(flags, expected, listening, error_of):
    endpoint, flags = f"--job_endpoint={listening}", (*flags, *(["--flink_master=localhost:1"] if flags else []))
    output = ("--output", "projects/p-of-test/topics/t01")
    assert expected in error_of(*STREAM, *output, "--runner", "FlinkRunner", endpoint, *flags)


def test_a_stream_on_flink_keeps_its_checkpoints_and_restarts_without_limit():
    """Whatever the cluster's configuration says."""
    from apache_beam.options.pipeline_options import PipelineOptions

    given = PipelineOptions(["--flink_master=localhost:1", "--checkpointing_interval=9", "--execution_retry_delay=5"])
    runner_named("FlinkRunner").check_stream(given)
    sent = given.get_all_options()
    assert (sent["number_of_execution_retries"], sent["execution_retry_delay"]) == (2**31 - 1, 5), "the user's delay"
    assert sent["externalized_checkpoints_enabled"] and sent["retain_externalized_checkpoints_on_cancellation"]


@pytest.mark.parametrize(
    ("runner", "flags", "expected"),
    [
        ("DirectRunner", ("--direct_running_mode=multi_processing",), "a stream on DirectRunner runs in one process; leave the"),
        ("SparkRunner", (), "runner SparkRunner: Spark has no bundle finalization"),
        ("FlinkRunner", ("--answer-topic", "projects/p-of-test/topics/t01"), "by request need DirectRunner or PrismRunner"),
        ("DataflowRunner", ("--answer-topic", "projects/p-of-test/topics/t01"), "by request need DirectRunner or PrismRunner"),
    ],
)
def test_what_a_runner_cannot_do_in_a_stream_is_said_before_anything_else(runner, flags, expected, error_of):
    assert expected in error_of(*STREAM, "--output", "projects/p-of-test/topics/t01", "--runner", runner, *flags)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--input", "photos/", "--output", "/out"), "input: expected gs:// or an absolute path, since workers begin in folders"),
        (
            ("--input", "/photos", "--output", "out/"),
            "output: expected gs:// or an absolute path, since workers begin in folders",
        ),
    ],
)
def test_workers_that_are_processes_elsewhere_need_whole_paths(flags, expected, listening, error_of):
    """They used to find no image, or to write where nobody looked."""
    assert expected in error_of(*flags, "--runner", "FlinkRunner", "--environment_type=PROCESS", f"--job_endpoint={listening}")


@pytest.mark.parametrize("runner", RUNNERS, ids=NAMES)
def test_beam_knows_the_runner_of_each_row(runner):
    assert type(runner.make()).__name__ == (runner.beam_name or runner.name).rpartition(".")[2]


def test_options_that_beam_refuses_are_one_line_and_exit_code_2(tmp_path, bright_model, capfd):
    write_bright_image(tmp_path / "in" / "a.png", (64, 48), (10, 10, 30, 30))
    arguments = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--model", bright_model]
    assert run.main([*arguments, "--pickle_library=dill"]) == 2
    out, err = capfd.readouterr()
    assert err.startswith("error: runner DirectRunner: ") and "pickle_library=dill" in err and err.count("\n") == 1
    assert out == "" and list((tmp_path / "out").iterdir()) == []
