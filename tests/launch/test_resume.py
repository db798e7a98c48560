"""A job that is killed, in whatever phase, ends by the same command with the rows of one that was not: here and on storage."""

import pytest

from pipeline.results.reader import list_shards
from pipeline.storage.files import delete_files
from pipeline.storage.listing import files_of
from tests.conftest import write_bright_image
from tests.forked_jobs import KILLED, Moment, run_forked
from tests.shard_rows import rows_in

IMAGES = 6  # and one that is none, whose dead letter is the first row
BATCH, WRITE, SHARDS = "pipeline.launch.batch", "pipeline.outcome.write_shards", "pipeline.results.shards"
READ, CONCLUDE = "pipeline.listing.read_images", "pipeline.outcome.conclude"

# Each with what a run after it finds done. With `--shard-seconds 0` each row is a shard of its own.
MOMENTS = {
    "before the lock": (f"{BATCH}:locked", 1, "before", 0),
    "with the lock": (f"{BATCH}:_run_to_end", 1, "before", 0),
    "while images are listed": (f"{READ}:_ListImages._found", 1, "before", 0),
    "when the first listed names go on": (f"{READ}:_OpenContainers.process", 1, "before", 0),
    "before the first shard is written": (f"{WRITE}:add_rows", 1, "before", 0),
    # of the calls one is of the run's file
    "when a shard is written and has no name yet": ("pipeline.storage.files:move_files", 4, "before", 2),
    "when the shard has its name": (f"{WRITE}:add_rows", 3, "after", 3),
    "when all rows are there": (f"{CONCLUDE}:summarise", 1, "before", 7),
    "between report and summary": (f"{CONCLUDE}:write_file", 2, "before", 7),
    "before the folder of unfinished files goes": ("pipeline.results.run_folder:Run.remove", 1, "before", 7),
    "before abandoned files go": (f"{CONCLUDE}:clean_up", 1, "before", 7),
}
MAIN = (
    "before the first shard is written",
    "when a shard is written and has no name yet",
    "when the shard has its name",
    "when all rows are there",
)
ON_STORAGE = (MAIN[0], *MAIN[2:])


@pytest.fixture(scope="module")
def arguments(tmp_path_factory, bright_model):
    folder = tmp_path_factory.mktemp("in")
    for n in range(IMAGES):
        write_bright_image(folder / f"{n}.png", (64, 48), (10, 10 + n, 30, 30))
    (folder / "broken.png").touch()
    return ["--input", folder, "--model", bright_model, "--shard-seconds", 0, "--batch-sizes", 1]


@pytest.fixture(scope="module")
def undisturbed(arguments, tmp_path_factory):
    """The rows of the job that nobody disturbed."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    assert run_forked([*arguments, "--output", out], out.parent / "log") == 0, (out.parent / "log").read_text()
    return [rows_in(str(out), kind) for kind in ("detections", "dead_letters")]


def ends_with_the_rows_of_one_that_was_not(moments, output, arguments, undisturbed, tmp_path, killed=lambda: None):
    """Runs a job that dies at each of these moments, then one that does not; `killed` is called after each death."""
    command, done = [*arguments, "--output", output], 0
    for number, (place, call, when, done_then) in enumerate(moments):
        log = tmp_path / f"log{number}"
        assert run_forked(command, log, Moment(place, call, when)) == KILLED, log.read_text()
        killed()
        done = min(done + done_then, IMAGES + 1)
        rows = [row for kind in ("detections", "dead_letters") for row in rows_in(output, kind)]
        assert len(rows) == done, "each row that has its name is whole, and no other is seen"

    assert run_forked(command, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert [rows_in(output, kind) for kind in ("detections", "dead_letters")] == undisturbed
    said = (tmp_path / "log").read_text()
    expected = f"{IMAGES + 1} images read" if not done else f"{done} skipped ({done} of them done before)"
    assert expected in said, said


@pytest.mark.parametrize("name", [name if name in MAIN else pytest.param(name, marks=pytest.mark.matrix) for name in MOMENTS])
def test_a_job_killed_at_any_moment_ends_with_the_rows_of_one_that_was_not(name, arguments, undisturbed, tmp_path):
    """The same command, run again, adds what lacks a row; no row is lost, none is there twice."""
    ends_with_the_rows_of_one_that_was_not([MOMENTS[name]], f"{tmp_path}/out", arguments, undisturbed, tmp_path)


def test_the_same_on_object_storage_at_one_moment_after_the_other(arguments, undisturbed, tmp_path, bucket):
    """The lock of the killed job is taken away, which would else expire after five minutes."""
    output, moments = f"{bucket}/out", [MOMENTS[name] for name in ON_STORAGE]

    def unlock():
        delete_files(file.path for file in files_of(output, ".lock-*"))

    ends_with_the_rows_of_one_that_was_not(moments, output, arguments, undisturbed, tmp_path, unlock)
    assert len(list_shards(output)) == IMAGES + 1
