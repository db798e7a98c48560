"""A stream on Flink that is stopped under load, and goes on from its savepoint."""

import json
import re
import signal

import pytest

from tests.conftest import without_stamps, write_bright_image
from tests.flink.cluster import FlinkCluster, job_flags
from tests.flink.test_streaming import CONFIG, RECOVERY_SECONDS, Stream, archived, eventually
from tests.processes import in_thread
from tests.streaming_job import StreamingJob

IMAGES = 600
RATE = 30.0


@pytest.fixture
def stream(flink: FlinkCluster, _pubsub_process, tmp_path, bright_model):
    flags = ["--checkpointing_interval=5000", "--shard-seconds=5", "--allow-uri-prefix", tmp_path / "in"]
    flags += job_flags(flink, PUBSUB_EMULATOR_HOST=_pubsub_process.host)
    job = StreamingJob(_pubsub_process, tmp_path, bright_model, *flags, config=CONFIG, answers=False)
    yield Stream(job, tmp_path / "in")
    job.__exit__()
    for running in flink.jobs():
        flink.ask(f"/jobs/{running}", method="PATCH")


def test_a_stream_that_is_stopped_under_load_goes_on_without_loss_or_repeat(stream, flink):
    """The savepoint keeps which images have had a result; what was in hand comes again, and is known by it.

    The job server may go away meanwhile.
    """
    job, uris = stream.job, stream.new_images("first", IMAGES)
    job.start()
    assert eventually(flink.jobs, RECOVERY_SECONDS)
    (found,) = flink.jobs()
    checkpoints = flink.ask(f"/jobs/{found}/checkpoints/config")
    assert (checkpoints["interval"], checkpoints["min_pause"], checkpoints["max_concurrent"]) == (5000, 1000, 1)
    flink.kill("jobserver")
    stream.publish(uris[:1], RATE)
    stream.take()
    assert set(stream.answers) == set(uris[:1])
    flink.start_job_server()

    with in_thread(lambda: stream.publish(uris, RATE)):
        assert eventually(lambda: stream.answered() > IMAGES // 10 and " event-to-publish p50 " in job.output(), 60)
        assert job.signal(signal.SIGTERM) == 0, job.output()
        (place,) = re.findall(r"--resume (\S+)", job.output())
        assert flink.jobs() == []
        before = stream.rest()
        check_figures(job, before)
        job.start(flags=("--resume", place))
    stream.publish(stream.new_images("later", IMAGES // 10), RATE)
    assert stream.lost() == set()
    assert [uri for uri, count in stream.answers.items() if count > 1] == []
    assert eventually(lambda: archived(job) == stream.asked, 60)
    assert job.signal(signal.SIGINT) == 0, job.output()
    check_figures(job, len(stream.asked) - before)


def check_figures(job: StreamingJob, answered: int) -> None:
    """What workers have counted stands in lines, summary and report as that of a stream on one machine does.

    A worker whose task Flink ends does not report what it has counted since its last report.
    """
    summary = json.loads((job.archive / "summary.json").read_text())
    images, detected = summary["images"], summary["images"]["detected"]
    assert 0 < detected <= answered and images["dead"] == 0, job.output()
    assert images["read"] == detected + images["skipped"]
    assert set(summary["latency_ms"]) == {"p50", "p90", "p99", "max"} and summary["submission_seconds"] > 0
    progress = r"^ *\d+ s  \d+ of \d+ images?, \d+\.\d images/s, batches of .*, event-to-publish p50 \d+ ms"
    assert re.search(progress, without_stamps(job.output()), re.MULTILINE)
    assert f"{images['read']} images read: {detected} detected, 0 dead" in job.output()
    assert (job.archive / "report.html").exists()


def test_a_stream_that_went_with_its_jobmanager_goes_on_from_its_last_checkpoint(stream, flink):
    """Without high availability a JobManager that is started again knows no job; the launcher says how to go on."""
    job = stream.job
    job.start()
    stream.publish(stream.new_images("before", 10), RATE)
    stream.take()
    (lost,) = flink.jobs()
    assert eventually(lambda: flink.ask(f"/jobs/{lost}/checkpoints")["latest"]["completed"], RECOVERY_SECONDS)
    assert f"FixedDelayRestartBackoffTimeStrategy(maxNumberRestartAttempts={2**31 - 1}" in flink.log("jobmanager")
    flink.kill("jobmanager")
    flink.start_jobmanager()
    assert eventually(lambda: "error: " in job.output(), RECOVERY_SECONDS)
    assert job.wait() == 1
    # where a new JobManager is not there within a minute, Flink is out of reach
    said = rf"^error: the job failed: Flink .*; --resume <state\.checkpoints\.dir>/{lost}/chk-<latest> goes on from there$"
    assert re.search(said, job.output(), re.MULTILINE), job.output()
    flink.wait_for_taskmanagers()
    (kept,) = (flink.folder / "checkpoints" / lost).glob("chk-*/_metadata")
    job.start(flags=("--resume", f"file:{kept.parent}"))
    assert eventually(lambda: all_parts_run(flink), RECOVERY_SECONDS), job.output()
    stream.publish(stream.new_images("after", 10), RATE)
    assert stream.lost() == set(), job.output()
    assert job.signal(signal.SIGINT) == 0, job.output()


def all_parts_run(flink: FlinkCluster) -> bool:
    return any({part["status"] for part in flink.ask(f"/jobs/{job}")["vertices"]} == {"RUNNING"} for job in flink.jobs())


def test_a_stream_that_cannot_begin_is_exit_code_1_and_one_line(stream, tmp_path):
    write_bright_image(tmp_path / "in" / "a.png", (64, 48), (10, 12, 30, 36))
    stream.job.start(flags=(f"--resume={tmp_path}/none",), until="error: ")
    assert stream.job.wait() == 1
    (line,) = [line for line in stream.job.output().splitlines() if line.startswith("error: ")]
    assert line.startswith("error: the job failed: ") and "none" in line
