"""A job that is killed, in whatever phase, ends by the same command with the files of one that was not: here and on storage."""

import hashlib
import json
import signal

import pytest

from tests.conftest import without_stamps, write_bright_image
from tests.forked_jobs import KILLED, Moment, run_forked
from tests.launch.jobs import images_of, rows_by_name, write_images
from tests.rows_of_files import without_age

IMAGES = 6  # and one that is none, whose dead letter is the first row
BATCH, RUN, WRITE = "pipeline.launch.batch", "pipeline.results.run", "pipeline.write.write_files"
READ, FILES, SPILL = "pipeline.read.read_images", "pipeline.storage.files", "pipeline.write.spill_rows"
OTHER_RUNS = "pipeline.results.other_runs"

BEFORE_COMMIT = Moment(f"{RUN}:write_if_unchanged", 2)  # the first one writes that the run has begun
IN_FIRST, IN_FOURTH = Moment(f"{SPILL}:footer_of"), Moment(f"{SPILL}:footer_of", 4)

# Each with what a run after it finds done: all rows that were spilled, unless they were committed. With `--resume-point-s 0` each
# row is a checkpoint of its own.
MOMENTS = [
    pytest.param([Moment(f"{BATCH}:leased")], 0, id="before the lease"),
    pytest.param([Moment(f"{BATCH}:_run_to_end")], 0, id="with the lease"),
    pytest.param([Moment(f"{RUN}:Run.begin", when="after")], 0, id="introduced"),
    pytest.param([Moment(f"{READ}:_ListImages.process")], 0, id="while images are listed"),
    pytest.param([Moment(f"{READ}:_DropDoubles.process", 2)], 0, id="while the listing is joined"),
    pytest.param([IN_FIRST], 0, id="in the first checkpoint"),
    pytest.param([Moment(f"{SPILL}:TaggedOutput")], 1, id="after the first checkpoint"),
    pytest.param([IN_FOURTH], 3, id="in a checkpoint"),
    pytest.param([Moment("pipeline.storage.spill_files:SpillWriter.add", 6)], 5, id="between two checkpoints"),
    pytest.param([Moment(f"{WRITE}:WriteFiles._finish", 2)], 7, id="while files are merged"),
    pytest.param([Moment(f"{RUN}:Run.commit")], 7, id="before it commits"),
    pytest.param([BEFORE_COMMIT], 7, id="before its commit is written"),
    pytest.param([Moment(f"{RUN}:write_if_unchanged", 2, "after")], 0, id="before the first file has its name"),
    pytest.param([Moment(f"{FILES}:_rename", 1, "amid", "detections-")], 0, id="between two files"),
    pytest.param([Moment(f"{FILES}:_rename", 1, "after", "detections-")], 0, id="between rows and indexes"),
    pytest.param([Moment(f"{RUN}:write_if_unchanged", 3)], 0, id="when all files have their names"),
    pytest.param([Moment(f"{BATCH}:read_written")], 0, id="between commit and summary"),
    pytest.param([Moment("pipeline.launch.finalize:write_file", having="summary.json")], 0, id="between report and summary"),
    pytest.param([Moment(f"{BATCH}:clean_up")], 0, id="before the staging folder goes"),
    pytest.param([Moment(f"{RUN}:delete_files", 1, "after", ".staging-")], 0, id="while the staging folder goes"),
    pytest.param([Moment(f"{BATCH}:clean_up", when="after")], 0, id="before the lease is given up"),
    pytest.param([IN_FOURTH, Moment(f"{OTHER_RUNS}:take_over")], 3, id="before checkpoints are taken over"),
    pytest.param([IN_FOURTH, Moment(f"{OTHER_RUNS}:take_over", when="after")], 3, id="before the folder they were in goes"),
    pytest.param([IN_FOURTH, Moment(f"{RUN}:delete_files", 1, "after")], 3, id="while that goes"),
    pytest.param([IN_FOURTH, Moment(f"{SPILL}:footer_of", 3), IN_FIRST], 5, id="three times"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("in")
    for n in range(IMAGES):
        write_bright_image(folder / f"{n}.png", (64, 48), (10, 10 + n, 30, 30))
    (folder / "broken.png").touch()
    return folder


@pytest.fixture(params=["local", "storage"])
def place(request, tmp_path):
    """A results folder, and what reads it: names with a hash of their content."""
    if request.param == "local":
        return f"{tmp_path}/out", lambda: {
            str(path.relative_to(tmp_path / "out")): path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()
        }
    bucket = request.getfixturevalue("gcs_bucket")
    return f"gs://{bucket.name}/out", lambda: {
        blob.name.removeprefix("out/"): blob.download_as_bytes() for blob in bucket.list_blobs()
    }


def without_times(files):
    return {
        name: hashlib.sha256(without_age(name, content)).hexdigest()
        for name, content in files.items()
        if name.split("/")[-1] not in ("summary.json", "report.html")
    }


@pytest.fixture(scope="module")
def arguments(folder, bright_model):
    return ["--input", folder, "--model", bright_model, "--shards", 2, "--resume-point-s", 0, "--batch-sizes", 1]


@pytest.fixture(scope="module")
def undisturbed(arguments, tmp_path_factory):
    """The files of the job that nobody disturbed."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    assert run_forked([*arguments, "--output", out], out.parent / "log") == 0, (out.parent / "log").read_text()
    files = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    return without_times(files)


@pytest.mark.parametrize(("moments", "done"), MOMENTS)
def test_a_job_killed_at_any_moment_ends_with_the_files_of_one_that_was_not(
    moments, done, place, arguments, undisturbed, tmp_path
):
    """The same command goes on from the rows that were in checkpoints, and counts them."""
    output, read = place
    command = [*arguments, "--output", output]
    for number, moment in enumerate(moments):
        log = tmp_path / f"log{number}"
        assert run_forked(command, log, moment) == KILLED, log.read_text()

    assert run_forked(command, tmp_path / "log") == 0, (tmp_path / "log").read_text()

    found = read()
    assert without_times(found) == undisturbed
    assert {"summary.json", "report.html"} < found.keys()
    assert json.loads(found["summary.json"])["images"] == {"read": IMAGES + 1, "detected": IMAGES, "dead": 1, "skipped": 0}
    summary = json.loads(found["summary.json"])
    assert summary["resumed"] == done
    assert sum(summary["confidences"]["all"]) == summary["detections"] > 0
    said = (tmp_path / "log").read_text()
    assert [line for line in said.splitlines() if "that was cut short" in line] == (
        [f"  {done} of them were done by a run of this command that was cut short"] if done else []
    )


def test_a_job_that_is_stopped_says_what_is_done_and_goes_on_from_there(place, arguments, undisturbed, tmp_path):
    """Machines that are taken back send SIGTERM first, and who presses Ctrl-C may come back."""
    output, read = place
    command, log = [*arguments, "--output", output], tmp_path / "log"
    assert run_forked(command, log, IN_FOURTH._replace(sent=signal.SIGTERM)) == 130, log.read_text()
    done, stopped = without_stamps(log.read_text()).splitlines()[-2:]
    assert stopped == "stopped; nothing was committed"
    kept = int(done.removesuffix(" images are done; the same command goes on from there"))
    assert kept >= 3

    assert run_forked(command, log) == 0, log.read_text()
    found = read()
    assert without_times(found) == undisturbed
    assert kept <= json.loads(found["summary.json"])["resumed"] <= IMAGES + 1  # what is in hand may come to its end meanwhile


def test_a_job_that_fails_goes_on_from_what_it_had_done(place, arguments, undisturbed, tmp_path):
    """Such as with a full disk, once there is room again."""
    output, read = place
    command, log = [*arguments, "--output", output], tmp_path / "log"
    assert run_forked(command, log, IN_FOURTH._replace(when="full")) == 1, log.read_text()
    done, failed = without_stamps(log.read_text()).splitlines()[-2:]
    assert done == "3 images are done; the same command goes on from there"
    assert failed.startswith("error: the job failed: OSError: [Errno 28] No space left on device")
    assert run_forked(command, log) == 0, log.read_text()
    assert without_times(read()) == undisturbed


def test_killed_while_checkpoints_are_copied_the_whole_ones_count(gcs_bucket, arguments, undisturbed, tmp_path):
    """Of what is there twice then, one is taken."""
    command = [*arguments, "--output", f"gs://{gcs_bucket.name}/out"]
    for moment in (IN_FOURTH, Moment("pipeline.results.resume_points:FileSystems.copy", 1, "amid")):
        assert run_forked(command, tmp_path / "log", moment) == KILLED, (tmp_path / "log").read_text()
    copies = [blob.name for blob in gcs_bucket.list_blobs() if "/resumed-" in blob.name]
    assert len(copies) == 2

    assert run_forked(command, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert "3 of them were done by a run of this command that was cut short" in (tmp_path / "log").read_text()
    files = {blob.name.removeprefix("out/"): blob.download_as_bytes() for blob in gcs_bucket.list_blobs()}
    assert without_times(files) == undisturbed


def test_a_checkpoint_is_one_object_however_many_rows_and_files_it_is_for(gcs_bucket, arguments, tmp_path):
    """On Cloud Storage each object costs a request."""
    command = [*arguments, "--resume-point-s", 3600, "--output", f"gs://{gcs_bucket.name}/out"]
    assert run_forked(command, tmp_path / "log", Moment(f"{WRITE}:WriteFiles._finish")) == KILLED
    spilled = [blob.name for blob in gcs_bucket.list_blobs() if "/spill/" in blob.name]
    assert len(spilled) == 2  # of detections, and of dead letters


def test_a_job_that_adds_goes_on_too_and_another_command_does_not(bright_model, tmp_path):
    """With `--only-new`."""
    write_images(tmp_path / "in", "a.png", "b.png", "c.png")
    out, log = tmp_path / "out", tmp_path / "log"
    arguments = ["--output", out, "--model", bright_model, "--resume-point-s", 0, "--input"]
    assert run_forked([*arguments, tmp_path / "in" / "a.png"], log) == 0
    adds = [*arguments, tmp_path / "in", "--only-new"]
    assert run_forked(adds, log, BEFORE_COMMIT) == KILLED
    assert run_forked(adds, log) == 0
    assert "  2 of them were done by a run of this command that was cut short\n" in log.read_text()
    assert rows_by_name(out) == ["a.png", "b.png", "c.png"]
    assert images_of(out) == {"read": 3, "detected": 2, "dead": 0, "skipped": 1}
    assert json.loads((out / "summary.json").read_text())["done_before"] == 1


def test_what_a_killed_job_had_begun_to_commit_is_done_for_the_next_one_that_adds(place, arguments, tmp_path):
    """It gets its names first, also on storage, where the killed one is known to be dead by its lease."""
    output, read = place
    command, log = [*arguments, "--output", output, "--only-new"], tmp_path / "log"
    assert run_forked(command, log, Moment(f"{FILES}:_rename", 1, "amid", "detections-")) == KILLED
    assert run_forked(command, log) == 0, log.read_text()
    assert json.loads(read()["summary.json"])["images"] == {"read": IMAGES + 1, "detected": 0, "dead": 0, "skipped": IMAGES + 1}
    rows = [line for name, content in read().items() if name.endswith(".jsonl") for line in content.splitlines()]
    assert len(rows) == len(set(rows)) == IMAGES + 1
    assert not [name for name in read() if name.startswith(".")]


def test_what_another_command_does_in_the_same_folder_costs_a_killed_one_nothing(place, folder, bright_model, tmp_path):
    """The killed job still goes on from its checkpoints."""
    output, read = place
    write_images(tmp_path / "other", "other.png")
    log = tmp_path / "log"
    arguments = ["--output", output, "--model", bright_model, "--batch-sizes", 1, "--resume-point-s", 0, "--only-new", "--input"]
    assert run_forked([*arguments, folder], log, IN_FOURTH) == KILLED
    assert run_forked([*arguments, tmp_path / "other"], log) == 0, log.read_text()
    assert "cut short" not in log.read_text()
    assert run_forked([*arguments, folder], log) == 0, log.read_text()
    assert "  3 of them were done by a run of this command that was cut short\n" in log.read_text()
    assert json.loads(read()["summary.json"])["images"] == {"read": IMAGES + 1, "detected": IMAGES, "dead": 1, "skipped": 0}
    assert not [name for name in read() if name.startswith(".")]


def test_what_another_command_has_done_since_is_not_taken_from_resume_points(place, folder, bright_model, tmp_path):
    """Each image has one row; what was counted of those that were done twice is not counted."""
    output, read = place
    log = tmp_path / "log"
    arguments = ["--output", output, "--model", bright_model, "--batch-sizes", 1, "--resume-point-s", 0, "--only-new", "--input"]
    assert run_forked([*arguments, folder], log, BEFORE_COMMIT) == KILLED
    assert run_forked([*arguments, f"{folder}/[0-3].png"], log) == 0, log.read_text()
    assert run_forked([*arguments, folder], log) == 0, log.read_text()
    assert f"  {IMAGES + 1 - 4} of them were done by a run of this command that was cut short\n" in log.read_text()
    assert json.loads(read()["summary.json"])["images"] == {"read": IMAGES + 1, "detected": IMAGES - 4, "dead": 1, "skipped": 4}
    rows = [line for name, content in read().items() if name.endswith(".jsonl") for line in content.splitlines()]
    assert len(rows) == len(set(rows)) == IMAGES + 1
