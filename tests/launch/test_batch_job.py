"""The whole batch job as a user runs it, and what its readers find."""

import glob
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import REPO, without_progress, write_bright_image
from tests.fixtures import fixtures_dir
from tests.rows_of_files import without_age

SIZES_AND_BOXES = [
    pytest.param((640, 480), (100, 60, 400, 300), id="landscape"),
    pytest.param((300, 900), (20, 700, 280, 860), id="portrait"),
    pytest.param((128, 96), (5, 6, 40, 50), id="size-of-the-input"),
    pytest.param((31, 17), (3, 4, 20, 12), id="small"),
    pytest.param((3000, 2000), (1500, 500, 2900, 1800), id="decoded-at-reduced-scale"),
]


needs_prism = pytest.mark.skipif(
    not (REPO / ".tools" / "prism").exists(), reason="no Prism binary; `make prism` builds it where Go is installed"
)
RUNNERS = ["DirectRunner", pytest.param("PrismRunner", marks=needs_prism)]
WORK_IMAGES = 2000


def rows_of(output: Path, kind: str = "detections") -> list[dict]:
    return [json.loads(line) for path in sorted(glob.glob(f"{output}/{kind}/*.jsonl")) for line in open(path, encoding="utf-8")]


def files_of(output: Path) -> dict[str, str]:
    """Every result file but the two that hold times, with a hash of its content; of an index without its times."""
    files = [path for path in output.rglob("*") if path.is_file() and path.name not in ("summary.json", "report.html")]
    contents = {str(path.relative_to(output)): path.read_bytes() for path in files}
    return {name: hashlib.sha256(without_age(name, content)).hexdigest() for name, content in contents.items()}


def without_run(names) -> list[str]:
    """The names of files, sorted, without what each run puts into them."""
    return sorted(re.sub(r"-[0-9a-f]{8}(-\d{8}T\d{6}Z)?(-\d{5}-of)", r"\2", name) for name in names)


def write_work(folder: Path, images: int = WORK_IMAGES, image_wh: tuple[int, int] = (1200, 900)) -> None:
    """Images enough for a second or more of work: one, under many names."""
    width, height = image_wh
    write_bright_image(folder / "0.jpg", image_wh, (10, 10, width // 4, height // 3))
    for n in range(1, images):
        os.link(folder / "0.jpg", folder / f"{n}.jpg")


def signal_at_work(sent: signal.Signals, arguments: list, out: Path) -> tuple[int, str]:
    """Sends a job a signal when its first rows are spilled; its exit code and what it said."""
    command = [sys.executable, "-m", "pipeline.run", *map(str, arguments)]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell runs in the background, and its children, ignore it
    job = subprocess.Popen(command, cwd=REPO, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not glob.glob(f"{out}/.staging-*/spill/*") and job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert glob.glob(f"{out}/.staging-*/spill/*"), "the job was met at work"
        job.send_signal(sent)
        return job.wait(60), without_progress(job.stderr.read())
    finally:
        job.kill()
        job.wait()
        job.stderr.close()


@pytest.mark.parametrize("model", ["bright_model", "bright_letterbox_model"])
def test_boxes_are_in_pixels_of_the_original_image(model, request, tmp_path, run_job):
    """Whatever the size of the image and the resize rule of the model, the box is where the rectangle is."""
    expected = {}
    for case in SIZES_AND_BOXES:
        image_wh, box = case.values
        path = tmp_path / "in" / f"{case.id}.jpg"
        write_bright_image(path, image_wh, box)
        expected[str(path)] = (image_wh, box)

    code, out, err = run_job("--input", tmp_path / "in", "--output", tmp_path / "out", "--model", request.getfixturevalue(model))

    assert (code, err) == (0, ""), out + err
    found = {row["image"]["uri"]: row for row in rows_of(tmp_path / "out")}
    assert set(found) == set(expected)
    for uri, (image_wh, box) in expected.items():
        row = found[uri]
        assert (row["image"]["width"], row["image"]["height"]) == image_wh
        assert [(d["class_id"], d["class_name"], d["confidence"]) for d in row["detections"]] == [(0, "rectangle", 0.9)]
        pixels_of_one_input_pixel = max(image_wh[0] / 128, image_wh[1] / 96, 1.0)
        assert np.abs(np.subtract(row["detections"][0]["box_xyxy"], box)).max() <= 1.5 * pixels_of_one_input_pixel, uri


def test_boxes_are_on_the_upright_image_for_all_eight_orientations(tmp_path, run_job, bright_model):
    """An EXIF orientation turns the image, its size and its boxes."""
    upright = np.zeros((200, 320, 3), np.uint8)
    upright[20:80, 40:120] = 255  # top left, so that each wrong turn shows
    undo = {1: (), 2: (0,), 3: (3,), 4: (1,), 5: (5,), 6: (2,), 7: (6,), 8: (4,)}  # PIL's transpositions that store it so
    for orientation, transpositions in undo.items():
        stored = Image.fromarray(upright)
        for transposition in transpositions:
            stored = stored.transpose(Image.Transpose(transposition))
        exif = Image.Exif()
        exif[0x0112] = orientation
        (tmp_path / "in").mkdir(exist_ok=True)
        stored.save(tmp_path / "in" / f"{orientation}.jpg", quality=95, exif=exif)

    assert run_job("--input", tmp_path / "in", "--output", tmp_path / "out", "--model", bright_model)[0] == 0

    rows = rows_of(tmp_path / "out")
    assert len(rows) == 8
    for row in rows:
        assert (row["image"]["width"], row["image"]["height"]) == (320, 200), row["image"]["uri"]
        assert np.abs(np.subtract(row["detections"][0]["box_xyxy"], [40, 20, 120, 80])).max() <= 4, row["image"]["uri"]


@pytest.mark.parametrize("runner", RUNNERS)
def test_the_contract_of_the_output(runner, tmp_path, run_job, bright_model):
    """Good, empty, broken and doubly named images: every one is counted once, and every promised file is there."""
    for n in range(5):
        write_bright_image(tmp_path / "in" / "sub" / f"{n}.png", (64, 48), (10, 10, 30, 30))
    write_bright_image(tmp_path / "in" / "black.png", (64, 48), (0, 0, 0, 0))
    (tmp_path / "in" / "empty.jpg").write_bytes(b"")
    (tmp_path / "in" / "text.jpg").write_text("no image at all")
    hostile = tmp_path / "in" / "<img src=x onerror=alert(1)>.jpg"
    hostile.write_bytes((tmp_path / "in" / "black.png").read_bytes()[:60])
    out = tmp_path / "out"

    arguments = [
        "--input",
        f"{tmp_path}/in/**/*.*",
        tmp_path / "in" / "black.png",
        "--output",
        out,
        "--model",
        bright_model,
        "--runner",
        runner,
    ]
    code, stdout, stderr = run_job(*arguments, "--parquet", "--coco", "--samples", "2", "--shards", "3")

    assert code == 0, stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["images"] == {"read": 10, "detected": 6, "dead": 3, "skipped": 1}
    assert "10 images read: 6 detected, 3 dead, 1 skipped" in stdout
    assert summary["model"]["name"] == "bright" and summary["model"]["version"] == "3"
    assert sum(summary["dead_by_reason"].values()) == 3 and summary["dead_by_reason"]["empty"] == 1
    assert sum(int(size) * n for size, n in summary["batch_sizes"].items()) >= 6
    assert set(summary["stage_seconds"]) >= {"read", "decode", "model", "postprocess"}
    assert summary["config"]["write"]["shards"] == 3

    rows = rows_of(out)
    assert len(glob.glob(f"{out}/detections/detections-*-0000?-of-00003.jsonl")) == 3
    assert [row["detections"] for row in rows if row["image"]["uri"].endswith("black.png")] == [[]]
    assert {row["model"]["name"] + row["model"]["version"] for row in rows} == {"bright3"}
    dead = {os.path.basename(row["image"]["uri"]): row for row in rows_of(out, "dead_letters")}
    assert {name: row["stage"] for name, row in dead.items()} == {
        "empty.jpg": "decode",
        "text.jpg": "decode",
        hostile.name: "decode",
    }
    assert dead["empty.jpg"]["reason"] == "empty" and dead["text.jpg"]["reason"] == "not_an_image"

    report = (out / "report.html").read_text()
    assert "<img src=x" not in report and "&lt;img src=x onerror=alert(1)&gt;.jpg" in report
    assert len(list((out / "samples").glob("*.jpg"))) == 2
    assert not list(out.glob(".*")), "staging is gone"


def test_parquet_and_coco_hold_the_same_detections(tmp_path, run_job, bright_model):
    """Parquet has the rows of the JSON Lines; pycocotools loads the COCO files."""
    import pyarrow.parquet as pq
    from pycocotools.coco import COCO

    for n in range(6):
        write_bright_image(tmp_path / "in" / f"{n}.png", (64, 48), (10 + n, 10, 30 + n, 30))
    out = tmp_path / "out"
    assert (
        run_job("--input", tmp_path / "in", "--output", out, "--model", bright_model, "--parquet", "--coco", "--shards", "2")[0]
        == 0
    )

    rows = rows_of(out)
    parquet = [row for path in sorted(glob.glob(f"{out}/detections/*.parquet")) for row in pq.read_table(path).to_pylist()]
    assert [row["image"] for row in parquet] == [row["image"] for row in rows]
    assert [len(row["detections"]) for row in parquet] == [1] * 6
    dataset = COCO(f"{out}/coco/images.json")
    results = dataset.loadRes(f"{out}/coco/results.json")
    assert len(results.getAnnIds()) == 6
    boxes = {dataset.imgs[found["image_id"]]["file_name"]: found["bbox"] for found in results.anns.values()}
    for row in rows:
        x0, y0, x1, y1 = row["detections"][0]["box_xyxy"]
        assert boxes[row["image"]["uri"]] == pytest.approx([x0, y0, x1 - x0, y1 - y0], abs=0.011)


def test_a_second_run_gives_the_same_files(tmp_path, run_job, bright_model):
    """Same command, same bytes; what an earlier run with more shards left is gone, a stranger's file stays."""
    for n in range(20):
        write_bright_image(tmp_path / "in" / f"{n}.jpg", (64 + n, 48), (10, 10, 30, 30))
    out = tmp_path / "out"
    arguments = ["--input", tmp_path / "in", "--output", out, "--model", bright_model, "--shards"]
    assert run_job(*arguments, 4)[0] == 0
    (out / "detections" / "mine.jsonl").write_text("")
    assert run_job(*arguments, 2)[0] == 0
    first = files_of(out)
    assert run_job(*arguments, 2)[0] == 0
    assert files_of(out) == first
    assert without_run(name for name in first if name.startswith("detections/")) == [
        "detections/detections-00000-of-00002.jsonl",
        "detections/detections-00001-of-00002.jsonl",
        "detections/mine.jsonl",
    ]


def test_a_killed_run_leaves_no_result_and_the_next_one_is_complete(tmp_path, run_job, bright_model):
    """SIGKILL while images are worked on: no reader finds anything; a second run cleans up and finishes."""
    write_work(tmp_path / "in")
    out = tmp_path / "out"
    arguments = ["--input", tmp_path / "in", "--output", out, "--model", bright_model, "--request-images", 16]
    signal_at_work(signal.SIGKILL, arguments, out)
    assert [path for path in glob.glob(f"{out}/**", recursive=True) if os.path.isfile(path)] == []

    assert run_job(*arguments)[0] == 0
    assert len(rows_of(out)) == WORK_IMAGES
    assert not list(out.glob(".*"))


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_says_so_in_one_line_and_leaves_nothing(sent, tmp_path, bright_model):
    """Ctrl-C, or the signal of a scheduler: no traceback, no half a result."""
    write_work(tmp_path / "in")
    out = tmp_path / "out"
    arguments = ["--input", tmp_path / "in", "--output", out, "--model", bright_model, "--request-images", 16]
    assert signal_at_work(sent, arguments, out) == (130, "stopped; nothing was published\n")
    assert [path for path in out.rglob("*") if path.is_file()] == []


def test_a_manifest_without_images_is_an_error_and_keeps_earlier_results(tmp_path, run_job, bright_model):
    """What lists nothing must not wipe out what an earlier run found."""
    write_bright_image(tmp_path / "in" / "good.png", (64, 48), (10, 10, 30, 30))
    (tmp_path / "empty.txt").write_text("")
    arguments = ["--output", tmp_path / "out", "--model", bright_model, "--replace"]
    assert run_job("--input", tmp_path / "in", *arguments)[0] == 0
    code, _, err = run_job("--input", tmp_path / "empty.txt", *arguments)
    assert (code, err) == (2, f"error: input {tmp_path}/empty.txt: names no image\n")
    assert len(rows_of(tmp_path / "out")) == 1


def test_too_many_dead_letters_are_a_failure(tmp_path, run_job, bright_model):
    """The results are written all the same, and the exit code says that something is wrong."""
    (tmp_path / "in").mkdir()
    for n in range(3):
        (tmp_path / "in" / f"{n}.jpg").write_text("text")
    write_bright_image(tmp_path / "in" / "good.png", (64, 48), (10, 10, 30, 30))
    arguments = ["--input", tmp_path / "in", "--output", tmp_path / "out", "--model", bright_model]
    code, _, err = run_job(*arguments)
    assert code == 1 and "3 of 4 images failed" in err and len(rows_of(tmp_path / "out")) == 1
    assert run_job(*arguments, "--max-dead-share", "0.75")[0] == 0


def test_dead_letters_can_be_given_as_input_again(tmp_path, run_job, bright_model):
    """What was mended in between is detected."""
    broken = tmp_path / "in" / "broken.png"
    broken.parent.mkdir()
    broken.write_bytes(b"")
    write_bright_image(tmp_path / "in" / "good.png", (64, 48), (10, 10, 30, 30))
    assert run_job("--input", tmp_path / "in", "--output", tmp_path / "first", "--model", bright_model)[0] == 0
    write_bright_image(broken, (64, 48), (10, 10, 30, 30))
    again = f"{tmp_path}/first/dead_letters/*.jsonl"
    to_second = ("--input", again, "--output", tmp_path / "second", "--model", bright_model, "--max-dead-share", "1")
    assert run_job(*to_second)[0] == 0
    assert [row["reason"] for row in rows_of(tmp_path / "second", "dead_letters")] == ["not_allowed"], "found by a wildcard"
    assert run_job(*to_second, "--only-new", "--allow-uri-prefix", tmp_path / "in")[0] == 0
    assert [row["image"]["uri"] for row in rows_of(tmp_path / "second")] == [str(broken)]


def test_a_dry_run_says_what_it_would_do_and_writes_nothing(tmp_path, run_job, bright_model):
    """The plan names the images, the model and the output."""
    write_bright_image(tmp_path / "in" / "a.png", (64, 48), (10, 10, 30, 30))
    code, out, _ = run_job("--input", tmp_path / "in", "--output", tmp_path / "out", "--model", bright_model, "--dry-run")
    assert code == 0
    assert "1 images" in out and "bright 3, 128x96 stretch" in out and "nothing was written" in out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("runner", RUNNERS)
def test_hostile_files_end_as_a_detection_or_one_dead_letter(runner, tmp_path, run_job, bright_model):
    """No crash, no hang, no lost neighbour."""
    folder = fixtures_dir() / "hostile"
    write_bright_image(tmp_path / "in" / "neighbour.png", (64, 48), (10, 10, 30, 30))
    arguments = ["--output", tmp_path / "out", "--model", bright_model, "--max-dead-share", "1", "--runner", runner]
    code, _, err = run_job("--input", folder, tmp_path / "in", *arguments)
    assert code == 0, err
    uris = [row["image"]["uri"] for kind in ("detections", "dead_letters") for row in rows_of(tmp_path / "out", kind)]
    files = [str(path) for path in folder.iterdir() if path.name != "SOURCES.tsv"]  # which is beside them
    assert sorted(uris) == sorted([*files, str(tmp_path / "in" / "neighbour.png")])
    assert str(tmp_path / "in" / "neighbour.png") in [row["image"]["uri"] for row in rows_of(tmp_path / "out")]


@needs_prism
def test_prism_gives_the_same_files_as_the_direct_runner(tmp_path, run_job, bright_model):
    """The runner is a setting, not a difference."""
    for n in range(40):
        write_bright_image(tmp_path / "in" / f"{n}.jpg", (64 + n, 48), (10, 10, 30, 30))
    (tmp_path / "in" / "broken.jpg").write_bytes(b"")
    arguments = ["--input", tmp_path / "in", "--model", bright_model, "--shards", 2, "--output"]
    assert run_job(*arguments, tmp_path / "direct")[0] == 0
    code, _, err = run_job(*arguments, tmp_path / "prism", "--runner", "PrismRunner")
    assert code == 0, err
    assert files_of(tmp_path / "prism") == files_of(tmp_path / "direct")
