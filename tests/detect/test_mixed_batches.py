"""A model that mixes the images of a batch gets one at a time, and answers for each what TensorFlow answers for it alone."""

import numpy as np
import pytest

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.families import family_of
from pipeline.detect.tensorflow_engine import described_signature
from pipeline.log_lines import log_lines
from tests.tiny_models import detected, png, save_model
from tests.without_keras import tf

HW = (64, 64)
CELLS = 8
NAMES = ("ant", "bee", "cow")
SETTINGS = DetectConfig(batch_sizes=(1, 2, 4), concurrent_batches=2)
CONFIG = {"class_names": NAMES, "box_format": "yxyx", "box_units": "norm", "resize": "stretch", "packed_layout": "M,4+C"}


def save_yolov4(folder, threshold, batch=None):
    """As the TensorFlow YOLOv4 of hunglc007 exports: `core/yolov4.py`, `filter_boxes`, after a small grid instead of its network.

    A cell's score is its brightness; so each image has as many candidates as bright cells.
    """

    def predict(input_1):
        cells = tf.reduce_mean(tf.reshape(input_1, [-1, CELLS, 8, CELLS, 8, 3]), [2, 4])  # (N, 8, 8, 3)
        scores = tf.reshape(cells, [-1, CELLS * CELLS, 3])
        y, x = tf.meshgrid(tf.range(CELLS), tf.range(CELLS), indexing="ij")
        centre = tf.cast(tf.reshape(tf.stack([x, y], -1), [-1, 2]), tf.float32) * 8.0 + 4.0
        box_xywh = tf.tile(tf.concat([centre, tf.fill(tf.shape(centre), 6.0)], -1)[None], [tf.shape(scores)[0], 1, 1])
        scores_max = tf.math.reduce_max(scores, axis=-1)
        mask = scores_max >= threshold
        class_boxes = tf.boolean_mask(box_xywh, mask)
        pred_conf = tf.boolean_mask(scores, mask)
        class_boxes = tf.reshape(class_boxes, [tf.shape(scores)[0], -1, tf.shape(class_boxes)[-1]])
        pred_conf = tf.reshape(pred_conf, [tf.shape(scores)[0], -1, tf.shape(pred_conf)[-1]])
        box_xy, box_wh = tf.split(class_boxes, (2, 2), axis=-1)
        box_yx, box_hw = box_xy[..., ::-1], box_wh[..., ::-1]
        input_shape = tf.constant(HW, tf.float32)
        boxes = tf.concat([(box_yx - box_hw / 2.0) / input_shape, (box_yx + box_hw / 2.0) / input_shape], axis=-1)
        return {"tf_concat_18": tf.concat([boxes, pred_conf], axis=-1)}

    return save_model(folder, predict, tf.TensorSpec((batch, *HW, 3), tf.float32, "input_1"))


def picture(seed, bright_cells):
    """Dark, with some bright cells."""
    draw = np.random.default_rng(seed)
    cells = draw.integers(0, 40, (CELLS * CELLS, 3), np.uint8)
    chosen = draw.permutation(CELLS * CELLS)[:bright_cells]
    cells[chosen, draw.integers(0, 3, bright_cells)] = draw.permutation(range(170, 255))[:bright_cells]
    pixels = cells.reshape(CELLS, CELLS, 3).repeat(8, 0).repeat(8, 1)
    return png(f"{seed}.png", pixels), pixels


PICTURES = [picture(seed, bright) for seed, bright in enumerate((3, 5, 0, 7, 2, 6, 1, 4))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("threshold", "config", "batch"),
    [
        pytest.param(0.2, CONFIG, None, id="noise has candidates, fully configured"),
        pytest.param(0.65, {"class_names": NAMES}, None, id="noise has none, with names"),
        pytest.param(0.65, {"class_names": NAMES}, 3, id="a fixed batch"),
    ],
)
@log_lines()
def test_a_yolov4_of_tensorflow_answers_for_each_image_what_it_answers_alone(tmp_path, capfd, threshold, config, batch):
    """In a fixed batch beside copies of itself."""
    folder, size = save_yolov4(tmp_path / "yolov4", threshold, batch), batch or 1
    *_, metadata = described_signature(folder, folder, ModelConfig(path=folder, **config), SETTINGS)
    assert family_of(metadata) == "YOLOv4 of tensorflow-yolov4-tflite"
    results, detector = detected(folder, [image for image, _ in PICTURES], SETTINGS, **config)
    signature = tf.saved_model.load(folder).signatures["serving_default"]
    for (_, pixels), result in zip(PICTURES, results, strict=True):
        rows = signature(input_1=tf.constant(np.stack([pixels] * size) / 255.0, tf.float32))["tf_concat_18"].numpy()[0]
        rows = rows[np.argsort(-rows[:, 4:].max(axis=1))]  # no two boxes overlap: nothing to suppress
        assert result.detections.class_ids.tolist() == rows[:, 4:].argmax(axis=1).tolist()
        np.testing.assert_allclose(result.detections.confidences, rows[:, 4:].max(axis=1), atol=1e-6)
        np.testing.assert_allclose(result.detections.boxes_xyxy, rows[:, [1, 0, 3, 2]] * 64, atol=1e-3)
    assert {len(result.detections) for result in results} == set(range(8))
    said = [line for line in capfd.readouterr().err.splitlines() if "would mix its images" in line]
    assert detector.batch_sizes == (size,) and said == [*detector.model.notes]
    assert folder in said[0] and f"batch size {size}" in said[0]


BOXES = 100
HOT = (np.arange(BOXES) < 5).astype(np.float32)  # the boxes that are sure of a bright image


def sure_of_light(light, relu, mean):
    """How sure the hot boxes are: more if the rest of the batch is darker, and never above the threshold if an image is grey."""
    return 0.15 * light + 0.1 + 1.5 * relu(light - 0.6) + 0.2 * (light - mean)


def save_mixing(path, batch):
    """A model whose scores depend on the mean of the whole batch, as batch normalisation in training mode: a SavedModel."""
    places = np.arange(BOXES, dtype=np.float32)[:, None] / BOXES

    def predict(images):
        light = tf.reduce_mean(images, [1, 2, 3]) / 255.0
        scores = sure_of_light(light, tf.nn.relu, tf.reduce_mean(light))[:, None, None] * HOT[None, :, None]
        boxes = np.concatenate([places, places, places + 0.005, places + 0.005], 1)[None] + 0.0 * light[:, None, None]
        return {"boxes": boxes, "scores": scores}

    return save_model(path, predict, tf.TensorSpec((batch, *HW, 3), tf.float32, "images"))


def write_mixing(path, batch):
    """The same as an ONNX file of Ultralytics' form."""
    onnx = pytest.importorskip("onnx", reason="the extra onnxruntime is not installed")
    helper = onnx.helper
    places = np.linspace(4, 60, BOXES, dtype=np.float32)
    boxes = np.stack([places, places, np.full(BOXES, 0.3), np.full(BOXES, 0.3)])[None]
    constants = {
        "boxes": boxes,
        "hot": HOT[None, None],
        "c15": 0.15,
        "c01": 0.1,
        "c06": 0.6,
        "c150": 1.5,
        "c02": 0.2,
        "none": 0.0,
    }
    initializers = [onnx.numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in constants.items()]
    nodes = [
        helper.make_node(kind, inputs, [output], **more)
        for kind, inputs, output, more in (
            ("ReduceMean", ["images"], "light4", {"axes": [1, 2, 3]}),
            ("Squeeze", ["light4"], "light", {"axes": [3]}),
            ("ReduceMean", ["light"], "mean", {"axes": [0]}),
            ("Sub", ["light", "mean"], "more", {}),
            ("Mul", ["more", "c02"], "of_batch", {}),
            ("Sub", ["light", "c06"], "over", {}),
            ("Relu", ["over"], "bright", {}),
            ("Mul", ["bright", "c150"], "sure", {}),
            ("Mul", ["light", "c15"], "least", {}),
            ("Sum", ["least", "c01", "sure", "of_batch"], "score", {}),
            ("Mul", ["score", "hot"], "scores", {}),
            ("Mul", ["light", "none"], "nothing", {}),
            ("Add", ["boxes", "nothing"], "all_boxes", {}),
            ("Concat", ["all_boxes", "scores"], "output0", {"axis": 1}),
        )
    ]
    images = helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, [batch or "n", 3, *HW])
    answer = helper.make_tensor_value_info("output0", onnx.TensorProto.FLOAT, [batch or "n", 5, BOXES])
    graph = helper.make_graph(nodes, "toy", [images], [answer], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 12)], ir_version=8)
    helper.set_model_props(model, {"names": str({0: "lamp"}), "imgsz": str([*HW]), "task": "detect"})
    onnx.save(model, str(path))
    return str(path)


@pytest.mark.parametrize(
    ("engine", "batch", "compiled"),
    [
        ("tensorflow", None, "no"),
        pytest.param("tensorflow", None, "yes", marks=pytest.mark.matrix),
        ("onnxruntime", None, "no"),
        ("openvino", 4, "no"),
    ],
)
def test_a_model_that_mixes_only_what_no_noise_shows_gets_one_image_at_a_time(tmp_path, engine, batch, compiled):
    """Nothing in noise passes the threshold, so no candidate would tell."""
    pytest.importorskip(engine, reason=f"the extra {engine} is not installed")
    detect = DetectConfig(engine=engine, device="cpu", compiled=compiled, batch_sizes=(1, 2, 4))
    if engine == "tensorflow":
        model, config = save_mixing(tmp_path / "m", batch), {"class_names": ("lamp",), "nms": "pipeline", "value_range": (0, 255)}
    else:
        model, config = write_mixing(tmp_path / "m.onnx", batch), {}
    bright, dark, grey = (png(f"{light}.png", np.full((*HW, 3), light, np.uint8)) for light in (240, 10, 128))
    (alone, none), detector = detected(model, [bright, grey], detect, **config)
    beside, _ = detected(model, [bright, dark, dark, dark], detect, **config)
    assert len(alone.detections) == 5 and not len(none.detections)
    np.testing.assert_allclose(beside[0].detections.confidences, alone.detections.confidences, atol=1e-6)
    size = batch or 1
    (note,) = detector.model.notes
    assert f"mixes the images of a batch: it gets one image at a time (batch size {size})" in note
    assert detector.batch_sizes == (size,)
