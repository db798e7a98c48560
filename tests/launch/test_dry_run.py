"""A dry run tries one image, so that a wrong description of a model shows before a million images are done with it."""

import subprocess
import sys
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import yaml

from pipeline import run
from pipeline.launch.dry_run import Planned
from pipeline.log_lines import say
from pipeline.records import ImageRef
from tests.conftest import REPO, write_bright_image
from tests.forked_jobs import Moment
from tests.tiny_models import bright_box, save_model

BOX = (256, 96, 576, 384)  # of an image of 640x480: shares 0.4, 0.2, 0.9, 0.8
DESCRIBED = {"resize": "stretch", "box_format": "xyxy", "box_units": "norm", "class_names": ["cat", "dog", "cow"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Says nothing of itself; gives a box as xyxy in shares, and scores of three classes, of which the last one is the best."""
    import tensorflow as tf

    def predict(images):
        boxes = bright_box(images)[:, None, :]
        scores = tf.tile(tf.constant([[[0.1, 0.2, 0.8]]]), (tf.shape(images)[0], 1, 1))
        return {"boxes": boxes, "scores": scores}

    spec = tf.TensorSpec((None, 96, 128, 3), tf.uint8, "images")
    return save_model(tmp_path_factory.mktemp("models") / "other", predict, spec)


@pytest.fixture
def plan_of(tmp_path, capsys):
    """Runs a dry run with flags; its lines. Nothing is written."""

    def lines(*flags: object, images: object = tmp_path / "in") -> list[str]:
        command = ["--input", images, "--output", tmp_path / "out", "--dry-run", "--batch-sizes", 1, *flags]
        assert run.main([*map(str, command)]) == 0
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().out.splitlines()

    return lines


@pytest.mark.parametrize(
    ("described", "found", "wrong"),
    [
        pytest.param({}, "cow 0.80 at [255, 95, 575, 385]", [], id="as it is"),
        pytest.param({"box_format": "cxcywh"}, "cow 0.80 at [-32, -97, 542, 288]", [], id="a format that may be, and is not"),
        pytest.param(
            {"box_units": "pixels"},
            "cow 0.80 at [2, 1, 4, 4]",
            ["1 of 1 boxes are smaller than a pixel of the model's input; model.box_format is xyxy, model.box_units pixels"],
            id="units",
        ),
        pytest.param(
            {"class_names": ["cat", "dog"]},
            "class 2 0.80 at [255, 95, 575, 385]",
            ["class 2 was found, class_names has 0 to 1; model.class_id_offset is 0"],
            id="too few names",
        ),
    ],
)
def test_what_is_found_in_an_image_is_shown_with_what_looks_wrong(described, found, wrong, plan_of, tmp_path, model):
    """Each wrong description of the model shows in the boxes, in a doubt, or in both."""
    write_bright_image(tmp_path / "in" / "a.png", (640, 480), BOX)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"model": DESCRIBED | described}))
    lines = plan_of("--config", tmp_path / "job.yaml", "--model", model)
    at = lines.index(f"tried    {tmp_path}/in/a.png: 640x480, 1 object")
    assert lines[at + 1] == f"         {found}"
    assert [line.removeprefix("warning  ") for line in lines if line.startswith("warning")] == wrong
    assert lines[-1] == "dry run: nothing was written"


def test_images_that_cannot_be_read_do_not_hide_the_boxes_of_one_that_can(plan_of, tmp_path, bright_model):
    """Each says why, and the first good one is tried."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.jpg").write_bytes(b"")
    (tmp_path / "in" / "1.jpg").write_text("no image")
    for n in (2, 3):
        write_bright_image(tmp_path / "in" / f"{n}.png", (640, 480), (0, 0, 0, 0))
    tried = [line for line in plan_of("--model", bright_model) if line.startswith("tried")]
    assert [line.split(": ")[:2] for line in tried] == [
        [f"tried    {tmp_path}/in/0.jpg", "dead letter, empty"],
        [f"tried    {tmp_path}/in/1.jpg", "dead letter, not_an_image"],
        [f"tried    {tmp_path}/in/2.png", "640x480, 0 objects"],
    ]


@pytest.mark.parametrize(("images", "shown"), [(0, "0 images"), (1, "1 image"), (7, "7 images")])
def test_a_dry_run_in_which_no_image_can_be_detected_in_ends_with_4(images, shown, arguments, tmp_path, capsys):
    """So that a script learns of it; where there is no image, and may be none, nothing was tried in vain."""
    (tmp_path / "in").mkdir()
    for n in range(images):
        (tmp_path / "in" / f"{n}.jpg").write_text("no image")
    assert run.main([*map(str, arguments), "--dry-run", "--batch-sizes=1", "--allow-empty"]) == (4 if images else 0)
    printed, error = capsys.readouterr()
    assert f"input    {shown}\n" in printed and printed.count("dead letter, not_an_image") == min(images, 5)
    assert error == "error: none of the images that were tried can be detected in; see their dead letters above\n" * bool(images)


def test_a_dry_run_prints_what_it_would_do_also_where_a_name_is_no_unicode(arguments, out, tmp_path, run_job):
    """The images, their days, the model and that nothing is written. In a process of its own, where standard output is strict."""
    folder = tmp_path / "in" / "2026-11-20"
    write_bright_image(folder / "a.png", (640, 480), BOX)
    (folder / "a.png").rename(folder / "caf\udce9.png")
    code, printed, error = run_job("--input", tmp_path / "in" / "{date}", *arguments[2:], "--dates=2026-11-20", "--dry-run")
    assert (code, error) == (0, "")
    assert f"tried    {folder}/caf\\udce9.png: 640x480, 1 object" in printed
    assert "input    1 image\n" in printed and "         of 2026-11-20\n" in printed
    assert "bright 3, 128x96 stretch" in printed and "nothing was written" in printed
    assert not out.exists()


def test_a_reader_that_has_enough_of_the_plan_is_no_error(arguments, out, tmp_path):
    """As `| head -1`. The plan is longer than the pipe, so that the reader leaves while the command writes."""
    folder = tmp_path.joinpath("in", *["n" * 200] * 5)
    for n in range(6):
        write_bright_image(folder / f"{n}.png", (64, 48), (10, 10, 30, 30))
    command = [sys.executable, "-m", "pipeline.run", *map(str, arguments), "--dry-run", "--batch-sizes=1"]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0, "pipesize": 4096}
    with subprocess.Popen(command, cwd=REPO, **piped) as process:
        assert process.stdout.readline() == b"input    6 images\n"
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)
    assert not out.exists()


def test_storage_that_fails_while_a_job_is_planned_is_one_line(arguments, tmp_path, run_job):
    """As in a run: exit code 1 and the reason, no traceback."""
    write_bright_image(tmp_path / "in" / "a.png", (64, 48), (10, 10, 30, 30))
    ended = run_job(*arguments, "--dry-run", at=Moment("pipeline.launch.batch:list_images", when="fails"))
    assert ended == (1, "", "error: the job failed: No space left on device; free some space, then run the same command again\n")


def test_a_name_steers_no_terminal(capsys):
    say(["input    \x1b[2Jgone.jpg\nerror: all is lost"])
    assert capsys.readouterr().out == "input    \\x1b[2Jgone.jpg\\nerror: all is lost\n"


def test_a_dry_run_holds_no_listing():
    """It counts a hundred thousand images, some named twice and some done, in bytes an image; it keeps the first few names."""
    planned, rounds = Planned(), 100
    tracemalloc.start()
    for part in range(rounds):
        refs = [ImageRef(f"gs://b/{n:08d}.jpg") for n in range(part * 500, part * 500 + 1000)]
        planned.add(refs, np.arange(1000) % 10 == 0)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 20 * 1000 * rounds
    first, *names = planned.lines(Counter())
    assert first == "input    45450 images, and 5050 that are done"
    assert names == [*(f"         gs://b/{n:08d}.jpg" for n in range(1, 6)), "         …"]
