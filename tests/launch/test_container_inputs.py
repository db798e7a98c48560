"""Archives and videos as inputs of whole jobs: members and frames are images like others, also in a second run."""

import os

import numpy as np
import pytest

from pipeline import run
from pipeline.commands import reconcile
from tests.conftest import write_bright_image
from tests.launch.jobs import rows_of, write_images
from tests.listing.test_archives import write
from tests.listing.test_videos import write_video


def png(folder, width=64):
    write_bright_image(folder / "one.png", (width, 48), (10, 12, 30, 36))
    return (folder / "one.png").read_bytes()


def bright(_number, wh):
    drawn = np.zeros((*wh[::-1], 3), np.uint8)
    drawn[10:30, 12:40] = 255
    return drawn


def names(folder, kind="detections"):
    """Of all rows, without the folder."""
    return sorted(row["image"]["uri"].removeprefix(f"{folder}/") for row in rows_of(folder / "out", kind))


@pytest.fixture
def reconciled(capfd, bright_model):
    """Reconciles an input with the rows: the exit code, and the counts that are not zero."""

    def start(*arguments):
        capfd.readouterr()
        code = reconcile.main(["--output", "out", "--model", bright_model, "--input", *arguments])
        lines = [line.split() for line in capfd.readouterr().out.splitlines() if line[:11].strip().isdecimal()]
        return code, {words[1]: int(words[0]) for words in lines if words[0] != "0"}

    return start


@pytest.mark.parametrize("given", ["in/*", "in/a.{kind}"])
@pytest.mark.parametrize("kind", ["zip", pytest.param("tar.gz", marks=pytest.mark.matrix)])
def test_a_second_run_reads_the_members_that_have_no_row(tmp_path, job, reconciled, kind, given):
    given = given.format(kind=kind)
    files = {"x.png": png(tmp_path), "d/y.png": png(tmp_path, 70), "bad.jpg": b"no image", "notes.txt": b"text"}
    path = write(tmp_path / "in" / f"a.{kind}", files)
    assert job("--input", given) == {"read": 4, "detected": 2, "dead": 1, "skipped": 1}
    assert names(tmp_path) == [f"in/a.{kind}#d/y.png", f"in/a.{kind}#x.png"]
    assert names(tmp_path, "dead_letters") == [f"in/a.{kind}#bad.jpg"]

    write(path, {**files, "z.png": png(tmp_path, 80)})
    assert job("--input", given) == {"read": 5, "detected": 1, "dead": 0, "skipped": 4}
    assert reconciled(given) == (0, {"listed": 4, "done": 3, "dead": 1})

    write(path, {"x.png": files["x.png"], "new.png": png(tmp_path, 90)})
    assert reconciled(given) == (1, {"listed": 2, "done": 1, "missing": 1, "orphaned": 2})


def test_dead_letters_of_members_and_of_a_damaged_archive_are_tried_again(tmp_path, job):
    good = write(tmp_path / "in" / "a.zip", {"x.png": png(tmp_path), "wide.png": png(tmp_path, 300)})
    broken = tmp_path / "in" / "b.zip"
    broken.write_bytes(good.read_bytes()[:100])
    assert job("--input", "in", "--max-megapixels", "0.01") == {"read": 3, "detected": 1, "dead": 2, "skipped": 0}
    assert names(tmp_path, "dead_letters") == ["in/a.zip#wide.png", "in/b.zip"]
    broken.write_bytes(good.read_bytes())
    images = job("--retry-dead", "--input", "in")
    assert (images["detected"], images["dead"]) == (3, 0)


def test_a_second_run_reads_the_frames_that_have_no_row_and_reconcile_agrees(tmp_path, job, reconciled, capfd):
    path = write_video(tmp_path / "in" / "clip.mkv", 75, draw=bright)
    write_images(tmp_path / "in", "a.png")
    assert run.main(["--input", "in/*.mkv", "--output", "out", "--model", "digits", "--dry-run"]) == 0
    assert f"tried    {tmp_path}/in/clip.mkv#t=0.000: 64x48" in capfd.readouterr().out
    assert job("--input", "in")["detected"] == 4
    assert names(tmp_path) == ["in/a.png", *(f"in/clip.mkv#t={second}.000" for second in range(3))]
    (box,) = next(row["detections"] for row in rows_of(tmp_path / "out") if row["image"]["uri"].endswith("#t=0.000"))
    assert box["box_xyxy"] == pytest.approx([12, 10, 40, 30], abs=1.5)
    assert reconciled("in") == (0, {"listed": 4, "done": 4})
    assert reconciled("in", "--fps", "2") == (1, {"listed": 7, "done": 4, "missing": 3})

    images = job("--input", "in", "--fps", "2")
    assert (images["detected"], images["skipped"]) == (3, 4)
    assert reconciled("in", "--fps", "2") == (0, {"listed": 7, "done": 7})

    os.utime(path, (0, 0))  # another content, for all that is known
    assert reconciled("in", "--fps", "2") == (1, {"listed": 7, "done": 1, "stale": 6})
    assert job("--input", "in", "--fps", "2")["detected"] == 6
    path.unlink()
    assert reconciled("in") == (0, {"listed": 1, "done": 1, "orphaned": 6})
