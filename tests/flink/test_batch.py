"""A batch job on a Flink cluster, one of whose machines dies midway: the rows are those of a run on one machine."""

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline.codec import unpack
from pipeline.records import row_bytes
from pipeline.results.current import current_rows
from pipeline.stats.job_stats import JobStats
from tests.conftest import REPO, without_stamps
from tests.detect.versioned_models import DIES_AFTER, TOY, write_version
from tests.flink.cluster import TASKMANAGER_NAMES, FlinkCluster, job_flags
from tests.launch.jobs import rows_by_name, rows_written, write_images
from tests.launch.test_sick_device import NAMES, SAID
from tests.processes import running, wait_until
from tests.shard_rows import rows_in

IMAGES = 2400
_OF_PREFIX = 800
SCENES = sorted((REPO / "models" / "digits" / "samples").glob("scene_*.jpg"))


def command_on(flink: FlinkCluster, *flags: object, **environment: str) -> list[object]:
    """The command of a batch job on a cluster, whose workers have these variables."""
    config = "configs/batch_gcs_flink.yaml"
    return [sys.executable, "-m", "pipeline.run", "--config", config, *job_flags(flink, **environment), *flags]


def job_in(folder: Path, flink: FlinkCluster) -> list[object]:
    """The command of a job over `in` in a folder, which it makes, into `there`."""
    (folder / "in").mkdir()
    for number in range(IMAGES):
        os.link(SCENES[number % len(SCENES)], folder / "in" / f"{number:04d}.jpg")
    places = [f"--input={folder}/in", f"--output={folder}/there"]
    return command_on(flink, *places, "--model=digits", "--parallelism=4", "--shard-seconds=1")


def current(output: Path) -> list[dict]:
    return sorted(current_rows(str(output)), key=row_bytes)


def test_a_batch_job_that_loses_a_machine_gives_the_rows_of_a_run_on_one(flink: FlinkCluster, tmp_path, run_job):
    """Rows are readable while it works, figures show, and at the end they are what the rows say; nothing unfinished is left."""
    command, here, there, printed = job_in(tmp_path, flink), tmp_path / "here", tmp_path / "there", tmp_path / "printed"
    code, _, error = run_job("--input", tmp_path / "in", "--output", here)
    assert code == 0, error
    with printed.open("wb") as log, running(command, cwd=REPO, stdout=log, stderr=log) as job:
        wait_until(lambda: rows_written(there) >= IMAGES / 3, printed.read_text, job)
        reports = [path.read_bytes() for path in there.glob(".staging-*/figures/*[!w]")]  # not `.new`
        flink.kill("taskmanager0")
        killed_at = time.time()
        assert job.poll() is None
        flink.start_taskmanagers("taskmanager0")
        assert job.wait(timeout=200) == 0, printed.read_text()
    assert current(there) == current(here) and len(current(there)) == IMAGES
    unfinished = [path for path in there.glob("*/.*") if path.stat().st_mtime > killed_at]
    assert not list(there.glob(".*")) and not unfinished, "but for what the machine was writing, which goes after a day"
    # each machine feeds one process, and so one model, from both of its slots; those that list come and go before
    assert 1 <= sum(unpack(JobStats, report).detected > 0 for report in reports) <= len(TASKMANAGER_NAMES)
    progress = re.compile(r"^ *\d+ s  (\d+) of \d+ images?, [\d.]+ images/s, 0 failed$", re.MULTILINE)
    shown = [int(done) for done in progress.findall(without_stamps(printed.read_text()))]
    assert any(0 < count < IMAGES for count in shown), printed.read_text()
    summary = json.loads((there / "summary.json").read_text())
    images = summary["images"]  # an attempt after the loss finds rows of the first one done
    assert images == {"read": IMAGES, "detected": IMAGES - images["skipped"], "dead": 0, "skipped": images["skipped"]}
    assert all(summary[f"{part}_seconds"] > 0 for part in ("startup", "submission", "wall"))


def test_the_command_of_a_job_that_was_killed_with_a_machine_and_its_launcher_does_only_the_rest(flink: FlinkCluster, tmp_path):
    """What it had detected was readable before, and stays."""
    command, there, printed = job_in(tmp_path, flink), tmp_path / "there", tmp_path / "printed"
    with printed.open("wb") as log, running(command, cwd=REPO, stdout=log, stderr=log) as job:
        wait_until(lambda: rows_written(there) >= IMAGES / 3, printed.read_text, job)
        flink.kill("taskmanager0")
        job.kill()
        job.wait()
    (jid,) = (each["jid"] for each in flink.ask("/jobs/overview")["jobs"] if each["end-time"] == -1)
    flink.cancel(jid)  # it would go on without its launcher
    flink.start_taskmanagers("taskmanager0")
    flink.wait_for_taskmanagers()
    done = current(there)
    assert IMAGES / 3 <= len(done) < IMAGES
    with printed.open("wb") as log, running(command, cwd=REPO, stdout=log, stderr=log) as job:
        assert job.wait(timeout=300) == 0, printed.read_text()
    images = json.loads((there / "summary.json").read_text())["images"]
    assert images == {"read": IMAGES, "detected": IMAGES - len(done), "dead": 0, "skipped": len(done)}
    rows = current(there)
    assert len(rows) == IMAGES and all(row in rows for row in done)


def test_the_names_of_one_flat_prefix_are_spread_over_both_machines(flink: FlinkCluster, tmp_path, strict_gcs_bucket):
    """One worker lists them; both detect, though no folder divides the names."""
    bucket, there, printed = strict_gcs_bucket, tmp_path / "there", tmp_path / "printed"

    def upload(number: int) -> None:
        bucket.blob(f"in/{number:04d}.jpg").upload_from_filename(str(SCENES[number % len(SCENES)]))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(upload, range(_OF_PREFIX)))
    flags = [f"--input=gs://{bucket.name}/in/", f"--output={there}", "--model=digits", "--parallelism=4", "--shard-seconds=1"]
    command = command_on(flink, *flags, STORAGE_EMULATOR_HOST=os.environ["STORAGE_EMULATOR_HOST"])
    with printed.open("wb") as log, running(command, cwd=REPO, stdout=log, stderr=log) as job:
        assert job.wait(timeout=300) == 0, printed.read_text()
    assert len(current(there)) == _OF_PREFIX
    jid = max(flink.ask("/jobs/overview")["jobs"], key=lambda each: each["start-time"])["jid"]
    groups = {}  # of names that each machine took, by the job's vertices
    for vertex in flink.ask(f"/jobs/{jid}")["vertices"]:
        machines = flink.ask(f"/jobs/{jid}/vertices/{vertex['id']}/taskmanagers")["taskmanagers"]
        groups[vertex["name"]] = [each["metrics"]["read-records"] for each in machines]
    detecting = [taken for name, taken in groups.items() if "OpenContainers" in name or "DetectObjects" in name]
    assert any(len(taken) == len(TASKMANAGER_NAMES) and min(taken) > 1 for taken in detecting), groups


def test_a_device_that_dies_on_a_machine_ends_the_command_with_its_exit_code_and_blames_no_image(flink: FlinkCluster, tmp_path):
    """The launcher ends the job, which Flink would restart on the same device."""
    write_images(tmp_path / "in", *NAMES)
    write_version(tmp_path / "detector", 7)
    flags = [f"--model={tmp_path}/detector", f"--engine={TOY}", f"--input={tmp_path}/in", f"--output={tmp_path}/there"]
    sick, sound = (command_on(flink, *flags, "--parallelism=2", **more) for more in ({DIES_AFTER: "60"}, {}))
    done = subprocess.run(sick, cwd=REPO, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 5 and SAID in done.stderr, done.stderr
    assert rows_in(str(tmp_path / "there"), "dead_letters") == []
    done = subprocess.run(sound, cwd=REPO, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0 and rows_by_name(tmp_path / "there") == NAMES, done.stderr
