"""An exported detector answers as the NumPy reference does, through each of its signatures, wherever it is loaded."""

import dataclasses
import os
from pathlib import Path

import cv2
import numpy as np
import pytest

from models.export import export_detector, written_whole
from models.geometry import fit_image, nms, resize_plan
from models.metadata import DetectorMetadata, read_metadata
from tests.models.box_formats import to_original

tf = pytest.importorskip("tensorflow")

INPUT_HW = (64, 96)
CLASSES = ("red", "green", "blue")
CANDIDATES = 300


def metadata(resize="stretch"):
    return DetectorMetadata(name="colours", input_hw=INPUT_HW, resize=resize, class_names=CLASSES)


def random_candidates(seed=7):
    rng = np.random.default_rng(seed)
    corners = rng.uniform(-0.1, 0.9, (CANDIDATES, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(0.05, 0.6, (CANDIDATES, 2))], axis=1).astype(np.float32)
    return boxes, rng.uniform(0, 1, (CANDIDATES, len(CLASSES))).astype(np.float32)


def export_colours(output_dir, resize="stretch"):
    """A detector with fixed candidate boxes; red, green and blue of the middle, in quarters, weigh the scores of the classes."""
    boxes, scores = (tf.Variable(values) for values in random_candidates())

    def predict(images):
        weights = tf.round(images[:, INPUT_HW[0] // 2, INPUT_HW[1] // 2] * 4) / 4
        return tf.tile(boxes[None], [tf.shape(images)[0], 1, 1]), scores[None] * weights[:, None]

    export_detector(predict, metadata(resize), str(output_dir), variables=[boxes, scores])


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory):
    """A detector for each way to resize."""
    folders = {resize: tmp_path_factory.mktemp(resize) / "1" for resize in ("stretch", "letterbox")}
    for resize, folder in folders.items():
        export_colours(folder, resize)
    return folders


@pytest.fixture(scope="module")
def colours(model_dirs):
    return tf.saved_model.load(str(model_dirs["stretch"]))


def expected_detections(image, score_threshold, iou_threshold, max_detections):
    boxes, scores = random_candidates()
    scores = scores * (np.round(image[INPUT_HW[0] // 2, INPUT_HW[1] // 2] / 255 * 4) / 4).astype(np.float32)
    confidences, class_ids = scores.max(axis=1), scores.argmax(axis=1)
    above = np.flatnonzero(confidences > score_threshold)
    stays = above[nms(boxes[above], confidences[above], class_ids[above], iou_threshold)]
    kept = stays[np.argsort(-confidences[stays], kind="stable")][:max_detections]
    return boxes[kept], confidences[kept], class_ids[kept]


def assert_detections(found, index, expected, max_detections, atol=1e-4):
    boxes, confidences, class_ids = expected
    count = int(found["num_detections"][index])
    assert count == len(boxes)
    np.testing.assert_allclose(found["boxes"][index, :count], boxes, rtol=1e-4, atol=atol)
    np.testing.assert_allclose(found["scores"][index, :count], confidences, rtol=1e-5)
    assert found["classes"][index, :count].tolist() == class_ids.tolist()
    assert found["boxes"].shape[1:] == (max_detections, 4) and found["classes"].dtype == np.int32
    assert not found["boxes"][index, count:].any() and not found["scores"][index, count:].any()


def run(signature, **inputs):
    return {name: value.numpy() for name, value in signature(**{k: tf.constant(v) for k, v in inputs.items()}).items()}


def thresholds(score, iou, most):
    return {"score_threshold": np.float32(score), "iou_threshold": np.float32(iou), "max_detections": np.int32(most)}


BATCH = np.stack([np.full((*INPUT_HW, 3), colour, np.uint8) for colour in ((255, 40, 0), (0, 0, 0), (10, 200, 220))])


@pytest.mark.parametrize(
    ("score_threshold", "iou_threshold", "max_detections"),
    [(0.25, 0.45, 100), (0.001, 0.45, 300), (0.5, 0.2, 20), (0.25, 0.9, 5), (1.0, 0.45, 7)],
)
def test_detect_agrees_with_the_numpy_reference_at_every_setting(colours, score_threshold, iou_threshold, max_detections):
    settings = thresholds(score_threshold, iou_threshold, max_detections)
    found = run(colours.signatures["detect"], images=BATCH, **settings)
    for index, image in enumerate(BATCH):
        assert_detections(found, index, expected_detections(image, *settings.values()), max_detections)


def test_thresholds_have_their_defaults_where_none_is_given(colours, model_dirs):
    found = run(colours.detect, images=BATCH)
    assert_detections(found, 0, expected_detections(BATCH[0], 0.25, 0.45, 100), 100)
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        signature = tf.compat.v1.saved_model.loader.load(session, ["serve"], str(model_dirs["stretch"])).signature_def["detect"]
        outputs = {name: tensor.name for name, tensor in signature.outputs.items()}
        by_session = session.run(outputs, {signature.inputs["images"].name: BATCH})
    for name, value in found.items():
        np.testing.assert_array_equal(by_session[name], value)
    assert signature.defaults["max_detections"].int_val == [100]


def photos():
    """Colourful images of several sizes and formats, and their pixels as TensorFlow decodes them."""
    rng = np.random.default_rng(3)
    encoded = []
    for (w, h), suffix in (((130, 70), ".jpg"), ((50, 90), ".png"), ((333, 222), ".bmp"), ((96, 64), ".jpg")):
        small = rng.integers(100, 256, (3, 4, 3), np.uint8)
        encoded.append(cv2.imencode(suffix, cv2.resize(small, (w, h), interpolation=cv2.INTER_CUBIC))[1].tobytes())
    return encoded, [tf.io.decode_image(content, channels=3).numpy() for content in encoded]


@pytest.mark.parametrize("resize", ["stretch", "letterbox"])
def test_serving_default_takes_encoded_images_and_answers_in_their_pixels(model_dirs, resize):
    encoded, decoded = photos()
    loaded = tf.saved_model.load(str(model_dirs[resize]))
    found = run(loaded.signatures["serving_default"], image_bytes=encoded)
    lower = run(loaded.signatures["serving_thresholds"], image_bytes=encoded, **thresholds(0.1, 0.45, 50))
    for index, pixels in enumerate(decoded):
        transform = resize_plan(pixels.shape[1::-1], INPUT_HW, resize)
        fitted = fit_image(pixels, transform, INPUT_HW)
        for answer, score_threshold, max_detections in ((found, 0.25, 100), (lower, 0.1, 50)):
            boxes, *others = expected_detections(fitted, score_threshold, 0.45, max_detections)
            assert len(boxes) > 5
            original = to_original(boxes * np.array([INPUT_HW[1], INPUT_HW[0]] * 2), transform)
            assert_detections(answer, index, (original, *others), max_detections, atol=1e-3)


@pytest.mark.slow
def test_tfx_bsl_runs_it_on_encoded_images(colours, model_dirs):
    import apache_beam as beam
    from apache_beam.testing.util import assert_that, equal_to
    from tfx_bsl.public.beam import RunInference
    from tfx_bsl.public.proto import model_spec_pb2

    encoded, _ = photos()
    spec = model_spec_pb2.InferenceSpecType(saved_model_spec=model_spec_pb2.SavedModelSpec(model_path=str(model_dirs["stretch"])))
    counts = run(colours.signatures["serving_default"], image_bytes=encoded)["num_detections"].tolist()

    def count(keyed_log):
        key, log = keyed_log
        outputs = log.predict_log.response.outputs
        assert set(outputs) == {"boxes", "scores", "classes", "num_detections"}
        return key, int(tf.make_ndarray(outputs["num_detections"])[0])

    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        keyed = beam.Create(list(zip("abcd", encoded, strict=True))).with_output_types(tuple[str, bytes])
        assert_that(pipeline | keyed | RunInference(spec) | beam.Map(count), equal_to([*zip("abcd", counts, strict=True)]))


@pytest.mark.slow
def test_metadata_and_warm_up_request_lie_beside_the_model(colours, model_dirs):
    from tensorflow_serving.apis import prediction_log_pb2

    assert read_metadata(str(model_dirs["stretch"])) == metadata()
    records = list(
        tf.data.TFRecordDataset(str(model_dirs["stretch"] / "assets.extra" / "tf_serving_warmup_requests")).as_numpy_iterator()
    )
    log = prediction_log_pb2.PredictionLog.FromString(records[0])
    request = log.predict_log.request
    assert (len(records), request.model_spec.name, request.model_spec.signature_name) == (1, "colours", "serving_default")
    found = run(colours.signatures["serving_default"], image_bytes=list(tf.make_ndarray(request.inputs["image_bytes"])))
    assert found["num_detections"].shape == (1,)


def test_an_existing_output_is_left_alone(model_dirs):
    colours_dir = model_dirs["stretch"]
    before = sorted(path for path in colours_dir.rglob("*"))
    with pytest.raises(FileExistsError, match="exists already; remove it, or choose the next version number"):
        export_colours(colours_dir)
    with pytest.raises(OSError, match="Not a directory"):
        export_colours(colours_dir / "saved_model.pb" / "1")
    assert sorted(colours_dir.rglob("*")) == before
    with pytest.raises(OSError, match="expected a local directory"):
        export_colours("gs://bucket/yolo/1")


def test_of_two_that_write_one_version_the_first_one_counts(tmp_path):
    with pytest.raises(FileExistsError, match="m/1 exists already; remove it"), written_whole(f"{tmp_path}/m/1") as second:
        os.mkdir(second)
        with written_whole(f"{tmp_path}/m/1") as first:
            os.mkdir(first)
            Path(first, "saved_model.pb").write_text("first")
    assert (tmp_path / "m" / "1" / "saved_model.pb").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["m"], "no part of the second one is left"


@pytest.mark.parametrize(
    ("classes", "changed", "message"),
    [
        (2, {}, "the network answers 2 classes, the metadata names 3"),
        (3, {"box_format": "yxyx"}, "an exported detector is described by"),
    ],
)
def test_a_network_that_its_metadata_does_not_fit_is_refused_and_nothing_is_left_behind(tmp_path, classes, changed, message):
    def predict(images):
        return tf.zeros((1, 1, 4)), tf.zeros((1, 1, classes))

    with pytest.raises(ValueError, match=message):
        export_detector(predict, dataclasses.replace(metadata(), **changed), str(tmp_path / "models" / "broken" / "1"))
    assert list(tmp_path.iterdir()) == []
