"""Archives as inputs of whole jobs: a member is an image like others when a job adds, retries or reconciles."""

import pytest

from pipeline.reconcile import reconcile
from tests.conftest import write_bright_image
from tests.launch.jobs import rows_of
from tests.read.test_archives import write


def png(folder, width=64):
    write_bright_image(folder / "one.png", (width, 48), (10, 12, 30, 36))
    return (folder / "one.png").read_bytes()


def names(folder, kind="detections"):
    """Of all rows, without the folder."""
    return sorted(row["image"]["uri"].removeprefix(f"{folder}/") for row in rows_of(folder / "out", kind))


@pytest.mark.parametrize("given", ["in", "in/*", "in/a.{kind}"])
@pytest.mark.parametrize("kind", ["zip", pytest.param("tar.gz", marks=pytest.mark.matrix)])
def test_a_second_run_reads_the_members_that_have_no_row(tmp_path, job, kind, given):
    given = given.format(kind=kind)
    files = {"x.png": png(tmp_path), "d/y.png": png(tmp_path, 70), "bad.jpg": b"no image", "notes.txt": b"text"}
    path = write(tmp_path / "in" / f"a.{kind}", files)
    first = job("--input", given)
    assert (first["detected"], first["dead"], first["skipped"]) == (2, 1, 1)
    assert names(tmp_path) == [f"in/a.{kind}#d/y.png", f"in/a.{kind}#x.png"]
    assert names(tmp_path, "dead_letters") == [f"in/a.{kind}#bad.jpg"]

    write(path, {**files, "z.png": png(tmp_path, 80)})
    again = job("--input", given)
    assert (again["detected"], again["dead"], again["skipped"]) == (1, 0, 4)
    outcome = reconcile([given], "out")
    assert (outcome.counts["done"], outcome.counts["dead"], outcome.counts["missing"]) == (3, 1, 0)

    write(path, {"x.png": files["x.png"], "new.png": png(tmp_path, 90)})
    outcome = reconcile([given], "out")
    assert (outcome.counts["done"], outcome.counts["missing"], outcome.counts["orphaned"]) == (1, 1, 2)


def test_dead_letters_of_members_and_of_a_damaged_archive_are_tried_again(tmp_path, job):
    good = write(tmp_path / "in" / "a.zip", {"x.png": png(tmp_path), "wide.png": png(tmp_path, 300)})
    broken = tmp_path / "in" / "b.zip"
    broken.write_bytes(good.read_bytes()[:100])
    images = job("--input", "in", "--max-megapixels", "0.01")
    assert (images["detected"], images["dead"]) == (1, 2)
    assert names(tmp_path, "dead_letters") == ["in/a.zip#wide.png", "in/b.zip"]
    broken.write_bytes(good.read_bytes())
    images = job("--retry-dead", "--input", "in")
    assert (images["detected"], images["dead"]) == (3, 0)
