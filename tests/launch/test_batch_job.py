"""The whole batch job as a user runs it, and what its readers find."""

import json
import os
import signal

import numpy as np
import pytest
from PIL import Image

from pipeline.errors import DEAD
from tests.conftest import write_bright_image
from tests.fixtures import fixtures_dir
from tests.launch.jobs import (
    WORK_IMAGES,
    files_of,
    images_of,
    needs_prism,
    rows_by_name,
    rows_of,
    signal_at_work,
    without_run,
    write_images,
    write_work,
)
from tests.shard_rows import rows_in

SIZES_AND_BOXES = {
    "landscape": ((640, 480), (100, 60, 400, 300)),
    "portrait": ((300, 900), (20, 700, 280, 860)),
    "size-of-the-input": ((128, 96), (5, 6, 40, 50)),
    "small": ((31, 17), (3, 4, 20, 12)),
    "decoded-at-reduced-scale": ((3000, 2000), (1500, 500, 2900, 1800)),
}
UNDO = {1: (), 2: (0,), 3: (3,), 4: (1,), 5: (5,), 6: (2,), 7: (6,), 8: (4,)}  # by EXIF orientation: PIL's transpositions


@pytest.fixture(scope="module", params=["bright_model", "bright_letterbox_model"])
def boxes_found(request, tmp_path_factory, run_job):
    """The row of each image of `SIZES_AND_BOXES`, and of one image in all eight orientations, by file name."""
    folder = tmp_path_factory.mktemp("boxes")
    for name, (image_wh, box) in SIZES_AND_BOXES.items():
        write_bright_image(folder / "in" / f"{name}.jpg", image_wh, box)
    upright = np.zeros((200, 320, 3), np.uint8)
    upright[20:80, 40:120] = 255  # top left, so that each wrong turn shows
    for orientation, transpositions in UNDO.items():
        stored = Image.fromarray(upright)
        for transposition in transpositions:
            stored = stored.transpose(Image.Transpose(transposition))
        exif = Image.Exif()
        exif[0x0112] = orientation
        stored.save(folder / "in" / f"{orientation}.jpg", quality=95, exif=exif)

    arguments = ["--input", folder / "in", "--output", folder / "out", "--model", request.getfixturevalue(request.param)]
    code, out, err = run_job(*arguments)

    assert (code, err) == (0, ""), out + err
    found = {row["image"]["uri"]: row for row in rows_of(folder / "out")}
    assert set(found) == {str(path) for path in (folder / "in").iterdir()}
    return {os.path.basename(uri): row for uri, row in found.items()}


@pytest.mark.parametrize("name", SIZES_AND_BOXES)
def test_boxes_are_in_pixels_of_the_original_image(name, boxes_found):
    """Whatever the size of the image and the resize rule of the model, the box is where the rectangle is."""
    (image_wh, box), row = SIZES_AND_BOXES[name], boxes_found[f"{name}.jpg"]
    assert (row["image"]["width"], row["image"]["height"]) == image_wh
    assert [(d["class_id"], d["class_name"], d["confidence"]) for d in row["detections"]] == [(0, "rectangle", 0.9)]
    pixels_of_one_input_pixel = max(image_wh[0] / 128, image_wh[1] / 96, 1.0)
    assert np.abs(np.subtract(row["detections"][0]["box_xyxy"], box)).max() <= 1.5 * pixels_of_one_input_pixel


@pytest.mark.parametrize("orientation", UNDO)
def test_boxes_are_on_the_upright_image_for_all_eight_orientations(orientation, boxes_found):
    """An EXIF orientation turns the image, its size and its boxes."""
    row = boxes_found[f"{orientation}.jpg"]
    assert (row["image"]["width"], row["image"]["height"]) == (320, 200)
    assert np.abs(np.subtract(row["detections"][0]["box_xyxy"], [40, 20, 120, 80])).max() <= 4


WHOLE = 40
HOSTILE_NAME, BLACK = "<img src=x onerror=alert(1)>\udcff.jpg", "black\udcff.png"  # and no UTF-8


@pytest.fixture(scope="module")
def mixed_job(tmp_path_factory, run_job, bright_model):
    """Runs a job with all that a job can write over good, black, empty and broken images, of which one is named twice.

    Returns a function of the results folder and the runner; it returns what the job printed.
    """
    folder = tmp_path_factory.mktemp("mixed")
    for n in range(WHOLE):
        write_bright_image(folder / "sub" / f"{n}.png", (64 + n, 48), (10 + n % 20, 10, 30 + n % 20, 30))
    write_bright_image(folder / "black.png", (64, 48), (0, 0, 0, 0))
    (folder / "black.png").rename(folder / BLACK)  # OpenCV writes no file of that name
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "text.jpg").write_text("no image at all")
    (folder / HOSTILE_NAME).write_bytes((folder / BLACK).read_bytes()[:60])
    arguments = ["--input", f"{folder}/**/*.*", folder / BLACK, "--model", bright_model, "--export=coco", "--samples=2"]

    def start(out, runner="DirectRunner"):
        code, printed, error = run_job(*arguments, "--output", out, "--runner", runner)
        assert code == 0, error
        return printed

    return start


def test_the_contract_of_the_output(mixed_job, out):
    """Good, empty, broken and doubly named images: every one is counted once, and every promised file is there."""
    printed = mixed_job(out)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["images"] == {"read": WHOLE + 5, "detected": WHOLE + 1, "dead": 3, "skipped": 1}
    assert f"{WHOLE + 5} images read: {WHOLE + 1} detected, 3 dead, 1 skipped" in printed
    assert "\nresults of model bright 3 in " in printed
    assert summary["model"]["name"] == "bright" and summary["model"]["version"] == "3"
    assert sum(summary["dead_by_reason"].values()) == 3 and summary["dead_by_reason"]["empty"] == 1
    assert sum(int(size) * n for size, n in summary["batch_sizes"].items()) >= WHOLE + 1
    assert set(summary["stage_seconds"]) >= {"read", "decode", "model", "postprocess"}
    assert summary["config"]["write"]["export"] == ["coco"]
    (run,) = (out / "runs").iterdir()
    assert run.name == summary["run"]
    for name in ("summary.json", *summary["samples"]):  # report.html on top is of the whole folder
        assert (run / name).read_bytes() == (out / name).read_bytes(), "the reports on top are copies of the newest run's"

    rows = rows_of(out)
    assert len(rows) == WHOLE + 1
    assert [row["detections"] for row in rows if row["image"]["uri"].endswith(BLACK)] == [[]]
    assert {row["model"]["name"] + row["model"]["version"] for row in rows} == {"bright3"}
    dead = {os.path.basename(row["image"]["uri"]): row for row in rows_of(out, "dead_letters")}
    assert dead.keys() == {"empty.jpg", "text.jpg", HOSTILE_NAME} and {row["stage"] for row in dead.values()} == {"decode"}
    assert dead["empty.jpg"]["reason"] == "empty" and dead["text.jpg"]["reason"] == "not_an_image"

    report = (out / "report.html").read_text()
    assert "<img src=x" not in report and "&lt;img src=x onerror=alert(1)&gt;" in report
    assert len(list((out / "samples").glob("*.jpg"))) == 2
    assert not list(out.glob(".*")), "staging is gone"


@pytest.mark.matrix
@needs_prism
def test_prism_gives_the_same_rows_and_files_as_the_direct_runner(mixed_job, tmp_path):
    """The runner is a setting, not a difference."""
    direct, prism = tmp_path / "direct", tmp_path / "prism"
    mixed_job(direct)
    mixed_job(prism, "PrismRunner")
    for kind in ("detections", "dead_letters"):
        assert rows_of(prism, kind) == rows_of(direct, kind)
    assert files_of(prism / "samples") == files_of(direct / "samples")
    assert without_run(files_of(prism)) == without_run(files_of(direct))
    assert images_of(prism) == images_of(direct)


@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.matrix)])
def test_a_stopped_run_says_so_in_one_line_and_the_same_command_does_the_rest(sent, arguments, out, tmp_path, run_job):
    """Ctrl-C, or the signal of a scheduler: no traceback; rows that are written stay, and no image is done twice."""
    write_work(tmp_path / "in")
    arguments += ["--batch-sizes", 16]
    assert signal_at_work(sent, arguments, out) == (
        130,
        "stopped; rows that were written stay, and the same command does the rest\n",
    )
    done = len(rows_in(str(out)))
    assert 0 < done < WORK_IMAGES and not list(out.glob(".*"))
    assert not (out / "summary.json").exists() and not (out / "runs").exists()
    assert run_job(*arguments)[0] == 0
    assert images_of(out) == {"read": WORK_IMAGES, "detected": WORK_IMAGES - done, "dead": 0, "skipped": done}
    assert len(rows_in(str(out))) == len({row["image"]["uri"] for row in rows_in(str(out))}) == WORK_IMAGES


def test_too_many_dead_letters_are_a_failure_whose_rows_and_reports_are_there(arguments, out, tmp_path, run_job):
    """A scheduled command that finds new images broken keeps what it had.

    The share is one of the images that were tried: those that are done already do not hide that all new ones failed.
    """
    names = [f"{n}.png" for n in range(5)]
    write_images(tmp_path / "in", *names)
    assert run_job(*arguments)[0] == 0
    before, shards = rows_of(out), {path: path.read_bytes() for path in out.glob("*/*.parquet")}
    for name in names[3:]:
        (tmp_path / "in" / name).write_text("403 Forbidden")
    code, stdout, err = run_job(*arguments)
    assert code == DEAD and "2 of 2 images failed" in err and err.endswith(f"; see {out}/dead_letters\n") and err.count("\n") == 1
    assert stdout.startswith("5 images read: 0 detected, 2 dead, 3 skipped")
    assert rows_of(out) == before and {path: path.read_bytes() for path in shards} == shards
    assert rows_by_name(out, "dead_letters") == names[3:]
    assert images_of(out) == {"read": 5, "detected": 0, "dead": 2, "skipped": 3}
    assert run_job(*arguments, "--again", "--max-dead-share", "0.4")[0] == 0
    assert (rows_by_name(out), rows_by_name(out, "dead_letters")) == (sorted([*names, *names[:3]]), sorted(names[3:] * 2))


def test_hostile_files_end_as_a_detection_or_one_dead_letter(arguments, out, tmp_path, run_job):
    """No crash, no hang, no lost neighbour."""
    folder, neighbour = fixtures_dir() / "hostile", str(tmp_path / "in" / "neighbour.png")
    write_images(tmp_path / "in", "neighbour.png")
    code, _, error = run_job(*arguments, "--input", folder, "--max-dead-share", "1")
    assert code == 0, error
    uris = [row["image"]["uri"] for kind in ("detections", "dead_letters") for row in rows_of(out, kind)]
    files = [str(path) for path in folder.iterdir() if path.name != "SOURCES.tsv"]  # which is beside them
    assert sorted(uris) == sorted([*files, neighbour])
    assert neighbour in [row["image"]["uri"] for row in rows_of(out)]
