"""Large images in tiles: one row an image, with the boxes of supervision's slicer, whatever the batches and portions are."""

import contextlib
import dataclasses
import io

import cv2
import numpy as np
import pytest
from PIL import Image

from models.geometry import nms
from pipeline.config import DetectConfig
from pipeline.detect.golden import GoldenImage
from pipeline.detect.load_detector import load_detector
from pipeline.errors import ConfigError, ModelError
from pipeline.records import DeadLetter, EncodedImage, ImageRef, detection_row
from pipeline.stats.job_stats import JobStats
from tests.detect.blobs import HW, UNLUCKY, blob_image, blob_model, blobs_in
from tests.detect.sliced import by_sahi, by_supervision
from tests.tiny_models import png

TILES = DetectConfig(tiles=128, tile_overlap=0.2, max_detections=1000, batch_sizes=(1, 2, 4), concurrent_batches=2)
IMAGES = [blob_image(f"{seed}.png", wh, 60, seed) for seed, wh in enumerate([(700, 500), (1000, 130), (128, 128), (90, 300)])]


def detected_in(images, detect=TILES, model=blob_model, samples=0):
    with contextlib.closing(load_detector(model, detect, samples)) as detector:
        return detector.detect(images)


def find(part):
    """What the model finds in a tile, after its own suppression, as `blob_model` sees it."""
    found = blobs_in(np.pad(part, [(0, HW[0] - part.shape[0]), (0, HW[1] - part.shape[1]), (0, 0)]))
    return found[nms(found[:, :4].astype(float), found[:, 4], found[:, 5].astype(int), TILES.iou_threshold)]


def sliced(pixels, tool=by_supervision, detect=TILES):
    return set(rounded(*np.split(tool(find, pixels, detect), [4, 5], axis=1)))


def found_in(result):
    return rounded(result.detections.boxes_xyxy, result.detections.confidences, result.detections.class_ids)


def rounded(boxes, confidences, class_ids):
    sure, ids = confidences.astype(float).round(4).ravel().tolist(), class_ids.astype(int).ravel().tolist()
    return [*zip(*boxes.round(2).T.tolist(), sure, ids, strict=True)]


@pytest.mark.parametrize(
    ("tool", "merge"),
    [(by_supervision, "nms"), (by_sahi, "nms"), (by_sahi, "nmm")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_boxes_are_those_of_other_tools(tool, merge):
    """With objects that several tiles show, whole or in part. SAHI also merges what is found in an image that is not cut."""
    detect = dataclasses.replace(TILES, tile_merge=merge)
    images = [(image, pixels) for image, pixels in IMAGES if merge == "nms" or max(pixels.shape) > TILES.tiles]
    results = detected_in([image for image, _ in images], detect)
    for (_, pixels), result in zip(images, results, strict=True):
        found = found_in(result)
        assert (result.width, result.height) == pixels.shape[1::-1]
        assert len(found) == len(set(found)) > 20
        assert set(found) == sliced(pixels, tool, detect)
        assert (np.diff(result.detections.confidences) <= 0).all()


@pytest.mark.parametrize(
    "settings",
    [{"batch_sizes": (1,)}, {"batch_sizes": (8,)}, {"feeder_processes": 1, "concurrent_batches": 1}, {"memory_mb": 3000}],
    ids=str,
)
def test_batches_and_portions_change_no_box(settings):
    images = [image for image, _ in IMAGES]
    wanted = [found_in(result) for result in detected_in(images)]
    assert [found_in(result) for result in detected_in(images, dataclasses.replace(TILES, **settings))] == wanted


def test_an_image_that_is_not_cut_has_the_row_that_it_has_without_tiles():
    images = [blob_image(str(seed), (128, 100), 20, seed)[0] for seed in range(6)]
    alike = [[found_in(result) for result in detected_in(images, dataclasses.replace(TILES, tiles=n))] for n in (None, 64, 500)]
    assert alike[0] == alike[1] == alike[2]


def test_boxes_are_those_of_the_upright_image():
    """Of a JPEG that a camera stored on its side."""
    upright = blob_image("a", (700, 500), 40, 3)[1]
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.rot90(upright)).save(file, "JPEG", quality=100, subsampling=0, exif=exif)
    (turned,) = detected_in([EncodedImage(ImageRef("a.jpg"), file.getvalue())])
    pixels = np.rot90(
        cv2.imdecode(np.frombuffer(file.getvalue(), np.uint8), cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION), -1
    )
    assert (turned.width, turned.height) == (700, 500)
    assert set(found_in(turned)) == sliced(np.ascontiguousarray(pixels)) != set()


def test_a_tile_on_which_the_model_fails_is_one_dead_letter_of_its_image():
    """Never half a row; images before and after it are found."""
    unlucky = IMAGES[0][1].copy()
    unlucky[300, 650] = UNLUCKY
    results = detected_in([IMAGES[0][0], png("unlucky", unlucky), IMAGES[1][0], EncodedImage(ImageRef("b"), b"text")], samples=9)
    dead = [(result.ref.uri, result.reason, bool(result.thumbnail)) for result in results if isinstance(result, DeadLetter)]
    assert dead == [("unlucky", "model_failed", True), ("b", "not_an_image", False)]
    assert [set(found_in(results[n])) for n in (0, 2)] == [sliced(IMAGES[n][1]) for n in (0, 1)]


def test_the_whole_image_finds_what_no_tile_shows_whole():
    pixels = np.zeros((600, 600, 3), np.uint8)
    pixels[100:500, 150:450, 0] = 255
    (cut,), (whole,) = (
        detected_in([png("a", pixels)], dataclasses.replace(TILES, tile_whole=tile_whole)) for tile_whole in (False, True)
    )
    boxes = [result.detections.boxes_xyxy for result in (cut, whole)]
    fits = [(np.abs(each - [150, 100, 450, 500]).max(-1) < 600 / HW[1]).any() for each in boxes]
    assert fits == [False, True]


def test_a_version_with_another_input_takes_the_images_that_wait_for_it():
    def small_model(detect):
        loaded = blob_model(detect)
        return dataclasses.replace(loaded, metadata=dataclasses.replace(loaded.metadata, letterbox_value=1), version="2")

    with contextlib.closing(load_detector(blob_model, TILES)) as detector:
        detector.in_use.unload()
        started = [detector.start([image]) for image, _ in IMAGES]
        detector.in_use.swap(small_model(TILES))
        results = [one for future in started for one in future.result()]
    assert {result.model_version for result in results} == {"2"}
    assert [set(found_in(result)) for result in results] == [sliced(pixels) for _, pixels in IMAGES]


def test_statistics_count_each_batch_once():
    """An image in tiles leads several."""
    results = detected_in([image for image, _ in IMAGES], dataclasses.replace(TILES, batch_sizes=(4,)))
    stats = JobStats()
    stats.add_detected(results, 0)
    tiles = 7 * 5 + 10 * 2 + 1 + 3
    assert stats.batches.keys() == {4} and tiles <= 4 * stats.batches[4] <= 2 * tiles
    assert len(stats.stages["model"]) == stats.batches[4]
    assert all(timing.latency >= timing.predict > 0 for timing in (result.timing for result in results))


def test_golden_images_show_what_the_model_finds_not_what_tiles_find():
    """Else a job with tiles would refuse versions that are as good as their golden images."""
    image, pixels = blob_image("golden.png", (256, 256), 30, 5, most_side=60)
    (plain,) = detected_in([image], dataclasses.replace(TILES, tiles=None))
    golden = GoldenImage("golden.png", image.content, detection_row(plain) | {"score_threshold": 0.25, "iou_threshold": 0.45})

    def with_golden(detect):
        return dataclasses.replace(blob_model(detect), golden=(golden,))

    (tiled,) = detected_in([image], model=with_golden)
    assert set(found_in(tiled)) == sliced(pixels) != set(found_in(plain))


def test_settings_that_would_do_nothing_are_refused():
    with pytest.raises(ConfigError, match="tile_overlap is for images in tiles; set tiles, too"):
        DetectConfig(tile_overlap=0.3)

    def own_size(detect):
        loaded = blob_model(detect)
        return dataclasses.replace(loaded, metadata=dataclasses.replace(loaded.metadata, resize="none"))

    with pytest.raises(ModelError, match="tile_whole would give it all of a large image"):
        detected_in([], dataclasses.replace(TILES, tile_whole=True), own_size)
