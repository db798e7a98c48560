"""Jobs on Flink whose launcher dies as soon as they are submitted: they end as they would with it, and anybody can watch them."""

import contextlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from tests.conftest import REPO, without_stamps
from tests.flink.cluster import FlinkCluster, job_flags
from tests.flink.test_batch import IMAGES, current, job_in
from tests.flink.test_streaming import CONFIG, RECOVERY_SECONDS, Stream, eventually
from tests.launch.jobs import rows_written
from tests.processes import running, wait_until
from tests.streaming_job import CuttableProxy, StreamingJob

# the command line, with a line of progress every 0.2 s
VIEWER = """
import sys
from pipeline import run
from pipeline.stats import progress

progress._LINE_SECONDS = 0.2
sys.exit(run.main(sys.argv[1:]))
"""
# the command line, of a launcher that waits a second for Flink instead of a minute
IMPATIENT = """
import sys
from pipeline import run
from pipeline.runners import flink

flink._UNREACHABLE_SECONDS = 1.0
sys.exit(run.main(sys.argv[1:]))
"""
BROKEN = 3


def submitted(output: Path) -> str:
    """The run whose job Flink has; empty if it has none yet."""
    found = [path for path in output.glob("runs/*/job.json") if json.loads(path.read_text())["job"]]
    return found[0].parent.name if found else ""


def attach(run: str, *output: object) -> list[str]:
    return [sys.executable, "-c", VIEWER, "--attach", run, *map(str, output)]


def test_a_batch_job_whose_launcher_is_killed_ends_complete_and_whoever_attaches_gets_its_code(flink: FlinkCluster, tmp_path):
    """Its command is busy meanwhile, and has nothing to do afterwards."""
    command, there, printed = job_in(tmp_path, flink), tmp_path / "there", tmp_path / "printed"
    for number in range(BROKEN):
        (tmp_path / "in" / f"broken-{number}.jpg").touch()
    command += ["--max-dead-share=0"]
    with printed.open("wb") as log, running(command, cwd=REPO, stdout=log, stderr=log) as job:
        wait_until(lambda: submitted(there), printed.read_text, job)
        job.send_signal(signal.SIGKILL)
        job.wait()
    assert rows_written(there) < IMAGES
    run = submitted(there)

    first, second = (
        subprocess.Popen(attach(run, "--output", there), cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    )
    again = subprocess.run([*command, "--when-busy=stop"], cwd=REPO, capture_output=True, text=True, timeout=300, check=False)
    assert again.returncode == 3 and f"another run is processing the same (run {run}, " in again.stderr, again.stderr
    for viewer in (first, second):
        out, error = viewer.communicate(timeout=500)
        assert viewer.returncode == 4, error
        assert f"{BROKEN} of {IMAGES + BROKEN} images failed, more than max_dead_share = 0; {BROKEN} of them empty" in error
        assert f"{IMAGES} detected, {BROKEN} dead, 0 skipped" in out and out.endswith(
            "summary.json, detections/, dead_letters/\n"
        )
    progress = re.compile(r"^ *\d+ s  (\d+) of \d+ images?, ", re.MULTILINE)
    shown = [int(done) for done in progress.findall(without_stamps(error))]
    assert any(0 < count < IMAGES for count in shown), error

    assert len(current(there)) == IMAGES
    summary = json.loads((there / "summary.json").read_text())
    assert summary["run"] == run and summary["images"]["detected"] == IMAGES and summary["submission_seconds"] > 0
    assert (there / "report.html").exists() and (there / "runs" / run / "report.html").exists()
    assert not [*there.glob(".staging-*")]
    after = subprocess.run([*command, "--max-dead-share=1"], cwd=REPO, capture_output=True, text=True, timeout=300, check=False)
    assert after.returncode == 0 and "nothing is new" in after.stdout, after.stderr


def test_a_lost_network_changes_nothing_of_the_job(flink: FlinkCluster, tmp_path):
    """A launcher for which Flink is away for too long ends; one who waits gets the job's code."""
    rest, job_server = (CuttableProxy(place.removeprefix("http://")) for place in (flink.rest, flink.job_endpoint))
    through = SimpleNamespace(rest=f"http://{rest.host}", job_endpoint=job_server.host)
    (_, _, _, *arguments), there = job_in(tmp_path, through), tmp_path / "there"
    (tmp_path / "in" / "broken.jpg").touch()
    how = {"cwd": REPO, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "-c", IMPATIENT, *arguments, "--max-dead-share=0"]
    with running(command, **how) as job, contextlib.ExitStack() as stack:
        wait_until(lambda: submitted(there), lambda: "", job)
        viewer = stack.enter_context(running(attach(submitted(there), "--output", there), **how))
        shown = iter(viewer.stdout.readline, "")
        assert any(" of " in line and "images" in line for line in shown), "it watches"
        rest.cut()
        job_server.cut()
        before = rows_written(there)
        assert before < IMAGES
        said, _ = job.communicate(timeout=300)
        assert job.returncode == 1 and "Flink is out of reach" in said, said
        wait_until(lambda: rows_written(there) > before, lambda: "no more rows")
        assert viewer.poll() is None
        rest.recover()
        job_server.recover()
        rest_of_it = viewer.communicate(timeout=300)[0]
        assert viewer.returncode == 4, rest_of_it
    assert f"{IMAGES} detected, 1 dead, 0 skipped" in rest_of_it and len(current(there)) == IMAGES


def test_a_stream_whose_launcher_is_killed_keeps_its_reports_and_whoever_attaches_sees_its_end(
    flink: FlinkCluster, _pubsub_process, tmp_path, bright_model
):
    """Its reports are there without a launcher, too."""
    flags = ["--checkpointing_interval=3000", "--shard-seconds=1", "--allow-uri-prefix", tmp_path / "in"]
    flags += job_flags(flink, PUBSUB_EMULATOR_HOST=_pubsub_process.host)
    job = StreamingJob(_pubsub_process, tmp_path, bright_model, *flags, config=CONFIG, answers=False)
    with job:
        assert job.signal(signal.SIGKILL) != 0
        run = submitted(job.archive)
        jid = json.loads((job.archive / "runs" / run / "job.json").read_text())["job"]
        stream = Stream(job, tmp_path / "in")
        stream.publish(stream.new_images("first", 10), 10.0)
        stream.take()
        assert stream.lost() == set()
        own = job.archive / "runs" / run
        assert eventually((own / "summary.json").exists, RECOVERY_SECONDS) and (own / "report.html").exists()
        viewer = subprocess.Popen(
            attach(run, "--archive", job.archive), cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        stream.publish(stream.new_images("later", 200), 10.0)
        stream.take()
        flink.ask(f"/jobs/{jid}/stop", "POST", {"drain": False})
        out, error = viewer.communicate(timeout=300)
    assert viewer.returncode == 0, error
    assert re.search(r"^ *\d+ s  \d+ of \d+ images?, .*event-to-publish p50", without_stamps(error), re.MULTILINE), error
    assert re.search(r"^2\d\d images read: 2\d\d detected, 0 dead", out, re.MULTILINE), out
    summary = json.loads((job.archive / "summary.json").read_text())
    assert summary["run"] == run and (job.archive / "report.html").exists()
    assert json.loads((own / "outcome.json").read_text())["code"] == 0
